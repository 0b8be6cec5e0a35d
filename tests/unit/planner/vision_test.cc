// Models of images: what is published of them, and what is wrong with a config.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "planner/base/element_count.h"
#include "planner/io/graph_io.h"
#include "planner/io/importer.h"
#include "planner/io/json_value.h"
#include "planner/ir/running_average.h"
#include "planner/plan/strategy.h"
#include "planner/topology/topologies.h"
#include "tests/support/temp_path.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

ImportOptions Batch(int64_t batch) {
  ImportOptions options;
  options.global_batch = batch;
  return options;
}

Result<Graph> ImportZoo(const std::string& name) {
  return ImportModel("zoo:" + name, Batch(2));
}

Result<Graph> ImportText(const std::string& text) {
  const std::string folder = TempPath("folder");
  std::filesystem::create_directories(folder);
  std::ofstream(folder + "/config.json") << text;
  auto graph = ImportModel(folder, Batch(2));
  std::filesystem::remove_all(folder);
  return graph;
}

std::string ErrorOf(const std::string& text) {
  const auto graph = ImportText(text);
  return graph ? "" : graph.error().ToString();
}

std::string Layers(const std::string& layers) {
  return R"({"model_type": "cnn", "image_size": 8, "num_labels": 5,
             "layers": [)" +
         layers + "]}";
}

// Weights of torchvision 0.20's documentation (num_params of each model's
// weights), but for Inception-v3's, whose auxiliary head has parameters of its
// own: 27,161,264 with it.
TEST(VisionModels, ParametersAreAsPublished) {
  const std::pair<const char*, int64_t> published[] = {
      {"alexnet", 61100840},    {"vgg16", 138357544},
      {"resnet-50", 25557032},  {"resnet-101", 44549160},
      {"resnext-50", 25028904}, {"inception-v3", 27161264},
  };
  for (const auto& [name, parameters] : published) {
    const auto graph = ImportZoo(name);
    ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
    EXPECT_EQ(ParameterCount(*graph), parameters) << name;
    EXPECT_EQ(graph->seq_len, 1);
  }
}

// Multiply-adds of a sample, in units of 10^9, as torchvision's documentation
// has them (its GFLOPS): backward is twice the forward, and a multiply-add two
// operations. Inception-v3's are of inference; the auxiliary head has
// 17*17... fewer than 0.01 more.
TEST(VisionModels, MultiplyAddsAreAsPublished) {
  const std::pair<const char*, double> published[] = {
      {"alexnet", 0.71},    {"vgg16", 15.47},     {"resnet-50", 4.09},
      {"resnet-101", 7.80}, {"resnext-50", 4.23}, {"inception-v3", 5.71},
  };
  for (const auto& [name, giga] : published) {
    const Graph graph = ImportZoo(name).value();
    const double macs = ModelFlops(graph).value / (3 * 2 * 2) * 1e-9;
    EXPECT_NEAR(macs, giga,
                0.006 + (name == std::string("inception-v3") ? 0.01 : 0))
        << name;
  }
}

TEST(VisionModels, NamesAreTransformers) {
  const Graph graph = ImportZoo("resnet-50").value();
  const auto shape = [&](const std::string& name) {
    const auto it = std::ranges::find(graph.tensors, name, &Tensor::name);
    return it == graph.tensors.end() ? Shape() : it->shape;
  };
  EXPECT_EQ(shape("resnet.embedder.embedder.convolution.weight"),
            (Shape{64, 3, 7, 7}));
  EXPECT_EQ(
      shape("resnet.encoder.stages.1.layers.0.layer.1.convolution.weight"),
      (Shape{128, 128, 3, 3}));
  EXPECT_EQ(
      shape("resnet.encoder.stages.3.layers.0.shortcut.normalization.bias"),
      (Shape{2048}));
  EXPECT_EQ(shape("classifier.1.weight"), (Shape{1000, 2048}));
}

// Layers of a stage are alike but for its first.
TEST(VisionModels, RepeatedLayersAreOneClass) {
  const Graph graph = ImportZoo("resnet-101").value();
  const std::vector<int> classes = BlockClasses(graph);
  const auto block = [&](const char* name) {
    return std::ranges::find(graph.blocks, name) - graph.blocks.begin();
  };
  EXPECT_EQ(classes[block("stages.2.layers.1")],
            classes[block("stages.2.layers.22")]);
  EXPECT_NE(classes[block("stages.2.layers.0")],
            classes[block("stages.2.layers.1")]);
}

TEST(VisionModels, LayersInPlainWords) {
  const auto right =
      ImportText(Layers(R"("conv 6 3x1 stride 2 pad 1x0 no-bias", "relu",
                {"name": "body", "residual": ["conv-norm-relu 6 3 pad 1"]},
                {"branches": [["conv 2 1"], [], ["max-pool 3 stride 1 pad 1",
                   {"branches": [["conv 1 1"], ["conv 3 1"]]}]]},
                "average-pool 2", "dropout 0.1", "linear 7", "relu",
                "classifier")"));
  ASSERT_TRUE(right.has_value()) << right.error().ToString();
  // 6*3*3 + (6*6*9 + 12) + (6*2+2) + (6+1) + (6*3+3) + 12 channels of 2 x 2 by
  // 7 and 7 + 7*5 + 5.
  EXPECT_EQ(ParameterCount(*right),
            54 + 336 + 14 + 7 + 21 + (12 * 4 * 7 + 7) + 40);
  EXPECT_TRUE(Differentiate(*right).has_value());
}

// A loss of elements reads targets, and the auxiliary one has its weight.
TEST(VisionModels, LossesOfElements) {
  ImportOptions options = Batch(2);
  options.overrides["loss"] =
      ParseJson(R"({"loss": "binary_cross_entropy"})")->Field("loss");
  const auto graph = ImportModel("zoo:inception-v3", options);
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  std::vector<double> weights;
  for (const Node& node : graph->nodes) {
    EXPECT_NE(node.op->name, "cross_entropy");
    if (node.op->name != "binary_cross_entropy") continue;
    EXPECT_EQ(graph->tensor(node.operands[1]).name, "targets");
    EXPECT_EQ(graph->tensor(node.operands[1]).shape, (Shape{2, 1000}));
    weights.push_back(node.attribute("weight"));
  }
  EXPECT_THAT(weights, ::testing::UnorderedElementsAre(1, 0.4));
}

ImportOptions Grouped(double groups) {
  ImportOptions options = Batch(8);
  JsonValue value;
  value.kind = JsonValue::Kind::kNumber;
  value.number = groups;
  options.overrides["batch_norm_groups"] = value;
  return options;
}

TEST(VisionModels, BatchNormsOfGroups) {
  for (const char* name : {"zoo:resnet-tiny", "zoo:inception-v3"}) {
    const auto graph = ImportModel(name, Grouped(4));
    ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
    int norms = 0;
    for (const Node& node : graph->nodes) {
      EXPECT_NE(node.op->name, "tracked_batch_norm");
      if (node.op->name != "tracked_ghost_batch_norm") continue;
      EXPECT_EQ(node.attribute("groups"), 4);
      ++norms;
    }
    EXPECT_GT(norms, 0) << name;
  }
  const auto three = ImportModel("zoo:resnet-tiny", Grouped(3));
  ASSERT_FALSE(three.has_value());
  EXPECT_THAT(three.error().ToString(),
              HasSubstr("batch_norm_groups: is 3: expected a divisor of the "
                        "global batch, 8"));
}

// They are weights that no step derives a gradient of, and no parameters.
TEST(VisionModels, RunningAverages) {
  ImportOptions options = Batch(8);
  JsonValue momentum;
  momentum.kind = JsonValue::Kind::kNumber;
  momentum.number = 0.25;
  options.overrides["batch_norm_momentum"] = momentum;
  const Graph graph = ImportModel("zoo:resnet-tiny", options).value();
  const std::vector<double> momenta = RunningMomenta(graph);
  int averages = 0;
  int64_t parameters = 0;
  for (size_t t = 0; t < graph.tensors.size(); ++t) {
    const Tensor& tensor = graph.tensors[t];
    const bool is_average = tensor.name.ends_with(".running_mean") ||
                            tensor.name.ends_with(".running_var");
    EXPECT_EQ(momenta[t], is_average ? 0.25 : -1) << tensor.name;
    averages += is_average ? 1 : 0;
    if (tensor.kind != TensorKind::kWeight || is_average) continue;
    parameters += ElementCount(tensor.shape);
  }
  const auto norms = std::ranges::count_if(graph.nodes, [](const Node& node) {
    return node.op->name == "tracked_batch_norm";
  });
  EXPECT_GT(norms, 0);
  EXPECT_EQ(averages, 2 * norms);
  EXPECT_EQ(ParameterCount(graph), parameters);
}

// 4 groups are whole in a microbatch of 8 or 4 samples, not of 2.
TEST(VisionModels, MicrobatchesHaveWholeGroups) {
  const Graph graph =
      Differentiate(ImportModel("zoo:resnet-tiny", Grouped(4)).value()).value();
  const Cluster cluster = MakeCluster("local-cpu:2").value();
  const auto error = [&](std::string_view strategy) {
    const auto plan =
        PlanFromStrategy(graph, cluster, ParseStrategy(strategy).value());
    return plan ? "" : plan.error().ToString();
  };
  EXPECT_EQ(error("mbs=4"), "");
  EXPECT_EQ(error("mbs=2"), "");
  EXPECT_THAT(error("mbs=1"),
              HasSubstr("microbatches: is 4, which leaves 2 samples in each: "
                        "expected a multiple of the 4 groups of samples that "
                        "node"));
}

TEST(VisionModels, GraphFilesKeepThem) {
  for (const char* name : {"resnet-tiny", "resnext-50", "inception-v3"}) {
    const Graph graph = ImportZoo(name).value();
    const std::string path = TempPath("graph.pb");
    ASSERT_TRUE(WriteGraph(path, graph).has_value());
    const auto read = ReadGraph(path);
    std::filesystem::remove(path);
    ASSERT_TRUE(read.has_value()) << read.error().ToString();
    EXPECT_EQ(*read, graph) << name;
  }
}

TEST(VisionModels, ErrorsNameTheLayer) {
  EXPECT_THAT(ErrorOf(Layers("")), HasSubstr("layers: expected a list"));
  EXPECT_THAT(ErrorOf(Layers("\"conv 6\"")),
              HasSubstr("layers: 0: is \"conv 6\": expected conv CHANNELS "
                        "WINDOW"));
  EXPECT_THAT(ErrorOf(Layers("\"conv 6 3 strides 2\"")), HasSubstr("0: is"));
  EXPECT_THAT(ErrorOf(Layers("\"con 6 3\"")),
              HasSubstr("unknown layer 'con'; did you mean 'conv'?"));
  EXPECT_THAT(ErrorOf(Layers("\"conv 6 9\"")),
              HasSubstr("0: the window is larger than the image"));
  EXPECT_THAT(ErrorOf(Layers("\"mean\", \"max-pool 2\"")),
              HasSubstr("1: the images are features by then"));
  EXPECT_THAT(ErrorOf(Layers("\"linear 7\"")),
              HasSubstr("ends in 7 features: expected one for each of 5"));
  EXPECT_THAT(ErrorOf(Layers(R"({"layer": []})")),
              HasSubstr("unknown key 'layer'"));
  EXPECT_THAT(ErrorOf(Layers(
                  R"({"name": "aux", "auxiliary": ["mean", "linear 7"]},
                     "mean", "classifier")")),
              HasSubstr("layers: aux: ends in 7 features: expected one for "
                        "each of 5 labels"));
  // Keys behind the first one in the alphabet are read, too.
  EXPECT_THAT(
      ErrorOf(Layers(
          R"({"name": "a", "layers": ["relu"], "residual": ["conv 6 1"]})")),
      HasSubstr("layers: a: has the keys 'layers' and 'residual': expected one "
                "of them"));
  EXPECT_THAT(ErrorOf(Layers(R"({"layers": ["relu"], "typo": 3})")),
              HasSubstr("0: unknown key 'typo'"));
  EXPECT_THAT(ErrorOf(Layers(R"({"branches": [["relu"],
          [{"branches": [["relu"], ["conv 1 1"]], "typo": 3}]]})")),
              HasSubstr("0.1.0: unknown key 'typo'"));
  EXPECT_THAT(ErrorOf(Layers(R"({"name": "a"})")),
              HasSubstr("a: expected layers, branches, residual or "
                        "auxiliary"));
  // A format of Tessera's own has no keys that it does not know.
  std::string more = Layers("\"mean\", \"classifier\"");
  more.insert(more.rfind('}'), R"(, "image_sise": 9)");
  EXPECT_THAT(ErrorOf(more),
              HasSubstr("unknown key of cnn 'image_sise'; did you mean "
                        "'image_size'?"));
  EXPECT_THAT(ErrorOf(R"({"model_type": "cnn"})"),
              HasSubstr("layers: missing"));
  EXPECT_THAT(ErrorOf(R"({"model_type": "resnet", "depths": [1, 2]})"),
              HasSubstr("depths: has 2 stages, hidden_sizes 4"));
  EXPECT_THAT(ErrorOf(R"({"model_type": "resnet", "depths": [1.5]})"),
              HasSubstr("depths: is [1.5]: expected a list of 1 to 64 whole "
                        "numbers from 1 to 65536"));
  for (const std::string depths : {"2", "\"abc\"", "{}", "true"}) {
    EXPECT_THAT(
        ErrorOf(R"({"model_type": "resnet", "depths": )" + depths + "}"),
        HasSubstr("depths: is " + depths + ": expected a list"));
  }
  EXPECT_THAT(ErrorOf(R"({"model_type": "resnet", "layer_type": "wide"})"),
              HasSubstr("layer_type: is \"wide\""));
  EXPECT_THAT(ErrorOf(R"({"model_type": "resnet", "loss": "binary"})"),
              HasSubstr("loss: unknown loss 'binary'; did you mean "
                        "'binary_cross_entropy'?"));
}

}  // namespace
}  // namespace tessera
