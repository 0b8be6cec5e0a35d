#include "planner/plan/branches.h"

#include <algorithm>
#include <map>
#include <set>

namespace tessera {
namespace {

// The nodes of `block` that a result of it depends on, its producer included.
std::set<NodeId> LeadingTo(const GraphIndex& index, int block,
                           TensorId tensor) {
  std::set<NodeId> nodes;
  std::vector<TensorId> open = {tensor};
  while (!open.empty()) {
    const NodeId producer = index.producer[open.back().index()];
    open.pop_back();
    if (!producer.valid() || index.graph->node(producer).block != block ||
        !nodes.insert(producer).second) {
      continue;
    }
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

int64_t DenseLayers(const GraphIndex& index, const std::vector<NodeId>& nodes) {
  return std::count_if(nodes.begin(), nodes.end(), [&](NodeId id) {
    return index.graph->node(id).op->op_class != OpClass::kMemory;
  });
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

// The branches of blocks, which those of a class have in equal places: looked
// for once in each class.
class BranchesByClass {
 public:
  explicit BranchesByClass(const GraphIndex& index) : index_(index) {}

  std::optional<Branches> Of(int block) {
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

 private:
  const GraphIndex& index_;
  // By class, in the first block of it that was asked for.
  std::map<int, std::optional<Branches>> known_;
};

bool HasAxis(const Plan& plan, GroupId group, int axis) {
  const auto& axes = plan.groups[group.index()].axes;
  return axis >= 0 && static_cast<size_t>(axis) < axes.size() &&
         axes[static_cast<size_t>(axis)].size == 2 &&
         axes[static_cast<size_t>(axis)].shares.empty();
}

}  // namespace

std::optional<Branches> BranchesOf(const GraphIndex& index, int block) {
  std::optional<Branches> best;
  int64_t most = 0;
  for (NodeId id : index.nodes_of_block[static_cast<size_t>(block)]) {
    std::vector<std::set<NodeId>> sides;
    for (TensorId operand : index.graph->node(id).operands) {
      auto nodes = LeadingTo(index, block, operand);
      if (!nodes.empty()) sides.push_back(std::move(nodes));
    }
    if (sides.size() != 2) continue;
    Branches branches = {Without(sides[0], sides[1]),
                         Without(sides[1], sides[0])};
    const int64_t layers = std::min(DenseLayers(index, branches.left),
                                    DenseLayers(index, branches.right));
    if (layers <= most) continue;
    most = layers;
    best = std::move(branches);
  }
  return best;
}

std::optional<Plan> SplitBranches(const GraphIndex& index, const Plan& plan,
                                  GroupId group, int axis) {
  if (!HasAxis(plan, group, axis)) return std::nullopt;
  const AxisSet bit = AxisSet{1} << axis;
  Plan split = plan;
  for (OpPlacement& placement : split.ops) {
    if (placement.group > group) placement.group.value += 2;
  }
  const DeviceGroup& whole = plan.groups[group.index()];
  split.groups.insert(split.groups.begin() + group.value + 1,
                      {Half(whole, axis, 0), Half(whole, axis, 1)});
  BranchesByClass all_branches(index);
  bool any = false;
  for (size_t b = 0; b < index.nodes_of_block.size(); ++b) {
    const auto& nodes = index.nodes_of_block[b];
    if (nodes.empty() || plan.ops[nodes[0].index()].group != group) continue;
    const auto branches = all_branches.Of(static_cast<int>(b));
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
