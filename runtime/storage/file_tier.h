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
// Space is handed out in extents of whole blocks (kFileBlockBytes), and
// reserved as the file grows: a full storage is an error then, not later.
// Extents that are freed are used again by others of the same size.
//
// Errors name the file's folder, the offset and the bytes: kUnavailable.

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "planner/base/result.h"
#include "planner/base/units.h"
#include "planner/plan/memory_tier.h"

namespace tessera {

class IoRing;

struct FileTierOptions {
  std::string directory = ".";
  bool direct = true;  // where the file system takes it
  bool ring = true;    // where the kernel has it
};

class FileTier {
 public:
  static constexpr int kDepth = 16;
  // A request's most bytes: enough for the bandwidth of an SSD, and several
  // make up one tensor.
  static constexpr int64_t kRequestBytes = int64_t{1} << 20;

  static Result<std::unique_ptr<FileTier>> Open(const FileTierOptions& options);
  FileTier(const FileTier&) = delete;
  FileTier& operator=(const FileTier&) = delete;
  ~FileTier();

  // The offset of an extent for `size` bytes.
  Result<int64_t> Allocate(Bytes size);
  // REQUIRES: `offset` came from Allocate and has not been freed.
  void Free(int64_t offset);

  // `data` begins at a multiple of kFileBlockBytes, and the caller's memory
  // goes on to the end of the last block of `bytes`.
  struct Transfer {
    int64_t offset = 0;
    void* data = nullptr;
    int64_t bytes = 0;
  };
  // All of them, in any order.
  Result<void> Read(std::span<const Transfer> transfers);
  Result<void> Write(std::span<const Transfer> transfers);

  // All extents that there were at once.
  Bytes length() const;
  bool direct() const { return direct_; }
  bool has_ring() const { return read_ring_ != nullptr; }

 private:
  FileTier(int fd, bool direct, std::string directory);
  Result<void> Run(std::span<const Transfer> transfers, bool write);
  Error Failed(bool write, const Transfer& transfer, int code) const;

  const int fd_;
  const bool direct_;
  const std::string directory_;
  std::unique_ptr<IoRing> read_ring_;  // both or none
  std::unique_ptr<IoRing> write_ring_;
  std::mutex read_mutex_;
  std::mutex write_mutex_;

  mutable std::mutex mutex_;  // guards what follows
  int64_t length_ = 0;
  std::unordered_map<int64_t, int64_t> sizes_;    // by offset
  std::map<int64_t, std::vector<int64_t>> free_;  // offsets by size
};

}  // namespace tessera
