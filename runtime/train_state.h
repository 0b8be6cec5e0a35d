#pragma once
// What a rank starts from: weights and optimizer state.

#include "planner/base/result.h"
#include "runtime/executor.h"
#include "runtime/start_up.h"

namespace tessera {

// Sets every persistent value of this rank: weights by their initializers and
// `seed`, the same values under every plan, those of 16 bits rounded from the
// fp32 values of their masters; everything else zero. Draws on the threads of
// the rank's device and keeps at most 12 MiB besides: 8 MiB of what is drawn,
// and that in 16 bits. Fails where a file does,
// or when it is interrupted.
Result<void> InitialiseState(const Graph& graph, uint64_t seed,
                             RankExecutor& executor, StartUp start = {});

}  // namespace tessera
