#pragma once
// Collectives and transfers on tensors: which bytes of which buffers go through
// a Communicator, worked out once from the placements on both sides and run
// many times. Ragged and strided shards are packed; where the buffers are
// already in the order of the collective they are used as they are.
//
// Thread safety: Collective and GroupTransfer are immutable. Several threads
// may use them at once where the device is concurrent, each with staging of its
// own, as far as the communicator allows (communicator.h): Run of collectives
// of different groups, Send and Receive of transfers beside each other and
// beside these.

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "planner/base/result.h"
#include "planner/lower/comm_kind.h"
#include "runtime/comm/communicator.h"
#include "runtime/device/device.h"
#include "runtime/placement.h"

namespace tessera {

// One tensor of a collective, as every member of the group has it before and
// after. Of an all-reduce or reduce-scatter the members hold partial sums.
struct CollectivePart {
  DType dtype = DType::kFloat32;
  std::vector<Placement> from;  // by member
  std::vector<Placement> to;

  bool operator==(const CollectivePart&) const = default;
};

// Where this rank has a part. The two are the same buffer or do not overlap.
struct PartBuffers {
  const void* from = nullptr;
  void* to = nullptr;
};

// A collective over one group, of several tensors at once: small ones share a
// message. The sums are those of Communicator, whether or not they do.
class Collective {
 public:
  // REQUIRES: the members pass the same parts; kind is not kSendRecv. An
  // all-reduce leaves every element where it is; a reduce-scatter cuts what
  // all members have into disjoint pieces, and a reduce gives it whole to one;
  // a shift gives each member what the next one has, and the last what the
  // first has; for every other kind the members together have all that each of
  // them gets.
  Collective(CommKind kind, Communicator& group,
             std::span<const CollectivePart> parts);

  // `staging` is memory of the device, of staging() bytes.
  Result<void> Run(RankDevice& device, std::span<const PartBuffers> buffers,
                   void* staging) const;

  const Communicator& group() const { return group_; }
  Bytes staging() const;
  // Whether this member's buffers are read: of several that have the same
  // elements one alone sends them.
  bool sends() const;

 private:
  enum class Route : uint8_t {
    kAllReduce,
    kReduceScatter,
    kGather,    // everyone gets everything
    kExchange,  // everyone gets some of it
    kShift,     // everyone gets the next member's
  };
  // Copies between a part's buffer and a staging buffer.
  struct PartCopy {
    size_t part = 0;
    BoxCopy copy;
  };
  // One call of the communicator.
  struct Batch {
    Route route = Route::kExchange;
    DType dtype = DType::kFloat32;
    std::vector<size_t> parts;
    // Without staging the buffers of the only part are passed as they are.
    bool stage_send = false;
    bool stage_receive = false;
    // To and from what is staged. An all-reduce without staging: to where it
    // sums.
    std::vector<PartCopy> pack;
    std::vector<PartCopy> unpack;
    // Bytes of this rank's send and receive buffers; and by member, where the
    // call wants them so, bytes or elements.
    int64_t sent = 0;
    int64_t received = 0;
    std::vector<int64_t> send_bytes;
    std::vector<int64_t> receive_bytes;
    std::vector<int64_t> counts;  // kReduceScatter
  };

  using Parts = std::span<const CollectivePart>;

  Route RouteOf(const CollectivePart& part) const;
  void AddBatch(Parts parts, Route route, std::vector<size_t> of_batch);
  void PlanAllReduce(Parts parts, Batch& batch) const;
  void PlanReduceScatter(Parts parts, Batch& batch) const;
  void PlanGather(Parts parts, Batch& batch) const;
  void PlanExchange(Parts parts, Batch& batch) const;
  void PlanShift(Parts parts, Batch& batch) const;
  Result<void> RunBatch(const Batch& batch, RankDevice& device,
                        std::span<const PartBuffers> buffers,
                        std::byte* staging) const;
  Result<void> Call(const Batch& batch, const void* send, void* receive) const;

  CommKind kind_;
  Communicator& group_;
  std::vector<Batch> batches_;
};

// Collectives worked out once where the parts are equal, as those of layers and
// of microbatches are. It belongs to one thread at a time.
class CollectiveMaker {
 public:
  std::shared_ptr<const Collective> Make(CommKind kind, Communicator& group,
                                         std::vector<CollectivePart> parts);

 private:
  struct Made {
    CommKind kind;
    const Communicator* group;
    std::vector<CollectivePart> parts;
    std::shared_ptr<const Collective> collective;
  };

  std::unordered_multimap<uint64_t, Made> made_;  // by a hash of kind and parts
};

// A tensor that moves from the ranks of one group to those of another. Both
// sides make the same GroupTransfer and each runs its half.
class GroupTransfer {
 public:
  // `from` and `to` have a placement for each of `senders` and `receivers`,
  // which are ranks of `world`. Where `positionwise`, rank i of the one group
  // sends its whole buffer to rank i of the other, whatever it holds (partial
  // sums): REQUIRES equal placements. Else REQUIRES: the senders together have
  // all that each receiver gets.
  GroupTransfer(Communicator& world, DType dtype, std::span<const int> senders,
                const std::vector<Placement>& from,
                std::span<const int> receivers,
                const std::vector<Placement>& to, bool positionwise);

  // What tells a transfer from others: a tag, or a channel that its messages go
  // through in turn (Communicator::SendInTurn).
  struct Way {
    uint64_t tag = 0;
    int channel = -1;  // -1: by tag
  };

  // Sends this rank's pieces; does nothing on a rank that has none to send.
  // `staging` is memory of the device, of send_staging() bytes.
  Result<void> Send(RankDevice& device, const void* data, Way way,
                    void* staging) const;
  // Receives this rank's pieces. `staging` has receive_staging() bytes.
  Result<void> Receive(RankDevice& device, void* data, Way way,
                       void* staging) const;

  // Adds the sizes of this rank's messages to those of their ends.
  using SizesByEnd = std::map<ChannelEnd, std::vector<int64_t>>;
  void AddTo(SizesByEnd& sizes, int channel) const;

  Bytes send_staging() const { return LargestStaged(sends_); }
  Bytes receive_staging() const { return LargestStaged(receives_); }

 private:
  struct Message {
    int peer = 0;  // rank of the world
    int64_t bytes = 0;
    // The place in the buffer, if the message lies there in one run.
    int64_t offset = -1;
    std::vector<BoxCopy> copies;  // else: between the buffer and the message
  };

  static Bytes LargestStaged(const std::vector<Message>& messages);

  Communicator& world_;
  std::vector<Message> sends_;
  std::vector<Message> receives_;
};

}  // namespace tessera
