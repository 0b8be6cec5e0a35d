#include "planner/search/moves/scope.h"

#include <algorithm>

#include "planner/plan/axis_roles.h"
#include "planner/plan/validate.h"

namespace tessera {

GroupId GroupOfBlock(const SearchSpace& space, const Plan& plan, int block) {
  const auto& nodes = space.index.nodes_of_block[static_cast<size_t>(block)];
  return nodes.empty() ? GroupId() : plan.ops[nodes[0].index()].group;
}

std::optional<std::vector<int>> BlocksIn(const SearchSpace& space,
                                         const Plan& plan, int block,
                                         Scope scope) {
  const GroupId group = GroupOfBlock(space, plan, block);
  const std::vector<int>& classes = space.index.block_class;
  std::vector<int> blocks;
  for (int b = 0; b < static_cast<int>(classes.size()); ++b) {
    const GroupId other = GroupOfBlock(space, plan, b);
    if (!other.valid()) continue;
    const bool same_class =
        classes[static_cast<size_t>(b)] == classes[static_cast<size_t>(block)];
    bool in = b == block;
    switch (scope) {
      case Scope::kBlock:
        break;
      case Scope::kClassInStage:
        in = same_class && other == group;
        break;
      case Scope::kClass:
        in = same_class;
        break;
      case Scope::kStage:
        in = other == group;
        break;
      case Scope::kPlan:
        in = true;
        break;
    }
    if (!in) continue;
    if (!SameMesh(plan.groups[group.index()], plan.groups[other.index()])) {
      return std::nullopt;
    }
    blocks.push_back(b);
  }
  return blocks;
}

std::optional<Proposal> Finish(const SearchSpace& space, const Plan& old,
                               Plan candidate, double log_ratio) {
  return Finish(space, old, std::move(candidate), log_ratio,
                CutWithinNode(space, old));
}

std::optional<Proposal> Finish(const SearchSpace& space, const Plan& old,
                               Plan candidate, double log_ratio,
                               const std::vector<bool>& within_node) {
  if (!SetCuts(space, within_node, candidate) ||
      SameUpToNames(candidate, old) ||
      !IsValid(space.index, *space.cluster, candidate) ||
      !Allowed(space, candidate)) {
    return std::nullopt;
  }
  return Proposal{std::move(candidate), log_ratio};
}

int DrawBlock(const SearchSpace& space, Rng& rng) {
  // By a node, so that a block counts by its size and an empty one never.
  const uint32_t node =
      rng.Below(static_cast<uint32_t>(space.index.forward_nodes));
  return space.index.graph->nodes[node].block;
}

}  // namespace tessera
