// What ZeRO keeps, in bytes per parameter and rank: those of the storage
// layouts (Rajbhandari et al. 2020, figure 1).

#include <gtest/gtest.h>

#include <array>

#include "planner/io/importer.h"
#include "planner/lower/lower.h"
#include "planner/plan/strategy.h"
#include "planner/topology/topologies.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

constexpr int kRanks = 64;

struct Kept {
  double parameter = 0;
  double gradient = 0;
  double optimizer = 0;
};

// GPT-2's largest, 1.5 billion parameters.
const Graph& Gpt2Xl(DType dtype) {
  const auto make = [](DType type) {
    ImportOptions options;
    options.global_batch = kRanks;
    options.seq_len = 1024;
    options.dtype = type;
    auto forward =
        ImportModel(ExamplePath("models/gpt2-xl/config.json"), options);
    TESSERA_CHECK(forward.has_value()) << forward.error().ToString();
    return new Graph(*Differentiate(*forward));
  };
  static const Graph* const fp32 = make(DType::kFloat32);
  static const Graph* const bf16 = make(DType::kBFloat16);
  return dtype == DType::kFloat32 ? *fp32 : *bf16;
}

// Bytes that live through the step on the fullest rank, per parameter.
Kept KeptBy(const Graph& graph, const std::string& strategy) {
  const Cluster cluster = *MakeCluster("dgx-a100-80gb:8");
  const auto plan =
      PlanFromStrategy(graph, cluster, *ParseStrategy("mbs=1," + strategy));
  TESSERA_CHECK(plan.has_value()) << plan.error().ToString();
  const TaskGraph tasks = Lower(graph, cluster, *plan, TrainingOptions());
  std::array<int64_t, kMemoryCategories> bytes = {};
  for (size_t v = 0; v < tasks.values.size(); ++v) {
    const Value& value = tasks.values[v];
    if (!value.persistent || !value.tensor.valid() ||
        graph.tensor(value.tensor).kind != TensorKind::kWeight) {
      continue;
    }
    bytes[static_cast<size_t>(value.category)] +=
        LargestBytes(tasks, ValueId(static_cast<int64_t>(v))).value;
  }
  const auto parameters = static_cast<double>(ParameterCount(graph));
  const auto of = [&](MemoryCategory category) {
    return static_cast<double>(bytes[static_cast<size_t>(category)]) /
           parameters;
  };
  return {of(MemoryCategory::kParameter), of(MemoryCategory::kGradient),
          of(MemoryCategory::kOptimizer)};
}

void ExpectKept(const Kept& kept, double parameter, double gradient,
                double optimizer) {
  // Shards are rounded up to whole elements.
  EXPECT_NEAR(kept.parameter, parameter, 1e-4 * parameter);
  EXPECT_NEAR(kept.gradient, gradient, 1e-4 * gradient);
  EXPECT_NEAR(kept.optimizer, optimizer, 1e-4 * optimizer);
}

TEST(ZeroMemory, Fp32KeepsFourAndFourAndEight) {
  const Graph& graph = Gpt2Xl(DType::kFloat32);
  const double n = kRanks;
  ExpectKept(KeptBy(graph, "zero=0"), 4, 4, 8);
  ExpectKept(KeptBy(graph, "zero=1"), 4, 4, 8 / n);
  ExpectKept(KeptBy(graph, "zero=2"), 4, 4 / n, 8 / n);
  ExpectKept(KeptBy(graph, "zero=3"), 4 / n, 4 / n, 8 / n);
  // Within nodes of eight.
  ExpectKept(KeptBy(graph, "zero=3,zero-group=node"), 0.5, 0.5, 1);
}

TEST(ZeroMemory, Bf16KeepsTwoAndFourAndTwelveWithTheMaster) {
  const Graph& graph = Gpt2Xl(DType::kBFloat16);
  const double n = kRanks;
  ExpectKept(KeptBy(graph, "zero=0"), 2, 4, 12);
  ExpectKept(KeptBy(graph, "zero=1"), 2, 4, 12 / n);
  ExpectKept(KeptBy(graph, "zero=2"), 2, 4 / n, 12 / n);
  ExpectKept(KeptBy(graph, "zero=3"), 2 / n, 4 / n, 12 / n);
}

// The paper keeps gradients in 16 bits, half of what is kept here: 2 + 2 + 12
// bytes, "at least 24 GB for a GPT-2 with 1.5 billion parameters" (section 3).
TEST(ZeroMemory, TheClassicSixteenBytes) {
  const Graph& graph = Gpt2Xl(DType::kBFloat16);
  const Kept kept = KeptBy(graph, "zero=0");
  const double classic = kept.parameter + kept.gradient / 2 + kept.optimizer;
  EXPECT_DOUBLE_EQ(classic, 16);
  const auto parameters = static_cast<double>(ParameterCount(graph));
  EXPECT_NEAR(parameters, 1.5e9, 0.1e9);
  EXPECT_DOUBLE_EQ(classic * 1.5e9, 24e9);
}

}  // namespace
}  // namespace tessera
