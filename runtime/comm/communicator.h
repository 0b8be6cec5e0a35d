#pragma once
// Communication between the ranks of a job.
//
// A rank holds one CommWorld and gets from it a Communicator for every ordered
// list of global ranks (a group) that it belongs to. Worlds are made by
// MakeThreadWorlds (thread_world.h: ranks are threads of one process) and
// MakeShmWorld (shm_world.h: ranks are processes of one host); the choice
// changes no bit of any result. MakeNcclWorld (nccl_world.h: ranks with a GPU
// each) works in the order of the device's queue and sums in an order of its
// own; its header says where it differs. MakeLoopbackWorlds (loopback_world.h:
// ranks are threads on one GPU) works in that order too, with the bits of the
// CPU's worlds.
//
// Thread safety: several threads of a rank may use its world at once. The
// collectives of one communicator belong to one thread at a time; those of
// different communicators run beside each other. Send and Recv may be called by
// several threads, and beside collectives; of receives from one peer with one
// tag one waits at a time. (A world of GPUs belongs, with its communicators, to
// one thread at a time.)
//
// Operations return when their buffers may be used again. All members of a
// group call its collectives in the same order and with matching arguments; a
// mismatch is an Error. Where a thread calls the collectives of several groups,
// the ranks they share call them in the same order too, or they wait for each
// other until the time is up.
//
// Errors: what the arguments alone show to be wrong is kInvalidInput and leaves
// the world usable. Otherwise (a peer died, aborted, left, disagreed about the
// operation, or was waited for longer than the limit) the error is
// kUnavailable, or kInvalidInput for a disagreement, names the rank, and every
// later operation of this world returns it again. A rank that gives up for a
// reason of its own calls Abort(), so that its peers need not wait.

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"
#include "planner/base/units.h"
#include "planner/ir/dtype.h"
#include "planner/lower/message_channels.h"

namespace tessera {

struct CommOptions {
  // Longest wait for peers within one operation.
  Duration timeout = Duration::FromSeconds(600);
  // Told who has not come yet, where ranks that meet wait for long; or empty.
  std::function<void(const std::string& who)> waiting = {};
  // Told, once and on one of the ranks, who makes an operation wait for longer
  // than `patience`, and again of a later wait (NCCL: once in the job); or
  // empty.
  std::function<void(const std::string& what)> stalled = {};
  Duration patience = Duration::FromSeconds(30);
  // Once true, a wait before this rank's first task ends the job with
  // kInterrupted; or null. The step of a job under way is waited for.
  const std::atomic<bool>* stop = nullptr;
};

// One group as seen by one of its ranks. `rank`, `root` and `peer` count
// within the group; sums run in the order of the group's ranks,
// ((r0 + r1) + r2) + ..., so they are the same bits on every rank, for every
// operation that sums, in every kind of world.
//
// Buffers may be null where their size is zero. Send and receive buffers of
// one call do not overlap, except where said. Sums of 16-bit types are taken in
// fp32 and rounded once, to nearest even.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Replaces data[0, count) by the sum over all ranks.
  virtual Result<void> AllReduce(void* data, int64_t count, DType dtype) = 0;

  // Concatenates every rank's `send` in rank order. bytes_per_rank is the same
  // on all ranks and send_bytes its entry for this rank. `send` may be this
  // rank's own place within `recv`.
  virtual Result<void> AllGather(const void* send, int64_t send_bytes,
                                 void* recv,
                                 std::span<const int64_t> bytes_per_rank) = 0;

  // `send` is the concatenation of one part per rank, of counts_per_rank
  // elements; recv receives the sum over all ranks of this rank's part. `recv`
  // may be this rank's own place within `send`. The same bits as AllReduce.
  virtual Result<void> ReduceScatter(const void* send, void* recv,
                                     std::span<const int64_t> counts_per_rank,
                                     DType dtype) = 0;

  // `send` is the concatenation of one part per receiving rank, `recv` of one
  // part per sending rank. recv_bytes[r] here equals send_bytes[this] at r.
  virtual Result<void> AllToAll(const void* send,
                                std::span<const int64_t> send_bytes, void* recv,
                                std::span<const int64_t> recv_bytes) = 0;

  virtual Result<void> Broadcast(void* data, int64_t bytes, int root) = 0;
  virtual Result<void> Barrier() = 0;

  // Never waits for the receiver: what the channel cannot take is copied and
  // moved onward by and by. `peer` may be this rank.
  virtual Result<void> Send(const void* data, int64_t bytes, int peer,
                            uint64_t tag) = 0;

  // The oldest message of this group from `peer` with `tag`; messages with
  // other tags wait their turn. A message of another size is kInvalidInput and
  // stays where it is.
  virtual Result<void> Recv(void* data, int64_t bytes, int peer,
                            uint64_t tag) = 0;

  // Messages that nothing has to tell apart: the n-th SendInTurn into a channel
  // is received by its n-th RecvInTurn, of the same size. Where SendInTurnWaits
  // a send holds its queue until its receive is there.
  //
  // OpenChannels makes this rank's ends, which lie in [channel, from, to] order
  // and name ranks of the group; `sizes` are of the messages of one step, by
  // end. Every rank of the group calls it; opening an end again changes
  // nothing. kInvalidInput where the two sides' sizes differ and the world can
  // tell.
  virtual bool SendInTurnWaits() const { return false; }
  virtual Result<void> OpenChannels(std::span<const ChannelEnd>,
                                    std::span<const std::vector<int64_t>>) {
    return {};
  }
  virtual Result<void> SendInTurn(const void* data, int64_t bytes,
                                  const ChannelEnd& end) {
    return Send(data, bytes, end.to, TagOf(end));
  }
  virtual Result<void> RecvInTurn(void* data, int64_t bytes,
                                  const ChannelEnd& end) {
    return Recv(data, bytes, end.from, TagOf(end));
  }

 private:
  // Tags of tensors are values' numbers, below 2^31.
  static uint64_t TagOf(const ChannelEnd& end) {
    return (uint64_t{1} << 48) + static_cast<uint64_t>(end.channel);
  }
};

// A rank's membership of the job. Communicators are owned by it.
// Destroying a world tells the peers that this rank has left: what it sent and
// flushed can still be received, waiting for anything more is an Error.
class CommWorld {
 public:
  virtual ~CommWorld() = default;

  virtual int world_rank() const = 0;
  virtual int world_size() const = 0;

  // The communicator over `ranks`, in that order; the same one for the same
  // list. `ranks` are distinct and include this rank. Needs no communication,
  // but all members should call it in the same order, as other kinds of world
  // may need it.
  virtual Result<Communicator*> Group(std::span<const int> ranks) = 0;

  // Waits until the peers' channels have taken all that this rank sent. To be
  // called before the world is destroyed; a step needs none, since what it sent
  // moves onward behind it.
  virtual Result<void> Flush() = 0;

  // Makes every present and later operation of every rank return kUnavailable
  // with "rank R aborted: REASON". The first call in the job wins. Does not
  // wait.
  virtual void Abort(std::string_view reason) = 0;

  // What this rank began last, for the error messages of peers that see it die
  // or wait for it. Cheap enough for every task; cut at 95 bytes.
  virtual void SetCurrentTask(std::string_view task) = 0;
};

}  // namespace tessera
