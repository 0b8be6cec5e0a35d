#include "runtime/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <utility>

#include "planner/base/file_descriptor.h"
#include "planner/base/system_error.h"

namespace tessera {

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      device_(other.device_),
      inode_(other.inode_),
      bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(device_, other.device_);
  std::swap(inode_, other.inode_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

MappedFile::~MappedFile() {
  if (bytes_.empty()) return;
  ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

Result<MappedFile> MappedFile::Open(const std::string& path) {
  // A pipe without a writer would be waited for.
  const FileDescriptor file(
      ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  if (!file.is_open()) return SystemError("cannot open", path, errno);
  struct stat status = {};
  const bool is_regular =
      ::fstat(file.get(), &status) == 0 && S_ISREG(status.st_mode);
  const auto size = static_cast<size_t>(status.st_size);
  void* mapping = nullptr;
  if (is_regular && size > 0) {
    mapping = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  }
  if (!is_regular) return InvalidInput("not a regular file", path);
  if (mapping == MAP_FAILED) return SystemError("cannot map", path, errno);
  MappedFile opened;
  opened.path_ = path;
  opened.device_ = status.st_dev;
  opened.inode_ = status.st_ino;
  if (mapping != nullptr) {
    opened.bytes_ = {static_cast<const std::byte*>(mapping), size};
  }
  return opened;
}

Result<void> MappedFile::CheckWhole() const {
  struct stat status = {};
  // Of a file that was replaced or removed the mapping has the old one, whole.
  if (::stat(path_.c_str(), &status) != 0 || status.st_dev != device_ ||
      status.st_ino != inode_ || status.st_size >= std::ssize(bytes_)) {
    return {};
  }
  return Error{ErrorCode::kUnavailable,
               "has become shorter while it was read: " +
                   std::to_string(status.st_size) + " bytes of " +
                   std::to_string(bytes_.size()),
               path_};
}

}  // namespace tessera
