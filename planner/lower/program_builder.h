#pragma once
// ProgramBuilder: lowers one block in one pass. Nodes become tasks and layouts
// become reshards. What lower.h says of programs holds; this header is of the
// program_*.cc files alone.

#include <algorithm>
#include <map>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "planner/base/flat_map.h"
#include "planner/base/rng.h"
#include "planner/lower/lower.h"
#include "planner/lower/ring.h"
#include "planner/plan/tiles.h"

namespace tessera {

// A persistent scalar of the graph's precision.
Value Scalar(const LoweringContext& context, std::string_view what,
             GroupId group);

// Of what maps of tensors have as keys. A tensor has few layouts.
struct TensorHash {
  uint64_t operator()(TensorId tensor) const {
    return Mix64(static_cast<uint32_t>(tensor.value));
  }
  uint64_t operator()(const std::pair<GroupId, TensorId>& key) const {
    return (*this)(key.second);
  }
  uint64_t operator()(const std::pair<GroupId, Port>& key) const {
    return Mix64(key.second.word());
  }
  uint64_t operator()(const std::tuple<GroupId, TensorId, Layout>& key) const {
    return (*this)(std::get<TensorId>(key));
  }
};

class ProgramBuilder {
 public:
  ProgramBuilder(const LoweringContext& context, int block, ProgramKind kind);

  BlockProgram Build();

 private:
  // ---- groups

  // The group whose tasks are being emitted: that of a node, or of a weight.
  const DeviceGroup& group() const;

  GroupId HomeGroup(TensorId weight) const;

  // Calls `emit` on each group that is home to some of the pieces, with them,
  // in the order of their first pieces.
  template <typename Emit>
  void AtHome(const std::vector<WeightPiece>& pieces, const Emit& emit) {
    std::vector<std::pair<GroupId, std::vector<WeightPiece>>> by_group;
    for (const WeightPiece& piece : pieces) {
      const GroupId home = HomeGroup(piece.weight);
      auto it = std::find_if(by_group.begin(), by_group.end(),
                             [&](const auto& g) { return g.first == home; });
      if (it == by_group.end()) {
        by_group.push_back({home, {}});
        it = std::prev(by_group.end());
      }
      it->second.push_back(piece);
    }
    for (const auto& [home, members] : by_group) {
      here_ = home;
      emit(members);
    }
  }

  // The pieces in which weights are stored.
  std::vector<WeightPiece> PiecesOf(const std::vector<TensorId>& weights) const;

  // ---- values and tasks

  ValueId AddValue(Value value);
  Value& value(ValueId id) { return program_.values[id.index()]; }

  // A value that holds (a microbatch of) a graph tensor in `layout`.
  Value TensorValue(TensorId tensor, std::string_view what,
                    const Layout& layout, MemoryCategory category);

  // A copy of `of`, not persistent, in another layout.
  ValueId Relaid(ValueId of, const Layout& layout, MemoryCategory category);

  Task& AddTask(TaskKind kind, std::vector<ValueId> reads,
                std::vector<ValueId> writes);

  StreamRole Stream(StreamRole wanted) const;

  // Binds a value that exists outside the program; once for each port of a
  // group.
  template <typename Make>
  ValueId Import(const Port& port, Make make) {
    const auto [it, is_new] = imported_.try_emplace({here_, port});
    if (is_new) {
      it->second = AddValue(make());
      program_.imports.push_back({port, it->second});
    }
    return it->second;
  }

  // ---- resharding

  // One step of several values at once; `in_place` lets an all-reduce or a
  // reduce reuse the buffers of values that nothing else reads.
  std::vector<ValueId> EmitStep(ReshardKind kind, AxisSet axes,
                                const std::vector<ValueId>& from,
                                const std::vector<Layout>& to, bool in_place,
                                MemoryCategory category);

  ValueId Reshard(ValueId from, const Layout& to, bool in_place,
                  MemoryCategory category);

  // ---- tensors

  // The tensor as this group has it, imported or received.
  ValueId Present(TensorId tensor);

  ValueId Receive(TensorId tensor, const LoweringContext::Presence& presence,
                  GroupId from);

  // Leaves a tensor to later programs, if any reads it.
  void Export(TensorId tensor, ValueId id);

  ValueId Load(TensorId tensor, const Layout& layout);

  // An input that the root alone loads: its first reader scatters it, and
  // later programs find it as it does.
  ValueId PresentInput(TensorId tensor);

  // The tensor in the layout that a node wants; equal wishes share.
  ValueId Acquire(TensorId tensor, const Layout& wanted);

  // The tensor in the layout in which its node leaves it.
  ValueId AsProduced(TensorId tensor);

  const LoweringContext::Replica& ReplicaHere(TensorId weight) const;

  // The port of what is kept of a piece of a weight.
  static Port PortOf(Port::Kind kind, const WeightPiece& piece, int index = 0);

  ValueId Parameter(const WeightPiece& piece);

  // ---- memory tiers

  // A value like `of` on another tier.
  ValueId OnTier(ValueId of, MemoryTier tier, MemoryCategory category);

  StreamRole CopyStream(MemoryTier from, MemoryTier to) const;

  // Copies from[i] to to[i], between device and file through the host's memory:
  // one task for all that go the same way.
  void EmitCopies(std::vector<ValueId> from, const std::vector<ValueId>& to,
                  bool after_compute = false);

  // Leaves a value to later programs, and to this one.
  void Leave(const Port& port, ValueId id);

  // A buffer of Port::kTensor, new in forward: what backward reads is copied
  // out with the end of the block.
  void CopyOutLater(TensorId tensor, int index, ValueId id);

  void EmitCopiesOut();

  // Copies in what backward first reads one block later; the first block of a
  // stage's backward also what it reads itself.
  void EmitCopiesIn();

  // ---- parameters that are not stored as their readers see them

  // Whether the stored parameter is cut (ZeRO stage 3).
  bool IsCut(TensorId weight) const;

  // The parameter as its readers see it.
  ValueId Whole(TensorId weight);

  void EmitGather(int block);

  void EmitGather(int block, const std::vector<WeightPiece>& pieces);

  // Parameters as their readers see them, behind all earlier computation:
  // copied to the device, and gathered where they are cut, one collective for
  // those over equal axes.
  std::vector<ValueId> Fetched(const std::vector<WeightPiece>& pieces);

  // Parameters are gathered Plan::prefetch blocks ahead of their use; the
  // first block of a stage's pass also gathers all that come before.
  void EmitGathers();

  ValueId Accumulator(const WeightPiece& piece, int index);

  Value GradientValue(const WeightPiece& piece, const Layout& layout);

  // Which of the accumulated layouts a gradient has.
  int AccumulatorIndex(TensorId gradient) const;

  // Of a weight's gradients, and of what the optimizer keeps of it.
  DType GradientDType(TensorId weight) const;
  DType StateDType(TensorId weight) const;

  // ---- transfers between groups

  void EmitSend(const Port& port, GroupId to, ValueId id, StreamRole stream);

  void EmitReceive(const Port& port, GroupId from, ValueId id,
                   StreamRole stream);

  // ---- nodes

  void EmitNodes();

  // Receives, or computes again, what only the gradients of weights read: it
  // comes with the other tensors of the microbatch's backward.
  void ReceiveOperands(const Node& node);

  void EmitNode(NodeId id, const Node& node);

  // What a node reads: its operands as it wants them, the state that its shards
  // merge, the scale of the loss.
  std::vector<ValueId> ReadsOf(NodeId id, const Node& node,
                               const OpPlacement& placement);

  // What a node writes, by result; where it adds to what is there.
  struct Writes {
    std::vector<ValueId> values;
    bool accumulate = false;
    bool adds_gradients = false;
    // Gradients to be added behind it: from, accumulator.
    std::vector<std::pair<ValueId, ValueId>> add_later;
  };
  Writes WritesOf(const Node& node);

  // Whether a node may write the gradients of weights where those of all
  // microbatches and uses are added up: its kernel adds to them, and to nothing
  // else, or each is the only one. Of an operator that nothing runs it may.
  bool AddsInPlace(const Node& node) const;

  // Memory that the kernel of a node needs besides.
  void SetScratch(NodeId id, const Node& node, Task& task) const;

  // ---- tiles (planner/plan/tiles.h)

  // A linear or one of its adjoints, tile by tile: on the tile's part of each
  // operand that has the tiled factor. Results that have it, too, are put
  // together; one that has not is a sum over the tiles.
  void EmitTiles(NodeId id, const Node& node, const OpPlacement& placement);

  bool IsTiled(TensorId tensor) const;

  // A tile of a weight as its readers see it. One that is stored cut is
  // gathered for this reader alone: with Plan::prefetch while the tile before
  // it is at work, which makes two at a time, else when that is done.
  ValueId TileOf(TensorId weight, int tile);

  // ---- parts of nodes: recomputation, masked terms, states, sums

  // Runs a forward node again for those of its results that were not kept.
  void Recompute(NodeId id);

  // Whether the node makes gradients of a loss alone, from no other gradient:
  // those that are scaled.
  bool BeginsBackward(const Node& node) const;

  // Where a reduction is split, an additive term that lacks the factor counts
  // at coordinate 0 only.
  static std::vector<AxisSet> Masks(const Node& node,
                                    const OpPlacement& placement);

  // A coupled operator's state: [shards, state indices, width], gathered in
  // rank order over the axes that split the coupled factor.
  ValueId EmitState(NodeId id, const Node& node, const OpPlacement& placement,
                    const std::vector<ValueId>& reads);

  // Adds operands of equal layout first, then reshards each sum once.
  void EmitSum(NodeId id, const Node& node);

  // Resolves the partial sums of a new tensor as its first reader wants it,
  // sends it to the groups that read it, and leaves it to later programs. They
  // receive it where they first read it, but for what is made once a step.
  void Settle(TensorId tensor);

  // ---- gradients

  // The steps of a gradient to what the optimizer reads. A sum over axes that
  // split weights of the block, and so carry its activations, comes first:
  // behind a reduction over replicas it would keep the next block's activations
  // waiting, which follow it on its stream.
  std::vector<ReshardStep> GradientSteps(const Layout& from,
                                         const Layout& to) const;

  // Brings the gradient terms of each weight into the layout that the
  // optimizer reads, and adds them. Steps of one kind over the same axes are
  // one collective for all weights.
  std::vector<ValueId> Reduce(
      const std::vector<WeightPiece>& weights,
      const std::vector<std::vector<ValueId>>& terms_of);

  // Gradients that are reduced together: where their size is limited, by equal
  // conversions, so that a bucket is one collective.
  struct Bucket {
    GroupId group;
    std::vector<std::pair<ReshardKind, AxisSet>> steps;
    std::vector<WeightPiece> weights;
    int64_t bytes = 0;  // of the largest rank's gradients
  };

  // A gradient of this block's is complete: of the microbatch where each one's
  // is reduced, else of the step. Of a weight tied within this chunk it is
  // complete in its home block, the first of its blocks, whose backward runs
  // last. Weights tied across chunks or groups wait for the other terms (kTie).
  void Complete(TensorId weight);

  void AddToBucket(const WeightPiece& piece);
  void NoteBucket(int64_t bytes);

  // What of a weight's complete gradient is reduced.
  std::vector<ValueId> CompleteTerms(const WeightPiece& piece);

  // Reduces what is complete to what the optimizer reads.
  void ReduceBucket(const Bucket& bucket);

  bool StepsOnHost(TensorId weight) const;

  // Copies the step's reduced gradients to the host that makes their step, of
  // those that wait on the device.
  void CopyOutGradients(
      const std::vector<std::pair<WeightPiece, ValueId>>& complete);

  // The same of those that are stored cut, whose shards have all been added: of
  // this block's weights that are complete `with_backward`, or those that are
  // not.
  void CopyOutShards(bool with_backward);

  // Whether every microbatch's gradient of a weight is reduced, and these are
  // added: where it is stored cut (ZeRO stages 2 and 3) or waits on the host.
  bool ReducesEach(TensorId weight) const;

  // Adds a microbatch's reduced shard to the step's, on the stream that made
  // it: compute does not wait for the reduction.
  void AddShard(const WeightPiece& piece, ValueId shard);

  // Copies a microbatch's reduced gradients to the host and adds them there to
  // the step's.
  void AddOnHost(const std::vector<std::pair<WeightPiece, ValueId>>& reduced);

  // The accumulators of a weight here, and what kTie received for it, with
  // terms of equal layout added.
  std::vector<ValueId> GradientTerms(const WeightPiece& piece);

  // The layout in which a replica's gradient arrives at the home group: between
  // like meshes as it was accumulated, partial sums included; else summed, in
  // the layout of the home group's parameter.
  Layout TravelLayout(TensorId weight, const LoweringContext::Replica& replica,
                      size_t index) const;

  void EmitTie();

  // ---- the end of the step

  // The step's gradient as the optimizer reads it. Where each microbatch's is
  // reduced it is their sum.
  ValueId Reduced(const WeightPiece& piece);

  ValueId SquareSum();
  ValueId HostSquareSum();

  ValueId Clip();

  ValueId LossScale();

  // Whether the optimizer reads a coefficient: scaled gradients need the norm
  // to be seen to overflow.
  bool clips() const;
  // That of the options, in the table: tasks refer to its name.
  const OptimizerRow& optimizer() const;
  // The kernel that makes 16-bit parameters of updated masters.
  std::string_view CastOfUpdates() const;

  // Each group begins with a sum, of nothing if need be.
  void EmitNorm();

  // Of gradients that are all on the device, or all on the host.
  void EmitSquareSum(const std::vector<WeightPiece>& pieces, ValueId sum);

  ValueId State(Port::Kind kind, const WeightPiece& piece,
                std::string_view what, const Layout& layout);

  // What the optimizer keeps of a piece, with its ports; `index` is theirs.
  std::vector<std::pair<Port, ValueId>> Moments(const WeightPiece& piece,
                                                int index);

  // ---- factored optimizers (planner/lower/factored_update.h)

  // Along which dimensions of a weight there is a number for each index.
  enum class Along : uint8_t { kRows, kColumns, kMatrices, kNone };
  // Numbers of a weight, each a sum over elements that ranks have parts of.
  Value SumsOf(TensorId weight, std::string_view what, Along along);

  // Its rows, columns and mean, of all tiles.
  std::vector<std::pair<Port, ValueId>> MatrixMoments(TensorId weight,
                                                      int index);

  // The step of some pieces, which have all tiles of their weights: on the
  // device, or where the values are on the host there.
  struct FactoredStep {
    const std::vector<WeightPiece>& pieces;
    const std::vector<ValueId>& gradients;
    const std::vector<ValueId>& parameters;
    const std::map<Port, ValueId>& moments;  // Moments(piece, 0)
    const std::vector<ValueId>& scalars;     // the coefficient, the loss scale
  };
  void EmitFactored(const FactoredStep& step);

  // What of a step is of matrices, or of others.
  struct Kin;
  Kin KinOf(const FactoredStep& step, bool is_matrix);
  // Of each weight new ones.
  std::vector<ValueId> AddSums(const Kin& kin, std::string_view what,
                               Along along);

  // Sums of gradients, their factors, and what is summed with them: the squares
  // of parameters.
  void EmitFactors(Kin& matrices, Kin& others,
                   const std::vector<ValueId>& scalars);
  void EmitSquaredUpdates(Kin& matrices, Kin& others,
                          const std::vector<ValueId>& scalars);

  // A kernel of a factored optimizer, unless it has nothing to do.
  void AddFactored(std::string_view kernel, std::vector<ValueId> reads,
                   std::vector<ValueId> writes,
                   const std::vector<ValueId>& scalars);

  // The sums of all ranks, each reduced over the axes that it is partial on:
  // one collective for those over equal axes. What is on the host travels
  // through the device.
  std::vector<ValueId> Summed(const std::vector<ValueId>& partial);

  void EmitUpdate();

  // What a step updates, in lists: what the optimizer does, and the running
  // averages (planner/ir/running_average.h).
  struct Update {
    std::vector<WeightPiece> pieces;
    std::vector<ValueId> gradients;
    std::vector<ValueId> parameters;
    std::map<Port, ValueId> moments;  // Moments(piece, 0)
    std::vector<ValueId> writes;      // of each its parameter and moments
    std::vector<ValueId> distances;
    std::vector<ValueId> averages;
  };
  void AddPiece(const WeightPiece& piece, ValueId gradient, ValueId updated,
                const std::vector<std::pair<Port, ValueId>>& moments,
                Update& update) const;
  void EmitUpdateTasks(const Update& update,
                       const std::vector<ValueId>& scalars, bool on_host);

  void UpdateWeights(std::vector<WeightPiece> pieces);

  void UpdateOnDevice(const std::vector<WeightPiece>& pieces);

  // The stored parameter; off the device a copy of it there.
  ValueId DeviceParameter(const WeightPiece& piece);

  // Copies stored parameters to their copies on the device, or back.
  void CopyParameters(const std::vector<WeightPiece>& pieces, bool in);

  // ---- the step on the host

  // What the step of a group reads beside gradients, if any of its weights
  // steps on the host.
  void CopyOutScalars();

  // A copy in the host's memory that an earlier program has left of a value.
  ValueId LeftOnHost(const Port& port, ValueId of);

  // What the host's step updates: the parameter in the precision of the state
  // and the moments, as they are stored.
  std::vector<std::pair<Port, ValueId>> HostState(const WeightPiece& piece);

  // What of a block's weights here the host steps together: all, but each tile
  // with state in files by itself.
  std::vector<std::vector<WeightPiece>> HostSteps(int block) const;

  // Reads what the host's step of some pieces updates in files.
  void ReadState(const std::vector<WeightPiece>& pieces);

  // State in files is read during the step before, and written behind the step.
  void UpdateOnHost();

  void StepOnHost(const std::vector<WeightPiece>& pieces);

  // Masters are cast to the parameter's type and copied to where it is stored;
  // shards of one that is not cut meet on the device.
  void ReturnFromHost(const std::vector<WeightPiece>& pieces,
                      std::vector<ValueId> updated);

  // ---- weights return to where they are stored

  // Lets `value` share the buffer of `of`, which is laid out alike where it is
  // at all.
  void InPlace(ValueId shared, ValueId of);

  // What a root returns shares the buffer of the parameter that the others
  // receive it in, if that is stored on the device.
  void ReturnInPlace(ValueId shared, const WeightPiece& piece);

  // Masters are cast to the parameter's type, shards gathered into it, what the
  // root has broadcast.
  void ReturnShards(const std::vector<WeightPiece>& pieces,
                    std::vector<ValueId> shards);

  void ReturnTiedWeights();

  const LoweringContext& context_;
  const Graph& graph_;
  const int block_;
  const ProgramKind kind_;
  const ActionKind action_;
  const Pass pass_;
  BlockProgram program_;
  GroupId here_;  // the current group
  FlatMap<std::pair<GroupId, Port>, ValueId, TensorHash> imported_;
  // As the producing node left them.
  FlatMap<TensorId, ValueId, TensorHash> made_;
  // As a group has them, and as its nodes want them.
  FlatMap<std::pair<GroupId, TensorId>, ValueId, TensorHash> present_;
  FlatMap<std::tuple<GroupId, TensorId, Layout>, ValueId, TensorHash> acquired_;
  std::map<TensorId, std::vector<ValueId>> received_;  // kTie
  std::map<TensorId, ValueId> gathered_;  // fetched parameters made whole
  ValueId next_tile_;                     // fetched ahead of its use
  std::map<WeightPiece, ValueId> device_parameters_;  // copies of stored ones
  std::vector<BoundValue> leaving_;                   // to be copied out
  // Of the microbatch, where each one's are reduced.
  std::map<WeightPiece, std::vector<ValueId>> new_gradients_;
  std::vector<Bucket> buckets_;  // being filled
};

}  // namespace tessera
