// Graph files that tools/export_torch.py wrote (tests/testdata/torch), against
// the graphs of the same configs by Tessera's own families.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <vector>

#include "planner/io/graph_io.h"
#include "planner/io/importer.h"
#include "planner/ir/short_graph.h"
#include "tests/support/matmul_parameters.h"
#include "tests/support/paths.h"
#include "tests/support/temp_path.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kBatch = 8;
constexpr int64_t kSeqLen = 16;

Graph Exported(const std::string& name) {
  auto graph = ImportModel(TestdataPath("torch/" + name + ".json"), {});
  TESSERA_CHECK(graph.has_value()) << graph.error().ToString();
  return *std::move(graph);
}

JsonValue Json(const std::string& text) {
  return ParseJson("{\"x\": " + text + "}")->Field("x");
}

// The same model as a config, with keys set as make.sh and the exporter do.
struct Twin {
  std::string exported;
  std::string config;
  std::map<std::string, std::string> keys = {};
};

std::vector<Twin> Twins() {
  return {
      {"gpt2", "gpt2-tiny"},
      {"llama",
       "llama-3.2-1b",
       {{"num_hidden_layers", "3"},
        {"hidden_size", "64"},
        {"num_attention_heads", "4"},
        {"num_key_value_heads", "2"},
        {"head_dim", "16"},
        {"intermediate_size", "128"},
        {"vocab_size", "256"}}},
      {"t5", "t5-tiny"},
      // The auxiliary loss is not in what transformers computes by default.
      {"mixtral", "mixtral-tiny", {{"router_aux_loss_coef", "0"}}},
      {"vit", "vit-tiny"},
      {"resnet", "resnet-tiny"},
  };
}

Graph Own(const Twin& twin) {
  ImportOptions options;
  options.global_batch = kBatch;
  options.seq_len = kSeqLen;
  for (const auto& [key, value] : twin.keys) {
    options.overrides[key] = Json(value);
  }
  auto graph = ImportModel(ExamplePath("models/" + twin.config), options);
  TESSERA_CHECK(graph.has_value()) << graph.error().ToString();
  return *std::move(graph);
}

// How often each operator occurs.
std::map<std::string, int> OperatorsOf(const Graph& graph) {
  std::map<std::string, int> count;
  for (const Node& node : graph.nodes) ++count[std::string(node.op->name)];
  return count;
}

// Shapes of weights without order and dimensions of one.
std::multiset<Shape> WeightsOf(const Graph& graph) {
  std::multiset<Shape> shapes;
  for (const Tensor& tensor : graph.tensors) {
    if (tensor.kind != TensorKind::kWeight) continue;
    Shape shape;
    for (int64_t extent : tensor.shape) {
      if (extent > 1) shape.push_back(extent);
    }
    shapes.insert(shape);
  }
  return shapes;
}

std::multiset<std::string> InputsOf(const Graph& graph) {
  std::multiset<std::string> names;
  for (const Tensor& tensor : graph.tensors) {
    if (tensor.kind == TensorKind::kInput) names.insert(tensor.name);
  }
  return names;
}

TEST(TorchFiles, AreTheGraphsOfTheirConfigs) {
  for (const Twin& twin : Twins()) {
    const Graph exported = Exported(twin.exported);
    const Graph own = Own(twin);
    EXPECT_EQ(OperatorsOf(exported), OperatorsOf(own)) << twin.exported;
    EXPECT_EQ(WeightsOf(exported), WeightsOf(own)) << twin.exported;
    EXPECT_EQ(ParameterCount(exported), ParameterCount(own)) << twin.exported;
    EXPECT_EQ(MatmulParameterCount(exported), MatmulParameterCount(own))
        << twin.exported;
    EXPECT_EQ(ModelFlops(exported).value, ModelFlops(own).value)
        << twin.exported;
    EXPECT_EQ(exported.seq_len, own.seq_len) << twin.exported;
    for (const std::string& input : InputsOf(exported)) {
      EXPECT_EQ(InputsOf(own).count(input), 1) << twin.exported << input;
    }
  }
}

// Blocks are told apart, and equal ones found, as in the config's graph.
TEST(TorchFiles, RepeatedBlocksFold) {
  for (const Twin& twin : Twins()) {
    if (twin.exported == "resnet") continue;  // stages are cut elsewhere
    const Graph exported = Differentiate(Exported(twin.exported)).value();
    const Graph own = Differentiate(Own(twin)).value();
    EXPECT_EQ(BlockClasses(exported), BlockClasses(own)) << twin.exported;
    EXPECT_EQ(Shorten(exported).block_of, Shorten(own).block_of)
        << twin.exported;
  }
  // Without a norm in front, BERT's first block reads another norm's result.
  const Graph bert = Differentiate(Exported("bert")).value();
  EXPECT_THAT(bert.blocks, ElementsAre("embed", "bert.encoder.layer.0",
                                       "bert.encoder.layer.1", "head"));
}

// 11,689,512: torchvision's resnet18, ResNet18_Weights.IMAGENET1K_V1's
// "num_params". Blocks are its layers.
TEST(TorchFiles, ResNet18) {
  const Graph graph = Exported("resnet18");
  EXPECT_EQ(ParameterCount(graph), 11689512);
  EXPECT_THAT(
      graph.blocks,
      ElementsAre("embed", "layer1.0", "layer1.1", "layer2.0", "layer2.1",
                  "layer3.0", "layer3.1", "layer4.0", "layer4.1", "head"));
  const std::vector<int> classes = BlockClasses(graph);
  EXPECT_NE(classes[3], classes[4]);  // the first halves the image
  const std::map<std::string, int> operators = OperatorsOf(graph);
  EXPECT_EQ(operators.at("conv2d"), 20);  // with 3 of shortcuts
  EXPECT_EQ(operators.at("tracked_batch_norm"), 20);
  EXPECT_EQ(operators.at("add"), 8);
}

// bert-base's parts at its sizes: tables of 256 words, 128 places, 2 segments;
// 2 layers of 4 dense, an MLP of 256 and 2 norms; the head's transform, norm
// and bias of 256 words.
TEST(TorchFiles, BertHasTheParametersOfItsLayers) {
  constexpr int64_t kHidden = 64;
  constexpr int64_t kDense = kHidden * kHidden + kHidden;
  constexpr int64_t kNorm = 2 * kHidden;
  constexpr int64_t kLayer =
      4 * kDense + 2 * kHidden * 256 + 256 + kHidden + 2 * kNorm;
  EXPECT_EQ(
      ParameterCount(Exported("bert")),
      (256 + 128 + 2) * kHidden + kNorm + 2 * kLayer + kDense + kNorm + 256);
}

TEST(TorchFiles, RoundTrip) {
  for (const char* name : {"gpt2", "llama", "bert", "t5", "mixtral", "vit",
                           "resnet", "resnet18"}) {
    const Graph graph = Exported(name);
    const std::string path = TempPath(std::string(name) + ".txtpb");
    ASSERT_TRUE(WriteGraph(path, graph).has_value());
    const auto read = ReadGraph(path);
    ASSERT_TRUE(read.has_value()) << read.error().ToString();
    EXPECT_EQ(*read, graph) << name;
  }
}

// Names of nodes are paths of modules, behind a slash what of them it is.
TEST(TorchFiles, NodesAreCalledByTheirModules) {
  std::set<std::string> names;
  for (const Node& node : Exported("gpt2").nodes) names.insert(node.name);
  for (const char* name :
       {"transformer.wte", "transformer.h.3.ln_1",
        "transformer.h.3.attn.c_attn/2", "transformer.h.3.attn/attention",
        "transformer.h.3/add", "lm_head"}) {
    EXPECT_EQ(names.count(name), 1) << name;
  }
}

}  // namespace
}  // namespace tessera
