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
           Row{bf16,
               "offload=optimizer:host,gradients:host",
               host,
               {2, 0, 0},
               {0, 4, 12}},
           Row{bf16,
               "zero=2,offload=optimizer:host,gradients:host",
               host,
               {2, 0, 0},
               {0, 4 / n, 12 / n}},
           Row{bf16,
               "zero=3,offload=optimizer:file,parameters:file,gradients:host",
               host,
               {0, 0, 0},
               {0, 4 / n, 0}},
           Row{fp32,
               "zero=1,offload=optimizer:host,gradients:host",
               host,
               {4, 0, 0},
               {0, 4 / n, 12 / n}},
       }) {
    SCOPED_TRACE(row.strategy);
    ExpectKept(KeptBy(row.graph, row.strategy), row.device.parameter,
               row.device.gradient, row.device.optimizer);
    ExpectKept(KeptBy(row.graph, row.strategy, row.tier), row.there.parameter,
               row.there.gradient, row.there.optimizer);
  }
}

// The most bytes of a kind, of all weights or of layers alone, that a tier has
// at a time, in issue order.
int64_t MostHeld(const Graph& graph, const TaskGraph& tasks, MemoryTier tier,
                 MemoryCategory category, bool layers_alone) {
  const auto frees = LastUses(tasks);
  std::vector<bool> held(tasks.values.size(), false);
  int64_t now = 0;
  const auto change = [&](ValueId id, int sign) {
    const Value& value = tasks.value(id);
    if (value.tier == tier && value.tensor.valid() &&
        value.category == category &&
        (!layers_alone || graph.tensor(value.tensor).name.starts_with("h."))) {
      now += sign * LargestBytes(tasks, id).value;
    }
  };
  for (size_t v = 0; v < tasks.values.size(); ++v) {
    if (!tasks.values[v].persistent) continue;
    held[v] = true;
    if (!tasks.values[v].alias_of.valid()) change(ValueId(v), 1);
  }
  int64_t most = now;
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    for (ValueId written : tasks.tasks[t].writes) {
      const ValueId root = tasks.Root(written);
      if (held[root.index()]) continue;
      held[root.index()] = true;
      change(root, 1);
    }
    most = std::max(most, now);
    for (ValueId freed : frees[t]) change(freed, -1);
  }
  return most;
}

// Of GPT-2's largest model on one device.
int64_t MostHeld(const std::string& strategy, MemoryTier tier,
                 MemoryCategory category, bool layers_alone) {
  const Graph& graph = Gpt2Xl(DType::kBFloat16);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:1x1").value();
  const auto plan = PlanFromStrategy(
      graph, cluster, ParseStrategy("mbs=32," + strategy).value());
  TESSERA_CHECK(plan.has_value()) << plan.error().ToString();
  return MostHeld(graph, Lower(graph, cluster, *plan, TrainingOptions()), tier,
                  category, layers_alone);
}

// Of gradients on the host a device has those of one block at a time, 4 bytes a
// parameter: of a layer 12 h^2 + 13 h with h = 1600, 30.7e6 parameters, or the
// embeddings, (50257 + 1024) h = 82.1e6. Of a layer in 4 tiles it has one tile
// at a time, of the largest weights 4 h^2 / 4, and what is not in tiles, biases
// and norms, 13 h at most. Without the host it has all of the 48 layers, the
// last norm and the embeddings, which the head shares.
TEST(ZeroMemory, GradientsOnTheHostLeaveOneBlockOnTheDevice) {
  const auto most = [](const std::string& strategy, bool layers_alone) {
    return MostHeld("offload=optimizer:host" + strategy, MemoryTier::kDevice,
                    MemoryCategory::kGradient, layers_alone);
  };
  const int64_t h = 1600;
  const int64_t layer = 12 * h * h + 13 * h;
  const int64_t embeddings = (50257 + 1024) * h;
  EXPECT_EQ(most("", false), 4 * (48 * layer + 2 * h + embeddings));
  EXPECT_EQ(most(",gradients:host", false), 4 * embeddings);
  EXPECT_EQ(most(",gradients:host", true), 4 * layer);
  const int64_t tiled = most(",gradients:host,tiles=4", true);
  EXPECT_GE(tiled, 4 * h * h);
  EXPECT_LE(tiled, 4 * (h * h + 13 * h));
}

// Of optimizer states in files the host has those of two layers at a time, 12
// bytes a parameter; in tiles those of two tiles, of the largest weights 4 h^2
// / 4, besides biases and norms, 13 h of a layer.
TEST(ZeroMemory, StatesInFilesPassThroughTheHostBlockByBlockOrTileByTile) {
  const auto most = [](const std::string& strategy) {
    return MostHeld("offload=optimizer:file" + strategy, MemoryTier::kHost,
                    MemoryCategory::kOptimizer, true);
  };
  const int64_t h = 1600;
  EXPECT_EQ(most(""), 12 * 2 * (12 * h * h + 13 * h));
  const int64_t tiled = most(",tiles=4");
  EXPECT_GE(tiled, 12 * 2 * h * h);
  EXPECT_LE(tiled, 12 * (2 * h * h + 2 * 13 * h));
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
