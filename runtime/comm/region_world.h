#pragma once
// The CommWorld over a Region: one protocol for threads and processes.
//
// Signals. Rank a raises inbox(b).signals[a]; both count, so "all my peers have
// got this far" is a comparison of numbers. As any two ranks run the
// collectives they share in one order, the counts need not know about groups.
//
// Collectives run in rounds. In round i a rank stages bytes in its half i mod
// 2, signals its peers, waits for theirs, and reads what they staged. When
// a peer has signalled round i it has read round i - 1, so half (i + 1) mod 2
// is free then: one wait per round. After the last round a rank signals once
// more ("read"), and only its next collective, in whatever group, waits for
// that. Headers are staged the same way and compared after the first wait.
//
// Messages. Send writes to the ring of the pair as much as fits and queues a
// copy of the rest. Recv reads the ring into the waiting buffer, or into a
// buffer of its own when the message is another one. Ranks that wait, for
// whatever, push their queues, and empty rings whose senders have more.
//
// Waiting is: look a few times, give the core away a few times, then sleep on
// the own bell. Sleepers look at the abort state and at the peers' health.

#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/comm/communicator.h"
#include "runtime/comm/region.h"

namespace tessera {

class RegionWorld;

class RegionCommunicator : public Communicator {
 public:
  // REQUIRES: `ranks` are distinct and contain the world's own.
  RegionCommunicator(RegionWorld& world, std::vector<int> ranks);

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
  std::string GroupName() const;
  int Global(int rank) const { return ranks_[static_cast<size_t>(rank)]; }
  int64_t SlotBytes() const;

  RegionWorld& world_;
  const std::vector<int> ranks_;
  int rank_ = 0;
  uint64_t group_ = 0;  // hash of ranks_
};

class RegionWorld : public CommWorld {
 public:
  // What this rank does about peers that may die: nothing for threads.
  // REQUIRES: 0 <= rank < region->ranks(); each rank is constructed once.
  RegionWorld(std::shared_ptr<Region> region, int rank, CommOptions options);
  // Starts to watch the peers' processes, by the pids in the region.
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
    uint64_t signals_sent = 0;
    uint64_t signals_expected = 0;
    std::deque<Outgoing> queue;   // to the peer, after what is in the ring
    std::list<Message> messages;  // from the peer; only the last is incomplete
    int pidfd = -1;
    bool gone = false;  // seen dead, for pids without a pidfd
  };
  struct PostedRecv {
    int from = 0;  // global
    uint64_t group = 0;
    uint64_t tag = 0;
    int64_t bytes = 0;
    std::byte* data = nullptr;
  };

  // The error that ended this world, or the job's abort.
  Result<void> CheckUsable();
  Error Fail(Error error);

  // Returns when ready() does, moving messages meanwhile. `awaited(rank)` says
  // whether this needs more from that rank.
  template <typename Ready, typename Awaited>
  Result<void> Wait(Ready ready, Awaited awaited);
  template <typename Awaited>
  std::optional<Error> FindTrouble(Awaited awaited);
  bool IsDead(int rank);

  void Notify(int rank);
  void Signal(int rank);
  bool HasSignalled(int rank) const;

  bool MoveMessages();
  bool PushQueue(int to);
  // Bytes of [data, data + bytes) that fitted into the ring.
  int64_t WriteRing(int to, const std::byte* data, int64_t bytes);
  int64_t ReadRing(int from, std::byte* data, int64_t bytes);
  bool DrainRing(int from);
  std::string TaskOf(int rank) const;

  std::shared_ptr<Region> region_;
  const int rank_;
  const CommOptions options_;
  std::vector<Peer> peers_;  // by global rank
  std::optional<PostedRecv> posted_;
  std::optional<Error> failure_;
  bool watches_processes_ = false;
  std::map<std::vector<int>, std::unique_ptr<RegionCommunicator>> groups_;
};

}  // namespace tessera
