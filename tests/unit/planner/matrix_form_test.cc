#include "planner/plan/matrix_form.h"

#include <gtest/gtest.h>

#include <string>

#include "planner/io/importer.h"
#include "planner/ir/op.h"
#include "planner/plan/plan.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

Graph Import(const std::string& model) {
  ImportOptions options;
  options.global_batch = 8;
  options.seq_len = 16;
  auto graph = ImportModel(model, options);
  TESSERA_CHECK(graph.has_value()) << graph.error().ToString();
  return std::move(graph).value();
}

std::optional<MatrixForm> FormOf(const Graph& graph, const std::string& name) {
  const std::vector<TensorId> weights = Weights(graph);
  const auto forms = MatrixForms(graph);
  for (size_t w = 0; w < weights.size(); ++w) {
    if (graph.tensor(weights[w]).name == name) return forms[w];
  }
  ADD_FAILURE() << "no weight " << name;
  return {};
}

// (heads, size) of a head are the rows of a projection, and the columns of the
// one behind attention; biases are vectors in whatever dimensions.
TEST(MatrixForm, OfATransformer) {
  const Graph gpt2 = Import(ExamplePath("models/gpt2-tiny/config.json"));
  EXPECT_EQ(FormOf(gpt2, "wte.weight"), (MatrixForm{0, 1}));
  EXPECT_EQ(FormOf(gpt2, "wpe.weight"), (MatrixForm{0, 1}));
  EXPECT_EQ(FormOf(gpt2, "h.0.attn.c_attn.q.weight"), (MatrixForm{0, 3}));
  EXPECT_EQ(FormOf(gpt2, "h.0.attn.c_attn.k.weight"), (MatrixForm{0, 2}));
  EXPECT_EQ(FormOf(gpt2, "h.0.attn.c_proj.weight"), (MatrixForm{0, 1}));
  EXPECT_EQ(FormOf(gpt2, "h.0.attn.c_attn.q.bias"), std::nullopt);
  EXPECT_EQ(FormOf(gpt2, "h.0.ln_1.weight"), std::nullopt);
}

// One matrix for each expert.
TEST(MatrixForm, OfExperts) {
  const Graph mixtral = Import("zoo:mixtral-tiny");
  const std::string moe = "model.layers.0.block_sparse_moe.";
  EXPECT_EQ(FormOf(mixtral, moe + "experts.w1.weight"), (MatrixForm{1, 1}));
  EXPECT_EQ(FormOf(mixtral, moe + "gate.weight"), (MatrixForm{0, 1}));
}

// Windows, as PyTorch has it: of the last two of four dimensions.
TEST(MatrixForm, OfAConvolution) {
  const Graph resnet = Import("zoo:resnet-tiny");
  int windows = 0;
  const std::vector<TensorId> weights = Weights(resnet);
  const auto forms = MatrixForms(resnet);
  for (size_t w = 0; w < weights.size(); ++w) {
    if (resnet.tensor(weights[w]).shape.size() != 4) continue;
    EXPECT_EQ(forms[w], (MatrixForm{2, 1}));
    ++windows;
  }
  EXPECT_GT(windows, 3);
}

// x (4 2) w^T (3 2) + bias (3): of the matrix 3 rows, 2 columns and a mean, of
// the bias 3 elements.
TEST(MatrixForm, ElementsOfAState) {
  Graph graph;
  const auto add = [&](Shape shape, TensorKind kind) {
    Tensor tensor;
    tensor.shape = std::move(shape);
    tensor.kind = kind;
    graph.tensors.push_back(std::move(tensor));
    return TensorId(graph.tensors.size() - 1);
  };
  Node node;
  node.op = *FindOp("linear");
  node.rule = *IndexRule::Parse("bsi,oi+o->bso");
  node.operands = {add({4, 1, 2}, TensorKind::kInput),
                   add({3, 2}, TensorKind::kWeight),
                   add({3}, TensorKind::kWeight)};
  node.results = {add({4, 1, 3}, TensorKind::kActivation)};
  graph.nodes.push_back(std::move(node));
  EXPECT_EQ(FactoredElements(graph), 3 + 2 + 1 + 3);
}

}  // namespace
}  // namespace tessera
