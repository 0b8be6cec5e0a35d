#include "planner/search/mcmc.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>
#include <optional>
#include <thread>

#include "planner/search/sweep.h"
#include "planner/search/tidy.h"

namespace tessera {
namespace {

// Steps of a chain before its thread turns to the next of its chains.
constexpr int kSlice = 16;
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

// `plan` after random moves, each taken as it comes.
Plan Randomized(const SearchSpace& space, Plan plan, Rng& rng) {
  for (int i = 0; i < kRandomMoves; ++i) {
    auto proposal = DrawMove(Moves(), rng).propose(plan, space, rng);
    if (proposal.has_value()) plan = std::move(proposal->plan);
  }
  return plan;
}

// The parts of a time limit after which starting plans and walks end; the rest
// is for Tidy.
constexpr double kStartEnd = 0.4;
constexpr double kWalkEnd = 0.9;

// Where a chain may start: a plan, or the strategy that gives it.
struct StartOption {
  Score score;
  Strategy strategy;
  std::optional<Plan> plan;
};

struct Starts {
  std::vector<Plan> ranked;  // uniform plans and the caller's, best first
  std::vector<Plan> baselines;
};

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

// Even chains start from the best uniform plans in turn, odd ones from the
// baselines and a random plan.
Plan StartOf(const SearchSpace& space, const Starts& starts, int chain,
             uint64_t seed) {
  const auto half = static_cast<size_t>(chain / 2);
  if (chain % 2 == 0) return starts.ranked[half % starts.ranked.size()];
  const size_t choice = half % (starts.baselines.size() + 1);
  if (choice < starts.baselines.size()) {
    return starts.baselines[starts.baselines.size() - 1 - choice];
  }
  // A stream of its own, apart from the chain's.
  Rng rng(seed, (uint64_t{1} << 32) + static_cast<uint64_t>(chain));
  return Randomized(space, starts.ranked[0], rng);
}

}  // namespace

Chain::Chain(const SearchSpace& space, const Objective& objective,
             std::span<const Move> moves, Plan start, double temperature,
             Rng rng)
    : space_(space),
      objective_(objective),
      moves_(moves),
      plan_(std::move(start)),
      evaluation_(objective.Evaluate(plan_)),
      best_(plan_),
      rng_(rng) {
  unit_ = evaluation_.feasible() ? static_cast<double>(std::max<int64_t>(
                                       1, evaluation_.step_time.picoseconds))
                                 : OverflowOf(evaluation_);
  statistics_.temperature = temperature;
  statistics_.start = evaluation_;
  statistics_.best = evaluation_;
}

double Chain::Cost(const Evaluation& evaluation) const {
  return (evaluation.feasible()
              ? static_cast<double>(evaluation.step_time.picoseconds)
              : OverflowOf(evaluation)) /
         unit_;
}

bool Chain::Step() {
  ++statistics_.proposals;
  auto proposal = DrawMove(moves_, rng_).propose(plan_, space_, rng_);
  if (!proposal.has_value()) return false;
  ++statistics_.applicable;
  Evaluation evaluation = objective_.Evaluate(proposal->plan);
  const bool becomes_feasible =
      evaluation.feasible() && !evaluation_.feasible();
  if (evaluation_.feasible() && !evaluation.feasible()) return false;
  if (!becomes_feasible) {
    const double exponent =
        (Cost(evaluation_) - Cost(evaluation)) / statistics_.temperature +
        proposal->log_ratio;
    if (exponent < 0 && rng_.Uniform01() >= std::exp(exponent)) return false;
  }
  plan_ = std::move(proposal->plan);
  evaluation_ = std::move(evaluation);
  ++statistics_.accepted;
  if (becomes_feasible) {
    unit_ = static_cast<double>(
        std::max<int64_t>(1, evaluation_.step_time.picoseconds));
  }
  if (Better(evaluation_, statistics_.best)) {
    best_ = plan_;
    statistics_.best = evaluation_;
    if (evaluation_.feasible()) {
      trace_.push_back({0, statistics_.proposals, evaluation_.step_time});
    }
  }
  return true;
}

Result<SearchResult> Search(const SearchSpace& space,
                            const Objective& objective,
                            const SearchOptions& options) {
  TESSERA_CHECK(options.proposals > 0 || options.time_limit > 0 ||
                options.stop != nullptr)
      << "a search without an end";
  TESSERA_CHECK(options.chains >= 1 && options.temperature > 0);
  const Clock clock;
  const int threads =
      options.threads > 0
          ? options.threads
          : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  const auto stopped = [&] {
    return options.stop != nullptr && options.stop->load();
  };
  const auto out_of_time = [&](double share) {
    return options.time_limit > 0 &&
           clock.Seconds() >= share * options.time_limit;
  };

  SearchResult result;
  result.baselines = Baselines(space, objective, threads);
  std::vector<StartOption> given;  // the baselines and the caller's
  for (const Baseline& baseline : result.baselines) {
    given.push_back(
        {ScoreOf(baseline.evaluation), baseline.strategy, baseline.plan});
  }
  for (Plan plan : options.starts) {
    if (!MakeCanonical(space, plan)) continue;
    const Score score = ScoreOf(objective.Evaluate(plan));
    given.push_back({score, {}, std::move(plan)});
  }
  const std::vector<Strategy> strategies = UniformStrategies(space);
  const auto chains_wanted = static_cast<size_t>(options.chains);
  Starts starts;
  // Several strategies may give one plan: then more of them are needed.
  for (size_t count = chains_wanted;; count *= 2) {
    SweepResult swept =
        Sweep(space, objective, strategies, count, threads,
              [&] { return stopped() || out_of_time(kStartEnd); });
    result.uniform_strategies = swept.bounded;
    const bool all =
        swept.best.size() < count || stopped() || out_of_time(kStartEnd);
    std::vector<Plan> ranked =
        Ranked(space, std::move(swept.best), given, chains_wanted, all);
    if (ranked.size() > starts.ranked.size()) starts.ranked = std::move(ranked);
    if (all || starts.ranked.size() == chains_wanted) break;
  }
  if (starts.ranked.empty()) {
    Strategy plain;
    const auto why = PlanFromStrategy(space.index, *space.cluster, plain);
    return Error{ErrorCode::kInfeasible,
                 "no uniform strategy gives a valid plan" +
                     (why ? std::string()
                          : "; data parallelism: " + why.error().ToString()),
                 "search"};
  }
  result.best = starts.ranked[0];
  result.evaluation = objective.Evaluate(result.best);
  for (const Baseline& baseline : result.baselines) {
    starts.baselines.push_back(baseline.plan);
  }

  std::vector<Chain> chains;
  std::vector<int64_t> quota;
  for (int c = 0; c < options.chains; ++c) {
    chains.emplace_back(space, objective, Moves(),
                        StartOf(space, starts, c, options.seed),
                        options.temperature / std::pow(4.0, 3 - c % 4),
                        Rng(options.seed, static_cast<uint64_t>(c)));
    quota.push_back(options.proposals / options.chains +
                    (c < options.proposals % options.chains ? 1 : 0));
  }

  std::atomic<int64_t> proposals = 0;
  std::mutex progress_mutex;
  SearchProgress progress;
  progress.feasible = result.evaluation.feasible();
  progress.best = result.evaluation.step_time;
  double reported = 0;
  // Thread t walks chains t, t + threads, … in turn, a slice each.
  const auto work = [&](int thread) {
    std::vector<int> own;
    for (int c = thread; c < options.chains; c += threads) own.push_back(c);
    while (!own.empty()) {
      for (size_t i = 0; i < own.size();) {
        const auto c = static_cast<size_t>(own[i]);
        int64_t slice = kSlice;
        if (options.proposals > 0) {
          slice = std::min<int64_t>(
              slice, quota[c] - chains[c].statistics().proposals);
        }
        for (int64_t step = 0; step < slice; ++step) {
          if (stopped() || out_of_time(kWalkEnd)) return;
          chains[c].Step();
          proposals.fetch_add(1, std::memory_order_relaxed);
        }
        if (options.progress) {
          const std::lock_guard lock(progress_mutex);
          const Evaluation& best = chains[c].statistics().best;
          if (best.feasible() &&
              (!progress.feasible || best.step_time < progress.best)) {
            progress.feasible = true;
            progress.best = best.step_time;
          }
          const double now = clock.Seconds();
          if (thread == 0 && now - reported > 0.1) {
            reported = now;
            progress.proposals = proposals.load();
            progress.seconds = now;
            options.progress(progress);
          }
        }
        if (options.proposals > 0 &&
            chains[c].statistics().proposals >= quota[c]) {
          own.erase(own.begin() + static_cast<std::ptrdiff_t>(i));
        } else {
          ++i;
        }
      }
    }
  };
  std::vector<std::thread> workers;
  for (int t = 1; t < std::min(threads, options.chains); ++t) {
    workers.emplace_back(work, t);
  }
  work(0);
  for (std::thread& worker : workers) worker.join();

  for (size_t c = 0; c < chains.size(); ++c) {
    const ChainStatistics& statistics = chains[c].statistics();
    result.chains.push_back(statistics);
    result.proposals += statistics.proposals;
    result.accepted += statistics.accepted;
    for (TracePoint point : chains[c].trace()) {
      point.chain = static_cast<int>(c);
      result.trace.push_back(point);
    }
    if (Better(statistics.best, result.evaluation)) {
      result.best = chains[c].best();
      result.evaluation = statistics.best;
    }
  }
  if (MakeCanonical(space, result.best)) {
    Tidy(
        space, objective, [&] { return stopped() || out_of_time(1); },
        result.best, result.evaluation);
  }
  NameAxes(space.index, result.best);
  result.seconds = clock.Seconds();
  return result;
}

}  // namespace tessera
