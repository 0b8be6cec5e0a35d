// Where weights lie in published files: each element of a tensor is one of a
// weight's, and each of a weight's is there.

#include "planner/io/published_weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "planner/base/element_count.h"
#include "planner/io/importer.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;

// An example's model, with other values for keys of its config, which `more`
// has as JSON where they are no sizes.
Graph Import(const std::string& model,
             const std::map<std::string, int64_t>& sizes = {},
             const std::string& more = "{}") {
  ImportOptions options;
  options.global_batch = 1;
  options.seq_len = 8;
  for (const auto& [key, size] : sizes) {
    JsonValue& value = options.overrides[key];
    value.kind = JsonValue::Kind::kNumber;
    value.number = static_cast<double>(size);
  }
  const auto others = ParseJson(more);
  TESSERA_CHECK(others.has_value()) << more;
  for (const auto& [key, value] : others->fields) {
    options.overrides[key] = value;
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

const std::map<std::string, int64_t> kDecoder = {
    {"hidden_size", 16},        {"num_hidden_layers", 1},
    {"num_attention_heads", 4}, {"num_key_value_heads", 2},
    {"intermediate_size", 24},  {"head_dim", 4},
    {"vocab_size", 50}};

class PublishedWeights : public ::testing::TestWithParam<Model> {};

void ExpectAllOfWeightsAndTensors(const std::string& family, const Graph& graph,
                                  PublishedExperts experts) {
  std::map<std::string, std::set<int64_t>> seen;  // elements of tensors
  std::map<std::string, Shape> shapes;
  for (const Tensor& weight : graph.tensors) {
    if (weight.kind != TensorKind::kWeight) continue;
    int64_t next = 0;
    for (const PublishedPiece& piece :
         PublishedPieces(family, graph, weight, experts)) {
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

TEST_P(PublishedWeights, AreAllOfWeightsAndTensors) {
  const Graph graph = Import(GetParam().example, GetParam().sizes);
  for (const auto experts :
       {PublishedExperts::kEach, PublishedExperts::kFused}) {
    ExpectAllOfWeightsAndTensors(GetParam().family, graph, experts);
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
                      Model{"gemma3_text", "gemma-3-1b", kDecoder},
                      Model{"gemma3", "gemma-3-4b", kDecoder},
                      Model{"olmo2", "olmo-2-7b", kDecoder},
                      Model{"starcoder2", "starcoder2-3b", kDecoder},
                      Model{"phi",
                            "phi-2",
                            {{"hidden_size", 16},
                             {"num_hidden_layers", 1},
                             {"num_attention_heads", 4},
                             {"num_key_value_heads", 2},
                             {"intermediate_size", 24},
                             {"head_dim", 10},
                             {"vocab_size", 50}}},
                      Model{"glm4", "glm-4-9b", kDecoder},
                      Model{"cohere", "command-r", kDecoder},
                      Model{"bert", "bert-tiny", {{"vocab_size", 50}}},
                      Model{"t5", "t5-tiny", {{"vocab_size", 50}}},
                      Model{"vit", "vit-tiny", {{"hidden_size", 16}}},
                      Model{"resnet", "resnet-tiny", {{"embedding_size", 8}}},
                      Model{"deepseek_v2",
                            "deepseek-v2-lite",
                            {{"hidden_size", 16},
                             {"num_hidden_layers", 2},
                             {"num_attention_heads", 4},
                             {"num_key_value_heads", 4},
                             {"kv_lora_rank", 8},
                             {"qk_rope_head_dim", 4},
                             {"qk_nope_head_dim", 6},
                             {"v_head_dim", 5},
                             {"n_routed_experts", 3},
                             {"num_experts_per_tok", 2},
                             {"moe_intermediate_size", 12},
                             {"intermediate_size", 24},
                             {"vocab_size", 50}}},
                      Model{"deepseek_v3",
                            "deepseek-tiny",
                            {{"hidden_size", 24},
                             {"num_hidden_layers", 2},
                             {"moe_intermediate_size", 8},
                             {"intermediate_size", 24},
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

const Tensor& Named(const Graph& graph, const std::string& name) {
  const auto found = std::ranges::find(graph.tensors, name, &Tensor::name);
  TESSERA_CHECK(found != graph.tensors.end()) << name;
  return *found;
}

// Heads of deepseek-v2-lite: 16, whose queries have 128 plain features and,
// behind them in files, 64 that are turned, 2j and 2j + 1 together, which are
// j and 32 + j here, in front.
TEST(PublishedWeights, DeepseekTurnsNeighboursBehindPlainFeatures) {
  const Graph graph = Import("deepseek-v2-lite", {{"num_hidden_layers", 1}});
  const std::string attention = "model.layers.0.self_attn.";
  const int64_t row = 2048;
  auto pieces = PublishedPieces("deepseek_v2", graph,
                                Named(graph, attention + "q_proj.weight"));
  ASSERT_EQ(pieces.size(), 2u * 16);
  EXPECT_THAT(pieces[0].shape, ElementsAre(16 * 192, row));
  EXPECT_EQ(pieces[2].PlaceOf(33 * row + 7), (192 + 128 + 3) * row + 7);
  EXPECT_EQ(pieces[3].begin, (192 + 64) * row);
  EXPECT_EQ(pieces[3].PlaceOf(row), (192 + 1) * row);

  // The key that all heads turn is below the latent of 512.
  const std::string down = attention + "kv_a_proj_with_mqa.";
  pieces = PublishedPieces("deepseek_v2", graph,
                           Named(graph, down + "rotary.weight"));
  ASSERT_EQ(pieces.size(), 1u);
  EXPECT_EQ(pieces[0].tensor, down + "weight");
  EXPECT_THAT(pieces[0].shape, ElementsAre(512 + 64, row));
  EXPECT_EQ(pieces[0].PlaceOf(33 * row), (512 + 3) * row);

  // Of head 1: behind 128 features of key and of value, its key, its value.
  pieces = PublishedPieces("deepseek_v2", graph,
                           Named(graph, attention + "kv_b_proj.v.weight"));
  ASSERT_EQ(pieces.size(), 16u);
  EXPECT_EQ(pieces[1].tensor, attention + "kv_b_proj.weight");
  EXPECT_THAT(pieces[1].shape, ElementsAre(16 * 256, 512));
  EXPECT_EQ(pieces[1].offset, (256 + 128) * 512);
}

// Of expert 1 of mixtral-tiny's w3, that is above of what is fused: the gate of
// expert 0 and its other half, and its own gate.
TEST(PublishedWeights, FusedExpertsHaveGatesAboveTheRest) {
  const Graph graph = Import("mixtral-tiny");
  const std::string experts = "model.layers.0.block_sparse_moe.experts.";
  const Tensor& up = Named(graph, experts + "w3.weight");
  const int64_t count = up.shape[1] * up.shape[2];
  auto pieces = PublishedPieces("mixtral", graph, up, PublishedExperts::kFused);
  EXPECT_EQ(pieces[1].tensor, experts + "gate_up_proj");
  EXPECT_THAT(pieces[1].shape,
              ElementsAre(up.shape[0], 2 * up.shape[1], up.shape[2]));
  EXPECT_EQ(pieces[1].offset, 3 * count);
  const Tensor& down = Named(graph, experts + "w2.weight");
  pieces = PublishedPieces("mixtral", graph, down, PublishedExperts::kFused);
  EXPECT_EQ(pieces[1].tensor, experts + "down_proj");
  EXPECT_EQ(pieces[1].shape, down.shape);
  EXPECT_EQ(pieces[1].offset, count);
  // In memory, where files that transformers wrote so have the names from.
  EXPECT_EQ(OtherPublishedName("mixtral", pieces[1].tensor),
            "model.layers.0.mlp.experts.down_proj");
}

TEST(PublishedWeights, NamesAndShapesOfEncoders) {
  const auto only = [](const std::string& family, const Graph& graph,
                       const std::string& weight) {
    const auto pieces = PublishedPieces(family, graph, Named(graph, weight));
    TESSERA_CHECK(pieces.size() == 1u) << weight;
    return pieces[0];
  };
  const Graph vit = Import("vit-base-patch16-224");
  EXPECT_THAT(only("vit", vit, "vit.embeddings.cls_token").shape,
              ElementsAre(1, 1, 768));
  EXPECT_THAT(only("vit", vit, "vit.embeddings.position_embeddings").shape,
              ElementsAre(1, 197, 768));
  const std::string projection = "vit.embeddings.patch_embeddings.projection.";
  EXPECT_THAT(only("vit", vit, projection + "weight").shape,
              ElementsAre(768, 3, 16, 16));
  EXPECT_THAT(only("vit", vit, projection + "bias").shape, ElementsAre(768));
  const std::string layer = "vit.encoder.layer.3.";
  EXPECT_THAT(only("vit", vit, layer + "attention.output.dense.weight").shape,
              ElementsAre(768, 768));
  EXPECT_EQ(OtherPublishedName("vit", layer + "attention.output.dense.bias"),
            "vit.layers.3.attention.o_proj.bias");
  EXPECT_EQ(OtherPublishedName("vit", layer + "output.dense.bias"),
            "vit.layers.3.mlp.fc2.bias");

  const Graph t5 = Import("t5-small");
  const std::string block = "decoder.block.0.layer.";
  EXPECT_THAT(
      only("t5", t5, block + "0.SelfAttention.relative_attention_bias.weight")
          .shape,
      ElementsAre(32, 8));
  EXPECT_THAT(only("t5", t5, block + "1.EncDecAttention.o.weight").shape,
              ElementsAre(512, 512));

  const Graph bert = Import("bert-base", {{"num_hidden_layers", 1}});
  EXPECT_EQ(only("bert", bert, "cls.predictions.bias").tensor,
            "cls.predictions.bias");
  EXPECT_EQ(OtherPublishedName("bert", "bert.embeddings.LayerNorm.weight"),
            "bert.embeddings.LayerNorm.gamma");
  const Graph untied =
      Import("bert-base", {}, R"({"tie_word_embeddings": false})");
  EXPECT_EQ(only("bert", untied, "cls.predictions.bias").tensor,
            "cls.predictions.decoder.bias");
  const Graph labels = Import("t5-small", {}, R"({"architectures":
      ["T5ForTokenClassification"]})");
  EXPECT_EQ(only("t5", labels, "shared.weight").tensor,
            "transformer.shared.weight");
  EXPECT_EQ(only("t5", labels, "classifier.bias").tensor, "classifier.bias");
}

TEST(PublishedWeights, WhatFilesHaveBesideTheGraph) {
  const Graph images = Import("gemma-3-4b", {{"num_hidden_layers", 1}});
  const std::string_view reads = "the part that reads images";
  EXPECT_EQ(PartLeftOut("gemma3", images, "vision_tower.a.weight"), reads);
  EXPECT_EQ(PartLeftOut("gemma3", images, "model.vision_tower.a"), reads);
  EXPECT_EQ(PartLeftOut("gemma3", images, "language_model.model.a"), "");
  // T5 has a decoder of its own, and no 30th layer of it.
  const Graph whole = Import("t5-small");
  EXPECT_EQ(PartLeftOut("t5", whole, "decoder.block.30.a"), "");
  const Graph encoder =
      Import("t5-small", {}, R"({"architectures": ["T5EncoderModel"]})");
  EXPECT_EQ(PartLeftOut("t5", encoder, "decoder.block.30.a"),
            "a decoder that the model has not");

  const Graph deepseek = Import("deepseek-tiny");
  const auto zeros = ZerosInFiles("deepseek_v3", deepseek);
  ASSERT_FALSE(zeros.empty());
  EXPECT_TRUE(zeros[0].tensor.ends_with(".mlp.gate.e_score_correction_bias"));
  EXPECT_TRUE(ZerosInFiles("gpt2", Import("gpt2-tiny")).empty());
}

TEST(PublishedWeights, WhatTransformersHasNot) {
  const auto why = [](const std::string& family, const Graph& graph) {
    return WhyNotPublished({.family = family}, graph);
  };
  EXPECT_EQ(why("vit", Import("vit-tiny")), "");
  EXPECT_EQ(why("resnet", Import("resnet-tiny")), "");
  EXPECT_EQ(why("", Import("gpt2-tiny")), "");
  const auto vit = [](const std::string& key) {
    return Import("vit-tiny", {}, "{\"" + key + "\": true}");
  };
  for (const char* const key : {"qk_norm", "rms_norm", "parallel_blocks"}) {
    EXPECT_EQ(why("vit", vit(key)), std::string("its 'vit' has no ") + key);
  }
  EXPECT_EQ(why("resnet", Import("resnext-50")), "its 'resnet' has no groups");
  EXPECT_EQ(why("cnn", Import("alexnet")),
            "'cnn' is a family of Tessera's own");
}

}  // namespace
}  // namespace tessera
