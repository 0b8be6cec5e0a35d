// ONNX files: those that PyTorch's exporters wrote (tests/bench/against_onnx.py
// --write), and small ones written here byte by byte, whole and broken.

#include "planner/io/onnx.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <set>

#include "planner/base/file.h"
#include "planner/io/importer.h"
#include "planner/io/json_value.h"
#include "tests/support/onnx_bytes.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

ImportOptions Options(int64_t batch, int64_t seq_len = 0) {
  ImportOptions options;
  options.global_batch = batch;
  options.seq_len = seq_len;
  return options;
}

// `text` as a value of an override.
JsonValue Json(const std::string& text) {
  return ParseJson("{\"x\": " + text + "}")->Field("x");
}

std::string Fixture(const std::string& name) {
  return TestdataPath("onnx/" + name + ".onnx");
}

std::set<std::string> OpsOf(const Graph& graph) {
  std::set<std::string> ops;
  for (const Node& node : graph.nodes) ops.emplace(node.op->name);
  return ops;
}

// ---- Files of PyTorch's exporters
// ---------------------------------------------

// Counted by layers: weights and biases, two numbers a channel for norms.
TEST(OnnxFiles, HaveTheParametersOfTheirModels) {
  constexpr int64_t kHidden = 16;
  constexpr int64_t kNorm = 2 * kHidden;
  const auto dense = [](int64_t in, int64_t out) { return in * out + out; };
  // Queries, keys, values and output, an MLP and two norms.
  const auto layer = [&](int64_t inner) {
    return 4 * dense(kHidden, kHidden) + dense(kHidden, inner) +
           dense(inner, kHidden) + 2 * kNorm;
  };
  const std::pair<const char*, int64_t> models[] = {
      {"mlp", 192 * 32 + 32 + 3 * (32 * 32 + 32) + 32 * 10 + 10},
      {"residual", 3 * 8 * 9 + 2 * 8                        // stem
                       + 2 * (8 * 8 * 9 + 2 * 8)            // layer1
                       + 8 * 16 * 9 + 16 * 16 * 9 + 8 * 16  // layer2
                       + 3 * 2 * 16                         // its norms
                       + 16 * 10 + 10},                     // fc
      {"inception", 3 * 8 * 9 + 8 + 8 * 4 + 4               // stem, one
                        + 8 * 4 + 4 + 4 * 6 * 9 + 6         // three
                        + 8 * 4 * 5 + 4 + 4 * 6 * 5 + 6     // wide
                        + 8 * 4 + 4 + 20 * 9 * 10 + 10},    // pooled, fc
      {"grouped", 3 * 8 * 9 + 8 + dense(8, 12)              // stem, expand
                      + 12 * 9 + 12 + 12 * 8                // each, mix
                      + dense(8, 12)                        // widen
                      + 16 * 3 * 9 + 16 + 2 * 16            // groups of 3, norm
                      + dense(16, 10)},
      {"tokens-dynamo", 2 * 256 * 16 + 2 * 16  // tables, norm
                            + 16 * 32 + 32 + 32 * 16 + 16},
      {"gpt2",
       256 * kHidden + 32 * kHidden + 2 * layer(64) + kNorm + kHidden * 256},
      // Tokens, places and segments; the head has a layer of its own.
      {"bert", (256 + 32 + 2) * kHidden + kNorm + 2 * layer(32) +
                   dense(kHidden, kHidden) + kNorm + dense(kHidden, 256)},
      // Queries and outputs, keys and values of half as many heads, a gated
      // MLP and two norms.
      {"llama", 2 * 256 * kHidden +
                    2 * (2 * kHidden * kHidden + 2 * kHidden * 8 +
                         3 * kHidden * 32 + 2 * kHidden) +
                    kHidden},
      // Two tables, and of two layers each of four gates; PyTorch's two biases
      // are one.
      {"lstm", 2 * 256 * 12 + 2 * 4 * (12 + kHidden + 1) * kHidden +
                   2 * 4 * (2 * kHidden + 1) * kHidden + dense(kHidden, 256)},
      // A class token, places, and patches of 3x4x4.
      {"vit", kHidden + 17 * kHidden + dense(3 * 4 * 4, kHidden) +
                  2 * layer(32) + kNorm + dense(kHidden, 10)},  // up, down
      // A layer reads the mean and the largest of the channels.
      {"cbam",
       3 * 8 * 9 + 8 + dense(8, 2) + dense(2, 8) + 2 * 49 + dense(8, 10)},
      // Four tokens beside sixteen patches, and a place for each.
      {"tokens-expanded-dynamo", 4 * kHidden + 20 * kHidden +
                                     dense(3 * 4 * 4, kHidden) + layer(32) +
                                     dense(kHidden, 10)},
      // A cell's two biases are two layers'.
      {"lstm-cell",
       256 * kHidden + 2 * dense(kHidden, 4 * kHidden) + dense(kHidden, 256)},
  };
  for (const auto& [name, parameters] : models) {
    const auto graph = ImportModel(Fixture(name), Options(4, 16));
    ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
    EXPECT_EQ(ParameterCount(*graph), parameters) << name;
    EXPECT_TRUE(Differentiate(*graph).has_value()) << name;
  }
}

// An LSTM is a cell for each of its 16 steps, in blocks of up to ten. The
// decoder begins in the state that the encoder ends in: its first cells have
// operands that those of an encoder, which are zero, lack.
TEST(OnnxFiles, RecurrentLayersAreUnrolled) {
  const auto graph = ImportModel(Fixture("lstm"), Options(4, 16));
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  EXPECT_EQ(graph->seq_len, 16);
  std::map<std::string, int> cells;  // by operands
  for (const Node& node : graph->nodes) {
    if (node.op->name != "lstm_gates") continue;
    ++cells[std::to_string(node.operands.size())];
  }
  EXPECT_EQ(cells["1"], 2);  // first steps of the encoder's layers
  EXPECT_EQ(cells["2"], 4 * 16 - 2);
  // Four layers, each of two runs of steps.
  const auto runs =
      std::ranges::count_if(graph->blocks, [](const std::string& name) {
        return name.ends_with(".0") || name.ends_with(".10");
      });
  EXPECT_EQ(runs, 8);
  // Between layers nothing is put together and taken apart again.
  EXPECT_EQ(std::ranges::count(
                graph->nodes, "stack",
                [](const Node& node) { return std::string(node.op->name); }),
            1);
}

// However an exporter spells them: GELU is five nodes there, SiLU two.
TEST(OnnxFiles, ElementwiseFunctionsAreRecognised) {
  const auto mlp = ImportModel(Fixture("mlp"), Options(4));
  ASSERT_TRUE(mlp.has_value()) << mlp.error().ToString();
  EXPECT_THAT(OpsOf(*mlp),
              ElementsAre("count_labels", "cross_entropy", "gelu_erf", "linear",
                          "relu", "silu", "tanh"));
  const auto tokens = ImportModel(Fixture("tokens-dynamo"), Options(4, 16));
  ASSERT_TRUE(tokens.has_value()) << tokens.error().ToString();
  EXPECT_THAT(OpsOf(*tokens),
              ElementsAre("add", "count_labels", "cross_entropy", "embedding",
                          "gelu", "layer_norm", "linear"));
}

// Attention is found among products, masks and a softmax; its heads and the
// fused projection of queries, keys and values are taken apart.
TEST(OnnxFiles, AttentionIsRecognised) {
  for (const auto& [name, op] : {std::pair("gpt2", "attention"),
                                 std::pair("bert", "attention_bidirectional"),
                                 std::pair("vit", "attention_bidirectional")}) {
    const auto graph = ImportModel(Fixture(name), Options(4, 16));
    ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
    const int64_t places = std::string(name) == "vit" ? 17 : 16;
    EXPECT_EQ(graph->seq_len, places);
    int found = 0;
    for (const Node& node : graph->nodes) {
      if (node.op->op_class != OpClass::kAttention) continue;
      ++found;
      EXPECT_EQ(node.op->name, op);
      // 16 features of 4 heads: scores are divided by the root of 4.
      EXPECT_NEAR(node.attribute("scale"), 0.5, 1e-6);
      EXPECT_EQ(graph->tensor(node.operands[0]).shape,
                (Shape{4, places, 4, 1, 4}));
      EXPECT_EQ(graph->tensor(node.operands[1]).shape,
                (Shape{4, places, 4, 4}));
    }
    EXPECT_EQ(found, 2) << name;
    // Blocks are the halves of layers: equal but for names.
    const std::vector<int> classes = BlockClasses(*graph);
    EXPECT_LT(std::set<int>(classes.begin(), classes.end()).size(),
              classes.size())
        << name;
  }
}

// However it is spelled: an equation of heads behind places with a mask of a
// buffer; a fused projection of nn.MultiheadAttention whose heads are beside
// the samples, and whose mask is added; nn.TransformerEncoder with the steps
// first.
TEST(OnnxFiles, AttentionIsRecognisedInOtherWords) {
  for (const char* name :
       {"einsum", "multi-head-weights", "encoder-steps-first"}) {
    const auto graph = ImportModel(Fixture(name), Options(4, 16));
    ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
    int found = 0;
    for (const Node& node : graph->nodes) {
      EXPECT_NE(node.op->name, "softmax") << name;
      if (node.op->name != "attention") continue;
      ++found;
      EXPECT_NEAR(node.attribute("scale"), 0.5, 1e-6) << name;
    }
    EXPECT_EQ(found, 2) << name;
    EXPECT_TRUE(Differentiate(*graph).has_value()) << name;
  }
}

// A series of 12 steps of 3 features, read in both directions: a cell for each
// step and direction. The classifier reads the last state of each.
TEST(OnnxFiles, SeriesAreRead) {
  const auto graph = ImportModel(Fixture("series-both-ways"), Options(4, 1));
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  int cells = 0;
  for (const Node& node : graph->nodes) cells += node.op->name == "lstm_gates";
  EXPECT_EQ(cells, 2 * 12);
  // Weights of 4 gates of inputs, states and a bias, twice, and the head.
  EXPECT_EQ(ParameterCount(*graph),
            2 * 4 * 16 * (3 + 16 + 1) + 2 * 16 * 10 + 10);
}

// Rotary embeddings are found among slices, cosines and sines of constants, the
// frequencies of which are no weights; two heads of queries read one of keys.
TEST(OnnxFiles, RotaryPositionsAndGroupedHeadsAreRecognised) {
  // The longer sequence's table of angles, 2^19 places by 4 features, is too
  // large to be computed: they are those of a shorter one.
  for (const int64_t places : {int64_t{16}, int64_t{1} << 19}) {
    const auto graph = ImportModel(Fixture("llama"), Options(2, places));
    ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
    int rotary = 0;
    for (const Node& node : graph->nodes) {
      if (node.op->name == "rotary") {
        ++rotary;
        EXPECT_EQ(node.attribute("theta"), 10000);
        EXPECT_EQ(graph->tensor(node.operands[1]).name, "positions");
      }
      if (node.op->name != "attention") continue;
      EXPECT_NEAR(node.attribute("scale"), 0.5, 1e-6);
      EXPECT_EQ(graph->tensor(node.operands[0]).shape,
                (Shape{2, places, 2, 2, 4}));
      EXPECT_EQ(graph->tensor(node.operands[1]).shape,
                (Shape{2, places, 2, 4}));
    }
    EXPECT_EQ(rotary, 4);  // of queries and of keys in two layers
    const std::set<std::string> ops = OpsOf(*graph);
    EXPECT_FALSE(ops.contains("slice"));
    EXPECT_FALSE(ops.contains("concat_channels"));
  }
}

// Masks of a whole batch would be larger than the model.
TEST(OnnxFiles, MasksOfLargeBatchesAreReadFromSmallOnes) {
  const auto graph = ImportModel(Fixture("gpt2"), Options(1 << 20, 32));
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  EXPECT_THAT(OpsOf(*graph),
              ElementsAre("add", "attention", "count_labels", "cross_entropy",
                          "embedding", "gelu", "layer_norm", "linear"));
  const auto longer = ImportModel(Fixture("gpt2"), Options(4, 33));
  ASSERT_FALSE(longer.has_value());
  EXPECT_THAT(longer.error().ToString(),
              HasSubstr("has a row for each of 32 places: the sequence has "
                        "33"));
}

// A block ends where one tensor goes on: behind residuals and branches.
TEST(OnnxFiles, BlocksEndBehindResidualsAndBranches) {
  const auto residual = ImportModel(Fixture("residual"), Options(4));
  ASSERT_TRUE(residual.has_value()) << residual.error().ToString();
  EXPECT_THAT(residual->blocks, ElementsAre("/conv/Conv", "/layer1/conv1/Conv",
                                            "/layer2/conv1/Conv", "/fc/Gemm"));
  const auto inception = ImportModel(Fixture("inception"), Options(4));
  ASSERT_TRUE(inception.has_value()) << inception.error().ToString();
  EXPECT_EQ(inception->blocks.size(), 3u);  // stem, branches, fc
}

// Channels that a convolution reads in groups are two dimensions, (groups,
// channels of a group), where they are made, too.
TEST(OnnxFiles, GroupsOfChannelsAreDimensions) {
  const auto graph = ImportModel(Fixture("grouped"), Options(4));
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  std::map<std::string, std::string> rules;
  for (const Node& node : graph->nodes) rules[node.name] = node.rule.ToString();
  EXPECT_EQ(rules["/expand/Conv"], "bch!w!,pnck!l!+pn->bpnyx");
  EXPECT_EQ(rules["/each/Conv"], "bgch!w!,gnck!l!+gn->bgnyx");
  EXPECT_EQ(rules["/mix/Conv"], "bgch!w!,ogck!l!->boyx");
  for (const Tensor& tensor : graph->tensors) {
    if (tensor.name == "groups.weight") {
      EXPECT_EQ(tensor.shape, (Shape{4, 4, 3, 3, 3}));
    }
  }
}

// A dense layer of an image reads its dimensions as they are.
TEST(OnnxFiles, FlattenedImagesKeepTheirDimensions) {
  const auto graph = ImportModel(Fixture("inception"), Options(4));
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  std::vector<Shape> shapes;
  for (const Tensor& tensor : graph->tensors) {
    if (tensor.name == "fc.weight") shapes.push_back(tensor.shape);
  }
  EXPECT_THAT(shapes, ElementsAre(Shape{10, 20, 3, 3}));
}

TEST(OnnxFiles, OpenDimensionsAreBoundByOptions) {
  const auto no_batch = ImportModel(Fixture("mlp"), Options(0));
  ASSERT_FALSE(no_batch.has_value());
  EXPECT_THAT(no_batch.error().ToString(),
              HasSubstr("dimension 'batch': is open: needs --global-batch N"));
  const auto no_length = ImportModel(Fixture("tokens-dynamo"), Options(4));
  ASSERT_FALSE(no_length.has_value());
  EXPECT_THAT(no_length.error().ToString(), HasSubstr("needs --seq-len N"));
  const auto graph = ImportModel(Fixture("tokens-dynamo"), Options(4, 24));
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  EXPECT_EQ(graph->global_batch, 4);
  EXPECT_EQ(graph->seq_len, 24);
}

// ---- Files written here
// -------------------------------------------------------

Result<Graph> ImportBytes(const std::string& bytes,
                          const ImportOptions& options) {
  // Tests run beside each other.
  const std::string path =
      ::testing::TempDir() + std::to_string(getpid()) + ".tessera.test.onnx";
  std::ofstream(path, std::ios::binary) << bytes;
  auto graph = ImportModel(path, options);
  std::filesystem::remove(path);
  return graph;
}

std::string ErrorOf(const Parts& parts,
                    const ImportOptions& options = Options(4)) {
  const auto graph = ImportBytes(BytesOf(parts), options);
  return graph ? "" : graph.error().ToString();
}

Graph Imported(const Parts& parts, const ImportOptions& options) {
  auto graph = ImportBytes(BytesOf(parts), options);
  TESSERA_CHECK(graph.has_value()) << graph.error().ToString();
  TESSERA_CHECK(Differentiate(*graph).has_value());
  return *std::move(graph);
}

// Features [batch, 6] -> 5 -> 3.
Parts SmallMlp() {
  return {.inputs = {InputOf("x", 1, {"n", "6"})},
          .weights = {WeightOf("w1", {6, 5}), WeightOf("b1", {5}),
                      WeightOf("w2", {3, 5})},
          .nodes = {NodeOf("MatMul", "first", {"x", "w1"}, "y1"),
                    NodeOf("Add", "bias", {"b1", "y1"}, "y2"),
                    NodeOf("Relu", "relu", {"y2"}, "y3"),
                    NodeOf("Gemm", "second", {"y3", "w2"}, "logits",
                           {IntAttribute("transB", 1)})}};
}

// An image network with what a window can have.
Parts SmallCnn() {
  return {
      .inputs = {InputOf("x", 1, {"n", "2", "9", "9"})},
      .weights = {WeightOf("w", {4, 2, 3, 3}), WeightOf("scale", {4}),
                  WeightOf("shift", {4}), WeightOf("w_fc", {3, 8}),
                  IntsOf("flat", {0, -1})},
      .nodes = {
          NodeOf("Conv", "conv", {"x", "w"}, "c",
                 {Message().Text(1, "strides").Number(8, 2).Number(8, 2),
                  Message().Text(1, "auto_pad").Text(4, "SAME_UPPER")}),
          NodeOf("BatchNormalization", "norm",
                 {"c", "scale", "shift", "scale", "shift"}, "n1"),
          NodeOf("MaxPool", "pool", {"n1"}, "p",
                 {Message().Text(1, "kernel_shape").Number(8, 3).Number(8, 3),
                  Message().Text(1, "strides").Number(8, 2).Number(8, 2)}),
          NodeOf("Concat", "twice", {"p", "p"}, "cat",
                 {IntAttribute("axis", 1)}),
          NodeOf("GlobalAveragePool", "mean", {"cat"}, "m"),
          NodeOf("Reshape", "flatten", {"m", "flat"}, "f"),
          NodeOf("Gemm", "fc", {"f", "w_fc"}, "z", {IntAttribute("transB", 1)}),
          NodeOf("Softmax", "softmax", {"z"}, "logits")}};
}

// One layer of attention to all or to earlier keys, on 6 tokens.
// `window`: of earlier keys the last ones, where it is positive.
Parts SmallAttention(bool causal, int64_t window = 0) {
  std::vector<int64_t> seen;
  for (int64_t row = 0; row < 6; ++row) {
    for (int64_t column = 0; column < 6; ++column) {
      const bool sees = column <= row && (window == 0 || row - column < window);
      seen.push_back(!causal || sees ? 1 : 0);
    }
  }
  const auto order = [](std::initializer_list<int64_t> dims) {
    Message perm = Message().Text(1, "perm");
    for (int64_t d : dims) perm.Number(8, d);
    return perm;
  };
  const Message hidden =
      Message()
          .Number(2, 1)
          .Text(8, "hidden")
          .Text(9, std::string("\x00\x00\x80\xff", 4));  // minus infinity
  return {
      .inputs = {InputOf("ids", 7, {"n", "s"})},
      .weights = {WeightOf("table", {9, 8}), WeightOf("w", {8, 24}),
                  WeightOf("o", {8, 8}), WeightOf("out", {8, 9}),
                  IntsOf("heads", {0, 0, 2, 4}), IntsOf("whole", {0, 0, 8}),
                  IntsOf("mask_flat", seen), IntsOf("mask_shape", {6, 6}),
                  hidden},
      .nodes = {NodeOf("Gather", "lookup", {"table", "ids"}, "x"),
                NodeOf("MatMul", "qkv", {"x", "w"}, "y"),
                Message()
                    .Text(1, "y")
                    .Text(2, "q0")
                    .Text(2, "k0")
                    .Text(2, "v0")
                    .Text(3, "split")
                    .Text(4, "Split")
                    .Add(5, IntAttribute("axis", 2))
                    .Add(5, IntAttribute("num_outputs", 3)),
                NodeOf("Reshape", "q1", {"q0", "heads"}, "q1"),
                NodeOf("Reshape", "k1", {"k0", "heads"}, "k1"),
                NodeOf("Reshape", "v1", {"v0", "heads"}, "v1"),
                NodeOf("Transpose", "q2", {"q1"}, "q2", {order({0, 2, 1, 3})}),
                NodeOf("Transpose", "k2", {"k1"}, "k2", {order({0, 2, 3, 1})}),
                NodeOf("Transpose", "v2", {"v1"}, "v2", {order({0, 2, 1, 3})}),
                NodeOf("MatMul", "scores", {"q2", "k2"}, "s0"),
                NodeOf("Reshape", "mask", {"mask_flat", "mask_shape"}, "m"),
                NodeOf("Where", "masked", {"m", "s0", "hidden"}, "s1"),
                NodeOf("Softmax", "softmax", {"s1"}, "p"),
                NodeOf("MatMul", "attend", {"p", "v2"}, "a0"),
                NodeOf("Transpose", "a1", {"a0"}, "a1", {order({0, 2, 1, 3})}),
                NodeOf("Reshape", "a2", {"a1", "whole"}, "a2"),
                NodeOf("MatMul", "project", {"a2", "o"}, "r"),
                NodeOf("MatMul", "head", {"r", "out"}, "logits")}};
}

TEST(Onnx, MasksAreCausalOrOfNothing) {
  for (const bool causal : {true, false}) {
    const auto graph =
        ImportBytes(BytesOf(SmallAttention(causal)), Options(4, 6));
    ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
    EXPECT_EQ(OpsOf(*graph).contains("attention"), causal);
    EXPECT_EQ(OpsOf(*graph).contains("attention_bidirectional"), !causal);
    // The projection is one layer each for queries, keys and values.
    EXPECT_EQ(ParameterCount(*graph), 2 * 9 * 8 + 3 * 8 * 8 + 8 * 8);
  }
}

TEST(Onnx, MasksOfWindows) {
  for (const int64_t window : {1, 3, 6}) {
    const Graph graph = Imported(SmallAttention(true, window), Options(4, 6));
    const auto node = std::ranges::find_if(
        graph.nodes, [](const Node& n) { return n.op->name == "attention"; });
    ASSERT_NE(node, graph.nodes.end());
    // Of all 6 keys there is none.
    EXPECT_EQ(node->attribute("window"), window == 6 ? 0 : window);
  }
  // A seventh key would be another one's.
  Parts parts = SmallAttention(true, 3);
  std::vector<int64_t> seen(36, 0);
  for (size_t i = 0; i < 6; ++i) seen[7 * i] = seen[6 * i] = 1;
  parts.weights[6] = IntsOf("mask_flat", seen);
  EXPECT_THAT(ErrorOf(parts, Options(4, 6)),
              HasSubstr("its mask is neither causal"));
}

// As a mask of nothing would look like, but the file says what it is.
TEST(Onnx, BiasesOfScoresThatBeginWithZerosAreTrained) {
  Parts parts = SmallAttention(true);
  const auto masked =
      std::ranges::find_if(parts.nodes, [](const Message& node) {
        return node.bytes().find("masked") != std::string::npos;
      });
  ASSERT_NE(masked, parts.nodes.end());
  *masked = NodeOf("Add", "biased", {"s0", "b"}, "s1");
  parts.weights.push_back(FloatsOf("b", {2, 6, 6}, std::vector<float>(72, 0)));
  const auto count = [&](const char* kind) {
    Parts said = parts;
    said.values = {Message().Text(1, "b").Add(
        4, NoteOf("pkg.torch.export.graph_signature.InputSpec.kind", kind))};
    said.notes = {NoteOf("pkg.torch.export.ExportedProgram.graph_signature",
                         "p_b: PARAMETER target='b'\n")};
    return ParameterCount(Imported(said, Options(4, 6)));
  };
  EXPECT_EQ(count("PARAMETER"), count("BUFFER") + 72);
}

// What either of two masks hides is hidden, however they are applied.
TEST(Onnx, MasksBehindOneAnother) {
  for (const auto& [first, second] :
       {std::pair{3, 6}, std::pair{6, 3}, std::pair{2, 4}, std::pair{4, 2}}) {
    for (const bool added : {true, false}) {
      Parts parts = SmallAttention(true, first);
      std::vector<float> numbers;
      std::vector<int64_t> seen;
      for (int64_t i = 0; i < 36; ++i) {
        const int64_t apart = i / 6 - i % 6;
        seen.push_back(apart >= 0 && apart < second ? 1 : 0);
        numbers.push_back(seen.back() == 1 ? 0.0F : -1e9F);
      }
      parts.weights.push_back(IntsOf("more_flat", seen));
      parts.weights.push_back(FloatsOf("more", {6, 6}, numbers));
      const auto softmax =
          std::ranges::find_if(parts.nodes, [](const Message& node) {
            return node.bytes().find("Softmax") != std::string::npos;
          });
      *softmax = NodeOf("Softmax", "softmax", {"s2"}, "p");
      if (added) {
        parts.nodes.insert(softmax,
                           NodeOf("Add", "again", {"s1", "more"}, "s2"));
      } else {
        parts.nodes.insert(
            softmax,
            {NodeOf("Reshape", "more", {"more_flat", "mask_shape"}, "more_m"),
             NodeOf("Where", "again", {"more_m", "s1", "hidden"}, "s2")});
      }
      const Graph graph = Imported(parts, Options(4, 6));
      const auto node = std::ranges::find_if(
          graph.nodes, [](const Node& n) { return n.op->name == "attention"; });
      ASSERT_NE(node, graph.nodes.end());
      EXPECT_EQ(node->attribute("window"), std::min(first, second));
    }
  }
}

const Node* FindOp(const Graph& graph, const std::string& op) {
  const auto node = std::ranges::find_if(
      graph.nodes, [&](const Node& n) { return n.op->name == op; });
  return node == graph.nodes.end() ? nullptr : &*node;
}

// The same with a mask that `nodes` make, called "m", and these numbers.
Parts AttentionMaskedBy(const std::vector<Message>& nodes,
                        const std::vector<Message>& weights) {
  Parts made = SmallAttention(true);
  std::vector<Message> all = nodes;
  for (const Message& node : made.nodes) {
    if (node.bytes().find("mask_flat") == std::string::npos) {
      all.push_back(node);
    }
  }
  made.nodes = all;
  made.weights.insert(made.weights.end(), weights.begin(), weights.end());
  return made;
}

Message Scalar(const std::string& name, int64_t value) {
  return Message().Number(2, 7).Text(8, name).Number(7, value);
}

// Of a window of keys.
Parts WindowedAttention(int64_t window) {
  return AttentionMaskedBy(
      {NodeOf("Shape", "sizes", {"ids"}, "sizes"),
       NodeOf("Gather", "length", {"sizes", "one"}, "length"),
       NodeOf("Range", "places", {"zero", "length", "one"}, "places"),
       NodeOf("Unsqueeze", "rows", {"places", "ones"}, "rows"),
       NodeOf("Unsqueeze", "columns", {"places", "zeros"}, "columns"),
       NodeOf("Sub", "apart", {"rows", "columns"}, "apart"),
       NodeOf("GreaterOrEqual", "behind", {"apart", "zero"}, "behind"),
       NodeOf("Less", "near", {"apart", "window"}, "near"),
       NodeOf("And", "mask", {"behind", "near"}, "m")},
      {Scalar("zero", 0), Scalar("one", 1), Scalar("window", window),
       IntsOf("ones", {1}), IntsOf("zeros", {0})});
}

// In 2,048 places 2^22 keys are seen or not, more than are computed at once.
TEST(Onnx, MasksOfManyPlacesAreReadRowByRow) {
  for (const int64_t window : {1, 5, 1000, 4096}) {
    const Graph graph = Imported(WindowedAttention(window), Options(1, 2048));
    const Node* const node = FindOp(graph, "attention");
    ASSERT_NE(node, nullptr);
    EXPECT_EQ(node->attribute("window"), window == 4096 ? 0 : window);
  }
  // A query that sees every other key.
  Parts parts = WindowedAttention(5);
  parts.nodes.insert(parts.nodes.begin() + 6,
                     NodeOf("Mod", "odd", {"apart", "two"}, "parity"));
  parts.nodes[8] = NodeOf("Less", "near", {"parity", "one"}, "near");
  parts.weights.push_back(Scalar("two", 2));
  EXPECT_THAT(ErrorOf(parts, Options(1, 2048)),
              HasSubstr("its mask is neither causal"));
}

// As PyTorch's exporter writes them where the length is fixed: for each sample,
// and for each layer what is added. 1,536 * 2,048^2 numbers are 2^32.6.
TEST(Onnx, MasksOfAFixedLengthAreReadOnce) {
  const Message infinite =
      FloatsOf("infinite", {}, {-std::numeric_limits<float>::infinity()});
  Parts parts = AttentionMaskedBy(
      {NodeOf("Shape", "sizes", {"ids"}, "sizes"),
       NodeOf("Slice", "batch", {"sizes", "zeros", "ones"}, "batch"),
       NodeOf("Concat", "to", {"batch", "square"}, "to",
              {IntAttribute("axis", 0)}),
       NodeOf("Range", "places", {"zero", "length", "one"}, "places"),
       NodeOf("Unsqueeze", "rows", {"places", "row_dims"}, "rows"),
       NodeOf("Unsqueeze", "columns", {"places", "column_dims"}, "columns"),
       NodeOf("LessOrEqual", "behind", {"columns", "rows"}, "behind"),
       NodeOf("Expand", "each", {"behind", "to"}, "each"),
       NodeOf("Where", "added", {"each", "nothing", "infinite"}, "m")},
      {Scalar("zero", 0), Scalar("one", 1), Scalar("length", 2048),
       IntsOf("zeros", {0}), IntsOf("ones", {1}),
       IntsOf("square", {1, 2048, 2048}), IntsOf("row_dims", {0, 1, 3}),
       IntsOf("column_dims", {0, 1, 2}), FloatsOf("nothing", {}, {0}),
       infinite});
  parts.inputs = {InputOf("ids", 7, {"n", "2048"})};
  for (Message& node : parts.nodes) {
    if (node.bytes().find("masked") != std::string::npos) {
      node = NodeOf("Add", "masked", {"s0", "m"}, "s1");
    }
  }
  const Graph graph = Imported(parts, Options(1536, 2048));
  const Node* const node = FindOp(graph, "attention");
  ASSERT_NE(node, nullptr);
  EXPECT_EQ(node->attribute("window"), 0);
}

// In 2^16 places they are 2^32, which are not computed; in the 8 of a short
// sequence a window of 1,000 keys has them all.
TEST(Onnx, AWindowThatIsLongerThanAShortSequenceIsRefused) {
  constexpr int64_t kMany = 1 << 16;
  EXPECT_EQ(ErrorOf(WindowedAttention(1000), Options(1, 512)), "");
  EXPECT_THAT(ErrorOf(WindowedAttention(1000), Options(1, kMany)),
              HasSubstr("may be one of a window, as it is made with the number "
                        "1000"));
  // Where there are fewer places it hides none, and where it is seen it is one.
  EXPECT_EQ(ErrorOf(WindowedAttention(2 * kMany), Options(1, kMany)), "");
  const Graph graph = Imported(WindowedAttention(5), Options(1, kMany));
  const Node* const node = FindOp(graph, "attention");
  ASSERT_NE(node, nullptr);
  EXPECT_EQ(node->attribute("window"), 5);
}

// They are a vector, with which a product is made.
TEST(Onnx, ValuesOfAttentionWithoutPlacesAreNoAttention) {
  Parts parts = SmallAttention(true);
  parts.weights.push_back(WeightOf("bias", {6}));
  parts.nodes[13] = NodeOf("MatMul", "attend", {"p", "bias"}, "a0");
  EXPECT_THAT(ErrorOf(parts, Options(4, 6)),
              HasSubstr("node 'a1' (Transpose): perm is no order"));
}

// The shape of a number has no element.
// A decoder's texts of 6 tokens attend to texts of 10, or 6, of an encoder.
TEST(Onnx, AttentionBetweenTextsReadsTheSourcesPositions) {
  for (const int64_t places : {10, 6}) {
    const auto order = [](std::initializer_list<int64_t> dims) {
      Message perm = Message().Text(1, "perm").Number(20, 7);
      for (int64_t d : dims) perm.Number(8, d);
      return perm;
    };
    const Parts parts = {
        .inputs = {InputOf("source_ids", 7, {"n", std::to_string(places)}),
                   InputOf("decoder_ids", 7, {"n", "6"})},
        .weights = {WeightOf("table", {9, 8}), WeightOf("wq", {8, 8}),
                    WeightOf("wk", {8, 8}), WeightOf("wv", {8, 8}),
                    WeightOf("out", {8, 9}), IntsOf("heads", {0, 0, 2, 4}),
                    IntsOf("joint", {0, 0, 8})},
        .nodes = {
            NodeOf("Gather", "source", {"table", "source_ids"}, "e"),
            NodeOf("Gather", "target", {"table", "decoder_ids"}, "d"),
            NodeOf("MatMul", "query", {"d", "wq"}, "q0"),
            NodeOf("Reshape", "q_heads", {"q0", "heads"}, "q1"),
            NodeOf("Transpose", "q_turn", {"q1"}, "q", {order({0, 2, 1, 3})}),
            NodeOf("MatMul", "key", {"e", "wk"}, "k0"),
            NodeOf("Reshape", "k_heads", {"k0", "heads"}, "k1"),
            NodeOf("Transpose", "k_turn", {"k1"}, "k", {order({0, 2, 3, 1})}),
            NodeOf("MatMul", "value", {"e", "wv"}, "v0"),
            NodeOf("Reshape", "v_heads", {"v0", "heads"}, "v1"),
            NodeOf("Transpose", "v_turn", {"v1"}, "v", {order({0, 2, 1, 3})}),
            NodeOf("MatMul", "scores", {"q", "k"}, "s"),
            NodeOf("Softmax", "softmax", {"s"}, "p"),
            NodeOf("MatMul", "attend", {"p", "v"}, "a"),
            NodeOf("Transpose", "a_turn", {"a"}, "a1", {order({0, 2, 1, 3})}),
            NodeOf("Reshape", "a_joint", {"a1", "joint"}, "a2"),
            NodeOf("MatMul", "head", {"a2", "out"}, "logits")}};
    const Graph graph = Imported(parts, Options(2));
    const auto attention =
        std::ranges::find(graph.nodes, "attend", &Node::name);
    ASSERT_NE(attention, graph.nodes.end());
    EXPECT_EQ(attention->op->name, "attention_bidirectional");
    const Tensor& of_queries = graph.tensor(attention->operands[3]);
    const Tensor& of_keys = graph.tensor(attention->operands[4]);
    EXPECT_EQ(of_queries.name, "positions");
    EXPECT_EQ(of_queries.shape, (Shape{2, 6}));
    EXPECT_EQ(of_keys.name, "source_positions");
    EXPECT_EQ(of_keys.shape, (Shape{2, places}));
  }
}

TEST(Onnx, AnElementOfNoneIsRefused) {
  Parts parts = SmallAttention(true);
  parts.nodes.insert(parts.nodes.begin(),
                     {NodeOf("Shape", "none", {"one"}, "none"),
                      NodeOf("Gather", "element", {"none", "one"}, "element"),
                      NodeOf("Add", "sum", {"element", "one"}, "sum")});
  parts.nodes.back() = NodeOf("Reshape", "end", {"a2", "sum"}, "logits");
  parts.weights.push_back(Scalar("one", 1));
  EXPECT_THAT(ErrorOf(parts, Options(4, 6)),
              HasSubstr("node 'element' (Gather): its constant operands do not "
                        "fit"));
}

TEST(Onnx, ASequenceOfPiecesIsASplit) {
  Parts parts = SmallAttention(true);
  const Graph expected = Imported(parts, Options(4, 6));
  parts.weights.push_back(Scalar("zero", 0));
  parts.weights.push_back(Scalar("one", 1));
  parts.weights.push_back(Scalar("last", -1));
  parts.weights.push_back(Scalar("eight", 8));
  const std::vector<Message> split = {
      NodeOf("SplitToSequence", "split", {"y", "eight"}, "all",
             {IntAttribute("axis", 2)}),
      NodeOf("SequenceAt", "first", {"all", "zero"}, "q0"),
      NodeOf("SequenceAt", "second", {"all", "one"}, "k0"),
      NodeOf("SequenceAt", "third", {"all", "last"}, "v0")};
  parts.nodes.erase(parts.nodes.begin() + 2);
  parts.nodes.insert(parts.nodes.begin() + 2, split.begin(), split.end());
  const Graph graph = Imported(parts, Options(4, 6));
  EXPECT_EQ(OpsOf(graph), OpsOf(expected));
  EXPECT_EQ(graph.nodes.size(), expected.nodes.size());
  EXPECT_EQ(ParameterCount(graph), ParameterCount(expected));
  parts.weights.push_back(Scalar("three", 3));
  parts.nodes[5] = NodeOf("SequenceAt", "third", {"all", "three"}, "v0");
  EXPECT_THAT(ErrorOf(parts, Options(4, 6)),
              HasSubstr("expected a place in a sequence of tensors"));
  parts.nodes[5] = NodeOf("Identity", "third", {"all"}, "v0");
  EXPECT_THAT(ErrorOf(parts, Options(4, 6)),
              HasSubstr("reads a sequence of tensors as a whole"));
}

// Tensors without elements have nothing to copy, and joined with others they
// are these.
TEST(Onnx, TensorsWithoutElementsAreRead) {
  const auto ints = [](const std::string& name, const Shape& dims,
                       const std::vector<int64_t>& values) {
    Message tensor;
    for (int64_t extent : dims) tensor.Number(1, extent);
    tensor.Number(2, 7).Text(8, name);
    for (int64_t value : values) tensor.Number(7, value);
    return tensor;
  };
  for (const int64_t row : {0, 1, -1}) {
    Parts parts = SmallMlp();
    parts.weights.insert(
        parts.weights.end(),
        {ints("none", {2, 0}, {}), ints("row", {1, 1}, {row}),
         ints("empty", {0, 2}, {}), ints("sizes", {1, 2}, {-1, 5}),
         ints("flat", {1}, {-1}), ints("rest", {1}, {0})});
    // [1, 0] joined with [1, 2], and [0, 2] with [1, 2].
    parts.nodes.insert(parts.nodes.begin() + 2,
                       {NodeOf("GatherND", "taken", {"none", "row"}, "a"),
                        NodeOf("Concat", "beside", {"a", "sizes"}, "b",
                               {IntAttribute("axis", 1)}),
                        NodeOf("Concat", "below", {"empty", "b"}, "c",
                               {IntAttribute("axis", 0)}),
                        NodeOf("Reshape", "list", {"c", "flat"}, "d"),
                        NodeOf("Reshape", "same", {"y2", "d"}, "y2s")});
    parts.nodes[7] = NodeOf("Relu", "relu", {"y2s"}, "y3");
    EXPECT_EQ(ErrorOf(parts), "") << row;
  }
}

// The standard stores UINT32 and UINT64 in a field of their own.
TEST(Onnx, UnsignedNumbersAreRead) {
  for (const int type : {12, 13}) {
    const auto reshaped = [&](int64_t columns) {
      Parts parts = SmallMlp();
      parts.weights.push_back(Message()
                                  .Number(1, 2)
                                  .Number(2, type)
                                  .Text(8, "sizes")
                                  .Number(11, 4)
                                  .Number(11, columns));
      parts.nodes[2] =
          NodeOf("Cast", "signed", {"sizes"}, "to", {IntAttribute("to", 7)});
      parts.nodes.insert(parts.nodes.begin() + 3,
                         NodeOf("Reshape", "same", {"y2", "to"}, "y3"));
      return ErrorOf(parts);
    };
    EXPECT_EQ(reshaped(5), "");
    EXPECT_THAT(reshaped(6), HasSubstr("cannot make [4,6] of [4,5]"));
  }
}

// Nodes that a recursion for each would have no stack for.
TEST(Onnx, ManyNodesBehindOneAnother) {
  constexpr int kNodes = 100'000;
  const auto chain = [&](const std::string& op, const std::string& first,
                         const std::string& last) {
    std::vector<Message> nodes;
    for (int i = 0; i < kNodes; ++i) {
      const std::string from = i == 0 ? first : "t" + std::to_string(i);
      const std::string to =
          i + 1 == kNodes ? last : "t" + std::to_string(i + 1);
      // A slope near 1, of which so many are no other operator yet.
      nodes.push_back(NodeOf(op, "n" + std::to_string(i), {from}, to,
                             {FloatAttribute("alpha", 0.9999F)}));
    }
    return nodes;
  };
  Parts moved = SmallMlp();
  moved.nodes[1] = NodeOf("Add", "bias", {"b", "y1"}, "y2");
  const std::vector<Message> moves = chain("Identity", "b1", "b");
  moved.nodes.insert(moved.nodes.begin(), moves.begin(), moves.end());
  EXPECT_EQ(ParameterCount(Imported(moved, Options(4))), 6 * 5 + 5 + 5 * 3);
  Parts computed = SmallMlp();
  const std::vector<Message> functions = chain("LeakyRelu", "y2", "logits");
  computed.nodes.resize(2);
  computed.nodes.insert(computed.nodes.end(), functions.begin(),
                        functions.end());
  const auto graph = ImportBytes(BytesOf(computed), Options(4));
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  EXPECT_EQ(std::ranges::count_if(
                graph->nodes,
                [](const Node& node) { return node.op->name == "leaky_relu"; }),
            kNodes);
}

// Nodes of one name are told apart by marks, and many of them by numbers.
TEST(Onnx, NodesOfOneNameAreToldApart) {
  Parts parts = SmallMlp();
  parts.nodes.pop_back();
  for (int i = 0; i < 300; ++i) {
    const std::string from = "y" + std::to_string(3 + i);
    parts.nodes.push_back(
        NodeOf("Add", "same", {from, "b1"},
               i == 299 ? "logits" : "y" + std::to_string(4 + i)));
  }
  const Graph graph = Imported(parts, Options(4));
  std::vector<std::string> names;
  for (const Node& node : graph.nodes) {
    if (node.name.starts_with("same")) names.push_back(node.name);
  }
  ASSERT_EQ(names.size(), 300u);
  EXPECT_EQ(names[0], "same");
  EXPECT_EQ(names[2], "same''");
  EXPECT_EQ(names[256], "same" + std::string(256, '\''));
  EXPECT_EQ(names[257], "same'257");
}

TEST(Onnx, ProductAndBiasAreOneLayer) {
  const auto graph = ImportBytes(BytesOf(SmallMlp()), Options(4));
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  EXPECT_EQ(ParameterCount(*graph), 6 * 5 + 5 + 5 * 3);
  EXPECT_EQ(graph->nodes[0].name, "first");
  // Weights are (out, in).
  EXPECT_EQ(graph->nodes[0].rule.ToString(), "bc,fc+f->bf");
  EXPECT_EQ(graph->tensor(graph->nodes[0].operands[1]).shape, (Shape{5, 6}));
}

Message Ints(const std::string& name, const std::vector<int64_t>& values) {
  Message attribute = Message().Text(1, name);
  for (int64_t value : values) attribute.Number(8, value);
  return attribute;
}
Message Text(const std::string& name, const std::string& value) {
  return Message().Text(1, name).Text(4, value);
}

const Node& NodeNamed(const Graph& graph, const std::string& name) {
  const auto found = std::ranges::find(graph.nodes, name, &Node::name);
  TESSERA_CHECK(found != graph.nodes.end()) << name;
  return *found;
}

// Of a place for each of a sequence, with samples in front or without.
TEST(Onnx, RowsOfPlacesAreLookedUp) {
  const auto added = [](const Shape& shape) {
    Message ids;
    int64_t count = 1;
    for (int64_t extent : shape) {
      ids.Number(1, extent);
      count *= extent;
    }
    ids.Number(2, 7).Text(8, "places");
    for (int64_t i = 0; i < count; ++i) ids.Number(7, i % 6);
    Parts parts;
    parts.inputs = {InputOf("ids", 7, {"n", "s"})};
    parts.weights = {WeightOf("table", {9, 8}), WeightOf("rows", {6, 8}),
                     WeightOf("out", {8, 9}), ids};
    parts.nodes = {NodeOf("Gather", "lookup", {"table", "ids"}, "x"),
                   NodeOf("Gather", "by_place", {"rows", "places"}, "p"),
                   NodeOf("Add", "sum", {"x", "p"}, "y"),
                   NodeOf("MatMul", "head", {"y", "out"}, "logits")};
    return parts;
  };
  for (const Shape& shape : {Shape{6}, Shape{1, 6}, Shape{4, 6}}) {
    const Graph graph = Imported(added(shape), Options(4, 6));
    EXPECT_EQ(graph.tensor(NodeNamed(graph, "by_place").operands[0]).name,
              "positions");
  }
  EXPECT_THAT(ErrorOf(added({2, 6}), Options(4, 6)),
              HasSubstr("node 'by_place' (Gather): reads rows by ids of the "
                        "shape [2,6]: expected one for each of 6 places"));
}

// [n, 2, 16] convolved by windows of 3, 2 elements apart, which span 5, in
// steps of 2 and with 4 zeros in front: (16 + 4 - 5) / 2 + 1 = 8 places; pooled
// by windows of 2: 4.
TEST(Onnx, SignalsAreImagesWithoutAHeight) {
  const Graph graph = Imported(
      {.inputs = {InputOf("x", 1, {"n", "2", "16"})},
       .weights = {WeightOf("w", {4, 2, 3}), WeightOf("b", {4}),
                   WeightOf("scale", {4}), WeightOf("shift", {4}),
                   WeightOf("out", {3, 4}), IntsOf("axes", {2})},
       .nodes = {NodeOf("Conv", "conv", {"x", "w", "b"}, "c",
                        {Ints("strides", {2}), Ints("dilations", {2}),
                         Ints("pads", {4, 0})}),
                 NodeOf("BatchNormalization", "norm",
                        {"c", "scale", "shift", "scale", "shift"}, "d"),
                 NodeOf("MaxPool", "pool", {"d"}, "e",
                        {Ints("kernel_shape", {2}), Ints("strides", {2})}),
                 NodeOf("ReduceMean", "mean", {"e", "axes"}, "f",
                        {IntAttribute("keepdims", 0)}),
                 NodeOf("Gemm", "fc", {"f", "out"}, "logits",
                        {IntAttribute("transB", 1)})}},
      Options(4));
  const Node& conv = NodeNamed(graph, "conv");
  EXPECT_EQ(conv.op->name, "conv2d");
  EXPECT_EQ(conv.rule.ToString(), "bcw!,ocl!+o->box");
  EXPECT_EQ(graph.tensor(conv.results[0]).shape, (Shape{4, 4, 8}));
  EXPECT_EQ(conv.attribute("pad_left"), 4);
  EXPECT_EQ(conv.attribute("dilation_width"), 2);
  EXPECT_EQ(conv.attribute("stride_height"), 1);
  EXPECT_EQ(NodeNamed(graph, "norm").rule.ToString(), "bcw,c,c,c,c->bcw,c,c");
  EXPECT_EQ(graph.tensor(NodeNamed(graph, "pool").results[0]).shape,
            (Shape{4, 4, 4}));
}

// A slope of one number for all channels is trained, also where an exporter
// gives it other dimensions first.
TEST(Onnx, ASlopeOfOneNumberIsTrained) {
  const Message act = NodeOf("PRelu", "act", {"x", "s"}, "y");
  const Message fc =
      NodeOf("Gemm", "fc", {"y", "out"}, "logits", {IntAttribute("transB", 1)});
  const auto slope = [](const std::string& name) {  // of 0.25 in fp32
    Message tensor;
    return tensor.Number(1, 1).Number(2, 1).Text(8, name).Text(
        9, std::string("\0\0\x80\x3e", 4));
  };
  const auto parameters = [&](const std::string& name,
                              std::vector<Message> nodes) {
    const Parts parts = {
        .inputs = {InputOf("x", 1, {"n", "4"})},
        .weights = {slope(name), WeightOf("out", {3, 4}), IntsOf("axes", {1})},
        .nodes = std::move(nodes)};
    return ParameterCount(Imported(parts, Options(4)));
  };
  EXPECT_EQ(parameters("s", {act, fc}), 1 + 3 * 4);
  const Message apart = NodeOf("Unsqueeze", "apart", {"a", "axes"}, "s");
  EXPECT_EQ(parameters("a", {apart, act, fc}), 1 + 3 * 4);
}

// Of what the function makes: not the function of a norm.
TEST(Onnx, ANormBehindAFunction) {
  const Graph graph =
      Imported({.inputs = {InputOf("x", 1, {"n", "6"})},
                .weights = {WeightOf("scale", {6}), WeightOf("shift", {6}),
                            WeightOf("w", {6, 3})},
                .nodes = {NodeOf("Tanh", "tanh", {"x"}, "t"),
                          NodeOf("LayerNormalization", "norm",
                                 {"t", "scale", "shift"}, "y"),
                          NodeOf("MatMul", "head", {"y", "w"}, "logits")}},
               Options(4));
  ASSERT_EQ(graph.nodes[0].op->name, "tanh");
  const Node& norm = NodeNamed(graph, "norm");
  EXPECT_EQ(norm.operands[0], graph.nodes[0].results[0]);
  EXPECT_EQ(NodeNamed(graph, "head").operands[0], norm.results[0]);
}

// Features have neither height nor width.
TEST(Onnx, BatchNormsOfFeatures) {
  Parts parts = SmallMlp();
  parts.weights.push_back(WeightOf("scale", {5}));
  parts.weights.push_back(WeightOf("shift", {5}));
  parts.nodes[2] = NodeOf("BatchNormalization", "norm",
                          {"y2", "scale", "shift", "scale", "shift"}, "y3");
  EXPECT_EQ(NodeNamed(Imported(parts, Options(4)), "norm").rule.ToString(),
            "bc,c,c,c,c->bc,c,c");
}

// 5 places, 2 apart, of windows of 3 with a pixel of padding on both sides, and
// one more behind: 2 * 4 + 3 - 2 + 1 = 10 pixels. The weight is (in, out of a
// group, window).
TEST(Onnx, TransposedConvolutions) {
  const Graph graph = Imported(
      {.inputs = {InputOf("x", 1, {"n", "4", "5", "5"})},
       .weights = {WeightOf("w", {4, 3, 3, 3}), WeightOf("b", {6}),
                   WeightOf("out", {2, 6})},
       .nodes = {NodeOf("ConvTranspose", "up", {"x", "w", "b"}, "y",
                        {Ints("strides", {2, 2}), Ints("pads", {1, 1, 1, 1}),
                         Ints("output_padding", {1, 1}),
                         IntAttribute("group", 2)}),
                 NodeOf("GlobalAveragePool", "mean", {"y"}, "m"),
                 NodeOf("Flatten", "flat", {"m"}, "f"),
                 NodeOf("Gemm", "fc", {"f", "out"}, "logits",
                        {IntAttribute("transB", 1)})}},
      Options(4));
  const Node& up = NodeNamed(graph, "up");
  EXPECT_EQ(up.op->name, "conv_transpose2d");
  EXPECT_EQ(up.rule.ToString(), "bgnyx,gnck!l!->bgch!w!");
  EXPECT_EQ(graph.tensor(up.results[0]).shape, (Shape{4, 2, 3, 10, 10}));
  EXPECT_EQ(graph.tensor(up.operands[1]).shape, (Shape{2, 2, 3, 3, 3}));
  EXPECT_EQ(NodeNamed(graph, "up.bias").op->name, "broadcast_add");
}

// A depthwise convolution between norms of 4 groups, added to what it reads,
// and ones of 2 and 8 groups: each has its own as dimensions, and the channels
// are joined and taken apart between them. 16 channels of 4 groups of 4; the
// depthwise one makes (16, 1), which the sum takes apart into (4, 4, 1).
TEST(Onnx, GroupsNeedNotBeTheNeighbours) {
  const auto groups = [](int64_t count) {
    return IntAttribute("group", count);
  };
  const Graph graph = Imported(
      {.inputs = {InputOf("x", 1, {"n", "3", "4", "4"})},
       .weights = {WeightOf("stem.weight", {16, 3, 1, 1}),
                   WeightOf("scale", {16}), WeightOf("shift", {16}),
                   WeightOf("each.weight", {16, 1, 3, 3}),
                   WeightOf("halves.weight", {32, 8, 1, 1}),
                   WeightOf("bias", {32}),
                   WeightOf("eighths.weight", {32, 2, 2, 2}),
                   WeightOf("out", {5, 16})},
       .nodes = {NodeOf("Conv", "stem", {"x", "stem.weight"}, "a"),
                 NodeOf("GroupNormalization", "norm", {"a", "scale", "shift"},
                        "b", {IntAttribute("num_groups", 4)}),
                 NodeOf("Conv", "each", {"b", "each.weight"}, "c",
                        {groups(16), Ints("pads", {1, 1, 1, 1})}),
                 NodeOf("Add", "sum", {"a", "c"}, "d"),
                 NodeOf("Conv", "halves", {"d", "halves.weight", "bias"}, "e",
                        {groups(2)}),
                 NodeOf("ConvTranspose", "eighths", {"e", "eighths.weight"},
                        "f", {groups(8), Ints("strides", {2, 2})}),
                 NodeOf("GlobalAveragePool", "mean", {"f"}, "m"),
                 NodeOf("Flatten", "flat", {"m"}, "g"),
                 NodeOf("Gemm", "fc", {"g", "out"}, "logits",
                        {IntAttribute("transB", 1)})},
       .opset = 21},
      Options(4));
  const auto shape = [&](const char* name) {
    return graph.tensor(NodeNamed(graph, name).results[0]).shape;
  };
  EXPECT_EQ(NodeNamed(graph, "each").rule.ToString(), "bgch!w!,gnck!l!->bgnyx");
  EXPECT_EQ(shape("each"), (Shape{4, 16, 1, 4, 4}));
  EXPECT_EQ(NodeNamed(graph, "halves").rule.ToString(),
            "bgch!w!,gnck!l!+gn->bgnyx");
  EXPECT_EQ(shape("halves"), (Shape{4, 2, 16, 4, 4}));
  EXPECT_EQ(NodeNamed(graph, "eighths").rule.ToString(),
            "bgnyx,gnck!l!->bgch!w!");
  EXPECT_EQ(shape("eighths"), (Shape{4, 8, 2, 8, 8}));
  EXPECT_EQ(ParameterCount(graph),
            16 * 3 + 2 * 16 + 16 * 9 + 32 * 8 + 32 + 32 * 2 * 4 + 5 * 16);
  EXPECT_TRUE(Differentiate(graph).has_value());
}

// Twice the height and half the width. Of centres at half a pixel place 0 is at
// (0 + 0.5) / 2 - 0.5 = -0.25, and at (0 + 0.5) * 2 - 0.5 = 0.5; with corners
// aligned 9 places of 5 are 4 / 8 apart, and 2 of 4 are 3 / 1 apart.
TEST(Onnx, ImagesAreResizedByDimension) {
  const auto resized = [](const std::vector<Message>& attributes,
                          std::vector<int64_t> sizes) {
    return Imported(
        {.inputs = {InputOf("x", 1, {"n", "3", "5", "4"})},
         .weights = {IntsOf("sizes", sizes), WeightOf("out", {2, 3})},
         .nodes = {NodeOf("Resize", "up", {"x", "", "", "sizes"}, "y",
                          attributes),
                   NodeOf("GlobalAveragePool", "mean", {"y"}, "m"),
                   NodeOf("Flatten", "flat", {"m"}, "f"),
                   NodeOf("Gemm", "fc", {"f", "out"}, "logits",
                          {IntAttribute("transB", 1)})}},
        Options(4));
  };
  const auto expect = [](const Graph& graph, const std::string& name,
                         int64_t places, double start, double step,
                         double linear) {
    const Node& node = NodeNamed(graph, name);
    EXPECT_EQ(node.op->name, "resample");
    EXPECT_EQ(node.attribute("places"), static_cast<double>(places));
    EXPECT_NEAR(node.attribute("start"), start, 1e-6);
    EXPECT_DOUBLE_EQ(node.attribute("step"), step);
    EXPECT_EQ(node.attribute("linear"), linear);
  };
  Graph graph = resized({Text("mode", "linear")}, {4, 3, 10, 2});
  expect(graph, "up.resample", 10, -0.25, 0.5, 1);
  expect(graph, "up.resample'", 2, 0.5, 2, 1);
  graph = resized({Text("mode", "linear"),
                   Text("coordinate_transformation_mode", "align_corners")},
                  {4, 3, 9, 2});
  expect(graph, "up.resample", 9, 0, 0.5, 1);
  expect(graph, "up.resample'", 2, 0, 3, 1);
  graph = resized({Text("coordinate_transformation_mode", "asymmetric"),
                   Text("nearest_mode", "floor")},
                  {4, 3, 10, 4});
  expect(graph, "up.resample", 10, 0, 0.5, 0);
  EXPECT_FALSE(OpsOf(graph).contains("scale"));
}

// Of 5 places, 2 in front and 1 behind: the first one twice and the last one,
// or those that follow the ends, turned round.
TEST(Onnx, PadsByEdgesAndReflection) {
  const auto padded = [](const std::string& mode) {
    return Imported({.inputs = {InputOf("x", 1, {"n", "3", "5"})},
                     .weights = {IntsOf("pads", {0, 0, 2, 0, 0, 1}),
                                 WeightOf("out", {24, 2})},
                     .nodes = {NodeOf("Pad", "pad", {"x", "pads"}, "y",
                                      {Text("mode", mode)}),
                               NodeOf("Flatten", "flat", {"y"}, "z"),
                               NodeOf("MatMul", "fc", {"z", "out"}, "logits")}},
                    Options(4));
  };
  const Graph edge = padded("edge");
  const Node& resample = NodeNamed(edge, "pad.resample");
  EXPECT_EQ(resample.attribute("start"), -2);
  EXPECT_EQ(resample.attribute("step"), 1);
  EXPECT_EQ(resample.attribute("places"), 8);
  const Graph reflect = padded("reflect");
  std::vector<double> starts;
  for (const Node& node : reflect.nodes) {
    if (node.op->name != "slice") continue;
    starts.push_back(node.attribute("start"));
    EXPECT_EQ(node.attribute("step"), -1);
  }
  EXPECT_THAT(starts, ElementsAre(2, 3));  // 2, 1 in front and 3 behind
  EXPECT_TRUE(OpsOf(reflect).contains("concat_channels"));
}

// Channels (c, 2, 2) of a convolution are taken apart and put together as
// pixels, and a norm in groups takes channels apart that come from several
// tensors.
// More than a rule has factors for, of tensors of five dimensions.
TEST(Onnx, ManyTensorsAreJoined) {
  const Parts parts = {
      .inputs = {InputOf("x", 1, {"n", "4", "2", "2"})},
      .weights = {IntsOf("five", {0, 2, 2, 2, 2}), IntsOf("flat", {0, -1}),
                  WeightOf("w", {96, 3})},
      .nodes = {NodeOf("Reshape", "apart", {"x", "five"}, "y"),
                NodeOf("Concat", "joint", {"y", "y", "y", "y", "y", "y"}, "z",
                       {IntAttribute("axis", 1)}),
                NodeOf("Reshape", "flat", {"z", "flat"}, "f"),
                NodeOf("MatMul", "head", {"f", "w"}, "logits")}};
  const Graph graph = Imported(parts, Options(4));
  EXPECT_EQ(std::ranges::count_if(graph.nodes,
                                  [](const Node& node) {
                                    return node.op->name == "concat_channels";
                                  }),
            2);
}

// Attention to all places of an image, whose rows and columns are two
// dimensions until it makes tensors of too many.
TEST(Onnx, AttentionToPlacesOfImages) {
  const auto order = [](std::initializer_list<int64_t> dims) {
    Message perm = Message().Text(1, "perm");
    for (int64_t d : dims) perm.Number(8, d);
    return perm;
  };
  const Parts parts = {
      .inputs = {InputOf("x", 1, {"n", "3", "8", "8"})},
      .weights = {WeightOf("patch", {8, 3, 2, 2}), WeightOf("q", {8, 8}),
                  WeightOf("k", {8, 8}), WeightOf("v", {8, 8}),
                  WeightOf("w", {8, 3}), IntsOf("places", {0, 8, 16}),
                  IntsOf("heads", {0, 16, 2, 2, 2}),
                  IntsOf("whole", {0, 16, 8})},
      .nodes = {
          NodeOf("Conv", "patch", {"x", "patch"}, "p",
                 {Message().Text(1, "strides").Number(8, 2).Number(8, 2)}),
          NodeOf("Reshape", "places", {"p", "places"}, "r"),
          NodeOf("Transpose", "turn", {"r"}, "t", {order({0, 2, 1})}),
          NodeOf("MatMul", "of_q", {"t", "q"}, "q1"),
          NodeOf("Reshape", "heads_q", {"q1", "heads"}, "q2"),
          NodeOf("Transpose", "turn_q", {"q2"}, "q3", {order({0, 2, 3, 1, 4})}),
          NodeOf("MatMul", "of_k", {"t", "k"}, "k1"),
          NodeOf("Reshape", "heads_k", {"k1", "heads"}, "k2"),
          NodeOf("Transpose", "turn_k", {"k2"}, "k3", {order({0, 2, 3, 4, 1})}),
          NodeOf("MatMul", "of_v", {"t", "v"}, "v1"),
          NodeOf("Reshape", "heads_v", {"v1", "heads"}, "v2"),
          NodeOf("Transpose", "turn_v", {"v2"}, "v3", {order({0, 2, 3, 1, 4})}),
          NodeOf("MatMul", "scores", {"q3", "k3"}, "s"),
          NodeOf("Softmax", "softmax", {"s"}, "soft"),
          NodeOf("MatMul", "read", {"soft", "v3"}, "a1"),
          NodeOf("Transpose", "back", {"a1"}, "a2", {order({0, 3, 1, 2, 4})}),
          NodeOf("Reshape", "whole", {"a2", "whole"}, "a3"),
          NodeOf("Add", "residual", {"t", "a3"}, "a4"),
          NodeOf("ReduceMean", "mean", {"a4"}, "m",
                 {Message().Text(1, "axes").Number(8, 1),
                  IntAttribute("keepdims", 0)}),
          NodeOf("MatMul", "head", {"m", "w"}, "logits")}};
  const Graph graph = Imported(parts, Options(4));
  EXPECT_TRUE(OpsOf(graph).contains("reshape"));
  EXPECT_TRUE(Differentiate(graph).has_value());
}

TEST(Onnx, DimensionsAreTakenApartAndJoined) {
  const Graph graph = Imported(
      {.inputs = {InputOf("x", 1, {"n", "3", "4", "4"})},
       .weights = {WeightOf("w", {8, 3, 1, 1}), WeightOf("u", {2, 2, 1, 1}),
                   WeightOf("scale", {4}), WeightOf("shift", {4}),
                   WeightOf("v", {5, 4, 1, 1})},
       .nodes = {NodeOf("Conv", "conv", {"x", "w"}, "c"),
                 NodeOf("DepthToSpace", "shuffle", {"c"}, "d",
                        {IntAttribute("blocksize", 2), Text("mode", "CRD")}),
                 NodeOf("Conv", "between", {"d", "u"}, "d2"),
                 NodeOf("Concat", "cat", {"d2", "d2"}, "e",
                        {IntAttribute("axis", 1)}),
                 NodeOf("GroupNormalization", "norm", {"e", "scale", "shift"},
                        "f", {IntAttribute("num_groups", 2)}),
                 NodeOf("Conv", "last", {"f", "v"}, "g"),
                 NodeOf("GlobalAveragePool", "mean", {"g"}, "m"),
                 NodeOf("Flatten", "flat", {"m"}, "logits")},
       .opset = 21},
      Options(4));
  EXPECT_EQ(graph.tensor(NodeNamed(graph, "last").results[0]).shape,
            (Shape{4, 5, 8, 8}));
  EXPECT_TRUE(OpsOf(graph).contains("reshape"));
  EXPECT_EQ(ParameterCount(graph), 8 * 3 + 2 * 2 + 2 * 4 + 5 * 4);
}

// Of one number is a router's bias, and a convolution's to one channel:
// trained, as others are. A weight may be called as an input of the data is.
// Scores of 4 places for each other, times a tensor of the file, are added up.
Parts LinearAttention(const Message& mask, const Parts& more = {}) {
  Parts parts = {
      .inputs = {InputOf("ids", 7, {"n", "4"})},
      .weights = {WeightOf("table", {9, 8}), WeightOf("out", {8, 9}), mask},
      .nodes = {
          NodeOf("Gather", "lookup", {"table", "ids"}, "x"),
          NodeOf("Transpose", "keys", {"x"}, "k",
                 {Message().Text(1, "perm").Number(8, 0).Number(8, 2).Number(
                     8, 1)}),
          NodeOf("MatMul", "scores", {"x", "k"}, "s"),
          NodeOf("Mul", "masked", {"s", "mask"}, "p"),
          NodeOf("MatMul", "attend", {"p", "x"}, "a"),
          NodeOf("MatMul", "head", {"a", "out"}, "logits")}};
  parts.values = more.values;
  parts.notes = more.notes;
  return parts;
}

std::vector<float> LowerTriangle(int64_t places) {
  std::vector<float> values;
  for (int64_t row = 0; row < places; ++row) {
    for (int64_t column = 0; column < places; ++column) {
      values.push_back(column <= row ? 1 : 0);
    }
  }
  return values;
}

std::vector<std::string> WarningsOf(const Parts& parts, ImportOptions options) {
  std::vector<std::string> warnings;
  options.warnings = &warnings;
  const auto graph = ImportBytes(BytesOf(parts), options);
  EXPECT_TRUE(graph.has_value()) << graph.error().ToString();
  return warnings;
}

// 72 + 72 numbers, the table and the head: no mask is trained.
TEST(Onnx, MasksThatAreFactorsAreNotTrained) {
  const Graph causal =
      Imported(LinearAttention(FloatsOf("mask", {4, 4}, LowerTriangle(4))),
               Options(2, 4));
  EXPECT_EQ(ParameterCount(causal), 2 * 72);
  const Node& node = NodeNamed(causal, "masked.mask");
  EXPECT_EQ(node.op->name, "causal_mask");
  EXPECT_EQ(node.attribute("value"), 0);
  // Zeros and ones elsewhere are no parameter, and no mask.
  std::vector<float> other = LowerTriangle(4);
  other[3] = 1;
  const Graph holes =
      Imported(LinearAttention(FloatsOf("mask", {4, 4}, other)), Options(2, 4));
  EXPECT_EQ(ParameterCount(holes), 2 * 72);
  const Node& masked = NodeNamed(holes, "masked");
  EXPECT_EQ(masked.op->name, "multiply");
  EXPECT_EQ(holes.tensor(masked.operands[1]).values,
            std::vector<double>(other.begin(), other.end()));
  // Ones alone may be how a parameter starts.
  const Parts ones =
      LinearAttention(FloatsOf("mask", {4, 4}, std::vector<float>(16, 1)));
  EXPECT_EQ(ParameterCount(Imported(ones, Options(2, 4))), 2 * 72 + 16);
  EXPECT_THAT(
      WarningsOf(ones, Options(2, 4)),
      ElementsAre(AllOf(HasSubstr("no layer reads"), HasSubstr("'mask'"))));
  ImportOptions frozen = Options(2, 4);
  frozen.overrides["frozen"] = Json("\"ma*\"");
  EXPECT_EQ(ParameterCount(Imported(ones, frozen)), 2 * 72);
  EXPECT_THAT(WarningsOf(ones, frozen), ElementsAre());
}

// [n, 6] features times numbers of the file, and a dense layer of 6 x 3.
Parts Scaled(const Message& by, const std::string& name) {
  return {.inputs = {InputOf("x", 1, {"n", "6"})},
          .weights = {by, WeightOf("w", {6, 3})},
          .nodes = {NodeOf("Mul", "scaled", {"x", name}, "y"),
                    NodeOf("MatMul", "head", {"y", "w"}, "logits")}};
}

TEST(Onnx, NumbersOfModulesAreTrained) {
  const auto parameters = [](const Parts& parts,
                             const std::string& frozen = "") {
    ImportOptions options = Options(4);
    if (!frozen.empty()) options.overrides["frozen"] = Json(frozen);
    return ParameterCount(Imported(parts, options));
  };
  for (const Shape& dims : {Shape{}, Shape{1}, Shape{1, 1}}) {
    const auto named = [&](const std::string& name) {
      return Scaled(FloatsOf(name, dims, {0.5}), name);
    };
    EXPECT_EQ(parameters(named("body.gate")), 18 + 1);
    EXPECT_EQ(parameters(named("body.gate"), "\"body.gate\""), 18);
    EXPECT_EQ(parameters(named("onnx::Mul_7")), 18);
    EXPECT_EQ(parameters(named("/body/Constant_output_0")), 18);
    EXPECT_EQ(parameters(named("gate")), 18);
    // PyTorch's older exporter, which calls nodes by paths, has no others.
    Parts of_pytorch = named("gate");
    of_pytorch.producer = "pytorch";
    EXPECT_EQ(parameters(of_pytorch), 18);
    of_pytorch.nodes[0] = NodeOf("Mul", "/scaled", {"x", "gate"}, "y");
    EXPECT_EQ(parameters(of_pytorch), 18 + 1);
    of_pytorch.producer = "another";
    EXPECT_EQ(parameters(of_pytorch), 18);
  }
  EXPECT_EQ(parameters(Scaled(FloatsOf("body.fill", {}, {-1e9}), "body.fill")),
            18);
}

// Notes of PyTorch's newer exporter.
TEST(Onnx, TheFileSaysWhatIsAParameter) {
  const auto noted = [](Message tensor, const std::string& name,
                        const std::string& key, const std::string& value) {
    Parts parts = Scaled(std::move(tensor), name);
    parts.values = {Message().Text(1, name).Add(4, NoteOf(key, value))};
    parts.notes = {
        NoteOf("pkg.torch.export.ExportedProgram.graph_signature",
               "\n# inputs\np_body_h: PARAMETER target='body.h'\n"
               "b_body_c: BUFFER target='body.c' persistent=True\n")};
    return parts;
  };
  const std::string kind = "pkg.torch.export.graph_signature.InputSpec.kind";
  const std::string folded = "pkg.onnxscript.optimizer.folded_from";
  const Message number = FloatsOf("a.n", {}, {0.5});
  const auto count = [](const Parts& parts) {
    return ParameterCount(Imported(parts, Options(4)));
  };
  EXPECT_EQ(count(noted(number, "a.n", kind, "PARAMETER")), 18 + 1);
  EXPECT_EQ(count(noted(number, "a.n", kind, "BUFFER")), 18);
  const Message tanh = FloatsOf("tanh", {}, {0.5});
  EXPECT_EQ(count(noted(tanh, "tanh", folded, "['body.h']")), 18 + 1);
  EXPECT_EQ(count(noted(tanh, "tanh", folded, "['body.c', 'val_1']")), 18);
  // Equal numbers are one.
  const Message ones = FloatsOf("c", {6}, std::vector<float>(6, 1));
  EXPECT_EQ(count(noted(ones, "c", kind, "BUFFER")), 18);
  EXPECT_EQ(count(noted(ones, "c", kind, "PARAMETER")), 18 + 6);
  EXPECT_THAT(WarningsOf(noted(ones, "c", kind, "PARAMETER"), Options(4)),
              ElementsAre());
  // So are others.
  const Parts several =
      noted(FloatsOf("c", {6}, {1, 2, 3, 4, 5, 6}), "c", kind, "BUFFER");
  EXPECT_EQ(count(several), 18);
  EXPECT_THAT(WarningsOf(several, Options(4)), ElementsAre());
  // Which a layer's matrix is not: it is trained, and that is said.
  Parts layer = noted(WeightOf("m", {3, 6}), "m", kind, "BUFFER");
  layer.weights.push_back(FloatsOf("c", {6}, {1, 2, 3, 4, 5, 6}));
  layer.nodes = {NodeOf("Gemm", "head", {"x", "m"}, "logits",
                        {IntAttribute("transB", 1)})};
  EXPECT_THAT(WarningsOf(layer, Options(4)),
              ElementsAre(AllOf(HasSubstr("says are no parameters"),
                                HasSubstr("'m'"))));
}

// The ones and zeros of a norm without parameters.
TEST(Onnx, NormsWithoutParameters) {
  const auto norm = [](const std::string& op, float scale) {
    const std::vector<float> zeros(6, 0);
    Parts parts = {
        .inputs = {InputOf("x", 1, {"n", "6", "6"})},
        .weights = {FloatsOf("val_1", {6}, std::vector<float>(6, scale)),
                    FloatsOf("val_2", {6}, zeros), WeightOf("w", {36, 3})},
        .nodes = {NodeOf(op, "norm", {"x", "val_1", "val_2"}, "y"),
                  NodeOf("Flatten", "flat", {"y"}, "f"),
                  NodeOf("MatMul", "head", {"f", "w"}, "logits")}};
    for (const std::string name : {"val_1", "val_2"}) {
      parts.values.push_back(Message().Text(1, name).Add(
          4, NoteOf("pkg.onnxscript.optimizer.folded_from", "['val_0']")));
    }
    parts.notes = {NoteOf("pkg.torch.export.ExportedProgram.graph_signature",
                          "p_w: PARAMETER target='w'\n")};
    return parts;
  };
  for (const char* op : {"LayerNormalization", "InstanceNormalization"}) {
    const Graph graph = Imported(norm(op, 1), Options(4));
    EXPECT_EQ(ParameterCount(graph), 36 * 3) << op;
    EXPECT_EQ(OpsOf(graph).contains("layer_norm"), op[0] == 'L');
    EXPECT_THAT(WarningsOf(norm(op, 1), Options(4)), ElementsAre());
    // Other numbers may be weights. Their names are no patterns of others.
    EXPECT_EQ(ParameterCount(Imported(norm(op, 2), Options(4))), 36 * 3 + 6);
  }
  EXPECT_THAT(
      WarningsOf(norm("LayerNormalization", 2), Options(4)),
      ElementsAre(AllOf(HasSubstr("says are no parameters"),
                        HasSubstr("model.frozen"), EndsWith(": 'val_1'"))));
}

// A graph's edges, say, which a product reads as it reads what is computed.
TEST(Onnx, MatricesThatMayBeBuffersAreWarnedOf) {
  const Parts parts = {
      .inputs = {InputOf("x", 1, {"n", "6", "2"})},
      .weights = {WeightOf("edges", {6, 6}), WeightOf("w", {12, 3})},
      .nodes = {NodeOf("MatMul", "along", {"edges", "x"}, "y"),
                NodeOf("Flatten", "flat", {"y"}, "f"),
                NodeOf("MatMul", "head", {"f", "w"}, "logits")}};
  EXPECT_THAT(
      WarningsOf(parts, Options(4)),
      ElementsAre(AllOf(HasSubstr("no layer reads"), HasSubstr("'edges'"))));
}

// Rows of a table of sines and cosines are told from learned ones, also where
// it has more places than are read, more than 2^20 numbers in all.
TEST(Onnx, SinusoidsAreNotTrained) {
  const auto table = [](int64_t places, double amplitude) {
    std::vector<float> values;
    for (int64_t p = 0; p < places; ++p) {
      for (int64_t pair = 0; pair < 4; ++pair) {
        const double angle = static_cast<double>(p) *
                             std::pow(1e4, -0.25 * static_cast<double>(pair));
        values.push_back(static_cast<float>(amplitude * std::sin(angle)));
        values.push_back(static_cast<float>(amplitude * std::cos(angle)));
      }
    }
    return values;
  };
  const auto model = [&](int64_t places, double amplitude) {
    return Parts{
        .inputs = {InputOf("ids", 7, {"n", "5"})},
        .weights = {WeightOf("table", {9, 8}), WeightOf("out", {8, 9}),
                    FloatsOf("pe", {1, places, 8}, table(places, amplitude)),
                    IntsOf("zero", {0}), IntsOf("five", {5}),
                    IntsOf("one", {1})},
        .nodes = {NodeOf("Gather", "lookup", {"table", "ids"}, "x"),
                  NodeOf("Slice", "rows", {"pe", "zero", "five", "one"}, "p"),
                  NodeOf("Add", "add", {"x", "p"}, "y"),
                  NodeOf("MatMul", "head", {"y", "out"}, "logits")}};
  };
  for (const int64_t places : {7, 140000}) {
    const Graph graph = Imported(model(places, 1), Options(2, 5));
    EXPECT_EQ(ParameterCount(graph), 2 * 72);
    const std::vector<float> first = table(5, 1);
    EXPECT_EQ(graph.tensor(NodeNamed(graph, "add").operands[1]).values,
              std::vector<double>(first.begin(), first.end()));
  }
  // As small as learned rows begin.
  EXPECT_EQ(ParameterCount(Imported(model(7, 0.02), Options(2, 5))),
            2 * 72 + 7 * 8);
}

TEST(Onnx, WhatIsFrozenIsNamed) {
  const Parts parts =
      Scaled(FloatsOf("layers.0.c", {6}, {1, 2, 3, 4, 5, 6}), "layers.0.c");
  EXPECT_THAT(WarningsOf(parts, Options(4)),
              ElementsAre(HasSubstr("are constants: 'layers.*.c'")));
  const auto error = [&](const std::string& frozen) {
    ImportOptions options = Options(4);
    options.overrides["frozen"] = Json(frozen);
    return ErrorOf(parts, options);
  };
  for (const std::string names : {"\"layers.*.c\"", "[\"layers.0.c\"]"}) {
    ImportOptions options = Options(4);
    options.overrides["frozen"] = Json(names);
    const Graph graph = Imported(parts, options);
    EXPECT_EQ(ParameterCount(graph), 18);
    EXPECT_THAT(graph.tensor(NodeNamed(graph, "scaled").operands[1]).values,
                ElementsAre(1, 2, 3, 4, 5, 6));
  }
  EXPECT_THAT(error("\"layer.0.c,w\""),
              HasSubstr("no tensor of the file is called 'layer.0.c'; did you "
                        "mean 'layers.0.c'?"));
  EXPECT_THAT(error("7"), HasSubstr("frozen: is 7: expected names"));
}

// As where an exporter was given a batch of 4: zeros of the file for each.
TEST(Onnx, TensorsOfEachSample) {
  const auto zeros = [](const std::string& kind) {
    Parts parts =
        Scaled(FloatsOf("zeros", {4, 6}, std::vector<float>(24, 0)), "zeros");
    if (!kind.empty()) {
      parts.values = {
          Message()
              .Text(1, "zeros")
              .Add(4, NoteOf("pkg.torch.export.graph_signature.InputSpec.kind",
                             kind))};
    }
    return parts;
  };
  EXPECT_EQ(ParameterCount(Imported(zeros("BUFFER"), Options(4))), 18);
  EXPECT_THAT(ErrorOf(zeros("")),
              AllOf(HasSubstr("node 'scaled' (Mul): a tensor that no input "
                              "makes has a dimension of 4 places beside "
                              "samples"),
                    HasSubstr("model.frozen")));
}

// Of no tensor of the file, which could be frozen.
TEST(Onnx, NumbersThatDifferBetweenSamples) {
  const Parts parts = {
      .inputs = {InputOf("x", 1, {"n", "6"})},
      .weights = {IntsOf("from", {0}), IntsOf("shape", {4, 1}),
                  WeightOf("w", {6, 3}), Scalar("zero", 0), Scalar("one", 1),
                  Scalar("samples", 4)},
      .nodes = {NodeOf("Range", "range", {"zero", "samples", "one"}, "r"),
                NodeOf("Reshape", "column", {"r", "shape"}, "c"),
                NodeOf("Cast", "numbers", {"c"}, "f", {IntAttribute("to", 1)}),
                NodeOf("Mul", "scaled", {"x", "f"}, "y"),
                NodeOf("MatMul", "head", {"y", "w"}, "logits")}};
  EXPECT_THAT(ErrorOf(parts),
              AllOf(HasSubstr("node 'scaled' (Mul): a tensor that no input "
                              "makes has a dimension of 4 places"),
                    Not(HasSubstr("model.frozen"))));
}

TEST(Onnx, SamplesDoNotReadOthers) {
  const Parts parts = {
      .inputs = {InputOf("x", 1, {"n", "6"})},
      .weights = {},
      .nodes = {NodeOf("Transpose", "turned", {"x"}, "t"),
                NodeOf("MatMul", "pairs", {"x", "t"}, "logits")}};
  EXPECT_THAT(ErrorOf(parts),
              HasSubstr("node 'pairs' (MatMul): puts samples beside other "
                        "samples, which batches that are cut into "
                        "microbatches do not have together"));
}

TEST(Onnx, WeightsOfOneNumber) {
  // 0.5, in the file: what is not there could be nothing but a weight.
  const Message bias = Message()
                           .Number(1, 1)
                           .Number(2, 1)
                           .Text(8, "positions")
                           .Text(9, std::string("\0\0\0\x3f", 4));
  const Graph graph = Imported(
      {.inputs = {InputOf("x", 1, {"n", "3", "6"})},
       .weights = {WeightOf("w", {1, 3, 3}), bias, WeightOf("out", {2, 4})},
       .nodes = {NodeOf("Conv", "conv", {"x", "w", "positions"}, "c"),
                 NodeOf("Flatten", "flat", {"c"}, "f"),
                 NodeOf("Gemm", "fc", {"f", "out"}, "logits",
                        {IntAttribute("transB", 1)})}},
      Options(4));
  EXPECT_EQ(ParameterCount(graph), 9 + 1 + 8);
}

// Of constants Flatten makes constants, as Reshape does: of 2^21 elements, too.
TEST(Onnx, ConstantsAreFlattened) {
  for (const int64_t features : {6, 1 << 21}) {
    SCOPED_TRACE(features);
    const Graph graph = Imported(
        {.inputs = {InputOf("x", 1, {"n", std::to_string(features)})},
         .weights = {IntsOf("shape", {1, 2, features / 2}),
                     WeightOf("w", {features, 3})},
         .nodes = {NodeOf("ConstantOfShape", "constant", {"shape"}, "c"),
                   NodeOf("Flatten", "flat", {"c"}, "f"),
                   NodeOf("Add", "add", {"x", "f"}, "y"),
                   NodeOf("MatMul", "head", {"y", "w"}, "logits")}},
        Options(4));
    EXPECT_EQ(ParameterCount(graph), 3 * features);
  }
}

// A layer's one number is its weight, whatever it is called.
TEST(Onnx, LayersOfOneChannelAreTrained) {
  const auto one = [](const std::string& name, const Shape& dims) {
    return FloatsOf(name, dims, {0.5});
  };
  const Graph images = Imported(
      {.inputs = {InputOf("x", 1, {"n", "1", "6", "6"})},
       .weights = {one("w", {1, 1, 1, 1}), one("v", {1, 1, 1, 1}),
                   one("scale", {1}), one("shift", {1}), one("mean", {1}),
                   one("variance", {1}), WeightOf("out", {3, 36})},
       .nodes = {NodeOf("Conv", "conv", {"x", "w"}, "c"),
                 NodeOf("BatchNormalization", "norm",
                        {"c", "scale", "shift", "mean", "variance"}, "d"),
                 NodeOf("ConvTranspose", "up", {"d", "v"}, "u"),
                 NodeOf("Flatten", "flat", {"u"}, "f"),
                 NodeOf("Gemm", "fc", {"f", "out"}, "logits",
                        {IntAttribute("transB", 1)})}},
      Options(4));
  EXPECT_TRUE(OpsOf(images).contains("tracked_batch_norm"));
  EXPECT_EQ(ParameterCount(images), 1 + 1 + 2 + 3 * 36);
  // One feature of one, by either node, normed between both.
  const Graph features = Imported(
      {.inputs = {InputOf("x", 1, {"n", "1"})},
       .weights = {one("w", {1, 1}), one("v", {1, 1}), one("scale", {1}),
                   one("shift", {1}), WeightOf("out", {1, 3})},
       .nodes = {NodeOf("MatMul", "first", {"x", "w"}, "a"),
                 NodeOf("LayerNormalization", "norm", {"a", "scale", "shift"},
                        "b"),
                 NodeOf("Gemm", "second", {"b", "v"}, "c"),
                 NodeOf("MatMul", "head", {"c", "out"}, "logits")}},
      Options(4));
  EXPECT_EQ(ParameterCount(features), 1 + 2 + 1 + 3);
}

// A router of one feature chooses 3 of a sequence's places, whose features are
// read, and added up where they were.
TEST(Onnx, PlacesOfASequenceAreChosen) {
  const Graph graph = Imported(
      {.inputs = {InputOf("tokens", 7, {"n", "s"})},
       .weights = {WeightOf("table", {9, 4}), WeightOf("router", {4, 1}),
                   WeightOf("out", {4, 9}), IntsOf("three", {3}),
                   IntsOf("wide", {1, 1, 4})},
       .nodes = {NodeOf("Gather", "lookup", {"table", "tokens"}, "x"),
                 NodeOf("MatMul", "route", {"x", "router"}, "w"),
                 Message()
                     .Text(1, "w")
                     .Text(1, "three")
                     .Text(2, "best")
                     .Text(2, "ids")
                     .Text(3, "choose")
                     .Text(4, "TopK")
                     .Add(5, IntAttribute("axis", 1)),
                 NodeOf("Expand", "expand", {"ids", "wide"}, "at"),
                 NodeOf("GatherElements", "take", {"x", "at"}, "y",
                        {IntAttribute("axis", 1)}),
                 NodeOf("Mul", "weigh", {"y", "best"}, "z"),
                 NodeOf("ScatterElements", "put", {"x", "at", "z"}, "p",
                        {IntAttribute("axis", 1), Text("reduction", "add")}),
                 NodeOf("MatMul", "head", {"p", "out"}, "logits")}},
      Options(4, 6));
  const auto rule_of = [&](const std::string& op) {
    for (const Node& node : graph.nodes) {
      if (node.op->name == op) return node.rule.ToString();
    }
    return std::string();
  };
  EXPECT_EQ(rule_of("top_k"), "bv!->bk!,bk");
  EXPECT_EQ(rule_of("gather"), "bvf,bk->bkf");
  EXPECT_EQ(rule_of("scatter_add"), "bkf,bk->bvf");
}

// 9 pixels by 2 with SAME padding are 5, whose windows of 3 by 2 are 2.
TEST(Onnx, WindowsAndPaddingFollowTheStandard) {
  const auto graph = ImportBytes(BytesOf(SmallCnn()), Options(4));
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  const auto shape_of = [&](const std::string& name) {
    for (const Tensor& tensor : graph->tensors) {
      if (tensor.name == name) return tensor.shape;
    }
    return Shape{};
  };
  EXPECT_EQ(shape_of("conv"), (Shape{4, 4, 5, 5}));
  EXPECT_EQ(shape_of("pool"), (Shape{4, 4, 2, 2}));
  EXPECT_EQ(shape_of("twice"), (Shape{4, 8, 2, 2}));
  EXPECT_EQ(shape_of("fc"), (Shape{4, 3}));
  EXPECT_EQ(ParameterCount(*graph), 4 * 2 * 9 + 4 + 4 + 3 * 8);
}

TEST(Onnx, AllThatCannotBeMappedIsListed) {
  Parts parts = SmallMlp();
  parts.nodes[2] = NodeOf("Det", "odd", {"y2"}, "y3");
  parts.nodes.push_back(
      NodeOf("Gemm", "wrong", {"x", "w2"}, "z", {IntAttribute("transB", 1)}));
  parts.nodes.push_back(NodeOf("Relu", "nothing", {"nowhere"}, "zz"));
  // What no output is made of is left out.
  EXPECT_THAT(ErrorOf(parts), HasSubstr(": 1 of 6 nodes cannot be mapped"));
  parts.nodes.push_back(NodeOf("Sum", "all", {"logits", "z", "zz"}, "sum"));
  parts.output = "sum";
  EXPECT_THAT(
      ErrorOf(parts),
      AllOf(HasSubstr("tessera.test.onnx: 3 of 7 nodes cannot be mapped"),
            HasSubstr("2 behind them, of shapes that are not known, were not "
                      "looked at"),
            HasSubstr("node 'odd' (Det): no operator"),
            HasSubstr("node 'wrong' (Gemm): reads 6 features: its weight has "
                      "5"),
            HasSubstr("node 'nothing' (Relu): reads 'nowhere'")));
}

// What is behind a node of known shape is looked at by its own merits: 'upper'
// is refused whatever it reads, the layers between and behind are not.
TEST(Onnx, WhatIsBehindAProblemIsLookedAt) {
  Parts parts = SmallMlp();
  parts.nodes[2] = NodeOf("LRN", "odd", {"y2"}, "y3");
  parts.nodes.push_back(NodeOf("Sigmoid", "fine", {"logits"}, "p"));
  parts.nodes.push_back(NodeOf("Trilu", "upper", {"p"}, "z"));
  parts.nodes.push_back(NodeOf("Relu", "last", {"z"}, "all"));
  parts.output = "all";
  const std::string error = ErrorOf(parts);
  EXPECT_THAT(error, AllOf(HasSubstr("2 of 7 nodes cannot be mapped"),
                           HasSubstr("node 'odd' (LRN)"),
                           HasSubstr("node 'upper' (Trilu)"),
                           Not(HasSubstr("not looked at"))));
  // Of 5 features, which no operator's result has to be for that.
  parts.nodes[3] = NodeOf("Gemm", "second", {"y3", "w1"}, "logits");
  EXPECT_THAT(
      ErrorOf(parts),
      HasSubstr("node 'second' (Gemm): reads 5 features: its weight has "
                "6"));
  // A function that no operator computes is the fault of what reads it.
  parts = SmallMlp();
  parts.nodes[2] = NodeOf("Floor", "floor", {"y2"}, "y3");
  parts.nodes.push_back(NodeOf("Trilu", "upper", {"logits"}, "z"));
  parts.output = "z";
  EXPECT_THAT(ErrorOf(parts), AllOf(HasSubstr("2 of 5 nodes"),
                                    HasSubstr("the function of 'floor'"),
                                    HasSubstr("node 'upper' (Trilu)")));
}

// Two nodes, and x of them behind each other where no operator is both.
Parts MlpOf(const std::string& first, const std::string& second) {
  Parts parts = SmallMlp();
  parts.nodes[2] = NodeOf(first, "inner", {"y2"}, "y2a");
  parts.nodes.insert(parts.nodes.begin() + 3,
                     NodeOf(second, "outer", {"y2a"}, "y3"));
  return parts;
}

TEST(Onnx, FunctionsAreOperatorsBehindOneAnother) {
  const auto graph = ImportBytes(BytesOf(MlpOf("Exp", "Tanh")), Options(4));
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  EXPECT_TRUE(OpsOf(*graph).contains("exp"));
  EXPECT_TRUE(OpsOf(*graph).contains("tanh"));
  // log(exp(x)) is x.
  const auto same = ImportBytes(BytesOf(MlpOf("Exp", "Log")), Options(4));
  ASSERT_TRUE(same.has_value()) << same.error().ToString();
  EXPECT_FALSE(OpsOf(*same).contains("exp"));
}

// A vector of the file is added to each row, and its gradient is a sum.
TEST(Onnx, TensorsAreBroadcast) {
  Parts parts = SmallMlp();
  parts.nodes[2] = NodeOf("Mul", "each", {"y2", "b1"}, "y3");
  const auto graph = ImportBytes(BytesOf(parts), Options(4));
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  const auto node = std::ranges::find(graph->nodes, "each", &Node::name);
  ASSERT_NE(node, graph->nodes.end());
  EXPECT_EQ(node->rule.ToString(), "bf,f->bf");
  EXPECT_TRUE(Differentiate(*graph).has_value());
}

// x / sqrt(mean(x^2) + e) * w, as exporters write an RMS norm, and a softmax
// that is not the last node.
TEST(Onnx, NormsInPartsAndSoftmaxesAreOperators) {
  const Message two =
      Message().Number(2, 1).Text(8, "two").Text(9, std::string("\0\0\0@", 4));
  const Parts parts = {
      .inputs = {InputOf("x", 1, {"n", "6"})},
      .weights = {WeightOf("w", {6}), WeightOf("out", {3, 6}), two,
                  IntsOf("last", {-1})},
      .nodes = {NodeOf("Pow", "square", {"x", "two"}, "x2"),
                NodeOf("ReduceMean", "mean", {"x2", "last"}, "m"),
                NodeOf("Add", "epsilon", {"m", "two"}, "me"),
                NodeOf("Sqrt", "root", {"me"}, "r"),
                NodeOf("Div", "divide", {"x", "r"}, "y"),
                NodeOf("Mul", "scale", {"w", "y"}, "z"),
                NodeOf("Softmax", "softmax", {"z"}, "p"),
                NodeOf("Gemm", "head", {"p", "out"}, "logits",
                       {IntAttribute("transB", 1)})}};
  const auto graph = ImportBytes(BytesOf(parts), Options(4));
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  EXPECT_THAT(OpsOf(*graph),
              ElementsAre("count_labels", "cross_entropy", "divide", "linear",
                          "multiply", "offset", "power", "reduce_mean", "scale",
                          "softmax", "sqrt"));
  EXPECT_EQ(ParameterCount(*graph), 6 + 3 * 6);
  EXPECT_TRUE(Differentiate(*graph).has_value());
}

TEST(Onnx, BatchNormsOfGroups) {
  const auto with = [](double groups) {
    ImportOptions options = Options(4);
    JsonValue value;
    value.kind = JsonValue::Kind::kNumber;
    value.number = groups;
    options.overrides["batch_norm_groups"] = value;
    return options;
  };
  const auto graph = ImportBytes(BytesOf(SmallCnn()), with(2));
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  EXPECT_TRUE(OpsOf(*graph).contains("tracked_ghost_batch_norm"));
  EXPECT_FALSE(OpsOf(*graph).contains("tracked_batch_norm"));
  EXPECT_THAT(ErrorOf(SmallCnn(), with(3)),
              HasSubstr("batch_norm_groups: is 3: expected a divisor of the "
                        "global batch, 4"));
}

// A number is compared as a tensor of it. What jumps at 2 is not taken for what
// jumps elsewhere between the points where functions are told apart.
TEST(Onnx, ComparisonsWithNumbers) {
  const Message two =
      Message().Number(2, 1).Text(8, "two").Text(9, std::string("\0\0\0@", 4));
  const Parts parts = {
      .inputs = {InputOf("x", 1, {"n", "6"})},
      .weights = {WeightOf("w", {6, 5}), two},
      .nodes = {NodeOf("MatMul", "layer", {"x", "w"}, "a"),
                NodeOf("Greater", "above", {"a", "two"}, "c"),
                NodeOf("Less", "below", {"two", "a"}, "e"),
                NodeOf("Not", "not", {"e"}, "f"),
                NodeOf("Where", "either", {"c", "a", "two"}, "d"),
                NodeOf("Where", "or", {"f", "d", "a"}, "logits")}};
  const auto graph = ImportBytes(BytesOf(parts), Options(4));
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  EXPECT_THAT(OpsOf(*graph),
              ElementsAre("clip", "count_labels", "cross_entropy", "greater",
                          "less", "linear", "offset", "scale", "where"));
  EXPECT_TRUE(Differentiate(*graph).has_value());
}

// The larger of two layers' outputs, or 2 where they are below each other.
TEST(Onnx, ComparisonsAndChoices) {
  const Message two =
      Message().Number(2, 1).Text(8, "two").Text(9, std::string("\0\0\0@", 4));
  const Parts parts = {
      .inputs = {InputOf("x", 1, {"n", "6"})},
      .weights = {WeightOf("w1", {6, 5}), WeightOf("w2", {6, 5}), two},
      .nodes = {NodeOf("MatMul", "first", {"x", "w1"}, "a"),
                NodeOf("MatMul", "second", {"x", "w2"}, "b"),
                NodeOf("Greater", "above", {"a", "b"}, "c"),
                NodeOf("Where", "either", {"c", "a", "b"}, "d"),
                NodeOf("Less", "below", {"a", "b"}, "e"),
                NodeOf("Where", "number", {"e", "two", "d"}, "logits")}};
  const auto graph = ImportBytes(BytesOf(parts), Options(4));
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  EXPECT_THAT(OpsOf(*graph),
              ElementsAre("clip", "count_labels", "cross_entropy", "greater",
                          "less", "linear", "where"));
  EXPECT_TRUE(Differentiate(*graph).has_value());
}

// x + 1e-6 is not x: it is what a norm of small numbers divides by.
TEST(Onnx, SmallNumbersAreAdded) {
  Parts parts = SmallMlp();
  parts.weights.push_back(
      Message()
          .Number(2, 1)
          .Text(8, "epsilon")
          .Text(9, std::string("\xbd\x37\x86\x35", 4)));  // 1e-6
  parts.nodes[2] = NodeOf("Add", "moved", {"y2", "epsilon"}, "y2a");
  parts.nodes.insert(parts.nodes.begin() + 3,
                     NodeOf("Sqrt", "root", {"y2a"}, "y3"));
  const auto graph = ImportBytes(BytesOf(parts), Options(4));
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  const auto offset = std::ranges::find_if(
      graph->nodes, [](const Node& node) { return node.op->name == "offset"; });
  ASSERT_NE(offset, graph->nodes.end());
  EXPECT_NEAR(offset->attribute("amount"), 1e-6, 1e-12);
}

// A small function is not a small factor.
TEST(Onnx, FunctionsTimesSmallNumbers) {
  for (const auto& [op, ours] :
       {std::pair("Sigmoid", "sigmoid"), {"Abs", "abs"}, {"Tanh", "tanh"}}) {
    Parts parts = SmallMlp();
    parts.weights.push_back(FloatsOf("small", {}, {1e-7F}));
    parts.nodes[2] = NodeOf(op, "function", {"y2"}, "f");
    parts.nodes.insert(parts.nodes.begin() + 3,
                       NodeOf("Mul", "scaled", {"f", "small"}, "y3"));
    const std::set<std::string> ops = OpsOf(Imported(parts, Options(4)));
    EXPECT_TRUE(ops.contains(ours));
    EXPECT_TRUE(ops.contains("scale"));
  }
}

TEST(Onnx, DivisionsByZeroAreNamed) {
  Parts parts = SmallMlp();
  parts.weights.push_back(FloatsOf("zero", {}, {0}));
  parts.nodes[2] = NodeOf("Div", "divide", {"y2", "zero"}, "y3");
  EXPECT_THAT(ErrorOf(parts), HasSubstr("'divide' divides by 0"));
}

TEST(Onnx, FunctionsThatNoOperatorComputesAreNamed) {
  EXPECT_THAT(ErrorOf(MlpOf("Exp", "Floor")),
              HasSubstr("node 'second' (Gemm): no operator computes the "
                        "function of 'outer'"));
}

// One LSTM of the file's own weights, [n, 6] tokens of 8 features.
Parts SmallLstm(const std::vector<Message>& attributes,
                const std::string& last = "") {
  std::vector<std::string> operands = {"turned", "w", "r", "b",
                                       "",       "",  "",  last};
  while (operands.back().empty()) operands.pop_back();
  const auto order = [](std::initializer_list<int64_t> dims) {
    Message perm = Message().Text(1, "perm");
    for (int64_t d : dims) perm.Number(8, d);
    return perm;
  };
  return {.inputs = {InputOf("ids", 7, {"n", "s"})},
          .weights = {WeightOf("table", {9, 8}), WeightOf("w", {1, 20, 8}),
                      WeightOf("r", {1, 20, 5}), WeightOf("b", {1, 40}),
                      WeightOf("p", {1, 15}), WeightOf("out", {5, 9}),
                      IntsOf("one", {1})},
          .nodes = {
              NodeOf("Gather", "lookup", {"table", "ids"}, "x"),
              NodeOf("Transpose", "turn", {"x"}, "turned", {order({1, 0, 2})}),
              NodeOf("LSTM", "lstm", operands, "y", attributes),
              NodeOf("Squeeze", "squeeze", {"y", "one"}, "y1"),
              NodeOf("Transpose", "back", {"y1"}, "y2", {order({1, 0, 2})}),
              NodeOf("MatMul", "head", {"y2", "out"}, "logits")}};
}

// Of 40 steps the runs in the middle, each of ten, are one repeated.
TEST(Onnx, RunsOfStepsAreRepeated) {
  const auto graph = ImportBytes(BytesOf(SmallLstm({})), Options(4, 40));
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  EXPECT_THAT(graph->blocks, ElementsAre("lookup", "lstm.0", "lstm.10",
                                         "lstm.20", "lstm.30", "head"));
  const std::vector<int> classes = BlockClasses(*graph);
  EXPECT_EQ(classes[3], classes[2]);
  EXPECT_NE(classes[2], classes[1]);
  EXPECT_TRUE(Differentiate(*graph).has_value());
}

// An exporter that was given a batch writes a state of zeros for it.
TEST(Onnx, ZerosOfTheFileAreFirstStates) {
  const auto stated = [](const std::string& kind, float last) {
    Parts parts = SmallLstm({});
    std::vector<float> numbers(4 * 5, 0);
    numbers.back() = last;
    parts.weights.push_back(FloatsOf("state", {1, 4, 5}, numbers));
    parts.nodes[2] = NodeOf(
        "LSTM", "lstm", {"turned", "w", "r", "b", "", "state", "state"}, "y");
    parts.notes = {NoteOf("pkg.torch.export.ExportedProgram.graph_signature",
                          "p_w: PARAMETER target='w'\n")};
    parts.values = {
        Message()
            .Text(1, "state")
            .Add(4, NoteOf("pkg.torch.export.graph_signature.InputSpec.kind",
                           kind))};
    return parts;
  };
  EXPECT_EQ(ErrorOf(stated("BUFFER", 0), Options(4, 6)), "");
  EXPECT_EQ(ParameterCount(Imported(stated("BUFFER", 0), Options(4, 6))),
            ParameterCount(Imported(SmallLstm({}), Options(4, 6))));
  for (const auto& [kind, last] :
       {std::pair("BUFFER", 1.0F), std::pair("PARAMETER", 0.0F)}) {
    EXPECT_THAT(ErrorOf(stated(kind, last), Options(4, 6)),
                HasSubstr("its initial state is not of each sample"));
  }
}

// Steps whose features are an image's channels and rows.
TEST(Onnx, ChannelsAndRowsAreFeatures) {
  Message order = Message().Text(1, "perm");
  for (const int64_t d : {3, 0, 1, 2}) order.Number(8, d);
  Parts parts = SmallLstm({});
  parts.inputs = {InputOf("x", 1, {"n", "2", "4", "6"})};
  parts.weights[0] = IntsOf("shape", {6, -1, 8});
  parts.nodes[0] = NodeOf("Transpose", "columns", {"x"}, "c", {order});
  parts.nodes[1] = NodeOf("Reshape", "join", {"c", "shape"}, "turned");
  ImportOptions options = Options(4);
  options.overrides["loss"] = Json("\"mean_squared_error\"");
  const Graph graph = Imported(parts, options);
  EXPECT_EQ(std::ranges::count_if(
                graph.nodes,
                [](const Node& node) { return node.op->name == "lstm_gates"; }),
            6);
}

// The mean binary cross-entropy of sigmoids is of what these are of.
TEST(Onnx, ASigmoidInFrontOfItsLoss) {
  const auto parts = [](bool sigmoid) {
    Parts made = SmallMlp();
    if (sigmoid) {
      made.nodes.push_back(NodeOf("Sigmoid", "last", {"logits"}, "chances"));
      made.output = "chances";
    }
    return made;
  };
  const auto ops = [&](bool sigmoid, const std::string& loss) {
    ImportOptions options = Options(4);
    options.overrides["loss"] = Json('"' + loss + '"');
    return OpsOf(Imported(parts(sigmoid), options));
  };
  EXPECT_EQ(ops(true, "binary_cross_entropy"),
            ops(false, "binary_cross_entropy"));
  EXPECT_TRUE(ops(true, "mean_squared_error").contains("sigmoid"));
}

TEST(Onnx, CellsThatNoOperatorComputesAreNamed) {
  EXPECT_EQ(ErrorOf(SmallLstm({}), Options(4, 6)), "");
  const auto text = [](const std::string& name, const std::string& value) {
    return Message().Text(1, name).Text(4, value);
  };
  EXPECT_EQ(ErrorOf(SmallLstm({text("direction", "reverse")}), Options(4, 6)),
            "");
  EXPECT_THAT(ErrorOf(SmallLstm({IntAttribute("clip", 1)}), Options(4, 6)),
              HasSubstr("node 'lstm' (LSTM): clip is not supported"));
  EXPECT_THAT(ErrorOf(SmallLstm({Message()
                                     .Text(1, "activations")
                                     .Text(9, "Sigmoid")
                                     .Text(9, "Relu")
                                     .Text(9, "Tanh")}),
                      Options(4, 6)),
              HasSubstr("activation Relu is not supported"));
  EXPECT_THAT(ErrorOf(SmallLstm({}, "p"), Options(4, 6)),
              HasSubstr("operand 7 (peepholes) is not supported"));
  EXPECT_THAT(ErrorOf(SmallLstm({text("direction", "both")}), Options(4, 6)),
              HasSubstr("unknown direction 'both'"));
  EXPECT_THAT(
      ErrorOf(SmallLstm({text("direction", "bidirectional")}), Options(4, 6)),
      HasSubstr("operand 1 is [1,20,8]: expected [2,20,8]"));
  EXPECT_THAT(ErrorOf(SmallLstm({}), Options(4, 300)),
              HasSubstr("has 300 steps: at most 256"));
}

TEST(Onnx, WhatAnOperatorCannotDoIsSaidOfTheNode) {
  Parts samples = SmallMlp();
  samples.nodes[2] =
      NodeOf("Softmax", "odd", {"y2"}, "y3", {IntAttribute("axis", 0)});
  EXPECT_THAT(ErrorOf(samples),
              HasSubstr("node 'odd' (Softmax): a softmax over samples is not "
                        "supported"));
  Parts padded = SmallMlp();
  padded.weights.push_back(IntsOf("pads", {0, 1, 0, 0}));
  padded.weights.push_back(
      Message()
          .Number(2, 1)
          .Text(8, "hidden")
          .Text(9, std::string("\x00\x00\x80\xff", 4)));  // minus infinity
  padded.nodes[2] = NodeOf("Pad", "odd", {"y2", "pads", "hidden"}, "y3");
  EXPECT_THAT(ErrorOf(padded), HasSubstr("node 'odd' (Pad): padding with -inf "
                                         "is not supported"));
  padded.weights.back() = IntsOf("many", {0, 65537, 0, 0});
  padded.nodes[2] = NodeOf("Pad", "odd", {"y2", "many"}, "y3");
  EXPECT_THAT(ErrorOf(padded), HasSubstr("node 'odd' (Pad): expected up to "
                                         "65536 places on each side"));
  const Parts deep = {
      .inputs = {InputOf("x", 1, {"n", "6"})},
      .weights = {WeightOf("w", {6, 32}), IntsOf("apart", {0, 2, 2, 2, 2, 2})},
      .nodes = {NodeOf("MatMul", "layer", {"x", "w"}, "a"),
                NodeOf("Reshape", "reshape", {"a", "apart"}, "b"),
                NodeOf("Softmax", "odd", {"b"}, "c"),
                NodeOf("Flatten", "flat", {"c"}, "logits")}};
  EXPECT_THAT(ErrorOf(deep), HasSubstr("expected a softmax of at most 5 "
                                       "dimensions, found 6"));
}

// A convolution makes a token of each patch: behind one class token the data
// are patches; of others, and other numbers of them, they are images.
TEST(Onnx, OneClassTokenStandsInFrontOfPatches) {
  const auto ops = [](int64_t tokens, const std::string& repeat) {
    const Message strides =
        Message().Text(1, "strides").Number(8, 4).Number(8, 4);
    Message perm = Message().Text(1, "perm");
    for (const int64_t d : {0, 2, 1}) perm.Number(8, d);
    return OpsOf(Imported(
        {.inputs = {InputOf("x", 1, {"n", "3", "8", "8"})},
         .weights = {WeightOf("w", {6, 3, 4, 4}),
                     WeightOf("token", {1, tokens, 6}), WeightOf("out", {6, 4}),
                     IntsOf("flat", {0, 6, -1}), IntsOf("times", {4, 1, 1}),
                     IntsOf("shape", {4, tokens, 6}), IntsOf("first", {0})},
         .nodes = {NodeOf("Conv", "conv", {"x", "w"}, "c", {strides}),
                   NodeOf("Reshape", "flat", {"c", "flat"}, "f"),
                   NodeOf("Transpose", "turn", {"f"}, "t", {perm}),
                   NodeOf(repeat, "each",
                          {"token", repeat == "Tile" ? "times" : "shape"}, "e"),
                   NodeOf("Concat", "joint", {"e", "t"}, "j",
                          {IntAttribute("axis", 1)}),
                   NodeOf("Gather", "place", {"j", "first"}, "p",
                          {IntAttribute("axis", 1)}),
                   NodeOf("Flatten", "features", {"p"}, "g"),
                   NodeOf("MatMul", "fc", {"g", "out"}, "logits")}},
        Options(4)));
  };
  for (const char* repeat : {"Expand", "Tile"}) {
    EXPECT_FALSE(ops(1, repeat).contains("conv2d")) << repeat;
    EXPECT_TRUE(ops(2, repeat).contains("conv2d")) << repeat;
  }
}

// Types are those of operands, and what has another one would be rounded.
TEST(Onnx, CastsToWholeNumbersAreNamed) {
  const auto like = [](const std::string& x, const std::string& target) {
    Parts parts = SmallMlp();
    parts.weights.push_back(
        Message().Number(1, 1).Number(2, 7).Text(8, "number").Number(7, 0));
    parts.nodes[2] = NodeOf("Shape", "sizes", {"x"}, "sizes");
    parts.nodes.insert(parts.nodes.begin() + 3,
                       {NodeOf("CastLike", "cast", {x, target}, "z"),
                        NodeOf("Add", "add", {"y2", "z"}, "y3")});
    return ErrorOf(parts);
  };
  EXPECT_EQ(like("y2", "y1"), "");
  EXPECT_EQ(like("y2", "x"), "");
  EXPECT_EQ(like("b1", "w2"), "");
  EXPECT_THAT(like("y2", "number"),
              HasSubstr("node 'cast' (CastLike): rounds what is computed"));
  EXPECT_THAT(like("b1", "number"),
              HasSubstr("rounds a tensor of the file that is trained: expected "
                        "that it is one of model.frozen"));
  EXPECT_THAT(like("y2", "sizes"),
              HasSubstr("casts to the type of operand 1, which is not known"));
  Parts cast = SmallMlp();
  cast.nodes[1] = NodeOf("Cast", "whole", {"b1"}, "b", {IntAttribute("to", 6)});
  cast.nodes.insert(cast.nodes.begin() + 2,
                    NodeOf("Add", "bias", {"b", "y1"}, "y2"));
  EXPECT_THAT(ErrorOf(cast), HasSubstr("node 'whole' (Cast): rounds a tensor"));
  cast.nodes[1] = NodeOf("Cast", "text", {"b1"}, "b", {IntAttribute("to", 8)});
  EXPECT_THAT(ErrorOf(cast),
              HasSubstr("node 'text' (Cast): makes elements of a type that is "
                        "not supported"));
  Parts lstm = SmallLstm({});
  lstm.nodes.insert(lstm.nodes.begin(), NodeOf("Cast", "whole", {"w"}, "ww",
                                               {IntAttribute("to", 6)}));
  lstm.nodes[3] = NodeOf("LSTM", "lstm", {"turned", "ww", "r", "b"}, "y");
  EXPECT_THAT(ErrorOf(lstm, Options(4, 6)),
              HasSubstr("node 'whole' (Cast): rounds a recurrent layer's "
                        "weight"));
}

TEST(Onnx, APlaceIsANumberOrInAList) {
  const auto taken = [](const Shape& dims, const Shape& axes) {
    Message place;
    for (int64_t extent : dims) place.Number(1, extent);
    place.Number(2, 7).Text(8, "place").Number(7, 0);
    const Parts parts = {
        .inputs = {InputOf("ids", 7, {"n", "s"})},
        .weights = {WeightOf("table", {9, 8}), WeightOf("out", {8, 9}), place,
                    IntsOf("axes", axes)},
        .nodes = {NodeOf("Gather", "lookup", {"table", "ids"}, "x"),
                  NodeOf("Gather", "take", {"x", "place"}, "y",
                         {IntAttribute("axis", 1)}),
                  NodeOf("Squeeze", "squeeze", {"y", "axes"}, "z"),
                  NodeOf("MatMul", "head", {"z", "out"}, "logits")}};
    return ErrorOf(parts, Options(4, 6));
  };
  EXPECT_EQ(taken({1}, {1}), "");
  EXPECT_THAT(taken({1, 1}, {1, 2}),
              HasSubstr("node 'take' (Gather): expected a place, or a list of "
                        "places"));
}

TEST(Onnx, OtherVersionsAreRefused) {
  Parts parts = SmallMlp();
  parts.opset = 12;
  EXPECT_THAT(ErrorOf(parts),
              HasSubstr("operators of version 12: expected 13 to 21"));
  parts.opset = 22;
  EXPECT_THAT(ErrorOf(parts), HasSubstr("version 22"));
}

TEST(Onnx, SymbolsAreSetByName) {
  Parts parts = SmallMlp();
  parts.inputs = {InputOf("x", 1, {"n", "features"})};
  EXPECT_THAT(ErrorOf(parts),
              EndsWith("input 'x': dimension 'features': is open: needs "
                       "--set model.features=N"));
  ImportOptions options = Options(4);
  options.overrides["features"] = Json("6");
  EXPECT_EQ(ErrorOf(parts, options), "");
  options.overrides["feature"] = options.overrides["features"];
  EXPECT_THAT(ErrorOf(parts, options),
              HasSubstr("'feature'; did you mean 'features'?"));
}

TEST(Onnx, DimensionsThatNothingSetsNeedASizeInTheFile) {
  Parts parts = SmallMlp();
  parts.inputs = {InputOf("x", 1, {"n", "a=b"})};
  EXPECT_THAT(ErrorOf(parts),
              EndsWith("input 'x': dimension 'a=b': is open: needs a size in "
                       "the file: --set cannot name what has a '='"));
  parts.inputs = {InputOf("x", 1, {"n", "0"})};
  EXPECT_THAT(ErrorOf(parts), EndsWith("input 'x': dimension 1: is open: needs "
                                       "a size in the file"));
}

TEST(Onnx, FixedBatchesMustAgree) {
  Parts parts = SmallMlp();
  parts.inputs = {InputOf("x", 1, {"8", "6"})};
  EXPECT_THAT(ErrorOf(parts),
              HasSubstr("dimension 0: is 8 in the file: expected "
                        "--global-batch 8"));
  EXPECT_EQ(ErrorOf(parts, Options(8)), "");
  EXPECT_EQ(ErrorOf(parts, Options(0)), "");
}

TEST(Onnx, TheOutputIsChosen) {
  ImportOptions options = Options(4);
  options.overrides["output"] = Json("\"logit\"");
  EXPECT_THAT(ErrorOf(SmallMlp(), options),
              HasSubstr("unknown output 'logit'; did you mean 'logits'?"));
  options.overrides["output"] = Json("16");
  EXPECT_THAT(ErrorOf(SmallMlp(), options), HasSubstr("unknown output '16'"));
  Parts parts = SmallMlp();
  parts.output = "";
  EXPECT_THAT(ErrorOf(parts), EndsWith(".onnx: has no outputs: expected one, "
                                       "which the loss is of"));
}

TEST(Onnx, TheLossIsChosen) {
  ImportOptions options = Options(4);
  options.overrides["loss"] = Json("\"mean_squared_error\"");
  const auto graph = ImportBytes(BytesOf(SmallMlp()), options);
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  const Node& loss = graph->nodes.back();
  EXPECT_EQ(loss.op->name, "mean_squared_error");
  const Tensor& targets = graph->tensor(loss.operands[1]);
  EXPECT_EQ(targets.name, "targets");
  EXPECT_EQ(targets.shape, graph->tensor(loss.operands[0]).shape);
  EXPECT_EQ(targets.shape[0], 4);
  EXPECT_TRUE(Differentiate(*graph).has_value());
  options.overrides["loss"] = Json("\"squared_error\"");
  EXPECT_THAT(ErrorOf(SmallMlp(), options),
              HasSubstr("unknown loss 'squared_error'"));
  options.overrides["loss"] = Json("16");
  EXPECT_THAT(ErrorOf(SmallMlp(), options), HasSubstr("unknown loss '16'"));
}

// Never a crash, and where the file still is one, a graph without flaws.
TEST(Onnx, BrokenFilesAreErrors) {
  const ImportOptions options = Options(4, 6);
  for (const Parts& parts :
       {SmallMlp(), SmallCnn(), SmallAttention(true), SmallLstm({})}) {
    const std::string bytes = BytesOf(parts);
    ASSERT_TRUE(ImportBytes(bytes, options).has_value());
    for (size_t size = 0; size < bytes.size(); ++size) {
      EXPECT_FALSE(ImportBytes(bytes.substr(0, size), options).has_value())
          << size;
    }
    for (size_t i = 0; i < bytes.size(); ++i) {
      for (const int flip : {1, 16, 255}) {
        std::string broken = bytes;
        broken[i] = static_cast<char>(broken[i] ^ flip);
        const auto graph = ImportBytes(broken, options);
        EXPECT_TRUE(!graph || Validate(*graph).empty()) << i << " " << flip;
      }
    }
  }
}

TEST(Onnx, TruncatedFixturesAreErrors) {
  for (const char* name : {"mlp", "residual", "inception", "tokens-dynamo",
                           "grouped", "gpt2", "bert", "vit", "lstm", "llama"}) {
    const auto bytes = ReadFile(Fixture(name));
    ASSERT_TRUE(bytes.has_value());
    for (size_t size = 0; size < bytes->size(); size += 499) {
      const auto graph = ImportBytes(bytes->substr(0, size), Options(4, 16));
      ASSERT_FALSE(graph.has_value()) << name << " " << size;
      EXPECT_THAT(graph.error().ToString(), HasSubstr("tessera.test.onnx"));
    }
  }
}

}  // namespace
}  // namespace tessera
