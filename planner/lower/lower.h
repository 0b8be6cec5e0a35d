#pragma once
// Lower: the only place where a plan becomes work.
//
// The graph's blocks are lowered one by one, each pass of a block into a
// BlockProgram: a few dozen tasks over local values, which names what it takes
// from its surroundings (imports) and leaves to them (exports). Lower strings
// the programs together, once for every microbatch, in the schedule's order;
// the evaluator prices each distinct program once and composes their times.
// Both see the same tasks.

#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "planner/base/result.h"
#include "planner/ir/cluster.h"
#include "planner/ir/graph.h"
#include "planner/lower/stack_memory.h"
#include "planner/lower/task_graph.h"
#include "planner/plan/matrix_form.h"
#include "planner/plan/plan.h"
#include "planner/plan/stages.h"

namespace tessera {

// What is stored, reduced and updated as one: a weight, or a tile of one.
struct WeightPiece {
  TensorId weight;
  int tile = 0;
  auto operator<=>(const WeightPiece&) const = default;
};

// What lowering asks of a graph, its optimizer and a cluster's software,
// whatever the plan. Unchanging, so threads may share one.
struct LoweringFacts {
  // REQUIRES: `graph` is differentiated; it and `cluster` outlive this.
  LoweringFacts(const Graph& graph, const Cluster& cluster,
                const TrainingOptions& options);

  const Graph& graph;
  const Cluster& cluster;
  const TrainingOptions options;
  KernelMemory kernels;
  std::vector<ActionKind> parts;                   // by node
  std::vector<std::vector<NodeId>> forward_nodes;  // by block
  std::vector<std::vector<NodeId>> backward_nodes;
  std::vector<bool> once_per_step;  // by tensor
  // Who makes a tensor (invalid for inputs and weights), and who reads it, in
  // the order of nodes and operands.
  struct Read {
    NodeId node;
    size_t operand = 0;
  };
  std::vector<NodeId> producers;
  std::vector<std::vector<Read>> reads;
  // What a node does with partial sums: it wants them summed, adds them as they
  // are where it can, or is a sum of gradients, which always does.
  enum class Adds : uint8_t { kNever, kPerhaps, kAlways };
  std::vector<Adds> adds;  // by node
  std::vector<TensorId> weights;
  std::vector<int> weight_index;  // by tensor; -1 for what is no weight
  std::vector<std::vector<TensorId>> home_weights;    // by block: read there
                                                      // before any other
  std::vector<std::vector<TensorId>> gradient_terms;  // by weight
  std::vector<double> running_momenta;                // RunningMomenta(graph)
  // By weight, where the optimizer is factored.
  std::vector<std::optional<MatrixForm>> matrix_forms;
};

// Values by index, each made when it is first asked for. They stay where they
// are.
template <typename T>
class OnDemand {
 public:
  explicit OnDemand(size_t size) : at_(size, nullptr) {}
  // Null where there is none yet.
  const T* Find(size_t index) const { return at_[index]; }
  const T& Set(size_t index, T value) {
    at_[index] = &values_.emplace_back(std::move(value));
    return *at_[index];
  }

 private:
  std::vector<const T*> at_;
  std::deque<T> values_;
};

// What a plan implies before any task exists. All layouts are pure functions
// of the plan, so a block's programs depend only on what is listed here. They
// are found when they are asked for: who lowers a few blocks pays for these and
// what they touch. Not for several threads.
class LoweringContext {
 public:
  // REQUIRES: Validate(graph, cluster, plan) is empty; `facts` and `plan`
  // outlive the context.
  LoweringContext(const LoweringFacts& facts, const Plan& plan);
  LoweringContext(const LoweringContext&) = delete;
  LoweringContext& operator=(const LoweringContext&) = delete;

  // What produced(sum) is, known from elsewhere: the layouts of gradient sums
  // follow from one another through all later blocks.
  void Assume(TensorId sum, const Layout& produced);

  const Graph& graph() const { return graph_; }
  const Plan& plan() const { return plan_; }
  const TrainingOptions& options() const { return facts_.options; }
  const Stack& stack() const { return facts_.cluster.stack; }
  // What its software keeps of an element of the tensor, where not by its type.
  std::optional<int64_t> kept_bytes(TensorId tensor) const {
    const auto& kept = facts_.kernels.kept;
    return kept.empty() ? std::nullopt : kept[tensor.index()];
  }
  // Of its kernel; nothing where it needs none.
  KernelScratch scratch(NodeId node) const {
    const auto& scratch = facts_.kernels.scratch;
    return scratch.empty() ? KernelScratch() : scratch[node.index()];
  }
  bool concurrent_streams() const { return concurrent_streams_; }
  // fp16 gradients are those of a scaled loss (runtime/loss_scale.h).
  bool scales_loss() const { return graph_.dtype == DType::kFloat16; }

  const OpPlacement& placement(NodeId node) const;
  const Stages& stages() const { return stages_; }
  // The other groups that a group shares devices with.
  const std::vector<GroupId>& overlaps(GroupId group) const {
    return overlaps_[group.index()];
  }
  bool devices_are_shared() const { return devices_are_shared_; }
  // The pipeline stage of a block; -1 for a block without nodes.
  int stage_of_block(int block) const {
    return stages_.of_block[static_cast<size_t>(block)];
  }
  // The group of a block that lies on one.
  GroupId group_of_block(int block) const {
    return group_of_block_[static_cast<size_t>(block)];
  }
  // Of the pipeline: chunk * stages + stage.
  int position_of_block(int block) const {
    return position_of_block_[static_cast<size_t>(block)];
  }
  // The groups that have nodes of the block and of none before it.
  const std::vector<GroupId>& groups_begun(int block) const {
    return groups_begun_[static_cast<size_t>(block)];
  }
  // kForward, or the part of the backward that the node belongs to: a node
  // whose results are all gradients of weights to kBackwardWeight, any other to
  // kBackwardInput.
  ActionKind part(NodeId node) const { return facts_.parts[node.index()]; }
  const std::vector<std::vector<NodeId>>& nodes_of_block(Pass pass) const {
    return pass == Pass::kForward ? facts_.forward_nodes
                                  : facts_.backward_nodes;
  }

  // A tensor as a group has it: as the group's producer leaves it, or as it
  // arrives. Partial sums are resolved to what the first reader wants, and so
  // is what only an all-to-all separates from it: as much lies on each rank
  // either way, and backward need not exchange it again. Never with a halo.
  struct Presence {
    GroupId group;
    Layout layout;
    // Where it is produced, or first read and received (in a backward with the
    // gradients of activations, which run first).
    int first_block = -1;
    ActionKind first_part = ActionKind::kForward;
    struct Reader {
      int block = -1;
      ActionKind part = ActionKind::kForward;
      bool operator==(const Reader&) const = default;
    };
    std::vector<Reader> readers = {};  // on this group
  };
  // The first entry is the producer's group; further ones receive it.
  const std::vector<Presence>& presences(TensorId tensor) const;
  const Presence* presence(TensorId tensor, GroupId group) const;
  // The forward node that its block's backward (where it is split, the part
  // with the gradients of activations) runs again to make `tensor`, which was
  // not kept; invalid for other tensors.
  NodeId recomputed(TensorId tensor) const;
  // The forward nodes of a block that run again, in order.
  const std::vector<NodeId>& recomputed_nodes(int block) const;
  // The axes along which a group's inputs come from a root: those of the root
  // that keeps a weight with which a node there reads the input. Elsewhere
  // ranks load what they need, whenever they need it; what a root loads is
  // scattered once for each microbatch, and has a presence.
  AxisSet InputRoot(TensorId input, GroupId group) const;
  // Whether an activation that was exchanged for its readers is kept as it was
  // produced, too, because an adjoint in its block wants it so.
  bool kept_as_produced(TensorId tensor) const;
  // The layout in which a node of that placement reads an operand.
  Layout Wanted(const Node& node, const OpPlacement& placement,
                size_t operand) const {
    return OperandLayout(graph_, node, placement,
                         plan_.groups[placement.group.index()], operand);
  }
  // The layout in which the producing node leaves a tensor, partial or not.
  const Layout& produced(TensorId tensor) const;

  // A weight on a group that reads it. The first is its home, where the
  // optimizer works; the others are tied replicas.
  struct Replica {
    GroupId group;
    Layout layout;                  // of the parameter
    int block = -1;                 // that of the first reader in this group
    bool one_chunk = true;          // all readers in this group are in one
    std::vector<Layout> gradients;  // distinct layouts of accumulated terms
  };
  const std::vector<Replica>& replicas(TensorId weight) const;
  const WeightPlacement& weight_placement(TensorId weight) const;
  // The stage at which the weight is really cut: 0 without axes to cut over.
  int ZeroStage(TensorId weight) const;
  // In how many tiles a weight is stored and used; 1: in one piece.
  int tiles(TensorId weight) const;
  // What of a weight's layout is the piece's.
  Layout PieceOf(Layout layout, const WeightPiece& piece) const;
  // The stored layout of the reduced gradient and the optimizer's state: cut
  // (ZeRO), on a root, or as the parameter.
  Layout StateLayout(const WeightPiece& piece) const;
  // The stored layout of a replica's parameter: whole, or cut like the state
  // at ZeRO stage 3.
  Layout ParameterLayout(const WeightPiece& piece,
                         const Replica& replica) const;
  // Weights whose stored parameter is not what their readers see, being cut or
  // off the device, and that nodes of `block` read in an action, in the order
  // of their first reads, those that run again last. Without those in tiles,
  // each of which is fetched for its use.
  std::vector<TensorId> FetchedWeights(int block, ActionKind action) const;
  bool IsFetched(TensorId weight) const {
    return ZeroStage(weight) >= 3 ||
           weight_placement(weight).parameter_tier != MemoryTier::kDevice;
  }
  // Whether the weight's gradient waits on the host for its step.
  bool HasHostGradient(TensorId weight) const {
    return weight_placement(weight).gradient_tier == MemoryTier::kHost;
  }
  // Whether the host's state has a parameter of its own: it is not stored as
  // the state is, beside it.
  bool HasHostMaster(TensorId weight) const;
  // Whether the host's step reads and writes files.
  bool HasFileState(TensorId weight) const;
  // The next block that is home to such weights on the group, or -1; with
  // `direction` -1 the one before.
  int NextFileBlock(int block, GroupId group, int direction) const;

  // A kept activation that leaves the device between the passes: a buffer of
  // Port::kTensor on a group.
  struct Offloaded {
    TensorId tensor;
    int index = 0;  // of its Port
    GroupId group;
    MemoryTier tier = MemoryTier::kHost;
    // In which action of `offloaded`'s block it is first read.
    ActionKind part = ActionKind::kBackwardInput;
  };
  // Those that backward first reads in `block`.
  const std::vector<Offloaded>& offloaded(int block) const {
    return offloaded_[static_cast<size_t>(block)];
  }
  // Null where the buffer stays, or backward does not read it.
  const Offloaded* FindOffloaded(TensorId tensor, int index,
                                 GroupId group) const;

  // The block that the position of `block` runs `ahead` blocks later in a pass
  // (earlier where negative), or -1 where the pass ends before.
  int BlockAhead(int block, Pass pass, int ahead) const;
  // Whether a weight's gradient is complete with the last backward of its home
  // block's chunk, and reduced with it: nothing else reads the weight. On one
  // stream the stages of a pipeline first end all of their backwards.
  bool CompleteWithBackward(TensorId weight) const;
  // Weights whose home block is `block`, in tensor order.
  const std::vector<TensorId>& home_weights(int block) const {
    return facts_.home_weights[static_cast<size_t>(block)];
  }
  // Whether the node adds its operands as they are, partial sums included.
  bool passes_partial(NodeId node) const;
  // Whether the tensor is produced once a step, not once a microbatch.
  bool once_per_step(TensorId tensor) const {
    return facts_.once_per_step[tensor.index()];
  }
  const std::vector<TensorId>& weights() const { return facts_.weights; }
  // That of a weight; nothing where it is no matrix. REQUIRES: the optimizer is
  // factored.
  const std::optional<MatrixForm>& matrix_form(TensorId weight) const {
    return facts_.matrix_forms[WeightIndex(weight)];
  }
  // Whether a weight is one (planner/ir/running_average.h).
  bool is_running_average(TensorId weight) const {
    return facts_.running_momenta[weight.index()] >= 0;
  }
  // Those with replicas on several groups, in tensor order.
  const std::vector<TensorId>& tied_weights() const { return tied_weights_; }

 private:
  void PlaceBlocks();
  void FindInputRoots();
  void FindTied();
  void FindOffloaded();

  bool PassesPartial(NodeId node) const;
  Layout SumLayout(NodeId sum) const;
  Layout WholeSum(NodeId sum) const;
  Layout HomeLayout(TensorId tensor) const;
  Layout LayoutOn(TensorId tensor, GroupId group) const;
  Layout ReadLayout(const LoweringFacts::Read& read) const;
  Layout Settled(const Layout& produced, GroupId home, const Layout& wanted,
                 GroupId reader) const;
  std::vector<Presence> FindPresences(TensorId tensor) const;
  std::vector<NodeId> FindRecomputed(int block) const;
  bool FindKept(TensorId tensor) const;
  std::vector<Replica> FindReplicas(TensorId weight) const;

  const Layout& ProducedBy(NodeId node, TensorId tensor) const;

  size_t WeightIndex(TensorId weight) const {
    return static_cast<size_t>(facts_.weight_index[weight.index()]);
  }

  const LoweringFacts& facts_;
  const Graph& graph_;
  const Plan& plan_;
  bool concurrent_streams_ = true;
  Stages stages_;
  std::vector<std::vector<GroupId>> overlaps_;  // by group
  bool devices_are_shared_ = false;
  bool fetches_ = false;  // a parameter at least
  std::vector<GroupId> group_of_block_;
  std::vector<int> position_of_block_;
  std::vector<std::vector<GroupId>> groups_begun_;  // by block
  std::map<std::pair<TensorId, GroupId>, AxisSet> input_roots_;
  std::vector<TensorId> tied_weights_;
  std::vector<std::vector<Offloaded>> offloaded_;  // by block
  // The same by tensor, index and group.
  std::map<std::tuple<TensorId, int, GroupId>, Offloaded> offloaded_at_;

  // Found on demand.
  enum class Known : uint8_t { kNot, kNo, kYes };
  mutable OnDemand<OpPlacement> adjoint_placements_;        // by node
  mutable OnDemand<Layout> produced_;                       // by tensor
  mutable OnDemand<std::vector<Presence>> presences_;       // by tensor
  mutable OnDemand<std::vector<NodeId>> recomputed_nodes_;  // by block
  mutable std::vector<NodeId> recomputed_;                  // by tensor
  mutable OnDemand<std::vector<Replica>> replicas_;         // by weight
  mutable std::vector<Known> kept_as_produced_;             // by tensor
  mutable std::vector<Known> passes_partial_;               // by node
};

// Whether an action of one kind does the nodes of a part.
inline bool Includes(ActionKind action, ActionKind part) {
  return action == part ||
         (action == ActionKind::kBackward && part != ActionKind::kForward);
}

enum class ProgramKind : uint8_t {
  kBegin,                 // once a step, before the first microbatch
  kForward,               // a microbatch's forward
  kBackward,              // a microbatch's backward
  kBackwardReduce,        // the chunk's last: gradients are reduced as they end
  kBackwardInput,         // a microbatch's gradients of activations
  kBackwardWeight,        // a microbatch's gradients of weights
  kBackwardWeightReduce,  // the chunk's last
  kTie,     // gradients that were not reduced before, as several positions
            // read the weight or streams are one: they are complete, meet on
            // their home group and are reduced
  kNorm,    // sum of squares of the reduced gradients
  kUpdate,  // optimizer, and what returns the new parameters
};
inline constexpr int kProgramKinds = 10;
// The program of an action, `last` for the chunk's last gradients of weights.
ProgramKind ProgramOf(ActionKind action, bool last);

// What a value of a program is outside of it. One buffer exists for each
// (group, port), and for each microbatch of a kTensor that is not once a step.
struct Port {
  enum Kind : uint8_t {
    kTensor,        // a graph tensor as the group has it (index 0), or as it
                    // was produced (1)
    kParameter,     // a weight as the group stores it
    kAccumulator,   // a weight's summed gradient terms of one layout
    kReduced,       // a weight's gradient as the optimizer reads it
    kGathered,      // a fetched parameter as one action's readers see it
    kOffloaded,     // a kept activation on its tier
    kMaster,        // fp32 shard of a 16-bit weight
    kFirstMoment,   // or the rows of a factored second one
    kSecondMoment,  // or its columns
    kMeanMoment,    // of all elements of a factored one
    kSquareSum,     // of the rank's gradients; lives on the world group, and
                    // of those on the host (index 1) on theirs
    kClip,          // the clip coefficient on a group
    kLossScale,     // the state of fp16's loss scaling on a group
  };
  Kind kind = kTensor;
  TensorId tensor;  // invalid from kSquareSum on
  // kTensor and kOffloaded: 1 as it was produced; kAccumulator: which of
  // Replica::gradients; kGathered: the action; kSquareSum: 1 on the host; of
  // all others 1 for what the host's step has in its memory for a while: the
  // gradient that waits on the device, the state that lives in files, and the
  // parameter where it is part of that.
  int index = 0;
  int tile = 0;  // of the weight
  auto operator<=>(const Port&) const = default;

  // All of it, for tables; never zero. REQUIRES: index < 256, tile < 65536.
  uint64_t word() const {
    return (static_cast<uint64_t>(kind) + 1) << 56 |
           static_cast<uint64_t>(index) << 48 |
           static_cast<uint64_t>(tile) << 32 |
           static_cast<uint32_t>(tensor.value);
  }
};

struct BoundValue {
  Port port;
  ValueId value;  // into BlockProgram::values
};

// A send to, or receive from, another group than the task's. Matched by (port,
// group pair).
struct Transfer {
  size_t task = 0;  // into BlockProgram::tasks
  Port port;
  GroupId peer;  // the group on the other side
};

// Programs hold tasks of one group or of several. A bound value's group is
// that of its port.
struct BlockProgram {
  // Local ids: ValueId and TaskId index these two vectors. `deps`, `peer` and
  // sample offsets are filled in when the program is placed in a TaskGraph; a
  // value's shape is that of a microbatch.
  std::vector<Value> values;
  std::vector<Task> tasks;
  std::vector<BoundValue> imports;  // exist before the program runs
  std::vector<BoundValue> exports;  // exist after it
  std::vector<Transfer> sends;
  std::vector<Transfer> receives;
  // Any Plan::bucket_bytes from the one to the other gives the same program.
  Bytes least_bucket = {0};
  Bytes most_bucket = {std::numeric_limits<int64_t>::max()};
};

BlockProgram LowerBlock(const LoweringContext& context, int block,
                        ProgramKind kind);

// The sum of squares of the gradients, one on each device.
Value SquareSumValue(const LoweringContext& context);
// That of a group's gradients on the host, one for each rank.
Value HostSquareSumValue(const LoweringContext& context, GroupId group);

// The whole step. REQUIRES: Validate(graph, cluster, plan) is empty.
TaskGraph Lower(const LoweringFacts& facts, const Plan& plan);
TaskGraph Lower(const Graph& graph, const Cluster& cluster, const Plan& plan,
                const TrainingOptions& options);

}  // namespace tessera
