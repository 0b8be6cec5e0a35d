// Plans that no strategy names: every operator split on its own, over ragged
// meshes, stages with unlike meshes, any ZeRO axes. All train as one rank does.

#include <cmath>
#include <cstdio>
#include <map>

#include "planner/plan/graph_index.h"
#include "tests/support/tiny_training.h"

namespace tessera {
namespace {

constexpr int64_t kBatch = 12;
constexpr int64_t kSeqLen = 6;
constexpr int64_t kSteps = 5;

// One stage for each mesh, with whole blocks in order; each axis of each
// operator on a random factor or on none.
Plan RandomPlan(const GraphIndex& index,
                const std::vector<std::vector<int>>& meshes, Rng& rng) {
  const Graph& graph = *index.graph;
  Plan plan;
  plan.graph_fingerprint = index.fingerprint;
  plan.schedule = rng.Below(2) == 0 ? "gpipe" : "1f1b";
  const int kMicrobatches[] = {1, 2, 3};
  plan.microbatches = kMicrobatches[rng.Below(3)];
  int next = 0;
  for (const std::vector<int>& mesh : meshes) {
    DeviceGroup group;
    group.name = "stage" + std::to_string(plan.groups.size());
    int ranks = 1;
    for (int size : mesh) {
      group.axes.push_back({"a" + std::to_string(group.axes.size()), size});
      ranks *= size;
    }
    for (int i = 0; i < ranks; ++i) group.devices.push_back(DeviceId(next++));
    plan.groups.push_back(group);
  }
  const auto blocks = static_cast<int>(graph.blocks.size());
  const auto stages = static_cast<int>(meshes.size());
  plan.ops.resize(index.forward_nodes);
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    const Node& node = graph.nodes[i];
    OpPlacement& placement = plan.ops[i];
    placement.group = GroupId(node.block * stages / blocks);
    const DeviceGroup& group = plan.groups[placement.group.index()];
    for (size_t a = 0; a < group.axes.size(); ++a) {
      const auto f = static_cast<size_t>(
          rng.Below(static_cast<uint32_t>(node.rule.factors.size()) + 1));
      if (f == node.rule.factors.size() || !node.rule.factors[f].splittable) {
        continue;
      }
      const AxisSet axes = placement.axes[f] | AxisSet{1} << a;
      const int64_t extent =
          index.Extent(NodeId(i), f, kBatch / plan.microbatches);
      if (extent >= group.Size(axes)) placement.axes[f] = axes;
    }
  }
  for (TensorId weight : Weights(graph)) {
    const WeightHome home = HomeOf(graph, plan, weight);
    WeightPlacement placement;
    placement.zero_axes =
        home.layout.replicated(plan.groups[home.group.index()]) & rng.Below(8);
    placement.zero_stage = placement.zero_axes != 0 ? 1 : 0;
    plan.weights.push_back(placement);
  }
  return plan;
}

struct Outcome {
  std::vector<double> losses;
  std::map<std::string, double> norms;  // of the weights
};

Outcome RunPlan(const Graph& graph, const Plan& plan, const TokenData& data) {
  const int ranks =
      static_cast<int>(plan.groups.back().devices.back().value) + 1;
  const Cluster cluster =
      MakeCluster("local-cpu:" + std::to_string(ranks)).value();
  for (const Error& error : Validate(graph, cluster, plan)) {
    ADD_FAILURE() << error.ToString();
    return {};
  }
  TinyRun run;
  run.steps = kSteps;
  run.save_path = TempPath("weights.safetensors");
  run.options.learning_rate = 0.01;
  const TaskGraph tasks = Lower(graph, cluster, plan, run.options);
  const auto result = TrainTiny(graph, tasks, data, run);
  if (!result) {
    ADD_FAILURE() << result.error().ToString();
    return {};
  }
  Outcome outcome;
  outcome.losses = result->losses;
  const auto file = SafetensorsFile::Open(run.save_path).value();
  for (TensorId id : Weights(graph)) {
    const Tensor& tensor = graph.tensor(id);
    double square = 0;
    for (double x : ReadTensor(file, tensor.name, tensor)) square += x * x;
    outcome.norms[tensor.name] = std::sqrt(square);
  }
  std::remove(run.save_path.c_str());
  return outcome;
}

class RandomPlans : public ::testing::TestWithParam<bool> {};

TEST_P(RandomPlans, EqualsSerial) {
  const Graph graph =
      ImportTiny(GetParam() ? TinyLlama(2) : TinyGpt2(2, 4), kBatch, kSeqLen);
  const GraphIndex index(graph);
  const TokenData data = TinyTokens();
  Rng rng(41);
  const Outcome serial = RunPlan(graph, RandomPlan(index, {{1}}, rng), data);
  ASSERT_EQ(serial.losses.size(), static_cast<size_t>(kSteps));
  const std::vector<std::vector<std::vector<int>>> shapes = {
      {{2}},      {{3}},         {{2, 2}},   {{3, 2}},       {{2, 2, 2}},
      {{2}, {3}}, {{2, 2}, {1}}, {{2}, {2}}, {{1}, {2}, {2}}};
  for (int trial = 0; trial < 40; ++trial) {
    const auto& meshes = shapes[static_cast<size_t>(trial) % shapes.size()];
    SCOPED_TRACE("trial " + std::to_string(trial));
    const Plan plan = RandomPlan(index, meshes, rng);
    const Outcome outcome = RunPlan(graph, plan, data);
    ASSERT_EQ(outcome.losses.size(), serial.losses.size());
    for (size_t i = 0; i < serial.losses.size(); ++i) {
      EXPECT_NEAR(outcome.losses[i], serial.losses[i], 1e-9) << "step " << i;
    }
    for (const auto& [name, norm] : serial.norms) {
      EXPECT_NEAR(outcome.norms.at(name), norm, 1e-9 * norm + 1e-10) << name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, RandomPlans, ::testing::Bool());

}  // namespace
}  // namespace tessera
