#pragma once
// FileTier: a rank's file for what has no room in memory.
//
// The file has no name: it is gone when the rank ends, however it ends. Where
// the file system takes it, I/O is direct (open(2), O_DIRECT): straight between
// the caller's buffers and the device, past the page cache. Elsewhere (tmpfs)
// it is buffered. Where the kernel has io_uring (and permits it), a call keeps
// up to kDepth requests in flight; elsewhere it makes them one by one with
// pread and pwrite. Reads and writes may run beside each other.
//
// The file has its full length from the beginning, and where the file system
// can reserve space (fallocate(2)) a full storage is an error then. Elsewhere
// what is free must suffice then, and who takes it afterwards makes a write
// fail. Who keeps what where is the caller's affair
// (planner/lower/file_layout.h).
//
// Errors name the file's folder, the offset and the bytes: kUnavailable.

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "planner/base/result.h"
#include "planner/base/units.h"
#include "planner/plan/memory_tier.h"

namespace tessera {

class IoRing;

struct FileTierOptions {
  std::string directory = ".";
  bool nameless = true;  // O_TMPFILE, where the file system takes it; elsewhere
                         // the name is deleted at once
  bool direct = true;    // where the file system takes it
  bool ring = true;      // where the kernel has it
};

// What a user without privileges may still take of the storage that a folder
// lies on. Where the system does not say, the most that there can be.
Bytes FreeBytesOf(const std::string& directory);

// Whether hosts that have a folder of one name may all have the same storage
// there, as with NFS, Lustre and their like: by the type of its file system
// (statfs(2)). Those of FUSE are not among them: many are of one host.
bool IsOnNetwork(const std::string& directory);
bool IsOfNetwork(int64_t file_system);

class FileTier {
 public:
  static constexpr int kDepth = 16;
  // A request's most bytes: enough for the bandwidth of an SSD, and several
  // make up one tensor.
  static constexpr int64_t kRequestBytes = int64_t{1} << 20;

  // A file of `length` bytes, of unknown contents.
  static Result<std::unique_ptr<FileTier>> Open(const FileTierOptions& options,
                                                Bytes length);
  FileTier(const FileTier&) = delete;
  FileTier& operator=(const FileTier&) = delete;
  ~FileTier();

  // `offset` and `data` are multiples of kFileBlockBytes, and both the file and
  // the caller's memory go on to the end of the last block of `bytes`.
  struct Transfer {
    int64_t offset = 0;
    void* data = nullptr;
    int64_t bytes = 0;
  };
  // All of them, in any order.
  Result<void> Read(std::span<const Transfer> transfers);
  Result<void> Write(std::span<const Transfer> transfers);

  // Of buffered I/O: waits until all that was written is on the storage, and
  // has the system keep none of it in memory.
  Result<void> DropCached();

  Bytes length() const { return length_; }
  bool direct() const { return direct_; }
  bool has_ring() const { return read_ring_ != nullptr; }

 private:
  FileTier(int fd, bool direct, std::string directory, Bytes length);
  Result<void> Reserve();
  Result<void> Run(std::span<const Transfer> transfers, bool write);
  Error Failed(bool write, const Transfer& transfer, int code) const;

  const int fd_;
  const bool direct_;
  const std::string directory_;
  const Bytes length_;
  std::unique_ptr<IoRing> read_ring_;  // both or none
  std::unique_ptr<IoRing> write_ring_;
  std::mutex read_mutex_;
  std::mutex write_mutex_;
};

}  // namespace tessera
