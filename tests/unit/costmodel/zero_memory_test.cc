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

// Bytes of a tier that live through the step on the fullest rank, per
// parameter.
Kept KeptBy(const Graph& graph, const std::string& strategy,
            MemoryTier tier = MemoryTier::kDevice) {
  const Cluster cluster = *MakeCluster("dgx-a100-80gb:8");
  const auto plan =
      PlanFromStrategy(graph, cluster, *ParseStrategy("mbs=1," + strategy));
  TESSERA_CHECK(plan.has_value()) << plan.error().ToString();
  const TaskGraph tasks = Lower(graph, cluster, *plan, TrainingOptions());
  std::array<int64_t, kMemoryCategories> bytes = {};
  for (size_t v = 0; v < tasks.values.size(); ++v) {
    const Value& value = tasks.values[v];
    if (!value.persistent || value.tier != tier || !value.tensor.valid() ||
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

// Offloading moves a term to the other tier, divided as before. In fp32 a
// parameter that is on the device has a copy on the host beside its optimizer
// state, which the step updates there (Ren et al. 2021, ZeRO-Offload, section
// 4); where the whole parameter lies on the host, it is its own.
TEST(ZeroMemory, OffloadMovesEachTerm) {
  const double n = kRanks;
  const Graph& fp32 = Gpt2Xl(DType::kFloat32);
  const Graph& bf16 = Gpt2Xl(DType::kBFloat16);
  struct Row {
    const Graph& graph;
    const char* strategy;
    MemoryTier tier;
    Kept device;
    Kept there;
  };
  const auto host = MemoryTier::kHost;
  const auto file = MemoryTier::kFile;
  for (const Row& row : {
           Row{fp32, "offload=optimizer:host", host, {4, 4, 0}, {0, 0, 12}},
           Row{fp32, "offload=optimizer:file", file, {4, 4, 0}, {0, 0, 12}},
           Row{fp32, "offload=parameters:host", host, {0, 4, 8}, {4, 0, 0}},
           Row{fp32,
               "offload=optimizer:host,parameters:host",
               host,
               {0, 4, 0},
               {4, 0, 8}},
           Row{fp32,
               "zero=3,offload=optimizer:host,parameters:host",
               host,
               {0, 4 / n, 0},
               {4 / n, 0, 8 / n}},
           Row{bf16, "offload=optimizer:host", host, {2, 4, 0}, {0, 0, 12}},
           Row{bf16, "offload=optimizer:file", file, {2, 4, 0}, {0, 0, 12}},
           Row{bf16,
               "offload=optimizer:host,parameters:host",
               host,
               {0, 4, 0},
               {2, 0, 12}},
           Row{bf16,
               "zero=1,offload=optimizer:host",
               host,
               {2, 4, 0},
               {0, 0, 12 / n}},
           Row{bf16,
               "zero=3,offload=optimizer:file,parameters:file",
               file,
               {0, 4 / n, 0},
               {2 / n, 0, 12 / n}},
       }) {
    SCOPED_TRACE(row.strategy);
    ExpectKept(KeptBy(row.graph, row.strategy), row.device.parameter,
               row.device.gradient, row.device.optimizer);
    ExpectKept(KeptBy(row.graph, row.strategy, row.tier), row.there.parameter,
               row.there.gradient, row.there.optimizer);
  }
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
  // Of the 24 GB the optimizer's 18 can go to the host.
  const std::string offload = "zero=0,offload=optimizer:host";
  const Kept stays = KeptBy(graph, offload);
  const Kept goes = KeptBy(graph, offload, MemoryTier::kHost);
  EXPECT_DOUBLE_EQ(
      (stays.parameter + stays.gradient / 2 + stays.optimizer) * 1.5e9, 6e9);
  EXPECT_DOUBLE_EQ((goes.parameter + goes.gradient + goes.optimizer) * 1.5e9,
                   18e9);
}

}  // namespace
}  // namespace tessera
