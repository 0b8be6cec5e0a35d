#include "planner/search/mcmc.h"

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cmath>
#include <optional>
#include <utility>

#include "planner/base/threads.h"
#include "planner/search/action_orders.h"
#include "planner/search/constraints.h"
#include "planner/search/fit.h"
#include "planner/search/sweep.h"
#include "planner/search/textbook.h"
#include "planner/search/tidy.h"
#include "planner/search/unlike_stages.h"

namespace tessera {
namespace {

// Random moves that lead from a uniform plan to a random one.
constexpr int kRandomMoves = 64;

// Bytes that an infeasible plan lacks; at least one, since the violation may
// be of another kind.
double OverflowOf(const Evaluation& evaluation) {
  return static_cast<double>(std::max<int64_t>(1, evaluation.overflow.value));
}

class Clock {
 public:
  double Seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() -
                                         start_)
        .count();
  }

 private:
  std::chrono::steady_clock::time_point start_ =
      std::chrono::steady_clock::now();
};

// Where a chain may start: a plan, or the strategy that gives it.
struct StartOption {
  Score score;
  Strategy strategy;
  std::optional<Plan> plan;
};

struct Starts {
  std::vector<Plan> given;   // the caller's
  std::vector<Plan> ranked;  // uniform plans and the caller's, best first
  // The best uniform plan with a pipeline where ranked[0] has none, or without.
  std::optional<Plan> other;
  std::optional<Plan> unlike;  // the best of unlike stages
  std::vector<Plan> baselines;
};

bool AnyOffloads(const Starts& starts) {
  return std::ranges::any_of(starts.given, Offloads) ||
         std::ranges::any_of(starts.ranked, Offloads);
}

// Moves(), those with weight 0 that lack what they need.
std::vector<Move> MovesFrom(const SearchSpace& space, const Starts& starts) {
  std::vector<Move> moves(Moves().begin(), Moves().end());
  const bool offloads = AnyOffloads(starts);
  for (Move& move : moves) {
    if ((move.needs == MoveNeeds::kOffloads && !offloads) ||
        (move.needs == MoveNeeds::kUnlikeDevices && !space.unlike_speeds)) {
      move.weight = 0;
    }
  }
  return moves;
}

// Most chains change equal layers of a stage together: layers that drift apart
// are all to be priced, and few draws apply to them. The coldest chain of every
// second ladder looks at each by itself. All do where state leaves the devices:
// how many layers' stays is to be found, and plans are simulated whole.
bool IsFolded(const Starts& starts, int chain) {
  return chain % (2 * kRungs) != kRungs && !AnyOffloads(starts);
}

// `plan` after random moves, each taken as it comes.
Plan Randomized(const SearchSpace& space, std::span<const Move> moves,
                Plan plan, bool folded, Rng& rng) {
  Draft draft(space, std::move(plan));
  draft.Fold(folded);
  for (int i = 0; i < kRandomMoves; ++i) {
    if (DrawMove(moves, rng).Propose(draft, rng)) draft.Keep();
  }
  return draft.plan();
}

// The parts of a time limit after which baselines, bounds of uniform
// strategies, starting plans, those that are fitted, and walks end; the rest is
// for Tidy.
constexpr double kBaselinesEnd = 0.1;
constexpr double kBoundsEnd = 0.3;
constexpr double kStartEnd = 0.4;
constexpr double kFittedEnd = 0.6;
constexpr double kWalkEnd = 0.9;

// Strategies that lack memory and are fitted by recomputation.
constexpr size_t kMostFitted = 32;
// Of the best plans, how many get orders of actions of their own.
constexpr size_t kMostOrdered = 4;

// The part of a time limit without an improvement after which a walk ends.
constexpr double kPatience = 0.5;

// The objective where constraints leave nothing of the other plans.
class AllowedObjective : public Objective {
 public:
  AllowedObjective(const SearchSpace& space, const Objective& objective)
      : space_(space), objective_(objective) {}
  Evaluation Evaluate(const Plan& plan) const override {
    return objective_.Evaluate(plan);
  }
  std::optional<Score> EvaluateUniform(
      const GraphIndex& index, const Cluster& cluster,
      const Strategy& strategy) const override {
    if (!space_.constraints.empty()) {
      const auto plan = PlanFromStrategy(index, cluster, strategy);
      if (!plan || !Allowed(space_, *plan)) return std::nullopt;
    }
    return objective_.EvaluateUniform(index, cluster, strategy);
  }
  Score BoundUniform(const GraphIndex& index, const Cluster& cluster,
                     const Strategy& strategy, Bound bound) const override {
    return objective_.BoundUniform(index, cluster, strategy, bound);
  }

 private:
  const SearchSpace& space_;
  const Objective& objective_;
};

// Steps towards the constraints from a plan that breaks some.
constexpr int kRepairSteps = 20'000;

// A plan that the constraints allow, by random moves from `plan` of which none
// breaks more of them; nothing where none is found.
std::optional<Plan> Repaired(const SearchSpace& space, Plan plan, Rng& rng,
                             const std::function<bool()>& stop) {
  SearchSpace free = space;
  free.constraints = {};
  const auto violations = [&](const Plan& of) {
    return space.constraints.Violations(space.index, *space.cluster, of);
  };
  const std::vector<Move> moves = MovesFrom(space, {});
  Draft draft(free, std::move(plan));
  int broken = violations(draft.plan());
  for (int i = 0; i < kRepairSteps && broken > 0 && !stop(); ++i) {
    if (!DrawMove(moves, rng).Propose(draft, rng)) continue;
    const int then = violations(draft.plan());
    if (then > broken) {
      draft.Undo();
      continue;
    }
    broken = then;
    draft.Keep();
  }
  if (broken > 0) return std::nullopt;
  return draft.plan();
}

// Uniform plans that give operators what is fixed.
constexpr size_t kMostGiving = 100;

// `plan` with the operators of each fixed key placed as in a uniform plan on
// the same devices that has the key; nothing where the constraints do not allow
// that.
std::optional<Plan> WithFixed(const SearchSpace& space, Plan plan,
                              std::span<const Plan> uniform) {
  const auto violations = [&](const Plan& of) {
    return space.constraints.Violations(space.index, *space.cluster, of);
  };
  int broken = violations(plan);
  for (const auto& nodes : space.constraints.FixedNodes()) {
    // The key is of how they are split, or of whether their layer runs again.
    for (const bool again : {false, true}) {
      for (const Plan& giver : uniform) {
        if (broken == 0) break;
        if (!std::ranges::equal(plan.groups, giver.groups, SameMesh)) continue;
        Plan spliced = plan;
        for (NodeId node : nodes) {
          OpPlacement& op = spliced.ops[node.index()];
          if (!again) {
            const bool recompute = op.recompute;
            op = giver.ops[node.index()];
            op.recompute = recompute;
            continue;
          }
          const int block = space.index.graph->node(node).block;
          for (NodeId of_layer :
               space.index.nodes_of_block[static_cast<size_t>(block)]) {
            spliced.ops[of_layer.index()].recompute =
                giver.ops[of_layer.index()].recompute;
          }
        }
        if (!MakeCanonical(space, spliced)) continue;
        const int then = violations(spliced);
        if (then >= broken) continue;
        broken = then;
        plan = std::move(spliced);
      }
    }
  }
  if (broken > 0) return std::nullopt;
  return plan;
}

// The best `count` different plans of both lists. Unless `all` that could be
// swept is there, it ends with the last of them: behind it others may be better
// than what was given.
std::vector<Plan> Ranked(const SearchSpace& space, std::vector<Candidate> swept,
                         const std::vector<StartOption>& given, size_t count,
                         bool all) {
  size_t left = swept.size();
  std::vector<StartOption> options;
  for (Candidate& candidate : swept) {
    options.push_back({candidate.score, std::move(candidate.strategy), {}});
  }
  options.insert(options.end(), given.begin(), given.end());
  std::stable_sort(options.begin(), options.end(),
                   [](const StartOption& a, const StartOption& b) {
                     return Better(a.score, b.score);
                   });
  std::vector<Plan> ranked;
  for (StartOption& option : options) {
    if (ranked.size() == count || (left == 0 && !all)) break;
    if (!option.plan.has_value()) {
      --left;
      option.plan =
          PlanFromStrategy(space.index, *space.cluster, option.strategy)
              .value();
    }
    const bool known = std::ranges::any_of(ranked, [&](const Plan& plan) {
      return SameUpToNames(plan, *option.plan);
    });
    if (!known) ranked.push_back(*std::move(option.plan));
  }
  return ranked;
}

// The first chains start from the caller's plans. Of the others every second
// does from the best uniform plans in turn; the rest from the last baseline,
// the other plan, that of unlike stages, a random one and the other baselines,
// since walks that are cold find no way from pipelines to plans without, or
// back.
Plan StartOf(const SearchSpace& space, std::span<const Move> moves,
             const Starts& starts, int chain, uint64_t seed) {
  if (chain < std::ssize(starts.given)) {
    return starts.given[static_cast<size_t>(chain)];
  }
  const auto turn = static_cast<size_t>(chain) - starts.given.size();
  if (turn % 2 == 0) return starts.ranked[turn / 2 % starts.ranked.size()];
  std::vector<const Plan*> rest;
  for (const Plan& plan : starts.baselines) rest.insert(rest.begin(), &plan);
  const auto second = rest.begin() + (rest.empty() ? 0 : 1);
  rest.insert(second, nullptr);  // the random one
  for (const std::optional<Plan>* plan : {&starts.other, &starts.unlike}) {
    if (*plan) rest.insert(std::ranges::find(rest, nullptr), &**plan);
  }
  const Plan* const plan = rest[turn / 2 % rest.size()];
  if (plan != nullptr) return *plan;
  // A stream of its own, apart from the chain's.
  Rng rng(seed, (uint64_t{1} << 32) + static_cast<uint64_t>(chain));
  return Randomized(space, moves, starts.ranked[0], IsFolded(starts, chain),
                    rng);
}

}  // namespace

Chain::Chain(const SearchSpace& space, const Objective& objective,
             std::span<const Move> moves, Plan start, double temperature,
             Rng rng, Duration unit, bool folded)
    : objective_(objective),
      moves_(moves),
      folded_(folded),
      draft_(space, std::move(start)),
      evaluation_(
          objective.EvaluateChange(draft_.plan(), {true, {}, {}}, basis_)),
      bests_{{draft_.plan(), evaluation_}},
      time_unit_(static_cast<double>(unit.picoseconds)),
      rng_(rng) {
  SetUnit();
  draft_.Fold(folded);
  statistics_.temperature = temperature;
  statistics_.moves.resize(moves.size());
  statistics_.start = evaluation_;
  statistics_.best = evaluation_;
}

void Chain::SetUnit() {
  if (!evaluation_.feasible()) {
    unit_ = OverflowOf(evaluation_);
    return;
  }
  if (time_unit_ == 0) {
    time_unit_ = static_cast<double>(
        std::max<int64_t>(1, evaluation_.step_time.picoseconds));
  }
  unit_ = time_unit_;
}

double Chain::Cost(const Evaluation& evaluation) const {
  return (evaluation.feasible()
              ? static_cast<double>(evaluation.step_time.picoseconds)
              : OverflowOf(evaluation)) /
         unit_;
}

bool Chain::Accepts(const Evaluation& evaluation, double log_ratio) {
  if (evaluation.feasible() && !evaluation_.feasible()) return true;
  if (evaluation_.feasible() && !evaluation.feasible()) return false;
  const double exponent =
      (Cost(evaluation_) - Cost(evaluation)) / statistics_.temperature +
      log_ratio;
  return exponent >= 0 || rng_.Uniform01() < std::exp(exponent);
}

bool Chain::Step() {
  ++statistics_.proposals;
  const Move& move = DrawMove(moves_, rng_);
  MoveStatistics& of_move =
      statistics_.moves[static_cast<size_t>(&move - moves_.data())];
  ++of_move.proposals;
  const auto log_ratio = move.Propose(draft_, rng_);
  if (!log_ratio.has_value()) return false;
  ++statistics_.applicable;
  ++of_move.applicable;
  std::shared_ptr<const PlanBasis> basis = basis_;
  Evaluation evaluation =
      objective_.EvaluateChange(draft_.plan(), draft_.change(), basis);
  const bool becomes_feasible =
      evaluation.feasible() && !evaluation_.feasible();
  if (!Accepts(evaluation, *log_ratio)) {
    draft_.Undo();
    return false;
  }
  draft_.Keep();
  evaluation_ = std::move(evaluation);
  basis_ = std::move(basis);
  ++statistics_.accepted;
  ++of_move.accepted;
  if (becomes_feasible) SetUnit();
  if (Better(evaluation_, statistics_.best)) {
    if (bests_.size() == kMostBests) bests_.erase(bests_.begin());
    bests_.push_back({draft_.plan(), evaluation_});
    statistics_.best = evaluation_;
    if (evaluation_.feasible()) {
      trace_.push_back({0, statistics_.proposals, evaluation_.step_time});
    }
  }
  return true;
}

bool Chain::Exchange(Chain& a, Chain& b, Rng& rng) {
  const double draw = rng.Uniform01();
  if (!a.evaluation_.feasible() || !b.evaluation_.feasible()) return false;
  const auto inverse = [](const Chain& c) {
    return 1 / (c.statistics_.temperature * c.unit_);
  };
  const double exponent =
      (inverse(a) - inverse(b)) *
      static_cast<double>(a.evaluation_.step_time.picoseconds -
                          b.evaluation_.step_time.picoseconds);
  if (exponent < 0 && draw >= std::exp(exponent)) return false;
  std::swap(a.draft_, b.draft_);
  a.draft_.Fold(a.folded_);
  b.draft_.Fold(b.folded_);
  std::swap(a.evaluation_, b.evaluation_);
  std::swap(a.basis_, b.basis_);
  return true;
}

namespace {

double TemperatureOf(const SearchOptions& options, int rung) {
  return options.temperature / std::pow(kBetweenRungs, kRungs - 1 - rung);
}

// All chains of a search, and their walk on several threads.
class Walk {
 public:
  Walk(const SearchSpace& space, const Objective& objective,
       const SearchOptions& options, const Starts& starts, const Score& best,
       std::function<bool()> stop, const Clock& clock)
      : options_(options),
        moves_(MovesFrom(space, starts)),
        stop_(std::move(stop)),
        clock_(clock),
        rng_(options.seed, uint64_t{1} << 33),
        best_(best),
        improved_(clock.Seconds()) {
    for (int c = 0; c < options.chains; ++c) {
      // Who is late starts where prices are known.
      const bool late =
          stop_() || (options.time_limit > 0 &&
                      clock.Seconds() >= kStartEnd * options.time_limit);
      chains_.emplace_back(
          space, objective, moves_,
          late ? starts.ranked[0]
               : StartOf(space, moves_, starts, c, options.seed),
          TemperatureOf(options, c % kRungs),
          Rng(options.seed, static_cast<uint64_t>(c)),
          best.feasible ? best.step_time : Duration{}, IsFolded(starts, c));
      quota_.push_back(options.proposals / options.chains +
                       (c < options.proposals % options.chains ? 1 : 0));
    }
    for (int rung = 0; rung + 1 < std::min(kRungs, options.chains); ++rung) {
      swaps_.push_back({TemperatureOf(options, rung),
                        TemperatureOf(options, rung + 1), 0, 0});
    }
  }

  // Until the proposals are done, `stop` says so, or nothing improves.
  void Run(int threads) {
    threads = std::min(threads, options_.chains);
    std::barrier round_end(threads, [this]() noexcept { EndRound(); });
    OnThreads(threads, [&] {
      while (!done_) {
        for (size_t c; (c = next_.fetch_add(1)) < chains_.size();) {
          WalkRound(c);
        }
        round_end.arrive_and_wait();
      }
    });
  }

  const std::vector<Chain>& chains() const { return chains_; }
  const std::vector<SwapStatistics>& swaps() const { return swaps_; }
  bool stalled() const { return stalled_; }

 private:
  void WalkRound(size_t c) {
    int64_t steps = kRound;
    if (options_.proposals > 0) {
      steps = std::min(steps, quota_[c] - chains_[c].statistics().proposals);
    }
    for (int64_t step = 0; step < steps && !stop_(); ++step) chains_[c].Step();
  }

  // Alone, between two rounds.
  void EndRound() {
    next_ = 0;
    bool all_done = options_.proposals > 0;
    int64_t proposals = 0;
    for (size_t c = 0; c < chains_.size(); ++c) {
      const ChainStatistics& statistics = chains_[c].statistics();
      proposals += statistics.proposals;
      all_done = all_done && statistics.proposals >= quota_[c];
      const Score best = ScoreOf(statistics.best);
      if (!Better(best, best_)) continue;
      best_ = best;
      improved_ = clock_.Seconds();
      to_keep_ = &chains_[c];
    }
    const double now = clock_.Seconds();
    stalled_ = options_.time_limit > 0 &&
               now - improved_ > kPatience * options_.time_limit;
    done_ = all_done || stop_() || stalled_;
    if (options_.progress && now - reported_ > 0.1) {
      reported_ = now;
      options_.progress({proposals, now, best_.feasible, best_.step_time});
    }
    if (options_.keep && to_keep_ != nullptr && best_.feasible &&
        now - kept_ > kKeepInterval) {
      kept_ = now;
      options_.keep(std::exchange(to_keep_, nullptr)->best());
    }
    if (done_) return;
    // Pairs (0, 1), (2, 3), … in even rounds, (1, 2), … in odd ones.
    for (size_t c = 0; c + 1 < chains_.size(); ++c) {
      const size_t rung = c % kRungs;
      if (rung + 1 == kRungs || rung % 2 != rounds_ % 2) continue;
      ++swaps_[rung].attempts;
      if (Chain::Exchange(chains_[c], chains_[c + 1], rng_)) {
        ++swaps_[rung].accepted;
      }
    }
    ++rounds_;
  }

  const SearchOptions& options_;
  const std::vector<Move> moves_;
  const std::function<bool()> stop_;
  const Clock& clock_;
  std::vector<Chain> chains_;
  std::vector<int64_t> quota_;
  std::vector<SwapStatistics> swaps_;
  Rng rng_;  // of the exchanges
  std::atomic<size_t> next_ = 0;
  bool done_ = false;
  bool stalled_ = false;
  size_t rounds_ = 0;
  Score best_;
  double improved_;  // when, seconds
  double reported_ = 0;
  const Chain* to_keep_ = nullptr;  // that has the best, unless it was kept
  double kept_ = 0;
};

// The `count` best of all that are far enough apart.
std::vector<FoundPlan> BestOf(std::vector<FoundPlan> all, size_t count) {
  std::ranges::stable_sort(all, [](const FoundPlan& a, const FoundPlan& b) {
    return Better(a.evaluation, b.evaluation);
  });
  std::vector<FoundPlan> best;
  for (FoundPlan& found : all) {
    if (best.size() == count) break;
    if (best.empty() ||
        (found.evaluation.feasible() &&
         found.evaluation.step_time.seconds() >=
             (1 + kApart) * best.back().evaluation.step_time.seconds())) {
      best.push_back(std::move(found));
    }
  }
  return best;
}

// All ranks do all the work, and none exchanges anything, with each number of
// microbatches: no strategy says so, and each move towards it from a strategy
// costs time.
std::vector<Plan> Repeated(const SearchSpace& space) {
  std::vector<Plan> repeated;
  auto plan = PlanFromStrategy(space.index, *space.cluster, Strategy());
  if (!plan) return repeated;
  for (OpPlacement& op : plan->ops) op.axes = {};
  const int64_t batch = space.index.graph->global_batch;
  for (int64_t m = 1; m <= std::min<int64_t>(batch, kMostMicrobatches); ++m) {
    if (batch % m != 0) continue;
    plan->microbatches = static_cast<int>(m);
    Plan canonical = *plan;
    if (MakeCanonical(space, canonical) && Allowed(space, canonical)) {
      repeated.push_back(std::move(canonical));
    }
  }
  return repeated;
}

// Where no plan is there to start from.
Error NothingValid(const SearchSpace& space) {
  const auto why = PlanFromStrategy(space.index, *space.cluster, Strategy());
  const std::string what = space.constraints.empty()
                               ? "no valid plan was found"
                               : "no plan was found that the constraints allow";
  return InvalidInput(
      what + (why ? std::string()
                  : "; data parallelism: " + why.error().ToString()),
      "search");
}

}  // namespace

Result<SearchResult> Search(const SearchSpace& space,
                            const Objective& objective,
                            const SearchOptions& options) {
  TESSERA_CHECK(options.proposals > 0 || options.time_limit > 0 ||
                options.stop != nullptr)
      << "a search without an end";
  TESSERA_CHECK(options.chains >= 1 && options.temperature > 0);
  const Clock clock;
  const int threads = ThreadCount(options.threads);
  const auto stopped = [&] {
    return options.stop != nullptr && options.stop->load();
  };
  const auto out_of_time = [&](double share) {
    return options.time_limit > 0 &&
           clock.Seconds() >= share * options.time_limit;
  };

  SearchResult result;
  result.baselines = Baselines(space, objective, threads, [&] {
    return stopped() || out_of_time(kBaselinesEnd);
  });
  std::vector<StartOption> given;  // the baselines and the caller's
  Starts starts;
  const std::vector<Strategy> strategies = UniformStrategies(space);
  const bool fixes = !space.constraints.FixedNodes().empty();
  std::vector<Plan> giving;
  for (const Strategy& strategy : strategies) {
    if (!fixes || giving.size() == kMostGiving) break;
    auto plan = PlanFromStrategy(space.index, *space.cluster, strategy);
    if (plan) giving.push_back(*std::move(plan));
  }
  for (const Baseline& baseline : result.baselines) {
    if (!Allowed(space, baseline.plan)) {
      auto plan = WithFixed(space, baseline.plan, giving);
      if (!plan) continue;
      const Score score = ScoreOf(objective.Evaluate(*plan));
      given.push_back({score, {}, *std::move(plan)});
      continue;
    }
    given.push_back(
        {ScoreOf(baseline.evaluation), baseline.strategy, baseline.plan});
    starts.baselines.push_back(baseline.plan);
  }
  for (Plan plan : options.starts) {
    if (!MakeCanonical(space, plan) || !Allowed(space, plan)) continue;
    const Score score = ScoreOf(objective.Evaluate(plan));
    // Half of the chains are left for the others.
    if (std::ssize(starts.given) < (options.chains + 1) / 2) {
      starts.given.push_back(plan);
    }
    given.push_back({score, {}, std::move(plan)});
  }
  for (Plan& plan : Repeated(space)) {
    if (out_of_time(kBaselinesEnd)) break;
    const Score score = ScoreOf(objective.Evaluate(plan));
    given.push_back({score, {}, std::move(plan)});
  }
  const AllowedObjective allowed(space, objective);
  const auto start_over = [&] { return stopped() || out_of_time(kStartEnd); };
  const auto sweep = [&](const std::vector<Strategy>& of, size_t count) {
    return Sweep(space, allowed, of, count, threads, start_over,
                 [&] { return out_of_time(kBoundsEnd); });
  };
  const auto chains_wanted = static_cast<size_t>(options.chains);
  std::vector<Strategy> uniform;  // the best, in order
  // Several strategies may give one plan: then more of them are needed.
  for (size_t count = chains_wanted;; count *= 2) {
    SweepResult swept = sweep(strategies, count);
    result.uniform_strategies = swept.bounded;
    const bool all = swept.best.size() < count || start_over();
    if (!swept.best.empty() && !result.uniform) {
      Plan plan =
          PlanFromStrategy(space.index, *space.cluster, swept.best[0].strategy)
              .value();
      Evaluation evaluation = objective.Evaluate(plan);
      result.uniform = FoundPlan{std::move(plan), std::move(evaluation)};
    }
    uniform.clear();
    for (const Candidate& c : swept.best) uniform.push_back(c.strategy);
    std::vector<Plan> ranked =
        Ranked(space, std::move(swept.best), given, chains_wanted, all);
    if (ranked.size() > starts.ranked.size()) starts.ranked = std::move(ranked);
    if (all || starts.ranked.size() == chains_wanted) break;
  }
  // What would be faster and fits once some of it runs again.
  if (!starts.ranked.empty()) {
    const Score best = ScoreOf(objective.Evaluate(starts.ranked[0]));
    std::vector<FoundPlan> fitted =
        FittedPlans(space, objective, uniform, strategies, kMostFitted, best,
                    [&] { return stopped() || out_of_time(kFittedEnd); });
    for (size_t i = fitted.size(); i-- > 0;) {
      starts.ranked.insert(starts.ranked.begin(), std::move(fitted[i].plan));
    }
    starts.ranked.resize(std::min(starts.ranked.size(), chains_wanted));
  }
  if (!starts.ranked.empty()) {
    const bool pipelined = starts.ranked[0].groups.size() > 1;
    std::vector<Strategy> others = strategies;
    std::erase_if(others,
                  [&](const Strategy& s) { return (s.pp > 1) == pipelined; });
    const SweepResult swept = sweep(others, 1);
    if (!swept.best.empty()) uniform.push_back(swept.best[0].strategy);
    if (!swept.best.empty() && swept.best[0].score.feasible) {
      starts.other =
          PlanFromStrategy(space.index, *space.cluster, swept.best[0].strategy)
              .value();
    }
  }
  // Pipelines of stages that need not be alike.
  {
    const Score best = starts.ranked.empty()
                           ? Score()
                           : ScoreOf(objective.Evaluate(starts.ranked[0]));
    std::vector<FoundPlan> unlike =
        UnlikeStages(space, objective, uniform, strategies, best,
                     [&] { return stopped() || out_of_time(kFittedEnd); });
    if (!unlike.empty() && Better(ScoreOf(unlike[0].evaluation), best)) {
      starts.ranked.insert(starts.ranked.begin(), std::move(unlike[0].plan));
      starts.ranked.resize(std::min(starts.ranked.size(), chains_wanted));
    } else if (!unlike.empty() && unlike[0].evaluation.feasible()) {
      starts.unlike = std::move(unlike[0].plan);
    }
  }
  // Pipelines whose stages take turns by an order made for them.
  for (size_t r = 0; r < std::min(starts.ranked.size(), kMostOrdered); ++r) {
    auto ordered = BetterOrders(space, objective, starts.ranked[r], start_over);
    if (!ordered) continue;
    const bool first = Better(ScoreOf(objective.Evaluate(*ordered)),
                              ScoreOf(objective.Evaluate(starts.ranked[0])));
    starts.ranked[r] = *std::move(ordered);
    if (first) std::swap(starts.ranked[0], starts.ranked[r]);
  }
  // What the constraints leave may have nothing uniform.
  for (size_t b = 0; starts.ranked.empty() && b < result.baselines.size();
       ++b) {
    Rng rng(options.seed, (uint64_t{1} << 34) + b);
    auto repaired = Repaired(space, result.baselines[b].plan, rng, start_over);
    if (repaired) starts.ranked.push_back(*std::move(repaired));
  }
  // Where nothing fits, what does once state leaves the devices.
  if (starts.ranked.empty() ||
      !objective.Evaluate(starts.ranked[0]).feasible()) {
    for (const Approach& approach : Approaches()) {
      if (!approach.offloads) continue;
      const auto best = BestOf(approach, space, allowed, threads, start_over);
      if (!best || !best->score.feasible) continue;
      starts.ranked.insert(
          starts.ranked.begin(),
          PlanFromStrategy(space.index, *space.cluster, best->strategy)
              .value());
      break;
    }
  }
  if (starts.ranked.empty()) return NothingValid(space);
  result.best = starts.ranked[0];
  result.evaluation = objective.Evaluate(result.best);
  if (options.keep && result.evaluation.feasible()) options.keep(result.best);

  Walk walk(
      space, objective, options, starts, ScoreOf(result.evaluation),
      [&] { return stopped() || out_of_time(kWalkEnd); }, clock);
  walk.Run(threads);

  std::vector<FoundPlan> found = {{result.best, result.evaluation}};
  result.stalled = walk.stalled();
  result.swaps = walk.swaps();
  result.moves.resize(Moves().size());
  for (size_t c = 0; c < walk.chains().size(); ++c) {
    const Chain& chain = walk.chains()[c];
    const ChainStatistics& statistics = chain.statistics();
    result.chains.push_back(statistics);
    result.proposals += statistics.proposals;
    result.accepted += statistics.accepted;
    for (size_t m = 0; m < result.moves.size(); ++m) {
      result.moves[m].proposals += statistics.moves[m].proposals;
      result.moves[m].applicable += statistics.moves[m].applicable;
      result.moves[m].accepted += statistics.moves[m].accepted;
    }
    for (TracePoint point : chain.trace()) {
      point.chain = static_cast<int>(c);
      result.trace.push_back(point);
    }
    found.insert(found.end(), chain.bests().begin(), chain.bests().end());
    if (Better(statistics.best, result.evaluation)) {
      result.best = chain.best();
      result.evaluation = statistics.best;
    }
  }
  if (MakeCanonical(space, result.best)) {
    Tidy(
        space, objective, [&] { return stopped() || out_of_time(1); },
        result.best, result.evaluation);
  }
  // Tidy makes plans no worse: its plan comes first among equals.
  found.insert(found.begin(), {result.best, result.evaluation});
  for (const StartOption& option : given) {
    found.push_back({*option.plan, objective.Evaluate(*option.plan)});
  }
  result.candidates = BestOf(std::move(found), options.candidates);
  for (FoundPlan& candidate : result.candidates) {
    NameAxes(space.index, candidate.plan);
  }
  NameAxes(space.index, result.best);
  result.seconds = clock.Seconds();
  return result;
}

}  // namespace tessera
