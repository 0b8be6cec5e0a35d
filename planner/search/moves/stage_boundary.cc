// Moves one block over a boundary between two stages of equal mesh; it keeps
// its splits. Symmetric: boundary and direction are uniform.

#include <algorithm>

#include "planner/search/moves/scope.h"

namespace tessera {
namespace {

std::optional<Proposal> Propose(const Plan& plan, const SearchSpace& space,
                                Rng& rng) {
  const auto stages = static_cast<uint32_t>(plan.groups.size());
  if (stages < 2) return std::nullopt;
  const GroupId left(rng.Below(stages - 1));
  const GroupId right(left.value + 1);
  const bool to_right = rng.Below(2) == 1;
  if (!SameMesh(plan.groups[left.index()], plan.groups[right.index()])) {
    return std::nullopt;
  }
  const GroupId from = to_right ? left : right;
  int first = -1;
  int last = -1;
  for (int b = 0; b < static_cast<int>(space.index.block_class.size()); ++b) {
    if (GroupOfBlock(space, plan, b) != from) continue;
    if (first < 0) first = b;
    last = b;
  }
  const int moved = to_right ? last : first;
  Plan candidate = plan;
  for (NodeId node : space.index.nodes_of_block[static_cast<size_t>(moved)]) {
    candidate.ops[node.index()].group = to_right ? right : left;
  }
  // Invalid where the stage is left empty.
  return Finish(space, plan, std::move(candidate), 0);
}

}  // namespace

extern const Move kStageBoundary;
const Move kStageBoundary = {"stage-boundary",
                             "a block to the neighbouring stage", 3, Propose};

}  // namespace tessera
