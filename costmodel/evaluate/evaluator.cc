#include "costmodel/evaluate/evaluator.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>

#include "costmodel/evaluate/all_reduce.h"
#include "costmodel/evaluate/memory_check.h"
#include "costmodel/evaluate/strategy_key.h"
#include "costmodel/evaluate/surroundings.h"
#include "costmodel/evaluate/uniform_bound.h"
#include "costmodel/memory/peak_memory.h"
#include "costmodel/simulate/simulator.h"
#include "planner/ir/statistics_dtype.h"
#include "planner/lower/lower.h"
#include "planner/plan/rooted.h"
#include "planner/plan/sequence_order.h"
#include "planner/plan/stages.h"

namespace tessera {
namespace {

// Tables of so many unlike blocks take some 20 ms each.
constexpr int64_t kMostBounded = 256;

// So many operators, each of every microbatch, take a few milliseconds to
// simulate (docs/search.md): no longer than what folds.
constexpr int64_t kSimulatedFreely = 500;

// Ranks of a kind whose memory is looked at where windows reach.
constexpr size_t kMostRanksOfKind = 8;

// How many blocks ahead parameters are fetched; 0 where none is.
int FetchesAhead(const Plan& plan) {
  const auto is_cut = [](const WeightPlacement& weight) {
    return weight.zero_stage >= 3 && weight.zero_axes != 0;
  };
  return std::ranges::any_of(plan.weights, is_cut) ? plan.prefetch : 0;
}

// Picoseconds of tasks, by the source of their costs.
using TimeBySource = std::array<double, kCostSources>;

double Total(const TimeBySource& time) {
  return std::accumulate(time.begin(), time.end(), 0.0);
}

// What is extrapolated counts as analytical: how far off it is is not known.
SourceShares Shares(const TimeBySource& time) {
  const double total = Total(time);
  if (total == 0) return {0, 0, 1};
  const auto of = [&](CostSource source) {
    return time[static_cast<size_t>(source)] / total;
  };
  return {of(CostSource::kMeasured), of(CostSource::kInterpolated),
          of(CostSource::kExtrapolated) + of(CostSource::kAnalytical)};
}

// A step of tasks that take so long one after another may be longer than a
// Duration holds.
constexpr double kLongest =
    static_cast<double>(std::numeric_limits<int64_t>::max());

// What stands for the price of a plan that has none.
Evaluation Unpriced(const Plan& plan, std::string why) {
  Evaluation unpriced;
  unpriced.memory.resize(DeviceSets(plan.groups).size());
  unpriced.overflow = {std::numeric_limits<int64_t>::max() / 2};
  unpriced.violations.push_back(std::move(why));
  return unpriced;
}
Evaluation TooLong(const Plan& plan, const TimeBySource& time) {
  char days[32];
  std::snprintf(days, sizeof days, "%.0f", Total(time) * 1e-12 / 86'400);
  return Unpriced(plan, "too long to be priced: its tasks take " +
                            std::string(days) + " days, one after another");
}

}  // namespace

Evaluator::Evaluator(const Graph& graph, const Cluster& cluster,
                     const ProfileDb* profile, const TrainingOptions& options,
                     int64_t most_simulated, const Cluster* whole)
    : graph_(graph),
      cluster_(cluster),
      profile_(profile),
      options_(options),
      most_simulated_(most_simulated),
      whole_(whole),
      facts_(graph, cluster, options),
      index_(cluster.stack.memory.communicator > Bytes{}
                 ? std::make_unique<const GraphIndex>(graph)
                 : nullptr),
      pricer_(graph, cluster, profile, PricerOptionsOf(options), whole),
      forms_(FormsOf(facts_, pricer_)) {}

Evaluator::~Evaluator() = default;

// Of stage `number` of the plan.
MemoryUse Evaluator::PeakOf(const NumberedStage& stage, const Order& order,
                            size_t number, int microbatches) const {
  const auto find = [&] {
    return StagePeak(*stage.stage, order.stages[number],
                     order.stage_steady[number], microbatches);
  };
  if (order.number < 0) return find();
  const IntKey key = {stage.number, order.number, static_cast<int64_t>(number)};
  return peaks_.Get(key, find);
}

// Shards of one kind differ by what does not divide evenly, of which the last
// has most, and of images by what windows reach into their neighbours'.
std::vector<KindMemory> Evaluator::MemoryByKindOf(const Plan& plan,
                                                  const Blocks& blocks,
                                                  const StepStage& stage,
                                                  size_t s,
                                                  const DeviceSet& set) const {
  const Neighbours& around = NeighboursFor(blocks.prefetch);
  const std::vector<DeviceId>& ranks = plan.groups[s].devices;
  const bool windows = std::ranges::any_of(
      graph_.nodes, [](const Node& node) { return node.op->windows; });
  std::vector<KindMemory> memory;
  for (DeviceSet& kind : KindsByShare(cluster_, plan.groups, set)) {
    std::vector<DeviceId> some = {kind.devices.back()};
    const size_t n = kind.devices.size();
    const size_t more = windows ? std::min(n, kMostRanksOfKind) : 0;
    for (size_t i = 0; i < more; ++i) {
      some.push_back(kind.devices[i * n / more]);
    }
    MemoryUse most;
    for (const DeviceId device : some) {
      Blocks own = blocks;
      own.position =
          static_cast<int>(std::ranges::find(ranks, device) - ranks.begin());
      std::vector<bool> stale(own.blocks.size(), false);
      for (const int b : stage.blocks) stale[static_cast<size_t>(b)] = true;
      FindBlocks(plan, around, stale, own);
      const NumberedStage numbered =
          StageOf(own.blocks, around.shapes, own.prefetch, stage,
                  own.order->splits[s], plan.microbatches);
      const MemoryUse use = PeakOf(numbered, *own.order, s, plan.microbatches);
      if (use.total > most.total) most = use;
    }
    memory.push_back({std::move(kind), most});
  }
  return memory;
}

std::shared_ptr<const Evaluator::Order> Evaluator::OrderOf(
    const Plan& plan) const {
  const std::pair key(plan.schedule, ShapeOf(graph_, plan));
  // A table is the plan's own.
  const bool remember = plan.actions.empty();
  if (remember) {
    std::lock_guard lock(orders_mutex_);
    if (auto it = orders_.find(key); it != orders_.end()) return it->second;
  }
  auto order = std::make_shared<Order>();
  order->stages = OrdersOf(graph_, plan);
  order->actions = GlobalOrder(order->stages, key.second);
  order->steady = FindSteadyPhase(order->actions);
  for (const std::vector<Action>& actions : order->stages) {
    std::vector<StageAction> alone;
    for (const Action& action : actions) alone.push_back({0, action});
    order->stage_steady.push_back(FindSteadyPhase(alone));
    const auto count = [&](ActionKind kind) {
      return std::count_if(
          actions.begin(), actions.end(),
          [&](const Action& action) { return action.kind == kind; });
    };
    order->splits.push_back(count(ActionKind::kBackwardInput) > 0);
    if (order->splits.back() && count(ActionKind::kBackward) > 0) {
      order->folds = false;
    }
  }
  // Chunks of one group may leave each other tensors: then it matters in which
  // order they end, which a table does not bind.
  if (!plan.actions.empty() && key.second.chunks > 1) order->folds = false;
  if (!remember) return order;
  order->number = numbers_++;
  std::lock_guard lock(orders_mutex_);
  return orders_.try_emplace(key, std::move(order)).first->second;
}

// The all-reduce of the sum of squares over all devices.
TaskCost Evaluator::WorldReduce(const Plan& plan) const {
  const DeviceGroup world = World(plan);
  Value sum;
  sum.dtype = StatisticsDType(graph_.dtype);
  Task task;
  task.optimizer = true;
  return PriceAllReduce(pricer_, task, sum, world);
}

Evaluation Evaluator::EvaluateBySimulation(const Plan& plan) const {
  const int64_t operators = OperatorsOf(plan);
  if (operators > most_simulated_) {
    return Unpriced(
        plan, "too large to simulate: " + std::to_string(operators) +
                  " operators, more than " + std::to_string(most_simulated_));
  }
  return plans_.Get(plan, [&] { return SimulateAnew(plan); });
}

Evaluation Evaluator::SimulateAnew(const Plan& plan) const {
  ++simulated_;
  const TaskGraph tasks = Lower(facts_, plan);
  const std::vector<TaskCost> costs = PriceTasks(pricer_, tasks);
  TimeBySource time = {};
  for (const TaskCost& cost : costs) {
    time[static_cast<size_t>(cost.source)] +=
        static_cast<double>(cost.duration.picoseconds);
  }
  if (Total(time) > kLongest) return TooLong(plan, time);
  Evaluation result;
  result.simulated = true;
  result.step_time = LongestPath(tasks, costs).step_time;
  result.memory = PeakMemory(tasks);
  if (Offloads(plan)) {
    result.host_memory = PeakMemory(tasks, MemoryTier::kHost);
    result.file_memory = PeakMemory(tasks, MemoryTier::kFile);
  }
  result.sources = Shares(time);
  CheckMemoryFits(
      facts_, index_.get(), plan,
      [&](const DeviceSet& set) {
        std::vector<KindMemory> memory;
        for (DeviceSet& kind : DeviceKinds(cluster_, tasks)) {
          if (kind.groups != set.groups) continue;
          const DeviceId one[] = {kind.devices[0]};
          memory.push_back({std::move(kind), PeakMemoryOf(tasks, one)[0]});
        }
        return memory;
      },
      result);
  return result;
}

Evaluation Evaluator::Evaluate(const Plan& plan) const {
  std::shared_ptr<const PlanBasis> basis;
  return EvaluateChange(plan, {true, {}, {}}, basis);
}

Evaluation Evaluator::EvaluateChange(
    const Plan& plan, const PlanChange& change,
    std::shared_ptr<const PlanBasis>& basis) const {
  // Kept alive while its parts are looked at.
  const std::shared_ptr<const PlanBasis> kept = std::move(basis);
  basis = nullptr;
  const auto* before = dynamic_cast<const Blocks*>(kept.get());
  const int prefetch = FetchesAhead(plan);
  const std::vector<BlockShape>& shapes = NeighboursFor(prefetch).shapes;
  // Blocks are folded for one group. Where inputs and losses come from, if that
  // is a root, is not among what tells blocks apart.
  const bool same_order =
      !change.whole && before != nullptr &&
      std::ranges::all_of(change.nodes, [&](NodeId node) {
        const auto b = static_cast<size_t>(graph_.node(node).block);
        const OpPlacement& op = plan.ops[node.index()];
        return op.group == before->groups[b] && op.chunk == before->chunks[b];
      });
  const auto order = same_order ? before->order : OrderOf(plan);
  if (shapes.empty() || !order->folds || UsesRoot(plan) || Offloads(plan) ||
      order->stages.size() < plan.groups.size()) {
    return EvaluateBySimulation(plan);
  }
  const auto now = BlocksOf(plan, prefetch, order, change, before);
  const std::vector<GroupId>& groups = now->groups;
  const std::vector<BlockPtr>& blocks = now->blocks;
  std::vector<StepStage> stages(plan.groups.size());
  for (size_t b = 0; b < shapes.size(); ++b) {
    StepStage& stage = stages[groups[b].index()];
    stage.blocks.push_back(static_cast<int>(b));
    stage.chunks.push_back(now->chunks[b]);
  }
  std::vector<NumberedStage> owners(stages.size());
  for (size_t s = 0; s < stages.size(); ++s) {
    owners[s] = StageOf(blocks, shapes, prefetch, stages[s], order->splits[s],
                        plan.microbatches);
    stages[s].stage = owners[s].stage.get();
    if (!stages[s].stage->exact) return EvaluateBySimulation(plan);
  }

  const TaskCost& world = now->world;
  Evaluation result;
  result.step_time = StepTime(stages, shapes, groups, order->actions,
                              order->steady, plan.microbatches, world.duration)
                         .time;
  TimeBySource time = {};
  if (world.duration >= Duration{}) {
    time[static_cast<size_t>(world.source)] +=
        static_cast<double>(world.duration.picoseconds);
  }
  for (size_t s = 0; s < stages.size(); ++s) {
    const Stage& stage = *owners[s].stage;
    result.memory.push_back(PeakOf(owners[s], *order, s, plan.microbatches));
    const double m = plan.microbatches;
    for (size_t c = 0; c < time.size(); ++c) {
      time[c] += stage.begin.time_by_source[c] + stage.tail.time_by_source[c];
      for (const Stage::Chunk& chunk : stage.chunks) {
        time[c] +=
            m * chunk.forward.time_by_source[c] +
            (order->splits[s] ? m : m - 1) * chunk.backward.time_by_source[c] +
            (m - 1) * chunk.weight.time_by_source[c] +
            chunk.last.time_by_source[c];
      }
    }
  }
  if (Total(time) > kLongest) return TooLong(plan, time);
  result.sources = Shares(time);
  CheckMemoryFits(
      facts_, index_.get(), plan,
      [&](const DeviceSet& set) {
        const size_t s = set.groups[0].index();
        return MemoryByKindOf(plan, *now, stages[s], s, set);
      },
      result);
  basis = now;
  return result;
}

int64_t Evaluator::OperatorsOf(const Plan& plan) const {
  return std::ssize(graph_.nodes) * plan.microbatches;
}

double Evaluator::PricedShare(const Plan& plan) const {
  if (OperatorsOf(plan) <= kSimulatedFreely) return 1;
  const auto stages = static_cast<size_t>(ShapeOf(graph_, plan).stages);
  // What folds takes no longer for more microbatches.
  return stages < plan.groups.size() ? 1.0 / plan.microbatches : 1;
}

std::optional<Score> Evaluator::EvaluateUniform(
    const GraphIndex& index, const Cluster& cluster,
    const Strategy& strategy) const {
  if (!strategy.actions.empty()) {
    return Objective::EvaluateUniform(index, cluster, strategy);
  }
  return uniform_.Get(StrategyKey(strategy), [&] {
    return Objective::EvaluateUniform(index, cluster, strategy);
  });
}

Score Evaluator::BoundUniform(const GraphIndex& index, const Strategy& strategy,
                              Bound bound) const {
  return Bounds().Of(index, strategy, bound);
}

std::optional<Score> Evaluator::EstimateUniform(const GraphIndex& index,
                                                const Strategy& strategy,
                                                Bound bound) const {
  const UniformBound* const estimates = Estimates();
  if (estimates == nullptr) return std::nullopt;
  const Score score = estimates->Of(index, strategy, bound);
  // A bound of no time is of what tables do not know.
  if (score.step_time == Duration{}) return std::nullopt;
  return score;
}

std::vector<LayerCost> Evaluator::LayerCosts(const Strategy& strategy,
                                             DeviceId first) const {
  const UniformBound* const estimates = Estimates();
  return (estimates != nullptr ? *estimates : Bounds())
      .LayerCosts(strategy, first);
}

const UniformBound& Evaluator::Bounds() const {
  std::call_once(bound_made_, [&] {
    bound_ = std::make_unique<const UniformBound>(graph_, cluster_, profile_,
                                                  options_);
    if (bound_->blocks() <= kMostBounded) return;
    estimate_ = std::make_unique<const UniformBound>(
        graph_, cluster_, profile_, options_, UniformBound::Blocks::kSample);
  });
  return *bound_;
}

const UniformBound* Evaluator::Estimates() const {
  Bounds();
  return estimate_.get();
}

}  // namespace tessera
