#include "runtime/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "planner/base/system_error.h"

namespace tessera {

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      file_(std::exchange(other.file_, -1)),
      bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(file_, other.file_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

MappedFile::~MappedFile() {
  if (file_ >= 0) ::close(file_);
  if (bytes_.empty()) return;
  ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

Result<MappedFile> MappedFile::Open(const std::string& path) {
  MappedFile opened;
  opened.path_ = path;
  // A pipe without a writer would be waited for.
  opened.file_ = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (opened.file_ < 0) return SystemError("cannot open", path, errno);
  struct stat status = {};
  if (::fstat(opened.file_, &status) != 0 || !S_ISREG(status.st_mode)) {
    return InvalidInput("not a regular file", path);
  }
  if (status.st_size == 0) return opened;
  const auto size = static_cast<size_t>(status.st_size);
  void* const mapping =
      ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, opened.file_, 0);
  if (mapping == MAP_FAILED) return SystemError("cannot map", path, errno);
  opened.bytes_ = {static_cast<const std::byte*>(mapping), size};
  return opened;
}

Result<void> MappedFile::CheckWhole() const {
  struct stat status = {};
  if (::fstat(file_, &status) != 0) {
    return SystemError("cannot read", path_, errno);
  }
  if (status.st_size >= std::ssize(bytes_)) return {};
  return Error{ErrorCode::kUnavailable,
               "has become shorter while it was read: " +
                   std::to_string(status.st_size) + " bytes of " +
                   std::to_string(bytes_.size()),
               path_};
}

}  // namespace tessera
