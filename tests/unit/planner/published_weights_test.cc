// Where weights lie in published files: each element of a tensor is one of a
// weight's, and each of a weight's is there.

#include "planner/io/published_weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "planner/io/importer.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;

Graph Import(const std::string& model) {
  ImportOptions options;
  options.global_batch = 1;
  options.seq_len = 8;
  auto graph =
      ImportModel(ExamplePath("models/" + model + "/config.json"), options);
  return std::move(graph).value();
}

int64_t ElementsIn(const Shape& shape) {
  int64_t elements = 1;
  for (int64_t extent : shape) elements *= extent;
  return elements;
}

struct Model {
  std::string family;
  std::string example;
};

class PublishedWeights : public ::testing::TestWithParam<Model> {};

TEST_P(PublishedWeights, AreAllOfWeightsAndTensors) {
  const Graph graph = Import(GetParam().example);
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
      // Large ones by their ends alone.
      const int64_t step = std::max<int64_t>(1, piece.count / 50'000);
      for (int64_t i = 0; i < piece.count; i += step) {
        const int64_t at = piece.stride == 0
                               ? piece.offset + i
                               : piece.offset +
                                     i % piece.columns * piece.stride +
                                     i / piece.columns;
        EXPECT_LT(at, ElementsIn(piece.shape)) << weight.name;
        EXPECT_TRUE(seen[piece.tensor].insert(at).second)
            << weight.name << " " << i;
      }
    }
    EXPECT_EQ(next, ElementsIn(weight.shape)) << weight.name;
  }
  for (const auto& [tensor, elements] : seen) {
    if (ElementsIn(shapes[tensor]) > 50'000) continue;
    // OPT's positions begin with two rows that no token has.
    const int64_t unused =
        tensor.ends_with("embed_positions.weight") ? 2 * shapes[tensor][1] : 0;
    EXPECT_EQ(std::ssize(elements), ElementsIn(shapes[tensor]) - unused)
        << tensor;
  }
}

INSTANTIATE_TEST_SUITE_P(Families, PublishedWeights,
                         ::testing::Values(Model{"gpt2", "gpt2-tiny"},
                                           Model{"llama", "llama-3.2-1b"},
                                           Model{"mixtral", "mixtral-tiny"},
                                           Model{"phi3", "phi-3-mini"},
                                           Model{"opt", "opt-125m"},
                                           Model{"bloom", "bloom-560m"},
                                           Model{"gpt_neox", "pythia-1b"}),
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
    EXPECT_EQ(pieces[0].columns, 768);
    EXPECT_EQ(pieces[0].stride, 2304);
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

}  // namespace
}  // namespace tessera
