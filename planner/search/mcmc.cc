#include "planner/search/mcmc.h"

#include <algorithm>
#include <barrier>
#include <cmath>
#include <optional>
#include <utility>

#include "planner/base/threads.h"
#include "planner/search/starts.h"
#include "planner/search/tidy.h"

namespace tessera {
namespace {

// Bytes that an infeasible plan lacks; at least one, since the violation may
// be of another kind.
double OverflowOf(const Evaluation& evaluation) {
  return static_cast<double>(std::max<int64_t>(1, evaluation.overflow.value));
}

// The part of a time limit after which walks end; the rest is for Tidy.
constexpr double kWalkEnd = 0.9;

// The part of a time limit without an improvement after which a walk ends.
constexpr double kPatience = 0.5;

// Whether a plan is known to lose time on shared links.
bool LosesOnLinks(const Objective& objective, const Plan& plan) {
  const auto shared = objective.QuickSharedStepTime(plan);
  if (!shared) return false;
  const Evaluation alone = objective.Evaluate(plan);
  return alone.feasible() &&
         shared->seconds() > (1 + kShared) * alone.step_time.seconds();
}

// Whether one of the likely starts does.
bool LosesOnLinks(const Objective& objective, const Starts& starts) {
  return LosesOnLinks(objective, starts.ranked[0]) ||
         (starts.other && LosesOnLinks(objective, *starts.other)) ||
         (starts.unlike && LosesOnLinks(objective, *starts.unlike));
}

// Rounds without an improvement after which a ladder starts anew: a round for
// each node of the graph, at least these, and twice as many as led to the best.
// That takes tens of thousands of proposals of all but the smallest graphs.
constexpr int64_t kLeastRounds = 8;

}  // namespace

Chain::Chain(const SearchSpace& space, const Objective& objective,
             std::span<const Move> moves, Plan start, double temperature,
             Rng rng, Duration unit, bool folded, bool shares_links)
    : objective_(objective),
      moves_(moves),
      folded_(folded),
      shares_links_(shares_links),
      draft_(space, std::move(start)),
      time_unit_(static_cast<double>(unit.picoseconds)),
      rng_(rng) {
  draft_.Fold(folded);
  PriceStart();
  bests_ = {{draft_.plan(), evaluation_}};
  statistics_.temperature = temperature;
  statistics_.moves.resize(moves.size());
  statistics_.start = evaluation_;
  statistics_.best = evaluation_;
}

void Chain::PriceStart() {
  basis_ = nullptr;
  evaluation_ =
      objective_.EvaluateChange(draft_.plan(), {true, {}, {}}, basis_);
  ShareLinks(draft_.plan(), evaluation_);
  SetUnit();
}

bool Chain::ShareLinks(const Plan& plan, Evaluation& evaluation) const {
  if (!shares_links_ || !evaluation.feasible()) return true;
  const auto shared = objective_.QuickSharedStepTime(plan);
  if (shared) evaluation.step_time = *shared;
  return shared.has_value();
}

void Chain::BeginSharing() {
  shares_links_ = true;
  ShareLinks(draft_.plan(), evaluation_);
  bests_ = {bests_.back()};
  ShareLinks(bests_[0].plan, bests_[0].evaluation);
  statistics_.best = bests_[0].evaluation;
  SeeBest();
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

bool Chain::Accepts(const Evaluation& evaluation, double log_ratio,
                    std::optional<double>& uniform) {
  if (evaluation.feasible() && !evaluation_.feasible()) return true;
  if (evaluation_.feasible() && !evaluation.feasible()) return false;
  const double exponent =
      (Cost(evaluation_) - Cost(evaluation)) / statistics_.temperature +
      log_ratio;
  if (exponent >= 0) return true;
  if (!uniform) uniform = rng_.Uniform01();
  return *uniform < std::exp(exponent);
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
  std::optional<double> uniform;
  const auto accepts = [&] { return Accepts(evaluation, *log_ratio, uniform); };
  if (!accepts() || (shares_links_ &&
                     (!ShareLinks(draft_.plan(), evaluation) || !accepts()))) {
    draft_.Undo();
    return false;
  }
  draft_.Keep();
  evaluation_ = std::move(evaluation);
  basis_ = std::move(basis);
  ++statistics_.accepted;
  ++of_move.accepted;
  if (becomes_feasible) SetUnit();
  SeeBest();
  return true;
}

void Chain::SeeBest() {
  if (!Better(evaluation_, statistics_.best)) return;
  if (bests_.size() == kMostBests) bests_.erase(bests_.begin());
  bests_.push_back({draft_.plan(), evaluation_});
  statistics_.best = evaluation_;
  if (evaluation_.feasible()) {
    trace_.push_back({0, statistics_.proposals, evaluation_.step_time});
  }
}

void Chain::Restart(Plan start) {
  draft_ = Draft(draft_.space(), std::move(start));
  draft_.Fold(folded_);
  PriceStart();
  SeeBest();
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
       bool shares_links, const SearchClock& clock)
      : space_(space),
        objective_(objective),
        options_(options),
        starts_(starts),
        clock_(clock),
        moves_(MovesFrom(space, starts)),
        least_rounds_(std::max<int64_t>(kLeastRounds,
                                        std::ssize(space.index.graph->nodes))),
        ladders_(static_cast<size_t>((options.chains + kRungs - 1) / kRungs)),
        rng_(options.seed, uint64_t{1} << 33),
        shares_links_(shares_links),
        best_(best),
        improved_(clock.Seconds()) {
    for (int c = 0; c < options.chains; ++c) {
      // Who is late starts where prices are known.
      const bool late = clock.StoppedOrPast(kStartEnd);
      chains_.emplace_back(
          space, objective, moves_,
          late ? starts.ranked[0]
               : StartOf(space, moves_, starts, c, options.seed),
          TemperatureOf(options, c % kRungs),
          Rng(options.seed, static_cast<uint64_t>(c)),
          best.feasible ? best.step_time : Duration{}, IsFolded(starts, c),
          shares_links);
      quota_.push_back(options.proposals / options.chains +
                       (c < options.proposals % options.chains ? 1 : 0));
    }
    for (int rung = 0; rung + 1 < std::min(kRungs, options.chains); ++rung) {
      swaps_.push_back({TemperatureOf(options, rung),
                        TemperatureOf(options, rung + 1), 0, 0});
    }
  }

  // Until the proposals are done, the clock says so, or nothing improves.
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
  int64_t restarts() const { return restarts_; }  // of ladders
  bool shares_links() const { return shares_links_; }

 private:
  // Chains c with c / kRungs = its place.
  struct Ladder {
    int64_t rounds = 0;    // since it started, or started anew
    int64_t improved = 0;  // the last that ended with a better plan than before
    Score best;            // at the ends of these rounds
    bool restart = false;  // with the next round
  };

  bool Ended() const { return clock_.StoppedOrPast(kWalkEnd); }

  void WalkRound(size_t c) {
    if (ladders_[c / kRungs].restart && !Ended()) {
      // A stream of its own for each.
      Rng rng(options_.seed,
              (uint64_t{1} << 35) +
                  static_cast<uint64_t>(restarts_) * chains_.size() + c);
      chains_[c].Restart(RandomStart(space_, moves_, starts_,
                                     IsFolded(starts_, static_cast<int>(c)),
                                     rng));
    }
    int64_t steps = kRound;
    if (options_.proposals > 0) {
      steps = std::min(steps, quota_[c] - chains_[c].statistics().proposals);
    }
    for (int64_t step = 0; step < steps && !Ended(); ++step) chains_[c].Step();
  }

  // Alone, between two rounds.
  void EndRound() {
    next_ = 0;
    bool all_done = options_.proposals > 0;
    bool improved = false;
    int64_t proposals = 0;
    for (size_t c = 0; c < chains_.size(); ++c) {
      const ChainStatistics& statistics = chains_[c].statistics();
      proposals += statistics.proposals;
      all_done = all_done && statistics.proposals >= quota_[c];
      const Score best = ScoreOf(statistics.best);
      if (!Better(best, best_)) continue;
      best_ = best;
      improved = true;
      improved_ = clock_.Seconds();
      to_keep_ = &chains_[c];
    }
    if (improved && options_.share_links && !shares_links_ &&
        LosesOnLinks(objective_, to_keep_->best())) {
      BeginSharing();
    }
    const double now = clock_.Seconds();
    stalled_ = options_.time_limit > 0 &&
               now - improved_ > kPatience * options_.time_limit;
    done_ = all_done || Ended() || stalled_;
    if (options_.progress && now - reported_ > kReportInterval) {
      reported_ = now;
      options_.progress({proposals, now, best_.feasible, best_.step_time});
    }
    if (options_.keep && to_keep_ != nullptr && best_.feasible &&
        now - kept_ > kKeepInterval) {
      kept_ = now;
      options_.keep(std::exchange(to_keep_, nullptr)->best());
    }
    if (done_) return;
    FindRestarts();
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

  void BeginSharing() {
    shares_links_ = true;
    best_ = {};
    for (Chain& chain : chains_) {
      chain.BeginSharing();
      const Score best = ScoreOf(chain.statistics().best);
      if (!Better(best, best_)) continue;
      best_ = best;
      to_keep_ = &chain;
    }
  }

  // A ladder that has found nothing better for long starts anew from random
  // plans: where one way down has ended, another one may lead further.
  void FindRestarts() {
    for (size_t l = 0; l < ladders_.size(); ++l) {
      Ladder& ladder = ladders_[l];
      if (ladder.restart) ladder = {};
      const bool first = ladder.rounds++ == 0;
      const size_t end = std::min(chains_.size(), (l + 1) * kRungs);
      for (size_t c = l * kRungs; c < end; ++c) {
        const Score score = ScoreOf(chains_[c].evaluation());
        const bool begins = first && c == l * kRungs;
        if (!begins && !Better(score, ladder.best)) continue;
        ladder.best = score;
        ladder.improved = ladder.rounds;
      }
      ladder.restart = ladder.rounds - ladder.improved >=
                       std::max(least_rounds_, 2 * ladder.improved);
      restarts_ += ladder.restart ? 1 : 0;
    }
  }

  const SearchSpace& space_;
  const Objective& objective_;
  const SearchOptions& options_;
  const Starts& starts_;
  const SearchClock& clock_;
  const std::vector<Move> moves_;
  const int64_t least_rounds_;
  std::vector<Chain> chains_;
  std::vector<Ladder> ladders_;
  int64_t restarts_ = 0;
  std::vector<int64_t> quota_;
  std::vector<SwapStatistics> swaps_;
  Rng rng_;  // of the exchanges
  std::atomic<size_t> next_ = 0;
  bool done_ = false;
  bool stalled_ = false;
  bool shares_links_;
  size_t rounds_ = 0;
  Score best_;
  double improved_;  // when, seconds
  double reported_ = 0;
  const Chain* to_keep_ = nullptr;  // that has the best, unless it was kept
  double kept_ = 0;
};

void AddStatistics(const Walk& walk, SearchResult& result) {
  result.shares_links = walk.shares_links();
  result.stalled = walk.stalled();
  result.swaps = walk.swaps();
  result.restarts = walk.restarts();
  result.moves.resize(Moves().size());
  for (size_t c = 0; c < walk.chains().size(); ++c) {
    const ChainStatistics& statistics = walk.chains()[c].statistics();
    result.chains.push_back(statistics);
    result.proposals += statistics.proposals;
    result.accepted += statistics.accepted;
    for (size_t m = 0; m < result.moves.size(); ++m) {
      result.moves[m].proposals += statistics.moves[m].proposals;
      result.moves[m].applicable += statistics.moves[m].applicable;
      result.moves[m].accepted += statistics.moves[m].accepted;
    }
    for (TracePoint point : walk.chains()[c].trace()) {
      point.chain = static_cast<int>(c);
      result.trace.push_back(point);
    }
  }
}

bool Faster(const FoundPlan& a, const FoundPlan& b) {
  return Better(a.evaluation, b.evaluation);
}

// The `count` best of all that are far enough apart.
std::vector<FoundPlan> BestOf(std::vector<FoundPlan> all, size_t count) {
  std::ranges::stable_sort(all, Faster);
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

}  // namespace

Result<SearchResult> Search(const SearchSpace& space,
                            const Objective& objective,
                            const SearchOptions& options) {
  TESSERA_CHECK(options.proposals > 0 || options.time_limit > 0 ||
                options.stop != nullptr)
      << "a search without an end";
  TESSERA_CHECK(options.chains >= 1 && options.temperature > 0);
  const SearchClock clock(options.time_limit, options.stop);
  auto found_starts = FindStarts(space, objective, options, clock);
  if (!found_starts) return found_starts.error();
  Starts& starts = *found_starts;
  SearchResult result;
  result.baselines = std::move(starts.all_baselines);
  result.uniform = std::move(starts.uniform);
  result.uniform_strategies = starts.uniform_strategies;
  result.shares_links = options.share_links && LosesOnLinks(objective, starts);
  // From here on to the end step times are those of the walk.
  const auto share = [&](const Plan& plan, Evaluation& evaluation) {
    if (!result.shares_links || !evaluation.feasible()) return;
    evaluation.step_time =
        objective.QuickSharedStepTime(plan).value_or(evaluation.step_time);
  };
  const auto price = [&](const Plan& plan) {
    FoundPlan priced = {plan, objective.Evaluate(plan)};
    share(plan, priced.evaluation);
    return priced;
  };
  if (result.shares_links) {
    std::vector<FoundPlan> ranked;
    std::ranges::transform(starts.ranked, std::back_inserter(ranked), price);
    std::ranges::stable_sort(ranked, Faster);
    std::ranges::transform(ranked, starts.ranked.begin(), &FoundPlan::plan);
  }
  result.best = starts.ranked[0];
  result.evaluation = price(result.best).evaluation;
  if (options.keep && result.evaluation.feasible()) options.keep(result.best);

  Walk walk(space, objective, options, starts, ScoreOf(result.evaluation),
            result.shares_links, clock);
  walk.Run(ThreadCount(options.threads));

  AddStatistics(walk, result);
  // The walk may have come to share links since.
  share(result.best, result.evaluation);
  std::vector<FoundPlan> found = {{result.best, result.evaluation}};
  for (const Chain& chain : walk.chains()) {
    found.insert(found.end(), chain.bests().begin(), chain.bests().end());
    if (Better(chain.statistics().best, result.evaluation)) {
      result.best = chain.best();
      result.evaluation = chain.statistics().best;
    }
  }
  FoundPlan tidy = {result.best, {}};
  if (MakeCanonical(space, tidy.plan)) {
    tidy.evaluation = objective.Evaluate(tidy.plan);
    Tidy(
        space, objective, [&] { return clock.StoppedOrPast(1); }, tidy.plan,
        tidy.evaluation);
    share(tidy.plan, tidy.evaluation);
    if (!Better(result.evaluation, tidy.evaluation)) {
      result.best = tidy.plan;
      result.evaluation = tidy.evaluation;
    }
  }
  // A tidy plan that is no worse comes first among equals.
  found.insert(found.begin(), {result.best, result.evaluation});
  for (FoundPlan& priced : starts.priced) {
    if (Better(priced.evaluation, result.evaluation)) {
      share(priced.plan, priced.evaluation);
    }
    found.push_back(std::move(priced));
  }
  result.candidates = BestOf(std::move(found), options.candidates);
  if (result.shares_links) {
    for (FoundPlan& candidate : result.candidates) {
      candidate.evaluation = objective.Evaluate(candidate.plan);
    }
    result.evaluation = objective.Evaluate(result.best);
  }
  for (FoundPlan& candidate : result.candidates) {
    NameAxes(space.index, candidate.plan);
  }
  NameAxes(space.index, result.best);
  result.seconds = clock.Seconds();
  return result;
}

}  // namespace tessera
