#include "costmodel/validate/published_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <numeric>
#include <tuple>

#include "costmodel/validate/published_cluster.h"
#include "costmodel/validate/replay.h"
#include "planner/plan/strategy.h"
#include "planner/plan/validate.h"
#include "planner/topology/stacks.h"
#include "tests/support/temp_path.h"

namespace tessera {
namespace {

using testing::Contains;
using testing::HasSubstr;
using testing::IsEmpty;

// Row 1 of Korthikanti et al. 2022, Table 5: 22B on 8 A100.
PublishedRun Selene22B() {
  PublishedRun run;
  run.id = "x";
  run.source = "Korthikanti et al., arXiv 2205.05198";
  run.layers = 48;
  run.hidden = 6144;
  run.heads = 64;
  run.kv_heads = "64";
  run.ffn = "24576";
  run.ffn_kind = "gelu";
  run.vocab = 51200;
  run.seq = 2048;
  run.gpu = "A100-80GB-SXM (Selene DGX A100)";
  run.gpus = 8;
  run.gpus_per_node = 8;
  run.intra_link = "NVLink3/NVSwitch";
  run.inter_link = "HDR InfiniBand, 8 HCAs per node";
  run.global_batch = 4;
  run.micro_batch = 4;
  run.tp = 8;
  run.pp = 1;
  run.zero_stage = "0";
  run.seq_parallel = "yes";
  run.recompute = "selective";
  run.precision = "fp16 mixed";
  run.flash_attn = "no";
  run.time_s = 1.1;
  return run;
}

TEST(Network, IsReadFromWords) {
  const struct {
    const char* words;
    const char* link;
    double gbit_per_card;
    int cards;
  } cases[] = {
      {"8x HDR InfiniBand 200 Gb/s per node", "ib-hdr", 200, 8},
      {"HDR InfiniBand, 8 HCAs per node", "ib-hdr", 200, 8},
      {"800 Gb/s per node (config=800)", "ib-hdr", 100, 8},
      {"1600 Gbps per node RoCE", "roce-200g", 200, 8},
      {"4x 100 Gb/s RoCE per node", "roce-200g", 100, 4},
      {"NDR InfiniBand", "ib-ndr", 400, 8},
      {"EFA 3200 Gbps", "efa-4x100g", 400, 8},
      {"25 Gb/s Ethernet", "ena-25g", 25, 1},
      {"Omni-Path (Jean Zay)", "omni-path-100", 54, 1},
      {"GPUDirect-TCPX 1,000 Gb/s", "tcpx-200g", 250, 4},
  };
  for (const auto& c : cases) {
    const auto network = ReadNetwork(c.words, 8);
    ASSERT_TRUE(network) << c.words;
    EXPECT_EQ(network->link, c.link) << c.words;
    EXPECT_DOUBLE_EQ(network->gbit_per_card, c.gbit_per_card) << c.words;
    EXPECT_EQ(network->cards, c.cards) << c.words;
  }
  EXPECT_EQ(ReadNetwork("", 8), std::nullopt);
  EXPECT_EQ(ReadNetwork("RoCE RDMA (rate not stated)", 8), std::nullopt);
}

// Every GPU that the field uses gives a valid cluster, of one node and of two.
TEST(PublishedCluster, KnowsTheGpusOfTheField) {
  for (const char* gpu :
       {"P100",           "V100-16GB",  "V100-SXM2-32GB", "T4",
        "A10G-24GB",      "A40",        "A100",           "A100-40GB",
        "A100-PCIe-80GB", "A800-80GB",  "H100-80GB",      "H100-PCIe",
        "H800",           "H200-141GB", "B200",           "B300",
        "GB200",          "GB300",      "L40S",           "L4",
        "TITAN RTX 24GB", "RTX 4090"}) {
    for (const int gpus : {1, 2, 4, 8, 16}) {
      PublishedRun run = Selene22B();
      run.gpu = gpu;
      run.gpus = gpus;
      run.gpus_per_node = 8;
      run.intra_link = run.inter_link = "";
      std::vector<std::string> assumptions;
      const auto cluster = ClusterOf(run, assumptions);
      ASSERT_TRUE(cluster) << gpu << " " << cluster.error().ToString();
      EXPECT_THAT(Validate(*cluster), IsEmpty()) << gpu;
      EXPECT_EQ(std::ssize(cluster->devices), gpus) << gpu;
    }
  }
  PublishedRun run = Selene22B();
  run.gpu = "TPU v4";
  std::vector<std::string> assumptions;
  const auto cluster = ClusterOf(run, assumptions);
  ASSERT_FALSE(cluster);
  EXPECT_EQ(cluster.error().where, "gpu");
}

TEST(PublishedCluster, TakesTheRowsNetwork) {
  PublishedRun run = Selene22B();
  run.gpus = 16;
  run.inter_link = "4x 100 Gb/s RoCE per node";
  std::vector<std::string> assumptions;
  const auto cluster = ClusterOf(run, assumptions);
  ASSERT_TRUE(cluster);
  EXPECT_THAT(assumptions, IsEmpty());
  int cards = 0;
  for (const Vertex& vertex : cluster->vertices) {
    cards += vertex.kind == VertexKind::kNic;
  }
  EXPECT_EQ(cards, 2 * 4);
  // 92 % of 12.5 GB/s.
  EXPECT_THAT(
      cluster->link_types,
      Contains(testing::Field(&LinkType::bandwidth,
                              testing::Field(&BytesPerSecond::value,
                                             testing::DoubleNear(11.5e9, 1)))));
}

// Pythia's data lies on AWS: p4d.24xlarge has four cards of 100 Gb/s for eight
// A100-40GB.
TEST(PublishedCluster, KnowsTheSystemsOfSources) {
  PublishedRun run = Selene22B();
  run.source = "Pythia, arXiv 2304.01373 Table 5";
  run.gpu = "A100-40GB";
  run.gpus = 16;
  run.inter_link = "";
  std::vector<std::string> assumptions;
  const auto cards = [&] {
    const auto cluster = ClusterOf(run, assumptions);
    return std::ranges::count(cluster->vertices, VertexKind::kNic,
                              &Vertex::kind);
  };
  EXPECT_EQ(cards(), 2 * 4);
  EXPECT_THAT(assumptions, Contains(HasSubstr("4 x efa-100g")));
  run.inter_link = "8x HDR InfiniBand";
  EXPECT_EQ(cards(), 2 * 8);
}

TEST(Replay, MakesTheGraphAndTheStrategy) {
  const PublishedRun run = Selene22B();
  std::vector<std::string> assumptions;
  const auto strategy = StrategyOf(run, assumptions);
  ASSERT_TRUE(strategy) << strategy.error().ToString();
  EXPECT_EQ(ToString(*strategy),
            "dp1 tp8 pp1 mbs4 zero0 sp1 recompute selective");
  const auto graph = GraphOf(run, assumptions);
  ASSERT_TRUE(graph) << graph.error().ToString();
  int64_t parameters = 0;
  for (const Tensor& tensor : graph->tensors) {
    if (tensor.kind == TensorKind::kWeight) {
      parameters += std::accumulate(tensor.shape.begin(), tensor.shape.end(),
                                    int64_t{1}, std::multiplies<>());
    }
  }
  // 12 l h^2 (1 + 13/(12 h) + (V + s)/(12 l h)) (Narayanan et al. 2021, eq. 2),
  // and the last norm's 2 h.
  EXPECT_EQ(parameters, 48 * (12LL * 6144 * 6144 + 13LL * 6144) +
                            (51200LL + 2048) * 6144 + 2 * 6144);
}

// What has no model, batch or strategy is refused with its column.
TEST(Replay, RefusesWhatIsNotThere) {
  std::vector<std::string> assumptions;
  for (int64_t PublishedRun::*field :
       {&PublishedRun::layers, &PublishedRun::hidden, &PublishedRun::heads,
        &PublishedRun::seq, &PublishedRun::global_batch}) {
    PublishedRun run = Selene22B();
    run.ffn_kind = "swiglu";
    run.*field = 0;
    EXPECT_FALSE(GraphOf(run, assumptions));
  }
  PublishedRun run = Selene22B();
  run.tp = 3;
  EXPECT_EQ(StrategyOf(run, assumptions).error().where, "gpus");
  run = Selene22B();
  run.recompute = "sometimes";
  EXPECT_EQ(StrategyOf(run, assumptions).error().where, "recompute");
}

TEST(Replay, RefusesWhatContradictsItself) {
  const auto refused = [](const auto& change) {
    PublishedRun run = Selene22B();
    run.experts = 0;
    change(run);
    std::vector<std::string> assumptions;
    if (const auto strategy = StrategyOf(run, assumptions); !strategy) {
      return strategy.error().ToString();
    }
    const auto graph = GraphOf(run, assumptions);
    return graph ? std::string() : graph.error().ToString();
  };
  // 8 GPUs in groups of tp 8.
  EXPECT_EQ(refused([](PublishedRun& run) { run.dp = 1; }), "");
  EXPECT_EQ(refused([](PublishedRun& run) { run.dp = 0; }), "");
  EXPECT_EQ(refused([](PublishedRun& run) { run.dp = 3; }),
            "dp: is 3, but 8 GPUs are 1 times tp pp cp");
  EXPECT_EQ(refused([](PublishedRun& run) { run.ep = 1; }), "");
  EXPECT_EQ(refused([](PublishedRun& run) { run.ep = 4; }),
            "ep: is 4, but the model has no experts");
  EXPECT_EQ(refused([](PublishedRun& run) { run.topk = 1; }),
            "topk: is 1, but the model has no experts");
  EXPECT_EQ(refused([](PublishedRun& run) { run.zero_stage = "1.5"; }),
            "zero_stage: '1.5'");
  EXPECT_EQ(refused([](PublishedRun& run) { run.seq_parallel = "maybe"; }),
            "seq_parallel: 'maybe'");
  EXPECT_EQ(refused([](PublishedRun& run) { run.seq_parallel = ""; }), "");
  EXPECT_EQ(refused([](PublishedRun& run) { run.flash_attn = "perhaps"; }),
            "flash_attn: 'perhaps'");
  for (const char* words :
       {"", "yes", "no", "FA3", "Flash", "cudnn_flash_te", "SDPA",
        "flash-attn 2.5.8", "yes (TE/cuDNN fused)"}) {
    EXPECT_EQ(refused([&](PublishedRun& run) { run.flash_attn = words; }), "")
        << words;
  }
  // Of 6,144: a width of 6, and none.
  for (const int64_t heads : {1024, 7, 1'000'000}) {
    for (const char* kind : {"gelu", "swiglu"}) {
      EXPECT_EQ(refused([&](PublishedRun& run) {
                  run.heads = heads;
                  run.ffn_kind = kind;
                }),
                "heads: is " + std::to_string(heads) +
                    ": expected a divisor of hidden, 6144, that leaves each "
                    "head at least 8");
    }
  }
}

// What no model has is refused in the words of its column, however large.
TEST(Replay, RefusesAbsurdNumbers) {
  const auto refused = [](const auto& change) {
    PublishedRun run = Selene22B();
    change(run);
    std::vector<std::string> assumptions;
    const auto graph = GraphOf(run, assumptions);
    return graph ? std::string() : graph.error().ToString();
  };
  for (const char* ffn :
       {"9223372036854775807", "-9223372036854775807", "0", "1048577"}) {
    for (const char* kv_heads : {"64", "8"}) {  // grouped heads: a gated layer
      EXPECT_EQ(refused([&](PublishedRun& run) {
                  run.ffn = ffn;
                  run.kv_heads = kv_heads;
                }),
                "ffn: is " + std::string(ffn) +
                    ": expected a whole number from 1 to 1048576");
    }
  }
  EXPECT_EQ(refused([](PublishedRun& run) {
              run.kv_heads = "MLA";
              run.experts = 8;
              run.ffn =
                  "18432(dense first 3)/2048(expert)+"
                  "9223372036854775807(shared)";
            }),
            "ffn: is 9223372036854775807(shared): expected a whole number from "
            "1 to 1048576");
  EXPECT_EQ(
      refused([](PublishedRun& run) { run.global_batch = int64_t{1} << 31; }),
      "global_batch: is 2147483648: expected at most 2147483647");
}

// Its four models' printed sizes in thousand millions, with the embedding tied
// and 1,024 positions: 12 l h^2 + 13 l h + (V + 1024) h + 2 h.
TEST(Replay, ZeroBubblesVocabularyGivesItsModelsSizes) {
  for (const auto& [layers, hidden, size] :
       {std::tuple<int64_t, int64_t, double>{22, 2304, 1.5},
        {30, 4096, 6.2},
        {46, 5120, 14.6},
        {62, 6144, 28.3}}) {
    PublishedRun run = Selene22B();
    run.source = "Qi et al., Zero Bubble Pipeline Parallelism";
    run.layers = layers;
    run.hidden = hidden;
    run.ffn = "";
    run.vocab = 0;
    run.seq = 1024;
    std::vector<std::string> assumptions;
    const auto graph = GraphOf(run, assumptions);
    ASSERT_TRUE(graph);
    EXPECT_THAT(assumptions, Contains("vocabulary of 32000"));
    EXPECT_EQ(std::round(static_cast<double>(ParameterCount(*graph)) / 1e8),
              size * 10);
  }
}

// DeepSpeed's pipeline cuts activations, not their gradients, and has its
// buckets with one replica, too.
TEST(Replay, DeepSpeedsEngine) {
  std::vector<std::string> assumptions;
  PublishedRun run = Selene22B();
  EXPECT_EQ(StackOf(run, Stacks(), assumptions).split_sends,
            SplitSends::kAlways);
  run.source = "bigscience-workshop/bigscience experiments/gpt2.md";
  run.zero_stage = "";
  EXPECT_EQ(StackOf(run, Stacks(), assumptions).split_sends,
            SplitSends::kForward);
  EXPECT_EQ(StackOf(run, Stacks(), assumptions).memory.zero_bucket,
            Bytes{1'000'000'000});
  run.notes = "Megatron alone";
  EXPECT_EQ(StackOf(run, Stacks(), assumptions).split_sends,
            SplitSends::kAlways);
  EXPECT_EQ(StackOf(run, Stacks(), assumptions).memory.zero_bucket, Bytes{});
}

// JAX's save_qkv_proj keeps three products of a layer; what else a layer
// computes runs again.
TEST(Replay, FollowsPoliciesOfRecompute) {
  PublishedRun run = Selene22B();
  run.layers = 4;
  run.tp = 1;
  run.global_batch = 32;
  run.ffn_kind = "swiglu";
  run.recompute = "remat policy save_qkv_proj";
  std::vector<std::string> assumptions;
  const auto cluster = ClusterOf(run, assumptions);
  const auto strategy = StrategyOf(run, assumptions);
  const auto graph = GraphOf(run, assumptions);
  ASSERT_TRUE(cluster && strategy && graph);
  const GraphIndex index(*graph);
  auto plan = PlanFromStrategy(index, *cluster, *strategy);
  ASSERT_TRUE(plan) << plan.error().ToString();
  SetRecomputeOf(run, index, *plan);
  int again = 0;
  int kept = 0;
  for (const NodeId id : index.nodes_of_block[1]) {
    const std::string& name = graph->node(id).name;
    const bool qkv = name.ends_with("q_proj") || name.ends_with("k_proj") ||
                     name.ends_with("v_proj");
    EXPECT_EQ(plan->ops[id.index()].recompute, !qkv) << name;
    (plan->ops[id.index()].recompute ? again : kept) += 1;
  }
  EXPECT_EQ(kept, 3);
  EXPECT_GT(again, 8);
  EXPECT_THAT(Validate(*graph, *cluster, *plan), IsEmpty());

  // Of torchtitan's products every second: Megatron's would be its attention's.
  run.source = "pytorch/torchtitan benchmarks";
  run.recompute = "selective";
  auto operators = PlanFromStrategy(index, *cluster, *strategy);
  ASSERT_TRUE(operators);
  SetRecomputeOf(run, index, *operators);
  run.recompute = "selective (op)";
  auto named = PlanFromStrategy(index, *cluster, *strategy);
  ASSERT_TRUE(named);
  SetRecomputeOf(run, index, *named);
  EXPECT_EQ(operators->ops, named->ops);

  // Every other layer of the four.
  run.recompute = "every other layer";
  auto other = PlanFromStrategy(index, *cluster, *strategy);
  ASSERT_TRUE(other);
  SetRecomputeOf(run, index, *other);
  std::vector<bool> layers;
  for (int layer = 1; layer <= 4; ++layer) {
    layers.push_back(
        other->ops[index.nodes_of_block[static_cast<size_t>(layer)][0].index()]
            .recompute);
  }
  EXPECT_EQ(layers, (std::vector<bool>{true, false, true, false}));
}

TEST(Replay, ChoosesTheStackByTheRow) {
  std::vector<std::string> assumptions;
  PublishedRun run = Selene22B();
  EXPECT_EQ(StackOf(run, Stacks(), assumptions).name, "megatron-2021");
  EXPECT_EQ(StackOf(run, Stacks(), assumptions).attention,
            StackAttention::kUnfused);
  run.source = "someone's own runs";
  run.flash_attn = "yes";
  EXPECT_EQ(StackOf(run, Stacks(), assumptions).name, "megatron-core-2024");
  EXPECT_EQ(StackOf(run, Stacks(), assumptions).attention,
            StackAttention::kFused);
  run.precision = "MXFP8";
  EXPECT_EQ(StackOf(run, Stacks(), assumptions).products, ProductType::kFp8);
  run.zero_stage = "3 (FSDP)";
  EXPECT_EQ(StackOf(run, Stacks(), assumptions).name, "torchtitan-2024");
}

TEST(Replay, WhatIsDeniedIsNot) {
  std::vector<std::string> assumptions;
  PublishedRun run = Selene22B();
  for (const char* words : {"without flash attention", "flash off"}) {
    run.flash_attn = words;
    EXPECT_EQ(StackOf(run, Stacks(), assumptions).attention,
              StackAttention::kUnfused)
        << words;
  }
  run.source = "NeMo";
  for (const auto& [words, overlapped] :
       {std::pair{"TP comm overlap", true},
        {"no TP overlap", false},
        {"TP overlap off", false},
        {"tp_comm_overlap=false", false},
        {"no TP overlap of gathers; async TP", true},
        {"vanilla TP", false}}) {
    run.overlap_notes = words;
    EXPECT_EQ(StackOf(run, Stacks(), assumptions).tensor_exposed < 1,
              overlapped)
        << words;
  }
  run.overlap_notes = "moe a2a overlap, deepep";
  EXPECT_LT(StackOf(run, Stacks(), assumptions).experts_exposed, 1);
  EXPECT_TRUE(StackOf(run, Stacks(), assumptions).experts_once_per_host);
  run.overlap_notes = "no moe a2a overlap, without deepep";
  EXPECT_EQ(StackOf(run, Stacks(), assumptions).experts_exposed, 1);
  EXPECT_FALSE(StackOf(run, Stacks(), assumptions).experts_once_per_host);
}

// A project of Megatron's may have rows of another framework.
TEST(Replay, DeepSpeedUnderTransformersIsEagerPyTorch) {
  std::vector<std::string> assumptions;
  PublishedRun run = Selene22B();
  run.source = "bigscience-workshop/bigscience experiments/gpt2.md";
  run.notes = "Megatron TP + DeepSpeed ZeRO";
  const Stack megatron = StackOf(run, Stacks(), assumptions);
  EXPECT_EQ(megatron.name, "megatron-2021");
  run.notes = "HF Transformers + DeepSpeed";
  const Stack eager = StackOf(run, Stacks(), assumptions);
  EXPECT_EQ(eager.name, "pytorch-eager-2022");
  EXPECT_TRUE(StackNamed("pytorch-eager-2022").overlaps);
  EXPECT_FALSE(eager.overlaps);
  EXPECT_TRUE(eager.memory.fp16_gradients);
  EXPECT_FALSE(eager.memory.bf16_gradients);
  run.source = "InternLM/InternEvo doc/en/train_performance.md";
  EXPECT_TRUE(StackOf(run, Stacks(), assumptions).memory.bf16_gradients);
}

class PublishedRuns : public testing::Test {
 protected:
  std::string Write(const std::string& text) {
    const std::string path = TempPath("runs.csv");
    std::ofstream(path) << text;
    return path;
  }
};

TEST_F(PublishedRuns, NamesWhatIsWrong) {
  const auto missing = ReadPublishedRuns(Write("id,source\na,b\n"));
  ASSERT_FALSE(missing);
  EXPECT_THAT(missing.error().ToString(), HasSubstr("no such column"));
  const auto none = ReadPublishedRuns(TempPath("there-is-none.csv"));
  ASSERT_FALSE(none);
}

// Bytes of it are counted by an int64.
TEST_F(PublishedRuns, BoundsAmounts) {
  const auto unread = [&](const std::string& memory) {
    const auto runs = ReadPublishedRuns(
        Write("id,source,locator,model,kv_heads,ffn,ffn_kind,gpu,intra_link,"
              "inter_link,zero_stage,seq_parallel,recompute,precision,"
              "flash_attn,status,overlap_notes,notes,group,layers,hidden,heads,"
              "vocab,seq,experts,topk,gpus,gpus_per_node,global_batch,"
              "micro_batch,tp,pp,vp,cp,ep,dp,time_any_s,full_config,mem_gb\n"
              "a,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,," +
              memory + "\n"));
    EXPECT_TRUE(runs) << runs.error().ToString();
    const auto& error = runs.value()[0].unread;
    return error ? error->ToString() : std::string();
  };
  EXPECT_EQ(unread("79.5"), "");
  EXPECT_EQ(unread("1e300"), "mem_gb: '1e300' is no number of at most 10^9");
}

}  // namespace
}  // namespace tessera
