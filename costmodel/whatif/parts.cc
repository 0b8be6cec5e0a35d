#include "costmodel/whatif/parts.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/evaluate/step_bound.h"
#include "costmodel/whatif/degrade.h"
#include "planner/plan/work_shares.h"
#include "planner/search/found_plan.h"
#include "planner/search/search_clock.h"
#include "planner/search/starts.h"

namespace tessera {
namespace {

// A part is looked at, of those of which there are ever smaller ones, where a
// step may take less than this share of the best there: that takes as long as
// the starts of another search.
constexpr double kWorthHalving = 0.8;
// What a part gets of the time that is left: a rule of thumb, which leaves some
// to those behind.
constexpr double kShareOfPart = 0.5;

// The ranks of the hosts with the fastest devices first, and of a host in
// order.
std::vector<size_t> FastestFirst(const Cluster& cluster, DType dtype) {
  std::map<int, double> speed_of;  // a host's, by its slowest device
  for (size_t d = 0; d < cluster.devices.size(); ++d) {
    const double speed = SpeedOf(cluster, DeviceId(static_cast<int>(d)), dtype);
    const auto [at, is_new] =
        speed_of.try_emplace(cluster.devices[d].node, speed);
    if (!is_new) at->second = std::min(at->second, speed);
  }
  std::vector<size_t> ranks(cluster.devices.size());
  std::iota(ranks.begin(), ranks.end(), size_t{0});
  std::ranges::stable_sort(ranks, std::greater(), [&](size_t d) {
    return speed_of.at(cluster.devices[d].node);
  });
  return ranks;
}

ClusterSubset First(const std::vector<size_t>& ranks, size_t count) {
  ClusterSubset part(ranks.size(), false);
  for (size_t i = 0; i < count; ++i) part[ranks[i]] = true;
  return part;
}

// The best of the part's starts, where one is better than `best`; done in
// `seconds`, 0: without end.
std::optional<FoundPlan> BestOn(const Graph& graph, const Cluster& part,
                                const Cluster* whole,
                                std::optional<Duration> best, double seconds,
                                const PartOptions& options) {
  SearchSpace space(graph, part);
  space.constraints = options.constraints;
  const Evaluator evaluator(graph, part, options.profile, options.training,
                            Evaluator::kMostInSearch, whole);
  SearchOptions search;
  search.chains = 1;
  search.threads = options.threads;
  SearchClock clock(seconds, options.stop);
  Result<Starts> starts = FindStarts(space, evaluator, search, clock);
  if (!starts) return std::nullopt;
  FoundPlan& found = starts->ranked[0];
  const Score score = found.score();
  if (!score.feasible || (best && score.step_time >= *best)) {
    return std::nullopt;
  }
  return std::move(found);
}

// A plan of a part for the ranks of the whole cluster.
Plan OnWhole(Plan plan, const Cluster& cluster, const ClusterSubset& part) {
  std::vector<DeviceId> ranks;  // in the whole, by rank in the part
  for (size_t d = 0; d < part.size(); ++d) {
    if (part[d]) ranks.push_back(DeviceId(static_cast<int64_t>(d)));
  }
  for (DeviceGroup& group : plan.groups) {
    for (DeviceId& device : group.devices) device = ranks[device.index()];
  }
  plan.cluster_name = cluster.name;
  return plan;
}

}  // namespace

std::vector<ClusterSubset> LikelyParts(const Cluster& cluster,
                                       int64_t global_batch, DType dtype,
                                       const std::vector<int>& degrees) {
  std::vector<ClusterSubset> parts;
  const size_t count = cluster.devices.size();
  std::set<int> types;
  for (const Device& device : cluster.devices) types.insert(device.type);
  const auto add = [&](const auto& is_in) {
    ClusterSubset& part = parts.emplace_back();
    for (const Device& device : cluster.devices) {
      part.push_back(is_in(device.type));
    }
  };
  if (types.size() > 1) {
    for (const int type : types) {
      add([&](int of_device) { return of_device == type; });
    }
  }
  if (types.size() > 2) {
    for (const int type : types) {
      add([&](int of_device) { return of_device != type; });
    }
  }
  // The most devices that share the batch, and those of which so many, a power
  // of two, share each sample.
  const std::vector<size_t> ranks = FastestFirst(cluster, dtype);
  const auto add_most = [&](const auto& divides) {
    size_t most = count;
    while (!divides(static_cast<int64_t>(most))) --most;
    const ClusterSubset part = First(ranks, most);
    if (most < count && std::ranges::find(parts, part) == parts.end()) {
      parts.push_back(part);
    }
  };
  add_most([&](int64_t devices) { return global_batch % devices == 0; });
  add_most([&](int64_t devices) {
    const int64_t of_sample = devices / std::gcd(devices, global_batch);
    return std::has_single_bit(static_cast<uint64_t>(of_sample));
  });
  // A multiple of all that are fixed, and of each.
  int64_t all = 1;
  for (const int degree : degrees) {
    all = std::lcm(all, int64_t{degree});
    if (all > std::ssize(cluster.devices)) break;
  }
  const auto add_multiple = [&](int64_t of) {
    if (of > std::ssize(cluster.devices)) return;
    add_most([&](int64_t devices) { return devices % of == 0; });
  };
  add_multiple(all);
  for (const int degree : degrees) add_multiple(degree);
  return parts;
}

std::vector<ClusterSubset> EverSmallerParts(const Cluster& cluster,
                                            DType dtype) {
  const std::vector<size_t> ranks = FastestFirst(cluster, dtype);
  std::vector<size_t> on_first = {0};  // devices of so many hosts
  for (size_t i = 0; i < ranks.size(); ++i) {
    const bool same_host = i > 0 && cluster.devices[ranks[i]].node ==
                                        cluster.devices[ranks[i - 1]].node;
    if (!same_host) on_first.push_back(on_first.back());
    ++on_first.back();
  }
  std::vector<ClusterSubset> parts;
  for (size_t hosts = (on_first.size() - 1) / 2; hosts > 0; hosts /= 2) {
    parts.push_back(First(ranks, on_first[hosts]));
  }
  for (size_t devices = on_first[1] / 2; devices > 0; devices /= 2) {
    parts.push_back(First(ranks, devices));
  }
  return parts;
}

std::vector<Plan> PlansOnParts(const Graph& graph, const Cluster& cluster,
                               std::optional<Duration> best, double seconds,
                               const PartOptions& options) {
  const SearchClock clock(seconds, options.stop);
  std::vector<Plan> plans;
  // Keeps the part's best plan where that is better than all before. Whether
  // a step may take less than `worth` of the best there.
  const auto look_at = [&](const ClusterSubset& part, double worth) {
    const Cluster alone = OnlyDevices(cluster, part);
    if (!Validate(alone).empty()) return true;  // some do not reach others
    if (best && options.profile == nullptr &&
        LowerBound(graph, alone, options.training).step_time.seconds() >=
            worth * best->seconds()) {
      return false;
    }
    std::optional<Cluster> whole;
    if (options.whole != nullptr) {
      ClusterSubset kept = part;
      kept.resize(options.whole->devices.size(), false);
      whole = OnlyDevices(*options.whole, kept);
    }
    auto found = BestOn(graph, alone, whole ? &*whole : nullptr, best,
                        clock.SecondsTo(1) * kShareOfPart, options);
    if (!found) return true;
    best = found->score().step_time;
    plans.push_back(OnWhole(std::move(found->plan), cluster, part));
    return true;
  };
  const std::vector<ClusterSubset> likely =
      LikelyParts(cluster, graph.global_batch, graph.dtype,
                  options.constraints.FixedDegrees());
  for (const ClusterSubset& part : likely) {
    if (clock.StoppedOrPast(1)) return plans;
    look_at(part, 1);
  }
  if (!best || options.profile != nullptr) return plans;
  for (const ClusterSubset& part : EverSmallerParts(cluster, graph.dtype)) {
    if (clock.StoppedOrPast(1)) return plans;
    if (std::ranges::find(likely, part) != likely.end()) continue;
    if (!look_at(part, kWorthHalving)) break;
  }
  return plans;
}

MoreStarts StartsOnParts(const Graph& graph, const Cluster& cluster,
                         const PartOptions& options) {
  return [&graph, &cluster, options](std::optional<Duration> best,
                                     double seconds) {
    return PlansOnParts(graph, cluster, best, seconds, options);
  };
}

}  // namespace tessera
