// Moves one block over a boundary between two positions of the pipeline (the
// stages, or their chunks) of equal mesh; it keeps its splits. Symmetric:
// boundary and direction are uniform. All stages must have one group, as they
// do after.

#include "planner/plan/stages.h"
#include "planner/search/moves/scope.h"

namespace tessera {
namespace {

std::optional<Proposal> Propose(const Plan& plan, const SearchSpace& space,
                                Rng& rng) {
  const PipelineShape shape = ShapeOf(*space.index.graph, plan);
  const int positions = shape.stages * shape.chunks;
  if (positions < 2 || shape.stages != static_cast<int>(plan.groups.size())) {
    return std::nullopt;
  }
  const auto left =
      static_cast<int>(rng.Below(static_cast<uint32_t>(positions - 1)));
  const bool to_right = rng.Below(2) == 1;
  const int from = to_right ? left : left + 1;
  const int to = to_right ? left + 1 : left;
  if (!SameMesh(plan.groups[static_cast<size_t>(from % shape.stages)],
                plan.groups[static_cast<size_t>(to % shape.stages)])) {
    return std::nullopt;
  }
  int moved = -1;
  for (int b = 0; b < static_cast<int>(space.index.block_class.size()); ++b) {
    const auto& nodes = space.index.nodes_of_block[static_cast<size_t>(b)];
    if (nodes.empty()) continue;
    const OpPlacement& op = plan.ops[nodes[0].index()];
    if (op.chunk * shape.stages + op.group.value != from) continue;
    if (moved < 0 || to_right) moved = b;
  }
  Plan candidate = plan;
  for (NodeId node : space.index.nodes_of_block[static_cast<size_t>(moved)]) {
    candidate.ops[node.index()].group = GroupId(to % shape.stages);
    candidate.ops[node.index()].chunk = to / shape.stages;
  }
  // Invalid where the position is left empty.
  return Finish(space, plan, std::move(candidate), 0);
}

}  // namespace

extern const Move kStageBoundary;
const Move kStageBoundary = {"stage-boundary",
                             "a block to the neighbouring stage", 3, Propose};

}  // namespace tessera
