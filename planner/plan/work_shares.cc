#include "planner/plan/work_shares.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace tessera {

std::vector<int> StageStarts(const GraphIndex& index, int positions) {
  const auto blocks = static_cast<int>(index.block_flops.size());
  TESSERA_CHECK(positions >= 1 && positions <= blocks)
      << positions << " of " << blocks;
  // The first and the last block are no layers where there are others; with
  // more positions than layers each block counts as one.
  const bool has_layers = blocks - 2 >= positions;
  const int layers = has_layers ? blocks - 2 : blocks;
  std::vector<int> counts(static_cast<size_t>(positions), layers / positions);
  std::vector<double> loads(counts.size(), 0);
  if (has_layers) {
    loads.front() += index.block_flops.front();
    loads.back() += index.block_flops.back();
  }
  // Of equals the later first: earlier stages keep more microbatches.
  std::vector<size_t> lightest_first(counts.size());
  std::iota(lightest_first.rbegin(), lightest_first.rend(), size_t{0});
  std::stable_sort(lightest_first.begin(), lightest_first.end(),
                   [&](size_t a, size_t b) { return loads[a] < loads[b]; });
  for (size_t i = 0; i < static_cast<size_t>(layers % positions); ++i) {
    ++counts[lightest_first[i]];
  }
  std::vector<int> starts = {0};
  for (size_t s = 0; s + 1 < counts.size(); ++s) {
    starts.push_back(starts.back() + counts[s] +
                     (s == 0 && has_layers ? 1 : 0));
  }
  return starts;
}

std::vector<int> StageStarts(const GraphIndex& index,
                             std::span<const double> speeds) {
  const size_t blocks = index.block_flops.size();
  const size_t positions = speeds.size();
  TESSERA_CHECK(positions >= 1 && positions <= blocks)
      << positions << " of " << blocks;
  // Whether the work fits when no position takes longer than `limit`; `starts`
  // are then where each begins that takes what it can.
  std::vector<int> starts(positions);
  const auto fits = [&](double limit) {
    size_t block = 0;
    for (size_t p = 0; p < positions; ++p) {
      starts[p] = static_cast<int>(block);
      double work = 0;
      const size_t left_for_others = positions - 1 - p;
      for (bool first = true; block + left_for_others < blocks;
           first = false, ++block) {
        work += index.block_flops[block];
        if (work <= limit * speeds[p]) continue;
        if (first) return false;
        break;
      }
    }
    return block == blocks;
  };
  double most = 0;
  for (double flops : index.block_flops) most += flops;
  // The slowest may have all of it, whichever way the quotient was rounded.
  most *= (1 + 1e-9) / std::ranges::min(speeds);
  double least = 0;
  // Closer than any difference between two ways to cut.
  for (int i = 0; i < 60; ++i) {
    const double middle = (least + most) / 2;
    (fits(middle) ? most : least) = middle;
  }
  TESSERA_CHECK(fits(most)) << "no cut into " << positions;
  return starts;
}

double SpeedOf(const Cluster& cluster, DeviceId device, DType dtype) {
  const DeviceType& type = cluster.TypeOf(device);
  return type.Peak(dtype).value * type.compute_efficiency / type.slowness;
}

double SlowestSpeed(const Cluster& cluster, const DeviceGroup& group,
                    DType dtype) {
  double slowest = std::numeric_limits<double>::infinity();
  for (DeviceId device : group.devices) {
    slowest = std::min(slowest, SpeedOf(cluster, device, dtype));
  }
  return slowest;
}

bool HasUnlikeSpeeds(const Cluster& cluster, DType dtype) {
  if (cluster.device_types.size() < 2) return false;
  const double first = SpeedOf(cluster, DeviceId(0), dtype);
  for (size_t d = 1; d < cluster.devices.size(); ++d) {
    if (SpeedOf(cluster, DeviceId(d), dtype) != first) return true;
  }
  return false;
}

std::vector<int> SharesBySpeed(int64_t units, std::span<const double> speeds) {
  TESSERA_CHECK(units >= std::ssize(speeds)) << units;
  std::vector<int> shares(speeds.size(), 1);
  // Each further one to who would be done with it first.
  for (int64_t i = std::ssize(speeds); i < units; ++i) {
    size_t best = 0;
    for (size_t w = 1; w < speeds.size(); ++w) {
      if ((shares[w] + 1) * speeds[best] < (shares[best] + 1) * speeds[w]) {
        best = w;
      }
    }
    ++shares[best];
  }
  return shares;
}

std::vector<int> ReducedShares(std::vector<int> shares) {
  int divisor = 0;
  for (int share : shares) divisor = std::gcd(divisor, share);
  for (int& share : shares) share /= divisor;
  if (std::ranges::max(shares) == 1) shares.clear();
  return shares;
}

}  // namespace tessera
