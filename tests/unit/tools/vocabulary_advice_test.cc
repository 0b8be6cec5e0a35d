#include "tools/vocabulary_advice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "planner/io/importer.h"
#include "planner/plan/strategy.h"
#include "planner/topology/topologies.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

std::string AdviceFor(const std::string& model, double vocabulary,
                      double multiple, DType dtype,
                      const std::string& strategy = "dp=1", int ranks = 1) {
  ImportOptions options;
  options.global_batch = 4;
  options.seq_len = 8;
  options.dtype = dtype;
  for (const auto& [key, number] :
       {std::pair{"vocab_size", vocabulary}, {"vocab_multiple", multiple}}) {
    JsonValue value;
    value.kind = JsonValue::Kind::kNumber;
    value.number = number;
    options.overrides[key] = value;
  }
  const Graph graph =
      Differentiate(ImportModel(model, options).value()).value();
  const Cluster cluster =
      MakeCluster("local-cpu:" + std::to_string(ranks)).value();
  const Plan plan =
      PlanFromStrategy(graph, cluster, ParseStrategy(strategy).value()).value();
  return VocabularyAdvice(graph, plan);
}

TEST(VocabularyAdvice, NamesTheFlagThatPads) {
  const DType bf16 = DType::kBFloat16;
  EXPECT_THAT(AdviceFor("zoo:gpt2-tiny", 50257, 1, bf16),
              HasSubstr("--set model.vocab_multiple=128"));
  // 50304 = 6288 * 8; 50264 is one of 8 too, but not of 128.
  EXPECT_EQ(AdviceFor("zoo:gpt2-tiny", 50257, 128, bf16), "");
  EXPECT_EQ(AdviceFor("zoo:gpt2-tiny", 50264, 1, bf16), "");
  // fp32 has kernels for any.
  EXPECT_EQ(AdviceFor("zoo:gpt2-tiny", 50257, 1, DType::kFloat32), "");
}

TEST(VocabularyAdvice, CountsTheRowsOfARank) {
  const DType bf16 = DType::kBFloat16;
  // 50264 / 2 = 25132 = 8 * 3141.5.
  EXPECT_THAT(AdviceFor("zoo:gpt2-tiny", 50264, 1, bf16, "tp=2", 2),
              HasSubstr("rows of 50264 logits on 2 ranks"));
  EXPECT_EQ(AdviceFor("zoo:gpt2-tiny", 50257, 128, bf16, "tp=2", 2), "");
  // Each rank of a pipeline or of data parallelism has whole rows.
  EXPECT_EQ(AdviceFor("zoo:gpt2-tiny", 50264, 1, bf16, "dp=2", 2), "");
}

TEST(VocabularyAdvice, LabelsAreNoTokens) {
  // Two classes.
  EXPECT_EQ(AdviceFor("zoo:rnntc", 101, 1, DType::kBFloat16), "");
}

}  // namespace
}  // namespace tessera
