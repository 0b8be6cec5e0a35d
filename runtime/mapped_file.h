#pragma once
// A file mapped into memory, to be read: only what is touched is loaded.

#include <sys/types.h>

#include <cstddef>
#include <span>
#include <string>

#include "planner/base/result.h"

namespace tessera {

// Owns the mapping. Immutable; const functions may be called from several
// threads. Where the file itself is cut meanwhile, who reads what it has lost
// is killed (SIGBUS); so CheckWhole comes before each piece of work on it.
class MappedFile {
 public:
  // kNotFound for a missing file; kInvalidInput for what is no regular one.
  // `path` is in errors.
  static Result<MappedFile> Open(const std::string& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  // Valid as long as this, also once it is moved.
  std::span<const std::byte> bytes() const { return bytes_; }
  // kUnavailable where the file has become shorter than it was. That it is cut
  // between this and the reading is not seen.
  Result<void> CheckWhole() const;

 private:
  MappedFile() = default;

  std::string path_;
  dev_t device_ = 0;  // of the file, as is `inode_`
  ino_t inode_ = 0;
  std::span<const std::byte> bytes_;
};

}  // namespace tessera
