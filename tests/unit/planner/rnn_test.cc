// Recurrent networks: sizes, weights that all steps share, blocks.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "planner/io/importer.h"
#include "planner/plan/strategy.h"
#include "planner/topology/topologies.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Result<Graph> Import(const std::string& model, int64_t batch, int64_t steps,
                     std::map<std::string, JsonValue> overrides = {}) {
  ImportOptions options;
  options.global_batch = batch;
  options.seq_len = steps;
  options.overrides = std::move(overrides);
  return ImportModel(model, options);
}

JsonValue Number(double number) {
  JsonValue value;
  value.kind = JsonValue::Kind::kNumber;
  value.number = number;
  return value;
}

// A layer of h features on as many has 4 h (h + h) weights and 4 h biases.
int64_t LstmParameters(int64_t h) {
  return 4 * h * (h + h) + 4 * h;
}

TEST(Rnn, ParametersOfFlexFlowsNetworks) {
  // Embedding, four layers, two classes.
  EXPECT_EQ(ParameterCount(Import("zoo:rnntc", 1, 0).value()),
            10000 * 1024 + 4 * LstmParameters(1024) + 2 * 1024 + 2);
  // Embedding, two layers, head.
  EXPECT_EQ(ParameterCount(Import("zoo:rnnlm", 1, 0).value()),
            10000 * 2048 + 2 * LstmParameters(2048) + 10000 * 2048 + 10000);
  // Two embeddings, two layers each, five square matrices of attention, head.
  EXPECT_EQ(ParameterCount(Import("zoo:nmt", 1, 0).value()),
            2 * 20480 * 1024 + 4 * LstmParameters(1024) + 5 * 1024 * 1024 +
                20480 * 1024 + 20480);
}

// Every step counts its products, the first none with a state.
TEST(Rnn, FlopsOfALanguageModel) {
  const Graph graph = Import("zoo:rnnlm", 3, 0).value();
  EXPECT_EQ(graph.seq_len, 40);  // the config's steps
  const double h = 2048;
  EXPECT_DOUBLE_EQ(
      ModelFlops(graph).value,
      6 * 3 * (40 * (2 * 4 * h * h + 10000 * h) + 39 * 2 * 4 * h * h));
}

TEST(Rnn, LengthLayersAndSizeAreSet) {
  const Graph graph = Import("zoo:rnntc", 1, 0,
                             {{"steps", Number(7)},
                              {"num_layers", Number(2)},
                              {"hidden_size", Number(16)},
                              {"steps_per_block", Number(4)}})
                          .value();
  EXPECT_EQ(graph.seq_len, 7);
  EXPECT_THAT(graph.blocks, ElementsAre("embed", "rnn_l0.0", "rnn_l0.4",
                                        "rnn_l1.0", "rnn_l1.4", "head"));
  EXPECT_EQ(ParameterCount(graph),
            10000 * 16 + 2 * LstmParameters(16) + 2 * 16 + 2);
  // The options' length comes first.
  EXPECT_EQ(Import("zoo:rnntc", 1, 5)->seq_len, 5);
}

TEST(Rnn, StepsShareTheirWeights) {
  const Graph graph = Differentiate(Import("zoo:rnnlm", 2, 12).value()).value();
  for (const Tensor& tensor : graph.tensors) {
    if (tensor.kind != TensorKind::kWeight) continue;
    const auto uses =
        std::ranges::count_if(graph.gradients, [&](const GradientTerm& term) {
          return graph.tensor(term.weight).name == tensor.name;
        });
    const bool of_input = tensor.name.starts_with("rnn.weight_ih") ||
                          tensor.name.starts_with("rnn.bias");
    const bool of_state = tensor.name.starts_with("rnn.weight_hh");
    EXPECT_EQ(uses, of_input ? 12 : of_state ? 11 : 1) << tensor.name;
  }
}

// Blocks of ten steps but for the last; the first step of a layer has no state,
// the last hands its cell to none.
TEST(Rnn, StepsInTheMiddleAreAlike) {
  const Graph graph = Differentiate(Import("zoo:rnntc", 2, 40).value()).value();
  const std::vector<int> classes = BlockClasses(graph);
  ASSERT_EQ(classes.size(), 1u + 4 * 4 + 1);
  for (size_t layer = 0; layer < 4; ++layer) {
    EXPECT_EQ(classes[1 + 4 * layer + 1], classes[1 + 4 * layer + 2]);
    EXPECT_NE(classes[1 + 4 * layer], classes[1 + 4 * layer + 1]);
  }
  EXPECT_EQ(classes[2], classes[6]);
}

// A layer on each device, FlexFlow's expert plan for recurrent networks: stages
// are whole layers.
TEST(Rnn, LayersAreStages) {
  const Graph graph =
      Differentiate(Import("zoo:rnntc", 16, 40).value()).value();
  const Cluster cluster = MakeCluster("p100-edr:1").value();
  const Plan plan =
      PlanFromStrategy(graph, cluster, ParseStrategy("pp=4,mbs=16").value())
          .value();
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    const std::string& name = graph.nodes[i].name;
    for (int layer = 0; layer < 4; ++layer) {
      if (!name.starts_with("rnn_l" + std::to_string(layer))) continue;
      EXPECT_EQ(plan.ops[i].group, GroupId(layer)) << name;
    }
  }
}

TEST(Rnn, TellsWhatIsWrong) {
  const auto error = [](const std::string& key, JsonValue value) {
    const auto graph = Import("zoo:nmt-tiny", 2, 8, {{key, std::move(value)}});
    return graph ? "" : graph.error().ToString();
  };
  JsonValue elman;
  elman.kind = JsonValue::Kind::kString;
  elman.text = "elman";
  EXPECT_THAT(error("cell", elman),
              HasSubstr("cell: is 'elman': expected lstm or gru"));
  EXPECT_THAT(error("source_len", Number(257)),
              HasSubstr("source_len: 257 steps: expected from 2 to 256"));
  EXPECT_THAT(error("steps", Number(9)),
              HasSubstr("steps: is 9: expected the sequence length, 8, where "
                        "that is given too"));
  EXPECT_THAT(error("num_attention_heads", Number(5)),
              HasSubstr("num_attention_heads: is 5: expected a divisor of "
                        "hidden_size 64"));
}

}  // namespace
}  // namespace tessera
