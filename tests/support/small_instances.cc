#include "tests/support/small_instances.h"

#include <algorithm>
#include <cmath>

#include "planner/base/rng.h"
#include "planner/plan/stages.h"
#include "planner/topology/topologies.h"
#include "tests/support/small_models.h"

namespace tessera::testing {
namespace {

// 2^(low … high), uniformly in the exponent.
int64_t PowerOfTwo(Rng& rng, uint32_t low, uint32_t high) {
  return int64_t{1} << (low + rng.Below(high - low + 1));
}

// embed | h.0 … | head: a lookup, `layers` dense layers, the head and its loss.
Graph Chain(int layers, int64_t batch, int64_t seq, int64_t hidden,
            int64_t vocabulary) {
  GraphBuilder builder("chain", batch, seq, DType::kFloat32);
  builder.BeginBlock("embed");
  const TensorId tokens = builder.Input("tokens", {batch, seq}, DType::kInt32);
  const TensorId labels = builder.Input("labels", {batch, seq}, DType::kInt32);
  const TensorId table =
      builder.Weight("table", {vocabulary, hidden}, {.stddev = 1}, true);
  TensorId x = builder.Add1("embedding", "lookup", {tokens, table});
  for (int i = 0; i < layers; ++i) {
    const std::string h = "h." + std::to_string(i);
    builder.BeginBlock(h);
    const TensorId w =
        builder.Weight(h + ".w", {hidden, hidden}, {.stddev = 1}, true);
    x = builder.Add1("linear", h + ".linear", {x, w}, "bsi,oi->bso");
  }
  builder.BeginBlock("head");
  const TensorId matrix =
      builder.Weight("matrix", {vocabulary, hidden}, {.stddev = 1}, true);
  const TensorId logits =
      builder.Add1("linear", "head", {x, matrix}, "bsi,vi->bsv");
  return FinishWithLoss(builder, logits, labels);
}

// `plan` with the block at the end of stage `stage` moved over to the next.
std::optional<Plan> Shifted(const SearchSpace& space, const Plan& plan,
                            int stage) {
  const Stages stages = StagesOf(*space.index.graph, plan);
  int last = -1;
  for (size_t b = 0; b < stages.of_block.size(); ++b) {
    if (stages.of_block[b] == stage) last = static_cast<int>(b);
  }
  Plan shifted = plan;
  for (NodeId node : space.index.nodes_of_block[static_cast<size_t>(last)]) {
    shifted.ops[node.index()].group = GroupId(stage + 1);
  }
  if (!MakeCanonical(space, shifted)) return std::nullopt;
  return shifted;
}

// What ForEachPlan goes through from `start`, valid or not.
double Choices(const SearchSpace& space, const Plan& start) {
  const Graph& graph = *space.index.graph;
  double choices = std::pow(4.0, static_cast<double>(start.weights.size()));
  for (size_t i = 0; i < start.ops.size(); ++i) {
    const auto splittable = std::ranges::count_if(
        graph.nodes[i].rule.factors,
        [](const Factor& factor) { return factor.splittable; });
    const auto axes = start.groups[start.ops[i].group.index()].axes.size();
    choices *= std::pow(static_cast<double>(splittable + 1),
                        static_cast<double>(axes));
  }
  int64_t microbatches = 0;
  for (int64_t m = 1; m <= graph.global_batch; ++m) {
    microbatches += graph.global_batch % m == 0 ? 1 : 0;
  }
  const size_t schedules =
      start.groups.size() > 1 ? SchedulesFor(ShapeOf(graph, start)).size() : 1;
  return choices * static_cast<double>(microbatches) *
         static_cast<double>(schedules);
}

}  // namespace

SmallInstance MakeSmallInstance(uint64_t number) {
  Rng rng(number, 77);
  SmallInstance made;
  static constexpr const char* kClusters[] = {
      "local-cpu:2",      "local-cpu:3",    "dgx-a100-80gb:1x2",
      "p100-edr:2x1",     "titan-rtx-pair", "pcie-a100:1x3",
      "dgx-h100:2x1",     "local-cpu:4",    "dgx-a100-80gb:1x4",
      "dgx-a100-80gb:2x2"};
  const char* const cluster = kClusters[rng.Below(std::size(kClusters))];
  made.cluster = MakeCluster(cluster).value();
  const size_t devices = made.cluster.devices.size();
  // Four devices have two axes, and twice as many choices of everything.
  const int layers = devices == 4 ? 0 : static_cast<int>(rng.Below(2));
  const int64_t batch =
      devices == 3 ? 3 * PowerOfTwo(rng, 0, 2) : PowerOfTwo(rng, 1, 3);
  const int64_t seq = PowerOfTwo(rng, 0, 9);
  const int64_t hidden = PowerOfTwo(rng, 5, 12);
  const int64_t vocabulary = PowerOfTwo(rng, 6, 15);
  made.graph = Chain(layers, batch, seq, hidden, vocabulary);
  // A third have room for 0.4 to 1.4 of all parameters, gradients and state.
  if (rng.Below(3) == 0) {
    const double share = 0.4 + rng.Uniform01();
    const double all = 16.0 * static_cast<double>(ParameterCount(made.graph));
    for (DeviceType& type : made.cluster.device_types) {
      type.memory = {static_cast<int64_t>(share * all) + 4096};
    }
  }
  made.name = std::string(cluster) + " layers " + std::to_string(layers) +
              " batch " + std::to_string(batch) + " seq " +
              std::to_string(seq) + " hidden " + std::to_string(hidden) +
              " vocabulary " + std::to_string(vocabulary);
  return made;
}

std::optional<ExhaustiveResult> BestOfAll(const SearchSpace& space,
                                          const Objective& objective,
                                          int64_t limit) {
  std::vector<Plan> starts;
  const auto devices = static_cast<int>(space.cluster->devices.size());
  const auto blocks = static_cast<int>(space.index.graph->blocks.size());
  for (int pp = 1; pp <= std::min(devices, blocks); ++pp) {
    if (devices % pp != 0) continue;
    Strategy strategy;
    strategy.pp = pp;
    // Of no samples at all there are no stages: one split that is valid.
    for (int tp = 1; tp <= devices / pp; ++tp) {
      if (devices / pp % tp != 0) continue;
      strategy.tp = tp;
      auto plan = PlanFromStrategy(space.index, *space.cluster, strategy);
      if (!plan) continue;
      starts.push_back(*std::move(plan));
      break;
    }
  }
  // All boundaries: from each start one block after the other goes over.
  for (size_t i = 0; i < starts.size(); ++i) {
    const int stages = StagesOf(*space.index.graph, starts[i]).count();
    for (int stage = 0; stage + 1 < stages; ++stage) {
      auto shifted = Shifted(space, starts[i], stage);
      if (!shifted) continue;
      const bool known = std::ranges::any_of(starts, [&](const Plan& plan) {
        return SameUpToNames(plan, *shifted);
      });
      if (!known) starts.push_back(*std::move(shifted));
    }
  }
  double choices = 0;
  for (const Plan& start : starts) choices += Choices(space, start);
  if (choices > static_cast<double>(limit)) return std::nullopt;
  std::optional<ExhaustiveResult> best;
  int64_t plans = 0;
  for (const Plan& start : starts) {
    const auto found = Exhaustive(space, start, objective, limit);
    if (!found) continue;
    plans += found->plans;
    if (!best || Better(found->evaluation, best->evaluation)) best = found;
  }
  if (best) best->plans = plans;
  return best;
}

}  // namespace tessera::testing
