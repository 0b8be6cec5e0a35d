#include "planner/search/mcmc.h"

#include <algorithm>
#include <barrier>
#include <cmath>
#include <optional>
#include <utility>

#include "planner/base/divide.h"
#include "planner/base/threads.h"
#include "planner/search/chain_starts.h"
#include "planner/search/tidy.h"

namespace tessera {
namespace {

// The part of a time limit after which walks end; the rest is for Tidy.
constexpr double kWalkEnd = 0.9;

// The part of a time limit without an improvement after which a walk ends.
constexpr double kPatience = 0.5;

// Rounds without an improvement after which a ladder starts anew: a round for
// each node of the graph, at least these, and twice as many as led to the best.
// That takes tens of thousands of proposals of all but the smallest graphs.
constexpr int64_t kLeastRounds = 8;

double TemperatureOf(const SearchOptions& options, int rung) {
  return options.temperature / std::pow(kBetweenRungs, kRungs - 1 - rung);
}

// All chains of a search, and their walk on several threads.
class Walk {
 public:
  Walk(const SearchSpace& space, const Objective& objective,
       const SearchOptions& options, const Starts& starts,
       const FoundPlan& start, bool shares_links, SearchClock& clock)
      : space_(space),
        objective_(objective),
        options_(options),
        starts_(starts),
        clock_(clock),
        moves_(MovesFrom(space, starts)),
        least_rounds_(std::max<int64_t>(kLeastRounds,
                                        std::ssize(space.index.graph->nodes))),
        ladders_(static_cast<size_t>(DivideUp(options.chains, kRungs))),
        rng_(options.seed, uint64_t{1} << 33),
        shares_links_(shares_links),
        start_(start),
        best_(start),
        improved_(clock.Seconds()) {
    const Score best = start.score();
    for (int c = 0; c < options.chains; ++c) {
      // Who is late starts where prices are known.
      const bool late = clock.StoppedOrPast(kStartEnd);
      chains_.emplace_back(
          space, objective, moves_,
          late ? starts.ranked[0].plan
               : StartOf(space, moves_, starts, c, options.seed),
          TemperatureOf(options, c % kRungs),
          Rng(options.seed, static_cast<uint64_t>(c)),
          best.feasible ? best.step_time : Duration{}, IsFolded(starts, c));
      const int64_t proposals = options.proposals.value_or(0);
      quota_.push_back(proposals / options.chains +
                       (c < proposals % options.chains ? 1 : 0));
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
  const FoundPlan& start() const { return start_; }
  const FoundPlan& best() const { return best_; }

 private:
  // Chains c with c / kRungs = its place.
  struct Ladder {
    int64_t rounds = 0;    // since it started, or started anew
    int64_t improved = 0;  // the last that ended with a better plan than before
    Score best;            // at the ends of these rounds
    bool restart = false;  // with the next round
  };

  // Whether the chains of a ladder count shared links: of every second one,
  // once links are looked at.
  bool SharesLinks(size_t ladder) const {
    return shares_links_ && ladder % 2 == 0;
  }

  bool Ended() const { return clock_.StoppedOrPast(kWalkEnd); }

  void WalkRound(size_t c) {
    Chain& chain = chains_[c];
    const bool shares = SharesLinks(c / kRungs);
    if (shares && !chain.shares_links() && !Ended()) chain.ShareLinks();
    if (ladders_[c / kRungs].restart && !Ended()) {
      // A stream of its own for each.
      Rng rng(options_.seed,
              (uint64_t{1} << 35) +
                  static_cast<uint64_t>(restarts_) * chains_.size() + c);
      chain.Restart(RandomStart(space_, moves_, starts_,
                                IsFolded(starts_, static_cast<int>(c)), rng));
    }
    int64_t steps = shares ? kSharedRound : kRound;
    if (options_.proposals) {
      steps = std::min(steps, quota_[c] - chain.proposals());
    }
    for (int64_t step = 0; step < steps && !Ended(); ++step) chain.Step();
    if (shares_links_ && !Ended()) chain.PriceBest();
  }

  // Alone, between two rounds.
  void EndRound() {
    next_ = 0;
    bool all_done = options_.proposals.has_value();
    bool improved = false;
    int64_t proposals = 0;
    for (size_t c = 0; c < chains_.size(); ++c) {
      proposals += chains_[c].proposals();
      all_done = all_done && chains_[c].proposals() >= quota_[c];
      improved |= SeeBest(chains_[c].best());
    }
    if (improved && options_.share_links && !shares_links_) LookAtLinks();
    if (improved) ReserveAnswer(options_, best_.plan, clock_);
    const double now = clock_.Seconds();
    stalled_ = options_.time_limit > 0 &&
               now - improved_ > kPatience * options_.time_limit;
    done_ = all_done || Ended() || stalled_;
    if (options_.progress && now - reported_ > kReportInterval) {
      reported_ = now;
      const Score best = best_.score();
      options_.progress({proposals, now, best.feasible, best.step_time});
    }
    if (options_.keep && to_keep_ && best_.evaluation.feasible() &&
        now - kept_ > kKeepInterval) {
      kept_ = now;
      to_keep_ = false;
      options_.keep(best_.plan);
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

  // Whether it is the best so far; where links are looked at, of those of which
  // it is known what they lose.
  bool SeeBest(const FoundPlan& found) {
    if (shares_links_ && !found.shared && found.evaluation.feasible()) {
      return false;
    }
    if (!Better(found.score(), best_.score())) return false;
    best_ = found;
    improved_ = clock_.Seconds();
    to_keep_ = true;
    return true;
  }

  // Looks at shared links from here on, if the best plan loses on them.
  void LookAtLinks() {
    PriceShared(objective_, best_);
    if (!LosesOnLinks(best_)) {
      best_.shared = std::nullopt;
      return;
    }
    shares_links_ = true;
    PriceShared(objective_, start_);
    SeeBest(start_);
    for (Ladder& ladder : ladders_) ladder.best = {};
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
        const Score score = chains_[c].score();
        // A time without shared links says nothing beside those with them.
        if (SharesLinks(l) && score.feasible && !chains_[c].knows_shared()) {
          continue;
        }
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
  SearchClock& clock_;
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
  FoundPlan start_;
  FoundPlan best_;
  double improved_;  // when, seconds
  double reported_ = 0;
  bool to_keep_ = false;  // the best was not kept yet
  double kept_ = 0;
};

void AddStatistics(const Walk& walk, SearchResult& result) {
  result.shares_links = walk.shares_links();
  result.stalled = walk.stalled();
  result.swaps = walk.swaps();
  result.restarts = walk.restarts();
  result.moves.resize(Moves().size());
  for (size_t c = 0; c < walk.chains().size(); ++c) {
    const ChainStatistics statistics = walk.chains()[c].statistics();
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

// What tells plans that lose on unlike links: stages and devices.
std::pair<size_t, size_t> FormOf(const Plan& plan) {
  size_t devices = 0;
  for (const DeviceGroup& group : plan.groups) devices += group.devices.size();
  return {plan.groups.size(), devices};
}

// `best`, then the best of each form that is not far behind it, as half of them
// at most; then the best of the others that are far enough apart from all of
// their form.
std::vector<FoundPlan> BestOf(FoundPlan best, std::vector<FoundPlan> others,
                              size_t count) {
  std::erase_if(others,
                [](const FoundPlan& f) { return !f.evaluation.feasible(); });
  std::ranges::stable_sort(others, [](const FoundPlan& a, const FoundPlan& b) {
    return Better(a.score(), b.score());
  });
  const auto time = [](const FoundPlan& found) {
    return found.score().step_time.seconds();
  };
  const double behind = (1 + kBehind) * time(best);
  std::vector<FoundPlan> chosen = {std::move(best)};
  const auto take = [&](size_t most, const auto& may) {
    for (FoundPlan& found : others) {
      if (chosen.size() >= most) return;
      if (std::ranges::all_of(chosen, [&](const FoundPlan& other) {
            return may(found, other);
          })) {
        chosen.push_back(found);
      }
    }
  };
  take((count + 1) / 2, [&](const FoundPlan& found, const FoundPlan& other) {
    return time(found) < behind && FormOf(found.plan) != FormOf(other.plan);
  });
  take(count, [&](const FoundPlan& found, const FoundPlan& other) {
    return std::max(time(found), time(other)) >=
               (1 + kApart) * std::min(time(found), time(other)) ||
           FormOf(found.plan) != FormOf(other.plan);
  });
  std::ranges::stable_sort(chosen.begin() + 1, chosen.end(),
                           [](const FoundPlan& a, const FoundPlan& b) {
                             return Better(a.score(), b.score());
                           });
  return chosen;
}

// Takes back what the walk to `best` changed for nothing.
void TakeTidied(const SearchSpace& space, const Objective& objective,
                const std::function<bool()>& stop, FoundPlan& best) {
  FoundPlan tidy = {best.plan, {}};
  if (!MakeCanonical(space, tidy.plan)) return;
  tidy.evaluation = objective.Evaluate(tidy.plan);
  if (best.shared) PriceShared(objective, tidy);
  if (tidy.shared.has_value() != best.shared.has_value()) return;
  // No step may lose on the links what another gains.
  std::function<bool(const Plan&)> keeps;
  if (best.shared) {
    keeps = [&](const Plan& plan) {
      const auto shared = objective.QuickSharedStepTime(plan);
      if (!shared || *shared > *tidy.shared) return false;
      tidy.shared = shared;
      return true;
    };
  }
  Tidy(space, objective, stop, tidy.plan, tidy.evaluation, keeps);
  if (!Better(best.score(), tidy.score())) best = std::move(tidy);
}

// All that a walk found, and the `priced` starts. Where it counts shared links
// a start may turn out to be the best with them, and becomes `best`.
std::vector<FoundPlan> OthersOf(const Walk& walk, const Objective& objective,
                                const std::function<bool()>& stop,
                                std::vector<FoundPlan> priced,
                                FoundPlan& best) {
  std::vector<FoundPlan> others = {walk.start()};
  for (const Chain& chain : walk.chains()) {
    std::ranges::copy(chain.bests(), std::back_inserter(others));
  }
  // Times with shared links and without do not compare, but that sharing makes
  // no plan faster: a start that is large may be the best all the same.
  if (walk.shares_links()) {
    std::erase_if(others, [](const FoundPlan& found) { return !found.shared; });
  }
  for (FoundPlan& found : priced) {
    if (walk.shares_links()) {
      if (!stop()) PriceShared(objective, found);
      if (!found.shared && !Better(found.score(), best.score())) continue;
      if (found.shared && Better(found.score(), best.score())) {
        std::swap(found, best);
      }
    }
    others.push_back(std::move(found));
  }
  return others;
}

}  // namespace

bool LosesOnLinks(const FoundPlan& found) {
  return found.shared &&
         found.shared->seconds() >
             (1 + kShared) * found.evaluation.step_time.seconds();
}

void ReserveAnswer(const SearchOptions& options, const Plan& best,
                   SearchClock& clock) {
  if (options.answer_time && options.time_limit > 0) {
    clock.Reserve(options.answer_time(best));
  }
}

Result<SearchResult> Search(const SearchSpace& space,
                            const Objective& objective,
                            const SearchOptions& options) {
  TESSERA_CHECK(options.proposals || options.time_limit > 0 ||
                options.stop != nullptr)
      << "a search without an end";
  TESSERA_CHECK(options.chains >= 1 && options.temperature > 0);
  SearchClock clock(options.time_limit, options.stop);
  auto found_starts = FindStarts(space, objective, options, clock);
  if (!found_starts) return found_starts.error();
  Starts& starts = *found_starts;
  SearchResult result;
  result.baselines = std::move(starts.all_baselines);
  result.uniform = std::move(starts.uniform);
  result.uniform_strategies = starts.uniform_strategies;
  result.swept_all = starts.swept_all;

  FoundPlan best = starts.ranked[0];
  if (options.keep && best.evaluation.feasible()) options.keep(best.plan);
  ReserveAnswer(options, best.plan, clock);
  if (options.share_links) PriceShared(objective, best);
  const bool loses = LosesOnLinks(best);
  if (!loses) best.shared = std::nullopt;

  Walk walk(space, objective, options, starts, best, loses, clock);
  walk.Run(ThreadCount(options.threads));
  AddStatistics(walk, result);

  // Asked before each plan that is priced from here on: none is begun that
  // would take longer than there is time, if it takes as long as the longest
  // before.
  double asked = clock.Seconds();
  double longest = 0;
  const auto stop = [&] {
    longest = std::max(longest, clock.Seconds() - asked);
    asked = clock.Seconds();
    return clock.Stopped() || clock.Past(1, longest);
  };
  best = walk.best();
  std::vector<FoundPlan> others =
      OthersOf(walk, objective, stop, std::move(starts.priced), best);
  TakeTidied(space, objective, stop, best);
  result.best = best.plan;
  result.evaluation = best.evaluation;
  result.candidates =
      BestOf(std::move(best), std::move(others), options.candidates);
  for (FoundPlan& candidate : result.candidates) {
    NameAxes(space.index, candidate.plan);
  }
  NameAxes(space.index, result.best);
  result.seconds = clock.Seconds();
  return result;
}

}  // namespace tessera
