#pragma once
// A thread of its own, or the error of a system that has none left.

#include <system_error>
#include <thread>
#include <utility>

#include "planner/base/result.h"

namespace tessera {

// Calls `work` on a thread of its own, which is to be joined.
template <typename Work>
Result<std::thread> StartThread(Work work) {
  try {
    return std::thread(std::move(work));
  } catch (const std::system_error& error) {
    return Error{ErrorCode::kUnavailable,
                 "cannot start a thread: " + error.code().message(), ""};
  }
}

}  // namespace tessera
