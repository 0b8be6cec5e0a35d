#include "planner/search/moves/scope.h"

#include <algorithm>
#include <map>

namespace tessera {
GroupId GroupOfBlock(const SearchSpace& space, const Plan& plan, int block) {
  const auto& nodes = space.index.nodes_of_block[static_cast<size_t>(block)];
  return nodes.empty() ? GroupId() : plan.ops[nodes[0].index()].group;
}

uint32_t DrawReach(const Draft& draft, uint32_t count, Rng& rng) {
  const uint32_t least = draft.folded() ? 1 : 0;
  return least + rng.Below(count - least);
}

Scope DrawScope(const Draft& draft, uint32_t count, Rng& rng) {
  return static_cast<Scope>(DrawReach(draft, count, rng));
}

std::optional<std::vector<int>> BlocksIn(const SearchSpace& space,
                                         const Plan& plan, int block,
                                         Scope scope) {
  if (scope == Scope::kBlock) return std::vector<int>{block};
  const GroupId group = GroupOfBlock(space, plan, block);
  std::vector<int> blocks;
  GroupId same_mesh = group;
  // Whether all meshes so far are the group's.
  const auto add = [&](int b) {
    const GroupId other = GroupOfBlock(space, plan, b);
    if (!other.valid()) return true;
    const bool in_stage =
        scope == Scope::kClassInStage || scope == Scope::kStage;
    if (in_stage && other != group) return true;
    if (other != same_mesh &&
        !SameMesh(plan.groups[group.index()], plan.groups[other.index()])) {
      return false;
    }
    same_mesh = other;
    blocks.push_back(b);
    return true;
  };
  if (scope == Scope::kClassInStage || scope == Scope::kClass) {
    const auto of_class = static_cast<size_t>(
        space.index.block_class[static_cast<size_t>(block)]);
    for (int b : space.blocks_of_class[of_class]) {
      if (!add(b)) return std::nullopt;
    }
  } else {
    const auto all = static_cast<int>(space.index.nodes_of_block.size());
    for (int b = 0; b < all; ++b) {
      if (!add(b)) return std::nullopt;
    }
  }
  return blocks;
}

const PlacedKind& PlacedKinds::Of(int block) const {
  const auto at = std::ranges::lower_bound(blocks, block);
  return kinds[of[static_cast<size_t>(at - blocks.begin())]];
}

std::optional<std::vector<NodeId>> NodesLike(const SearchSpace& space,
                                             const Plan& plan, NodeId node,
                                             Scope scope) {
  const GraphIndex& index = space.index;
  const auto blocks =
      BlocksIn(space, plan, index.graph->node(node).block, scope);
  if (!blocks.has_value()) return std::nullopt;
  std::vector<NodeId> like;
  for (int block : *blocks) {
    like.push_back(index.nodes_of_block[static_cast<size_t>(block)]
                                       [index.position[node.index()]]);
  }
  return like;
}

std::optional<PlacedKinds> PlacedKindsOf(Draft& draft,
                                         std::vector<int> blocks) {
  PlacedKinds found;
  found.blocks = std::move(blocks);
  // All others are looked for in vain where one has no roles.
  for (int b : found.blocks) {
    if (!draft.roles(b).has_value()) return std::nullopt;
  }
  std::map<int, std::vector<size_t>> by_class;  // of SearchSpace::placed_like
  for (int b : found.blocks) {
    const AxisRoles& roles = *draft.roles(b);
    std::vector<size_t>& kinds =
        by_class[draft.space().placed_like[static_cast<size_t>(b)]];
    const auto known = std::ranges::find_if(
        kinds, [&](size_t k) { return found.kinds[k].roles == roles; });
    if (known != kinds.end()) {
      found.of.push_back(*known);
      continue;
    }
    kinds.push_back(found.kinds.size());
    found.of.push_back(found.kinds.size());
    found.kinds.push_back({b, roles});
  }
  return found;
}

std::vector<OpPlacement> PlacementsOf(const SearchSpace& space,
                                      const Plan& plan, int block,
                                      const AxisRoles& roles) {
  const GroupId group = GroupOfBlock(space, plan, block);
  return PlaceBlock(space.index, block, plan.groups[group.index()], group,
                    roles);
}

void SetAxes(int block, const std::vector<OpPlacement>& placements,
             Draft& draft) {
  const auto& nodes =
      draft.space().index.nodes_of_block[static_cast<size_t>(block)];
  draft.TouchBlock(block);
  for (size_t i = 0; i < nodes.size(); ++i) {
    OpPlacement& op = draft.edited().ops[nodes[i].index()];
    op.axes = placements[i].axes;
    op.streamed = placements[i].streamed;
  }
}

bool Switch(const PlacedKinds& kinds, bool AxisRoles::*flag, bool now,
            AxisSet AxisRoles::*axes, Draft& draft) {
  const SearchSpace& space = draft.space();
  const Plan& plan = draft.plan();
  std::vector<std::vector<OpPlacement>> switched;  // empty: stays
  for (const PlacedKind& kind : kinds.kinds) {
    switched.emplace_back();
    AxisRoles roles = kind.roles;
    if (roles.*axes == 0) continue;
    roles.*flag = now;
    if (roles != kind.roles &&
        !BlockIs(space.index, kind.block,
                 PlacementsOf(space, plan, kind.block, roles), plan)) {
      return false;
    }
    roles.*flag = !now;
    switched.back() = PlacementsOf(space, plan, kind.block, roles);
  }
  for (size_t i = 0; i < kinds.blocks.size(); ++i) {
    const auto& placements = switched[kinds.of[i]];
    if (!placements.empty()) SetAxes(kinds.blocks[i], placements, draft);
  }
  return true;
}

int DrawBlock(const SearchSpace& space, Rng& rng) {
  // By a node, so that a block counts by its size and an empty one never.
  const uint32_t node =
      rng.Below(static_cast<uint32_t>(space.index.forward_nodes));
  return space.index.graph->nodes[node].block;
}

}  // namespace tessera
