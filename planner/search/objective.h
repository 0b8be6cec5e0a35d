#pragma once
// Objective: what the search sees of the cost model, and all it sees.

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "planner/base/ids.h"
#include "planner/plan/evaluation.h"
#include "planner/plan/plan.h"
#include "planner/plan/strategy.h"

namespace tessera {

// What of an evaluation says which of two plans is better.
struct Score {
  Duration step_time;
  Bytes overflow;
  bool feasible = false;
  bool operator==(const Score&) const = default;
};

inline Score ScoreOf(const Evaluation& evaluation) {
  return {evaluation.step_time, evaluation.overflow, evaluation.feasible()};
}

// Whether `a` is strictly better: feasible before infeasible, then the shorter
// step, or among infeasible ones the smaller overflow.
inline bool Better(const Score& a, const Score& b) {
  if (a.feasible != b.feasible) return a.feasible;
  return a.feasible ? a.step_time < b.step_time : a.overflow < b.overflow;
}
inline bool Better(const Evaluation& a, const Evaluation& b) {
  return Better(ScoreOf(a), ScoreOf(b));
}

// What a candidate has otherwise than the plan that its walk stands on.
struct PlanChange {
  // Anything besides placements may differ: groups, schedule, microbatches,
  // buckets, prefetch, the order of sequences. The lists then say nothing.
  bool whole = false;
  std::vector<NodeId> nodes;    // whose Plan::ops differ, each once
  std::vector<size_t> weights;  // whose Plan::weights differ, each once
};

// What one block adds to a stage of a pipeline, on one of its devices; an
// estimate. Times in picoseconds.
struct LayerCost {
  // For each microbatch: forward and backward with what they exchange within a
  // replica, and the exchanges of parameters and gradients between replicas,
  // which run beside them.
  double compute = 0;
  double exchange = 0;
  // Once a step: the reductions that follow the last backward, and the
  // optimizer with the gathers behind it.
  double reduction = 0;
  double update = 0;
  // Bytes: for each microbatch in flight; parameters, gradients and states; and
  // on top at the highest point of the backward.
  double kept = 0;
  double stored = 0;
  double backward_peak = 0;
  bool operator==(const LayerCost&) const = default;
};

// What an objective keeps of a plan that it has priced, for the candidates that
// are an edit away.
class PlanBasis {
 public:
  virtual ~PlanBasis() = default;
};

class Objective {
 public:
  virtual ~Objective() = default;
  // Prices a valid plan. Thread-safe; the same plan gives the same bits.
  virtual Evaluation Evaluate(const Plan& plan) const = 0;
  // The same, for who can make use of what has changed. `basis` is what a call
  // for the plan before has left there, or null, and becomes that of `plan`.
  virtual Evaluation EvaluateChange(
      const Plan& plan, const PlanChange& change,
      std::shared_ptr<const PlanBasis>& basis) const {
    (void)change;
    (void)basis;
    return Evaluate(plan);
  }
  // Of proposals of this plan the share that a search should have priced: less
  // than 1 where that takes so long that it would do little else. Thread-safe.
  virtual double PricedShare(const Plan&) const { return 1; }
  // The step time with what is lost on shared links, no less than Evaluate's;
  // or nothing, where that takes far longer to find. Thread-safe, as above.
  virtual std::optional<Duration> QuickSharedStepTime(const Plan&) const {
    return std::nullopt;
  }
  // The score of PlanFromStrategy's plan, or nothing where it gives none. What
  // a sweep over uniform strategies asks for: who knows strategies it was asked
  // for before need not build their plans again.
  virtual std::optional<Score> EvaluateUniform(const GraphIndex& index,
                                               const Cluster& cluster,
                                               const Strategy& strategy) const {
    const auto plan = PlanFromStrategy(index, cluster, strategy);
    if (!plan) return std::nullopt;
    return ScoreOf(Evaluate(*plan));
  }
  // What the strategy's score is never better than, found without its plan:
  // what lets a sweep leave most of a space unpriced. Of a strategy that gives
  // no plan anything. Each kind takes more time than the one before and is no
  // better; the score takes the most.
  enum class Bound { kLoose, kQuick, kClose };
  virtual Score BoundUniform(const GraphIndex&, const Strategy&, Bound) const {
    return {Duration{}, Bytes{}, /*feasible=*/true};
  }
  // Whether bounds take as long as prices, and estimates do not.
  virtual bool EstimatesUniform() const { return false; }
  // What such a bound would be, as far as a sample of the graph says: it may be
  // better or worse than the score. Nothing where that is not known.
  virtual std::optional<Score> EstimateUniform(const GraphIndex&,
                                               const Strategy&, Bound) const {
    return std::nullopt;
  }
  // The estimate, or else the bound.
  Score GuessUniform(const GraphIndex& index, const Strategy& strategy,
                     Bound bound) const {
    const auto estimate = EstimateUniform(index, strategy, bound);
    return estimate ? *estimate : BoundUniform(index, strategy, bound);
  }
  // By block, in a stage that runs the strategy without a pipeline (pp = 1) on
  // dp x tp x cp x ep neighbouring devices from `first` on, a multiple of those
  // of one replica. Empty where that is not known.
  virtual std::vector<LayerCost> LayerCosts(const Strategy&,
                                            DeviceId /*first*/) const {
    return {};
  }
};

}  // namespace tessera
