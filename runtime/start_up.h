#pragma once
// Setting what persists on a rank takes long where that is much: what it asks
// and tells meanwhile.

#include <atomic>
#include <functional>

#include "planner/base/result.h"
#include "planner/base/units.h"

namespace tessera {

class RankExecutor;

struct StartUp {
  const std::atomic<bool>* stop = nullptr;
  std::function<void(Bytes done, Bytes total)> progress;
  Bytes done;
  Bytes total;

  // `bytes` more are set. kInterrupted once `stop` is true.
  Result<void> Advance(Bytes bytes);
};

// What persists on this rank, on whatever tier.
Bytes PersistentBytes(const RankExecutor& executor);

}  // namespace tessera
