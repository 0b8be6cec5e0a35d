#pragma once
// That one run at a time writes a checkpoint, and what it keeps of those
// before; and its log.

#include <string>

#include "planner/base/file_descriptor.h"
#include "planner/base/result.h"

namespace tessera {

// The empty file "PATH.lock" beside the file that `path` leads to, locked
// (flock(2)) until this is destroyed, which removes it, or its process ends,
// however it does: what is left then locks nobody out.
class CheckpointLock {
 public:
  // kInvalidInput where another process has it. Where there are no such locks
  // (some network file systems), or no such file can be made, it locks nothing.
  static Result<CheckpointLock> Take(const std::string& path);
  CheckpointLock(CheckpointLock&&) noexcept = default;
  CheckpointLock& operator=(CheckpointLock&&) = delete;
  ~CheckpointLock();

 private:
  CheckpointLock() = default;

  std::string name_;     // of the file
  FileDescriptor file_;  // none: nothing is locked
};

// The name of that file.
std::string CheckpointLockName(const std::string& path);

}  // namespace tessera
