#pragma once
// The store's server, which rank 0 has.

#include <memory>
#include <string>

#include "planner/base/file_descriptor.h"
#include "planner/base/result.h"

namespace tessera {

// Serves on a thread of its own. Destroyed, it waits as ~Store says.
class StoreServer {
 public:
  // `listener`: a socket that listens. `size`: the number of the job's ranks.
  // kUnavailable: no file descriptor, or no thread, is left for it.
  static Result<std::unique_ptr<StoreServer>> Start(FileDescriptor listener,
                                                    std::string job_id,
                                                    int size);
  virtual ~StoreServer() = default;
};

}  // namespace tessera
