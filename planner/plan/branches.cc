#include "planner/plan/branches.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <iterator>
#include <set>

namespace tessera {
namespace {

bool IsMadeIn(const GraphIndex& index, int block, TensorId tensor) {
  const NodeId producer = index.producer[tensor.index()];
  return producer.valid() && index.graph->node(producer).block == block;
}

// The nodes of `block` that a result of it depends on, its producer included.
std::set<NodeId> LeadingTo(const GraphIndex& index, int block,
                           TensorId tensor) {
  std::set<NodeId> nodes;
  std::vector<TensorId> open = {tensor};
  while (!open.empty()) {
    const TensorId result = open.back();
    open.pop_back();
    if (!IsMadeIn(index, block, result)) continue;
    const NodeId producer = index.producer[result.index()];
    if (!nodes.insert(producer).second) continue;
    const auto& operands = index.graph->node(producer).operands;
    open.insert(open.end(), operands.begin(), operands.end());
  }
  return nodes;
}

std::vector<NodeId> Without(const std::set<NodeId>& nodes,
                            const std::set<NodeId>& others) {
  std::vector<NodeId> rest;
  std::set_difference(nodes.begin(), nodes.end(), others.begin(), others.end(),
                      std::back_inserter(rest));
  return rest;
}

// A node that reads results of two others of its block, and how many dense
// layers lead to each of them and not to the other.
struct Join {
  std::array<TensorId, 2> operands;
  std::array<size_t, 2> producers;  // by position in the block
  std::array<int64_t, 2> layers = {};

  int64_t shorter() const { return std::min(layers[0], layers[1]); }
};

// The joins of a block.
std::vector<Join> JoinsOf(const GraphIndex& index, int block) {
  std::vector<Join> joins;
  for (NodeId id : index.nodes_of_block[static_cast<size_t>(block)]) {
    std::vector<TensorId> own;
    for (TensorId operand : index.graph->node(id).operands) {
      if (IsMadeIn(index, block, operand)) own.push_back(operand);
    }
    if (own.size() != 2) continue;
    const auto position = [&](TensorId tensor) {
      return index.position[index.producer[tensor.index()].index()];
    };
    joins.push_back({{own[0], own[1]}, {position(own[0]), position(own[1])}});
  }
  return joins;
}

// Sets the layers of the block's joins. A number has a bit for each of 64 dense
// layers: so many are followed through the block at a time.
void CountLayers(const GraphIndex& index, int block, std::vector<Join>& joins) {
  const auto& nodes = index.nodes_of_block[static_cast<size_t>(block)];
  std::vector<size_t> dense;
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (index.graph->node(nodes[i]).op->op_class != OpClass::kMemory) {
      dense.push_back(i);
    }
  }
  std::vector<uint64_t> behind(nodes.size());  // each node, itself included
  for (size_t first = 0; first < dense.size(); first += 64) {
    std::ranges::fill(behind, 0);
    for (size_t i = first; i < std::min(first + 64, dense.size()); ++i) {
      behind[dense[i]] = uint64_t{1} << (i - first);
    }
    for (size_t i = dense[first]; i < nodes.size(); ++i) {
      for (TensorId operand : index.graph->node(nodes[i]).operands) {
        if (!IsMadeIn(index, block, operand)) continue;
        behind[i] |=
            behind[index.position[index.producer[operand.index()].index()]];
      }
    }
    for (Join& join : joins) {
      const uint64_t left = behind[join.producers[0]];
      const uint64_t right = behind[join.producers[1]];
      join.layers[0] += std::popcount(left & ~right);
      join.layers[1] += std::popcount(right & ~left);
    }
  }
}

// The sets of axes of a mesh with and without one of its axes.
AxisSet Removed(AxisSet set, int axis) {
  const AxisSet below = (AxisSet{1} << axis) - 1;
  return (set & below) | ((set >> 1) & ~below);
}
AxisSet Inserted(AxisSet set, int axis) {
  const AxisSet below = (AxisSet{1} << axis) - 1;
  return (set & below) | ((set & ~below) << 1);
}

DeviceGroup Half(const DeviceGroup& group, int axis, int coordinate) {
  DeviceGroup half;
  half.name = group.name + (coordinate == 0 ? ".left" : ".right");
  half.axes = group.axes;
  half.axes.erase(half.axes.begin() + axis);
  for (size_t i = 0; i < group.devices.size(); ++i) {
    if (group.Coordinate(static_cast<int>(i), axis) == coordinate) {
      half.devices.push_back(group.devices[i]);
    }
  }
  return half;
}

bool HasAxis(const Plan& plan, GroupId group, int axis) {
  const auto& axes = plan.groups[group.index()].axes;
  return axis >= 0 && static_cast<size_t>(axis) < axes.size() &&
         axes[static_cast<size_t>(axis)].size == 2 &&
         axes[static_cast<size_t>(axis)].shares.empty();
}

}  // namespace

std::optional<Branches> BranchesOf(const GraphIndex& index, int block) {
  std::vector<Join> joins = JoinsOf(index, block);
  if (joins.empty()) return std::nullopt;
  CountLayers(index, block, joins);
  const Join& best = *std::ranges::max_element(joins, {}, &Join::shorter);
  if (best.shorter() == 0) return std::nullopt;
  const auto left = LeadingTo(index, block, best.operands[0]);
  const auto right = LeadingTo(index, block, best.operands[1]);
  return Branches{Without(left, right), Without(right, left)};
}

std::optional<Branches> BranchesByClass::Of(int block) {
  const auto b = static_cast<size_t>(block);
  const auto [known, is_new] = known_.try_emplace(index_.block_class[b]);
  if (is_new) known->second = BranchesOf(index_, block);
  std::optional<Branches> here = known->second;
  if (!here.has_value()) return here;
  for (auto* side : {&here->left, &here->right}) {
    for (NodeId& id : *side) {
      id = index_.nodes_of_block[b][index_.position[id.index()]];
    }
  }
  return here;
}

std::optional<Plan> SplitBranches(const GraphIndex& index, const Plan& plan,
                                  GroupId group, int axis) {
  BranchesByClass branches(index);
  return SplitBranches(branches, plan, group, axis);
}

std::optional<Plan> SplitBranches(BranchesByClass& branches_by_class,
                                  const Plan& plan, GroupId group, int axis) {
  const GraphIndex& index = branches_by_class.index();
  if (!HasAxis(plan, group, axis)) return std::nullopt;
  const AxisSet bit = AxisSet{1} << axis;
  Plan split = plan;
  for (OpPlacement& placement : split.ops) {
    if (placement.group > group) placement.group.value += 2;
  }
  const DeviceGroup& whole = plan.groups[group.index()];
  split.groups.insert(split.groups.begin() + group.value + 1,
                      {Half(whole, axis, 0), Half(whole, axis, 1)});
  bool any = false;
  for (size_t b = 0; b < index.nodes_of_block.size(); ++b) {
    const auto& nodes = index.nodes_of_block[b];
    if (nodes.empty() || plan.ops[nodes[0].index()].group != group) continue;
    const auto branches = branches_by_class.Of(static_cast<int>(b));
    if (!branches.has_value()) continue;
    any = true;
    for (const auto& [side, half] :
         {std::pair(&branches->left, 1), std::pair(&branches->right, 2)}) {
      for (NodeId id : *side) {
        OpPlacement& placement = split.ops[id.index()];
        const int sample = index.SampleFactor(id);
        if (sample < 0 ||
            (placement.axes[static_cast<size_t>(sample)] & bit) == 0) {
          return std::nullopt;
        }
        placement.group.value += half;
        for (AxisSet& axes : placement.axes) axes = Removed(axes, axis);
        placement.streamed = Removed(placement.streamed, axis);
        placement.rooted = Removed(placement.rooted, axis);
      }
    }
  }
  if (!any) return std::nullopt;
  return split;
}

std::optional<Plan> MergeBranches(const GraphIndex& index, const Plan& plan,
                                  GroupId group, int axis) {
  if (!HasAxis(plan, group, axis) || group.index() + 2 >= plan.groups.size()) {
    return std::nullopt;
  }
  Plan merged = plan;
  const auto halves = merged.groups.begin() + group.value + 1;
  merged.groups.erase(halves, halves + 2);
  for (size_t i = 0; i < merged.ops.size(); ++i) {
    OpPlacement& placement = merged.ops[i];
    if (placement.group <= group) continue;
    if (placement.group.value > group.value + 2) {
      placement.group.value -= 2;
      continue;
    }
    placement.group = group;
    for (AxisSet& axes : placement.axes) axes = Inserted(axes, axis);
    placement.streamed = Inserted(placement.streamed, axis);
    placement.rooted = Inserted(placement.rooted, axis);
    const int sample = index.SampleFactor(NodeId(static_cast<int64_t>(i)));
    if (sample < 0) return std::nullopt;
    placement.axes[static_cast<size_t>(sample)] |= AxisSet{1} << axis;
  }
  const auto again = SplitBranches(index, merged, group, axis);
  const bool same =
      again.has_value() && again->ops == plan.ops &&
      std::equal(again->groups.begin(), again->groups.end(),
                 plan.groups.begin(), plan.groups.end(),
                 [](const DeviceGroup& a, const DeviceGroup& b) {
                   return a.devices == b.devices && SameMesh(a, b);
                 });
  if (!same) return std::nullopt;
  return merged;
}

}  // namespace tessera
