#pragma once
// The memory that the ranks of one host share: heap-like for threads, a memfd
// for processes. It holds, for N ranks,
//   - one RegionHeader: how the job was aborted, if it was;
//   - per rank an Inbox: its state, pid and task, bells for messages, and its
//     channels: one for each of its communicators, with a bell that the other
//     members ring, a counter per member that the member raises, and what the
//     rank is about to do;
//   - per channel a staging area, written by its rank and read by the others;
//   - per ordered pair of ranks a Ring of bytes for messages.
// Pages that nobody touches cost nothing: channels may be many.
// All-zero memory is a valid empty region. What is atomic may be touched by
// anyone at any time; the rest is ordered by the counters (region_world.h).

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "planner/base/result.h"
#include "planner/base/units.h"

namespace tessera {

// Text that may be read while it is written (and then may be a mixture).
template <size_t kBytes>
class AtomicText {
 public:
  // Cuts at kBytes - 1.
  void Store(std::string_view text);
  std::string Load() const;

 private:
  static_assert(kBytes % 8 == 0);
  std::atomic<uint64_t> words_[kBytes / 8];
};

constexpr int kMaxRegionRanks = 64;  // bounds the inbox; one host's devices
constexpr int kMaxChannels = 64;     // communicators of one rank
constexpr size_t kCacheLine = 64;

enum class AbortState : uint32_t { kNone, kWriting, kSet };
enum class RankState : uint32_t { kAbsent, kPresent, kLeft };
enum class CollectiveKind : uint32_t {
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kBroadcast,
  kBarrier,
};

struct RegionHeader {
  uint64_t token = 0;  // random; tells this region from any other
  std::atomic<AbortState> abort_state;  // set after what follows
  std::atomic<ErrorCode> abort_code;
  AtomicText<512> abort_message;
  std::atomic<bool> stall_told;  // a rank waits, and has told of its stall
};

// What a rank is about to do in a collective; peers compare it to their own.
struct CollectiveHeader {
  CollectiveKind kind = CollectiveKind::kBarrier;
  uint64_t detail = 0;  // hash of counts, element type and root
  int64_t bytes = 0;    // for the error message
  int64_t rounds = 1;
};

// Wakes whoever waits for something; what, the waiter sees for itself. A waiter
// counts itself a sleeper before it reads `rung`, looks once more, and sleeps
// while `rung` is what it read. The ringer raises `rung` before it reads
// `sleepers`. All sequentially consistent: either the sleeper sees that the
// bell was rung or the ringer sees the sleeper.
struct alignas(kCacheLine) Bell {
  std::atomic<uint32_t> rung;  // futex; counts
  std::atomic<uint32_t> sleepers;
};
void Ring(Bell& bell);

// A rank's end of a communicator.
struct Channel {
  std::atomic<uint64_t> group;  // hash of the list of ranks; 0: unused
  Bell bell;
  // signals[p]: how often rank p signalled this rank.
  alignas(kCacheLine) std::atomic<uint64_t> signals[kMaxRegionRanks];
  alignas(kCacheLine) CollectiveHeader collective;
  int64_t sizes[kMaxRegionRanks];  // all-to-all: bytes per receiver
};

struct Inbox {
  Bell mail;     // for those who wait for messages, or for the queue's end
  Bell courier;  // for the thread that moves what did not fit into a ring
  alignas(kCacheLine) std::atomic<RankState> state;
  std::atomic<int32_t> pid;
  // When it last looked for what it waits for: nanoseconds of the host's
  // monotonic clock.
  std::atomic<int64_t> looked_at;
  AtomicText<96> task;
  Channel channels[kMaxChannels];  // used ones first
};

// A byte stream from one rank to another. The bytes [tail, head) are in the
// ring's data at their position modulo ring_bytes().
struct MessageRing {
  alignas(kCacheLine) std::atomic<uint64_t> head;     // moved by the sender
  alignas(kCacheLine) std::atomic<uint64_t> tail;     // moved by the receiver
  alignas(kCacheLine) std::atomic<uint32_t> backlog;  // sender holds more
};

static_assert(std::atomic<uint64_t>::is_always_lock_free);

// Owns the mapping.
class Region {
 public:
  // Memory of this process only.
  static Result<std::shared_ptr<Region>> MakePrivate(int ranks);
  // Memory behind `fd`, a memfd that is made large enough. Does not keep `fd`.
  static Result<std::shared_ptr<Region>> Map(int ranks, int fd);

  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region();

  int ranks() const { return ranks_; }
  RegionHeader& header() const;
  Inbox& inbox(int rank) const;
  MessageRing& ring(int from, int to) const;
  std::byte* ring_data(int from, int to) const;
  int64_t ring_bytes() const { return ring_bytes_; }

  // A channel's staging: two halves for what its rank sends and two, of half
  // that size, for what it has reduced.
  int64_t half_bytes() const { return half_bytes_; }
  std::byte* send_half(int rank, int channel, int64_t round) const;
  std::byte* result_half(int rank, int channel, int64_t round) const;

  static size_t Size(int ranks);

 private:
  Region(int ranks, void* base);
  int ranks_;
  std::byte* base_;
  int64_t half_bytes_;
  int64_t ring_bytes_;
};

// Sleeps until `bell` has been rung since it stood at `rung`, or `timeout`
// passes.
void SleepOn(Bell& bell, uint32_t rung, Duration timeout);

template <size_t kBytes>
void AtomicText<kBytes>::Store(std::string_view text) {
  text = text.substr(0, kBytes - 1);
  for (size_t w = 0; w < kBytes / 8; ++w) {
    uint64_t word = 0;
    for (size_t b = 0; b < 8 && w * 8 + b < text.size(); ++b) {
      word |= uint64_t{static_cast<unsigned char>(text[w * 8 + b])} << (8 * b);
    }
    words_[w].store(word, std::memory_order_relaxed);
    if (w * 8 + 8 > text.size()) break;  // the terminating zero is written
  }
}

template <size_t kBytes>
std::string AtomicText<kBytes>::Load() const {
  std::string text;
  for (const auto& atomic_word : words_) {
    const uint64_t word = atomic_word.load(std::memory_order_relaxed);
    for (int b = 0; b < 8; ++b) {
      const char c = static_cast<char>((word >> (8 * b)) & 0xff);
      if (c == '\0') return text;
      text.push_back(c);
    }
  }
  return text;
}

}  // namespace tessera
