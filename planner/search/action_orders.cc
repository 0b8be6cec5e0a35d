#include "planner/search/action_orders.h"

#include <algorithm>
#include <cmath>

#include "planner/plan/stages.h"
#include "planner/plan/strategy.h"
#include "planner/plan/work_shares.h"
#include "planner/schedule/list_schedule.h"

namespace tessera {
namespace {

// By position of the pipeline, by work over speed. A weight's gradient takes as
// long as the forward does, and so does that of the activation; operators
// without weights take twice as long backward; what runs again does so before
// its gradients.
std::vector<PassTimes> TimesOf(const SearchSpace& space, const Plan& plan,
                               const PipelineShape& shape) {
  const Graph& graph = *space.index.graph;
  std::vector<double> speeds;  // of a group's devices together
  for (const DeviceGroup& group : plan.groups) {
    speeds.push_back(SlowestSpeed(*space.cluster, group, graph.dtype) *
                     static_cast<double>(group.devices.size()));
  }
  std::vector<PassTimes> times(
      static_cast<size_t>(shape.stages * shape.chunks));
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    const OpPlacement& op = plan.ops[i];
    const Node& node = graph.nodes[i];
    const double time = space.index.node_flops[i] / speeds[op.group.index()];
    PassTimes& at =
        times[static_cast<size_t>(op.chunk * shape.stages + op.group.value)];
    const bool has_weight =
        std::ranges::any_of(node.operands, [&](TensorId id) {
          return graph.tensor(id).kind == TensorKind::kWeight;
        });
    at.forward += time;
    at.backward_input += (has_weight ? 1 : 2) * time;
    if (has_weight) at.backward_weight += time;
    if (op.recompute) at.backward_input += time;
  }
  return times;
}

// Microbatches in flight, by stage: so many times as 1F1B has, or everywhere as
// its first stage has.
std::vector<int> Limits(const PipelineShape& shape, double times, bool alike) {
  std::vector<int> limits;
  for (int s = 0; s < shape.stages; ++s) {
    const int of_1f1b = alike ? shape.stages : shape.stages - s;
    limits.push_back(shape.chunks *
                     std::min(shape.microbatches,
                              static_cast<int>(std::ceil(times * of_1f1b))));
  }
  return limits;
}

constexpr std::string_view kTable = "table";

constexpr double kLimits[] = {1, 1.5, 2, 3};
// Orders are made and priced in proportion.
constexpr int64_t kMostActions = 20'000;
// Operators of all microbatches up to which more than one order of a kind is
// simulated: some 10 ms each.
constexpr int64_t kMostSimulated = 20'000;

}  // namespace

std::string_view ScheduleOf(const StageOrders& orders,
                            const PipelineShape& shape) {
  for (const PipelineSchedule* schedule : SchedulesFor(shape)) {
    if (OrdersOf(*schedule, shape) == orders) return schedule->name;
  }
  return kTable;
}

void SetOrders(const StageOrders& orders, const PipelineShape& shape,
               Plan& plan) {
  plan.schedule = ScheduleOf(orders, shape);
  plan.actions = plan.schedule == kTable ? orders : StageOrders();
}

std::optional<Plan> BetterOrders(const SearchSpace& space,
                                 const Objective& objective, const Plan& plan,
                                 const std::function<bool()>& stop) {
  const PipelineShape shape = ShapeOf(*space.index.graph, plan);
  // A table of several chunks has to be simulated, which takes long.
  if (shape.stages < 2 || shape.chunks > 1 ||
      shape.stages != static_cast<int>(plan.groups.size()) ||
      int64_t{3} * shape.stages * shape.chunks * shape.microbatches >
          kMostActions) {
    return std::nullopt;
  }
  ListScheduleOptions options;
  options.shape = shape;
  options.times = TimesOf(space, plan, shape);
  const int64_t operators =
      std::ssize(space.index.graph->nodes) * plan.microbatches;
  Score best_score = ScoreOf(objective.Evaluate(plan));
  std::optional<Plan> best;
  std::vector<StageOrders> known = {OrdersOf(*space.index.graph, plan)};
  for (const bool splits : {true, false}) {
    options.splits = splits;
    bool slow = false;
    for (const double limit : kLimits) {
      for (const bool alike : {false, true}) {
        if (slow) break;
        if (stop()) return best;
        options.most_in_flight = Limits(shape, limit, alike);
        StageOrders orders = ListSchedule(options);
        if (std::ranges::find(known, orders) != known.end()) continue;
        Plan candidate = plan;
        SetOrders(orders, shape, candidate);
        known.push_back(std::move(orders));
        if (!Allowed(space, candidate)) continue;
        const Evaluation evaluation = objective.Evaluate(candidate);
        slow = evaluation.simulated && operators > kMostSimulated;
        const Score score = ScoreOf(evaluation);
        if (!Better(score, best_score)) continue;
        best_score = score;
        best = std::move(candidate);
      }
    }
  }
  return best;
}

}  // namespace tessera
