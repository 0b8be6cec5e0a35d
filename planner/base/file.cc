#include "planner/base/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdlib>

#include "planner/base/system_error.h"

namespace tessera {
namespace {

// An open file descriptor, closed on the way out.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() { Close(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  // False when the system reports a late write error.
  bool Close() {
    const int fd = fd_;
    fd_ = -1;
    return fd < 0 || ::close(fd) == 0;
  }

 private:
  int fd_;
};

// False with errno set.
bool WriteAll(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written < 0) {
      if (errno == EINTR) continue;
      return false;
    }
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

// The file that `path` names once symbolic links are followed; `path` itself
// where nothing exists yet.
std::string ResolveLinks(const std::string& path) {
  char* resolved = ::realpath(path.c_str(), nullptr);
  if (resolved == nullptr) return path;
  std::string result = resolved;
  std::free(resolved);
  return result;
}

std::string DirectoryOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

Result<void> WriteInPlace(const std::string& path, std::string_view bytes) {
  Descriptor file(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  if (!file.is_open()) return SystemError("cannot open", path, errno);
  if (!WriteAll(file.get(), bytes)) {
    return SystemError("cannot write", path, errno);
  }
  return {};
}

// Creates the file `path`, which must not exist, with `bytes`, on the disk.
Result<void> WriteNew(const std::string& path, mode_t mode,
                      std::string_view bytes) {
  Descriptor file(
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode));
  if (!file.is_open()) return SystemError("cannot create", path, errno);
  if (!WriteAll(file.get(), bytes) || ::fsync(file.get()) != 0 ||
      !file.Close()) {
    const int error = errno;
    ::unlink(path.c_str());
    return SystemError("cannot write", path, error);
  }
  return {};
}

}  // namespace

Result<std::string> ReadFile(const std::string& path) {
  Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.is_open()) return SystemError("cannot open", path, errno);
  struct stat status;
  if (::fstat(file.get(), &status) == 0 && S_ISCHR(status.st_mode)) {
    return InvalidInput("is a device, without an end", path);
  }
  std::string bytes;
  char buffer[1 << 16];
  for (;;) {
    const ssize_t count = ::read(file.get(), buffer, sizeof(buffer));
    if (count == 0) return bytes;
    if (count < 0) {
      if (errno == EINTR) continue;
      return SystemError("cannot read", path, errno);
    }
    bytes.append(buffer, static_cast<size_t>(count));
  }
}

bool IsRegularFile(const std::string& path) {
  struct stat status;
  return ::stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode);
}

void DropByteOrderMark(std::string& text) {
  if (text.starts_with("\xef\xbb\xbf")) text.erase(0, 3);
}

Result<void> WriteFileAtomically(const std::string& path,
                                 std::string_view bytes) {
  const std::string target = ResolveLinks(path);
  struct stat status;
  const bool exists = ::stat(target.c_str(), &status) == 0;
  if (exists && S_ISDIR(status.st_mode)) {
    return SystemError("cannot write", path, EISDIR);
  }
  if (exists && !S_ISREG(status.st_mode)) return WriteInPlace(target, bytes);

  // Process id and counter, so that neither threads nor processes collide.
  static std::atomic<int> counter = 0;
  const std::string beside = target + ".tmp." + std::to_string(::getpid()) +
                             "." + std::to_string(counter++);
  const mode_t mode = exists ? status.st_mode & 0777 : 0666;
  if (auto written = WriteNew(beside, mode, bytes); !written) {
    Error error = written.error();
    error.where = path;
    return error;
  }
  if (::rename(beside.c_str(), target.c_str()) != 0) {
    const int error = errno;
    ::unlink(beside.c_str());
    return SystemError("cannot replace", path, error);
  }
  // The new name is in the directory: flush that too. Some file systems do
  // not sync directories; the file itself is whole either way.
  Descriptor directory(
      ::open(DirectoryOf(target).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory.is_open()) ::fsync(directory.get());
  return {};
}

}  // namespace tessera
