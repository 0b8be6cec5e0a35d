#pragma once
// Chain: a Metropolis–Hastings walk over plans (Metropolis et al. 1953,
// Hastings 1970; for parallelization plans Jia et al., SysML 2019).
//
// A step draws a move, prices the candidate once and compares it with the
// current plan: with cost c(x) = step time of x over that of the best starting
// plan,
//   accept with min(1, exp((c(old) - c(new)) / T) * q(old|new) / q(new|old)).
// Chains i, j exchange their plans (parallel tempering; Geyer 1991, Earl and
// Deem 2005):
//   accept with min(1, exp((1/T_i - 1/T_j) (c(x_i) - c(x_j)))),
// so that cold chains settle in what hot ones have found. Both leave each
// chain's distribution, exp(-c / T), as it is.
// Infeasible plans have probability zero: a chain that has met a feasible plan
// since it started takes no other, and exchanges with none. Until then c(x) is
// the overflow of the fullest device, over that of the chain's start.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "planner/base/rng.h"
#include "planner/search/draft.h"
#include "planner/search/found_plan.h"
#include "planner/search/move.h"
#include "planner/search/objective.h"
#include "planner/search/search_space.h"

namespace tessera {

struct MoveStatistics {
  int64_t proposals = 0;
  int64_t applicable = 0;  // that gave a candidate
  int64_t accepted = 0;
};

struct ChainStatistics {
  double temperature = 0;
  int64_t proposals = 0;
  int64_t applicable = 0;  // moves that gave a candidate
  int64_t accepted = 0;
  std::vector<MoveStatistics> moves;  // in the order of the moves
  Evaluation start;
  Evaluation best;  // with the least step time, links shared where known
  std::optional<Duration> best_shared;
};

// The best plan of a chain improved.
struct TracePoint {
  int chain = 0;
  int64_t proposal = 0;  // of the chain, from 1
  Duration step_time;
  std::optional<Duration> shared;
};

// One chain. Not for several threads.
class Chain {
 public:
  static constexpr size_t kMostBests = 16;

  // `space`, `objective` and `moves` outlive it. `unit` is the step time that
  // costs are in; zero: the start's. A chain that is `folded` changes equal
  // layers of a stage together. REQUIRES: `start` is canonical.
  Chain(const SearchSpace& space, const Objective& objective,
        std::span<const Move> moves, Plan start, double temperature, Rng rng,
        Duration unit = {}, bool folded = false);

  // One proposal; whether it was accepted.
  bool Step();
  // From here on costs count what is lost on shared links, and the chain goes
  // to no plan of which that is not known. A plan that it stands on then counts
  // without until it leaves it.
  void ShareLinks();
  bool shares_links() const { return shares_links_; }
  // Finds what the best plan loses so, unless that is known.
  void PriceBest();
  // Goes on from another plan. REQUIRES: `start` is canonical.
  void Restart(Plan start);
  // One proposed exchange of plans; whether it was accepted.
  static bool Exchange(Chain& a, Chain& b, Rng& rng);

  const Plan& plan() const { return draft_.plan(); }
  const Evaluation& evaluation() const { return evaluation_; }
  // Its cost's: with shared links where it counts them, and they are known.
  Score score() const { return ScoreWith(evaluation_, shared_); }
  bool knows_shared() const { return shared_.has_value(); }
  // The best of bests() of which the time on shared links is known, if it is of
  // any, or else the last.
  const FoundPlan& best() const;
  int64_t proposals() const { return statistics_.proposals; }
  ChainStatistics statistics() const;
  // What was the best plan for a while, by its own score, the latest kMostBests
  // of them.
  std::span<const FoundPlan> bests() const { return bests_; }
  // Proposal numbers and step times at which the best plan improved.
  const std::vector<TracePoint>& trace() const { return trace_; }

 private:
  // Whether the current plan is better than best(): where shared links count, a
  // time with them than one without, which says less.
  bool IsBest() const;
  // In units of the start's; the step time, or the overflow while nothing
  // feasible was met.
  double Cost(const Score& score) const;
  void SetUnit();
  // Prices the plan that it starts from.
  void PriceStart();
  // Remembers the current plan where it is the best so far.
  void SeeBest();
  // Whether the chain goes to a candidate: `uniform`, from [0, 1), decides, and
  // is drawn when it first does.
  bool Accepts(const Score& score, double log_ratio,
               std::optional<double>& uniform);

  const Objective& objective_;
  std::span<const Move> moves_;
  bool folded_;
  bool shares_links_ = false;
  Draft draft_;
  std::shared_ptr<const PlanBasis> basis_;  // of the draft's plan
  Evaluation evaluation_;
  std::optional<Duration> shared_;  // where it counts shared links
  double priced_share_ = 1;         // of the plan
  std::vector<FoundPlan> bests_;
  double unit_ = 1;       // of the cost
  double time_unit_ = 0;  // of feasible plans; 0: the first one's
  Rng rng_;
  ChainStatistics statistics_;  // but for the best
  std::vector<TracePoint> trace_;
};

}  // namespace tessera
