// Splits change the order of sums and nothing else. In fp64 that is far below
// any mistake even after many steps; in fp32 it is what rounding allows: the
// first step's gradients differ by a few units of the last place for each
// operator on the way, and losses follow. (Parameters need not agree in fp32:
// AdamW divides by the gradient's size and so turns rounding of a small
// gradient into a whole step.)

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "planner/lower/lower.h"
#include "planner/topology/topologies.h"
#include "tests/support/plan_check.h"

namespace tessera {
namespace {

constexpr int kCases = 12;
constexpr int kSteps = 20;

// Random plans, of many kinds. Not of models with batch norms, whose unit is
// the microbatch: these compute something else in several.
std::vector<Case> Cases(PlanChecker& checker, uint64_t seed) {
  CaseGenerator generator(seed, 6, checker);
  std::vector<Case> cases;
  while (cases.size() < kCases) {
    Case drawn = generator.Next();
    if (drawn.graph.image != 2) cases.push_back(std::move(drawn));
  }
  return cases;
}

Trained Train(const Graph& graph, const PlanSpec& spec,
              const TrainInMemoryOptions& options) {
  const GraphIndex index(graph);
  const Plan plan = MakePlan(index, spec).value();
  const Cluster cluster =
      MakeCluster("local-cpu:" + std::to_string(RanksOf(spec))).value();
  const auto trained = TrainInMemory(
      graph, Lower(graph, cluster, plan, options.training), options);
  TESSERA_CHECK(trained.has_value()) << trained.error().ToString();
  return *trained;
}

TEST(Reassociation, Float64) {
  PlanChecker checker;
  TrainInMemoryOptions options = CheckedRun();
  options.steps = kSteps;
  std::map<std::string, Trained> serial;
  for (const Case& c : Cases(checker, 21)) {
    const Graph& graph = checker.ModelOf(c.graph).graph;
    auto [it, is_new] = serial.try_emplace(ToText(c.graph));
    if (is_new) it->second = Train(graph, {}, options);
    EXPECT_EQ(Difference(Train(graph, c.plan, options), it->second), "")
        << ToText(c);
  }
}

// The most forward operators one behind another.
int DepthOf(const Graph& graph) {
  std::vector<int> depth(graph.tensors.size(), 0);
  int most = 0;
  for (const Node& node : graph.nodes) {
    if (node.pass != Pass::kForward) break;
    int deepest = 0;
    for (TensorId operand : node.operands) {
      deepest = std::max(deepest, depth[operand.index()]);
    }
    for (TensorId result : node.results) depth[result.index()] = deepest + 1;
    most = std::max(most, deepest + 1);
  }
  return most;
}

double Norm(const std::vector<double>& values) {
  double square = 0;
  for (double x : values) square += x * x;
  return std::sqrt(square);
}

TEST(Reassociation, Float32) {
  constexpr double kEpsilon = std::numeric_limits<float>::epsilon();
  PlanChecker checker;
  // The first moments after one step are the gradients.
  TrainInMemoryOptions first_step;
  first_step.training = {.clip = 0, .beta1 = 0};
  first_step.steps = 1;
  TrainInMemoryOptions run;
  run.training = {.learning_rate = 3e-4, .clip = 1};
  run.steps = kSteps;
  struct Serial {
    Graph graph;
    Trained first_step;
    Trained run;
  };
  std::map<std::string, Serial> serials;
  for (const Case& c : Cases(checker, 22)) {
    SCOPED_TRACE(ToText(c));
    auto [it, is_new] = serials.try_emplace(ToText(c.graph));
    Serial& serial = it->second;
    if (is_new) {
      serial.graph = MakeGraph(c.graph, DType::kFloat32);
      serial.first_step = Train(serial.graph, {}, first_step);
      serial.run = Train(serial.graph, {}, run);
    }
    const double bound = 16 * std::pow(1.03, DepthOf(serial.graph)) * kEpsilon;
    const Trained gradients = Train(serial.graph, c.plan, first_step);
    double largest = 0;
    for (const auto& [name, expected] : serial.first_step.first_moments) {
      largest = std::max(largest, Norm(expected));
    }
    for (const auto& [name, expected] : serial.first_step.first_moments) {
      std::vector<double> difference = gradients.first_moments.at(name);
      for (size_t i = 0; i < expected.size(); ++i) difference[i] -= expected[i];
      // What is mathematically zero (a key's bias) is the rounding of a sum of
      // terms that are not.
      const double size = std::max(Norm(expected), 1e-2 * largest);
      EXPECT_LE(Norm(difference), bound * size) << name;
    }
    const Trained actual = Train(serial.graph, c.plan, run);
    for (size_t i = 0; i < serial.run.losses.size(); ++i) {
      EXPECT_NEAR(actual.losses[i], serial.run.losses[i], 1e-5) << i;
    }
  }
}

// The bounds are not loose: a learning rate that is 3 % off shows.
TEST(Reassociation, Control) {
  const Graph graph = MakeGraph({.layers = 1,
                                 .groups = 2,
                                 .hidden = 8,
                                 .inner = 12,
                                 .vocabulary = 16,
                                 .sequence = 6,
                                 .batch = 6},
                                DType::kFloat32);
  TrainInMemoryOptions run;
  run.training = {.learning_rate = 3e-4, .clip = 1};
  run.steps = kSteps;
  const Trained a = Train(graph, {}, run);
  run.training.learning_rate = 2.9e-4;
  const Trained b = Train(graph, {}, run);
  EXPECT_GT(std::abs(a.losses.back() - b.losses.back()), 1e-5);
}

}  // namespace
}  // namespace tessera
