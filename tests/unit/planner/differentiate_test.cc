#include <gtest/gtest.h>

#include "planner/ir/graph.h"
#include "tests/support/matmul_parameters.h"

namespace tessera {
namespace {

// x = table[ids]; y = x w^T + bias; z = y + x; loss(z w2^T), all of one width.
Graph SmallForward(bool bias) {
  GraphBuilder builder("small", 4, 3, DType::kFloat32);
  builder.BeginBlock("all");
  const TensorId ids = builder.Input("tokens", {4, 3}, DType::kInt32);
  const TensorId labels = builder.Input("labels", {4, 3}, DType::kInt32);
  const TensorId table = builder.Weight("table", {7, 5}, {0.1, 0}, true);
  const TensorId w = builder.Weight("w", {5, 5}, {0.1, 0}, true);
  const TensorId x = builder.Add1("embedding", "x", {ids, table});
  TensorId y;
  if (bias) {
    const TensorId b = builder.Weight("bias", {5}, {0, 0}, false);
    y = builder.Add1("linear", "y", {x, w, b}, "bsi,oi+o->bso");
  } else {
    y = builder.Add1("linear", "y", {x, w}, "bsi,oi->bso");
  }
  const TensorId z = builder.Add1("add", "z", {y, x}, "bsh,bsh->bsh");
  const TensorId logits =
      builder.Add1("linear", "logits", {z, table}, "bsi,vi->bsv");
  const TensorId count = builder.Add1("count_labels", "count", {labels});
  const TensorId loss =
      builder.Add1("cross_entropy", "loss", {logits, labels, count});
  auto graph = builder.Finish(loss);
  EXPECT_TRUE(graph.has_value()) << graph.error().ToString();
  return *graph;
}

const Node* FindNode(const Graph& graph, std::string_view name) {
  for (const Node& node : graph.nodes) {
    if (node.name == name) return &node;
  }
  return nullptr;
}

TEST(Differentiate, DerivesTheAdjointsRulesFromTheForwardRule) {
  const Graph graph = *Differentiate(SmallForward(true));
  EXPECT_EQ(FindNode(graph, "y.d0")->rule.ToString(), "bso,oi->bsi");
  EXPECT_EQ(FindNode(graph, "y.d1")->rule.ToString(), "bso,bsi->oi");
  EXPECT_EQ(FindNode(graph, "y.d2")->rule.ToString(), "bso->o");
  // A bias gradient names exactly what it reads: listing x would multiply it.
  EXPECT_EQ(FindNode(graph, "y.d2")->operands.size(), 1u);
}

TEST(Differentiate, KeepsTheForwardRoles) {
  const Graph graph = *Differentiate(SmallForward(false));
  const IndexRule& rule = FindNode(graph, "y.d1")->rule;
  EXPECT_EQ(rule.factors[static_cast<size_t>(rule.FactorOf('b'))].role,
            Role::kSample);
  EXPECT_EQ(rule.factors[static_cast<size_t>(rule.FactorOf('o'))].role,
            Role::kParameter);
}

TEST(Differentiate, AddsGradientsThatMeet) {
  // x is read by the linear and by the residual add.
  const Graph graph = *Differentiate(SmallForward(true));
  const Node* sum = FindNode(graph, "x.d_sum");
  ASSERT_NE(sum, nullptr);
  EXPECT_EQ(sum->operands.size(), 2u);
  EXPECT_EQ(graph.tensor(graph.tensor(sum->results[0]).gradient_of).name, "x");
}

// x is read in its own block and in three others: each adds its gradients to
// the sum that comes from behind, so that one goes from block to block.
TEST(Differentiate, SumsGradientsBlockByBlock) {
  GraphBuilder builder("g", 2, 2, DType::kFloat32);
  const TensorId ids = builder.Input("tokens", {2, 2}, DType::kInt32);
  const TensorId table = builder.Weight("table", {3, 3}, {}, true);
  builder.BeginBlock("a");
  const TensorId x = builder.Add1("embedding", "x", {ids, table});
  TensorId y = x;
  for (const char* block : {"b", "c", "d"}) {
    builder.BeginBlock(block);
    const std::string name(block);
    TensorId z = builder.Add1("silu", name + ".silu", {x}, "bsh->bsh");
    z = builder.Add1("multiply", name + ".product", {z, x}, "bsh,bsh->bsh");
    y = builder.Add1("multiply", name + ".y", {y, z}, "bsh,bsh->bsh");
  }
  const TensorId count = builder.Add1("count_labels", "count", {ids});
  const TensorId loss = builder.Add1("cross_entropy", "loss", {y, ids, count});
  const Graph graph = *Differentiate(*builder.Finish(loss));
  std::vector<std::pair<std::string, size_t>> sums;
  TensorId before;
  for (const Node& node : graph.nodes) {
    if (node.name != "x.d_sum") continue;
    sums.emplace_back(graph.blocks[static_cast<size_t>(node.block)],
                      node.operands.size());
    EXPECT_TRUE(!before.valid() || node.operands[0] == before);
    before = node.results[0];
  }
  // The block "b" reads x a third time, as y.
  EXPECT_EQ(sums, (std::vector<std::pair<std::string, size_t>>{
                      {"d", 2}, {"c", 3}, {"b", 4}}));
}

TEST(Differentiate, ListsOneTermForEveryUseOfATiedWeight) {
  const Graph graph = *Differentiate(SmallForward(true));
  int terms = 0;
  for (const GradientTerm& term : graph.gradients) {
    terms += graph.tensor(term.weight).name == "table";
  }
  EXPECT_EQ(terms, 2);  // the lookup's and the head's
}

TEST(Differentiate, RefusesAWeightThatTheLossDoesNotSee) {
  GraphBuilder builder("g", 2, 2, DType::kFloat32);
  const TensorId labels = builder.Input("labels", {2, 2}, DType::kInt32);
  const TensorId table = builder.Weight("table", {3, 3}, {}, true);
  builder.Weight("unused", {3}, {}, true);
  const TensorId x = builder.Add1("embedding", "x", {labels, table});
  const TensorId count = builder.Add1("count_labels", "count", {labels});
  const TensorId loss =
      builder.Add1("cross_entropy", "loss", {x, labels, count});
  const auto graph = Differentiate(*builder.Finish(loss));
  ASSERT_FALSE(graph.has_value());
  EXPECT_NE(graph.error().ToString().find("unused"), std::string::npos);
}

// What is added to the loss has gradient one, which its operator takes for
// granted: no gradient of a scalar exists.
TEST(Differentiate, AuxiliaryLossesAreAddedToTheLoss) {
  GraphBuilder builder("g", 2, 2, DType::kFloat32);
  const TensorId labels = builder.Input("labels", {2, 2}, DType::kInt32);
  const TensorId table = builder.Weight("table", {3, 3}, {}, true);
  const TensorId x = builder.Add1("embedding", "x", {labels, table});
  const TensorId balance = builder.Add1("moe_balance", "balance", {x}, "",
                                        {{"coefficient", 1},
                                         {"group_best", 1},
                                         {"groups", 1},
                                         {"sigmoid", 0},
                                         {"top_groups", 1},
                                         {"top_k", 1}});
  const TensorId count = builder.Add1("count_labels", "count", {labels});
  const TensorId entropy =
      builder.Add1("cross_entropy", "entropy", {x, labels, count});
  const TensorId loss = builder.Add1("add", "loss", {entropy, balance}, ",->");
  const Graph graph = *Differentiate(*builder.Finish(loss));
  ASSERT_NE(FindNode(graph, "balance.d0"), nullptr);
  ASSERT_NE(FindNode(graph, "entropy.d0"), nullptr);
  ASSERT_NE(FindNode(graph, "x.d_sum"), nullptr);
  for (const Tensor& tensor : graph.tensors) {
    EXPECT_FALSE(tensor.gradient_of.valid() && tensor.shape.empty())
        << tensor.name;
  }
}

TEST(Validate, AsManyChoicesAsExperts) {
  GraphBuilder builder("g", 2, 2, DType::kFloat32);
  const TensorId labels = builder.Input("labels", {2, 2}, DType::kInt32);
  const TensorId table = builder.Weight("table", {3, 3}, {}, true);
  const TensorId x = builder.Add1("embedding", "x", {labels, table});
  builder.Add("moe_gate", "gate", {x}, "",
              {{"capacity", 1},
               {"group_best", 1},
               {"groups", 1},
               {"renormalise", 1},
               {"scale", 1},
               {"sigmoid", 0},
               {"top_groups", 1},
               {"top_k", 4}});
  const auto graph = builder.Finish(x);
  ASSERT_FALSE(graph.has_value());
  EXPECT_NE(graph.error().ToString().find(
                "top_k is 4: expected at most 3, the number of experts"),
            std::string::npos)
      << graph.error().ToString();
}

TEST(Validate, NamesACycle) {
  Graph graph = SmallForward(false);
  std::swap(graph.nodes[0], graph.nodes[1]);
  const std::vector<Error> errors = Validate(graph);
  ASSERT_FALSE(errors.empty());
  EXPECT_NE(errors[0].message.find("cycle"), std::string::npos);
}

TEST(ModelFlops, CountsSixPerMatrixParameterAndToken) {
  // w: 25, tied head: 35; 12 tokens: 6 * 60 * 12 = 4320. No attention.
  const Graph graph = SmallForward(true);
  EXPECT_EQ(MatmulParameterCount(graph), 60);
  EXPECT_EQ(ModelFlops(graph).value, 4320);
  EXPECT_EQ(ParameterCount(graph), 35 + 25 + 5);
}

}  // namespace
}  // namespace tessera
