#include "planner/lower/fused_nodes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "costmodel/price.h"
#include "costmodel/simulate/simulator.h"
#include "planner/io/importer.h"
#include "planner/ir/graph.h"
#include "planner/lower/lower.h"
#include "planner/plan/strategy.h"
#include "planner/topology/topologies.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

Graph ModelOf(const std::string& name) {
  ImportOptions import;
  import.global_batch = 4;
  import.seq_len = 64;
  import.dtype = DType::kBFloat16;
  return Differentiate(
             ImportModel(ExamplePath("models/" + name), import).value())
      .value();
}

// How many nodes begin each kernel, and how many are done elsewhere.
std::map<std::string, int> CountsOf(const Graph& graph,
                                    const std::vector<FusedNode>& nodes) {
  std::map<std::string, int> counts;
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (nodes[i].kernel() != nullptr) {
      ++counts[std::string(nodes[i].kernel()->name)];
    }
    if (nodes[i].elsewhere)
      ++counts["-" + std::string(graph.nodes[i].op->name)];
  }
  return counts;
}

// Llama 2 7B, 32 layers: in each the gate with its product, and of the
// gradients of these three kernels; two residual sums with norms behind them
// (the last layer's second one has the model's last norm), two norms whose
// gradients meet that of a residual, but for the first norm of the model, whose
// sum is behind the embedding; and sums over the three and the two products of
// a norm.
TEST(FuseNodes, OfLlama) {
  const Graph graph = ModelOf("llama-2-7b/config.json");
  const auto all = FuseNodes(graph, [](std::string_view) { return true; });
  const std::map<std::string, int> expected = {
      {"add+rms_norm", 64},  {"-rms_norm", 64},
      {"rms_norm_dx+dw", 1}, {"rms_norm_dx+sum+dw", 64},
      {"-rms_norm_dw", 65},  {"-sum", 64 + 64},
      {"silu+multiply", 32}, {"multiply+silu_dx+multiply", 32},
      {"-silu_dx", 32},      {"-multiply", 32 + 32},
  };
  EXPECT_EQ(CountsOf(graph, all), expected);
  const auto none = FuseNodes(graph, [](std::string_view) { return false; });
  EXPECT_TRUE(CountsOf(graph, none).empty());
  // Without the kernel of the three, that of the gradient and the sum.
  const auto some = FuseNodes(
      graph, [](std::string_view name) { return name == "rms_norm_dx+sum"; });
  EXPECT_EQ(
      CountsOf(graph, some),
      (std::map<std::string, int>{{"rms_norm_dx+sum", 64}, {"-sum", 64 + 64}}));
}

// A profile that has times of the fused kernels alone: the first task takes
// these, the others nothing; and the update of fp32 masters with the cast.
TEST(FuseNodes, ArePricedWhereTheyAreMeasured) {
  const Graph graph = ModelOf("llama-2-7b/config.json");
  const Cluster cluster = MakeCluster("dgx-h200:1x1").value();
  const Plan plan =
      PlanFromStrategy(graph, cluster, ParseStrategy("mbs=4").value()).value();
  const TaskGraph tasks = Lower(graph, cluster, plan, TrainingOptions{});
  const Pricer all(graph, cluster, nullptr, {.all_fused = true});
  const std::vector<ProfileKey> keys = ProfileKeysOf(all, tasks);
  ProfileDb profile;
  for (const ProfileKey& key : keys) {
    if (key.name.find('+') == std::string::npos) continue;
    profile.rows[key] = {.median_s = key.name == "adamw+cast" ? 0.5 : 0.25,
                         .samples = 20};
  }
  const Pricer pricer(graph, cluster, &profile);
  EXPECT_EQ(ProfileKeysOf(pricer, tasks), keys);
  const std::vector<TaskCost> costs = PriceTasks(pricer, tasks);
  std::map<std::string, std::set<double>> seconds;  // by kernel
  for (size_t t = 0; t < costs.size(); ++t) {
    if (tasks.tasks[t].kind != TaskKind::kCompute) continue;
    seconds[std::string(tasks.tasks[t].kernel)].insert(
        costs[t].duration.seconds());
  }
  EXPECT_EQ(seconds["add"], (std::set<double>{0.25}));
  EXPECT_EQ(seconds["rms_norm_dx"], (std::set<double>{0.25}));
  EXPECT_EQ(seconds["rms_norm_dw"], (std::set<double>{0}));
  EXPECT_EQ(seconds["sum"], (std::set<double>{0}));
  EXPECT_EQ(seconds["adamw"], (std::set<double>{0.5}));
  EXPECT_EQ(seconds["cast"], (std::set<double>{0}));
  // The first norm has no sum before it.
  EXPECT_EQ(seconds["rms_norm"].count(0), 1);
  EXPECT_EQ(seconds["rms_norm"].size(), 2);
}

// An optimizer whose update is not fused with casts has them beside it, however
// another one's is measured; so has one that rounds stochastically.
TEST(FuseNodes, HaveCastsOfTheirOptimizer) {
  const Graph graph = ModelOf("gpt2-tiny/config.json");
  const Cluster cluster = MakeCluster("dgx-h200:1x1").value();
  const Plan plan =
      PlanFromStrategy(graph, cluster, ParseStrategy("mbs=4").value()).value();
  const auto fused_name = [&](const TrainingOptions& options) {
    const TaskGraph tasks = Lower(graph, cluster, plan, options);
    PricerOptions pricing = PricerOptionsOf(options);
    pricing.all_fused = true;
    const Pricer pricer(graph, cluster, nullptr, pricing);
    const std::vector<ProfileKey> keys = ProfileKeysOf(pricer, tasks);
    const std::vector<TaskCost> costs = PriceTasks(pricer, tasks);
    std::string name = "none";
    for (size_t t = 0; t < costs.size(); ++t) {
      const Task& task = tasks.tasks[t];
      if (!task.optimizer || task.kind != TaskKind::kCompute) continue;
      if (keys[t].name.ends_with("+cast")) name = keys[t].name;
    }
    for (size_t t = 0; t < costs.size(); ++t) {
      const std::string_view kernel = tasks.tasks[t].kernel;
      if (kernel != "cast" && kernel != "stochastic_cast") continue;
      if (!tasks.tasks[t].optimizer) continue;
      EXPECT_EQ(costs[t].duration == Duration(), name != "none")
          << options.optimizer;
    }
    return name;
  };
  TrainingOptions options;
  EXPECT_EQ(fused_name(options), "adamw+cast");
  options.optimizer = "adam";
  EXPECT_EQ(fused_name(options), "adam+cast");
  options.optimizer = "sgd";
  EXPECT_EQ(fused_name(options), "none");
  options.optimizer = "adamw";
  options.stochastic_rounding = true;
  EXPECT_EQ(fused_name(options), "none");
}

// Products of weights have times of their own where a step has several
// microbatches; with a profile that has none of these, those of products that
// add nothing.
TEST(AddingProducts, ArePricedWhereTheyAreMeasured) {
  const Graph graph = ModelOf("llama-2-7b/config.json");
  const Cluster cluster = MakeCluster("dgx-h200:1x1").value();
  const auto seconds_of = [&](const Pricer& pricer, const char* strategy) {
    const Plan plan =
        PlanFromStrategy(graph, cluster, ParseStrategy(strategy).value())
            .value();
    const TaskGraph tasks = Lower(graph, cluster, plan, TrainingOptions{});
    const std::vector<TaskCost> costs = PriceTasks(pricer, tasks);
    std::set<double> seconds;
    for (size_t t = 0; t < costs.size(); ++t) {
      if (tasks.tasks[t].kernel == "linear_dw") {
        seconds.insert(costs[t].duration.seconds());
      }
    }
    return seconds;
  };
  const Pricer all(graph, cluster, nullptr, {.all_fused = true});
  ProfileDb both;
  ProfileDb writing;
  for (const char* strategy : {"mbs=4", "mbs=2"}) {
    const Plan plan =
        PlanFromStrategy(graph, cluster, ParseStrategy(strategy).value())
            .value();
    for (ProfileKey key :
         ProfileKeysOf(all, Lower(graph, cluster, plan, TrainingOptions{}))) {
      if (!key.name.starts_with("linear_dw")) continue;
      const bool adds = key.name == "linear_dw.adds";
      EXPECT_EQ(adds, strategy == std::string("mbs=2")) << key.name;
      both.rows[key] = {.median_s = adds ? 0.5 : 0.25, .samples = 20};
      key.name = "linear_dw";
      writing.rows[key] = {.median_s = 0.25, .samples = 20};
    }
  }
  const Pricer by_both(graph, cluster, &both);
  EXPECT_EQ(seconds_of(by_both, "mbs=4"), (std::set<double>{0.25}));
  EXPECT_EQ(seconds_of(by_both, "mbs=2"), (std::set<double>{0.5}));
  // A size that was timed writing alone.
  ProfileDb some = both;
  for (const auto& [key, row] : writing.rows) {
    if (!both.rows.contains(key)) some.rows[key] = row;
  }
  const auto adds = std::ranges::find_if(some.rows, [](const auto& row) {
    return row.first.name.ends_with(kAdds);
  });
  ASSERT_NE(adds, some.rows.end());
  some.rows.erase(adds);
  const Pricer by_some(graph, cluster, &some);
  EXPECT_EQ(seconds_of(by_some, "mbs=2"), (std::set<double>{0.25, 0.5}));
  const Pricer by_writing(graph, cluster, &writing);
  EXPECT_EQ(seconds_of(by_writing, "mbs=2"), (std::set<double>{0.25}));
}

// The first task of `kernel`, in seconds, and by what.
TaskCost CostOf(const Pricer& pricer, const TaskGraph& tasks,
                std::string_view kernel) {
  const std::vector<TaskCost> costs = PriceTasks(pricer, tasks);
  for (size_t t = 0; t < costs.size(); ++t) {
    if (tasks.tasks[t].kernel == kernel) return costs[t];
  }
  return {};
}

// Half of the rows take half of the time. Far from what was measured, the bytes
// of all that the kernel does count: a sum of two matrices reads two and writes
// one, and the norm behind it, by itself, reads one and writes one; together
// they read two and write two.
TEST(FuseNodes, OtherSizesArePricedAsAWhole) {
  const Graph graph = ModelOf("llama-2-7b/config.json");
  const Cluster cluster = MakeCluster("dgx-h200:1x1").value();
  const auto tasks_of = [&](const char* strategy) {
    const Plan plan =
        PlanFromStrategy(graph, cluster, ParseStrategy(strategy).value())
            .value();
    return Lower(graph, cluster, plan, TrainingOptions{});
  };
  const TaskGraph four = tasks_of("mbs=4");
  const TaskGraph two = tasks_of("mbs=2");
  const Pricer all(graph, cluster, nullptr, {.all_fused = true});
  ProfileDb near;
  ProfileDb far;
  for (ProfileKey key : ProfileKeysOf(all, four)) {
    if (key.name != "add+rms_norm") continue;
    near.rows[key] = {.median_s = 0.25, .samples = 20};
    key.extents[0] *= 1000;
    far.rows[key] = {.median_s = 0.25, .samples = 20};
  }
  const Pricer by_near(graph, cluster, &near);
  EXPECT_EQ(CostOf(by_near, two, "add").source, CostSource::kInterpolated);
  EXPECT_EQ(CostOf(by_near, two, "add").duration, Duration::FromSeconds(0.125));

  const Pricer by_far(graph, cluster, &far);
  const Pricer singly(graph, cluster, nullptr);
  const TaskCost fused = CostOf(by_far, four, "add");
  EXPECT_EQ(fused.source, CostSource::kAnalytical);
  const DeviceType& device = cluster.device_types[0];
  const double overhead = device.launch_overhead.seconds();
  const double matrix =
      (CostOf(singly, four, "add").duration.seconds() - overhead) / 3;
  EXPECT_NEAR(fused.duration.seconds() - overhead, 4 * matrix, 0.01 * matrix);
}

}  // namespace
}  // namespace tessera
