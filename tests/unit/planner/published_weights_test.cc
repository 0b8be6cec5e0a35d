// Where weights lie in published files: each element of a tensor is one of a
// weight's, and each of a weight's is there.

#include "planner/io/published_weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "planner/base/element_count.h"
#include "planner/io/importer.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;

// An example's model, with other values for keys of its config.
Graph Import(const std::string& model,
             const std::map<std::string, int64_t>& sizes = {}) {
  ImportOptions options;
  options.global_batch = 1;
  options.seq_len = 8;
  for (const auto& [key, size] : sizes) {
    JsonValue& value = options.overrides[key];
    value.kind = JsonValue::Kind::kNumber;
    value.number = static_cast<double>(size);
  }
  auto graph =
      ImportModel(ExamplePath("models/" + model + "/config.json"), options);
  TESSERA_CHECK(graph.has_value()) << graph.error().ToString();
  return std::move(graph).value();
}

struct Model {
  std::string family;
  std::string example;
  std::map<std::string, int64_t> sizes = {};
};

class PublishedWeights : public ::testing::TestWithParam<Model> {};

TEST_P(PublishedWeights, AreAllOfWeightsAndTensors) {
  const Graph graph = Import(GetParam().example, GetParam().sizes);
  std::map<std::string, std::set<int64_t>> seen;  // elements of tensors
  std::map<std::string, Shape> shapes;
  for (const Tensor& weight : graph.tensors) {
    if (weight.kind != TensorKind::kWeight) continue;
    int64_t next = 0;
    for (const PublishedPiece& piece :
         PublishedPieces(GetParam().family, graph, weight)) {
      EXPECT_EQ(piece.begin, next) << weight.name;
      next += piece.count;
      const auto [shape, is_new] =
          shapes.try_emplace(piece.tensor, piece.shape);
      EXPECT_EQ(shape->second, piece.shape) << weight.name;
      for (int64_t i = 0; i < piece.count; ++i) {
        const int64_t at = piece.PlaceOf(i);
        EXPECT_LT(at, ElementCount(piece.shape)) << weight.name;
        EXPECT_TRUE(seen[piece.tensor].insert(at).second)
            << weight.name << " " << i;
      }
    }
    EXPECT_EQ(next, ElementCount(weight.shape)) << weight.name;
  }
  for (const auto& [tensor, elements] : seen) {
    EXPECT_EQ(std::ssize(elements), ElementCount(shapes[tensor])) << tensor;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Families, PublishedWeights,
    ::testing::Values(Model{"gpt2", "gpt2-tiny", {{"vocab_size", 50}}},
                      Model{"llama",
                            "llama-2-70b",
                            {{"hidden_size", 16},
                             {"num_hidden_layers", 1},
                             {"num_attention_heads", 4},
                             {"num_key_value_heads", 2},
                             {"intermediate_size", 24},
                             {"vocab_size", 50}}},
                      Model{"mixtral", "mixtral-tiny", {{"vocab_size", 50}}},
                      Model{"phi3",
                            "phi-3-mini",
                            {{"hidden_size", 16},
                             {"num_hidden_layers", 1},
                             {"num_attention_heads", 4},
                             {"num_key_value_heads", 2},
                             {"intermediate_size", 24},
                             {"vocab_size", 50}}},
                      Model{"opt",
                            "opt-350m",
                            {{"hidden_size", 16},
                             {"num_hidden_layers", 1},
                             {"num_attention_heads", 4},
                             {"ffn_dim", 24},
                             {"word_embed_proj_dim", 12},
                             {"vocab_size", 50}}},
                      Model{"bloom",
                            "bloom-560m",
                            {{"n_embed", 16},
                             {"n_layer", 1},
                             {"num_attention_heads", 4},
                             {"vocab_size", 50}}},
                      Model{"gptj",
                            "gpt-j-6b",
                            {{"n_embd", 16},
                             {"n_layer", 1},
                             {"n_head", 2},
                             {"rotary_dim", 4},
                             {"vocab_size", 50}}},
                      Model{"falcon",
                            "falcon-40b",
                            {{"hidden_size", 16},
                             {"num_hidden_layers", 1},
                             {"num_attention_heads", 4},
                             {"num_kv_heads", 2},
                             {"vocab_size", 50}}},
                      Model{"gemma3_text",
                            "gemma-3-1b",
                            {{"hidden_size", 16},
                             {"num_hidden_layers", 1},
                             {"num_attention_heads", 4},
                             {"num_key_value_heads", 2},
                             {"intermediate_size", 24},
                             {"head_dim", 4},
                             {"vocab_size", 50}}},
                      Model{"gemma3",
                            "gemma-3-4b",
                            {{"hidden_size", 16},
                             {"num_hidden_layers", 1},
                             {"num_attention_heads", 4},
                             {"num_key_value_heads", 2},
                             {"intermediate_size", 24},
                             {"head_dim", 4},
                             {"vocab_size", 50}}},
                      Model{"olmo2",
                            "olmo-2-7b",
                            {{"hidden_size", 16},
                             {"num_hidden_layers", 1},
                             {"num_attention_heads", 4},
                             {"num_key_value_heads", 2},
                             {"intermediate_size", 24},
                             {"head_dim", 4},
                             {"vocab_size", 50}}},
                      Model{"starcoder2",
                            "starcoder2-3b",
                            {{"hidden_size", 16},
                             {"num_hidden_layers", 1},
                             {"num_attention_heads", 4},
                             {"num_key_value_heads", 2},
                             {"intermediate_size", 24},
                             {"head_dim", 4},
                             {"vocab_size", 50}}},
                      Model{"phi",
                            "phi-2",
                            {{"hidden_size", 16},
                             {"num_hidden_layers", 1},
                             {"num_attention_heads", 4},
                             {"num_key_value_heads", 2},
                             {"intermediate_size", 24},
                             {"head_dim", 10},
                             {"vocab_size", 50}}},
                      Model{"glm4",
                            "glm-4-9b",
                            {{"hidden_size", 16},
                             {"num_hidden_layers", 1},
                             {"num_attention_heads", 4},
                             {"num_key_value_heads", 2},
                             {"intermediate_size", 24},
                             {"head_dim", 4},
                             {"vocab_size", 50}}},
                      Model{"cohere",
                            "command-r",
                            {{"hidden_size", 16},
                             {"num_hidden_layers", 1},
                             {"num_attention_heads", 4},
                             {"num_key_value_heads", 2},
                             {"intermediate_size", 24},
                             {"head_dim", 4},
                             {"vocab_size", 50}}},
                      Model{"gpt_neox",
                            "pythia-1b",
                            {{"hidden_size", 32},
                             {"num_hidden_layers", 1},
                             {"num_attention_heads", 4},
                             {"intermediate_size", 24},
                             {"vocab_size", 50}}}),
    [](const auto& info) { return info.param.family; });

// By the shapes of hf.co/openai-community/gpt2: Conv1D has inputs first.
TEST(PublishedWeights, Gpt2sKeysAreTheMiddleColumnsOfItsConv1D) {
  const Graph graph = Import("gpt2");
  for (const Tensor& weight : graph.tensors) {
    if (weight.name != "h.3.attn.c_attn.k.weight") continue;
    const auto pieces = PublishedPieces("gpt2", graph, weight);
    ASSERT_EQ(pieces.size(), 1u);
    EXPECT_EQ(pieces[0].tensor, "h.3.attn.c_attn.weight");
    EXPECT_THAT(pieces[0].shape, ElementsAre(768, 2304));
    // Element 1 of the weight: input 1 of key 0.
    EXPECT_EQ(pieces[0].offset, 768);
    ASSERT_EQ(pieces[0].block.size(), 2u);
    EXPECT_EQ(pieces[0].block[0].stride, 1);
    EXPECT_EQ(pieces[0].block[1].extent, 768);
    EXPECT_EQ(pieces[0].block[1].stride, 2304);
    return;
  }
  FAIL() << "no such weight";
}

// Heads of pythia-1b: 8 of 256. The value of head 1 comes behind its query and
// its key, and all three parts of head 0.
TEST(PublishedWeights, GptNeoxInterleavesByHead) {
  const Graph graph = Import("pythia-1b");
  for (const Tensor& weight : graph.tensors) {
    if (weight.name != "gpt_neox.layers.0.attention.query_key_value.v.weight") {
      continue;
    }
    const auto pieces = PublishedPieces("gpt_neox", graph, weight);
    ASSERT_EQ(pieces.size(), 8u);
    EXPECT_EQ(pieces[1].tensor,
              "gpt_neox.layers.0.attention.query_key_value.weight");
    EXPECT_THAT(pieces[1].shape, ElementsAre(6144, 2048));
    EXPECT_EQ(pieces[1].begin, 256 * 2048);
    EXPECT_EQ(pieces[1].offset, (3 * 256 + 2 * 256) * 2048);
    return;
  }
  FAIL() << "no such weight";
}

// Heads of falcon-40b: 8 groups of 16 queries of 64, a key and a value. The key
// of group 1 comes behind all of group 0 and its own queries.
TEST(PublishedWeights, FalconInterleavesByGroup) {
  const Graph graph = Import("falcon-40b");
  const std::string fused = "transformer.h.0.self_attention.query_key_value.";
  for (const Tensor& weight : graph.tensors) {
    if (weight.name != fused + "k.weight") continue;
    const auto pieces = PublishedPieces("falcon", graph, weight);
    ASSERT_EQ(pieces.size(), 8u);
    EXPECT_EQ(pieces[1].tensor, fused + "weight");
    EXPECT_THAT(pieces[1].shape, ElementsAre((128 + 16) * 64, 8192));
    EXPECT_EQ(pieces[1].offset, (18 + 16) * 64 * 8192);
    return;
  }
  FAIL() << "no such weight";
}

// GPT-J turns 64 of 256 features, features 2j and 2j + 1 together, which are j
// and 32 + j here.
TEST(PublishedWeights, GptJTurnsNeighbours) {
  const Graph graph = Import("gpt-j-6b");
  for (const Tensor& weight : graph.tensors) {
    if (weight.name != "transformer.h.0.attn.k_proj.weight") continue;
    const auto pieces = PublishedPieces("gptj", graph, weight);
    ASSERT_EQ(pieces.size(), 2u * 16);
    const int64_t row = 4096;
    EXPECT_EQ(pieces[2].PlaceOf(33 * row + 7), (256 + 3) * row + 7);
    EXPECT_EQ(pieces[3].PlaceOf(0), (256 + 64) * row);
    return;
  }
  FAIL() << "no such weight";
}

// Gemma 3 of images has its text under a name of its own.
TEST(PublishedWeights, Gemma3sNormsAndNames) {
  const Graph graph = Import("gemma-3-4b", {{"num_hidden_layers", 1}});
  int norms = 0;
  for (const Tensor& weight : graph.tensors) {
    if (weight.kind != TensorKind::kWeight) continue;
    const auto pieces = PublishedPieces("gemma3", graph, weight);
    ASSERT_EQ(pieces.size(), 1u);
    EXPECT_EQ(pieces[0].tensor, "language_model." + weight.name);
    EXPECT_EQ(pieces[0].added, weight.shape.size() == 1 ? 1 : 0);
    norms += weight.shape.size() == 1 ? 1 : 0;
  }
  EXPECT_EQ(norms, 4 + 2 + 1);
}

}  // namespace
}  // namespace tessera
