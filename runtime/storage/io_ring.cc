#include "runtime/storage/io_ring.h"

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <vector>

#include "planner/base/check.h"

namespace tessera {
namespace {

int Setup(unsigned entries, io_uring_params* params) {
  return static_cast<int>(syscall(__NR_io_uring_setup, entries, params));
}

// False where it has to be tried again.
bool Enter(int fd, unsigned submit, unsigned wait) {
  if (syscall(__NR_io_uring_enter, fd, submit, wait,
              wait > 0 ? IORING_ENTER_GETEVENTS : 0, nullptr, 0) >= 0) {
    return true;
  }
  TESSERA_CHECK(errno == EINTR || errno == EAGAIN || errno == EBUSY)
      << "io_uring_enter: " << std::strerror(errno);
  return false;
}

bool HasReadAndWrite(int fd) {
  constexpr unsigned kOps = 64;
  std::vector<std::byte> memory(sizeof(io_uring_probe) +
                                kOps * sizeof(io_uring_probe_op));
  auto* const probe = reinterpret_cast<io_uring_probe*>(memory.data());
  if (syscall(__NR_io_uring_register, fd, IORING_REGISTER_PROBE, probe, kOps) <
      0) {
    return false;
  }
  const auto has = [&](unsigned op) {
    return op <= probe->last_op &&
           (probe->ops[op].flags & IO_URING_OP_SUPPORTED) != 0;
  };
  return has(IORING_OP_READ) && has(IORING_OP_WRITE);
}

}  // namespace

std::unique_ptr<IoRing> IoRing::Make(int depth) {
  std::unique_ptr<IoRing> ring(new IoRing());
  if (!ring->Map(depth)) return nullptr;
  return ring;
}

bool IoRing::Map(int depth) {
  io_uring_params params;
  std::memset(&params, 0, sizeof(params));
  fd_ = Setup(static_cast<unsigned>(depth), &params);
  if (fd_ < 0 || (params.features & IORING_FEAT_SINGLE_MMAP) == 0 ||
      !HasReadAndWrite(fd_)) {
    return false;
  }
  const auto map = [&](uint64_t bytes, int64_t what) {
    void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_POPULATE, fd_, what);
    return data == MAP_FAILED ? nullptr : data;
  };
  rings_bytes_ = std::max<uint64_t>(
      params.sq_off.array + params.sq_entries * sizeof(uint32_t),
      params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
  rings_ = map(rings_bytes_, IORING_OFF_SQ_RING);
  entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
  entries_ = map(entries_bytes_, IORING_OFF_SQES);
  if (rings_ == nullptr || entries_ == nullptr) return false;
  auto* const base = static_cast<std::byte*>(rings_);
  const auto word = [&](uint32_t offset) {
    return reinterpret_cast<uint32_t*>(base + offset);
  };
  submit_tail_ = word(params.sq_off.tail);
  submit_array_ = word(params.sq_off.array);
  submit_mask_ = *word(params.sq_off.ring_mask);
  complete_head_ = word(params.cq_off.head);
  complete_tail_ = word(params.cq_off.tail);
  complete_mask_ = *word(params.cq_off.ring_mask);
  completions_ = base + params.cq_off.cqes;
  return true;
}

IoRing::~IoRing() {
  if (entries_ != nullptr) munmap(entries_, entries_bytes_);
  if (rings_ != nullptr) munmap(rings_, rings_bytes_);
  if (fd_ >= 0) close(fd_);
}

void IoRing::Submit(bool write, int fd, void* data, uint32_t bytes,
                    int64_t offset, uint64_t tag) {
  const uint32_t tail = *submit_tail_;  // only this side writes it
  const uint32_t slot = tail & submit_mask_;
  io_uring_sqe& entry = static_cast<io_uring_sqe*>(entries_)[slot];
  std::memset(&entry, 0, sizeof(entry));
  entry.opcode = write ? IORING_OP_WRITE : IORING_OP_READ;
  entry.fd = fd;
  entry.addr = reinterpret_cast<uint64_t>(data);
  entry.len = bytes;
  entry.off = static_cast<uint64_t>(offset);
  entry.user_data = tag;
  submit_array_[slot] = slot;
  std::atomic_ref(*submit_tail_).store(tail + 1, std::memory_order_release);
  while (!Enter(fd_, 1, 0)) {
  }
}

IoRing::Completion IoRing::Wait() {
  const uint32_t head = *complete_head_;  // only this side writes it
  while (std::atomic_ref(*complete_tail_).load(std::memory_order_acquire) ==
         head) {
    Enter(fd_, 0, 1);
  }
  const io_uring_cqe& done =
      static_cast<const io_uring_cqe*>(completions_)[head & complete_mask_];
  const Completion completion{done.user_data, done.res};
  std::atomic_ref(*complete_head_).store(head + 1, std::memory_order_release);
  return completion;
}

}  // namespace tessera
