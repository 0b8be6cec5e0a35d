#include "runtime/checkpoint_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "planner/base/file.h"

namespace tessera {
namespace {

// Of holders that end just then; more are a file system without such locks.
constexpr int kMostTries = 100;

// Whether `name` still names the open file.
bool IsNamed(const FileDescriptor& file, const std::string& name) {
  struct stat open = {};
  struct stat named = {};
  return ::fstat(file.get(), &open) == 0 && ::stat(name.c_str(), &named) == 0 &&
         open.st_dev == named.st_dev && open.st_ino == named.st_ino;
}

}  // namespace

std::string CheckpointLockName(const std::string& path) {
  return ResolveLinks(path) + ".lock";
}

Result<CheckpointLock> CheckpointLock::Take(const std::string& path) {
  CheckpointLock lock;
  lock.name_ = CheckpointLockName(path);
  for (int tries = 0; tries < kMostTries; ++tries) {
    // On NFS such a lock is one of who may write.
    FileDescriptor file(::open(
        lock.name_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666));
    if (!file.is_open()) return lock;
    if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK) return lock;
      return InvalidInput(
          "another process writes it (and has locked '" + lock.name_ + "')",
          path);
    }
    // Else its holder has removed it meanwhile, and the next one makes another.
    if (!IsNamed(file, lock.name_)) continue;
    lock.file_ = std::move(file);
    return lock;
  }
  return lock;
}

CheckpointLock::~CheckpointLock() {
  // Who has removed the name has made way for another holder.
  if (!file_.is_open() || !IsNamed(file_, name_)) return;
  // What has something in it is somebody else's file.
  struct stat status = {};
  if (::fstat(file_.get(), &status) == 0 && status.st_size == 0) {
    ::unlink(name_.c_str());
  }
}

}  // namespace tessera
