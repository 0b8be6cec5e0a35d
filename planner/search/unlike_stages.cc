#include "planner/search/unlike_stages.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "planner/base/threads.h"
#include "planner/plan/axis_roles.h"
#include "planner/search/fit.h"
#include "planner/search/ragged.h"
#include "planner/search/stage_cuts.h"
#include "planner/search/uniform_strategies.h"

namespace tessera {
namespace {

// The programme's table grows with the square of the one, and with the third
// power of the other.
constexpr size_t kMostBlocks = 256;
constexpr int kMostUnits = 32;
constexpr int kMostUnitsAtAll = 64;  // where no fewer do
// Strategies that are cut into stages, and plans that are priced: of each with
// its microbatches and ZeRO, and of all.
constexpr size_t kMostLikely = 4;
constexpr size_t kMostOfBase = 3;
constexpr size_t kMostPriced = 16;
// Sizes of microbatches that are looked at first: next to a strategy's own. Of
// the others only what is worth it beside what these give.
constexpr size_t kNearSizes = 4;
// Samples of a microbatch on all replicas of a stage.
constexpr int64_t kMostSamplesOfMicrobatch = 65'536;
// What is estimated to take so many times as long is not priced.
constexpr double kWorth = 1.1;

// A stage as a strategy of its own on so many devices; nothing where
// data-parallel replicas do not divide the microbatch of so many samples.
std::optional<Strategy> StageStrategy(const Strategy& base, int tp,
                                      int64_t devices, int64_t samples) {
  Strategy stage = base;
  stage.tp = tp;
  stage.sp = base.sp && tp > 1;
  const int64_t replica = int64_t{tp} * stage.cp * stage.ep;
  if (devices % replica != 0) return std::nullopt;
  const int64_t dp = devices / replica;
  if (samples % (dp * stage.ep) != 0) return std::nullopt;
  stage.dp = static_cast<int>(dp);
  stage.mbs = static_cast<int>(samples / (dp * stage.ep));
  if (dp * stage.cp * stage.ep == 1) stage.zero = 0;
  if (stage.etp != 0 && tp % stage.etp != 0) return std::nullopt;
  return stage;
}

// Sizes of stages that are tried, finer where they are small.
std::vector<int> SizesOf(int units) {
  std::vector<int> sizes;
  for (int size = 1; size < units; size += size < 8 ? 1 : (size < 16 ? 2 : 4)) {
    sizes.push_back(size);
  }
  return sizes;
}

// What all that is tried has in common.
struct Setting {
  const SearchSpace& space;
  const Objective& objective;
  int64_t unit;  // devices
  bool alike;    // PlacesAreAlike
  // Those of uniform strategies, and what is simplest.
  std::set<int> degrees = {1};  // of tensor parallelism
  std::set<int> zeros = {0, 1};
  std::set<std::string> schedules = {Strategy().schedule};
  bool recomputes = false;
};

// Devices that are dealt out together: as few as leave no more than so many
// units, and a host's, whole hosts' or a part of one's.
std::optional<int64_t> UnitOf(const SearchSpace& space, int most) {
  const auto devices = std::ssize(space.cluster->devices);
  const int64_t host = space.least_devices_of_node;
  for (int64_t unit = 1; 2 * unit <= devices; ++unit) {
    if (devices % unit == 0 && devices / unit <= most &&
        (host % unit == 0 || unit % host == 0)) {
      return unit;
    }
  }
  return std::nullopt;
}

// What is to be cut into stages: a strategy for one device, the samples of a
// microbatch, and whether the first stage is on the last devices.
struct Base {
  Strategy strategy;
  int64_t samples = 1;
  bool from_last = false;
  bool operator==(const Base&) const = default;
};

// Like the first of those that are likely: with their ZeRO, none and the first
// stage, and with microbatches of their samples and of so many of the sizes
// next to these that divide the batch.
std::vector<Base> Bases(const Setting& setting,
                        const std::vector<Strategy>& likely,
                        size_t most_sizes) {
  const std::vector<int> sizes = Divisors(
      setting.space.index.graph->global_batch, kMostSamplesOfMicrobatch);
  std::vector<Strategy> kinds;
  std::vector<Base> bases;
  const auto add = [&](Base base) {
    const int own = base.strategy.zero;
    std::vector<int64_t> order(sizes.size());
    std::iota(order.begin(), order.end(), int64_t{0});
    const auto at =
        std::ranges::lower_bound(sizes, base.samples) - sizes.begin();
    std::ranges::stable_sort(order, {},
                             [&](int64_t i) { return std::abs(i - at); });
    order.resize(std::min(order.size(), most_sizes));
    for (int zero : {own, 0, 1}) {
      if (!setting.zeros.contains(zero)) continue;
      base.strategy.zero = zero;
      for (const int64_t i : order) {
        base.samples = sizes[static_cast<size_t>(i)];
        for (const bool from_last : {false, true}) {
          if (from_last && setting.alike) continue;
          base.from_last = from_last;
          if (std::ranges::find(bases, base) != bases.end()) continue;
          bases.push_back(base);
        }
      }
    }
  };
  for (const Strategy& strategy : likely) {
    if (strategy.pp == 1) continue;
    Base base = {strategy, int64_t{strategy.dp} * strategy.ep * strategy.mbs};
    Strategy& kind = base.strategy;
    kind.dp = kind.tp = kind.pp = kind.vp = kind.mbs = 1;
    kind.sp = strategy.sp || strategy.tp == 1;
    kind.schedule = Strategy().schedule;
    kind.actions.clear();
    kind.recompute = RecomputeLevel::kNone;
    kind.by_speed = false;
    if (std::ranges::find(kinds, kind) == kinds.end()) {
      if (kinds.size() == kMostLikely) break;
      kinds.push_back(kind);
    }
    add(base);
  }
  if (!bases.empty()) return bases;
  Base base;
  base.strategy.dp = 1;
  base.strategy.sp = true;
  for (int samples : sizes) {
    if (samples > std::ssize(setting.space.cluster->devices)) break;
    base.samples = samples;
    add(base);
  }
  return bases;
}

// By block whether constraints let it run so; empty: all.
std::vector<bool> AllowedBlocks(const SearchSpace& space, const Plan& plan) {
  if (space.constraints.empty()) return {};
  std::vector<bool> allowed;
  for (size_t b = 0; b < space.index.nodes_of_block.size(); ++b) {
    allowed.push_back(space.constraints.StillHold(
        space.index, *space.cluster, plan, space.index.nodes_of_block[b],
        space.weights_of_block[b]));
  }
  return allowed;
}

// A way to run a stage: a strategy of its own, as on the devices from one on.
struct Way {
  Strategy strategy;
  DeviceId first;
};

int64_t DevicesOf(const Way& way) {
  const Strategy& s = way.strategy;
  return int64_t{s.dp} * s.tp * s.cp * s.ep;
}

// The plan of the whole model on the devices of a stage.
std::optional<Plan> StagePlan(const SearchSpace& space, const Way& way) {
  Cluster part;
  part.name = space.cluster->name;
  part.device_types = space.cluster->device_types;
  const auto begin = space.cluster->devices.begin() + way.first.value;
  part.devices.assign(begin, begin + DevicesOf(way));
  auto plan = PlanFromStrategy(space.index, part, way.strategy);
  if (!plan || plan->groups.size() != 1) return std::nullopt;
  return *std::move(plan);
}

// Bytes of the device that has least.
double LeastMemory(const Cluster& cluster, const Way& way) {
  auto least = std::numeric_limits<int64_t>::max();
  for (int64_t d = 0; d < DevicesOf(way); ++d) {
    const Bytes memory = cluster.TypeOf(DeviceId(way.first.value + d)).memory;
    least = std::min(least, memory.value);
  }
  return static_cast<double>(least);
}

// Whether a stage costs as much wherever it lies, as far as estimates go.
bool PlacesAreAlike(const Cluster& cluster) {
  std::map<int, int> devices_of_host;
  for (const Device& device : cluster.devices) {
    if (device.type != cluster.devices[0].type) return false;
    ++devices_of_host[device.node];
  }
  return std::ranges::all_of(devices_of_host, [&](const auto& host) {
    return host.second == devices_of_host.begin()->second;
  });
}

// The options of stages of `size` units that run a strategy, and their `ways`,
// behind those that are there.
void AddOptions(const Setting& setting, const Strategy& strategy, int size,
                StageProblem& problem, std::vector<Way>& ways,
                const std::function<bool()>& stop) {
  const SearchSpace& space = setting.space;
  const int64_t replica = int64_t{strategy.tp} * strategy.cp * strategy.ep;
  const auto align =
      static_cast<int>(std::lcm(replica, setting.unit) / setting.unit);
  const size_t known = ways.size();
  for (int begin = 0; begin + size <= problem.units; begin += align) {
    const uint64_t bit = uint64_t{1} << begin;
    if (setting.alike && ways.size() > known) {
      problem.options.back().begins |= bit;
      continue;
    }
    if (stop()) return;
    const Way way = {strategy, DeviceId(begin * setting.unit)};
    StageOption option;
    option.units = size;
    option.begins = bit;
    option.memory = LeastMemory(*space.cluster, way);
    option.costs = setting.objective.LayerCosts(strategy, way.first);
    if (option.costs.empty()) return;
    const auto same = std::find_if(
        problem.options.begin() + static_cast<int64_t>(known),
        problem.options.end(), [&](const StageOption& other) {
          return other.memory == option.memory && other.costs == option.costs;
        });
    if (same != problem.options.end()) {
      same->begins |= bit;
      continue;
    }
    if (!space.constraints.empty()) {
      const auto plan = StagePlan(space, way);
      if (!plan) continue;
      option.may = AllowedBlocks(space, *plan);
    }
    problem.options.push_back(std::move(option));
    ways.push_back(way);
  }
}

// `ways` become those of the problem's options.
StageProblem ProblemOf(const Setting& setting, const Base& base, double limit,
                       std::vector<Way>& ways,
                       const std::function<bool()>& stop) {
  StageProblem problem;
  problem.units = static_cast<int>(setting.space.devices() / setting.unit);
  problem.microbatches = setting.space.index.graph->global_batch / base.samples;
  problem.limit = limit;
  const auto m = static_cast<int>(problem.microbatches);
  problem.in_flight = [m](int stages) { return std::min(stages, m); };
  for (int size : SizesOf(problem.units)) {
    for (int tp : setting.degrees) {
      const auto stage =
          StageStrategy(base.strategy, tp, size * setting.unit, base.samples);
      if (stage) AddOptions(setting, *stage, size, problem, ways, stop);
    }
  }
  for (StageOption& option : problem.options) {
    if (!base.from_last) break;
    const uint64_t begins = std::exchange(option.begins, 0);
    for (int begin = 0; begin + option.units <= problem.units; ++begin) {
      const int ahead = problem.units - begin - option.units;
      option.begins |= (begins >> begin & 1) << ahead;
    }
  }
  if (!setting.recomputes || LeastTime(problem) > problem.limit) return problem;
  for (size_t o = 0; o < ways.size() && !stop(); ++o) {
    Strategy again = ways[o].strategy;
    again.recompute = RecomputeLevel::kFull;
    problem.options[o].again =
        setting.objective.LayerCosts(again, ways[o].first);
  }
  return problem;
}

// The plan of stages that follow each other on the devices, or back from the
// last, each placed as its strategy places the whole model on so many.
std::optional<Plan> PlanOf(const Setting& setting, const StagesFound& found,
                           const std::vector<Way>& ways, bool from_last) {
  const SearchSpace& space = setting.space;
  const GraphIndex& index = space.index;
  std::map<int, std::optional<Plan>> by_option;
  std::optional<Plan> plan;
  int64_t dealt = 0;  // devices
  size_t block = 0;
  for (size_t s = 0; s < found.stages.size(); ++s) {
    const auto end = static_cast<size_t>(found.stages[s].end);
    const int option = found.stages[s].option;
    const auto [at, is_new] = by_option.try_emplace(option);
    std::optional<Plan>& stage = at->second;
    if (is_new) stage = StagePlan(space, ways[static_cast<size_t>(option)]);
    if (!stage) return std::nullopt;
    DeviceGroup group = stage->groups[0];
    group.name = "stage" + std::to_string(s);
    const int64_t first =
        from_last ? space.devices() - dealt - std::ssize(group.devices) : dealt;
    for (DeviceId& device : group.devices) {
      device = DeviceId(device.value + first);
    }
    dealt += std::ssize(group.devices);
    if (!plan) {
      plan = *stage;
      plan->groups.clear();
    }
    plan->groups.push_back(std::move(group));
    for (; block < end; ++block) {
      for (NodeId node : index.nodes_of_block[block]) {
        OpPlacement& op = plan->ops[node.index()];
        op = stage->ops[node.index()];
        op.group = GroupId(static_cast<int64_t>(s));
      }
      for (size_t w : space.weights_of_block[block]) {
        plan->weights[w] = stage->weights[w];
      }
    }
  }
  for (size_t w = 0; plan && w < plan->weights.size(); ++w) {
    int& stage = plan->weights[w].zero_stage;
    stage = HighestZeroStage(index, *plan, w, stage);
  }
  if (!plan || !MakeCanonical(space, *plan)) return std::nullopt;
  if (Allowed(space, *plan)) return plan;
  for (const std::string& schedule : setting.schedules) {
    plan->schedule = schedule;
    if (Allowed(space, *plan)) return plan;
  }
  return std::nullopt;
}

// The best of the schedules.
void SetSchedule(const Setting& setting, FoundPlan& found) {
  for (const std::string& schedule : setting.schedules) {
    Plan plan = found.plan;
    plan.schedule = schedule;
    if (plan == found.plan || !Allowed(setting.space, plan)) continue;
    Evaluation evaluation = setting.objective.Evaluate(plan);
    if (!Better(evaluation, found.evaluation)) continue;
    found = {std::move(plan), std::move(evaluation)};
  }
}

// Whether constraints leave it to some layer to run again.
bool MayRunAgain(const SearchSpace& space) {
  const Plan plan = DataParallelPlan(space);
  const auto violations = [&](const Plan& of) {
    return space.constraints.Violations(space.index, *space.cluster, of);
  };
  const int once = violations(plan);
  return std::ranges::any_of(space.index.nodes_of_block,
                             [&](const std::vector<NodeId>& nodes) {
                               Plan again = plan;
                               for (NodeId node : nodes)
                                 again.ops[node.index()].recompute = true;
                               return violations(again) <= once;
                             });
}

}  // namespace

std::vector<FoundPlan> UnlikeStages(const SearchSpace& space,
                                    const Objective& objective,
                                    const std::vector<Strategy>& likely,
                                    const std::vector<Strategy>& strategies,
                                    const Score& than, int threads,
                                    const std::function<bool()>& stop) {
  if (space.index.nodes_of_block.size() > kMostBlocks) return {};
  if (space.constraints.RuleOut("pp")) return {};
  auto unit = UnitOf(space, kMostUnits);
  if (!unit) unit = UnitOf(space, kMostUnitsAtAll);
  if (!unit) return {};
  Setting setting{space, objective, *unit, PlacesAreAlike(*space.cluster)};
  setting.recomputes = strategies.empty();
  if (strategies.empty()) {
    for (int tp :
         Divisors(space.least_devices_of_node, space.least_devices_of_node)) {
      setting.degrees.insert(tp);
    }
  }
  for (const Strategy& strategy : strategies) {
    setting.degrees.insert(strategy.tp);
    setting.zeros.insert(strategy.zero);
    if (strategy.pp > 1 && strategy.vp == 1) {
      setting.schedules.insert(strategy.schedule);
    }
    setting.recomputes |= strategy.recompute == RecomputeLevel::kFull;
  }
  setting.recomputes =
      setting.recomputes && (space.constraints.empty() || MayRunAgain(space));
  const double limit =
      than.feasible ? kWorth * static_cast<double>(than.step_time.picoseconds)
                    : std::numeric_limits<double>::infinity();
  struct Candidate {
    StagesFound found;
    size_t base = 0;
  };
  std::vector<Base> bases = Bases(setting, likely, kNearSizes);
  const size_t near = bases.size();
  for (const Base& base :
       Bases(setting, likely, std::numeric_limits<size_t>::max())) {
    if (std::ranges::find(bases, base) == bases.end()) bases.push_back(base);
  }
  std::vector<std::vector<Way>> ways(bases.size());
  std::vector<std::vector<StagesFound>> of_base(bases.size());
  const auto find = [&](size_t begin, size_t end, double within) {
    ForEach(threads, end - begin, [&](size_t offset) {
      if (stop()) return;
      const size_t i = begin + offset;
      const StageProblem problem =
          ProblemOf(setting, bases[i], within, ways[i], stop);
      of_base[i] = CheapestStages(problem, stop);
      of_base[i].resize(std::min(of_base[i].size(), kMostOfBase));
    });
  };
  find(0, near, limit);
  double least = limit;
  for (const std::vector<StagesFound>& found : of_base) {
    if (!found.empty()) least = std::min(least, kWorth * found[0].time);
  }
  // Without a limit nothing cuts the others short.
  if (!std::isinf(least)) find(near, bases.size(), least);
  std::vector<Candidate> candidates;
  for (size_t i = 0; i < bases.size(); ++i) {
    for (StagesFound& one : of_base[i]) {
      candidates.push_back({std::move(one), i});
    }
  }
  std::ranges::stable_sort(candidates, {},
                           [](const Candidate& c) { return c.found.time; });
  candidates.resize(std::min(candidates.size(), kMostPriced));
  std::vector<std::optional<FoundPlan>> fitted(candidates.size());
  ForEach(threads, candidates.size(), [&](size_t i) {
    if (stop()) return;
    const size_t base = candidates[i].base;
    auto plan =
        PlanOf(setting, candidates[i].found, ways[base], bases[base].from_last);
    if (!plan) return;
    fitted[i] = FitByRecomputing(space, objective, *std::move(plan));
    if (fitted[i]) SetSchedule(setting, *fitted[i]);
  });
  std::vector<FoundPlan> plans;
  for (std::optional<FoundPlan>& found : fitted) {
    if (found) plans.push_back(*std::move(found));
  }
  std::ranges::stable_sort(plans, [](const FoundPlan& a, const FoundPlan& b) {
    return Better(a.evaluation, b.evaluation);
  });
  return plans;
}

}  // namespace tessera
