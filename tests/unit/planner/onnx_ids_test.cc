// ONNX nodes that make ids and read by them: top-k, one-hot marks, gathers and
// scattered sums, and the routed experts that exporters write with them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>

#include "planner/io/importer.h"
#include "planner/io/onnx.h"
#include "planner/ir/token_ids.h"
#include "tests/support/onnx_bytes.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::IsSupersetOf;

Result<Graph> Import(const std::string& path, int64_t batch, int64_t seq_len) {
  ImportOptions options;
  options.global_batch = batch;
  options.seq_len = seq_len;
  return ImportModel(path, options);
}

Result<Graph> ImportParts(const Parts& parts) {
  const std::string path =
      ::testing::TempDir() + std::to_string(getpid()) + ".tessera.ids.onnx";
  std::ofstream(path, std::ios::binary) << BytesOf(parts);
  auto graph = Import(path, 4, 0);
  std::filesystem::remove(path);
  return graph;
}

std::set<std::string> OpsOf(const Graph& graph) {
  std::set<std::string> ops;
  for (const Node& node : graph.nodes) ops.emplace(node.op->name);
  return ops;
}

const Node& NodeNamed(const Graph& graph, const std::string& name) {
  return *std::ranges::find(graph.nodes, name, &Node::name);
}

// Of each sample's 7 numbers the 3 largest and their ids.
Message TopKNode() {
  return Message()
      .Text(1, "y")
      .Text(1, "three")
      .Text(2, "best")
      .Text(2, "ids")
      .Text(3, "top")
      .Text(4, "TopK");
}

// Features [batch, 6] -> 7 -> what `nodes` make of the best 3.
Parts WithTopK(std::vector<Message> nodes) {
  Parts parts = {
      .inputs = {InputOf("x", 1, {"n", "6"})},
      .weights = {WeightOf("w", {6, 7}), WeightOf("table", {7, 5}),
                  IntsOf("three", {3}), IntsOf("places", {0, 1, 2, 3, 4, 5, 6}),
                  IntsOf("odd", {1, 3, 5}), IntsOf("last", {-1})},
      .nodes = {NodeOf("MatMul", "router", {"x", "w"}, "y"), TopKNode()}};
  parts.nodes.insert(parts.nodes.end(), nodes.begin(), nodes.end());
  return parts;
}

std::string ErrorOf(const Parts& parts) {
  const auto graph = ImportParts(parts);
  return graph ? "" : graph.error().ToString();
}

// What is padding is no vocabulary of two tokens.
TEST(OnnxIds, TokensThatAreComparedWithOneHaveTheirTablesVocabulary) {
  const auto vocabulary = [](int64_t padding) {
    const auto graph = ImportParts(
        {.inputs = {InputOf("t", 7, {"4", "6"})},
         .weights = {WeightOf("table", {9, 5}), IntsOf("pad", {padding}),
                     IntsOf("last", {2})},
         .nodes = {NodeOf("Gather", "lookup", {"table", "t"}, "e"),
                   NodeOf("Equal", "padding", {"t", "pad"}, "p"),
                   NodeOf("Not", "not", {"p"}, "n"),
                   NodeOf("Cast", "cast", {"n"}, "c", {IntAttribute("to", 1)}),
                   NodeOf("Unsqueeze", "each", {"c", "last"}, "u"),
                   NodeOf("Mul", "masked", {"e", "u"}, "logits")}});
    EXPECT_TRUE(graph.has_value()) << graph.error().ToString();
    return graph ? VocabularyOf(*graph) : 0;
  };
  EXPECT_EQ(vocabulary(0), 9);
  EXPECT_EQ(vocabulary(1), 9);
  EXPECT_EQ(vocabulary(300), 9);
}

TEST(OnnxIds, OneHotsAreOfAVocabulary) {
  const auto graph = ImportParts(
      {.inputs = {InputOf("t", 7, {"4", "6"})},
       .weights = {WeightOf("w", {9, 5}), IntsOf("depth", {9}),
                   FloatsOf("off_on", {2}, {0, 1})},
       .nodes = {NodeOf("OneHot", "marks", {"t", "depth", "off_on"}, "m"),
                 NodeOf("MatMul", "layer", {"m", "w"}, "logits")}});
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  EXPECT_EQ(VocabularyOf(*graph), 9);
}

TEST(OnnxIds, TopKHasValuesAndIds) {
  const auto graph =
      ImportParts(WithTopK({NodeOf("GatherElements", "again", {"y", "ids"}, "g",
                                   {IntAttribute("axis", 1)}),
                            NodeOf("Add", "sum", {"g", "best"}, "logits")}));
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  const Node& top = NodeNamed(*graph, "top");
  EXPECT_EQ(top.rule.ToString(), "bv!->bk!,bk");
  EXPECT_EQ(top.attribute("k"), 3);
  EXPECT_EQ(graph->tensor(top.results[1]).dtype, DType::kInt32);
  EXPECT_EQ(graph->tensor(top.results[1]).shape, (Shape{4, 3}));
  // Of the same sample's numbers, not of all.
  EXPECT_EQ(NodeNamed(*graph, "again").rule.ToString(), "bv,bk->bk");
  EXPECT_TRUE(Differentiate(*graph).has_value());
}

// Rows of a weight by ids that are computed, [4,3] -> [4,3,5], weighed by what
// was best.
TEST(OnnxIds, RowsOfWeights) {
  Parts parts = WithTopK({NodeOf("Gather", "rows", {"table", "ids"}, "r"),
                          NodeOf("Unsqueeze", "weights", {"best", "last"}, "b"),
                          NodeOf("Mul", "weighed", {"r", "b"}, "rb"),
                          NodeOf("ReduceSum", "sum", {"rb", "one"}, "logits",
                                 {IntAttribute("keepdims", 0)})});
  parts.weights.push_back(IntsOf("one", {1}));
  const auto graph = ImportParts(parts);
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  const Node& gather = NodeNamed(*graph, "rows");
  EXPECT_EQ(std::string(gather.op->name), "gather");
  EXPECT_EQ(graph->tensor(gather.results[0]).shape, (Shape{4, 3, 5}));
  EXPECT_TRUE(Differentiate(*graph).has_value());
}

// Ids beside 0, 1, ... are marks; scattered, they are gates of all 7.
TEST(OnnxIds, MarksAndSums) {
  Parts parts =
      WithTopK({NodeOf("Unsqueeze", "each", {"ids", "last"}, "i"),
                NodeOf("Equal", "marks", {"i", "places"}, "m"),
                NodeOf("Unsqueeze", "weights", {"best", "last"}, "b"),
                NodeOf("Mul", "weighed", {"m", "b"}, "wm"),
                NodeOf("ReduceSum", "gates", {"wm", "one"}, "g1",
                       {IntAttribute("keepdims", 0)}),
                NodeOf("ScatterElements", "scattered", {"zeros", "ids", "best"},
                       "g2", {IntAttribute("axis", 1)}),
                NodeOf("Add", "both", {"g1", "g2"}, "logits")});
  parts.weights.push_back(IntsOf("one", {1}));
  parts.weights.push_back(IntsOf("shape", {4, 7}));
  parts.nodes.insert(parts.nodes.begin() + 2,
                     NodeOf("ConstantOfShape", "fill", {"shape"}, "zeros"));
  const auto graph = ImportParts(parts);
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  EXPECT_EQ(NodeNamed(*graph, "marks").rule.ToString(), "bk->bkv");
  EXPECT_EQ(NodeNamed(*graph, "scattered").rule.ToString(), "bk,bk->bv");
  EXPECT_TRUE(Differentiate(*graph).has_value());
}

TEST(OnnxIds, WhatIsNotComputedWithIdsIsNamed) {
  EXPECT_THAT(
      ErrorOf(WithTopK({NodeOf("Add", "moved", {"ids", "three"}, "j"),
                        NodeOf("Gather", "rows", {"table", "j"}, "logits")})),
      HasSubstr("node 'rows' (Gather): operand 1 is computed: expected ids as "
                "an input, TopK, ArgMax or ArgMin have them"));
  EXPECT_THAT(
      ErrorOf(WithTopK({NodeOf("Mul", "both", {"ids", "best"}, "logits")})),
      HasSubstr("node 'both' (Mul): computes with ids"));
  EXPECT_THAT(
      ErrorOf(WithTopK({NodeOf("Equal", "same", {"ids", "odd"}, "logits")})),
      HasSubstr("node 'same' (Equal): compares ids with other ids, or "
                "with numbers that do not follow one another"));
  // Each sample's numbers by the ids of all samples.
  EXPECT_THAT(
      ErrorOf(WithTopK({NodeOf("Gather", "crossed", {"y", "ids"}, "logits",
                               {IntAttribute("axis", 1)})})),
      HasSubstr("node 'crossed' (Gather): reads each sample's elements by the "
                "ids of all samples"));
}

// What is compared is whole; what else is computed would be rounded.
TEST(OnnxIds, WholeNumbersAreCast) {
  const Message to_int = IntAttribute("to", 7);
  EXPECT_THAT(ErrorOf(WithTopK(
                  {NodeOf("Cast", "rounded", {"best"}, "logits", {to_int})})),
              HasSubstr("node 'rounded' (Cast): rounds what is computed"));
  const auto graph = ImportParts(
      WithTopK({NodeOf("Greater", "above", {"best", "best"}, "c"),
                NodeOf("Cast", "whole", {"c"}, "i", {to_int}),
                NodeOf("Cast", "back", {"i"}, "f", {IntAttribute("to", 1)}),
                NodeOf("Add", "sum", {"f", "best"}, "logits")}));
  EXPECT_TRUE(graph.has_value()) << graph.error().ToString();
}

TEST(OnnxIds, ShapesThatDependOnDataAreNamed) {
  EXPECT_THAT(
      ErrorOf(WithTopK({NodeOf("NonZero", "tokens", {"best"}, "logits")})),
      HasSubstr("node 'tokens' (NonZero): what it computes has a shape that "
                "depends on data"));
}

// As PyTorch's exporter writes experts of which a token takes the two best: a
// gate for each, zero but for those. Also where the zeros that it scatters the
// gates into are more than are computed while the file is read.
TEST(OnnxIds, ScatteredGatesOfExperts) {
  for (const int64_t batch : {4, 512}) {
    const auto graph =
        Import(TestdataPath("onnx/routed.onnx"), batch, batch == 4 ? 16 : 1024);
    ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
    EXPECT_THAT(OpsOf(*graph),
                IsSupersetOf({"softmax", "top_k", "scatter_add", "einsum"}));
    // A table, the router, two matrices for each of 4 experts, and the head.
    EXPECT_EQ(ParameterCount(*graph),
              256 * 16 + 16 * 4 + 2 * 4 * 16 * 32 + 16 * 256 + 256);
    EXPECT_TRUE(Differentiate(*graph).has_value());
  }
}

// As it writes Mixtral: each token has its experts' own matrices.
TEST(OnnxIds, GatheredMatricesOfExperts) {
  for (const int64_t batch : {4, 512}) {
    const auto graph =
        Import(TestdataPath("onnx/mixtral.onnx"), batch, batch == 4 ? 16 : 512);
    ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
    const auto gathers = std::ranges::count_if(
        graph->nodes, [](const Node& n) { return n.op->name == "gather"; });
    EXPECT_EQ(gathers, 2 * 2);  // up and down, of two layers
    EXPECT_THAT(OpsOf(*graph), IsSupersetOf({"attention", "rotary", "top_k"}));
  }
}

}  // namespace
}  // namespace tessera
