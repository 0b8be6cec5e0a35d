#include "planner/plan/axis_roles.h"

#include <algorithm>
#include <numeric>

#include "planner/plan/tiles.h"

namespace tessera {
namespace {

// A subset of axes, and how many ranks it has.
struct SizedAxes {
  AxisSet axes = 0;
  int64_t size = 1;
};

// The subset of `axes` with the largest size that is at most `extent`; of
// equal sizes the one with the outer axes.
AxisSet LargestFitting(const DeviceGroup& group, AxisSet axes, int64_t extent) {
  if (group.Size(axes) <= extent) return axes;
  // Axes of one size are alike: of so many the outermost are taken. So there
  // are few subsets to look at, though there are many axes.
  std::vector<int64_t> sizes;
  for (AxisSet left = axes; left != 0; left &= left - 1) {
    const int64_t size = group.Size(left & (~left + 1));
    if (size > 1 && std::ranges::find(sizes, size) == sizes.end()) {
      sizes.push_back(size);
    }
  }
  std::vector<SizedAxes> subsets = {{}};
  for (const int64_t size : sizes) {
    std::vector<SizedAxes> longer;
    for (SizedAxes subset : subsets) {
      longer.push_back(subset);
      for (AxisSet left = axes; left != 0; left &= left - 1) {
        const AxisSet axis = left & (~left + 1);
        if (group.Size(axis) != size) continue;
        if (subset.size > extent / size) break;
        subset = {subset.axes | axis, subset.size * size};
        longer.push_back(subset);
      }
    }
    subsets = std::move(longer);
  }
  return std::ranges::max(subsets,
                          [](const SizedAxes& a, const SizedAxes& b) {
                            return a.size != b.size ? a.size < b.size
                                                    : a.axes > b.axes;
                          })
      .axes;
}

// An activation inside a block: its tensor axes by dimension.
struct Activation {
  bool stream = true;  // on the residual stream
  std::array<AxisSet, kMaxDims> dims = {};
};

class BlockPlacer {
 public:
  BlockPlacer(const GraphIndex& index, int block, const DeviceGroup& group,
              GroupId group_id, const AxisRoles& roles)
      : index_(index),
        graph_(*index.graph),
        block_(block),
        nodes_(index.nodes_of_block[static_cast<size_t>(block)]),
        group_(group),
        group_id_(group_id),
        roles_(roles),
        placements_(nodes_.size()) {
    size_t results = 0;
    for (NodeId id : nodes_) {
      first_result_.push_back(results);
      results += graph_.node(id).results.size();
    }
    activations_.resize(results);
  }

  std::vector<OpPlacement> Run(std::vector<UnusedAxes>* unused) {
    for (NodeId id : nodes_) Place(id);
    if (unused != nullptr) *unused = too_few_heads_;
    for (const auto& [node, axes] : left_over_) {
      if (unused == nullptr) break;
      bool attention = false;
      if ((axes & ~UsedBehind(node, attention)) == 0) continue;
      int64_t columns = 1;
      for (size_t f : Columns(node)) {
        columns *= index_.extents[node.index()][f];
      }
      unused->push_back({node, columns, attention, /*context=*/false});
    }
    return std::move(placements_);
  }

 private:
  bool IsActivation(TensorId id) const {
    const TensorKind kind = graph_.tensor(id).kind;
    return kind != TensorKind::kInput && kind != TensorKind::kWeight;
  }

  const Activation& ActivationOf(TensorId id) const {
    static const Activation from_elsewhere;
    const NodeId maker = index_.producer[id.index()];
    if (!maker.valid()) return from_elsewhere;
    const Node& node = graph_.node(maker);
    if (node.block != block_) return from_elsewhere;
    const auto k = static_cast<size_t>(std::ranges::find(node.results, id) -
                                       node.results.begin());
    return activations_[first_result_[index_.position[maker.index()]] + k];
  }

  void Place(NodeId id) {
    const Node& node = graph_.node(id);
    OpPlacement& placement = placements_[index_.position[id.index()]];
    placement.group = group_id_;
    const int sample = index_.SampleFactor(id);
    const int sequence = index_.SequenceFactor(id);
    const int expert = index_.ExpertFactor(id);
    if (expert >= 0) {
      placement.axes[static_cast<size_t>(expert)] =
          roles_.expert | roles_.folded;
    } else if (const int to_experts = index_.DispatchFactor(id);
               to_experts >= 0) {
      placement.axes[static_cast<size_t>(to_experts)] = roles_.folded;
    }
    if (sample >= 0) {
      placement.axes[static_cast<size_t>(sample)] =
          expert >= 0 ? roles_.data : roles_.data | roles_.expert;
    }
    const bool by_heads =
        roles_.heads && node.op->op_class == OpClass::kAttention;
    if (sequence >= 0 && !by_heads &&
        node.rule.factors[static_cast<size_t>(sequence)].splittable) {
      placement.axes[static_cast<size_t>(sequence)] =
          Fitting(id, static_cast<size_t>(sequence), roles_.context);
      if (roles_.ring && node.op->streamed != 0) {
        placement.streamed = roles_.context;
      }
    }
    if (by_heads) {
      if (roles_.tensor != 0) Inherit(id, placement);
      SplitHeads(id, placement);
    }
    if (roles_.tensor == 0) return;

    bool any_activation = false;
    bool any_stream = false;
    bool any_weight = false;
    for (TensorId operand : node.operands) {
      any_weight |= graph_.tensor(operand).kind == TensorKind::kWeight;
      if (!IsActivation(operand)) continue;
      any_activation = true;
      any_stream |= ActivationOf(operand).stream;
    }
    Inherit(id, placement);
    bool stream = any_stream || (!any_activation && any_weight);
    if (node.op->op_class == OpClass::kMatmul) {
      if (ActivationOf(node.operands[0]).stream) {
        AxisSet rest = roles_.tensor & ~Used(placement);
        for (size_t f : Columns(id)) {
          const AxisSet axes =
              LargestFitting(group_, rest, index_.extents[id.index()][f]);
          placement.axes[f] |= axes;
          rest &= ~axes;
        }
        if (rest != 0 && !Columns(id).empty()) left_over_.push_back({id, rest});
        stream = Columns(id).empty() && HandsSequenceOn(id);
      } else {
        stream = true;  // its sum joins the residual stream
      }
    } else if (node.op->op_class == OpClass::kRoofline && any_weight) {
      if (stream) SplitWeights(id, placement);
      stream = true;
    } else if (!any_activation && any_weight) {
      SplitVocabulary(id, placement);
    }
    const bool split = (Used(placement) & roles_.tensor) != 0;
    const bool on_stream = node.op->op_class == OpClass::kMemory ||
                           (node.op->op_class == OpClass::kMatmul &&
                            ActivationOf(node.operands[0]).stream);
    if (stream && on_stream && roles_.sequence && !split && sequence >= 0) {
      SplitSequence(id, static_cast<size_t>(sequence), placement);
    }
    for (size_t k = 0; k < node.results.size(); ++k) {
      Activation activation;
      activation.stream = stream;
      const Indices& indices = node.rule.results[k];
      for (size_t d = 0; d < indices.size(); ++d) {
        if (static_cast<int>(indices[d]) == sequence) continue;
        activation.dims[d] = placement.axes[indices[d]] & roles_.tensor;
        // The stream is split by samples, sequence and experts alone.
        activation.stream &= (activation.dims[d] & ~roles_.folded) == 0;
      }
      activations_[first_result_[index_.position[id.index()]] + k] = activation;
    }
  }

  // Those of `axes` that there is room for, where images have few rows left,
  // besides `ways` in which they are split already, or one place of a sequence
  // is selected. Else too short a sequence is an error (Validate).
  AxisSet Fitting(NodeId id, size_t sequence, AxisSet axes,
                  int64_t ways = 1) const {
    const Factor& factor = graph_.node(id).rule.factors[sequence];
    const int64_t extent = index_.extents[id.index()][sequence];
    if (factor.letter == kSequenceFactor) return extent > 1 ? axes : 0;
    return LargestFitting(group_, axes, extent / ways);
  }

  // The context axes on the heads of an attention, on top of the tensor axes.
  void SplitHeads(NodeId id, OpPlacement& placement) {
    const Node& node = graph_.node(id);
    AxisSet rest = roles_.context;
    int64_t heads = 1;
    for (uint8_t f : node.rule.results[0]) {
      if (!Holds(node.rule.operands[0], f) || f == index_.SampleFactor(id) ||
          f == index_.SequenceFactor(id)) {
        continue;
      }
      const int64_t extent = index_.extents[id.index()][f];
      const AxisSet axes =
          LargestFitting(group_, rest, extent / group_.Size(placement.axes[f]));
      placement.axes[f] |= axes;
      rest &= ~axes;
      heads *= extent;
    }
    if (rest != 0) too_few_heads_.push_back({id, heads, true, true});
  }

  static AxisSet Used(const OpPlacement& placement) {
    AxisSet used = 0;
    for (AxisSet axes : placement.axes) used |= axes;
    return used;
  }

  // Factors take the tensor axes that their dimensions arrive with.
  void Inherit(NodeId id, OpPlacement& placement) {
    const Node& node = graph_.node(id);
    for (size_t i = 0; i < node.operands.size(); ++i) {
      if (!IsActivation(node.operands[i])) continue;
      const Activation& activation = ActivationOf(node.operands[i]);
      const Indices& indices = node.rule.operands[i];
      for (size_t d = 0; d < indices.size(); ++d) {
        const uint8_t f = indices[d];
        if (!node.rule.factors[f].splittable) continue;
        placement.axes[f] |= activation.dims[d] & ~Used(placement);
      }
    }
  }

  // Whether a split of the sequence survives up to the next dense layers.
  bool HandsSequenceOn(NodeId id) const {
    const TensorId result = graph_.node(id).results[0];
    const Indices& indices = graph_.node(id).rule.results[0];
    for (size_t d = 0; d < indices.size(); ++d) {
      if (static_cast<int>(indices[d]) == index_.SequenceFactor(id)) {
        return index_.carried[result.index()][d];
      }
    }
    return false;
  }

  // The output factors of a dense layer that column parallelism may split: none
  // of a single column.
  std::vector<size_t> Columns(NodeId id) const {
    const Node& node = graph_.node(id);
    const Indices& result = node.rule.results[0];
    std::vector<size_t> columns;
    for (size_t d = 0; d < result.size(); ++d) {
      const uint8_t f = result[d];
      if (!Holds(node.rule.operands[0], f) && node.rule.factors[f].splittable &&
          index_.extents[id.index()][f] > 1 &&
          index_.carried[node.results[0].index()][d]) {
        columns.push_back(f);
      }
    }
    return columns;
  }

  // The factors that an operator's activations and inputs lack, in order, take
  // the tensor axes, as many as their extents allow.
  void SplitWeights(NodeId id, OpPlacement& placement) {
    const Node& node = graph_.node(id);
    AxisSet rest = roles_.tensor & ~Used(placement);
    for (size_t f = 0; f < node.rule.factors.size(); ++f) {
      bool of_weights = false;
      bool of_others = false;
      for (size_t i = 0; i < node.operands.size(); ++i) {
        if (!Holds(node.rule.operands[i], static_cast<int>(f))) continue;
        const bool weight =
            graph_.tensor(node.operands[i]).kind == TensorKind::kWeight;
        (weight ? of_weights : of_others) = true;
      }
      if (!of_weights || of_others || !node.rule.factors[f].splittable) {
        continue;
      }
      bool survives = true;
      const Indices& result = node.rule.results[0];
      for (size_t d = 0; d < result.size(); ++d) {
        survives &=
            result[d] != f || index_.carried[node.results[0].index()][d];
      }
      if (!survives) continue;
      const AxisSet axes =
          LargestFitting(group_, rest, index_.extents[id.index()][f]);
      placement.axes[f] |= axes;
      rest &= ~axes;
    }
  }

  // Lookups in a vocabulary are split by rows.
  void SplitVocabulary(NodeId id, OpPlacement& placement) {
    const Node& node = graph_.node(id);
    for (size_t i = 0; i < node.operands.size(); ++i) {
      if (!index_.vocabulary[node.operands[i].index()]) continue;
      const uint8_t f = node.rule.operands[i][0];
      placement.axes[f] |=
          LargestFitting(group_, roles_.tensor, index_.extents[id.index()][f]);
    }
  }

  void SplitSequence(NodeId id, size_t sequence, OpPlacement& placement) {
    // Not where a node only gathers from, or scatters to, sequences.
    const Factor& factor = graph_.node(id).rule.factors[sequence];
    if (!factor.splittable || factor.role != Role::kAttribute) return;
    placement.axes[sequence] |= Fitting(id, sequence, roles_.tensor,
                                        group_.Size(placement.axes[sequence]));
  }

  // The tensor axes in use between a dense layer and the next ones, which are
  // its ends; whether attention is on the way.
  AxisSet UsedBehind(NodeId linear, bool& attention) const {
    AxisSet used = 0;
    std::vector<NodeId> open = {linear};
    for (size_t i = 0; i < open.size(); ++i) {
      for (TensorId result : graph_.node(open[i]).results) {
        for (const GraphIndex::Use& use : index_.readers[result.index()]) {
          const Node& reader = graph_.node(use.node);
          if (reader.block != graph_.node(linear).block ||
              reader.op->op_class == OpClass::kMatmul) {
            continue;
          }
          used |= Used(placements_[index_.position[use.node.index()]]);
          attention |= reader.op->op_class == OpClass::kAttention;
          if (std::find(open.begin(), open.end(), use.node) == open.end()) {
            open.push_back(use.node);
          }
        }
      }
    }
    return used;
  }

  const GraphIndex& index_;
  const Graph& graph_;
  const int block_;
  const std::vector<NodeId>& nodes_;
  const DeviceGroup& group_;
  const GroupId group_id_;
  const AxisRoles& roles_;
  std::vector<OpPlacement> placements_;  // by position in the block
  std::vector<Activation> activations_;  // of results, node by node
  std::vector<size_t> first_result_;     // by position in the block
  std::vector<std::pair<NodeId, AxisSet>> left_over_;
  std::vector<UnusedAxes> too_few_heads_;
};

// Of the nodes of a block that are on `group`.
AxisUse UseOf(const GraphIndex& index, const Plan& plan, int block,
              GroupId group) {
  AxisUse use;
  for (NodeId id : index.nodes_of_block[static_cast<size_t>(block)]) {
    const OpPlacement& placement = plan.ops[id.index()];
    if (placement.group != group) continue;
    AddUse(index, id, placement, use);
  }
  return use;
}

}  // namespace

void AddUse(const GraphIndex& index, NodeId node, const OpPlacement& placement,
            AxisUse& use) {
  const bool attention =
      index.graph->node(node).op->op_class == OpClass::kAttention;
  use.streamed |= placement.streamed;
  for (int f = 0; f < kMaxFactors; ++f) {
    const AxisSet axes = placement.axes[static_cast<size_t>(f)];
    if (axes == 0) continue;
    (f == index.SampleFactor(node)     ? use.sample
     : f == index.ExpertFactor(node)   ? use.expert
     : f == index.SequenceFactor(node) ? use.sequence
     : attention                       ? use.heads
                                       : use.other) |= axes;
  }
}

AxisSet HeadContextAxesOf(const AxisUse& use) {
  return use.heads & use.sequence & ~use.other;
}

std::vector<OpPlacement> PlaceBlock(const GraphIndex& index, int block,
                                    const DeviceGroup& group, GroupId group_id,
                                    const AxisRoles& roles,
                                    std::vector<UnusedAxes>* unused) {
  return BlockPlacer(index, block, group, group_id, roles).Run(unused);
}

void SetBlock(const GraphIndex& index, int block,
              const std::vector<OpPlacement>& placements, Plan& plan) {
  const auto& nodes = index.nodes_of_block[static_cast<size_t>(block)];
  for (size_t i = 0; i < nodes.size(); ++i) {
    OpPlacement& placement = plan.ops[nodes[i].index()];
    placement.group = placements[i].group;
    placement.axes = placements[i].axes;
    placement.streamed = placements[i].streamed;
  }
}

bool BlockIs(const GraphIndex& index, int block,
             const std::vector<OpPlacement>& placements, const Plan& plan) {
  const auto& nodes = index.nodes_of_block[static_cast<size_t>(block)];
  for (size_t i = 0; i < nodes.size(); ++i) {
    const OpPlacement& placement = plan.ops[nodes[i].index()];
    if (placement.group != placements[i].group ||
        placement.axes != placements[i].axes ||
        placement.streamed != placements[i].streamed) {
      return false;
    }
  }
  return true;
}

std::optional<AxisRoles> RolesOf(const GraphIndex& index, const Plan& plan,
                                 int block) {
  const auto& nodes = index.nodes_of_block[static_cast<size_t>(block)];
  if (nodes.empty()) return std::nullopt;
  const GroupId group = plan.ops[nodes[0].index()].group;
  AxisUse use = UseOf(index, plan, block, group);
  const AxisSet by_heads = HeadContextAxesOf(use);
  use.other |= use.heads & ~by_heads;
  const AxisRoles roles = {
      .data = use.sample & ~(use.other | use.expert),
      .expert = use.expert & ~use.other,
      .context = use.sequence & ~(use.other | use.sample | use.expert),
      .tensor = use.other,
      .folded = use.expert & use.other,
      .sequence = (use.sequence & use.other) != 0,
      .heads = by_heads != 0,
      .ring = use.streamed != 0,
  };
  if (!BlockIs(
          index, block,
          PlaceBlock(index, block, plan.groups[group.index()], group, roles),
          plan)) {
    return std::nullopt;
  }
  return roles;
}

int64_t SmallestShardOf(const GraphIndex& index, const Plan& plan,
                        size_t weight) {
  const auto& [id, operand] = index.weights[weight].home;
  const OpPlacement& home = plan.ops[id.index()];
  const DeviceGroup& group = plan.groups[home.group.index()];
  // A bias is stored whole.
  const int tiled = operand == 1 ? TiledFactor(*index.graph, home, id) : -1;
  int64_t shard = 1;
  for (uint8_t f : index.graph->node(id).rule.operands[operand]) {
    // Validation asks before it has refused a number of tiles below 1.
    const int64_t parts =
        group.Size(home.axes[f]) * (f == tiled ? std::max(1, home.tiles) : 1);
    shard *= std::max<int64_t>(1, index.extents[id.index()][f] / parts);
  }
  return shard;
}

namespace {

AxisSet ZeroAxesGiven(const GraphIndex& index, const Plan& plan, size_t weight,
                      const AxisUse& use) {
  const auto& [id, operand] = index.weights[weight].home;
  const OpPlacement& home = plan.ops[id.index()];
  AxisSet axes = (use.sample | use.sequence) & ~use.other;
  for (uint8_t f : index.graph->node(id).rule.operands[operand]) {
    axes &= ~home.axes[f];
  }
  return LargestFitting(plan.groups[home.group.index()], axes,
                        SmallestShardOf(index, plan, weight));
}

}  // namespace

AxisSet HeadContextAxes(const GraphIndex& index, const Plan& plan, int block,
                        GroupId group) {
  return HeadContextAxesOf(UseOf(index, plan, block, group));
}

AxisSet ZeroAxes(const GraphIndex& index, const Plan& plan, size_t weight) {
  const NodeId home = index.weights[weight].home.node;
  return ZeroAxesGiven(index, plan, weight,
                       UseOf(index, plan, index.graph->node(home).block,
                             plan.ops[home.index()].group));
}

AxisSet AxesWithinNode(const Cluster& cluster, const DeviceGroup& group) {
  const auto node = [&](int64_t position) {
    const DeviceId id = group.devices[static_cast<size_t>(position)];
    return cluster.devices[id.index()].node;
  };
  // Ranks that differ in several coordinates are on one node where all are
  // that differ in one of these.
  AxisSet within = 0;
  int64_t stride = 1;
  for (size_t a = group.axes.size(); a-- > 0;) {
    const int64_t size = group.axes[a].size;
    bool stays = true;
    for (int64_t p = 0; stays && p < std::ssize(group.devices); ++p) {
      stays = node(p) == node(p - p / stride % size * stride);
    }
    if (stays) within |= AxisSet{1} << a;
    stride *= size;
  }
  return within;
}

AxisSet InnermostWithin(AxisSet within, AxisSet wanted) {
  // By dropping outer axes one after another.
  while ((wanted & ~within) != 0) wanted &= wanted - 1;
  return wanted;
}

bool IsTiedAcrossGroups(const GraphIndex& index, const Plan& plan,
                        size_t weight) {
  const auto& readers = index.readers[index.weights[weight].tensor.index()];
  return std::any_of(readers.begin(), readers.end(),
                     [&](const GraphIndex::Use& use) {
                       return plan.ops[use.node.index()].group !=
                              plan.ops[readers[0].node.index()].group;
                     });
}

int HighestZeroStage(const GraphIndex& index, const Plan& plan, size_t weight,
                     int wanted) {
  return wanted > 1 && IsTiedAcrossGroups(index, plan, weight) ? 1 : wanted;
}

std::vector<AxisSet> ZeroAxesOf(const GraphIndex& index, const Plan& plan,
                                std::span<const size_t> weights) {
  std::vector<AxisSet> axes(weights.size(), 0);
  // Weights come in the order of their blocks.
  int known_block = -1;
  GroupId known_group;
  AxisUse use;
  for (size_t i = 0; i < weights.size(); ++i) {
    const size_t w = weights[i];
    const NodeId home = index.weights[w].home.node;
    if (plan.weights[w].zero_stage == 0) continue;
    const int block = index.graph->node(home).block;
    const GroupId group = plan.ops[home.index()].group;
    if (block != known_block || group != known_group) {
      use = UseOf(index, plan, block, group);
      known_block = block;
      known_group = group;
    }
    axes[i] = ZeroAxesGiven(index, plan, w, use);
  }
  return axes;
}

std::vector<AxisSet> AllZeroAxes(const GraphIndex& index, const Plan& plan) {
  std::vector<size_t> all(plan.weights.size());
  std::iota(all.begin(), all.end(), size_t{0});
  return ZeroAxesOf(index, plan, all);
}

void SetZeroAxes(const GraphIndex& index, Plan& plan) {
  const std::vector<AxisSet> axes = AllZeroAxes(index, plan);
  for (size_t w = 0; w < axes.size(); ++w) plan.weights[w].zero_axes = axes[w];
}

}  // namespace tessera
