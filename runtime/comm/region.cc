#include "runtime/comm/region.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>

#include "planner/base/divide.h"
#include "runtime/comm/text.h"

namespace tessera {
namespace {

// Bytes staged per channel and round. Source and staging of a round should stay
// near a core, and rounds should be few where ranks share cores. For 64 MB
// all-reduces by 2 and 4 ranks on 2 cores with 512 KiB of second-level cache,
// 256 KiB to 1 MiB were alike and 64 KiB slower (own measurement, November
// 2026).
constexpr int64_t kMaxHalfBytes = 256 << 10;
// All ranks' staging for a channel each stays below this: the smallest memory
// limits met are containers with 64 MB of shared memory, and a rank seldom has
// more than four communicators.
constexpr int64_t kStagingBudget = 12 << 20;
// A ring should take a microbatch's activations at a pipeline boundary (1 MiB
// for 1024 tokens of 256 floats); its pages cost nothing until used.
constexpr int64_t kMaxRingBytes = 1 << 20;
constexpr int64_t kMinRingBytes = 16 << 10;
constexpr int64_t kRingBudget = 16 << 20;

constexpr int64_t kPage = 4096;

int64_t RoundDown(int64_t x, int64_t step) {
  return x / step * step;
}

int64_t HalfBytes(int ranks) {
  // Two halves to send and two, of half that size, for results: three.
  return RoundDown(std::min(kMaxHalfBytes, kStagingBudget / (3 * ranks)),
                   kPage);
}

int64_t RingBytes(int ranks) {
  return RoundDown(std::clamp(kRingBudget / (int64_t{ranks} * ranks),
                              kMinRingBytes, kMaxRingBytes),
                   kPage);
}

int64_t RingStride(int ranks) {
  return RoundUp(static_cast<int64_t>(sizeof(MessageRing)) + RingBytes(ranks),
                 kPage);
}

int64_t InboxOffset() {
  return RoundUp(static_cast<int64_t>(sizeof(RegionHeader)), kPage);
}
int64_t InboxStride() {
  return RoundUp(static_cast<int64_t>(sizeof(Inbox)), kPage);
}
int64_t StagingOffset(int ranks) {
  return InboxOffset() + ranks * InboxStride();
}
int64_t RingOffset(int ranks) {
  return StagingOffset(ranks) + ranks * kMaxChannels * 3 * HalfBytes(ranks);
}

// By errno.
Error Failed(std::string_view what) {
  return Unavailable(Text(what, ": ", std::strerror(errno)));
}

}  // namespace

size_t Region::Size(int ranks) {
  return static_cast<size_t>(RingOffset(ranks) +
                             int64_t{ranks} * ranks * RingStride(ranks));
}

Region::Region(int ranks, void* base)
    : ranks_(ranks),
      base_(static_cast<std::byte*>(base)),
      half_bytes_(HalfBytes(ranks)),
      ring_bytes_(RingBytes(ranks)) {}

Region::~Region() {
  munmap(base_, Size(ranks_));
}

Result<std::shared_ptr<Region>> Region::MakePrivate(int ranks) {
  void* base = mmap(nullptr, Size(ranks), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return Failed("cannot map memory for ranks");
  return std::shared_ptr<Region>(new Region(ranks, base));
}

Result<std::shared_ptr<Region>> Region::Map(int ranks, int fd) {
  if (ftruncate(fd, static_cast<off_t>(Size(ranks))) != 0) {
    return Failed("cannot size the shared memory of the ranks");
  }
  void* base =
      mmap(nullptr, Size(ranks), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) {
    return Failed("cannot map the shared memory of the ranks");
  }
  return std::shared_ptr<Region>(new Region(ranks, base));
}

RegionHeader& Region::header() const {
  return *reinterpret_cast<RegionHeader*>(base_);
}

Inbox& Region::inbox(int rank) const {
  return *reinterpret_cast<Inbox*>(base_ + InboxOffset() +
                                   rank * InboxStride());
}

MessageRing& Region::ring(int from, int to) const {
  return *reinterpret_cast<MessageRing*>(base_ + RingOffset(ranks_) +
                                         (int64_t{from} * ranks_ + to) *
                                             RingStride(ranks_));
}

std::byte* Region::ring_data(int from, int to) const {
  return reinterpret_cast<std::byte*>(&ring(from, to)) + sizeof(MessageRing);
}

std::byte* Region::send_half(int rank, int channel, int64_t round) const {
  return base_ + StagingOffset(ranks_) +
         (rank * kMaxChannels + channel) * 3 * half_bytes_ +
         (round % 2) * half_bytes_;
}

std::byte* Region::result_half(int rank, int channel, int64_t round) const {
  return send_half(rank, channel, 0) + 2 * half_bytes_ +
         (round % 2) * (half_bytes_ / 2);
}

// The words may lie in memory shared by processes, so no FUTEX_PRIVATE_FLAG.
void SleepOn(Bell& bell, uint32_t rung, Duration timeout) {
  timespec limit;
  limit.tv_sec = timeout.picoseconds / 1'000'000'000'000;
  limit.tv_nsec = timeout.picoseconds % 1'000'000'000'000 / 1000;
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&bell.rung), FUTEX_WAIT, rung,
          &limit, nullptr, 0);
}

void Ring(Bell& bell) {
  bell.rung.fetch_add(1);
  if (bell.sleepers.load() != 0) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&bell.rung), FUTEX_WAKE,
            INT_MAX, nullptr, nullptr, 0);
  }
}

}  // namespace tessera
