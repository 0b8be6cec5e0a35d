#pragma once
// The CommWorld over a Region: one protocol for threads and processes.
//
// Channels. A rank's end of a communicator is a channel of its inbox, which it
// claims by itself in Group(): a peer finds it there by the hash of the group,
// and waits for it with its first collective. What happens in one communicator
// touches no other, so that each may have a thread of its own.
//
// Collectives run in rounds. In round i a rank stages bytes in its half i mod
// 2, signals its peers, waits for theirs, and reads what they staged. Signals
// are counts, so "all my peers have got this far" is a comparison of numbers.
// When a peer has signalled round i it has read round i - 1, so half (i + 1)
// mod 2 is free then: one wait per round. After the last round a rank signals
// once more ("read"), and only its next collective waits for that. Headers are
// staged the same way and compared after the first wait.
//
// Messages. Send writes to the ring of the pair as much as fits and queues a
// copy of the rest, which a thread of the world, the courier, moves onward as
// the ring empties. Recv reads the ring into the waiting buffer, or into a
// buffer of its own when the message is another one. The courier also empties
// rings whose senders have more.
//
// Waiting is: look a few times, give the core away a few times, then sleep on a
// bell. Sleepers look at the abort state and at the peers' health.

#include <sched.h>

#include <atomic>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "runtime/comm/communicator.h"
#include "runtime/comm/region.h"

namespace tessera {

class RegionWorld;

class RegionCommunicator : public Communicator {
 public:
  // Claims channel `channel` of the world's rank.
  // REQUIRES: `ranks` are distinct and contain the world's own.
  RegionCommunicator(RegionWorld& world, std::vector<int> ranks, int channel);

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(ranks_.size()); }
  Result<void> AllReduce(void* data, int64_t count, DType dtype) override;
  Result<void> AllGather(const void* send, int64_t send_bytes, void* recv,
                         std::span<const int64_t> bytes_per_rank) override;
  Result<void> ReduceScatter(const void* send, void* recv,
                             std::span<const int64_t> counts_per_rank,
                             DType dtype) override;
  Result<void> AllToAll(const void* send, std::span<const int64_t> send_bytes,
                        void* recv,
                        std::span<const int64_t> recv_bytes) override;
  Result<void> Broadcast(void* data, int64_t bytes, int root) override;
  Result<void> Barrier() override;
  Result<void> Send(const void* data, int64_t bytes, int peer,
                    uint64_t tag) override;
  Result<void> Recv(void* data, int64_t bytes, int peer, uint64_t tag) override;

 private:
  template <typename Stage, typename Consume>
  Result<void> RunRounds(CollectiveHeader header, Stage stage, Consume consume);
  Result<void> AllReduceAtOnce(std::byte* data, int64_t count, DType dtype);
  Result<void> AllReduceInSlices(std::byte* data, int64_t count, DType dtype);
  Result<void> CheckHeaders(const CollectiveHeader& mine, int64_t& rounds);
  CollectiveHeader Header(CollectiveKind kind, int64_t bytes,
                          int64_t bytes_per_round) const;
  Error Here(Error error, std::string_view operation) const;
  int Global(int rank) const { return ranks_[static_cast<size_t>(rank)]; }
  int64_t SlotBytes() const;
  // Where in its half a rank of an all-to-all stages what it sends another one:
  // those who get something share the half. `sizes`: bytes by receiver.
  struct Slot {
    int64_t begin = 0;
    int64_t bytes = 0;
  };
  Slot StagedFor(const int64_t* sizes, int from, int to) const;
  // By rank of the group. Of a peer: REQUIRES that it has been found.
  Channel& channel(int rank) const;
  std::byte* send_half(int rank, int64_t round) const;
  std::byte* result_half(int rank, int64_t round) const;
  // Whether the peer has joined; remembers where.
  bool FindChannel(int rank);
  // Whether all peers have signalled as often as this rank.
  bool HasSignalled(int rank);
  Result<void> WaitForPeers();
  void SignalPeers();

  RegionWorld& world_;
  const std::vector<int> ranks_;
  int rank_ = 0;
  uint64_t group_ = 0;         // hash of ranks_
  std::vector<int> channels_;  // by rank; -1: not found yet
  uint64_t signals_ = 0;       // sent to each peer, and expected from it
};

class RegionWorld : public CommWorld {
 public:
  // REQUIRES: 0 <= rank < region->ranks(); each rank is constructed once.
  RegionWorld(std::shared_ptr<Region> region, int rank, CommOptions options);
  // Starts to watch the peers' processes, by the pids in the region: of one
  // that dies the ranks learn. Threads, which do not die alone, need none.
  // REQUIRES: all ranks have been constructed.
  void WatchProcesses();
  ~RegionWorld() override;

  int world_rank() const override { return rank_; }
  int world_size() const override { return region_->ranks(); }
  Result<Communicator*> Group(std::span<const int> ranks) override;
  Result<void> Flush() override;
  void Abort(std::string_view reason) override;
  void SetCurrentTask(std::string_view task) override;

 private:
  friend class RegionCommunicator;

  // Before each message in a ring.
  struct MessageHeader {
    uint64_t group;
    uint64_t tag;
    int64_t bytes;
  };
  struct Message {
    uint64_t group = 0;
    uint64_t tag = 0;
    int64_t bytes = 0;
    int64_t filled = 0;
    std::byte* data = nullptr;  // into buffer, or into the posted receive's
    std::unique_ptr<std::byte[]> buffer;
  };
  struct Outgoing {
    std::vector<std::byte> bytes;
    int64_t written = 0;
  };
  struct Peer {
    std::deque<Outgoing> queue;   // to the peer, after what is in the ring
    std::list<Message> messages;  // from the peer; only the last is incomplete
    int pidfd = -1;
    std::atomic<bool> gone = false;  // seen dead, for pids without a pidfd
  };
  // A receive that waits; on the stack of its thread.
  struct PostedRecv {
    int from = 0;  // global
    uint64_t group = 0;
    uint64_t tag = 0;
    int64_t bytes = 0;
    std::byte* data = nullptr;  // null once a message has taken it
  };

  // The error that ended this world, or the job's abort.
  Result<void> CheckUsable();
  Error Fail(Error error);
  // REQUIRES: the job was aborted.
  Error AbortOfJob() const;

  // Returns when ready() does; `bell` is rung when that may have changed.
  // `awaited(rank)` says whether this needs more from that rank.
  template <typename Ready, typename Awaited>
  Result<void> Wait(Bell& bell, Ready ready, Awaited awaited);
  // The same on the bell, after a look was in vain.
  using ReadyFunction = std::function<bool()>;
  using AwaitedFunction = std::function<bool(int)>;
  Result<void> Sleep(Bell& bell, const ReadyFunction& ready,
                     const AwaitedFunction& awaited);
  bool MayStop() const;
  std::string RanksText(const AwaitedFunction& awaited) const;
  bool TellOfStall(double untold, double waited,
                   const AwaitedFunction& awaited);
  std::optional<Error> FindTrouble(const AwaitedFunction& awaited);
  bool IsDead(int rank);
  // Wakes all that wait at `rank`, whatever for.
  void RingAll(int rank);

  // REQUIRES of these: mail_mutex_ is held.
  bool PushQueue(int to);
  // Bytes of [data, data + bytes) that fitted into the ring.
  int64_t WriteRing(int to, const std::byte* data, int64_t bytes);
  int64_t ReadRing(int from, std::byte* data, int64_t bytes);
  bool DrainRing(int from);
  bool QueuesAreEmpty() const;

  void RunCourier();
  std::string TaskOf(int rank) const;

  std::shared_ptr<Region> region_;
  const int rank_;
  const CommOptions options_;

  std::mutex groups_mutex_;
  std::map<std::vector<int>, std::unique_ptr<RegionCommunicator>> groups_;

  std::mutex failure_mutex_;
  std::optional<Error> failure_;
  std::atomic<bool> failed_ = false;  // whether failure_ is there

  std::mutex task_mutex_;

  std::mutex mail_mutex_;    // guards queues, messages, posts and rings' ends
  std::vector<Peer> peers_;  // by global rank
  std::list<PostedRecv*> posted_;
  bool watches_processes_ = false;

  std::atomic<bool> leaving_ = false;
  std::thread courier_;
};

template <typename Ready, typename Awaited>
Result<void> RegionWorld::Wait(Bell& bell, Ready ready, Awaited awaited) {
  // How a waiting rank looks before it sleeps. A peer on another core answers
  // within a microsecond or so; when ranks share cores, giving the core away is
  // what lets the peer answer. With these a 4-byte all-reduce of 2 ranks took
  // 0.3 us on 2 idle cores and 15 us on busy ones, of 4 ranks 16 us and 46 us
  // (own measurement, November 2026).
  constexpr int kLooks = 200;
  constexpr int kYields = 20;
  for (int i = 0; i < kLooks; ++i) {
    if (ready()) return {};
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  for (int i = 0; i < kYields; ++i) {
    if (ready()) return {};
    sched_yield();
  }
  return Sleep(bell, ready, awaited);
}

}  // namespace tessera
