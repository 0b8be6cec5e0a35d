// Moves one block over a boundary between two positions of the pipeline (the
// stages, or their chunks); it keeps its splits. Where the meshes differ in
// their degrees of data parallelism it gets that of the other stage, as all
// blocks there have it. Symmetric: boundary and direction are uniform, and the
// block becomes the one next to the boundary, as it was: where stages are no
// runs of blocks, as parallel ones need not be, another one may be. All stages
// must have one group, as they do after.

#include "planner/search/move.h"
#include "planner/search/moves/data_axes.h"

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
  const DeviceGroup& here = plan.groups[static_cast<size_t>(from % stages)];
  const DeviceGroup& there = plan.groups[static_cast<size_t>(to % stages)];
  const std::vector<int>& blocks = pipeline.blocks[static_cast<size_t>(from)];
  const std::vector<int>& others = pipeline.blocks[static_cast<size_t>(to)];
  const int moved = to_right ? blocks.back() : blocks.front();
  if (to_right ? moved > others.front() : moved < others.back()) {
    return std::nullopt;
  }
  std::optional<AxisRoles> roles;  // there, where the meshes differ
  if (!SameMesh(here, there)) {
    const auto data_here = DataAxes(draft, here, draft.BlocksOf(from % stages));
    const auto data_there = DataAxes(draft, there, draft.BlocksOf(to % stages));
    if (!data_here || !data_there ||
        !SameBehind(here, *data_here, there, *data_there)) {
      return std::nullopt;
    }
    roles = WithDataAxes(*draft.roles(moved), *data_here, *data_there);
  }
  draft.TouchBlock(moved);
  for (NodeId node :
       draft.space().index.nodes_of_block[static_cast<size_t>(moved)]) {
    OpPlacement& op = draft.edited().ops[node.index()];
    op.group = GroupId(to % stages);
    op.chunk = to / stages;
  }
  if (roles.has_value() &&
      !PlaceByRoles(draft.space(), moved, *roles, draft.edited())) {
    return std::nullopt;
  }
  // Invalid where the position is left empty.
  return 0;
}

}  // namespace

extern const Move kStageBoundary;
const Move kStageBoundary = {"stage-boundary",
                             "a block to the neighbouring stage", 3, Edit};

}  // namespace tessera
