#include "planner/search/starts.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <mutex>
#include <string>
#include <utility>

#include "planner/base/threads.h"
#include "planner/plan/used_part.h"
#include "planner/search/action_orders.h"
#include "planner/search/allowed_objective.h"
#include "planner/search/constrained_starts.h"
#include "planner/search/fit.h"
#include "planner/search/fit_offload.h"
#include "planner/search/mixed_plans.h"
#include "planner/search/ragged.h"
#include "planner/search/sweep.h"
#include "planner/search/textbook.h"
#include "planner/search/uniform_strategies.h"
#include "planner/search/unlike_stages.h"

namespace tessera {
namespace {

// The parts of a time limit after which a step ends: rules of thumb, by which
// each that may be the answer gets some of it.
constexpr double kBaselinesEnd = 0.1;
constexpr double kFixedEnd = 0.2;   // baselines made to have what is fixed
constexpr double kBoundsEnd = 0.3;  // of uniform strategies
// Uniform plans one by one, where constraints rule out all that were priced;
// the caller's plans where none fits.
constexpr double kAnyEnd = 0.5;
constexpr double kFittedEnd = 0.6;
constexpr double kPartlyEnd = 0.65;  // plans that offload a part
constexpr double kMoreEnd = 0.7;     // the caller's plans
constexpr double kOrdersEnd = 0.75;  // of actions
// Where nothing else is allowed or fits, random steps and plans that offload:
// all but what printing takes.
constexpr double kOffloadEnd = 0.9;

// Operators, each of every microbatch, by which offloaded strategies are looked
// at in turn: a tenth of a second to simulate, a second, and more.
constexpr std::array<int64_t, 3> kMostOperators = {
    50'000, 500'000, std::numeric_limits<int64_t>::max()};

// Strategies that lack memory and are fitted by recomputation.
constexpr size_t kMostFitted = 32;
// Strategies that lack memory and are fitted by offloading, which takes longer;
// and how many operators, each of every microbatch, they may have.
constexpr size_t kMostOffloaded = 8;
constexpr int64_t kMostOperatorsOffloaded = 100'000;
// Plans that offload take far longer to price than others, so that walks get
// less far from them: they have to be better by more than this.
constexpr double kWorthOffloading = 0.02;
// Strategies that are looked at where there was no time for more.
constexpr size_t kFewStrategies = 64;
// Of the best plans, how many get orders of actions of their own.
constexpr size_t kMostOrdered = 4;

// The best `count` different plans of both lists. Unless `all` that could be
// swept is there, it ends with the last of them: behind it others may be better
// than what was given.
std::vector<FoundPlan> Ranked(
    const std::vector<Candidate>& swept, const std::vector<FoundPlan>& priced,
    size_t count, bool all,
    const std::function<FoundPlan(const Strategy&)>& found_of) {
  struct Option {
    Score score;
    const Candidate* swept = nullptr;  // or
    const FoundPlan* found = nullptr;
  };
  size_t left = swept.size();
  std::vector<Option> options;
  for (const Candidate& candidate : swept) {
    options.push_back({candidate.score, &candidate, nullptr});
  }
  for (const FoundPlan& found : priced) {
    options.push_back({ScoreOf(found.evaluation), nullptr, &found});
  }
  std::ranges::stable_sort(options, [](const Option& a, const Option& b) {
    return Better(a.score, b.score);
  });
  std::vector<FoundPlan> ranked;
  for (const Option& option : options) {
    if (ranked.size() == count || (left == 0 && !all)) break;
    if (option.swept != nullptr) --left;
    FoundPlan found = option.found != nullptr
                          ? *option.found
                          : found_of(option.swept->strategy);
    const bool known = std::ranges::any_of(ranked, [&](const FoundPlan& other) {
      return SameUpToNames(other.plan, found.plan);
    });
    if (!known) ranked.push_back(std::move(found));
  }
  return ranked;
}

// All ranks do all the work, and none exchanges anything, with each number of
// microbatches: no strategy says so, and each move towards it from a strategy
// costs time.
std::vector<Plan> Repeated(const SearchSpace& space) {
  std::vector<Plan> repeated;
  Plan plan = DataParallelPlan(space);
  for (OpPlacement& op : plan.ops) op.axes = {};
  for (const int m :
       Divisors(space.index.graph->global_batch, kMostMicrobatches)) {
    plan.microbatches = m;
    Plan canonical = plan;
    if (MakeCanonical(space, canonical) && Allowed(space, canonical)) {
      repeated.push_back(std::move(canonical));
    }
  }
  return repeated;
}

// Where no plan is there to start from.
Error NothingValid(const SearchSpace& space, bool in_time) {
  if (!in_time) {
    return Error{ErrorCode::kInfeasible,
                 space.constraints.empty()
                     ? "there was no time to price a plan (--time-limit)"
                     : "no plan that the constraints allow was found in time "
                       "(--time-limit)",
                 "search"};
  }
  const auto why = PlanFromStrategy(space.index, *space.cluster, Strategy());
  const std::string what = space.constraints.empty()
                               ? "no valid plan was found"
                               : "no plan was found that the constraints allow";
  return InvalidInput(
      what + (why ? std::string()
                  : "; data parallelism: " + why.error().ToString() +
                        "; pipelines of unlike stages: none"),
      "search");
}

// Finds the starts, step by step.
class StartFinder {
 public:
  StartFinder(const SearchSpace& space, const Objective& objective,
              const SearchOptions& options, SearchClock& clock)
      : space_(space),
        objective_(objective),
        options_(options),
        clock_(clock),
        allowed_(space, objective),
        threads_(ThreadCount(options.threads)),
        count_(static_cast<size_t>(options.chains)),
        strategies_(UniformStrategies(space)) {}

  Result<Starts> Find() {
    AddBaselines();
    AddGiven();
    AddRepeated();
    AddRagged();
    SweepUniform();
    TakeAny();
    SweepBeyond();
    SweepContexts();
    if (!starts_.ranked.empty()) {
      ReserveAnswer(options_, starts_.ranked[0].plan, clock_);
    }
    AddFitted();
    AddMixed();
    Offload(kStartEnd);
    AddOther();
    // What does not fit on all devices may on some.
    const bool fits = ScoreOfBest().feasible;
    if (!fits) AddMore(kAnyEnd);
    AddUnlike();
    AddPartlyOffloaded();
    if (fits) AddMore(kMoreEnd);
    MakeOrders();
    RankOnLinks();
    Repair();
    Offload(kOffloadEnd);
    if (starts_.ranked.empty()) {
      return NothingValid(space_, !offloads_cut_ && !clock_.Past(kOffloadEnd));
    }
    return std::move(starts_);
  }

 private:
  // Asked often, by any thread: reports on the way.
  std::function<bool()> After(double part) {
    return [this, part] {
      Report();
      return clock_.StoppedOrPast(part);
    };
  }
  // Ends a part of what After ends: once half of the time that is left until
  // `part` has passed, and never without a limit. Does not look at Ctrl-C.
  std::function<bool()> HalfwayTo(double part) const {
    const double left = clock_.SecondsTo(part);
    const double end = clock_.Seconds() + left / 2;
    return [this, left, end] { return left > 0 && clock_.Seconds() >= end; };
  }
  void Report() {
    if (!options_.progress) return;
    const std::unique_lock lock(reporting_, std::try_to_lock);
    if (!lock.owns_lock() || clock_.Seconds() - reported_ < kReportInterval) {
      return;
    }
    reported_ = clock_.Seconds();
    options_.progress({0, reported_, best_.feasible, best_.step_time});
  }
  SweepResult SweepOf(const std::vector<Strategy>& strategies, size_t count) {
    return Sweep(space_, allowed_, strategies, count, threads_,
                 After(kStartEnd),
                 [this] { return clock_.StoppedOrPast(kBoundsEnd); });
  }
  FoundPlan Priced(Plan plan) const {
    Evaluation evaluation = objective_.Evaluate(plan);
    return {std::move(plan), std::move(evaluation)};
  }
  Plan PlanOf(const Strategy& strategy) const {
    return PlanFromStrategy(space_.index, *space_.cluster, strategy).value();
  }
  FoundPlan PricedOf(const Strategy& strategy) const {
    return Priced(PlanOf(strategy));
  }
  Score ScoreOfBest() const {
    return starts_.ranked.empty() ? Score()
                                  : ScoreOf(starts_.ranked[0].evaluation);
  }
  void PutFirst(FoundPlan found) {
    starts_.ranked.insert(starts_.ranked.begin(), std::move(found));
    if (starts_.ranked.size() > count_) starts_.ranked.pop_back();
  }

  void AddBaselines() {
    starts_.all_baselines =
        Baselines(space_, objective_, threads_, After(kBaselinesEnd),
                  [this] { return clock_.Stopped(); });
    const std::vector<Plan> giving =
        GivingPlans(space_, strategies_, After(kFixedEnd));
    for (const Baseline& baseline : starts_.all_baselines) {
      if (Allowed(space_, baseline.plan)) {
        starts_.priced.push_back({baseline.plan, baseline.evaluation});
        starts_.baselines.push_back(baseline.plan);
      } else if (auto plan = WithFixed(space_, baseline.plan, giving,
                                       After(kFixedEnd))) {
        starts_.priced.push_back(Priced(*std::move(plan)));
      }
    }
    for (const FoundPlan& found : starts_.priced) {
      const Score score = ScoreOf(found.evaluation);
      if (Better(score, best_)) best_ = score;
    }
  }

  void AddGiven() {
    for (Plan plan : options_.starts) {
      if (!MakeCanonical(space_, plan) || !Allowed(space_, plan)) continue;
      plan.cluster_name = space_.cluster->name;
      // Half of the chains are left for the others.
      if (starts_.given.size() < (count_ + 1) / 2) {
        starts_.given.push_back(plan);
      }
      starts_.priced.push_back(Priced(std::move(plan)));
    }
  }

  void AddRepeated() {
    for (Plan& plan : Repeated(space_)) {
      if (clock_.Past(kFixedEnd)) break;
      starts_.priced.push_back(Priced(std::move(plan)));
    }
  }

  void AddRagged() {
    std::vector<FoundPlan> ragged =
        RaggedPlans(space_, objective_, After(kFixedEnd));
    std::ranges::move(ragged, std::back_inserter(starts_.priced));
  }

  // Several strategies may give one plan: then more of them are needed.
  void SweepUniform() {
    for (size_t count = count_;; count *= 2) {
      SweepResult swept = SweepOf(strategies_, count);
      starts_.uniform_strategies = swept.bounded;
      starts_.swept_all = swept.complete;
      const bool all =
          swept.best.size() < count || clock_.StoppedOrPast(kStartEnd);
      if (!swept.best.empty() && !starts_.uniform) {
        starts_.uniform = PricedOf(swept.best[0].strategy);
      }
      uniform_.clear();
      for (const Candidate& c : swept.best) uniform_.push_back(c.strategy);
      std::vector<FoundPlan> ranked =
          Ranked(swept.best, starts_.priced, count_, all,
                 [&](const Strategy& strategy) { return PricedOf(strategy); });
      if (ranked.size() > starts_.ranked.size()) {
        starts_.ranked = std::move(ranked);
      }
      if (all || starts_.ranked.size() == count_) break;
    }
  }

  // A time limit may have ended the sweep before it priced any: the first that
  // fits, or else what lacks least of those that there is time for. Where
  // constraints leave few, that takes long, and leaves time for what is not
  // uniform.
  void TakeAny() {
    if (!starts_.ranked.empty() || starts_.swept_all) return;
    std::optional<Candidate> best;
    size_t asked = 0;
    for (const Strategy& strategy : strategies_) {
      const bool late = ++asked > kFewStrategies;
      if (best &&
          (best->score.feasible || late || clock_.StoppedOrPast(kStartEnd))) {
        break;
      }
      if (late && clock_.StoppedOrPast(kAnyEnd)) break;
      const auto score =
          allowed_.EvaluateUniform(space_.index, *space_.cluster, strategy);
      if (!score || (best && !Better(*score, best->score))) continue;
      best = {strategy, *score};
    }
    if (!best) return;
    Take(*best);
    starts_.uniform = starts_.ranked[0];
  }

  // Where nothing fits, layers that are split over several nodes.
  void SweepBeyond() {
    const Score before = ScoreOfBest();
    if (before.feasible || clock_.StoppedOrPast(kStartEnd)) return;
    const std::vector<Strategy> beyond =
        UniformStrategies(space_, TensorRanks::kBeyond);
    TakeBetter(SweepOf(beyond, count_));
    strategies_.insert(strategies_.end(), beyond.begin(), beyond.end());
  }

  // The best with their sequences cut otherwise.
  void SweepContexts() {
    const std::vector<Strategy> others = OtherContexts(space_, uniform_);
    if (!others.empty()) TakeBetter(SweepOf(others, count_));
  }

  // What is better than all before.
  void TakeBetter(const SweepResult& swept) {
    starts_.uniform_strategies += swept.bounded;
    starts_.swept_all = starts_.swept_all && swept.complete;
    const bool none = starts_.ranked.empty();
    const Score before = ScoreOfBest();
    bool better = false;
    for (size_t i = swept.best.size(); i-- > 0;) {
      if (!none && !Better(swept.best[i].score, before)) continue;
      Take(swept.best[i]);
      better = true;
    }
    if (better) starts_.uniform = starts_.ranked[0];
  }

  // A uniform strategy that is better than all before.
  void Take(const Candidate& found) {
    uniform_.insert(uniform_.begin(), found.strategy);
    PutFirst(PricedOf(found.strategy));
  }

  // What would be faster and fits once some of it runs again.
  void AddFitted() {
    if (starts_.ranked.empty()) return;
    std::vector<FoundPlan> fitted = FittedPlans(
        space_, objective_, uniform_, strategies_, kMostFitted, ScoreOfBest(),
        threads_, After(kFittedEnd), HalfwayTo(kFittedEnd));
    for (size_t i = fitted.size(); i-- > 0;) {
      PutFirst(std::move(fitted[i]));
    }
  }

  // Layers with many parameters split otherwise than the rest.
  void AddMixed() {
    if (starts_.ranked.empty()) return;
    std::vector<Plan> bases;
    const auto add = [&](const Plan& plan) {
      if (plan.groups.size() > 1 || Offloads(plan)) return;
      if (std::ranges::find(bases, plan) == bases.end()) bases.push_back(plan);
    };
    add(starts_.ranked[0].plan);
    for (const Baseline& baseline : starts_.all_baselines) add(baseline.plan);
    std::vector<FoundPlan> mixed =
        MixedPlans(space_, objective_, bases, After(kFittedEnd));
    if (!mixed.empty() && Better(ScoreOf(mixed[0].evaluation), ScoreOfBest())) {
      PutFirst(mixed[0]);
    }
    std::ranges::move(mixed, std::back_inserter(starts_.priced));
  }

  void AddOther() {
    if (starts_.ranked.empty()) return;
    const bool pipelined = starts_.ranked[0].plan.groups.size() > 1;
    std::vector<Strategy> others = strategies_;
    std::erase_if(others,
                  [&](const Strategy& s) { return (s.pp > 1) == pipelined; });
    const SweepResult swept = SweepOf(others, 1);
    if (swept.best.empty()) return;
    uniform_.push_back(swept.best[0].strategy);
    if (!swept.best[0].score.feasible) return;
    starts_.other = PlanOf(swept.best[0].strategy);
  }

  void AddUnlike() {
    const Score best = ScoreOfBest();
    std::vector<FoundPlan> unlike =
        UnlikeStages(space_, objective_, uniform_, strategies_, best, threads_,
                     After(kFittedEnd));
    if (unlike.empty()) return;
    const auto same = [](const FoundPlan& a, const FoundPlan& b) {
      return a.plan == b.plan;
    };
    unlike.erase(std::unique(unlike.begin(), unlike.end(), same), unlike.end());
    unlike.resize(std::min(unlike.size(), kMostOrdered));
    // Walks change the microbatches of a named schedule, and of no table.
    Plan named = unlike[0].plan;
    for (size_t u = unlike.size(); u-- > 0;) {
      auto ordered = WithOrders(unlike[u].plan, kFittedEnd);
      if (ordered) unlike.push_back(*std::move(ordered));
    }
    std::ranges::stable_sort(unlike,
                             [](const FoundPlan& a, const FoundPlan& b) {
                               return Better(a.evaluation, b.evaluation);
                             });
    const bool first = Better(ScoreOf(unlike[0].evaluation), best);
    if (first) PutFirst(unlike[0]);
    if (!first || unlike[0].plan != named) starts_.unlike = std::move(named);
    std::ranges::move(unlike, std::back_inserter(starts_.priced));
  }

  // What would be faster and fits once some of its state leaves the devices.
  void AddPartlyOffloaded() {
    if (starts_.ranked.empty()) return;
    Score than = ScoreOfBest();
    if (than.feasible && !Offloads(starts_.ranked[0].plan)) {
      than.step_time = Duration::FromSeconds((1 - kWorthOffloading) *
                                             than.step_time.seconds());
    }
    std::vector<FoundPlan> fitted = PartlyOffloaded(
        space_, allowed_, strategies_, kMostOffloaded, kMostOperatorsOffloaded,
        than, threads_, After(kPartlyEnd), HalfwayTo(kPartlyEnd));
    for (size_t i = fitted.size(); i-- > 0;) {
      PutFirst(std::move(fitted[i]));
    }
  }

  void AddMore(double end) {
    if (!options_.more_starts || clock_.StoppedOrPast(end)) return;
    const Score best = ScoreOfBest();
    const auto time =
        best.feasible ? std::optional(best.step_time) : std::nullopt;
    for (Plan& plan : options_.more_starts(time, clock_.SecondsTo(end))) {
      if (!MakeCanonical(space_, plan) || !Allowed(space_, plan)) continue;
      FoundPlan found = Priced(std::move(plan));
      if (!Better(ScoreOf(found.evaluation), ScoreOfBest())) continue;
      starts_.priced.push_back(found);
      if (StrategyOnPart(space_.index, *space_.cluster, found.plan)) {
        starts_.uniform = found;
      }
      PutFirst(std::move(found));
    }
  }

  // Pipelines whose stages take turns by an order made for them.
  void MakeOrders() {
    std::vector<FoundPlan>& ranked = starts_.ranked;
    for (size_t r = 0; r < std::min(ranked.size(), kMostOrdered); ++r) {
      auto ordered = WithOrders(ranked[r].plan, kOrdersEnd);
      if (!ordered) continue;
      const bool first = Better(ScoreOf(ordered->evaluation), ScoreOfBest());
      starts_.priced.push_back(std::exchange(ranked[r], *std::move(ordered)));
      if (first) std::swap(ranked[0], ranked[r]);
    }
  }
  // Nothing where that makes it no better.
  std::optional<FoundPlan> WithOrders(const Plan& plan, double end) {
    auto ordered = BetterOrders(space_, objective_, plan, After(end));
    if (!ordered) return std::nullopt;
    return Priced(*std::move(ordered));
  }

  // Where the best loses time on shared links, what is best with that comes
  // first, of all plans that are known.
  void RankOnLinks() {
    const auto stop = After(kOrdersEnd);
    if (!options_.share_links || starts_.ranked.empty() || stop()) return;
    FoundPlan best = starts_.ranked[0];
    PriceShared(objective_, best);
    if (!LosesOnLinks(best)) return;
    // Sharing makes no plan faster.
    const auto may_be_best = [&](const FoundPlan& found) {
      return Better(ScoreOf(found.evaluation), best.score());
    };
    std::vector<FoundPlan> swept = starts_.ranked;
    if (starts_.other) swept.push_back(Priced(*starts_.other));
    std::vector<FoundPlan*> all;
    for (FoundPlan& found : starts_.priced) all.push_back(&found);
    for (FoundPlan& found : swept) all.push_back(&found);
    std::ranges::stable_sort(all, [](const FoundPlan* a, const FoundPlan* b) {
      return Better(a->evaluation, b->evaluation);
    });
    for (FoundPlan* found : all) {
      if (stop() || !may_be_best(*found)) break;
      PriceShared(objective_, *found);
      if (found->shared && Better(found->score(), best.score())) best = *found;
    }
    std::erase_if(starts_.ranked, [&](const FoundPlan& found) {
      return found.plan == best.plan;
    });
    PutFirst(std::move(best));
  }

  // What the constraints leave may have nothing uniform.
  void Repair() {
    for (size_t b = 0;
         starts_.ranked.empty() && b < starts_.all_baselines.size(); ++b) {
      Rng rng(options_.seed, (uint64_t{1} << 34) + b);
      auto repaired = Repaired(space_, starts_.all_baselines[b].plan, rng,
                               After(kOffloadEnd));
      if (repaired) starts_.ranked.push_back(Priced(*std::move(repaired)));
    }
  }

  // Where nothing fits, what does once state leaves the devices, or else lacks
  // least. Each plan is simulated: those that take long for that are looked at
  // last, where they may be better than what was found.
  void Offload(double end) {
    if (ScoreOfBest().feasible) return;
    std::vector<Strategy> all;
    for (const Approach& approach : Approaches()) {
      // To list those of a large grid takes a second.
      if (!approach.offloads || clock_.StoppedOrPast(end)) continue;
      std::ranges::move(approach.strategies(space_), std::back_inserter(all));
    }
    std::vector<Strategy> lacking;
    std::vector<Strategy> taken;
    int64_t above = 0;
    for (const int64_t most : kMostOperators) {
      std::vector<Strategy> some;
      std::ranges::copy_if(
          all, std::back_inserter(some), [&](const Strategy& strategy) {
            const int64_t operators = OperatorsOf(space_, strategy);
            return above < operators && operators <= most;
          });
      above = most;
      std::vector<std::optional<Score>> bounds(some.size());
      const auto late = After(end);
      const auto halfway = HalfwayTo(end);  // the rest is for prices
      ForEach(threads_, some.size(), [&](size_t i) {
        if (late() || halfway()) {
          offloads_cut_ = true;
          return;
        }
        bounds[i] = objective_.BoundUniform(space_.index, some[i],
                                            Objective::Bound::kQuick);
      });
      const Score best = ScoreOfBest();
      std::vector<Strategy> promising;
      for (size_t i = 0; i < some.size(); ++i) {
        if (!bounds[i]) continue;
        if (!bounds[i]->feasible) {
          lacking.push_back(some[i]);
        } else if (Better(*bounds[i], best)) {
          promising.push_back(some[i]);
        }
      }
      std::ranges::move(TakeBest(promising, count_, end),
                        std::back_inserter(taken));
    }
    // They have the plainest schedule.
    TakeBest(OtherSchedules(space_, taken), count_, end);
    if (!ScoreOfBest().feasible) TakeBest(lacking, 1, end);
  }
  // Of `strategies` the `count` best, where they are better than all before:
  // these.
  std::vector<Strategy> TakeBest(const std::vector<Strategy>& strategies,
                                 size_t count, double end) {
    std::optional<Score> than;
    if (!starts_.ranked.empty()) than = ScoreOfBest();
    const SweepResult swept = Sweep(space_, allowed_, strategies, count,
                                    threads_, After(end), HalfwayTo(end), than);
    std::vector<Strategy> taken;
    for (size_t i = swept.best.size(); i-- > 0;) {
      taken.push_back(swept.best[i].strategy);
      PutFirst(PricedOf(taken.back()));
    }
    if (!taken.empty()) starts_.uniform = starts_.ranked[0];
    return taken;
  }

  const SearchSpace& space_;
  const Objective& objective_;
  const SearchOptions& options_;
  SearchClock& clock_;
  const AllowedObjective allowed_;
  const int threads_;
  const size_t count_;  // of chains, and so of starts
  std::vector<Strategy> strategies_;
  // The best, in order; behind them the best with a pipeline or without.
  std::vector<Strategy> uniform_;
  Starts starts_;
  Score best_;  // of the baselines, as far as is reported
  // What offloads was not all looked at, for want of time.
  std::atomic<bool> offloads_cut_ = false;
  std::mutex reporting_;
  double reported_ = 0;
};

}  // namespace

Result<Starts> FindStarts(const SearchSpace& space, const Objective& objective,
                          const SearchOptions& options, SearchClock& clock) {
  return StartFinder(space, objective, options, clock).Find();
}

}  // namespace tessera
