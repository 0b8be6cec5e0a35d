// What the layers of a GPT keep between the passes under the software that
// Korthikanti et al. (2022, "Reducing Activation Recomputation in Large
// Transformer Models", section 4) describe: fp16, dropout, scores of attention
// in memory.

#include <gtest/gtest.h>

#include <fstream>

#include "costmodel/memory/peak_memory.h"
#include "planner/io/importer.h"
#include "planner/lower/lower.h"
#include "planner/plan/strategy.h"
#include "planner/topology/stacks.h"
#include "planner/topology/topologies.h"
#include "tests/support/temp_path.h"

namespace tessera {
namespace {

constexpr int64_t kSequence = 128;
constexpr int64_t kSamples = 2;
constexpr int64_t kHidden = 256;
constexpr int64_t kHeads = 8;
// s b h, and 5 a s / h = 5 * 8 * 128 / 256.
constexpr int64_t kSbh = kSequence * kSamples * kHidden;
constexpr int64_t kScores = 20;
// Tessera's norms keep mean and deviation of each row in fp32, two norms a
// layer; the paper counts no such small terms.
constexpr int64_t kStatistics = 2 * 2 * 4 * kSequence * kSamples;
// The statistics of its rows that fused attention keeps in fp32.
constexpr int64_t kRows = 4 * kHeads * kSequence * kSamples;

Graph Gpt(int layers, int64_t vocab) {
  const std::string path = TempPath("config.json");
  std::ofstream(path) << R"({"architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2", "n_embd": )"
                      << kHidden << R"(, "n_head": )" << kHeads
                      << R"(, "n_layer": )" << layers << R"(, "n_positions": )"
                      << kSequence << R"(, "vocab_size": )" << vocab
                      << R"(, "embd_pdrop": 0, "resid_pdrop": 0,
    "attn_pdrop": 0})";
  ImportOptions options;
  options.global_batch = kSamples;
  options.seq_len = kSequence;
  options.dtype = DType::kFloat16;
  const auto forward = ImportModel(path, options);
  TESSERA_CHECK(forward.has_value()) << forward.error().ToString();
  return *Differentiate(*forward);
}

MemoryUse PeakOf(int layers, const std::string& strategy,
                 const std::string& stack, int64_t vocab = 512) {
  Cluster cluster = *MakeCluster("dgx1-v100-32gb:1x2");
  cluster.stack = *ParseStack(stack);
  const Graph graph = Gpt(layers, vocab);
  const auto plan = PlanFromStrategy(
      graph, cluster,
      *ParseStrategy("mbs=" + std::to_string(kSamples) + ",dp=1," + strategy));
  TESSERA_CHECK(plan.has_value()) << plan.error().ToString();
  return PeakMemory(Lower(graph, cluster, *plan, TrainingOptions()))[0];
}

// All but the last of the layers are kept at the peak, so that one more adds
// what a layer keeps.
int64_t KeptByALayer(const std::string& strategy, const std::string& stack) {
  const auto activations = [&](int layers) {
    return PeakOf(layers, strategy, stack)
        .parts[static_cast<size_t>(MemoryCategory::kActivation)]
        .value;
  };
  return activations(5) - activations(4);
}

// Equation 2 with t = 2: sbh (10 + 24/t + 5as/ht).
TEST(ActivationMemory, TensorParallel) {
  EXPECT_EQ(KeptByALayer("tp=2", "megatron-2021"),
            kSbh * (10 + 24 / 2 + kScores / 2) + kStatistics);
}

// Equation 4: sbh/t (34 + 5as/h).
TEST(ActivationMemory, TensorAndSequenceParallel) {
  EXPECT_EQ(KeptByALayer("tp=2,sp=1", "megatron-2021"),
            kSbh * (34 + kScores) / 2 + kStatistics / 2);
}

// Section 5, selective: sbh 34/t. The attention that runs again makes its
// result (2 of the 34), too.
TEST(ActivationMemory, Selective) {
  EXPECT_EQ(KeptByALayer("tp=2,sp=1,recompute=selective", "megatron-2021"),
            kSbh * (34 - 2) / 2 + kStatistics / 2);
}

// Section 5, full: the input of each layer, 2 sbh.
TEST(ActivationMemory, Full) {
  EXPECT_EQ(KeptByALayer("tp=2,recompute=full", "megatron-2021"), 2 * kSbh);
}

// Without dropout there are no masks (one of 34 for each of the two on the
// residuals), and of the scores the softmax's result alone: 2 of 5.
TEST(ActivationMemory, WithoutDropout) {
  EXPECT_EQ(KeptByALayer("tp=2,sp=1", "megatron-2021,masks=0"),
            kSbh * (32 + kScores / 5 * 2) / 2 + kStatistics / 2);
}

// Tessera's own attention keeps a number for each of its rows.
TEST(ActivationMemory, FusedAttention) {
  EXPECT_EQ(KeptByALayer("tp=2,sp=1", "tessera"),
            kSbh * 32 / 2 + kStatistics / 2 + kRows / 2);
}

// Of s b v logits in fp16 the loss makes a copy in fp32 and a softmax, of which
// that stays (4 bytes, section 4.3), and 4 + 2 are scratch beside it: more than
// backward has, with the gradient in fp16. Fused, they are read as they are.
TEST(ActivationMemory, Logits) {
  constexpr int64_t kVocab = 16384;
  const auto loss = [](const std::string& logits) {
    const MemoryUse use = PeakOf(2, "tp=2,recompute=full",
                                 "tessera,keep-logits=" + logits, kVocab);
    return std::pair(
        use.parts[static_cast<size_t>(MemoryCategory::kWorkspace)].value,
        use.total.value);
  };
  constexpr int64_t kShare = kSequence * kSamples * kVocab / 2;  // of tp = 2
  EXPECT_EQ(loss("as-values").first, 0);
  EXPECT_EQ(loss("fp32").first, (4 + 2) * kShare);
  EXPECT_GT(loss("fp32").second - loss("as-values").second, 5 * kShare);
  EXPECT_LT(loss("never").second, loss("as-values").second - 3 * kShare);
}

}  // namespace
}  // namespace tessera
