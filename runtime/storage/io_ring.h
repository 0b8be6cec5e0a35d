#pragma once
// IoRing: io_uring(7) as much as FileTier needs: reads and writes of one file
// at given offsets, several in flight.

#include <cstdint>
#include <memory>

namespace tessera {

class IoRing {
 public:
  // Null where the kernel has no io_uring, does not permit it, or lacks
  // IORING_OP_READ (before Linux 5.6).
  static std::unique_ptr<IoRing> Make(int depth);
  ~IoRing();
  IoRing(const IoRing&) = delete;
  IoRing& operator=(const IoRing&) = delete;

  // REQUIRES: fewer than `depth` are in flight. `tag` comes back with the
  // result.
  void Submit(bool write, int fd, void* data, uint32_t bytes, int64_t offset,
              uint64_t tag);

  struct Completion {
    uint64_t tag = 0;
    int64_t result = 0;  // bytes, or a negated errno
  };
  // The next to end. REQUIRES: one is in flight.
  Completion Wait();

 private:
  IoRing() = default;
  bool Map(int depth);

  int fd_ = -1;
  void* rings_ = nullptr;
  uint64_t rings_bytes_ = 0;
  void* entries_ = nullptr;
  uint64_t entries_bytes_ = 0;
  // In the memory shared with the kernel.
  uint32_t* submit_tail_ = nullptr;
  uint32_t* submit_array_ = nullptr;
  uint32_t submit_mask_ = 0;
  uint32_t* complete_head_ = nullptr;
  uint32_t* complete_tail_ = nullptr;
  void* completions_ = nullptr;
  uint32_t complete_mask_ = 0;
};

}  // namespace tessera
