// Moves one block over a boundary between two positions of the pipeline (the
// stages, or their chunks) of equal mesh; it keeps its splits. Symmetric:
// boundary and direction are uniform. All stages must have one group, as they
// do after.

#include "planner/search/move.h"

namespace tessera {
namespace {

std::optional<double> Edit(Draft& draft, Rng& rng) {
  const Plan& plan = draft.plan();
  const Draft::Pipeline& pipeline = draft.pipeline();
  const int stages = pipeline.stages;
  const int positions = stages * pipeline.chunks;
  if (positions < 2 || stages != static_cast<int>(plan.groups.size())) {
    return std::nullopt;
  }
  const auto left =
      static_cast<int>(rng.Below(static_cast<uint32_t>(positions - 1)));
  const bool to_right = rng.Below(2) == 1;
  const int from = to_right ? left : left + 1;
  const int to = to_right ? left + 1 : left;
  if (!SameMesh(plan.groups[static_cast<size_t>(from % stages)],
                plan.groups[static_cast<size_t>(to % stages)])) {
    return std::nullopt;
  }
  const std::vector<int>& blocks = pipeline.blocks[static_cast<size_t>(from)];
  const int moved = to_right ? blocks.back() : blocks.front();
  draft.TouchBlock(moved);
  for (NodeId node :
       draft.space().index.nodes_of_block[static_cast<size_t>(moved)]) {
    OpPlacement& op = draft.edited().ops[node.index()];
    op.group = GroupId(to % stages);
    op.chunk = to / stages;
  }
  // Invalid where the position is left empty.
  return 0;
}

}  // namespace

extern const Move kStageBoundary;
const Move kStageBoundary = {"stage-boundary",
                             "a block to the neighbouring stage", 3, Edit};

}  // namespace tessera
