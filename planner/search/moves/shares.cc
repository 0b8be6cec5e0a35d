// Gives some samples of one coordinate of an axis to another. Shares are
// counted in the least whole numbers of samples that the axis may give.
// Symmetric: group, axis, coordinates and number are uniform, and how many
// there are of each does not change.

#include "planner/plan/strategy.h"
#include "planner/plan/work_shares.h"
#include "planner/search/move.h"

namespace tessera {
namespace {

// The axes that split the samples of a group's operators.
AxisSet SampleAxes(const SearchSpace& space, const Plan& plan, GroupId group) {
  AxisSet axes = 0;
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    const int sample = space.index.SampleFactor(NodeId(i));
    if (sample < 0 || plan.ops[i].group != group) continue;
    axes |= plan.ops[i].axes[static_cast<size_t>(sample)];
  }
  return axes;
}

std::optional<double> Edit(Draft& draft, Rng& rng) {
  const SearchSpace& space = draft.space();
  const Plan& plan = draft.plan();
  const GroupId chosen(rng.Below(static_cast<uint32_t>(plan.groups.size())));
  const DeviceGroup& group = plan.groups[chosen.index()];
  if (group.axes.empty()) return std::nullopt;
  const uint32_t a = rng.Below(static_cast<uint32_t>(group.axes.size()));
  const MeshAxis& axis = group.axes[a];
  if (axis.size < 2) return std::nullopt;
  const auto size = static_cast<uint32_t>(axis.size);
  const uint32_t from = rng.Below(size);
  const uint32_t to = (from + 1 + rng.Below(size - 1)) % size;
  const int moved = 1 << rng.Below(4);

  const AxisSet samples = SampleAxes(space, plan, chosen);
  if ((samples >> a & 1) == 0) return std::nullopt;
  const int64_t batch = space.index.graph->global_batch / plan.microbatches;
  const int64_t units = batch / (group.Size(samples) / axis.size);
  const int64_t parts = PartsOf(axis);
  if (units % parts != 0) return std::nullopt;
  std::vector<int> shares = axis.shares;
  if (shares.empty()) shares.assign(size, 1);
  for (int& share : shares) share *= static_cast<int>(units / parts);
  if (shares[from] <= moved) return std::nullopt;
  shares[from] -= moved;
  shares[to] += moved;
  Plan candidate = plan;
  candidate.groups[chosen.index()].axes[a].shares =
      ReducedShares(std::move(shares));
  draft.Replace(std::move(candidate));
  return 0;
}

}  // namespace

extern const Move kShares;
const Move kShares = {"shares", "samples between unlike devices of a group", 4,
                      Edit, MoveNeeds::kUnlikeDevices};

}  // namespace tessera
