#pragma once
// Whole files, read at once and written so that no reader ever sees half of
// one. Thread-safe, but for one AtomicFile.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "planner/base/file_descriptor.h"
#include "planner/base/result.h"

namespace tessera {

// The bytes of the file at `path`. kNotFound when there is none,
// kUnavailable when it cannot be read; `where` is the path.
Result<std::string> ReadFile(const std::string& path);

// Whether it can be read again: not a pipe or a device.
bool IsRegularFile(const std::string& path);

// The directory that the file at `path` is in.
std::string DirectoryOf(const std::string& path);

// Brings the names in that directory to the disk, where its file system does
// so.
void SyncDirectoryOf(const std::string& path);

// Takes the byte order mark that editors put in front of UTF-8 away.
void DropByteOrderMark(std::string& text);

// The file that `path` names once the symbolic links at its end are followed,
// whether or not it exists; `path` itself where that is no regular file.
std::string ResolveLinks(const std::string& path);

// A file that takes the place of the one at `path` once it is whole: it is
// written beside that, on its file system, and renamed over it when all is on
// the disk. Destroyed before that, it is removed, and `path` is as it was; what
// a process that was killed has left ("PATH.tmp.HOST.PID.N") is removed by the
// next that writes the same file on a host of that name. Symbolic links are
// followed, and a file that is replaced keeps its mode; what is not a regular
// file (a terminal, a pipe) cannot be replaced and is written in place.
//
// Errors name `path`: kNotFound for a missing directory, else kUnavailable, or
// kInvalidInput for a path that cannot be a file's.
class AtomicFile {
 public:
  static Result<AtomicFile> Create(const std::string& path);
  AtomicFile(AtomicFile&& other) noexcept;
  AtomicFile& operator=(AtomicFile&&) = delete;
  ~AtomicFile();

  // Of so many bytes at a time the disk is given what was written, and has it
  // before it is given the next but one. So what Flush waits for is little,
  // however long the file is: at 100 MB/s less than 2 s. (As small a piece is
  // a choice.)
  static constexpr int64_t kWriteBackBytes = int64_t{64} << 20;

  // What follows in the file.
  Result<void> Write(std::span<const std::byte> bytes);
  // REQUIRES (these): nothing before has failed.
  // All of it is on the disk on return; only what puts it in place may follow.
  Result<void> Flush();
  // Flushes what was not, and puts it in place.
  Result<void> Commit();
  // The same where nothing may be replaced: kInvalidInput where there is a file
  // by now, which stays.
  Result<void> CommitNew();

 private:
  AtomicFile() = default;
  Result<void> Commit(bool replaces);
  Result<void> WriteBackWhole();

  std::string path_;    // for errors
  std::string target_;  // that it leads to
  std::string beside_;  // empty: written in place, or renamed
  FileDescriptor file_;
  int64_t bytes_ = 0;         // written to it
  int64_t written_back_ = 0;  // of these, which the disk has been given
  bool flushed_ = false;
};

// Makes `bytes` the contents of the file at `path`, as an AtomicFile.
Result<void> WriteFileAtomically(const std::string& path,
                                 std::string_view bytes);

}  // namespace tessera
