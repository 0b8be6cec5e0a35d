// Shares the devices of two neighbouring stages between them anew: both keep
// all parallelism but the degree of data parallelism. So a stage with less work
// for each of its devices, such as one with an embedding, gives some to another
// (as Aceso's plans do; Liu et al., EuroSys 2024).
//
// Symmetric: the stages are uniform, and so are the other ways to share their
// devices, which are those of the way back. All stages have one group.

#include <algorithm>

#include "planner/plan/rooted.h"
#include "planner/search/move.h"
#include "planner/search/moves/data_axes.h"

namespace tessera {
namespace {

// Gives `group` `devices`, with `degree`-fold data parallelism in place of that
// of its outermost `count` axes.
void Resize(std::vector<DeviceId> devices, int count, int64_t degree,
            DeviceGroup& group) {
  std::vector<MeshAxis> axes;
  for (int prime : PrimeFactors(degree)) axes.push_back({"", prime});
  axes.insert(axes.end(), group.axes.begin() + count, group.axes.end());
  group.axes = std::move(axes);
  group.devices = std::move(devices);
}

std::optional<double> Edit(Draft& draft, Rng& rng) {
  const SearchSpace& space = draft.space();
  const Plan& plan = draft.plan();
  const Draft::Pipeline& pipeline = draft.pipeline();
  const auto stages = static_cast<size_t>(pipeline.stages);
  if (stages < 2 || stages != plan.groups.size() || UsesRoot(plan)) {
    return std::nullopt;
  }
  const size_t left = rng.Below(static_cast<uint32_t>(stages - 1));
  const size_t both[] = {left, left + 1};
  int count[2];
  int64_t degree[2];
  int64_t behind[2];  // devices for each part of the samples
  std::vector<int> blocks[2];
  std::vector<DeviceId> devices;
  for (size_t i = 0; i < 2; ++i) {
    const DeviceGroup& group = plan.groups[both[i]];
    blocks[i] = draft.BlocksOf(static_cast<int>(both[i]));
    const auto axes = DataAxes(draft, group, blocks[i]);
    if (!axes.has_value()) return std::nullopt;
    count[i] = *axes;
    degree[i] = DegreeOf(group, *axes);
    behind[i] = std::ssize(group.devices) / degree[i];
    devices.insert(devices.end(), group.devices.begin(), group.devices.end());
  }
  std::vector<int64_t> others;  // degrees of the left one
  for (int64_t d = 1; d * behind[0] < std::ssize(devices); ++d) {
    const int64_t left_for_right = std::ssize(devices) - d * behind[0];
    if (left_for_right % behind[1] == 0 && d != degree[0]) others.push_back(d);
  }
  if (others.empty()) return std::nullopt;
  const int64_t wanted =
      others[rng.Below(static_cast<uint32_t>(others.size()))];
  const auto split = devices.begin() + wanted * behind[0];
  const int64_t degrees[] = {wanted, (devices.end() - split) / behind[1]};
  Plan candidate = plan;
  Resize({devices.begin(), split}, count[0], degrees[0],
         candidate.groups[both[0]]);
  Resize({split, devices.end()}, count[1], degrees[1],
         candidate.groups[both[1]]);
  for (size_t i = 0; i < 2; ++i) {
    if (candidate.groups[both[i]].axes.size() > kMaxAxes) return std::nullopt;
    const auto now = static_cast<int>(PrimeFactors(degrees[i]).size());
    for (int block : blocks[i]) {
      if (!PlaceByRoles(space, block,
                        WithDataAxes(*draft.roles(block), count[i], now),
                        candidate)) {
        return std::nullopt;
      }
    }
  }
  NameAxes(space.index, candidate);
  draft.Replace(std::move(candidate));
  return 0;
}

}  // namespace

extern const Move kStageDevices;
const Move kStageDevices = {"stage-devices",
                            "devices between neighbouring stages", 2, Edit};

}  // namespace tessera
