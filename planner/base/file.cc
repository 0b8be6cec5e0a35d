#include "planner/base/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "planner/base/leftovers.h"
#include "planner/base/system_error.h"

namespace tessera {
namespace {

// Removes what was left beside `path`.
void RemoveLeftovers(const std::string& path) {
  const std::string name = std::filesystem::path(path).filename();
  const auto is_its = [&](std::string_view of) { return of == name; };
  for (const Leftover& leftover : LeftoversIn(DirectoryOf(path), is_its)) {
    ::unlink(leftover.path.c_str());
  }
}

// 0, or an errno.
int Rename(const std::string& from, const std::string& to) {
  return ::rename(from.c_str(), to.c_str()) == 0 ? 0 : errno;
}

// The same, with EEXIST where there is a file at `to`.
int RenameToNew(const std::string& from, const std::string& to) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(),
                  RENAME_NOREPLACE) == 0) {
    return 0;
  }
  // Of file systems that cannot (NFS) some have links.
  if (errno != EINVAL && errno != ENOSYS) return errno;
  if (::link(from.c_str(), to.c_str()) == 0) {
    ::unlink(from.c_str());
    return 0;
  }
  if (errno == EEXIST) return errno;
  // Others have neither: the name is taken first.
  const FileDescriptor taken(
      ::open(to.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600));
  return taken.is_open() ? Rename(from, to) : errno;
}

// Begins to write a part of a file to the disk; or with `wait` ends that.
Result<void> WriteBack(int file, int64_t begin, int64_t bytes, bool wait,
                       const std::string& path) {
  const unsigned flags = wait ? SYNC_FILE_RANGE_WAIT_BEFORE |
                                    SYNC_FILE_RANGE_WRITE |
                                    SYNC_FILE_RANGE_WAIT_AFTER
                              : SYNC_FILE_RANGE_WRITE;
  if (::sync_file_range(file, begin, bytes, flags) == 0) return {};
  // What failed here no fsync tells of again. Not every file system can do it.
  if (errno != EIO && errno != ENOSPC && errno != EDQUOT) return {};
  return SystemError("cannot write", path, errno);
}

}  // namespace

std::string DirectoryOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

void SyncDirectoryOf(const std::string& path) {
  const FileDescriptor directory(
      ::open(DirectoryOf(path).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory.is_open()) ::fsync(directory.get());
}

Result<std::string> ReadFile(const std::string& path) {
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
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

std::string ResolveLinks(const std::string& path) {
  // Links to what is open (/dev/stdout) name no file that could be opened where
  // that is a pipe.
  struct stat status;
  if (::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    return path;
  }
  std::filesystem::path file = path;
  // As many as Linux follows (path_resolution(7)).
  for (int links = 0; links < 40; ++links) {
    std::error_code code;
    const auto to = std::filesystem::read_symlink(file, code);
    if (code) break;
    file = file.parent_path() / to;
  }
  return file;
}

Result<AtomicFile> AtomicFile::Create(const std::string& path) {
  AtomicFile created;
  created.path_ = path;
  created.target_ = ResolveLinks(path);
  struct stat status;
  const bool exists = ::stat(created.target_.c_str(), &status) == 0;
  if (exists && S_ISDIR(status.st_mode)) {
    return SystemError("cannot write", path, EISDIR);
  }
  if (exists && !S_ISREG(status.st_mode)) {
    created.file_ =
        FileDescriptor(::open(created.target_.c_str(), O_WRONLY | O_CLOEXEC));
    if (!created.file_.is_open())
      return SystemError("cannot open", path, errno);
    return created;
  }
  RemoveLeftovers(created.target_);
  // Host, process id and counter, so that neither threads nor processes
  // collide.
  static std::atomic<int> counter = 0;
  const std::string beside = PrefixBeside(created.target_) +
                             std::to_string(::getpid()) + "." +
                             std::to_string(counter++);
  created.file_ = FileDescriptor(
      ::open(beside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!created.file_.is_open()) {
    return SystemError("cannot create", path, errno);
  }
  created.beside_ = beside;
  // Not every file system has locks, or modes.
  (void)::flock(created.file_.get(), LOCK_EX | LOCK_NB);
  if (exists) (void)::fchmod(created.file_.get(), status.st_mode & 0777);
  return created;
}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : path_(std::move(other.path_)),
      target_(std::move(other.target_)),
      beside_(std::exchange(other.beside_, {})),
      file_(std::move(other.file_)),
      bytes_(other.bytes_),
      written_back_(other.written_back_),
      flushed_(other.flushed_) {}

AtomicFile::~AtomicFile() {
  if (beside_.empty()) return;
  // A file that is open when it is removed stays on NFS under another name.
  file_ = FileDescriptor();
  ::unlink(beside_.c_str());
}

Result<void> AtomicFile::Write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const size_t most =
        std::min(bytes.size(), static_cast<size_t>(kWriteBackBytes));
    const ssize_t written = ::write(file_.get(), bytes.data(), most);
    if (written < 0) {
      if (errno == EINTR) continue;
      return SystemError("cannot write", path_, errno);
    }
    bytes = bytes.subspan(static_cast<size_t>(written));
    bytes_ += written;
    TESSERA_RETURN_IF_ERROR(WriteBackWhole());
  }
  return {};
}

Result<void> AtomicFile::WriteBackWhole() {
  if (beside_.empty()) return {};
  for (; bytes_ - written_back_ >= kWriteBackBytes;
       written_back_ += kWriteBackBytes) {
    TESSERA_RETURN_IF_ERROR(WriteBack(file_.get(), written_back_,
                                      kWriteBackBytes, /*wait=*/false, path_));
    if (written_back_ == 0) continue;
    TESSERA_RETURN_IF_ERROR(WriteBack(file_.get(),
                                      written_back_ - kWriteBackBytes,
                                      kWriteBackBytes, /*wait=*/true, path_));
  }
  return {};
}

Result<void> AtomicFile::Commit() {
  return Commit(/*replaces=*/true);
}

Result<void> AtomicFile::CommitNew() {
  return Commit(/*replaces=*/false);
}

Result<void> AtomicFile::Flush() {
  // What is written in place may tell of an error as late as when it is closed.
  // The other file stays open, and so locked, until it is in its place.
  int error = 0;
  if (beside_.empty()) {
    error = ::close(file_.Release()) == 0 ? 0 : errno;
  } else {
    // A second descriptor's close tells of errors, too, and leaves the lock.
    const int copy = ::fcntl(file_.get(), F_DUPFD_CLOEXEC, 0);
    error = ::fsync(file_.get()) == 0 ? 0 : errno;
    if (copy >= 0 && ::close(copy) != 0 && error == 0) error = errno;
  }
  if (error != 0) return SystemError("cannot write", path_, error);
  flushed_ = true;
  return {};
}

Result<void> AtomicFile::Commit(bool replaces) {
  if (!flushed_) TESSERA_RETURN_IF_ERROR(Flush());
  if (beside_.empty()) return {};
  const int error =
      replaces ? Rename(beside_, target_) : RenameToNew(beside_, target_);
  if (error == EEXIST) return InvalidInput("is there already", path_);
  if (error != 0) return SystemError("cannot replace", path_, error);
  beside_.clear();
  // The new name is in the directory: flush that too. Some file systems do
  // not sync directories; the file itself is whole either way.
  SyncDirectoryOf(target_);
  return {};
}

Result<void> WriteFileAtomically(const std::string& path,
                                 std::string_view bytes) {
  TESSERA_TRY(AtomicFile file, AtomicFile::Create(path));
  TESSERA_RETURN_IF_ERROR(file.Write(std::as_bytes(std::span(bytes))));
  return file.Commit();
}

}  // namespace tessera
