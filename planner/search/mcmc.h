#pragma once
// The search: Metropolis–Hastings over plans, by chains (chain.h) that walk at
// temperatures of their own, in ladders of kRungs. After each round of kRound
// steps neighbours of a ladder may exchange their plans.
//
// Where plans lose time on shared links, every second ladder from the first on
// counts it: what is accepted is priced again with it, and c is the step time
// with that. Sharing makes no plan faster, so that what is rejected without it
// is rejected with it. As that takes its time, rounds of these have
// kSharedRound steps. Of the other ladders the best plan so far is priced so
// after each round.
//
// A ladder that has found nothing better for long starts anew from random
// plans; what it had found stays found.
//
// Within a round chains share nothing, and rounds end together, so the result
// for a number of proposals does not depend on the number of threads.

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "planner/search/baselines.h"
#include "planner/search/chain.h"
#include "planner/search/found_plan.h"
#include "planner/search/objective.h"
#include "planner/search/search_clock.h"

namespace tessera {

struct SearchProgress {
  int64_t proposals = 0;
  double seconds = 0;
  bool feasible = false;
  Duration best;  // step time of the best plan so far
};

inline constexpr int kRungs = 4;             // temperatures of a ladder
inline constexpr double kBetweenRungs = 10;  // each over the next colder one
inline constexpr int kRound = 64;       // steps of each chain between exchanges
inline constexpr int kSharedRound = 8;  // of those that count shared links
inline constexpr double kKeepInterval = 2;      // seconds
inline constexpr double kReportInterval = 0.1;  // seconds
inline constexpr double kApart = 0.005;  // of candidates, of the step time
inline constexpr double kBehind = 0.1;   // the best of other forms, likewise
inline constexpr double kShared = 0.01;  // of the step time

// Whether more than kShared of its step is known to be lost on shared links.
bool LosesOnLinks(const FoundPlan& found);

// Gives starting plans: told how long a step of the best plan takes, where one
// fits, and how many seconds there are, 0: without end.
using MoreStarts = std::function<std::vector<Plan>(std::optional<Duration> best,
                                                   double seconds)>;

struct SearchOptions {
  uint64_t seed = 0;
  int chains = 8;
  // The search ends at the first limit it meets. With a limit of proposals
  // only, equal options give equal results.
  std::optional<int64_t> proposals;  // of all chains; 0: the starts alone
  double time_limit = 10;  // seconds, the starting plans included; 0: none
  int threads = 0;         // 0: as many as the machine runs at once
  // Of the hottest chain, in units of the best start's step time: 0.1 accepts a
  // plan that is slower by 10 % of it with probability 1/e. Fixed: chain i runs
  // at temperature / kBetweenRungs^(3 - i mod 4), so that some settle and some
  // explore.
  double temperature = 0.1;
  std::vector<Plan> starts;  // further starting points; invalid ones are passed
  // More of them, which are gone on from only where they are better than all
  // others. Called once, or never.
  MoreStarts more_starts;
  // Whether what is lost on shared links is looked at: as soon as the best plan
  // so far is known to lose more than kShared of its step so.
  bool share_links = false;
  // Called at most ten times a second, one call at a time, or never.
  std::function<void(const SearchProgress&)> progress;
  // Called with the best plan so far that fits, where there is a better one,
  // every kKeepInterval at most, one call at a time, or never.
  std::function<void(const Plan&)> keep;
  // The seconds of the time limit that the caller takes for its answer once
  // this is the best plan, or none: the search ends so much earlier. One call
  // at a time.
  std::function<double(const Plan&)> answer_time;
  const std::atomic<bool>* stop = nullptr;  // ends the search when it is true
  size_t candidates = 1;                    // SearchResult::candidates
};

// Exchanges between two neighbouring temperatures, of all ladders.
struct SwapStatistics {
  double colder = 0;
  double hotter = 0;
  int64_t attempts = 0;
  int64_t accepted = 0;
};

// Keeps the time that `best` takes to be answered with.
void ReserveAnswer(const SearchOptions& options, const Plan& best,
                   SearchClock& clock);

struct SearchResult {
  Plan best;
  Evaluation evaluation;
  // Whether what is lost on shared links was looked at: then `best` is the best
  // of those of which it is known.
  bool shares_links = false;
  // The best plan, then others in the order of their scores, which are all
  // apart in their numbers of groups or devices, or by kApart at least in their
  // step times, so that what a better model makes of them differs: from what
  // the chains have had for their best, the uniform plans and the baselines, as
  // far as the constraints allow them. Up to half of them are the best of other
  // such numbers, if these are within kBehind.
  std::vector<FoundPlan> candidates;
  // The best uniform plan that was swept, or that SearchOptions::more_starts
  // gave, also for a part of the devices; if any.
  std::optional<FoundPlan> uniform;
  std::vector<Baseline> baselines;
  int64_t uniform_strategies = 0;  // looked at as starting points
  bool swept_all = false;  // whether there was time to find the best of them
  int64_t proposals = 0;
  int64_t accepted = 0;
  double seconds = 0;
  bool stalled = false;  // ended since nothing improved any more
  std::vector<ChainStatistics> chains;
  std::vector<MoveStatistics> moves;  // of all chains, as Moves()
  std::vector<SwapStatistics> swaps;  // colder pairs first
  int64_t restarts = 0;               // of ladders
  std::vector<TracePoint> trace;      // chain by chain
};

// The best plan for `graph` on `cluster`, never worse than the best baseline:
// the baselines and the best uniform strategies are where the chains start.
// With a time limit the search ends, too, when nothing has improved for half of
// it. REQUIRES: a limit, or `stop`. An error where no plan is valid at all; a
// result that is not feasible where none fits.
Result<SearchResult> Search(const SearchSpace& space,
                            const Objective& objective,
                            const SearchOptions& options);

}  // namespace tessera
