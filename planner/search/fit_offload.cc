#include "planner/search/fit_offload.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <ranges>
#include <utility>

#include "planner/base/threads.h"
#include "planner/ir/host_size.h"
#include "planner/plan/axis_roles.h"
#include "planner/plan/stages.h"
#include "planner/search/least_memory.h"
#include "planner/search/uniform_strategies.h"

namespace tessera {
namespace {

// Plans in which the number of weights is found.
constexpr int kRounds = 4;
// How many more weights the next one has at least.
constexpr double kStep = 0.02;
// Strategies whose plans are priced, for each that is fitted.
constexpr size_t kPricedForEach = 16;
// The host reads and writes what it updates.
constexpr double kUpdatePasses = 2;

class Offloader {
 public:
  Offloader(const SearchSpace& space, const Objective& objective,
            const Plan& plan, const std::function<bool()>& stop)
      : space_(space),
        objective_(objective),
        plan_(plan),
        stop_(stop),
        sets_(DeviceSets(plan.groups)),
        weights_(sets_.size()),
        lacks_(sets_.size()) {
    for (const DeviceSet& set : sets_) {
      capacity_.push_back(LeastMemory(*space.cluster, set));
    }
    for (size_t w = 0; w < space.index.weights.size(); ++w) {
      const NodeId home = space.index.weights[w].home.node;
      const GroupId group = plan.ops[home.index()].group;
      const auto set = std::ranges::find_if(
          sets_, [&](const DeviceSet& s) { return Holds(s, group); });
      weights_[static_cast<size_t>(set - sets_.begin())].push_back(w);
    }
  }

  std::optional<FoundPlan> Run() {
    const Evaluation none = objective_.Evaluate(plan_);
    if (none.feasible()) return FoundPlan{plan_, none};
    if (none.memory.size() != sets_.size()) return std::nullopt;
    for (size_t s = 0; s < sets_.size(); ++s) lacks_[s] = Excess(none, s);
    if (std::ranges::max(lacks_) <= 0) return std::nullopt;
    // Gradients that wait on the host, too, leave more room for each state that
    // does, but go there with each microbatch.
    std::optional<FoundPlan> best;
    for (const bool gradients : {true, false}) {
      if (stop_()) break;
      gradients_ = gradients;
      const std::vector<double> wanted = AsManyAsLack();
      if (wanted.empty()) continue;
      std::optional<FoundPlan> found = Priced(wanted, 0);
      if (found && !found->evaluation.feasible()) found = PartlyInFiles(wanted);
      if (!found || !found->evaluation.feasible()) continue;
      if (!best || Better(found->score(), best->score())) {
        best = std::move(found);
      }
      if (plan_.microbatches == 1) break;
    }
    return best;
  }

 private:
  // By set elements whose states leave the devices so that these have room;
  // none where all of them are not enough.
  std::vector<double> AsManyAsLack() const {
    std::vector<double> all(sets_.size());
    for (size_t s = 0; s < sets_.size(); ++s) {
      for (size_t w : weights_[s]) all[s] += ElementsOf(w);
    }
    const auto most = Priced(all, 0);
    if (!most || !DevicesFit(most->evaluation)) return {};
    std::vector<double> wanted = all;
    for (size_t s = 0; s < sets_.size(); ++s) {
      const double saved = lacks_[s] - Excess(most->evaluation, s);
      wanted[s] *= saved > 0 ? lacks_[s] / saved : 0;
    }
    for (int round = 0; round < kRounds && !stop_(); ++round) {
      const auto some = Priced(wanted, 0);
      if (!some || some->evaluation.memory.size() != sets_.size()) break;
      if (DevicesFit(some->evaluation)) return wanted;
      for (size_t s = 0; s < sets_.size(); ++s) {
        const double still = Excess(some->evaluation, s);
        if (still > 0) wanted[s] *= 1 + std::max(kStep, still / lacks_[s]);
      }
    }
    return all;
  }

  // With as small a share of them in files as leaves the host room.
  std::optional<FoundPlan> PartlyInFiles(
      const std::vector<double>& wanted) const {
    if (!space_.cluster->HasStorage()) return std::nullopt;
    auto found = Priced(wanted, 1);
    if (!found || !found->evaluation.feasible()) return std::nullopt;
    double little = 0;
    double enough = 1;
    for (int round = 0; round < kRounds && !stop_(); ++round) {
      const double share = (little + enough) / 2;
      auto some = Priced(wanted, share);
      const bool fits = some && some->evaluation.feasible();
      (fits ? enough : little) = share;
      if (fits) found = std::move(some);
    }
    return found;
  }

  double ElementsOf(size_t weight) const {
    return static_cast<double>(space_.index.weights[weight].elements);
  }
  bool DevicesFit(const Evaluation& evaluation) const {
    if (evaluation.memory.size() != sets_.size()) return false;
    for (size_t s = 0; s < sets_.size(); ++s) {
      if (Excess(evaluation, s) > 0) return false;
    }
    return true;
  }
  double Excess(const Evaluation& evaluation, size_t set) const {
    return static_cast<double>(evaluation.memory[set].total.value -
                               capacity_[set].value);
  }

  // Of a set's weights some with so many elements, or all: those that are no
  // larger than what is wanted still, the largest first, then the smallest.
  std::vector<size_t> Chosen(size_t set, double wanted) const {
    std::vector<size_t> by_size(weights_[set].rbegin(), weights_[set].rend());
    std::ranges::stable_sort(by_size, std::greater(),
                             [&](size_t w) { return ElementsOf(w); });
    std::vector<size_t> chosen;
    std::vector<size_t> rest;
    for (size_t w : by_size) {
      if (ElementsOf(w) <= wanted) {
        wanted -= ElementsOf(w);
        chosen.push_back(w);
      } else {
        rest.push_back(w);
      }
    }
    if (wanted > 0 && !rest.empty()) chosen.push_back(rest.back());
    return chosen;
  }

  // With the states of so many elements of the sets that lack memory beside the
  // devices, this share of them in files.
  std::optional<FoundPlan> Priced(const std::vector<double>& wanted,
                                  double in_files) const {
    Plan plan = plan_;
    for (size_t s = 0; s < sets_.size(); ++s) {
      if (lacks_[s] <= 0) continue;
      const std::vector<size_t> chosen = Chosen(s, wanted[s]);
      double to_files = 0;
      for (size_t w : chosen) to_files += in_files * ElementsOf(w);
      for (size_t w : chosen) {
        WeightPlacement& weight = plan.weights[w];
        weight.optimizer_tier =
            to_files > 0 ? MemoryTier::kFile : MemoryTier::kHost;
        to_files -= ElementsOf(w);
        if (gradients_ && !IsTiedAcrossGroups(space_.index, plan, w)) {
          weight.gradient_tier = MemoryTier::kHost;
        }
      }
    }
    if (!MakeCanonical(space_, plan) || !Allowed(space_, plan)) {
      return std::nullopt;
    }
    Evaluation evaluation = objective_.Evaluate(plan);
    return FoundPlan{std::move(plan), std::move(evaluation)};
  }

  const SearchSpace& space_;
  const Objective& objective_;
  const Plan& plan_;
  const std::function<bool()>& stop_;
  const std::vector<DeviceSet> sets_;
  std::vector<Bytes> capacity_;               // by set
  std::vector<std::vector<size_t>> weights_;  // by set
  std::vector<double> lacks_;                 // by set, bytes
  bool gradients_ = false;                    // are on the host, too
};

// What the fastest host takes to update so many bytes of each of its devices.
double SecondsOnHost(const SearchSpace& space, Bytes lacks) {
  const auto bytes = static_cast<double>(lacks.value);
  return kUpdatePasses * bytes * space.least_devices_of_node /
         FastestHost(*space.cluster).memory_bandwidth.value;
}

}  // namespace

std::optional<FoundPlan> FitByOffloading(const SearchSpace& space,
                                         const Objective& objective,
                                         const Plan& plan,
                                         const std::function<bool()>& stop) {
  if (space.cluster->hosts.empty()) return std::nullopt;
  return Offloader(space, objective, plan, stop).Run();
}

std::vector<FoundPlan> PartlyOffloaded(
    const SearchSpace& space, const Objective& objective,
    const std::vector<Strategy>& strategies, size_t tried,
    int64_t most_operators, Score than, int threads,
    const std::function<bool()>& stop,
    const std::function<bool()>& stop_guessing) {
  if (space.cluster->hosts.empty()) return {};
  const bool has_files = space.cluster->HasStorage();
  // By how long they take with what they lack on the host, as far as bounds
  // say, and then prices.
  using Guess = std::pair<double, const Strategy*>;
  std::vector<Guess> guesses;
  const auto add = [&](const Score& score, const Strategy& strategy,
                       std::vector<Guess>& to) {
    if (score.feasible) return;
    const double seconds =
        score.step_time.seconds() + SecondsOnHost(space, score.overflow);
    if (than.feasible && seconds >= than.step_time.seconds()) return;
    to.push_back({seconds, &strategy});
  };
  std::vector<std::optional<Score>> bounds(strategies.size());
  ForEach(threads, strategies.size(), [&](size_t i) {
    if (stop() || (stop_guessing && stop_guessing())) return;
    const Strategy& strategy = strategies[i];
    if (OperatorsOf(space, strategy) > most_operators) return;
    const auto guess = [&](const Strategy& of, Objective::Bound bound) {
      return objective.GuessUniform(space.index, of, bound);
    };
    const Score loose = guess(strategy, Objective::Bound::kLoose);
    if (than.feasible && loose.step_time >= than.step_time) return;
    Strategy all = strategy;
    all.optimizer_tier = has_files ? MemoryTier::kFile : MemoryTier::kHost;
    if (!guess(all, Objective::Bound::kQuick).feasible) {
      all.gradient_tier = MemoryTier::kHost;
      if (!guess(all, Objective::Bound::kQuick).feasible) return;
    }
    const Score none = guess(strategy, Objective::Bound::kQuick);
    if (none.step_time > Duration{}) bounds[i] = none;
  });
  for (size_t i = 0; i < strategies.size(); ++i) {
    if (bounds[i]) add(*bounds[i], strategies[i], guesses);
  }
  std::ranges::sort(guesses);
  std::vector<Guess> priced;
  for (const auto& [seconds, strategy] : guesses) {
    if (priced.size() == tried * kPricedForEach || stop()) break;
    const auto score =
        objective.EvaluateUniform(space.index, *space.cluster, *strategy);
    if (score) add(*score, *strategy, priced);
  }
  std::ranges::sort(priced);
  std::vector<FoundPlan> fitted;
  for (const auto& [seconds, strategy] : priced | std::views::take(tried)) {
    if (stop()) break;
    if (than.feasible && seconds >= than.step_time.seconds()) break;
    auto plan = PlanFromStrategy(space.index, *space.cluster, *strategy);
    if (!plan || !MakeCanonical(space, *plan)) continue;
    auto found = FitByOffloading(space, objective, *plan, stop);
    if (!found || !Better(ScoreOf(found->evaluation), than)) continue;
    than = ScoreOf(found->evaluation);
    fitted.insert(fitted.begin(), *std::move(found));
  }
  return fitted;
}

}  // namespace tessera
