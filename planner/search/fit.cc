#include "planner/search/fit.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "planner/base/threads.h"
#include "planner/plan/recompute.h"
#include "planner/plan/stages.h"
#include "planner/plan/work_shares.h"
#include "planner/schedule/pipeline_schedule.h"
#include "planner/search/least_memory.h"

namespace tessera {
namespace {

// Kinds that are priced for a plan, those of the classes with the most layers.
constexpr size_t kMostKinds = 48;
// Of the time that it takes to run all again, what those take that save most of
// the memory: attention's scores take few operations for their bytes. A guess,
// for the order in which plans are tried.
constexpr double kShareOfAll = 0.3;
// How often stages are made alike again once it is known what of them runs
// again.
constexpr int kLevelRounds = 3;
// Blocks that are shared out among stages: the time grows with their square.
constexpr size_t kMostLevelled = 1000;
// Of so many of the fastest plans what need not run again is given back.
constexpr size_t kMostGiven = 4;
// Prices for each kind in which the number of layers is found.
constexpr int kRounds = 3;

// What may run again: nodes by position in each layer of a class, or all of
// each layer.
struct Kind {
  static constexpr int kAllLayers = -1;
  int block_class = kAllLayers;
  std::vector<size_t> positions = {};
  // With all of these layers: time that it takes and bytes saved on each
  // device set, of a layer there.
  double seconds = 0;
  std::vector<double> saved = {};
};

// Constraints that the plan breaks.
int Broken(const SearchSpace& space, const Plan& plan) {
  return space.constraints.Violations(space.index, *space.cluster, plan);
}

Plan WithAllAgain(const GraphIndex& index, Plan plan) {
  const auto [first, last] = Layers(index);
  for (int b = first; b < last; ++b) {
    SetRecompute(index, b, RecomputeLevel::kFull, plan);
  }
  return plan;
}

// Runs those layers again of which the constraints want that. False where they
// do not allow the plan then either.
bool RunAgainAsFixed(const SearchSpace& space, Plan& plan) {
  if (Allowed(space, plan)) return true;
  int broken = Broken(space, plan);
  const auto [first, last] = Layers(space.index);
  if (Broken(space, WithAllAgain(space.index, plan)) >= broken) return false;
  for (int b = first; b < last; ++b) {
    Plan again = plan;
    SetRecompute(space.index, b, RecomputeLevel::kFull, again);
    const int then = Broken(space, again);
    if (then >= broken) continue;
    broken = then;
    plan = std::move(again);
  }
  return broken == 0;
}

class Fitter {
 public:
  Fitter(const SearchSpace& space, const Objective& objective, Plan plan)
      : space_(space),
        index_(space.index),
        objective_(objective),
        plan_(std::move(plan)),
        sets_(DeviceSets(plan_.groups)) {
    for (const DeviceSet& set : sets_) {
      capacity_.push_back(LeastMemory(*space.cluster, set));
    }
    if (space.constraints.empty()) return;
    // Mostly all layers may, which takes one look.
    if (Broken(space, WithAllAgain(index_, plan_)) == 0) return;
    const int broken = Broken(space, plan_);
    const auto [first, last] = Layers(index_);
    for (int b = first; b < last; ++b) {
      Plan again = plan_;
      SetRecompute(index_, b, RecomputeLevel::kFull, again);
      if (Broken(space, again) > broken) never_again_.insert(b);
    }
  }

  // Nothing where it is no better than `than`. `known`: kinds in the order of
  // their prices, which become those of this plan where there are none.
  std::optional<FoundPlan> Run(const Score& than, std::vector<Kind>& known) {
    Evaluation evaluation = objective_.Evaluate(plan_);
    // What runs again makes it no faster.
    if (than.feasible && evaluation.step_time >= than.step_time) {
      return std::nullopt;
    }
    if (evaluation.feasible()) return FoundPlan{plan_, std::move(evaluation)};
    if (evaluation.memory.size() != sets_.size()) return std::nullopt;
    if (Lacks(evaluation) == 0) return std::nullopt;  // something else is wrong
    if (!FitsAllAgain()) return std::nullopt;
    if (known.empty()) {
      known = Kinds();
      for (Kind& kind : known) Measure(evaluation, kind);
      std::ranges::stable_sort(
          known, {}, [&](const Kind& kind) { return Price(evaluation, kind); });
    }
    // The order of prices is nearly that of other plans.
    std::vector<Kind> kinds = known;
    kinds.push_back(Kind());
    for (Kind& kind : kinds) {
      if (evaluation.feasible()) break;
      Measure(evaluation, kind);
      if (std::isinf(Price(evaluation, kind))) continue;
      if (!Apply(kind, evaluation)) return std::nullopt;
    }
    if (!evaluation.feasible()) return std::nullopt;
    return FoundPlan{std::move(plan_), std::move(evaluation)};
  }

  // Layers that need not run again after all, the last ones first, since they
  // keep the fewest microbatches.
  FoundPlan GiveBack(const std::function<bool()>& stop) {
    Evaluation evaluation = objective_.Evaluate(plan_);
    std::vector<int> blocks = LayersOf(Kind());
    std::ranges::reverse(blocks);
    for (int b : blocks) {
      if (stop()) break;
      Plan plan = plan_;
      SetRecompute(index_, b, RecomputeLevel::kNone, plan);
      if (plan == plan_ || !Allowed(space_, plan)) continue;
      Evaluation after = objective_.Evaluate(plan);
      if (!after.feasible() || after.step_time > evaluation.step_time) continue;
      plan_ = std::move(plan);
      evaluation = std::move(after);
    }
    return {std::move(plan_), std::move(evaluation)};
  }

 private:
  double Excess(const Evaluation& evaluation, size_t set) const {
    return static_cast<double>(evaluation.memory[set].total.value -
                               capacity_[set].value);
  }
  // Device sets that need more than they have.
  int Lacks(const Evaluation& evaluation) const {
    int count = 0;
    for (size_t s = 0; s < sets_.size(); ++s) {
      count += Excess(evaluation, s) > 0 ? 1 : 0;
    }
    return count;
  }
  // That of a block's first node; blocks of several groups belong to it.
  size_t SetOf(int block) const {
    const NodeId first = index_.nodes_of_block[static_cast<size_t>(block)][0];
    const GroupId group = plan_.ops[first.index()].group;
    for (size_t s = 0; s < sets_.size(); ++s) {
      if (Holds(sets_[s], group)) return s;
    }
    return 0;
  }

  // The layers of a kind that the constraints let run again.
  std::vector<int> LayersOf(const Kind& kind) const {
    std::vector<int> blocks;
    const auto [first, last] = Layers(index_);
    for (int b = first; b < last; ++b) {
      const auto block = static_cast<size_t>(b);
      if (!index_.nodes_of_block[block].empty() && !never_again_.contains(b) &&
          (kind.block_class == Kind::kAllLayers ||
           kind.block_class == index_.block_class[block])) {
        blocks.push_back(b);
      }
    }
    return blocks;
  }

  std::vector<Kind> Kinds() const {
    std::map<int, int> layers;  // by class
    for (int b : LayersOf(Kind())) {
      ++layers[index_.block_class[static_cast<size_t>(b)]];
    }
    std::vector<std::pair<int, int>> most;  // layers, class
    for (const auto& [block_class, count] : layers) {
      most.push_back({-count, block_class});
    }
    std::ranges::sort(most);
    std::vector<Kind> kinds = {Kind()};
    for (const auto& [count, block_class] : most) {
      const auto& nodes =
          index_.nodes_of_block[static_cast<size_t>(block_class)];
      Kind all = {.block_class = block_class};
      for (size_t i = 0; i < nodes.size(); ++i) {
        if (!CanRecompute(*index_.graph, nodes[i])) continue;
        all.positions.push_back(i);
        if (nodes.size() > 1) {
          kinds.push_back({.block_class = block_class, .positions = {i}});
        }
      }
      if (!all.positions.empty()) kinds.push_back(std::move(all));
      if (kinds.size() >= kMostKinds) break;
    }
    kinds.resize(std::min(kinds.size(), kMostKinds));
    return kinds;
  }

  // Whether more of the block runs again than before.
  bool Recompute(const Kind& kind, int block, Plan& plan) const {
    const auto& nodes = index_.nodes_of_block[static_cast<size_t>(block)];
    const auto again = [&] {
      return std::ranges::count_if(
          nodes, [&](NodeId node) { return plan.ops[node.index()].recompute; });
    };
    const auto before = again();
    if (kind.block_class == Kind::kAllLayers) {
      SetRecompute(index_, block, RecomputeLevel::kFull, plan);
    } else {
      for (size_t i : kind.positions) {
        plan.ops[nodes[i].index()].recompute = true;
      }
    }
    return again() > before;
  }

  // Whether recomputation can make it fit at all.
  bool FitsAllAgain() const {
    Plan plan = plan_;
    for (int b : LayersOf(Kind())) Recompute(Kind(), b, plan);
    return objective_.Evaluate(plan).feasible();
  }

  // Seconds for each byte that is saved where memory lacks.
  double Price(const Evaluation& evaluation, const Kind& kind) const {
    double saved = 0;
    for (size_t s = 0; s < sets_.size(); ++s) {
      if (Excess(evaluation, s) > 0) saved += kind.saved[s];
    }
    return saved > 0 ? kind.seconds / saved
                     : std::numeric_limits<double>::infinity();
  }

  // Prices the plan with the kind in all layers of its class.
  void Measure(const Evaluation& before, Kind& kind) const {
    kind.saved.assign(sets_.size(), 0);
    Plan plan = plan_;
    std::vector<int> layers(sets_.size(), 0);
    int all = 0;
    for (int b : LayersOf(kind)) {
      Recompute(kind, b, plan);
      ++layers[SetOf(b)];
      ++all;
    }
    if (plan == plan_ || !Allowed(space_, plan)) return;
    const Evaluation after = objective_.Evaluate(plan);
    for (size_t s = 0; s < sets_.size(); ++s) {
      if (layers[s] == 0) continue;
      kind.saved[s] =
          std::max(0.0, static_cast<double>(before.memory[s].total.value -
                                            after.memory[s].total.value)) /
          layers[s];
    }
    kind.seconds =
        std::max(1e-12, (after.step_time - before.step_time).seconds() / all);
  }

  // In the first layers of each device set that lacks memory, as many as it
  // needs or has. False where the plan would be invalid.
  bool Apply(const Kind& kind, Evaluation& evaluation) {
    for (int round = 0; round < kRounds && Lacks(evaluation) > 0; ++round) {
      std::vector<double> wanted(sets_.size(), 0);
      for (size_t s = 0; s < sets_.size(); ++s) {
        const double excess = Excess(evaluation, s);
        if (excess > 0 && kind.saved[s] > 0) {
          wanted[s] = std::ceil(excess / kind.saved[s]);
        }
      }
      Plan plan = plan_;
      for (int b : LayersOf(kind)) {
        const size_t s = SetOf(b);
        if (wanted[s] <= 0) continue;
        if (Recompute(kind, b, plan)) --wanted[s];
      }
      if (plan == plan_) return true;
      if (!Allowed(space_, plan)) return false;
      plan_ = std::move(plan);
      evaluation = objective_.Evaluate(plan_);
    }
    return true;
  }

  const SearchSpace& space_;
  const GraphIndex& index_;
  const Objective& objective_;
  Plan plan_;
  const std::vector<DeviceSet> sets_;
  std::vector<Bytes> capacity_;
  std::set<int> never_again_;  // layers that the constraints do not let
};

// Whether the plan is a pipeline of stages with one group each, of equal
// meshes, and one chunk: blocks may change their stages. (Not where nothing is
// known of their work.)
bool IsPlainPipeline(const GraphIndex& index, const Plan& plan) {
  const PipelineShape shape = ShapeOf(*index.graph, plan);
  return index.nodes_of_block.size() <= kMostLevelled && shape.stages > 1 &&
         shape.chunks == 1 && shape.stages == std::ssize(plan.groups) &&
         std::ranges::all_of(plan.groups,
                             [&](const DeviceGroup& group) {
                               return SameMesh(group, plan.groups[0]);
                             }) &&
         std::ranges::any_of(index.block_flops,
                             [](double flops) { return flops > 0; });
}

// FLOPs of a stage's forward and backward and of what of it runs again, over
// those of its forward; those of a device that is slower than the first stage's
// count for as much more.
std::vector<double> WorkPerForward(const SearchSpace& space, const Plan& plan) {
  const GraphIndex& index = space.index;
  std::vector<double> forward(plan.groups.size(), 0);
  std::vector<double> again(plan.groups.size(), 0);
  for (size_t i = 0; i < index.forward_nodes; ++i) {
    const size_t stage = plan.ops[i].group.index();
    forward[stage] += index.node_flops[i];
    if (plan.ops[i].recompute) again[stage] += index.node_flops[i];
  }
  const auto speed = [&](size_t stage) {
    return SlowestSpeed(*space.cluster, plan.groups[stage], index.graph->dtype);
  };
  for (size_t s = 0; s < forward.size(); ++s) {
    again[s] = (forward[s] > 0 ? 3 + again[s] / forward[s] : 3) *
               (speed(0) / speed(s));
  }
  return again;
}

// `plan` with its blocks shared out so that the stage with the most work has
// the least, where a stage does `per_forward` FLOPs for each of its blocks'. By
// dynamic programming over stages and the blocks up to each one's end.
Plan Levelled(const GraphIndex& index, Plan plan,
              const std::vector<double>& per_forward) {
  const size_t stages = plan.groups.size();
  const size_t blocks = index.nodes_of_block.size();
  std::vector<double> sum(blocks + 1, 0);
  for (size_t b = 0; b < blocks; ++b) {
    sum[b + 1] = sum[b] + index.block_flops[b];
  }
  constexpr double kNever = std::numeric_limits<double>::infinity();
  std::vector<std::vector<double>> most(
      stages + 1, std::vector<double>(blocks + 1, kNever));
  std::vector<std::vector<size_t>> begin(stages + 1,
                                         std::vector<size_t>(blocks + 1, 0));
  most[0][0] = 0;
  for (size_t s = 0; s < stages; ++s) {
    for (size_t end = s + 1; end <= blocks; ++end) {
      for (size_t from = s; from < end; ++from) {
        const double work =
            std::max(most[s][from], per_forward[s] * (sum[end] - sum[from]));
        if (work >= most[s + 1][end]) continue;
        most[s + 1][end] = work;
        begin[s + 1][end] = from;
      }
    }
  }
  if (most[stages][blocks] == kNever) return plan;
  for (size_t s = stages, end = blocks; s > 0; end = begin[s--][end]) {
    for (size_t b = begin[s][end]; b < end; ++b) {
      for (NodeId node : index.nodes_of_block[b]) {
        plan.ops[node.index()].group = GroupId(s - 1);
      }
    }
  }
  return plan;
}

}  // namespace

std::optional<FoundPlan> FitByRecomputing(const SearchSpace& space,
                                          const Objective& objective,
                                          Plan plan) {
  if (!MakeCanonical(space, plan)) return std::nullopt;
  std::vector<Kind> known;
  return Fitter(space, objective, std::move(plan)).Run(Score(), known);
}

std::vector<FoundPlan> FittedPlans(const SearchSpace& space,
                                   const Objective& objective,
                                   const std::vector<Strategy>& likely,
                                   const std::vector<Strategy>& strategies,
                                   size_t tried, Score than, int threads,
                                   const std::function<bool()>& stop,
                                   const std::function<bool()>& stop_guessing) {
  // By how long they may take: on the way from the bound without recomputation
  // to that with all of it as far as memory lacks, and a part of that, since
  // the operators that save most run first.
  const auto quick = [&](const Strategy& strategy) {
    return objective.GuessUniform(space.index, strategy,
                                  Objective::Bound::kQuick);
  };
  const auto memory =
      static_cast<double>(space.cluster->TypeOf(DeviceId(0)).memory.value);
  std::vector<std::optional<double>> seconds(strategies.size());
  ForEach(threads, strategies.size(), [&](size_t i) {
    if (stop() || (stop_guessing && stop_guessing())) return;
    // Walks change schedules; most others keep more.
    if (strategies[i].recompute != RecomputeLevel::kNone ||
        strategies[i].vp > 1 ||
        (strategies[i].pp > 1 && strategies[i].schedule != "1f1b")) {
      return;
    }
    const Score none = quick(strategies[i]);
    if (than.feasible && none.step_time >= than.step_time) return;
    Strategy again = strategies[i];
    again.recompute = RecomputeLevel::kFull;
    const Score full = quick(again);
    if (!full.feasible) return;
    const double lacks =
        std::min(1.0, static_cast<double>(none.overflow.value) / memory);
    seconds[i] =
        none.step_time.seconds() +
        kShareOfAll * lacks * (full.step_time - none.step_time).seconds();
  });
  std::vector<std::pair<double, size_t>> guesses;
  for (size_t i = 0; i < strategies.size(); ++i) {
    if (seconds[i]) guesses.push_back({*seconds[i], i});
  }
  std::ranges::sort(guesses);
  std::vector<FoundPlan> fitted;
  std::vector<Kind> known;
  std::vector<FoundPlan> all;
  std::optional<Strategy> best;
  const auto keep = [&](FoundPlan found, const Strategy& strategy) {
    const Score score = ScoreOf(found.evaluation);
    if (!Better(score, than)) return;
    than = score;
    fitted.insert(fitted.begin(), std::move(found));
    best = strategy;
  };
  // False where the strategy gives no plan that is allowed.
  const auto fit = [&](const Strategy& strategy) {
    auto plan = PlanFromStrategy(space.index, *space.cluster, strategy);
    if (!plan || !MakeCanonical(space, *plan) ||
        !RunAgainAsFixed(space, *plan)) {
      return false;
    }
    const bool levels = IsPlainPipeline(space.index, *plan);
    std::vector<double> work = WorkPerForward(space, *plan);
    for (int round = 0; round < (levels ? kLevelRounds : 1); ++round) {
      Plan candidate = levels ? Levelled(space.index, *plan, work) : *plan;
      if (!MakeCanonical(space, candidate)) break;
      auto found =
          Fitter(space, objective, std::move(candidate)).Run(than, known);
      if (!found || !Allowed(space, found->plan)) break;
      std::vector<double> then = WorkPerForward(space, found->plan);
      all.push_back(*found);
      keep(*std::move(found), strategy);
      if (then == work) break;
      work = std::move(then);
    }
    return true;
  };
  for (Strategy strategy : likely) {
    if (strategy.recompute == RecomputeLevel::kNone || stop()) continue;
    strategy.recompute = RecomputeLevel::kNone;
    fit(strategy);
  }
  for (const auto& [guess, i] : guesses) {
    if (tried == 0 || stop()) break;
    if (than.feasible) {
      const Score close = objective.GuessUniform(space.index, strategies[i],
                                                 Objective::Bound::kClose);
      if (close.step_time >= than.step_time) continue;
    }
    if (fit(strategies[i])) --tried;
  }
  // By its own prices.
  known.clear();
  if (best && !stop()) fit(*best);
  std::ranges::stable_sort(all, [](const FoundPlan& a, const FoundPlan& b) {
    return a.evaluation.step_time < b.evaluation.step_time;
  });
  all.resize(std::min(all.size(), kMostGiven));
  for (FoundPlan& found : all) {
    if (stop()) break;
    keep(Fitter(space, objective, std::move(found.plan)).GiveBack(stop), {});
  }
  return fitted;
}

}  // namespace tessera
