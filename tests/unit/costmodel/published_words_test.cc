// What columns of published tables say, in the words that sources use.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "costmodel/collective/collective.h"
#include "costmodel/validate/published_cluster.h"
#include "costmodel/validate/words.h"
#include "planner/topology/hardware.h"
#include "planner/topology/topologies.h"

namespace tessera {
namespace {

using testing::Contains;
using testing::IsEmpty;
using testing::Not;

TEST(Words, StandApart) {
  EXPECT_TRUE(HasWord("nvidia a10-24gb", "a10"));
  EXPECT_TRUE(HasWord("2xa10", "a10") == false);  // a letter beside a letter
  EXPECT_TRUE(HasWord("2 x a10", "a10"));
  EXPECT_FALSE(HasWord("a100-40gb", "a10"));
  EXPECT_TRUE(HasWord("a100sxm", "a100"));
  EXPECT_FALSE(HasWord("gh200", "h200"));
  EXPECT_TRUE(HasWord("rtx4090", "4090"));
  EXPECT_FALSE(HasWord("", "a10"));
}

TEST(Words, BeginWithStems) {
  EXPECT_TRUE(HasStem("gradient checkpointing", "checkpoint"));
  EXPECT_TRUE(HasStem("zero-2-like", "zero-2"));
  EXPECT_FALSE(HasStem("carefully", "full"));
  EXPECT_FALSE(HasStem("stage 12", "stage 1"));
  EXPECT_TRUE(HasStem("stage 12, stage 1", "stage 1"));
  EXPECT_FALSE(ReadZero("stage 12").has_value());
  EXPECT_FALSE(ReadZero("by dynamics").has_value());
  EXPECT_FALSE(ReadRecompute("chosen carefully").has_value());
}

TEST(Words, AreDenied) {
  const struct {
    const char* text;
    const char* asserted;
  } cases[] = {
      {"bf16, no fp8", "bf16,"},
      {"selective (op)", "selective (op)"},
      {"full recompute disabled", ""},
      {"activation checkpointing: off", ""},
      {"fp8 not used; bf16", "; bf16"},
      {"zero-3 without offload", "zero-3"},
      {"no (fused softmax), sdpa", "), sdpa"},
      {"no_shard", "no_shard"},
      {"note: nothing", "note: nothing"},
      {"", ""},
  };
  for (const auto& c : cases) {
    EXPECT_EQ(Asserted(c.text), c.asserted) << c.text;
    EXPECT_EQ(DeniesAll(c.text), c.asserted[0] == 0 && c.text[0] != 0)
        << c.text;
  }
  // Whatever the vocabulary, the two ways to deny a thing are a no.
  for (const std::string thing : {"flash attention", "fp8", "sp"}) {
    for (const std::string& text :
         {"no " + thing, "without " + thing, "w/o " + thing, thing + " off",
          thing + " disabled", thing + "=false", thing + " not used"}) {
      EXPECT_TRUE(DeniesAll(text)) << text;
      EXPECT_EQ(Asserted("bf16, " + text), "bf16,") << text;
    }
  }
}

TEST(Words, OfZero) {
  const struct {
    const char* text;
    int stage;
    int group;
    bool within_node;
    bool offload;
  } cases[] = {
      {"0", 0, 0, false, false},
      {"3", 3, 0, false, false},
      {"none", 0, 0, false, false},
      {"ddp", 0, 0, false, false},
      {"1 (distributed optimizer)", 1, 0, false, false},
      {"distributed optimizer", 1, 0, false, false},
      {"distributed_fused_adam", 1, 0, false, false},
      {"zero-1", 1, 0, false, false},
      {"deepspeed zero-2", 2, 0, false, false},
      {"zero 3", 3, 0, false, false},
      {"stage 2", 2, 0, false, false},
      {"sharding stage2", 2, 0, false, false},
      {"zero++", 3, 0, false, false},
      {"zero-infinity, nvme offload", 3, 0, false, true},
      {"3 (deepspeed) + cpu optimizer offload", 3, 0, false, true},
      {"fsdp", 3, 0, false, false},
      {"fsdp2", 3, 0, false, false},
      {"3 (fsdp2, group 8)", 3, 8, false, false},
      {"fsdp group=64", 3, 64, false, false},
      {"3 (fsdp=128, dp=4)", 3, 128, false, false},
      {"fsdp=1", 3, 0, false, false},
      {"fsdp full_shard", 3, 0, false, false},
      {"shard_grad_op", 2, 0, false, false},
      {"fsdp shard_grad_op", 2, 0, false, false},
      {"no_shard", 0, 0, false, false},
      {"hsdp", 3, 0, true, false},
      {"hybrid_shard", 3, 0, true, false},
      {"3 within node, replicated across (hsdp)", 3, 0, true, false},
      {"1 (zero1=8: optimizer sharded over 8 gpus, replicated beyond)", 1, 8,
       false, false},
      {"3 over 128 gpus x 4 replicas (mics)", 3, 128, false, false},
      {"gemini", 3, 0, false, false},
      {"ilp (reduce-scatter/all-gather allowed = zero-2-like)", 2, 0, false,
       false},
      {"no zero", 0, 0, false, false},
      {"fsdp off", 0, 0, false, false},
      {"ddp, no zero", 0, 0, false, false},
      {"3 (deepspeed, no offload)", 3, 0, false, false},
  };
  for (const auto& c : cases) {
    const auto zero = ReadZero(c.text);
    ASSERT_TRUE(zero) << c.text;
    EXPECT_EQ(zero->stage, c.stage) << c.text;
    EXPECT_EQ(zero->group, c.group) << c.text;
    EXPECT_EQ(zero->within_node, c.within_node) << c.text;
    EXPECT_EQ(zero->offloads_optimizer, c.offload) << c.text;
  }
  EXPECT_FALSE(ReadZero("adamw"));
}

TEST(Words, OfRecompute) {
  using enum RecomputeLevel;
  const struct {
    const char* text;
    RecomputeLevel level;
    int every = 1;
  } cases[] = {
      {"none", kNone},
      {"no", kNone},
      {"off", kNone},
      {"no activation checkpointing", kNone},
      {"activation checkpointing off", kNone},
      {"full recompute disabled", kNone},
      {"without recompute", kNone},
      {"selective, no full recompute", kSelective},
      {"full", kFull},
      {"full (per layer)", kFull},
      {"full, uniform, 1 layer", kFull},
      {"block", kFull},
      {"yes", kFull},
      {"yes (rematerialization)", kFull},
      {"gradient checkpointing", kFull},
      {"activation checkpointing (every layer)", kFull},
      {"every other layer", kFull, 2},
      {"selective", kSelective},
      {"selective (core attention)", kSelective},
      {"selective (fraction of blocks)", kSelective},
      {"--recompute-activations", kSelective},
      {"save_nothing", kFull},
      {"everything_saveable", kNone},
  };
  for (const auto& c : cases) {
    const auto words = ReadRecompute(c.text);
    ASSERT_TRUE(words) << c.text;
    EXPECT_EQ(words->level, c.level) << c.text;
    EXPECT_EQ(words->every, c.every) << c.text;
    EXPECT_THAT(words->kept, IsEmpty()) << c.text;
  }
  for (const char* text :
       {"no recompute (full model fits)", "recompute=no", "full recompute: no",
        "no activation checkpointing, full precision"}) {
    EXPECT_EQ(ReadRecompute(text)->level, RecomputeLevel::kNone) << text;
  }
  // What policies keep.
  const auto qkv = ReadRecompute("remat policy save_qkv_proj");
  ASSERT_TRUE(qkv);
  EXPECT_THAT(qkv->kept, Contains("v_proj"));
  EXPECT_THAT(qkv->kept, Not(Contains("o_proj")));
  const auto minimal = ReadRecompute("minimal_flash");
  ASSERT_TRUE(minimal);
  EXPECT_THAT(minimal->kept, Contains("attention"));
  EXPECT_THAT(ReadRecompute("save_dot_only")->kept, Not(Contains("attention")));
  EXPECT_THAT(ReadRecompute("selective modules: mlp")->again,
              Contains(".mlp.up_proj"));
  EXPECT_FALSE(ReadRecompute("sometimes"));
}

TEST(Words, OfPrecision) {
  using enum ProductType;
  const struct {
    const char* text;
    std::optional<DType> values;
    ProductType products = kAsValues;
    bool tf32 = false;
  } cases[] = {
      {"bf16", DType::kBFloat16},
      {"amp_bf16", DType::kBFloat16},
      {"bf16-mixed", DType::kBFloat16},
      {"bfloat16, fp32 accumulation", DType::kBFloat16},
      {"te bf16", DType::kBFloat16},
      {"fp16", DType::kFloat16},
      {"fp16 mixed", DType::kFloat16},
      {"16-mixed", DType::kFloat16},
      {"mixed (fp16)", DType::kFloat16},
      {"float16 (o2)", DType::kFloat16},
      {"half", DType::kFloat16},
      {"amp", std::nullopt},
      {"mixed precision", std::nullopt},
      {"fp32", DType::kFloat32},
      {"fp32 (no --fp16 flag)", DType::kFloat32},
      {"bf16, no fp8", DType::kBFloat16},
      {"bf16 (fp8 disabled)", DType::kBFloat16},
      {"fp32 master, bf16 compute", DType::kBFloat16},
      {"bf16, 8-bit optimizer", DType::kBFloat16},
      {"fp32 parameters", DType::kFloat32},
      {"32-true", DType::kFloat32},
      {"tf32", DType::kFloat32, kAsValues, true},
      {"fp32 (tf32 products)", DType::kFloat32, kAsValues, true},
      {"fp8", DType::kBFloat16, kFp8},
      {"fp8 (hybrid)", DType::kBFloat16, kFp8},
      {"fp8-cs", DType::kBFloat16, kFp8},
      {"fp8 blockwise", DType::kBFloat16, kFp8},
      {"mxfp8", DType::kBFloat16, kFp8},
      {"float8 tensorwise", DType::kBFloat16, kFp8},
      {"bf16+fp8", DType::kBFloat16, kFp8},
      {"e4m3", DType::kBFloat16, kFp8},
      {"nvfp4", DType::kBFloat16, kFp4},
      {"mxfp4", DType::kBFloat16, kFp4},
  };
  for (const auto& c : cases) {
    const auto words = ReadPrecision(c.text);
    ASSERT_TRUE(words) << c.text;
    EXPECT_EQ(words->values, c.values) << c.text;
    EXPECT_EQ(words->products, c.products) << c.text;
    EXPECT_EQ(words->tf32, c.tf32) << c.text;
  }
  EXPECT_FALSE(ReadPrecision(""));
  EXPECT_FALSE(ReadPrecision("unknown"));
  // That says only what it is not.
  EXPECT_FALSE(ReadPrecision("fp8 off"));
}

TEST(Words, OfAttention) {
  using enum StackAttention;
  EXPECT_EQ(ReadAttention("no"), kUnfused);
  EXPECT_EQ(ReadAttention("no (fused softmax)"), kUnfused);
  EXPECT_EQ(ReadAttention("without flash attention"), kUnfused);
  EXPECT_EQ(ReadAttention("flash attention disabled"), kUnfused);
  EXPECT_EQ(ReadAttention("no flash, sdpa"), kFused);
  EXPECT_EQ(ReadAttention("no flash attention (sdpa)"), kUnfused);
  EXPECT_EQ(ReadAttention("flash: no"), kUnfused);
  EXPECT_EQ(ReadAttention("eager"), kUnfused);
  EXPECT_EQ(ReadAttention("flash v1"), kFlash1);
  EXPECT_EQ(ReadAttention("xformers"), kFlash1);
  EXPECT_EQ(ReadAttention("sdpa flash v2"), kFused);
  EXPECT_EQ(ReadAttention("fa3"), kFused);
  EXPECT_EQ(ReadAttention("flash-attn 2.5.8"), kFused);
  EXPECT_EQ(ReadAttention("yes (te/cudnn fused)"), kFused);
  EXPECT_EQ(ReadAttention("yes"), std::nullopt);
  EXPECT_EQ(ReadAttention(""), std::nullopt);
}

TEST(Words, OfSequenceParallelism) {
  for (const char* yes : {"yes", "true", "1", "on", "sp"}) {
    EXPECT_EQ(ReadYes(yes), true) << yes;
  }
  for (const char* no : {"no", "false", "0", "off", "none", "sp off",
                         "without sequence parallel"}) {
    EXPECT_EQ(ReadYes(no), false) << no;
  }
  EXPECT_EQ(ReadYes(""), std::nullopt);
}

TEST(Words, OfGpus) {
  const struct {
    const char* text;
    const char* device;
  } cases[] = {
      {"NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"},
      {"A100 80G SXM", "a100-sxm4-80gb"},
      {"A100 40GB", "a100-sxm4-40gb"},
      {"A100 40GB PCIe", "a100-pcie-40gb"},
      {"A100-PCIE-40GB", "a100-pcie-40gb"},
      {"A100-PCIe-80GB", "a100-pcie-80gb"},
      {"p4d.24xlarge", "a100-sxm4-40gb"},
      {"p4de.24xlarge", "a100-sxm4-80gb"},
      {"Standard_ND96amsr_A100_v4", "a100-sxm4-80gb"},
      {"A800-SXM4-80GB", "a800-sxm4-80gb"},
      {"A10", "a10-24gb"},
      {"A10G", "a10g-24gb"},
      {"A30", "a30-24gb"},
      {"A40", "a40-48gb"},
      {"RTX A6000", "rtx-a6000-48gb"},
      // Counts of GPUs are no memory.
      {"40x A100-80GB", "a100-sxm4-80gb"},
      {"40 GPUs A100 80 GB", "a100-sxm4-80gb"},
      {"40x A100-PCIe-80GB", "a100-pcie-80gb"},
      {"40 A800", "a800-sxm4-80gb"},
      {"96x H100-80GB-SXM", "h100-sxm5-80gb"},
      {"32x V100-16GB", "v100-sxm2-16gb"},
      {"32x V100-PCIE-16GB", "v100-pcie-16gb"},
      {"144 GH200", "gh200-96gb"},
      {"32x A100 40 GiB", "a100-sxm4-40gb"},
      {"8x A100-40G", "a100-sxm4-40gb"},
      {"H100 80GB HBM3", "h100-sxm5-80gb"},
      {"H100 SXM5", "h100-sxm5-80gb"},
      {"HGX H100", "h100-sxm5-80gb"},
      {"H100 (ND H100 v5)", "h100-sxm5-80gb"},
      {"p5.48xlarge", "h100-sxm5-80gb"},
      {"a3-megagpu-8g", "h100-sxm5-80gb"},
      {"H100-96GB HBM2e (500 W power limit)", "h100-sxm5-96gb"},
      {"H100 NVL", "h100-nvl-94gb"},
      {"H100 PCIe", "h100-pcie-80gb"},
      {"H800", "h800-sxm5-80gb"},
      {"H20-96GB", "h20-96gb"},
      {"H200 141GB", "h200-sxm5-141gb"},
      {"a3-ultragpu-8g", "h200-sxm5-141gb"},
      {"GH200 96GB", "gh200-96gb"},
      {"GH200 144GB HBM3e", "gh200-144gb"},
      {"DGX B200", "b200-sxm-180gb"},
      {"B200-SXM", "b200-sxm-180gb"},
      {"B300", "b300-sxm-288gb"},
      {"GB200 NVL72", "gb200-186gb"},
      {"GB300", "gb300-288gb"},
      {"Tesla V100-SXM2-16GB", "v100-sxm2-16gb"},
      {"V100 32GB (DGX-2)", "v100-sxm2-32gb"},
      {"V100-PCIE-32GB", "v100-pcie-32gb"},
      {"V100S", "v100s-pcie-32gb"},
      {"p3dn.24xlarge", "v100-sxm2-32gb"},
      {"Tesla P100-PCIE-16GB", "p100-pcie-16gb"},
      {"P100", "p100-sxm2-16gb"},
      {"Tesla P40", "p40-24gb"},
      {"Tesla K80", "k80-gk210-12gb"},
      {"Tesla T4", "t4-16gb"},
      {"L4", "l4-24gb"},
      {"L40", "l40-48gb"},
      {"L40S", "l40s-48gb"},
      {"RTX 3090", "rtx-3090-24gb"},
      {"RTX3090 Ti", "rtx-3090-24gb"},
      {"GeForce RTX 4090", "rtx-4090-24gb"},
      {"RTX 5090", "rtx-5090-32gb"},
      {"RTX 2080 Ti", "rtx-2080-ti-11gb"},
      {"GTX 1080 Ti", "gtx-1080-ti-11gb"},
      {"TITAN RTX", "titan-rtx-24gb"},
      {"Quadro RTX 8000", "quadro-rtx-8000-48gb"},
      {"RTX 6000 Ada", "rtx-6000-ada-48gb"},
      {"RTX PRO 6000 Blackwell", "rtx-pro-6000-96gb"},
  };
  for (const auto& c : cases) {
    PublishedRun run;
    run.gpu = c.text;
    const auto device = DeviceNameOf(run);
    ASSERT_TRUE(device) << c.text;
    EXPECT_EQ(*device, c.device) << c.text;
  }
  for (const char* other : {"", "TPU v4", "MI250X", "Gaudi 2", "Trainium",
                            "(not stated; 16-GPU node)"}) {
    PublishedRun run;
    run.gpu = other;
    EXPECT_FALSE(DeviceNameOf(run)) << other;
  }
}

TEST(Words, OfNetworks) {
  const struct {
    const char* text;
    const char* link;
    double gbit_per_card;
    int cards;
  } cases[] = {
      {"InfiniBand NDR 400", "ib-ndr", 400, 8},
      {"IB NDR400", "ib-ndr", 400, 8},
      {"8x 400 Gb/s InfiniBand (ConnectX-7)", "ib-ndr", 400, 8},
      {"Quantum-2", "ib-ndr", 400, 8},
      {"XDR 800 Gb/s", "ib-xdr", 800, 8},
      {"HDR200, 4 HCAs", "ib-hdr", 200, 4},
      {"InfiniBand, 200Gb/s", "ib-hdr", 200, 8},
      {"InfiniBand 100 Gb/sec (4X EDR), one card per node", "ib-edr", 100, 1},
      {"1.6 Tbps InfiniBand", "ib-hdr", 200, 8},
      {"InfiniBand 25 GB/s", "ib-hdr", 200, 8},
      {"RDMA 400 Gb/s per GPU", "ib-hdr", 400, 8},
      {"RDMA fabric, 400Gb/s (Mellanox CX-7) per GPU", "ib-ndr", 400, 8},
      {"RoCE v2 400 Gb/s", "roce-200g", 400, 8},
      {"RoCEv2, 8x200G", "roce-200g", 200, 8},
      {"Spectrum-X", "roce-400g", 400, 8},
      {"EFA v2 3200 Gbps", "efa-4x100g", 400, 8},
      {"EFAv3", "efa-4x100g", 400, 8},
      {"EFA 4x100 Gb/s", "efa-4x100g", 100, 4},
      {"GPUDirect-TCPXO", "tcpxo-200g", 200, 8},
      {"GPUDirect-TCPX", "tcpx-200g", 200, 4},
      {"Slingshot 11", "roce-200g", 200, 8},
      {"100GbE", "ena-25g", 100, 1},
      {"10 Gigabit Ethernet", "ena-25g", 10, 1},
      {"25 Gbps VPC", "ib-hdr", 25, 8},
      // No card is as fast: the host's rate.
      {"8 HCAs, 3.2 Tb/s per node IB", "ib-hdr", 400, 8},
      {"3.2 Tb/s (8x 400 Gb/s) NDR", "ib-ndr", 400, 8},
      {"3.2 Tb/s", "ib-hdr", 400, 8},
      {"0.8 Tb/s", "ib-hdr", 800, 8},
      {"4 \u00d7 200 Gb/s", "ib-hdr", 200, 4},
      {"4\u00d7200G IB", "ib-hdr", 200, 4},
  };
  for (const auto& c : cases) {
    const auto network = ReadNetwork(c.text, 8);
    ASSERT_TRUE(network) << c.text;
    EXPECT_EQ(network->link, c.link) << c.text;
    EXPECT_DOUBLE_EQ(network->gbit_per_card, c.gbit_per_card) << c.text;
    EXPECT_EQ(network->cards, c.cards) << c.text;
  }
  for (const char* none : {"", "(not stated; Eos DGX H100)", "NVLink",
                           "InfiniBand (rate not stated)"}) {
    EXPECT_FALSE(ReadNetwork(none, 8)) << none;
  }
}

// The vendor's systems as they are by name, where a row names no network, and
// Amazon's by its.
TEST(Words, OfB300sAreTheirPresets) {
  for (const auto& [gpu, gpus, preset] :
       {std::tuple{"B300", 16, "dgx-b300:2"},
        std::tuple{"GB300", 144, "gb300-nvl72:2"},
        std::tuple{"B200", 16, "dgx-b200:2"}}) {
    PublishedRun run;
    run.gpu = gpu;
    run.gpus = gpus;
    run.gpus_per_node = 8;
    std::vector<std::string> assumptions;
    const Cluster replayed = *ClusterOf(run, assumptions);
    const Cluster named = *MakeCluster(preset);
    std::vector<std::vector<DeviceId>> all(1);
    for (int d = 0; d < gpus; ++d) all[0].push_back(DeviceId(d));
    const auto seconds = [&](const Cluster& cluster) {
      const CollectiveModel model(cluster);
      const Bytes bytes{int64_t{1} << 30};
      return CollectiveModel::Best(model.Options(CommKind::kAllGather, all),
                                   bytes)
          .Seconds(bytes);
    };
    EXPECT_NEAR(seconds(replayed), seconds(named), 1e-3 * seconds(named))
        << gpu;
    run.inter_link = "8x 800 Gb/s XDR InfiniBand";
    if (preset != std::string("dgx-b300:2")) continue;
    EXPECT_NEAR(seconds(*ClusterOf(run, assumptions)), seconds(named),
                1e-3 * seconds(named));
  }
  PublishedRun run;
  run.gpu = "p6-b300.48xlarge";
  run.gpus = 16;
  run.gpus_per_node = 8;
  std::vector<std::string> assumptions;
  const Cluster amazons = *ClusterOf(run, assumptions);
  EXPECT_TRUE(std::ranges::any_of(amazons.link_types, [](const LinkType& t) {
    return t.name == "efa-2x400g";
  }));
}

// All networks have a nominal rate, which is more than what is reached of it.
TEST(Words, NetworksHaveNominalRates) {
  for (const Topology& topology : Topologies()) {
    if (topology.nic_link.empty()) continue;
    const LinkType& link = LinkTypeNamed(topology.nic_link);
    EXPECT_LE(link.bandwidth.value * 8e-9, NominalGigabits(link.name))
        << link.name;
  }
  EXPECT_EQ(NominalGigabits("roce-100g"), 100);
}

}  // namespace
}  // namespace tessera
