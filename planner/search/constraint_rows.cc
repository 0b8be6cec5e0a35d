#include "planner/search/constraint_rows.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "planner/base/divide.h"
#include "planner/plan/axis_roles.h"
#include "planner/plan/recompute.h"
#include "planner/plan/rooted.h"
#include "planner/plan/stages.h"
#include "planner/plan/used_part.h"

namespace tessera {
namespace {

bool IsAttention(const Node& node) {
  return node.op->op_class == OpClass::kAttention;
}

// Whether its table of rows can be split, by rows or by features.
bool IsLookup(const Node& node) {
  return node.op->name == "embedding" || node.op->name == "embedding_bag";
}

// The axes of a node on its factor `factor`; none where that is -1.
AxisSet AxesOn(const OpPlacement& op, int factor) {
  return factor < 0 ? AxisSet{0} : op.axes[static_cast<size_t>(factor)];
}

// Those that split samples. A rank with some of the experts has theirs of the
// samples that the expert axes split elsewhere.
AxisSet DataAxes(const GraphIndex& index, const OpPlacement& op, NodeId node) {
  if (index.SampleFactor(node) < 0) return 0;
  return AxesOn(op, index.SampleFactor(node)) |
         AxesOn(op, index.ExpertFactor(node));
}

// Of a dense node, or of a lookup, those that split neither samples, nor the
// sequence, nor experts.
AxisSet TensorAxes(const GraphIndex& index, const OpPlacement& op,
                   NodeId node) {
  if (!IsDense(index.graph->node(node)) && !IsLookup(index.graph->node(node))) {
    return 0;
  }
  AxisSet axes = 0;
  for (int f = 0; f < kMaxFactors; ++f) {
    if (f == index.SampleFactor(node) || f == index.SequenceFactor(node) ||
        f == index.ExpertFactor(node)) {
      continue;
    }
    axes |= AxesOn(op, f);
  }
  return axes;
}

AxisSet ContextAxes(const GraphIndex& index, const OpPlacement& op,
                    NodeId node) {
  return AxesOn(op, index.SequenceFactor(node));
}

AxisSet ExpertAxes(const GraphIndex& index, const OpPlacement& op,
                   NodeId node) {
  return AxesOn(op, index.ExpertFactor(node));
}

// Of the nodes of one block: those of attention's axes that split its heads in
// place of the sequence, as context axes may do on top of tensor axes.
class HeadAxes {
 public:
  HeadAxes(const GraphIndex& index, const Plan& plan, int block)
      : index_(index), plan_(plan), block_(block) {}

  AxisSet Of(NodeId node) {
    const OpPlacement& op = plan_.ops[node.index()];
    if (!IsAttention(index_.graph->node(node))) return 0;
    const AxisSet axes = TensorAxes(index_, op, node);
    if (axes == 0) return 0;
    if (op.group != group_) {
      group_ = op.group;
      of_group_ = HeadContextAxes(index_, plan_, block_, group_);
    }
    return axes & of_group_;
  }

 private:
  const GraphIndex& index_;
  const Plan& plan_;
  const int block_;
  GroupId group_;  // that was asked for last
  AxisSet of_group_ = 0;
};

// Kinds of split: the axes of a node that are of it, but for HeadAxes, whether
// a node can have such axes at all, and a uniform plan in which axis 0 splits
// so and axis 1 otherwise.
struct SplitKind {
  AxisSet (*axes)(const GraphIndex& index, const OpPlacement& op, NodeId node);
  bool (*can)(const GraphIndex& index, NodeId node);
  AxisRoles example;
  bool has_head_axes = false;  // HeadAxes are of this kind, not of another
};

constexpr SplitKind kData = {DataAxes,
                             [](const GraphIndex& index, NodeId node) {
                               return index.SampleFactor(node) >= 0;
                             },
                             {.data = 1}};
constexpr SplitKind kTensor = {TensorAxes,
                               [](const GraphIndex& index, NodeId node) {
                                 return IsDense(index.graph->node(node));
                               },
                               {.tensor = 1}};
// What is meant where no dense node is.
constexpr SplitKind kTable = {TensorAxes,
                              [](const GraphIndex& index, NodeId node) {
                                return IsLookup(index.graph->node(node));
                              },
                              {.tensor = 1}};
// Tensor axes may split the sequence besides.
constexpr SplitKind kContext = {ContextAxes,
                                [](const GraphIndex& index, NodeId node) {
                                  return index.SequenceFactor(node) >= 0;
                                },
                                {.context = 1, .tensor = 2, .sequence = true},
                                true};
constexpr SplitKind kExpert = {ExpertAxes,
                               [](const GraphIndex& index, NodeId node) {
                                 return index.ExpertFactor(node) >= 0;
                               },
                               {.expert = 1}};

// The axes of a node that are of a kind.
template <const SplitKind& kKind>
AxisSet AxesOfKind(const GraphIndex& index, const Plan& plan, NodeId node,
                   HeadAxes& heads) {
  const AxisSet axes = kKind.axes(index, plan.ops[node.index()], node);
  return kKind.has_head_axes ? axes | heads.Of(node) : axes & ~heads.Of(node);
}

// Those that can be split so.
template <const SplitKind& kKind>
std::vector<NodeId> Splittable(const GraphIndex& index,
                               const std::vector<NodeId>& nodes, int) {
  std::vector<NodeId> held;
  std::ranges::copy_if(nodes, std::back_inserter(held),
                       [&](NodeId node) { return kKind.can(index, node); });
  return held;
}

// Those of them that uniform plans of so many ways split so.
template <const SplitKind& kKind>
std::vector<NodeId> UsuallySplit(const GraphIndex& index,
                                 const std::vector<NodeId>& nodes, int value) {
  std::vector<NodeId> held = Splittable<kKind>(index, nodes, value);
  const int block = index.graph->node(nodes[0]).block;
  DeviceGroup group;
  group.axes = {{"", value}, {"", 2}};
  const auto placed =
      PlaceBlock(index, block, group, GroupId(0), kKind.example);
  std::erase_if(held, [&](NodeId node) {
    return kKind.axes(index, placed[index.position[node.index()]], node) != 1;
  });
  return held;
}

template <const SplitKind& kKind>
bool IsSplit(const GraphIndex& index, const Plan& plan,
             const std::vector<NodeId>& nodes, int value) {
  HeadAxes heads(index, plan, index.graph->node(nodes[0]).block);
  return std::ranges::all_of(nodes, [&](NodeId node) {
    const GroupId group = plan.ops[node.index()].group;
    return plan.groups[group.index()].Size(
               AxesOfKind<kKind>(index, plan, node, heads)) == value;
  });
}

// Calls `visit(weight)` for the weights at home in a node, into
// GraphIndex::weights.
template <typename Visit>
void ForEachWeightAt(const GraphIndex& index, NodeId node, const Visit& visit) {
  for (TensorId operand : index.graph->node(node).operands) {
    if (index.graph->tensor(operand).kind != TensorKind::kWeight) continue;
    const auto at = std::ranges::lower_bound(index.weights, operand, {},
                                             &GraphIndex::WeightUse::tensor);
    if (at->home.node == node) {
      visit(static_cast<size_t>(at - index.weights.begin()));
    }
  }
}

std::vector<NodeId> HomesOfWeights(const GraphIndex& index,
                                   const std::vector<NodeId>& nodes, int) {
  std::vector<NodeId> homes;
  for (NodeId node : nodes) {
    bool is_home = false;
    ForEachWeightAt(index, node, [&](size_t) { is_home = true; });
    if (is_home) homes.push_back(node);
  }
  return homes;
}

// A stage without axes is held, too: such a weight has nothing to cut (experts
// of which every rank has others), and `*=zero:1` does not mean it.
bool HasZero(const GraphIndex& index, const Plan& plan,
             const std::vector<NodeId>& nodes, int value) {
  bool all = true;
  for (NodeId node : nodes) {
    ForEachWeightAt(index, node, [&](size_t weight) {
      all &= plan.weights[weight].zero_stage == value;
    });
  }
  return all;
}

// One node stands for its layer.
std::vector<NodeId> NodeOfLayer(const GraphIndex& index,
                                const std::vector<NodeId>& nodes, int) {
  const int block = index.graph->node(nodes[0]).block;
  const auto [first, last] = Layers(index);
  if (block < first || block >= last) return {};
  return {index.nodes_of_block[static_cast<size_t>(block)][0]};
}

bool Recomputes(const GraphIndex& index, const Plan& plan,
                const std::vector<NodeId>& nodes, int value) {
  const int block = index.graph->node(nodes[0]).block;
  return RecomputeOf(index, plan, block) == static_cast<RecomputeLevel>(value);
}

std::string Nothing(int) {
  return "";
}

constexpr std::array kKeys = {
    HeldRow{.key = {"dp", "ways that samples are split"},
            .lacking = "has samples",
            .finders = {UsuallySplit<kData>, Splittable<kData>},
            .holds = IsSplit<kData>,
            .needs = Nothing,
            .is_ways = true},
    HeldRow{
        .key = {"tp",
                "ways that dense layers and attention, or a table of rows that "
                "is named alone, are split otherwise"},
        .lacking = "is dense, nor looks rows up",
        .finders = {UsuallySplit<kTensor>, Splittable<kTensor>,
                    UsuallySplit<kTable>, Splittable<kTable>},
        .holds = IsSplit<kTensor>,
        .needs = [](int value) { return std::string(value > 1 ? "tp" : ""); },
        .asked = IsDense,
        .is_ways = true},
    HeldRow{
        .key = {"cp",
                "ways that the sequence is split, or attention's heads in its "
                "place"},
        .lacking = "has a sequence",
        .finders = {UsuallySplit<kContext>, Splittable<kContext>},
        .holds = IsSplit<kContext>,
        .needs = [](int value) { return std::string(value > 1 ? "cp" : ""); },
        .asked = IsAttention,
        .is_ways = true},
    HeldRow{
        .key = {"ep", "ways that experts are split"},
        .lacking = "has experts",
        .finders = {UsuallySplit<kExpert>, Splittable<kExpert>},
        .holds = IsSplit<kExpert>,
        .needs = [](int value) { return std::string(value > 1 ? "ep" : ""); },
        .is_ways = true},
    HeldRow{.key = {"zero", "ZeRO stage of the weights"},
            .lacking = "has weights",
            .finders = {HomesOfWeights},
            .holds = HasZero,
            .needs =
                [](int value) {
                  return value > 0 ? "zero" + std::to_string(value) : "";
                }},
    HeldRow{.key = {"recompute", "recomputation of the layer"},
            .lacking = "is in a layer",
            .finders = {NodeOfLayer},
            .holds = Recomputes,
            .needs =
                [](int value) {
                  const bool is_none = static_cast<RecomputeLevel>(value) ==
                                       RecomputeLevel::kNone;
                  return std::string(is_none ? "" : "recompute");
                }},
};

template <int kStage>
bool HasZeroStage(const WeightPlacement& weight) {
  return weight.zero_axes != 0 && weight.zero_stage == kStage;
}

// Whether a node of the block of which `asked` is true is split so.
template <const SplitKind& kKind, bool (*kAsked)(const Node& node)>
bool AnyIsSplit(const GraphIndex& index, const Plan& plan, int block) {
  HeadAxes heads(index, plan, block);
  return std::ranges::any_of(
      index.nodes_of_block[static_cast<size_t>(block)], [&](NodeId node) {
        return kAsked(index.graph->node(node)) &&
               AxesOfKind<kKind>(index, plan, node, heads) != 0;
      });
}

bool HasExperts(const GraphIndex& index, const Plan& plan, NodeId node) {
  return ExpertAxes(index, plan.ops[node.index()], node) != 0;
}

bool HasRecompute(const GraphIndex&, const Plan& plan, NodeId node) {
  return plan.ops[node.index()].recompute;
}

bool HasTiles(const GraphIndex&, const Plan& plan, NodeId node) {
  return plan.ops[node.index()].tiles > 1;
}

bool Offloaded(const GraphIndex&, const Plan& plan, NodeId node) {
  return plan.ops[node.index()].activation_tier != MemoryTier::kDevice;
}

bool WeightOffloaded(const WeightPlacement& weight) {
  return weight.parameter_tier != MemoryTier::kDevice ||
         weight.optimizer_tier != MemoryTier::kDevice;
}

bool Rooted(const GraphIndex&, const Plan& plan, NodeId node) {
  return plan.ops[node.index()].rooted != 0;
}

template <typename Is>
bool AnyNode(const GraphIndex& index, Is is) {
  for (size_t i = 0; i < index.forward_nodes; ++i) {
    if (is(NodeId(i))) return true;
  }
  return false;
}

bool IsDataParallel(const GraphIndex& index, const Cluster&, const Plan& plan) {
  return StagesOf(*index.graph, plan).count() == 1 && plan.groups.size() == 1 &&
         !AnyNode(index, [&](NodeId node) {
           for (int f = 0; f < kMaxFactors; ++f) {
             if (f != index.SampleFactor(node) &&
                 AxesOn(plan.ops[node.index()], f) != 0) {
               return true;
             }
           }
           return false;
         });
}

bool IsMegatron(const GraphIndex& index, const Cluster& cluster,
                const Plan& plan) {
  const auto s = StrategyOnPart(index, cluster, plan);
  return s.has_value() && s->zero <= 1 && s->zero_group == 0 && s->tiles == 1 &&
         s->dp_kind == DataParallelKind::kDdp && !s->split_branches &&
         !s->by_speed && s->actions.empty() && !Offloads(plan);
}

bool IsSoap(const GraphIndex& index, const Cluster&, const Plan& plan) {
  const bool stores_whole = std::ranges::all_of(
      plan.weights, [](const WeightPlacement& w) { return w.zero_axes == 0; });
  return stores_whole && plan.microbatches == 1 && !Offloads(plan) &&
         !UsesRoot(plan) && !AnyNode(index, [&](NodeId node) {
           return HasRecompute(index, plan, node) ||
                  HasTiles(index, plan, node);
         });
}

}  // namespace

std::span<const HeldRow> HeldRows() {
  return kKeys;
}

std::span<const FixKey> FixKeys() {
  static const auto table = [] {
    std::array<FixKey, kKeys.size()> keys;
    std::ranges::transform(kKeys, keys.begin(), &HeldRow::key);
    return keys;
  }();
  return table;
}

std::span<const ForbiddenRow> Forbidden() {
  static constexpr std::array kTable = {
      ForbiddenRow{"tp", "tensor parallelism", nullptr, nullptr, nullptr,
                   AnyIsSplit<kTensor, IsDense>},
      ForbiddenRow{"pp", "pipelines", nullptr, nullptr,
                   [](const GraphIndex& index, const Plan& plan) {
                     return StagesOf(*index.graph, plan).count() > 1;
                   }},
      ForbiddenRow{"cp",
                   "attention with a split sequence, or with heads split in "
                   "its place (Ulysses)",
                   nullptr, nullptr, nullptr,
                   AnyIsSplit<kContext, IsAttention>},
      ForbiddenRow{"ep", "split experts", HasExperts},
      ForbiddenRow{"zero1", "ZeRO stage 1", nullptr, HasZeroStage<1>},
      ForbiddenRow{"zero2", "ZeRO stage 2", nullptr, HasZeroStage<2>},
      ForbiddenRow{"zero3", "ZeRO stage 3", nullptr, HasZeroStage<3>},
      ForbiddenRow{"recompute", "recomputation", HasRecompute},
      ForbiddenRow{"tiles", "linears in tiles", HasTiles},
      ForbiddenRow{"offload", "anything in the host's memory or in files",
                   Offloaded, WeightOffloaded},
      ForbiddenRow{
          "rooted", "a root that steps for all", Rooted,
          [](const WeightPlacement& weight) { return weight.rooted != 0; }},
      ForbiddenRow{
          "branches", "branches on groups of their own", nullptr, nullptr,
          [](const GraphIndex& index, const Plan& plan) {
            const Stages stages = StagesOf(*index.graph, plan);
            return static_cast<size_t>(stages.count()) < plan.groups.size();
          }},
      ForbiddenRow{"shares", "unequal samples of the devices of a group",
                   nullptr, nullptr,
                   [](const GraphIndex&, const Plan& plan) {
                     return std::ranges::any_of(
                         plan.groups, [](const DeviceGroup& group) {
                           return group.IsUneven(group.all_axes());
                         });
                   }},
  };
  return kTable;
}

std::span<const Subspace> Subspaces() {
  static const std::vector<Subspace> kTable = {
      {"megatron",
       "uniform plans of tp, pp, dp, cp and ep, with ZeRO-1 at most",
       IsMegatron,
       {"zero2", "zero3", "tiles", "offload"}},
      {"dp",
       "splits of samples only, with any ZeRO",
       IsDataParallel,
       {"tp", "pp", "cp", "ep"}},
      {"soap",
       "splits and placements of operators in one microbatch: no ZeRO, "
       "recomputation, tiles or offloading (Jia et al. 2019)",
       IsSoap,
       {"zero1", "zero2", "zero3", "recompute", "tiles", "offload", "rooted"}},
      {"full", "everything",
       [](const GraphIndex&, const Cluster&, const Plan&) { return true; }},
  };
  return kTable;
}

bool Has(const ForbiddenRow& row, const GraphIndex& index, const Plan& plan) {
  if (row.block != nullptr) {
    for (int b = 0; b < static_cast<int>(index.nodes_of_block.size()); ++b) {
      if (row.block(index, plan, b)) return true;
    }
  }
  return (row.node != nullptr &&
          AnyNode(index,
                  [&](NodeId node) { return row.node(index, plan, node); })) ||
         (row.weight != nullptr &&
          std::ranges::any_of(plan.weights, row.weight)) ||
         (row.stages != nullptr && row.stages(index, plan));
}

int64_t MostSamples(const GraphIndex& index, const Plan& plan, NodeId node) {
  if (index.SampleFactor(node) < 0 ||
      index.graph->node(node).op->once_per_step) {
    return 0;
  }
  const OpPlacement& op = plan.ops[node.index()];
  return LargestShard(plan.groups[op.group.index()], DataAxes(index, op, node),
                      DivideUp(index.graph->global_batch, plan.microbatches));
}

bool IsDense(const Node& node) {
  return node.op->op_class == OpClass::kMatmul || IsAttention(node);
}

}  // namespace tessera
