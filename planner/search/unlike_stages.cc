#include "planner/search/unlike_stages.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "planner/plan/axis_roles.h"
#include "planner/search/experts.h"
#include "planner/search/fit.h"

namespace tessera {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// The programme's table grows with the square of the one, and with the third
// power of the other.
constexpr size_t kMostBlocks = 256;
constexpr int kMostUnits = 32;
constexpr int kMostUnitsAtAll = 64;  // where no fewer do
// By how much longer stages are looked at next.
constexpr double kPaceGrowth = 1.3;
// Strategies that are cut into stages, and plans that are priced: of each with
// its microbatches and ZeRO, and of all.
constexpr size_t kMostLikely = 4;
constexpr size_t kMostOfBase = 3;
constexpr size_t kMostPriced = 16;
// Samples of a microbatch on all replicas of a stage.
constexpr int64_t kMostSamplesOfMicrobatch = 65'536;
// What is estimated to take so many times as long is not priced.
constexpr double kWorth = 1.1;

// Sums over blocks, from which a stage's are differences.
class Sums {
 public:
  explicit Sums(const std::vector<LayerCost>& costs) : sums_(1) {
    for (const LayerCost& cost : costs) {
      LayerCost sum = sums_.back();
      sum.compute += cost.compute;
      sum.exchange += cost.exchange;
      sum.reduction += cost.reduction;
      sum.update += cost.update;
      sum.kept += cost.kept;
      sum.stored += cost.stored;
      sums_.push_back(sum);
      // The last block's backward comes first, when most is kept.
      peaks_.push_back(cost.backward_peak);
    }
  }

  double Compute() const { return sums_.back().compute; }
  double Memory(size_t begin, size_t end, int in_flight) const {
    return sums_[end].stored - sums_[begin].stored +
           in_flight * (sums_[end].kept - sums_[begin].kept) + peaks_[end - 1];
  }
  // For each of m microbatches, with what comes once a step.
  double Time(size_t begin, size_t end, int64_t m) const {
    const LayerCost& a = sums_[begin];
    const LayerCost& b = sums_[end];
    const double pace =
        std::max(b.compute - a.compute, b.exchange - a.exchange);
    // The reductions run beside the last backward, two thirds of a
    // microbatch.
    const double reduction =
        std::max(0.0, b.reduction - a.reduction - 2 * pace / 3);
    return pace + (reduction + b.update - a.update) / static_cast<double>(m);
  }

 private:
  std::vector<LayerCost> sums_;
  std::vector<double> peaks_;
};

class StageProgramme {
 public:
  StageProgramme(const StageProblem& problem, const std::function<bool()>& stop)
      : problem_(problem),
        stop_(stop),
        blocks_(problem.options[0].costs.size()),
        units_(static_cast<size_t>(problem.units)),
        most_stages_(std::min(blocks_, units_)) {
    for (size_t o = 0; o < problem.options.size(); ++o) {
      const StageOption& option = problem.options[o];
      costs_.emplace_back(option.costs);
      std::vector<int>& barred = barred_.emplace_back(1, 0);
      for (size_t b = 0; b < blocks_; ++b) {
        const bool may = option.may.empty() || option.may[b];
        barred.push_back(barred.back() + (may ? 0 : 1));
      }
      again_.push_back(option.again.empty()
                           ? std::nullopt
                           : std::optional<Sums>(option.again));
      const auto alike = std::ranges::find_if(places_, [&](const Place& place) {
        return place.units == static_cast<size_t>(option.units) &&
               place.align == static_cast<size_t>(option.align);
      });
      Place& place =
          alike != places_.end()
              ? *alike
              : places_.emplace_back(Place{static_cast<size_t>(option.units),
                                           static_cast<size_t>(option.align),
                                           {}});
      place.options.push_back(o);
    }
  }

  std::vector<StagesFound> Run() {
    // All work at the pace of its fastest option, evenly on all units, is done
    // no later than any stages'.
    double work = kNever;
    double least_sum = kNever;
    for (size_t o = 0; o < costs_.size(); ++o) {
      const double all = costs_[o].Compute();
      work = std::min(work, all * problem_.options[o].units);
      least_sum = std::min(least_sum, all);
    }
    double least_pace = kNever;
    for (double limit = work / static_cast<double>(units_) * kPaceGrowth;
         least_pace == kNever && !stop_(); limit *= kPaceGrowth) {
      FindChoices(limit);
      Fill(limit, /*pace=*/true);
      for (size_t stages = 2; stages <= most_stages_; ++stages) {
        least_pace = std::min(least_pace, At(stages, 0, units_).value);
      }
      if (none_left_ && limit >= longest_) break;
    }
    if (least_pace == kNever) return {};
    std::vector<std::optional<StagesFound>> best(most_stages_ + 1);
    double least = problem_.limit;
    const auto m = static_cast<double>(problem_.microbatches);
    for (double pace = least_pace; !stop_(); pace *= 1 + kPaceStep) {
      // At a slower pace only filling and draining can take less.
      if ((m - 1) * pace + std::max(least_sum, pace) >= least) break;
      const double limit = pace * (1 + 1e-12);
      if (limit > seen_) FindChoices(limit * kPaceGrowth);
      Fill(limit, /*pace=*/false);
      for (size_t stages = 2; stages <= most_stages_; ++stages) {
        auto found = Trace(stages);
        if (!found || found->time > problem_.limit) continue;
        least = std::min(least, found->time);
        if (!best[stages] || found->time < best[stages]->time) {
          best[stages] = std::move(found);
        }
      }
      if (none_left_ && limit >= longest_) break;
    }
    std::vector<StagesFound> all;
    for (auto& found : best) {
      if (found) all.push_back(*std::move(found));
    }
    std::ranges::stable_sort(all, {}, &StagesFound::time);
    return all;
  }

 private:
  // Options that take as many units, as they lie.
  struct Place {
    size_t units = 1;
    size_t align = 1;
    std::vector<size_t> options;
  };
  // The best of a place's options for some blocks.
  struct Choice {
    double time = kNever;
    int option = -1;
    double least = kNever;  // with memory without end: more blocks take longer
  };
  // What the stages from a block to the end take on so many units.
  struct Cell {
    double value = kNever;
    int end = 0;  // of the first of them
    int option = -1;
  };

  Cell& At(size_t stages, size_t block, size_t units) {
    return cells_[(stages * (blocks_ + 1) + block) * (units_ + 1) + units];
  }
  // Of a stage of blocks [begin, end) that keeps so many microbatches.
  Choice& ChoiceOf(int in_flight, size_t place, size_t begin, size_t end) {
    return choices_[((static_cast<size_t>(in_flight) * places_.size() + place) *
                         blocks_ +
                     begin) *
                        (blocks_ + 1) +
                    end];
  }

  double Time(size_t option, size_t begin, size_t end, int in_flight) const {
    const int64_t m = problem_.microbatches;
    const Sums& costs = costs_[option];
    const double needed = costs.Memory(begin, end, in_flight);
    const double time = costs.Time(begin, end, m);
    if (needed <= problem_.memory) return time;
    if (!again_[option]) return kNever;
    const double least = again_[option]->Memory(begin, end, in_flight);
    if (least > problem_.memory) return kNever;
    // What saves most bytes for its time runs again first.
    const double part = (needed - problem_.memory) / (needed - least);
    return time + part * part * (again_[option]->Time(begin, end, m) - time);
  }

  // Of all stages that take no longer than `limit`, and of some that do.
  void FindChoices(double limit) {
    int most = 0;
    for (size_t stages = 1; stages <= most_stages_; ++stages) {
      most = std::max(most, problem_.in_flight(static_cast<int>(stages)));
    }
    choices_.assign(static_cast<size_t>(most + 1) * places_.size() * blocks_ *
                        (blocks_ + 1),
                    {});
    seen_ = limit;
    none_left_ = true;
    longest_ = 0;
    int known = -1;
    for (size_t stages = 1; stages <= most_stages_ && !stop_(); ++stages) {
      const int in_flight = problem_.in_flight(static_cast<int>(stages));
      if (in_flight == known) continue;
      known = in_flight;
      for (size_t p = 0; p < places_.size(); ++p) {
        for (size_t begin = 0; begin + stages <= blocks_; ++begin) {
          for (size_t end = begin + 1; end + stages <= blocks_ + 1; ++end) {
            Choice& choice = ChoiceOf(in_flight, p, begin, end);
            for (size_t option : places_[p].options) {
              if (barred_[option][begin] != barred_[option][end]) continue;
              choice.least = std::min(
                  choice.least,
                  costs_[option].Time(begin, end, problem_.microbatches));
              const double time = Time(option, begin, end, in_flight);
              if (time >= choice.time) continue;
              choice.time = time;
              choice.option = static_cast<int>(option);
            }
            if (choice.least > limit) {
              none_left_ = none_left_ && choice.least == kNever;
              break;
            }
            if (choice.time != kNever) {
              longest_ = std::max(longest_, choice.time);
            }
          }
        }
      }
    }
  }

  // The least sum of the stages' times, or of their slowest's, of stages that
  // take no longer than `limit`.
  void Fill(double limit, bool pace) {
    cells_.assign((most_stages_ + 1) * (blocks_ + 1) * (units_ + 1), {});
    At(0, blocks_, 0).value = 0;
    for (size_t stages = 1; stages <= most_stages_ && !stop_(); ++stages) {
      for (size_t place = 0; place < places_.size(); ++place) {
        AddStage(stages, place, limit, pace);
      }
    }
  }

  // A stage in front of those behind it.
  void AddStage(size_t stages, size_t place, double limit, bool pace) {
    const auto& [size, align, options] = places_[place];
    const int in_flight = problem_.in_flight(static_cast<int>(stages));
    for (size_t begin = 0; begin + stages <= blocks_; ++begin) {
      for (size_t end = begin + 1; end + stages <= blocks_ + 1; ++end) {
        const Choice& choice = ChoiceOf(in_flight, place, begin, end);
        if (choice.least > limit) break;
        if (choice.time > limit) continue;
        for (size_t behind = stages - 1; behind + size <= units_; ++behind) {
          const double rest = At(stages - 1, end, behind).value;
          const size_t units = behind + size;
          if (rest == kNever || (units_ - units) % align != 0) continue;
          const double value =
              pace ? std::max(choice.time, rest) : choice.time + rest;
          Cell& cell = At(stages, begin, units);
          if (value < cell.value) {
            cell = {value, static_cast<int>(end), choice.option};
          }
        }
      }
    }
  }

  std::optional<StagesFound> Trace(size_t stages) {
    if (At(stages, 0, units_).value == kNever) return std::nullopt;
    StagesFound found;
    double slowest = 0;
    size_t block = 0;
    size_t units = units_;
    for (size_t left = stages; left > 0; --left) {
      const Cell& cell = At(left, block, units);
      const auto option = static_cast<size_t>(cell.option);
      const auto end = static_cast<size_t>(cell.end);
      const double time =
          Time(option, block, end, problem_.in_flight(static_cast<int>(left)));
      found.time += time;
      slowest = std::max(slowest, time);
      found.stages.push_back({cell.end, cell.option});
      block = end;
      units -= static_cast<size_t>(problem_.options[option].units);
    }
    found.time += static_cast<double>(problem_.microbatches - 1) * slowest;
    return found;
  }

  const StageProblem& problem_;
  const std::function<bool()>& stop_;
  const size_t blocks_;
  const size_t units_;
  const size_t most_stages_;
  std::vector<Place> places_;
  std::vector<Sums> costs_;                 // by option
  std::vector<std::optional<Sums>> again_;  // by option
  std::vector<std::vector<int>> barred_;    // by option, sums over blocks
  std::vector<Choice> choices_;
  double seen_ = 0;         // all that take no longer are among them
  bool none_left_ = false;  // all that there are
  double longest_ = 0;      // of them, picoseconds
  std::vector<Cell> cells_;
};

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

// What is to be cut into stages: a strategy for one device, and the samples of
// a microbatch.
struct Base {
  Strategy strategy;
  int64_t samples = 1;
  bool operator==(const Base&) const = default;
};

// Near the first of those that are likely: with their ZeRO, none and the first
// stage, and with microbatches of their samples and of the next that divide the
// batch.
std::vector<Base> Bases(const Setting& setting,
                        const std::vector<Strategy>& likely) {
  const std::vector<int> sizes = Divisors(
      setting.space.index.graph->global_batch, kMostSamplesOfMicrobatch);
  std::vector<Strategy> kinds;
  std::vector<Base> bases;
  const auto add = [&](Base base) {
    const int own = base.strategy.zero;
    const auto at =
        std::ranges::lower_bound(sizes, base.samples) - sizes.begin();
    for (int zero : {own, 0, 1}) {
      if (!setting.zeros.contains(zero)) continue;
      base.strategy.zero = zero;
      for (const int64_t to : {at, at - 1, at + 1, at - 2}) {
        if (to < 0 || to >= std::ssize(sizes)) continue;
        base.samples = sizes[static_cast<size_t>(to)];
        if (std::ranges::find(bases, base) != bases.end()) continue;
        bases.push_back(base);
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

// The plan of the whole model on the first devices of the cluster.
std::optional<Plan> StagePlan(const SearchSpace& space,
                              const Strategy& strategy) {
  const int64_t devices =
      int64_t{strategy.dp} * strategy.tp * strategy.cp * strategy.ep;
  Cluster part;
  part.name = space.cluster->name;
  part.device_types = space.cluster->device_types;
  part.devices.assign(space.cluster->devices.begin(),
                      space.cluster->devices.begin() + devices);
  auto plan = PlanFromStrategy(space.index, part, strategy);
  if (!plan || plan->groups.size() != 1) return std::nullopt;
  return *std::move(plan);
}

// `options` become the strategies of the problem's options.
StageProblem ProblemOf(const Setting& setting, const Base& base,
                       std::vector<Strategy>& options,
                       const std::function<bool()>& stop) {
  const SearchSpace& space = setting.space;
  const Cluster& cluster = *space.cluster;
  StageProblem problem;
  problem.units = static_cast<int>(std::ssize(cluster.devices) / setting.unit);
  problem.microbatches = space.index.graph->global_batch / base.samples;
  problem.memory =
      static_cast<double>(cluster.TypeOf(DeviceId(0)).memory.value);
  const auto m = static_cast<int>(problem.microbatches);
  problem.in_flight = [m](int stages) { return std::min(stages, m); };
  for (int size : SizesOf(problem.units)) {
    for (int tp : setting.degrees) {
      auto stage =
          StageStrategy(base.strategy, tp, size * setting.unit, base.samples);
      if (!stage || stop()) continue;
      StageOption option;
      option.units = size;
      const int64_t replica = int64_t{tp} * stage->cp * stage->ep;
      option.align =
          static_cast<int>(std::lcm(replica, setting.unit) / setting.unit);
      option.costs = setting.objective.LayerCosts(space.index, cluster, *stage);
      if (option.costs.empty()) continue;
      if (!space.constraints.empty()) {
        const auto plan = StagePlan(space, *stage);
        if (!plan) continue;
        option.may = AllowedBlocks(space, *plan);
      }
      if (setting.recomputes) {
        Strategy again = *stage;
        again.recompute = RecomputeLevel::kFull;
        option.again =
            setting.objective.LayerCosts(space.index, cluster, again);
      }
      problem.options.push_back(std::move(option));
      options.push_back(*std::move(stage));
    }
  }
  return problem;
}

// The plan of stages that follow each other on the devices, each placed as its
// strategy places the whole model on so many.
std::optional<Plan> PlanOf(const SearchSpace& space, const StagesFound& found,
                           const std::vector<Strategy>& options) {
  const GraphIndex& index = space.index;
  std::map<int, std::optional<Plan>> by_option;
  std::optional<Plan> plan;
  int64_t first_device = 0;
  size_t block = 0;
  for (size_t s = 0; s < found.stages.size(); ++s) {
    const auto end = static_cast<size_t>(found.stages[s].end);
    const int option = found.stages[s].option;
    const auto [at, is_new] = by_option.try_emplace(option);
    std::optional<Plan>& stage = at->second;
    if (is_new) stage = StagePlan(space, options[static_cast<size_t>(option)]);
    if (!stage) return std::nullopt;
    DeviceGroup group = stage->groups[0];
    group.name = "stage" + std::to_string(s);
    for (DeviceId& device : group.devices) {
      device = DeviceId(device.value + first_device);
    }
    first_device += std::ssize(group.devices);
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
  if (!plan || !MakeCanonical(space, *plan) || !Allowed(space, *plan)) {
    return std::nullopt;
  }
  return plan;
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

}  // namespace

std::vector<StagesFound> CheapestStages(const StageProblem& problem,
                                        const std::function<bool()>& stop) {
  if (problem.options.empty()) return {};
  return StageProgramme(problem, stop).Run();
}

std::vector<FoundPlan> UnlikeStages(const SearchSpace& space,
                                    const Objective& objective,
                                    const std::vector<Strategy>& likely,
                                    const std::vector<Strategy>& strategies,
                                    const Score& than,
                                    const std::function<bool()>& stop) {
  if (space.index.nodes_of_block.size() > kMostBlocks) return {};
  auto unit = UnitOf(space, kMostUnits);
  if (!unit) unit = UnitOf(space, kMostUnitsAtAll);
  if (!unit) return {};
  Setting setting{space, objective, *unit};
  setting.recomputes = strategies.empty();
  for (const Strategy& strategy : strategies) {
    setting.degrees.insert(strategy.tp);
    setting.zeros.insert(strategy.zero);
    if (strategy.pp > 1 && strategy.vp == 1) {
      setting.schedules.insert(strategy.schedule);
    }
    setting.recomputes |= strategy.recompute == RecomputeLevel::kFull;
  }
  const double limit =
      than.feasible ? kWorth * static_cast<double>(than.step_time.picoseconds)
                    : kNever;
  struct Candidate {
    StagesFound found;
    size_t base = 0;
  };
  const std::vector<Base> bases = Bases(setting, likely);
  std::vector<std::vector<Strategy>> options(bases.size());
  std::vector<Candidate> candidates;
  for (size_t i = 0; i < bases.size() && !stop(); ++i) {
    StageProblem problem = ProblemOf(setting, bases[i], options[i], stop);
    problem.limit = limit;
    std::vector<StagesFound> found = CheapestStages(problem, stop);
    found.resize(std::min(found.size(), kMostOfBase));
    for (StagesFound& one : found) candidates.push_back({std::move(one), i});
  }
  std::ranges::stable_sort(candidates, {},
                           [](const Candidate& c) { return c.found.time; });
  candidates.resize(std::min(candidates.size(), kMostPriced));
  std::vector<FoundPlan> plans;
  for (const Candidate& candidate : candidates) {
    if (stop()) break;
    auto plan = PlanOf(space, candidate.found, options[candidate.base]);
    if (!plan) continue;
    auto fitted = FitByRecomputing(space, objective, *std::move(plan));
    if (!fitted) continue;
    SetSchedule(setting, *fitted);
    plans.push_back(*std::move(fitted));
  }
  std::ranges::stable_sort(plans, [](const FoundPlan& a, const FoundPlan& b) {
    return Better(a.evaluation, b.evaluation);
  });
  return plans;
}

}  // namespace tessera
