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
    : bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

MappedFile::~MappedFile() {
  if (bytes_.empty()) return;
  ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

Result<MappedFile> MappedFile::Open(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return SystemError("cannot open", path, errno);
  struct stat status = {};
  const bool regular = ::fstat(file, &status) == 0 && S_ISREG(status.st_mode);
  MappedFile opened;
  int map_error = 0;
  if (regular && status.st_size > 0) {
    const auto size = static_cast<size_t>(status.st_size);
    void* mapping = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
    if (mapping == MAP_FAILED) {
      map_error = errno;
    } else {
      opened.bytes_ = {static_cast<const std::byte*>(mapping), size};
    }
  }
  ::close(file);
  if (!regular) return InvalidInput("not a regular file", path);
  if (map_error != 0) return SystemError("cannot map", path, map_error);
  return opened;
}

}  // namespace tessera
