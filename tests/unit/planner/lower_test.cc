// Layouts and communication that must come out by derivation, from index rules
// alone: nothing in the lowering knows these techniques by name.

#include "planner/lower/lower.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "planner/io/cluster_io.h"
#include "planner/io/importer.h"
#include "planner/plan/strategy.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

struct Lowered {
  Graph graph;
  Plan plan;
  TaskGraph tasks;
};

Lowered LowerTiny(const std::string& strategy_text, double clip = 1,
                  const std::string& model = "gpt2-tiny",
                  DType dtype = DType::kFloat32,
                  const std::string& optimizer = "adamw") {
  ImportOptions options;
  options.global_batch = 16;
  options.seq_len = 32;
  options.dtype = dtype;
  auto forward = ImportModel(ExamplePath("models/" + model), options);
  Lowered lowered{*Differentiate(*forward), {}, {}};
  const Cluster cluster = *LoadCluster("local-cpu:4");
  const auto strategy = ParseStrategy(strategy_text);
  EXPECT_TRUE(strategy.has_value()) << strategy.error().ToString();
  auto plan = PlanFromStrategy(lowered.graph, cluster, *strategy);
  EXPECT_TRUE(plan.has_value()) << plan.error().ToString();
  lowered.plan = *plan;
  TrainingOptions training;
  training.clip = clip;
  training.optimizer = optimizer;
  lowered.tasks = Lower(lowered.graph, cluster, lowered.plan, training);
  return lowered;
}

// Collectives of one microbatch that move a layer's activations or their
// gradients: those whose tensor belongs to the second layer.
std::map<std::pair<Pass, CommKind>, int> LayerCollectives(const Lowered& l) {
  std::map<TensorId, int> block_of;
  for (const Node& node : l.graph.nodes) {
    for (TensorId id : node.results) block_of[id] = node.block;
  }
  std::map<std::pair<Pass, CommKind>, int> counts;
  for (const Task& task : l.tasks.tasks) {
    if (task.kind != TaskKind::kComm || task.microbatch != 0) continue;
    const Value& value = l.tasks.value(task.reads[0]);
    if (!value.tensor.valid() || value.category == MemoryCategory::kGradient) {
      continue;
    }
    // The second layer; a gradient of its input is produced in it too.
    if (block_of[value.tensor] == 2) ++counts[{task.pass, task.comm}];
  }
  return counts;
}

int Count(const TaskGraph& tasks, TaskKind kind) {
  int n = 0;
  for (const Task& task : tasks.tasks) n += task.kind == kind;
  return n;
}

TEST(Lower, MegatronBlockHasTwoAllReducesEachWay) {
  // Shoeybi et al. 2019, figure 4: f and g of the MLP and of attention.
  const auto counts = LayerCollectives(LowerTiny("tp=4,mbs=4"));
  EXPECT_EQ(counts.at({Pass::kForward, CommKind::kAllReduce}), 2);
  EXPECT_EQ(counts.at({Pass::kBackward, CommKind::kAllReduce}), 2);
  EXPECT_EQ(counts.size(), 2u);
}

TEST(Lower, SequenceParallelismGathersAndScattersEachWay) {
  // Korthikanti et al. 2022, figure 5. What the column-parallel layers read is
  // saved as produced (sharded), so backward gathers it again: two more.
  const auto counts = LayerCollectives(LowerTiny("tp=4,sp=1,mbs=4"));
  EXPECT_EQ(counts.at({Pass::kForward, CommKind::kAllGather}), 2);
  EXPECT_EQ(counts.at({Pass::kForward, CommKind::kReduceScatter}), 2);
  EXPECT_EQ(counts.at({Pass::kBackward, CommKind::kAllGather}), 4);
  EXPECT_EQ(counts.at({Pass::kBackward, CommKind::kReduceScatter}), 2);
  EXPECT_EQ(counts.size(), 4u);
}

TEST(Lower, ContextParallelismGathersKeysAndValues) {
  // k and v gathered forward and again backward (saved as produced); dk and
  // dv reduce-scattered.
  const auto counts = LayerCollectives(LowerTiny("cp=4,mbs=4"));
  EXPECT_EQ(counts.at({Pass::kForward, CommKind::kAllGather}), 2);
  EXPECT_EQ(counts.at({Pass::kBackward, CommKind::kAllGather}), 2);
  EXPECT_EQ(counts.at({Pass::kBackward, CommKind::kReduceScatter}), 2);
  EXPECT_EQ(counts.size(), 3u);
}

TEST(Lower, RingPassesKeysAndValuesOnEachWay) {
  // Liu et al. 2023: k and v (one exchange) go to 3 other ranks, forward and
  // again backward; dk and dv follow them and come home: 3 + 1.
  const auto counts = LayerCollectives(LowerTiny("cp=4,cp-kind=ring,mbs=4"));
  EXPECT_EQ(counts.at({Pass::kForward, CommKind::kShift}), 3);
  EXPECT_EQ(counts.at({Pass::kBackward, CommKind::kShift}), 3 + 4);
  EXPECT_EQ(counts.size(), 2u);
}

// The most blocks of a tensor that a microbatch has at a time, but for those
// that are kept from one pass to the other.
int MostBlocks(const Lowered& l, const std::string& tensor, Pass pass) {
  const std::vector<std::vector<ValueId>> last = LastUses(l.tasks);
  std::set<ValueId> alive;
  size_t most = 0;
  for (size_t t = 0; t < l.tasks.tasks.size(); ++t) {
    const Task& task = l.tasks.tasks[t];
    for (ValueId id : task.writes) {
      const Value& value = l.tasks.value(id);
      if (task.pass == pass && value.tensor.valid() && task.microbatch == 0 &&
          l.graph.tensor(value.tensor).name == tensor &&
          value.category == MemoryCategory::kCommunication) {
        alive.insert(id);
      }
    }
    most = std::max(most, alive.size());
    for (ValueId id : last[t]) alive.erase(id);
  }
  return static_cast<int>(most);
}

TEST(Lower, RingHasTwoBlocksOfKeysInsteadOfAll) {
  const Lowered l = LowerTiny("cp=4,cp-kind=ring,mbs=4");
  // The one that is read and the one that arrives.
  EXPECT_EQ(MostBlocks(l, "h.1.attn.c_attn.k", Pass::kForward), 2);
  EXPECT_EQ(MostBlocks(l, "h.1.attn.c_attn.k", Pass::kBackward), 2);
  // Of the gradients what goes and what arrives, then that and a new term.
  EXPECT_EQ(MostBlocks(l, "h.1.attn.d1", Pass::kBackward), 2);
  // Of two ranks' blocks only the other one comes.
  const Lowered two = LowerTiny("cp=2,cp-kind=ring");
  EXPECT_EQ(MostBlocks(two, "h.1.attn.c_attn.k", Pass::kForward), 1);
}

TEST(Lower, RingOfBf16SumsInFp32) {
  const Lowered l =
      LowerTiny("cp=4,cp-kind=ring,mbs=4", 1, "gpt2-tiny", DType::kBFloat16);
  int sums = 0;
  for (const Task& task : l.tasks.tasks) {
    if (task.kind != TaskKind::kCompute || !task.node.valid() ||
        l.graph.node(task.node).op->streamed == 0) {
      continue;
    }
    for (ValueId id : task.writes) {
      EXPECT_EQ(l.tasks.value(id).dtype, DType::kFloat32);
      ++sums;
    }
  }
  // Two results forward and three backward, of 4 steps in 4 layers and 4
  // microbatches.
  EXPECT_EQ(sums, (2 + 3) * 4 * 4 * 4);
}

TEST(Lower, UlyssesExchangesFourTimesEachWay) {
  // Jacobs et al. 2023, section 3.1: q, k, v and the output, and their
  // gradients. The output is kept both by heads and by sequence.
  const auto counts = LayerCollectives(LowerTiny("cp=4,cp-kind=ulysses,mbs=4"));
  EXPECT_EQ(counts.at({Pass::kForward, CommKind::kAllToAll}), 4);
  EXPECT_EQ(counts.at({Pass::kBackward, CommKind::kAllToAll}), 4);
  EXPECT_EQ(counts.size(), 2u);
}

TEST(Lower, ExpertParallelismExchangesTokensTwiceEachWay) {
  // Lepikhin et al. 2020, section 3.3: to the experts and back. The scalar is
  // the auxiliary loss.
  const auto counts = LayerCollectives(LowerTiny("ep=4", 1, "mixtral-tiny"));
  EXPECT_EQ(counts.at({Pass::kForward, CommKind::kAllToAll}), 2);
  EXPECT_EQ(counts.at({Pass::kForward, CommKind::kAllReduce}), 1);
  EXPECT_EQ(counts.at({Pass::kBackward, CommKind::kAllToAll}), 2);
  EXPECT_EQ(counts.size(), 3u);
}

TEST(Lower, ExpertsReduceTheirGradientsOverTheirCopiesOnly) {
  const Lowered l = LowerTiny("dp=2,ep=2", 1, "mixtral-tiny");
  const AxisSet dp = 1;
  const AxisSet ep = 2;
  ASSERT_EQ(l.plan.groups[0].axes[1].name, "ep0");
  int experts = 0;
  for (const Task& task : l.tasks.tasks) {
    if (task.kind != TaskKind::kComm) continue;
    for (ValueId id : task.reads) {
      const Value& value = l.tasks.value(id);
      if (value.category != MemoryCategory::kGradient ||
          !value.tensor.valid()) {
        continue;
      }
      const std::string& name = l.graph.tensor(value.tensor).name;
      const bool of_expert = name.find(".experts.") != std::string::npos;
      EXPECT_EQ(task.axes, of_expert ? dp : dp | ep) << name;
      // Half of the experts on each rank.
      EXPECT_EQ(value.layout.dims[0], of_expert ? ep : 0u) << name;
      experts += of_expert;
    }
  }
  EXPECT_EQ(experts, 3 * 3) << "w1, w2 and w3 of three layers";
}

TEST(Lower, NormsAreSummedOverTensorRanksBeforeAllGradientsOverReplicas) {
  // Under sequence parallelism the gradients of norms, and of biases behind
  // sums of rows, are sums over the tensor ranks' tokens too. Behind the
  // reduction over replicas that sum would hold up the next layer's activations
  // on the tensor ranks' stream.
  for (const char* zero : {"1", "2"}) {
    const Lowered l =
        LowerTiny(std::string("dp=2,tp=2,sp=1,mbs=8,zero=") + zero);
    const auto& axes = l.plan.groups[0].axes;
    ASSERT_EQ(axes.size(), 2u);
    ASSERT_EQ(axes[0].name, "dp0");
    const AxisSet dp = 1;
    const AxisSet tp = 2;
    std::map<std::string, std::vector<std::pair<CommKind, AxisSet>>> order;
    std::set<size_t> of_layer;  // reductions of layer 1 over replicas
    for (size_t t = 0; t < l.tasks.tasks.size(); ++t) {
      const Task& task = l.tasks.tasks[t];
      if (task.kind != TaskKind::kComm) continue;
      for (ValueId id : task.reads) {
        const Value& value = l.tasks.value(id);
        if (value.category != MemoryCategory::kGradient ||
            !value.tensor.valid()) {
          continue;
        }
        const std::string& name = l.graph.tensor(value.tensor).name;
        if (!name.starts_with("h.1.")) continue;
        order[name].emplace_back(task.comm, task.axes);
        if (task.axes == dp) of_layer.insert(t);
      }
    }
    using Steps = std::vector<std::pair<CommKind, AxisSet>>;
    EXPECT_EQ(
        order.at("h.1.ln_1.weight"),
        (Steps{{CommKind::kAllReduce, tp}, {CommKind::kReduceScatter, dp}}))
        << zero;
    EXPECT_EQ(order.at("h.1.mlp.c_fc.weight"),
              (Steps{{CommKind::kReduceScatter, dp}}))
        << zero;
    EXPECT_EQ(of_layer.size(), 1u) << "one collective for the layer";
  }
}

TEST(Lower, DataParallelismReducesEachGradientOnce) {
  const Lowered l = LowerTiny("dp=4,mbs=1");
  std::map<TensorId, int> reduced;
  for (const Task& task : l.tasks.tasks) {
    if (task.kind != TaskKind::kComm) continue;
    for (ValueId id : task.reads) {
      const Value& value = l.tasks.value(id);
      if (value.tensor.valid() &&
          l.graph.tensor(value.tensor).kind == TensorKind::kWeight) {
        EXPECT_EQ(task.comm, CommKind::kAllReduce);
        EXPECT_EQ(task.microbatch, 3) << "gradients travel once, at the end";
        ++reduced[value.tensor];
      }
    }
  }
  EXPECT_EQ(reduced.size(), Weights(l.graph).size());
  for (const auto& [weight, times] : reduced) EXPECT_EQ(times, 1);
}

TEST(Lower, ZeroOneScattersGradientsAndGathersParameters) {
  const Lowered l = LowerTiny("dp=4,zero=1");
  int64_t scattered = 0;
  int64_t gathered = 0;
  for (const Task& task : l.tasks.tasks) {
    if (task.kind != TaskKind::kComm) continue;
    if (task.comm == CommKind::kReduceScatter) {
      scattered += static_cast<int64_t>(task.reads.size());
    }
    if (task.comm == CommKind::kAllGather) {
      gathered += static_cast<int64_t>(task.reads.size());
    }
  }
  const auto weights = static_cast<int64_t>(Weights(l.graph).size());
  EXPECT_EQ(scattered, weights);
  EXPECT_EQ(gathered, weights);
  // The optimizer's state is cut in four: m and v of 4 bytes over 4 ranks.
  int64_t state = 0;
  for (const Value& value : l.tasks.values) {
    if (value.category == MemoryCategory::kOptimizer) {
      state +=
          ElementsAt(value.layout, l.tasks.group(value.group), value.shape, 0) *
          SizeOf(value.dtype);
    }
  }
  EXPECT_NEAR(static_cast<double>(state),
              static_cast<double>(ParameterCount(l.graph)) * 8 / 4,
              1e-3 * static_cast<double>(ParameterCount(l.graph)));
}

// Of a rank of dp=2,tp=2,zero=1: every row and column that its shards lie in,
// whole on both replicas, and one mean for each matrix; of a vector its run.
TEST(Lower, AdafactorKeepsRowsAndColumns) {
  const Lowered l = LowerTiny("dp=2,tp=2,zero=1", 1, "gpt2-tiny",
                              DType::kFloat32, "adafactor");
  std::map<TensorId, std::map<std::string, int64_t>> kept;
  for (const Value& value : l.tasks.values) {
    if (value.category != MemoryCategory::kOptimizer) continue;
    kept[value.tensor][std::string(value.what)] +=
        ElementsAt(value.layout, l.tasks.group(value.group), value.shape, 0);
  }
  const auto forms = MatrixForms(l.graph);
  const std::vector<TensorId> weights = Weights(l.graph);
  int64_t matrices = 0;
  int64_t cut = 0;
  for (size_t w = 0; w < weights.size(); ++w) {
    const Shape& shape = l.graph.tensor(weights[w]).shape;
    const auto& state = kept[weights[w]];
    const std::string& name = l.graph.tensor(weights[w]).name;
    if (!forms[w]) {
      EXPECT_EQ(state.size(), 1u) << name;
      EXPECT_EQ(state.count("v"), 1u) << name;
      continue;
    }
    ++matrices;
    EXPECT_EQ(state.at("mean"), 1) << name;
    int64_t rows = 1;
    int64_t columns = 1;
    for (size_t d = 0; d < shape.size(); ++d) {
      (d < forms[w]->rows ? rows : columns) *= shape[d];
    }
    // Tensor parallelism cuts one of them, if any.
    const int64_t product = state.at("row") * state.at("column");
    EXPECT_TRUE(product == rows * columns || product == rows * columns / 2)
        << name;
    cut += product < rows * columns;
  }
  EXPECT_GT(matrices, 10);
  EXPECT_GT(cut, 10);
}

TEST(Lower, HybridShardingScattersWithinAndReducesShardsAcross) {
  // Two axes of two: state is cut over dp1 and repeated on dp0. Each gradient
  // is reduce-scattered within (4 bytes an element sent half), its shard
  // all-reduced across, and the parameter gathered within only.
  const Lowered l = LowerTiny("dp=4,zero=1,zero-group=2", 0);
  const AxisSet within = 0b10;
  const AxisSet across = 0b01;
  std::map<std::pair<CommKind, AxisSet>, size_t> moved;
  for (const Task& task : l.tasks.tasks) {
    if (task.kind != TaskKind::kComm) continue;
    const Value& value = l.tasks.value(task.reads[0]);
    if (!value.tensor.valid() ||
        l.graph.tensor(value.tensor).kind != TensorKind::kWeight) {
      continue;
    }
    moved[{task.comm, task.axes}] += task.reads.size();
    if (task.comm == CommKind::kAllReduce) {
      EXPECT_EQ(value.layout.flat, within) << "whole gradients cross";
    }
  }
  const size_t weights = Weights(l.graph).size();
  EXPECT_EQ(moved.size(), 3u);
  EXPECT_EQ((moved[{CommKind::kReduceScatter, within}]), weights);
  EXPECT_EQ((moved[{CommKind::kAllReduce, across}]), weights);
  EXPECT_EQ((moved[{CommKind::kAllGather, within}]), weights);
}

// The reductions of gradients of a step, each with its index among the tasks
// and the bytes of a rank.
struct Reduction {
  size_t task = 0;
  int64_t bytes = 0;
  size_t last_term = 0;  // the task that completed the last of its gradients
};
std::vector<Reduction> Reductions(const TaskGraph& tasks) {
  std::vector<Reduction> reductions;
  std::vector<size_t> writer(tasks.values.size(), 0);
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    const Task& task = tasks.tasks[t];
    if (task.kind == TaskKind::kComm && !task.optimizer &&
        tasks.value(task.reads[0]).category == MemoryCategory::kGradient) {
      Reduction& r = reductions.emplace_back();
      r.task = t;
      for (ValueId id : task.reads) {
        r.bytes += LargestBytes(tasks, id).value;
        r.last_term = std::max(r.last_term, writer[tasks.Root(id).index()]);
      }
    }
    for (ValueId id : task.writes) writer[tasks.Root(id).index()] = t;
  }
  return reductions;
}

TEST(Lower, BucketsAreReducedAsBackwardFillsThem) {
  // One for each of six blocks where nothing is said; one for each gradient
  // where any byte fills a bucket, right behind what completes it.
  const Lowered whole = LowerTiny("dp=4");
  EXPECT_EQ(Reductions(whole.tasks).size(), whole.graph.blocks.size());
  const Lowered each = LowerTiny("dp=4,bucket=1B");
  EXPECT_EQ(Reductions(each.tasks).size(), Weights(each.graph).size());
  for (const Reduction& r : Reductions(each.tasks)) {
    for (size_t t = r.last_term + 1; t < r.task; ++t) {
      EXPECT_NE(each.tasks.tasks[t].kind, TaskKind::kCompute)
          << "waits for more than its last gradient";
    }
  }
  // In between: a bucket is full or its block's last, and all bytes travel.
  const Lowered some = LowerTiny("dp=4,bucket=100kB");
  int64_t bytes = 0;
  size_t full = 0;
  for (const Reduction& r : Reductions(some.tasks)) {
    bytes += r.bytes;
    full += r.bytes >= 100'000;
  }
  EXPECT_EQ(bytes, ParameterCount(some.graph) * 4);
  EXPECT_GT(full, 0u);
  EXPECT_LE(Reductions(some.tasks).size(), full + some.graph.blocks.size());
}

TEST(Lower, PrefetchGathersSoManyBlocksAhead) {
  // Gathers of parameters before the first forward node of each block.
  for (int depth : {0, 1, 3}) {
    const Lowered l =
        LowerTiny("dp=4,zero=3,prefetch=" + std::to_string(depth));
    const int blocks = static_cast<int>(l.graph.blocks.size());
    std::vector<int> gathered_before(l.graph.blocks.size(), -1);
    int gathers = 0;
    for (const Task& task : l.tasks.tasks) {
      if (task.microbatch != 0 || task.pass != Pass::kForward) continue;
      if (task.kind == TaskKind::kComm) {
        gathers += l.tasks.value(task.writes[0]).what == "gathered";
      }
      if (!task.node.valid()) continue;
      int& before =
          gathered_before[static_cast<size_t>(l.graph.node(task.node).block)];
      if (before < 0) before = gathers;
    }
    for (int b = 0; b < blocks; ++b) {
      EXPECT_EQ(gathered_before[static_cast<size_t>(b)],
                std::min(b + depth + 1, blocks))
          << "block " << b << ", depth " << depth;
    }
  }
}

// The gathers of tiles, and the most bytes of gathered tiles at a time.
struct GatheredTiles {
  int gathers = 0;
  int64_t most = 0;
};

GatheredTiles GatheredTilesOf(const Lowered& l) {
  GatheredTiles gathered;
  const auto frees = LastUses(l.tasks);
  std::map<ValueId, int64_t> held;  // bytes
  int64_t now = 0;
  for (size_t t = 0; t < l.tasks.tasks.size(); ++t) {
    const Task& task = l.tasks.tasks[t];
    for (ValueId id : task.writes) {
      const Value& value = l.tasks.value(id);
      if (task.comm != CommKind::kAllGather || value.what != "gathered" ||
          task.kind != TaskKind::kComm || value.layout.tile.count == 1) {
        continue;
      }
      ++gathered.gathers;
      now += held[id] = LargestBytes(l.tasks, id).value;
    }
    gathered.most = std::max(gathered.most, now);
    for (ValueId id : frees[t]) {
      const auto it = held.find(id);
      if (it == held.end()) continue;
      now -= it->second;
      held.erase(it);
    }
  }
  EXPECT_TRUE(held.empty());
  return gathered;
}

TEST(Lower, TilesAreGatheredOneByOneAndReleased) {
  // The largest linears are those of the MLP: 256 * 1024 fp32, 1 MiB. One tile
  // of them is whole at a time, or two where one is gathered ahead. Each of a
  // layer's 6 linears gathers its tiles in both passes of 4 microbatches.
  constexpr int64_t kLargest = int64_t{4} * 256 * 1024;
  for (int tiles : {2, 4, 8}) {
    const std::string text = "dp=4,mbs=1,zero=3,tiles=" + std::to_string(tiles);
    const GatheredTiles one = GatheredTilesOf(LowerTiny(text + ",prefetch=0"));
    EXPECT_EQ(one.gathers, 2 * 4 * 4 * 6 * tiles);
    EXPECT_EQ(one.most, kLargest / tiles);
    const GatheredTiles two = GatheredTilesOf(LowerTiny(text + ",prefetch=1"));
    EXPECT_EQ(two.gathers, one.gathers);
    EXPECT_EQ(two.most, 2 * kLargest / tiles);
  }
}

TEST(Lower, TilesOfTheGradientAreReducedOneByOne) {
  // With ZeRO-2 no more than one tile of a weight's new gradient is whole.
  const Lowered l = LowerTiny("dp=4,mbs=1,zero=2,tiles=4");
  int reductions = 0;
  for (const Task& task : l.tasks.tasks) {
    if (task.kind != TaskKind::kComm || task.pass != Pass::kBackward ||
        l.tasks.value(task.reads[0]).layout.tile.count == 1 || task.optimizer) {
      continue;
    }
    ++reductions;
    EXPECT_EQ(task.comm, CommKind::kReduceScatter);
    EXPECT_EQ(task.reads.size(), 1u);
  }
  EXPECT_EQ(reductions, 4 * 4 * 6 * 4);
}

TEST(Lower, ActivationsLeaveOnceAndComeBackOnce) {
  const Lowered l = LowerTiny("dp=4,mbs=1,offload=activations:host");
  std::map<ValueId, int> out;  // by what lies on the host
  std::map<ValueId, int> in;
  for (const Task& task : l.tasks.tasks) {
    if (task.kind != TaskKind::kCopy) continue;
    for (size_t i = 0; i < task.reads.size(); ++i) {
      if (l.tasks.value(task.writes[i]).tier == MemoryTier::kHost) {
        ++out[task.writes[i]];
        // Not a second time under another name.
        ++out[task.reads[i]];
      } else {
        ++in[task.reads[i]];
      }
    }
  }
  EXPECT_FALSE(in.empty());
  EXPECT_EQ(out.size(), 2 * in.size());
  for (const auto& [id, copies] : out) EXPECT_EQ(copies, 1);
  for (const auto& [id, copies] : in) EXPECT_EQ(copies, 1);
}

TEST(Lower, RootedDataParallelismExchangesFiveTimesABatch) {
  // PyTorch's DataParallel: scatter the inputs (tokens and positions), gather
  // the logits, scatter their gradient, reduce the gradients and broadcast what
  // the root has updated; and the loss, which every rank reports.
  const Lowered l = LowerTiny("dp=4,mbs=4,dp-kind=rooted", 0);
  ASSERT_EQ(l.tasks.microbatches, 1);
  std::map<std::pair<CommKind, std::string>, size_t> moved;  // tensors
  for (const Task& task : l.tasks.tasks) {
    if (task.kind != TaskKind::kComm) continue;
    for (ValueId id : task.reads) {
      const TensorId tensor = l.tasks.value(id).tensor;
      const Tensor& t = l.graph.tensor(tensor);
      const std::string what = t.kind == TensorKind::kInput    ? "input"
                               : t.kind == TensorKind::kWeight ? "weight"
                               : tensor == l.graph.loss        ? "loss"
                               : t.kind == TensorKind::kGradient
                                   ? "logits' gradient"
                                   : "logits";
      ++moved[{task.comm, what}];
    }
  }
  const size_t weights = Weights(l.graph).size();
  const std::map<std::pair<CommKind, std::string>, size_t> expected = {
      {{CommKind::kScatter, "input"}, 2},
      {{CommKind::kGather, "logits"}, 1},
      {{CommKind::kScatter, "logits' gradient"}, 1},
      {{CommKind::kReduce, "weight"}, weights},
      {{CommKind::kBroadcast, "weight"}, weights},
      {{CommKind::kBroadcast, "loss"}, 1}};
  EXPECT_EQ(moved, expected);
  // The root alone has the optimizer's state, m and v of 4 bytes each.
  for (int position = 0; position < 4; ++position) {
    int64_t state = 0;
    for (const Value& value : l.tasks.values) {
      if (value.category != MemoryCategory::kOptimizer) continue;
      state += ElementsAt(value.layout, l.tasks.group(value.group), value.shape,
                          position) *
               SizeOf(value.dtype);
    }
    EXPECT_EQ(state, position == 0 ? ParameterCount(l.graph) * 8 : 0);
  }
}

TEST(Lower, ClippingCostsOneScalarAllReduce) {
  const Lowered with = LowerTiny("dp=2,tp=2", 1);
  const Lowered without = LowerTiny("dp=2,tp=2", 0);
  EXPECT_EQ(Count(with.tasks, TaskKind::kComm),
            Count(without.tasks, TaskKind::kComm) + 1);
}

TEST(Lower, PipelineSendsEachBoundaryOncePerMicrobatchEachWay) {
  // Stages 4: 3 boundaries, 16 microbatches of one sample, both ways; the tied
  // head's gradient travels home once and the updated table back once.
  const Lowered l = LowerTiny("pp=4");
  EXPECT_EQ(Count(l.tasks, TaskKind::kSend), 3 * 16 * 2 + 2);
  EXPECT_EQ(Count(l.tasks, TaskKind::kRecv), 3 * 16 * 2 + 2);
}

TEST(Lower, VocabularyParallelLossExchangesItsStateOnly) {
  // No rank gathers logits, only the state: 3 numbers a token and shard.
  const Lowered l = LowerTiny("tp=4,mbs=4");
  TensorId logits;
  for (const Node& node : l.graph.nodes) {
    if (node.op->name == "cross_entropy") logits = node.operands[0];
  }
  ASSERT_TRUE(logits.valid());
  int states = 0;
  for (const Task& task : l.tasks.tasks) {
    if (task.kind != TaskKind::kComm) continue;
    const Value& value = l.tasks.value(task.reads[0]);
    EXPECT_NE(value.tensor, logits);
    if (value.what != "state") continue;
    ++states;
    EXPECT_EQ(value.shape.back(), 3);
    EXPECT_EQ(task.comm, CommKind::kAllGather);
  }
  EXPECT_EQ(states, l.tasks.microbatches);
}

TEST(Lower, EmbeddingsAddTheirPartialSumsBeforeOneAllReduce) {
  // Both tables split by row, so that both lookups are partial sums: they are
  // added as they are. Splitting only one would reduce that one.
  Lowered l = LowerTiny("tp=4,mbs=4");
  size_t token = 0;
  size_t position = 0;
  for (size_t i = 0; i < l.plan.ops.size(); ++i) {
    if (l.graph.nodes[i].name == "wte") token = i;
    if (l.graph.nodes[i].name == "wpe") position = i;
  }
  ASSERT_NE(token, position);
  l.plan.ops[position] = l.plan.ops[token];
  const Cluster cluster = *LoadCluster("local-cpu:4");
  const TaskGraph tasks = Lower(l.graph, cluster, l.plan, TrainingOptions());
  int reduced = 0;
  for (const Task& task : tasks.tasks) {
    reduced += task.kind == TaskKind::kComm && task.microbatch == 0 &&
               task.comm == CommKind::kAllReduce && task.pass == Pass::kForward;
  }
  EXPECT_EQ(reduced, 1 + 2 * 4) << "one for the embeddings, two for a layer";
}

// Shapes of what a layer's forward leaves to backward, by the name of the node
// that made it; in one microbatch.
std::map<std::string, std::vector<Shape>> KeptByLayer(const Lowered& l,
                                                      int block) {
  std::map<ValueId, const Task*> writer;
  std::map<ValueId, const Task*> last_reader;
  for (const Task& task : l.tasks.tasks) {
    for (ValueId id : task.writes) writer.try_emplace(l.tasks.Root(id), &task);
    for (ValueId id : task.reads) last_reader[l.tasks.Root(id)] = &task;
  }
  std::map<std::string, std::vector<Shape>> kept;
  for (const auto& [id, task] : writer) {
    if (l.tasks.value(id).persistent || !task->node.valid() ||
        task->pass != Pass::kForward || task->microbatch != 0 ||
        l.graph.node(task->node).block != block || last_reader[id] == nullptr ||
        last_reader[id]->pass != Pass::kBackward) {
      continue;
    }
    kept[l.graph.node(task->node).name].push_back(l.tasks.value(id).shape);
  }
  return kept;
}

TEST(Lower, FullRecomputationKeepsOneResidualOfALayer) {
  // Samples of a microbatch 4, tokens 32, hidden size 256 of gpt2-tiny.
  const Lowered l = LowerTiny("dp=4,mbs=1,recompute=full:3");
  for (int block : {1, 2, 3}) {
    const auto kept = KeptByLayer(l, block);
    ASSERT_EQ(kept.size(), 1u);
    const std::vector<Shape> residual = {{4, 32, 256}};
    EXPECT_EQ(kept.begin()->second, residual) << kept.begin()->first;
  }
  // The fourth layer keeps all: two norms with mean and deviation, queries,
  // keys and values, attention with its log-sum-exp, two residuals, the MLP's
  // first layer and activation.
  size_t tensors = 0;
  for (const auto& [node, shapes] : KeptByLayer(l, 4)) tensors += shapes.size();
  EXPECT_EQ(tensors, 2u * 3 + 3 + 2 + 2 + 2);
}

TEST(Lower, SelectiveRecomputationDropsTheAttentionCore) {
  auto all = KeptByLayer(LowerTiny("dp=4,mbs=1"), 2);
  ASSERT_EQ(all.count("h.1.attn"), 1u);
  // 8 heads of 32 features; the log-sum-exp has one number a row.
  const std::vector<Shape> core = {{4, 32, 8, 1, 32}, {4, 32, 8, 1}};
  EXPECT_EQ(all["h.1.attn"], core);
  all.erase("h.1.attn");
  EXPECT_EQ(KeptByLayer(LowerTiny("dp=4,mbs=1,recompute=selective"), 2), all);
}

// Every task's dependencies and its stream's predecessors produce what it
// reads, for a plan that uses everything at once.
TEST(Lower, ReadsWhatWasWritten) {
  for (const char* text :
       {"dp=4", "tp=2,pp=2", "pp=2,dp=2,zero=1", "tp=2,dp=2,zero=1,sp=1",
        "cp=2,tp=2", "pp=4,schedule=gpipe", "dp=4,zero=3,prefetch=3",
        "dp=4,zero=2,zero-group=2,bucket=100kB", "tp=2,recompute=full",
        "zero=3,recompute=full", "tp=2,zero=3,tiles=3,recompute=full"}) {
    const Lowered l = LowerTiny(text);
    std::vector<bool> written(l.tasks.values.size(), false);
    for (const Task& task : l.tasks.tasks) {
      for (ValueId id : task.reads) {
        const ValueId root = l.tasks.Root(id);
        const MemoryCategory category = l.tasks.value(root).category;
        const bool initial = category == MemoryCategory::kParameter ||
                             category == MemoryCategory::kOptimizer;
        EXPECT_TRUE(initial || written[root.index()])
            << text << ": " << l.tasks.value(id).what;
      }
      for (ValueId id : task.writes) written[l.tasks.Root(id).index()] = true;
      for (size_t i = 1; i < task.deps.size(); ++i) {
        EXPECT_LT(task.deps[i - 1], task.deps[i]);
      }
    }
  }
}

TEST(Lower, GradientTermsOfATiedWeightMeetOnce) {
  const Lowered l = LowerTiny("pp=4");
  int sums = 0;
  for (const Task& task : l.tasks.tasks) {
    sums += task.kernel == "sum" && !task.node.valid();
  }
  EXPECT_EQ(sums, 1) << "one tied weight, added on its home group";
  EXPECT_EQ(l.tasks.groups.size(), 5u) << "four stages and the world";
}

}  // namespace
}  // namespace tessera
