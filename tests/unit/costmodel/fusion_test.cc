#include "costmodel/fusion.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "planner/io/importer.h"
#include "tests/support/paths.h"
#include "tests/support/small_models.h"

namespace tessera {
namespace {

Graph Llama() {
  ImportOptions options;
  options.global_batch = 1;
  options.seq_len = 8;
  return *Differentiate(
      *ImportModel(ExamplePath("models/llama-3-8b"), options));
}

Stack Fusing(bool projections, bool elementwise) {
  Stack stack;
  stack.fuses_projections = projections;
  stack.fuses_elementwise = elementwise;
  return stack;
}

std::map<std::string, Fusion> ByName(const Graph& graph, const Stack& stack) {
  const std::vector<Fusion> fusion = FusionOf(graph, stack);
  std::map<std::string, Fusion> named;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    named[graph.nodes[i].name] = fusion[i];
  }
  return named;
}

TEST(Fusion, NothingWithoutIt) {
  const Graph graph = Llama();
  const std::vector<Fusion> fusions = FusionOf(graph, Stack());
  EXPECT_EQ(fusions.size(), graph.nodes.size());
  for (const Fusion& fusion : fusions) {
    EXPECT_EQ(fusion.outputs, 1);
    EXPECT_EQ(fusion.traffic, 1);
    EXPECT_FALSE(fusion.operand_rounded);
  }
}

TEST(Fusion, KnowsTheHead) {
  auto fusion = ByName(Llama(), Stack());
  EXPECT_TRUE(fusion["lm_head"].of_head);
  EXPECT_TRUE(fusion["lm_head.d0"].of_head);
  EXPECT_TRUE(fusion["lm_head.d1"].of_head);
  EXPECT_FALSE(fusion["model.layers.0.self_attn.q_proj"].of_head);
}

// 4,096 queries and 1,024 keys and values each are 6,144 outputs of one
// product; gate and up are alike.
TEST(Fusion, ProjectionsOfOneActivation) {
  auto fusion = ByName(Llama(), Fusing(true, false));
  EXPECT_EQ(fusion["model.layers.0.self_attn.q_proj"].outputs, 1.5);
  EXPECT_EQ(fusion["model.layers.0.self_attn.k_proj"].outputs, 6);
  EXPECT_EQ(fusion["model.layers.0.self_attn.v_proj.d1"].outputs, 6);
  EXPECT_EQ(fusion["model.layers.0.self_attn.o_proj"].outputs, 1);
  EXPECT_EQ(fusion["model.layers.0.mlp.up_proj.d0"].outputs, 2);
  EXPECT_EQ(fusion["model.layers.0.mlp.product"].traffic, 1);
}

// y = silu(gate) up is one kernel that reads gate and up and writes y: three
// passes, as the product has by itself. Backward reads dy, gate and up and
// writes their gradients: five, carried by the last of three operators of three
// passes each.
TEST(Fusion, GatedActivationIsOneKernelEachWay) {
  auto fusion = ByName(Llama(), Fusing(false, true));
  const std::string mlp = "model.layers.0.mlp.";
  EXPECT_EQ(fusion[mlp + "act_fn"].traffic, 0);
  EXPECT_EQ(fusion[mlp + "product"].traffic, 1);
  std::multiset<double> backward = {fusion[mlp + "product.d0"].traffic,
                                    fusion[mlp + "product.d1"].traffic,
                                    fusion[mlp + "act_fn.d0"].traffic};
  EXPECT_EQ(backward, (std::multiset<double>{0, 0, 5.0 / 3}));
  EXPECT_EQ(fusion[mlp + "add"].traffic, 1);
}

// Of however many operators: forward reads the first's operand and writes the
// last's result, two passes as the last has by itself. Backward reads the
// result's gradient and the first's operand and writes the gradient of that:
// three, as each operator has.
TEST(Fusion, LongChainIsOneKernelEachWay) {
  constexpr int kOperators = 50'000;
  GraphBuilder builder("chain", 2, 1, DType::kFloat32);
  builder.BeginBlock("all");
  const TensorId tokens = builder.Input("tokens", {2, 1}, DType::kInt32);
  const TensorId labels = builder.Input("labels", {2, 1}, DType::kInt32);
  const TensorId table = builder.Weight("table", {8, 4}, {.stddev = 1}, true);
  TensorId x = builder.Add1("embedding", "lookup", {tokens, table});
  for (int i = 0; i < kOperators; ++i) {
    x = builder.Add1("gelu", "gelu." + std::to_string(i), {x}, "bsh->bsh");
  }
  const TensorId logits =
      builder.Add1("linear", "head", {x, table}, "bsi,vi->bsv");
  const Graph graph = testing::FinishWithLoss(builder, logits, labels);
  const std::vector<Fusion> fusion = FusionOf(graph, Fusing(false, true));
  std::map<Pass, std::vector<double>> carried;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    if (!graph.nodes[i].op->name.starts_with("gelu")) continue;
    if (fusion[i].traffic > 0) {
      carried[graph.nodes[i].pass].push_back(fusion[i].traffic);
    }
  }
  EXPECT_EQ(carried[Pass::kForward], std::vector<double>{1});
  EXPECT_EQ(carried[Pass::kBackward], std::vector<double>{1});
}

TEST(Fusion, KernelsBeforeProductsRound) {
  auto fusion = ByName(Llama(), Fusing(false, true));
  const std::string layer = "model.layers.0.";
  // Behind a norm, behind the gated activation, and the gradients of its
  // inputs; not behind attention and not of the residual stream.
  EXPECT_TRUE(fusion[layer + "self_attn.q_proj"].operand_rounded);
  EXPECT_TRUE(fusion[layer + "mlp.down_proj"].operand_rounded);
  EXPECT_TRUE(fusion[layer + "mlp.gate_proj.d0"].operand_rounded);
  EXPECT_FALSE(fusion[layer + "self_attn.o_proj"].operand_rounded);
  EXPECT_FALSE(fusion[layer + "mlp.down_proj.d0"].operand_rounded);
}

}  // namespace
}  // namespace tessera
