// The evaluator against lowering and simulating the whole step: the same step
// time to the picosecond and the same memory to the byte, on random plans.
// Where GPUs meet at a switch and have their own way out of the host, sharing
// links adds at most 3 %; in a cube mesh of NVLinks, or where ranks share the
// memory of a host, it may add more.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <fstream>
#include <map>
#include <set>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/memory/overhead.h"
#include "costmodel/memory/peak_memory.h"
#include "costmodel/simulate/simulator.h"
#include "planner/base/rng.h"
#include "planner/io/importer.h"
#include "planner/lower/file_layout.h"
#include "planner/lower/lower.h"
#include "planner/plan/describe.h"
#include "planner/plan/rooted.h"
#include "planner/plan/stages.h"
#include "planner/plan/strategy.h"
#include "planner/search/move.h"
#include "planner/search/search_space.h"
#include "planner/topology/stacks.h"
#include "planner/topology/topologies.h"
#include "tests/support/paths.h"
#include "tests/support/temp_path.h"

namespace tessera {
namespace {

constexpr int kPlansPerCase = 25;

std::string WriteConfig(const std::string& name, const std::string& text) {
  const std::string path = TempPath(name);
  std::ofstream(path) << text;
  return path;
}

Graph Model(const std::string& path, DType dtype) {
  ImportOptions options;
  options.global_batch = 32;
  options.seq_len = 64;
  options.dtype = dtype;
  auto forward = ImportModel(path, options);
  TESSERA_CHECK(forward.has_value()) << forward.error().ToString();
  auto graph = Differentiate(*forward);
  TESSERA_CHECK(graph.has_value()) << graph.error().ToString();
  return *graph;
}

Graph Gpt2() {
  return Model(ExamplePath("models/gpt2-tiny/config.json"), DType::kFloat32);
}

// Grouped queries, no biases, 16-bit weights with masters.
Graph Llama(DType dtype) {
  static const std::string path = WriteConfig("llama_config.json", R"({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama",
    "hidden_act": "silu", "hidden_size": 128, "intermediate_size": 256,
    "max_position_embeddings": 128, "num_attention_heads": 8,
    "num_hidden_layers": 5, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": false,
    "vocab_size": 512, "initializer_range": 0.02})");
  return Model(path, dtype);
}

// Experts, an auxiliary loss, a tied head.
Graph Mixtral(DType dtype) {
  return Model(ExamplePath("models/mixtral-tiny/config.json"), dtype);
}

// Convolutions, batch norms, residuals.
Graph ResNet(DType dtype) {
  return Model("zoo:resnet-tiny", dtype);
}

// Bidirectional attention, two losses.
Graph Bert() {
  return Model(ExamplePath("models/bert-tiny/config.json"), DType::kFloat32);
}

// A result that all layers behind it read.
Graph T5(DType dtype) {
  return Model(ExamplePath("models/t5-tiny/config.json"), dtype);
}

// Seven layers of a decoder: several are alike that are no neighbours of its
// ends.
Graph DeepT5() {
  const auto layers = ParseJson("{\"encoder\": 2, \"decoder\": 7}");
  ImportOptions options;
  options.global_batch = 16;
  options.seq_len = 32;
  options.dtype = DType::kBFloat16;
  options.overrides = {{"num_layers", layers->Field("encoder")},
                       {"num_decoder_layers", layers->Field("decoder")}};
  return Differentiate(
             ImportModel(ExamplePath("models/t5-tiny/config.json"), options)
                 .value())
      .value();
}

int Pick(Rng& rng, std::initializer_list<int> choices) {
  return choices.begin()[rng.Below(static_cast<uint32_t>(choices.size()))];
}

std::optional<Plan> RandomStrategy(const Graph& graph, const Cluster& cluster,
                                   Rng& rng) {
  const bool has_experts = GraphIndex(graph).has_experts;
  Strategy strategy;
  strategy.tp = Pick(rng, {1, 2, 4});
  strategy.pp = Pick(rng, {1, 2, 3, 4});
  strategy.cp = Pick(rng, {1, 1, 2});
  strategy.cp_kind = std::array{"gather", "ulysses", "ring"}[rng.Below(3)];
  strategy.zigzag = strategy.cp > 1 && strategy.cp_kind != "ulysses" &&
                    Pick(rng, {0, 1}) == 1;
  if (has_experts) strategy.ep = Pick(rng, {1, 2, 4});
  strategy.mbs = Pick(rng, {1, 2, 4});
  strategy.zero = Pick(rng, {0, 1, 2, 3});
  strategy.zero_group = Pick(rng, {0, 0, 2, Strategy::kWithinNode});
  strategy.bucket = {Pick(rng, {0, 1, 100'000, 1'000'000})};
  strategy.prefetch = Pick(rng, {0, 1, 1, 2, 5});
  strategy.tiles = Pick(rng, {1, 1, 1, 2, 3});
  if (!cluster.hosts.empty() && Pick(rng, {0, 0, 0, 1}) == 1) {
    strategy.parameter_tier = static_cast<MemoryTier>(Pick(rng, {0, 1, 2}));
    strategy.optimizer_tier = static_cast<MemoryTier>(Pick(rng, {0, 1, 2}));
    strategy.activation_tier = static_cast<MemoryTier>(Pick(rng, {0, 1, 2}));
    if (strategy.optimizer_tier != MemoryTier::kDevice) {
      strategy.gradient_tier = static_cast<MemoryTier>(Pick(rng, {0, 1}));
    }
  }
  strategy.sp = strategy.tp > 1 && Pick(rng, {0, 1}) == 1;
  strategy.recompute = static_cast<RecomputeLevel>(Pick(rng, {0, 0, 1, 2}));
  strategy.recompute_layers = Pick(rng, {0, 2});
  if (strategy.pp > 1) strategy.vp = Pick(rng, {1, 1, 2});
  const auto schedules =
      SchedulesFor({.stages = strategy.pp, .chunks = strategy.vp});
  strategy.schedule =
      schedules[rng.Below(static_cast<uint32_t>(schedules.size()))]->name;
  auto plan = PlanFromStrategy(graph, cluster, strategy);
  if (!plan) return std::nullopt;
  return *plan;
}

// Moves one axis of one operator to another factor, or off it.
void PerturbOps(const Graph& graph, const Cluster& cluster, Plan& plan,
                Rng& rng) {
  for (int tries = 0; tries < 12; ++tries) {
    Plan candidate = plan;
    const size_t n = rng.Below(static_cast<uint32_t>(plan.ops.size()));
    OpPlacement& op = candidate.ops[n];
    const DeviceGroup& group = plan.groups[op.group.index()];
    if (group.axes.empty()) continue;
    const AxisSet axis = AxisSet{1}
                         << rng.Below(static_cast<uint32_t>(group.axes.size()));
    for (AxisSet& axes : op.axes) axes &= ~axis;
    const auto factors =
        static_cast<uint32_t>(graph.nodes[n].rule.factors.size());
    const uint32_t f = rng.Below(factors + 1);
    if (f < factors) op.axes[f] |= axis;
    if (Validate(graph, cluster, candidate).empty()) plan = candidate;
  }
}

void PerturbByMoves(const SearchSpace& space, Plan& plan, Rng& rng) {
  ASSERT_TRUE(MakeCanonical(space, plan));
  for (int i = 0; i < 6; ++i) {
    if (auto next = DrawMove(Moves(), rng).Propose(plan, space, rng)) {
      plan = next->plan;
    }
  }
}

// The most bytes that a device of each set keeps on a tier off the device at
// once: for every task, what has been touched and will be, or persists.
std::vector<Bytes> PeaksOn(MemoryTier tier, const TaskGraph& tasks) {
  std::vector<Bytes> peaks;
  for (const DeviceSet& set : DeviceSets(tasks.plan_groups())) {
    std::map<ValueId, std::pair<size_t, size_t>> lives;
    for (size_t v = 0; v < tasks.values.size(); ++v) {
      if (tasks.values[v].persistent && !tasks.values[v].alias_of.valid()) {
        lives[ValueId(v)] = {0, tasks.tasks.size()};
      }
    }
    for (size_t t = 0; t < tasks.tasks.size(); ++t) {
      for (const auto* ids : {&tasks.tasks[t].reads, &tasks.tasks[t].writes}) {
        for (ValueId id : *ids) {
          const ValueId root = tasks.Root(id);
          if (tasks.value(root).persistent) continue;
          lives.try_emplace(root, t, t).first->second.second = t;
        }
      }
    }
    std::vector<int64_t> change(tasks.tasks.size() + 2);
    for (const auto& [id, life] : lives) {
      const Value& value = tasks.value(id);
      if (value.tier != tier || !Holds(set, value.group)) continue;
      const Bytes held = LargestBytes(tasks, id);
      const int64_t bytes =
          (tier == MemoryTier::kFile ? WholeFileBlocks(held) : held).value;
      change[life.first] += bytes;
      change[life.second + 1] -= bytes;
    }
    int64_t held = 0;
    int64_t most = 0;
    for (int64_t bytes : change) most = std::max(most, held += bytes);
    peaks.push_back({most});
  }
  return peaks;
}

struct Case {
  const char* name;
  Graph (*graph)();
  const char* cluster;
  double tolerance;  // of what sharing links may add
  TrainingOptions options = {};
  const char* stack = "tessera";
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

// Whether every microbatch writes one persistent buffer on several streams: a
// shard of a weight's gradient whose terms are reduced over different axes,
// each added on the stream that reduced it (ZeRO-2). A fold follows such a
// buffer through one stream only.
bool AddsShardsOnSeveralStreams(const TaskGraph& tasks) {
  if (tasks.microbatches == 1) return false;
  const std::vector<int> streams = StreamsOf(tasks);
  std::map<ValueId, std::map<int, std::set<int>>> written;
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    const Task& task = tasks.tasks[t];
    if (task.microbatch < 0) continue;
    for (ValueId id : task.writes) {
      const ValueId root = tasks.Root(id);
      if (!tasks.value(root).persistent) continue;
      written[root][task.microbatch].insert(streams[t]);
    }
  }
  return std::ranges::any_of(written, [&](const auto& value) {
    return std::ranges::count_if(value.second, [](const auto& microbatch) {
             return microbatch.second.size() > 1;
           }) == tasks.microbatches;
  });
}

class EvaluatorVsSimulator : public ::testing::TestWithParam<Case> {};

TEST_P(EvaluatorVsSimulator, Agree) {
  const Case& c = GetParam();
  const Graph graph = c.graph();
  Cluster cluster = MakeCluster(c.cluster).value();
  cluster.stack = ParseStack(c.stack).value();
  const TrainingOptions& options = c.options;
  Rng rng(7);
  const Evaluator evaluator(graph, cluster, nullptr, options);
  const SearchSpace space(graph, cluster);
  double worst = 0;
  int pipelines = 0;
  // Stages of several groups, roots, offloading, shards on several streams.
  int not_folded = 0;
  std::set<Duration> times;
  for (int made = 0; made < kPlansPerCase;) {
    auto plan = RandomStrategy(graph, cluster, rng);
    if (!plan) continue;
    if (made % 3 == 1) PerturbOps(graph, cluster, *plan, rng);
    if (made % 3 == 2) PerturbByMoves(space, *plan, rng);
    const auto errors = Validate(graph, cluster, *plan);
    ASSERT_TRUE(errors.empty()) << errors[0].ToString();
    ++made;
    const int stages = StagesOf(graph, *plan).count();
    const TaskGraph tasks = Lower(graph, cluster, *plan, options);
    pipelines += stages > 1;
    not_folded += AddsShardsOnSeveralStreams(tasks) ||
                  stages < std::ssize(plan->groups) || UsesRoot(*plan) ||
                  Uses(*plan, MemoryTier::kHost) ||
                  Uses(*plan, MemoryTier::kFile);
    const std::string text =
        std::to_string(made) + ": " + Describe(graph, cluster, *plan);
    const Evaluation fast = evaluator.Evaluate(*plan);
    const Timeline exact =
        Simulate(evaluator.pricer(), tasks, {.share_links = false});
    EXPECT_EQ(fast.step_time.picoseconds, exact.step_time.picoseconds) << text;
    // What Task::like says of prices.
    TaskGraph alone = tasks;
    for (Task& task : alone.tasks) task.like = TaskId();
    EXPECT_EQ(PriceTasks(evaluator.pricer(), tasks),
              PriceTasks(evaluator.pricer(), alone))
        << text;
    std::vector<MemoryUse> memory = PeakMemory(tasks);
    const std::vector<DeviceSet> sets = DeviceSets(plan->groups);
    const std::vector<int> communicators =
        CommunicatorsOf(GraphIndex(graph), *plan, sets);
    for (size_t s = 0; s < sets.size(); ++s) {
      AddOverhead(cluster.stack, options, graph.dtype, communicators[s],
                  memory[s]);
    }
    EXPECT_EQ(fast.memory, memory) << text;
    if (!fast.host_memory.empty()) {
      const std::vector<Bytes> in_hosts = PeaksOn(MemoryTier::kHost, tasks);
      const std::vector<Bytes> in_files = PeaksOn(MemoryTier::kFile, tasks);
      const bool moves = std::ranges::any_of(tasks.values, [](const Value& v) {
        return v.tier == MemoryTier::kFile && !v.persistent;
      });
      ASSERT_EQ(fast.host_memory.size(), sets.size());
      ASSERT_EQ(fast.file_memory.size(), sets.size());
      for (size_t s = 0; s < sets.size(); ++s) {
        EXPECT_EQ(fast.host_memory[s].total, in_hosts[s]) << text;
        // Between what comes and goes in a file there may be gaps.
        const auto in_file =
            static_cast<double>(fast.file_memory[s].total.value);
        const auto peak = static_cast<double>(in_files[s].value);
        EXPECT_GE(in_file, peak) << text;
        EXPECT_LE(in_file, moves ? 1.25 * peak : peak) << text;
      }
    }
    EXPECT_TRUE(fast.feasible()) << text << ": " << fast.violations[0];
    EXPECT_EQ(fast.overflow, Bytes{}) << text;
    times.insert(fast.step_time);
    const Timeline shared = Simulate(evaluator.pricer(), tasks);
    EXPECT_GE(shared.step_time, exact.step_time) << text;
    const double error =
        shared.step_time.seconds() / fast.step_time.seconds() - 1;
    worst = std::max(worst, error);
    EXPECT_LE(error, c.tolerance) << text;
    EXPECT_EQ(BreakdownOf(tasks, exact).total(), exact.step_time) << text;
    // A second evaluator, which remembers nothing, gives the same bits.
    if (made % 8 == 0) {
      const Evaluator fresh(graph, cluster, nullptr, options);
      EXPECT_EQ(fresh.Evaluate(*plan), fast) << text;
    }
  }
  // The plans are of many kinds, and only those that are not folded had to be
  // simulated.
  EXPECT_GT(pipelines, kPlansPerCase / 8);
  EXPECT_GT(times.size(), kPlansPerCase / 2u);
  EXPECT_EQ(evaluator.simulated(), not_folded);
  RecordProperty("worst_sharing_percent", std::to_string(100 * worst));
}

INSTANTIATE_TEST_SUITE_P(
    RandomPlans, EvaluatorVsSimulator,
    ::testing::Values(
        Case{"gpt2_a100", Gpt2, "dgx-a100-80gb:1", 0.03},
        Case{"gpt2_a100_two_nodes", Gpt2, "dgx-a100-80gb:2", 0.03},
        Case{"llama_h100_two_half_nodes",
             [] { return Llama(DType::kBFloat16); }, "dgx-h100:2x4", 0.03},
        Case{"llama_a100_four_nodes", [] { return Llama(DType::kBFloat16); },
             "dgx-a100-80gb:4x2", 0.03},
        Case{"gpt2_cpu", Gpt2, "local-cpu:4", 0.2},
        Case{"llama_cpu", [] { return Llama(DType::kFloat32); }, "local-cpu:8",
             0.2},
        Case{"bert_cpu", Bert, "local-cpu:4", 0.2},
        Case{"t5_cpu", [] { return T5(DType::kFloat32); }, "local-cpu:8", 0.2},
        Case{"t5_a100", [] { return T5(DType::kBFloat16); }, "dgx-a100-80gb:2",
             0.2},
        Case{"t5_deep", DeepT5, "dgx-a100-80gb:2x4", 0.2},
        Case{"llama_sgd_unclipped",
             [] { return Llama(DType::kFloat64); },
             "dgx-h100:1",
             0.03,
             {.optimizer = "sgd", .clip = 0}},
        Case{"llama_momentum",
             [] { return Llama(DType::kBFloat16); },
             "dgx-a100-80gb:1",
             0.03,
             {.optimizer = "momentum"}},
        Case{"llama_adafactor",
             [] { return Llama(DType::kBFloat16); },
             "dgx-a100-80gb:1",
             0.03,
             {.optimizer = "adafactor"}},
        Case{"mixtral_adafactor_cpu",
             [] { return Mixtral(DType::kFloat32); },
             "local-cpu:8",
             0.2,
             {.optimizer = "adafactor"}},
        Case{"gpt2_unlike_hosts", Gpt2, "dgx-a100-40gb:1x4+titan-rtx-pair:2",
             0.5},
        Case{"gpt2_v100", Gpt2, "dgx1-v100-32gb:1", 0.2},
        Case{"mixtral_a100", [] { return Mixtral(DType::kBFloat16); },
             "dgx-a100-80gb:2", 0.03},
        Case{"mixtral_cpu", [] { return Mixtral(DType::kFloat32); },
             "local-cpu:8", 0.2},
        Case{"llama_v100", [] { return Llama(DType::kFloat16); },
             "dgx1-v100-32gb:2x4", 0.2},
        // Scaled gradients need their norm, clipped or not.
        Case{"llama_fp16_unclipped",
             [] { return Llama(DType::kFloat16); },
             "dgx1-v100-32gb:2x4",
             0.2,
             {.clip = 0}},
        Case{"resnet_a100", [] { return ResNet(DType::kBFloat16); },
             "dgx-a100-80gb:2", 0.03},
        Case{"resnet_cpu", [] { return ResNet(DType::kFloat32); },
             "local-cpu:8", 0.2},
        // Stacks whose every figure counts, and whose streams are one.
        Case{"llama_stack",
             [] { return Llama(DType::kBFloat16); },
             "dgx-h100:2",
             1,
             {},
             "pytorch-eager-2022,host=2e-6,tensor-exposed=0.4,sharded=5e9,"
             "fuse-elementwise=1,products=fp8,traffic=1.5"},
        Case{"mixtral_stack",
             [] { return Mixtral(DType::kBFloat16); },
             "dgx-h100:2",
             1,
             {},
             "megatron-core-2024,experts-exposed=0.5,experts-once-per-host=1"},
        // Values of other sizes than their types', scratch.
        Case{"gpt2_fp16_stack",
             [] {
               return Model(ExamplePath("models/gpt2-tiny/config.json"),
                            DType::kFloat16);
             },
             "dgx1-v100-32gb:2x4",
             1,
             {},
             "megatron-2021,whole-gradients=1,zero-bucket=1e6,"
             "host-per-shard=1e-6"},
        Case{"llama_stack_without_logits",
             [] { return Llama(DType::kBFloat16); },
             "dgx-a100-80gb:1",
             1,
             {},
             "torchtitan-2024,keep-logits=never,attention=unfused"},
        Case{"gpt2_stack", Gpt2, "dgx-a100-80gb:1", 1, {}, "megatron-2021"}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace tessera
