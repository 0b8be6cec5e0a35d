#include "planner/plan/strategy_groups.h"

#include <algorithm>
#include <limits>
#include <string>

#include "planner/plan/strategy_text.h"
#include "planner/plan/work_shares.h"

namespace tessera {
namespace {

// One digit of a rank number.
struct Digit {
  std::string_view name;  // of its axes
  int size = 1;
  int stride = 1;
};

// The tensor ranks that have other experts each.
int Folded(const Strategy& strategy) {
  return strategy.etp == 0 ? 1 : strategy.tp / strategy.etp;
}

std::vector<DeviceGroup> Groups(const Strategy& strategy) {
  std::vector<Digit> outer_first;
  int stride = 1;
  int stage_stride = 1;
  Digit folded = {kFoldedAxes, Folded(strategy), 1};
  for (MeshDimension dimension : strategy.order) {
    const DimensionRow& row = RowOf(dimension);
    const int size = strategy.*row.degree;
    if (dimension == MeshDimension::kPipeline) {
      stage_stride = stride;
    } else if (dimension == MeshDimension::kTensor) {
      outer_first.push_back({row.name, size / folded.size, stride});
      folded.stride = stride * (size / folded.size);
    } else {
      outer_first.push_back({row.name, size, stride});
    }
    stride *= size;
  }
  std::ranges::reverse(outer_first);
  // Experts are split by these first: then tokens are exchanged among the
  // ranks of each of their coordinates.
  outer_first.insert(
      std::ranges::find(outer_first, RowOf(MeshDimension::kExpert).name,
                        &Digit::name),
      folded);
  std::vector<DeviceGroup> groups;
  for (int stage = 0; stage < strategy.pp; ++stage) {
    DeviceGroup group;
    group.name = strategy.pp == 1 ? "all" : "stage" + std::to_string(stage);
    std::vector<int> ranks = {stage * stage_stride};
    for (const Digit& digit : outer_first) {
      std::vector<int> finer;
      for (int rank : ranks) {
        for (int i = 0; i < digit.size; ++i) {
          finer.push_back(rank + i * digit.stride);
        }
      }
      ranks = std::move(finer);
      int number = 0;
      for (int prime : PrimeFactors(digit.size)) {
        group.axes.push_back(
            {std::string(digit.name) + std::to_string(number++), prime});
      }
    }
    for (int rank : ranks) group.devices.push_back(DeviceId(rank));
    groups.push_back(std::move(group));
  }
  return groups;
}

// The speed of the slowest device at each coordinate of an axis.
std::vector<double> SpeedsAlong(const Cluster& cluster, DType dtype,
                                const DeviceGroup& group, size_t axis) {
  std::vector<double> speeds(static_cast<size_t>(group.axes[axis].size),
                             std::numeric_limits<double>::infinity());
  for (int i = 0; i < std::ssize(group.devices); ++i) {
    double& slowest = speeds[static_cast<size_t>(
        group.Coordinate(i, static_cast<int>(axis)))];
    slowest = std::min(
        slowest,
        SpeedOf(cluster, group.devices[static_cast<size_t>(i)], dtype));
  }
  return speeds;
}

// Of each position of the pipeline, or none where all are alike.
std::vector<double> StageSpeeds(const GraphIndex& index, const Cluster& cluster,
                                const Strategy& strategy,
                                std::span<const DeviceGroup> groups) {
  std::vector<double> speeds;
  if (!strategy.by_speed) return speeds;
  for (const DeviceGroup& group : groups) {
    speeds.push_back(SlowestSpeed(cluster, group, index.graph->dtype));
  }
  const auto [least, most] = std::ranges::minmax(speeds);
  if (least == most) return {};
  const size_t stages = speeds.size();
  for (size_t p = stages; p < stages * static_cast<size_t>(strategy.vp); ++p) {
    speeds.push_back(speeds[p - stages]);
  }
  return speeds;
}

}  // namespace

std::span<const std::vector<MeshDimension>> UsualOrders() {
  using D = MeshDimension;
  static const std::vector<std::vector<D>> kOrders = {
      Strategy().order,
      {D::kTensor, D::kContext, D::kExpert, D::kPipeline, D::kData},
      {D::kData, D::kTensor, D::kContext, D::kExpert, D::kPipeline},
      {D::kPipeline, D::kTensor, D::kContext, D::kExpert, D::kData},
      {D::kTensor, D::kData, D::kContext, D::kExpert, D::kPipeline},
  };
  return kOrders;
}

int64_t SamplesOf(const Strategy& strategy) {
  return int64_t{strategy.mbs} * strategy.dp * strategy.ep;
}

void ShareSamples(const Cluster& cluster, DType dtype, int64_t samples,
                  DeviceGroup& group) {
  int64_t parts = 1;
  for (const MeshAxis& axis : group.axes) {
    if (axis.name.starts_with("dp") || axis.name.starts_with("ep")) {
      parts *= axis.size;
    }
  }
  for (size_t a = 0; a < group.axes.size(); ++a) {
    MeshAxis& axis = group.axes[a];
    if (!axis.name.starts_with("dp")) continue;
    const std::vector<double> speeds = SpeedsAlong(cluster, dtype, group, a);
    const auto [least, most] = std::ranges::minmax(speeds);
    if (least == most) continue;
    axis.shares =
        ReducedShares(SharesBySpeed(samples / (parts / axis.size), speeds));
  }
}

std::vector<DeviceGroup> GroupsOf(const GraphIndex& index,
                                  const Cluster& cluster,
                                  const Strategy& strategy) {
  std::vector<DeviceGroup> groups = Groups(strategy);
  if (!strategy.by_speed) return groups;
  for (DeviceGroup& group : groups) {
    ShareSamples(cluster, index.graph->dtype, SamplesOf(strategy), group);
  }
  return groups;
}

std::vector<int> PositionStarts(const GraphIndex& index, const Cluster& cluster,
                                const Strategy& strategy,
                                const std::vector<DeviceGroup>& groups) {
  const std::vector<double> speeds =
      StageSpeeds(index, cluster, strategy, groups);
  return speeds.empty() ? StageStarts(index, strategy.pp * strategy.vp)
                        : StageStarts(index, speeds);
}

}  // namespace tessera
