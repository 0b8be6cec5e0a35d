#include "planner/io/importer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <numeric>
#include <string>

#include "planner/base/element_count.h"
#include "planner/io/graph_io.h"
#include "planner/io/huggingface.h"
#include "planner/io/zoo.h"
#include "tests/support/matmul_parameters.h"
#include "tests/support/paths.h"
#include "tests/support/temp_path.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;

std::string Example(const std::string& model) {
  return ExamplePath(std::string("models/") + model + "/config.json");
}

ImportOptions Options(int64_t batch = 8, int64_t seq_len = 1024) {
  ImportOptions options;
  options.global_batch = batch;
  options.seq_len = seq_len;
  return options;
}

Graph Import(const std::string& path, const ImportOptions& options) {
  auto graph = ImportModel(path, options);
  TESSERA_CHECK(graph.has_value()) << graph.error().ToString();
  return *std::move(graph);
}

// A file of the running test, removed with the fixture's folder by the system.
std::string WriteTemp(const std::string& name, const std::string& text) {
  const std::string path = ::testing::TempDir() + "/importer_test." +
                           std::to_string(getpid()) + "." + name;
  std::ofstream(path) << text;
  return path;
}

std::string ErrorOf(const std::string& text,
                    const ImportOptions& options = Options(8, 16)) {
  const std::string path = WriteTemp(
      ::testing::UnitTest::GetInstance()->current_test_info()->name() +
          std::string(".json"),
      text);
  const auto graph = ImportModel(path, options);
  if (graph.has_value()) return "";
  EXPECT_THAT(graph.error().where, HasSubstr(path));
  return graph.error().ToString();
}

const Node& NodeNamed(const Graph& graph, std::string_view name) {
  for (const Node& node : graph.nodes) {
    if (node.name == name) return node;
  }
  TESSERA_CHECK(false) << "no node " << name;
  return graph.nodes[0];
}

const Tensor* TensorNamed(const Graph& graph, std::string_view name) {
  for (const Tensor& tensor : graph.tensors) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

// ---- parameter counts ------------------------------------------------------

struct Published {
  const char* model;
  int64_t parameters;
};

class ParameterCountTest : public ::testing::TestWithParam<Published> {};

TEST_P(ParameterCountTest, EqualsThePublishedModel) {
  const Graph graph =
      Import(std::string("zoo:") + GetParam().model, Options(1, 8));
  EXPECT_EQ(ParameterCount(graph), GetParam().parameters);
  EXPECT_EQ(graph.name, GetParam().model);
}

// What transformers, or the headers of the published safetensors files, count.
INSTANTIATE_TEST_SUITE_P(
    Models, ParameterCountTest,
    ::testing::Values(
        Published{"gpt2", 124439808}, Published{"gpt2-medium", 354823168},
        Published{"gpt2-large", 774030080}, Published{"gpt2-xl", 1557611200},
        Published{"llama-2-7b", 6738415616},
        Published{"llama-2-13b", 13015864320},
        Published{"llama-2-70b", 68976648192},
        Published{"llama-3-8b", 8030261248},
        Published{"llama-3-70b", 70553706496},
        Published{"llama-3-405b", 405853388800},
        Published{"llama-3.2-1b", 1235814400},
        Published{"llama-3.2-3b", 3212749824},
        Published{"mistral-7b", 7241732096},
        Published{"mixtral-8x7b", 46702792704},
        Published{"qwen2-7b", 7615616512},
        Published{"qwen1.5-moe-a2.7b", 14315784192},
        Published{"qwen3-8b", 8190735360},
        Published{"qwen3-30b-a3b", 30532122624},
        Published{"gemma-2b", 2506172416}, Published{"gemma-7b", 8537680896},
        Published{"gemma-2-2b", 2614341888}, Published{"gemma-3-1b", 999885952},
        // Of the text: 4300079472 with the part that reads images.
        Published{"gemma-3-4b", 3880263168}, Published{"olmo-1b", 1176764416},
        Published{"olmo-2-7b", 7298617344},
        Published{"granite-3.1-2b", 2533531648},
        Published{"smollm3-3b", 3075098624},
        Published{"starcoder2-3b", 3030371328}, Published{"phi-2", 2779683840},
        Published{"falcon-7b", 6921720704},
        Published{"falcon-40b", 41303293952}, Published{"gpt-j-6b", 6050882784},
        Published{"stablelm-3b", 2795443200}, Published{"glm-4-9b", 9400279040},
        Published{"command-r", 34980831232},
        Published{"phi-3-mini", 3821079552}, Published{"opt-125m", 125239296},
        Published{"opt-350m", 331196416}, Published{"opt-6.7b", 6658473984},
        Published{"pythia-1b", 1011781632}, Published{"bloom-560m", 559214592},
        Published{"bloom-176b", 176247271424},
        // Without the further-token layer and without the biases of 256 scores
        // in 58 layers: 671026419200 with these.
        Published{"deepseek-v3", 671026419200 - 58 * 256},
        Published{"deepseek-v2", 235741434880},
        Published{"deepseek-v2-lite", 15706484224},
        Published{"bert-base", 110106428}, Published{"bert-large", 336226108},
        Published{"t5-small", 60506624}, Published{"t5-base", 222903552},
        Published{"t5-11b", 11307321344},
        Published{"vit-base-patch16-224", 86567656},
        // Dehghani et al. 2023: 21,743 million in the layers' matrices, 48 x (4
        // x 6144^2 + 2 x 6144 x 24576); besides, 48 x (biases of 36864, a
        // norm of 6144, two of 128), 3 x 14^2 x 6144 + 6144 of patches, 258 x
        // 6144 of places and the class, a norm of 6144, 6145 x 1000 of the
        // head.
        Published{"vit-22b", 21756703720}),
    [](const auto& info) {
      std::string name = info.param.model;
      std::replace_if(
          name.begin(), name.end(), [](char c) { return c == '-' || c == '.'; },
          '_');
      return name;
    });

// Narayanan et al., SC'21 (arXiv 2104.04473), table 1: billions of parameters
// by equation 2, 12 l h^2 (1 + 13 / 12h + (V + s) / 12lh), V = 51200 and s =
// 2048, and FLOPs of a step by the appendix without recomputation, 72 B s l h^2
// (1 + s / 6h + V / 12lh). The equation leaves out the last norm, 2 h.
TEST(Zoo, GptFamilyOfSc21) {
  struct Row {
    const char* name;
    double billions;
    int64_t l, h;
  };
  for (const Row& row :
       {Row{"gpt-1.7b", 1.7, 24, 2304}, Row{"gpt-3.6b", 3.6, 30, 3072},
        Row{"gpt-7.5b", 7.5, 36, 4096}, Row{"gpt-18.4b", 18.4, 40, 6144},
        Row{"gpt-39.1b", 39.1, 48, 8192}, Row{"gpt-76.1b", 76.1, 60, 10240},
        Row{"gpt-145.6b", 145.6, 80, 12288},
        Row{"gpt-310.1b", 310.1, 96, 16384},
        Row{"gpt-529.6b", 529.6, 105, 20480},
        Row{"gpt-1t", 1008.0, 128, 25600}}) {
    SCOPED_TRACE(row.name);
    const int64_t batch = 3;
    const int64_t s = 2048;
    const Graph graph =
        Import(std::string("zoo:") + row.name, Options(batch, s));
    EXPECT_EQ(ParameterCount(graph), row.l * (12 * row.h * row.h + 13 * row.h) +
                                         (51200 + 2048) * row.h + 2 * row.h);
    EXPECT_NEAR(static_cast<double>(ParameterCount(graph)) / 1e9, row.billions,
                0.051);
    const auto l = static_cast<double>(row.l);
    const auto h = static_cast<double>(row.h);
    const double flops =
        72.0 * batch * s * l * h * h * (1 + s / (6 * h) + 51200 / (12 * l * h));
    EXPECT_NEAR(ModelFlops(graph).value / flops, 1, 1e-12);
  }
}

TEST(Zoo, EveryModelDifferentiates) {
  EXPECT_GE(Zoo().size(), 30u);
  for (const ZooModel& model : Zoo()) {
    const std::string name(model.name);
    auto whole = Differentiate(Import("zoo:" + name, Options(2, 16)));
    EXPECT_TRUE(whole.has_value()) << name << whole.error().ToString();
  }
}

TEST(Zoo, IsTheFileOfItsName) {
  EXPECT_EQ(Import("zoo:gpt2-tiny", Options(2, 16)),
            Import(Example("gpt2-tiny"), Options(2, 16)));
  const auto graph = ImportModel("zoo:llama-3-8", Options());
  ASSERT_FALSE(graph.has_value());
  EXPECT_THAT(graph.error().message,
              HasSubstr("unknown model of the zoo 'llama-3-8'; did you mean "
                        "'llama-3-8b'?"));
}

TEST(Overrides, ReplaceAndAddKeysOfTheFamily) {
  ImportOptions options = Options(2, 16);
  JsonValue number;
  number.kind = JsonValue::Kind::kNumber;
  number.number = 2;
  options.overrides = {{"num_hidden_layers", number},
                       {"expert_capacity_factor", number}};
  // Two of three layers, between embedding and head.
  EXPECT_EQ(Import("zoo:mixtral-tiny", options).blocks.size(), 4u);
  options.overrides = {{"expert_capacity_facto", number}};
  const auto graph = ImportModel("zoo:mixtral-tiny", options);
  ASSERT_FALSE(graph.has_value());
  EXPECT_THAT(graph.error().message,
              HasSubstr("unknown key of mixtral 'expert_capacity_facto'; did "
                        "you mean 'expert_capacity_factor'?"));
}

// ---- model FLOPs ------------------------------------------------------------

TEST(ModelFlops, Gpt2XlIs6NPlus12LHS) {
  const int64_t batch = 512;
  const int64_t s = 1024;
  const Graph graph = Import(Example("gpt2-xl"), Options(batch, s));
  // Matrix products: 12 h^2 a layer, and the head.
  const double n = 48.0 * 12 * 1600 * 1600 + 50257.0 * 1600;
  EXPECT_EQ(MatmulParameterCount(graph), static_cast<int64_t>(n));
  const double tokens = static_cast<double>(batch) * s;
  EXPECT_DOUBLE_EQ(ModelFlops(graph).value,
                   6 * n * tokens + 12.0 * 48 * 1600 * s * tokens);
  EXPECT_DOUBLE_EQ(ModelFlops(graph, /*halve_causal=*/true).value,
                   6 * n * tokens + 6.0 * 48 * 1600 * s * tokens);
}

// Of 64 keys a window of 16 leaves 16/64 (1 - 16/128) = 7/32 in place of half.
TEST(ModelFlops, WindowsLeaveFewerPairs) {
  const auto attention = [](int64_t window) {
    ImportOptions options = Options(2, 64);
    JsonValue value;
    value.kind = JsonValue::Kind::kNumber;
    value.number = static_cast<double>(window);
    options.overrides["sliding_window"] = value;
    const Graph graph = ImportModel("zoo:mistral-7b", options).value();
    return ModelFlops(graph).value -
           ModelFlops(graph, /*halve_causal=*/true).value;
  };
  // Half, and 25/32, of all pairs are left out.
  EXPECT_DOUBLE_EQ(attention(16) / attention(64), (25.0 / 32) / 0.5);
  EXPECT_DOUBLE_EQ(attention(64), attention(4096));
}

TEST(ModelFlops, MixtralCountsActiveExperts) {
  const int64_t batch = 4;
  const int64_t s = 4096;
  const Graph graph = Import(Example("mixtral-8x7b"), Options(batch, s));
  // q and o: h*h; k and v: h*1024; the router; two of eight experts.
  const double layer = 4096.0 * (2 * 4096 + 2 * 1024 + 8 + 2 * 3 * 14336);
  const double n = 32 * layer + 32000.0 * 4096;
  EXPECT_EQ(MatmulParameterCount(graph), static_cast<int64_t>(n));
  const double tokens = static_cast<double>(batch) * s;
  EXPECT_DOUBLE_EQ(ModelFlops(graph).value,
                   6 * n * tokens + 12.0 * 32 * 4096 * s * tokens);
}

// One layer of DeepSeek-V3, in matrix products: queries by 1536 latents, keys
// and values by 512, and 64 features that are turned.
constexpr double kDeepseekV3Attention =
    7168.0 * 1536 + 1536.0 * 128 * 192 + 7168.0 * (512 + 64) +
    512.0 * 128 * (128 + 128) + 128.0 * 128 * 7168;

TEST(ModelFlops, DeepseekV3Activates37Billion) {
  const int64_t batch = 2;
  const int64_t s = 4096;
  const Graph graph = Import(Example("deepseek-v3"), Options(batch, s));
  // Eight of 256 experts, a shared one, the router; three dense layers.
  const double n = 61 * kDeepseekV3Attention + 3 * 3.0 * 7168 * 18432 +
                   58 * (9 * 3.0 * 7168 * 2048 + 7168.0 * 256) +
                   129280.0 * 7168;
  EXPECT_EQ(MatmulParameterCount(graph), static_cast<int64_t>(n));
  // The paper's 37 billion, which counts the lookup, too (926,679,040).
  EXPECT_NEAR((n + 129280.0 * 7168) / 1e9, 37.5, 0.1);
  const double tokens = static_cast<double>(batch) * s;
  // Queries and keys have 192 features, values 128.
  EXPECT_DOUBLE_EQ(ModelFlops(graph).value,
                   6 * n * tokens + 6.0 * 61 * 128 * (192 + 128) * s * tokens);
}

TEST(ModelFlops, Llama3WithGroupedHeads) {
  const int64_t batch = 4;
  const int64_t s = 8192;
  const Graph graph = Import(Example("llama-3-8b"), Options(batch, s));
  // q and o: h*h; k and v: h*1024 (8 of 32 heads); gate, up, down: h*14336.
  const double layer = 4096.0 * (2 * 4096 + 2 * 1024 + 3 * 14336);
  const double n = 32 * layer + 128256.0 * 4096;
  const double tokens = static_cast<double>(batch) * s;
  // 6*heads*(d_qk + d_v) = 6*32*256 = 12*4096.
  EXPECT_DOUBLE_EQ(ModelFlops(graph).value,
                   6 * n * tokens + 12.0 * 32 * 4096 * s * tokens);
}

// ---- structure --------------------------------------------------------------

TEST(Gpt2, LayersAreOneClass) {
  const Graph graph = Import(Example("gpt2-xl"), Options());
  ASSERT_EQ(graph.blocks.size(), 50u);
  EXPECT_EQ(graph.blocks.front(), "embed");
  EXPECT_EQ(graph.blocks[1], "h.0");
  EXPECT_EQ(graph.blocks[48], "h.47");
  EXPECT_EQ(graph.blocks.back(), "head");
  const std::vector<int> classes = BlockClasses(graph);
  EXPECT_EQ(classes[0], 0);
  for (size_t b = 1; b <= 48; ++b) EXPECT_EQ(classes[b], 1) << b;
  EXPECT_EQ(classes[49], 49);
}

TEST(Importers, FolderAndFileAreTheSameModel) {
  const std::string folder = ExamplePath("models/gpt2-tiny");
  const Graph graph = Import(folder, Options(2, 16));
  EXPECT_EQ(graph, Import(folder + "/config.json", Options(2, 16)));
  EXPECT_EQ(graph, Import(folder + "/./config.json", Options(2, 16)));
}

TEST(Fingerprint, IsThatOfTheModelNotOfItsFolder) {
  Graph graph = Import(Example("gpt2-tiny"), Options(2, 16));
  const std::string fingerprint = Fingerprint(graph);
  graph.name = "copied";
  EXPECT_EQ(Fingerprint(graph), fingerprint);
}

TEST(Gpt2, WeightsHaveTheirNamesShapesAndStarts) {
  const Graph graph = Import(Example("gpt2"), Options());
  const Tensor* q = TensorNamed(graph, "h.0.attn.c_attn.q.weight");
  ASSERT_NE(q, nullptr);
  EXPECT_EQ(q->shape, (Shape{12, 1, 64, 768}));  // [g, r, d, i]
  EXPECT_TRUE(q->weight_decay);
  EXPECT_EQ(q->init.stddev, 0.02);
  const Tensor* bias = TensorNamed(graph, "h.0.attn.c_attn.q.bias");
  ASSERT_NE(bias, nullptr);
  EXPECT_EQ(bias->shape, (Shape{12, 1, 64}));
  EXPECT_FALSE(bias->weight_decay);
  EXPECT_EQ(bias->init, Initializer{});
  const Tensor* out = TensorNamed(graph, "h.11.attn.c_proj.weight");
  ASSERT_NE(out, nullptr);
  EXPECT_EQ(out->shape, (Shape{768, 12, 1, 64}));  // [o, g, r, e]
  // 0.02 / sqrt(2 * 12 layers)
  EXPECT_NEAR(out->init.stddev, 0.00408248, 1e-8);
  const Tensor* norm = TensorNamed(graph, "ln_f.weight");
  ASSERT_NE(norm, nullptr);
  EXPECT_EQ(norm->init.constant, 1);
  EXPECT_FALSE(norm->weight_decay);
  EXPECT_TRUE(TensorNamed(graph, "wpe.weight")->weight_decay);
}

TEST(Gpt2, HeadReadsTheEmbedding) {
  const Graph graph = Import(Example("gpt2"), Options());
  EXPECT_EQ(TensorNamed(graph, "lm_head.weight"), nullptr);
  const Node& head = NodeNamed(graph, "lm_head");
  EXPECT_EQ(graph.tensor(head.operands[1]).name, "wte.weight");
  EXPECT_EQ(graph.tensor(graph.loss).shape, Shape{});
}

TEST(Gpt2, DropoutsHaveTheirOwnSalts) {
  const Graph graph = Import(Example("gpt2"), Options());
  std::vector<double> salts;
  for (const Node& node : graph.nodes) {
    if (node.op->name != "dropout") continue;
    EXPECT_EQ(node.attribute("probability"), 0.1);
    salts.push_back(node.attribute("salt"));
  }
  std::vector<double> expected(1 + 2 * 12);  // embedding, two a layer
  std::iota(expected.begin(), expected.end(), 0.0);
  EXPECT_EQ(salts, expected);
}

TEST(Gpt2, AttentionDropoutIsWarnedOf) {
  std::vector<std::string> warnings;
  ImportOptions options = Options();
  options.warnings = &warnings;
  Import(Example("gpt2"), options);
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_THAT(warnings[0], HasSubstr("attn_pdrop=0.1: dropout on attention "
                                     "probabilities is not applied"));
  warnings.clear();
  Import(Example("llama-3-8b"), options);
  EXPECT_TRUE(warnings.empty());
}

TEST(Families, DifferentiateAndReadTheirDtype) {
  for (const char* model : {"gpt2-tiny",
                            "llama-3-8b",
                            "mistral-7b",
                            "mixtral-tiny",
                            "qwen2-7b",
                            "pythia-1b",
                            "deepseek-tiny",
                            "deepseek-v2-lite",
                            "qwen3-8b",
                            "qwen3-30b-a3b",
                            "qwen1.5-moe-a2.7b",
                            "gemma-2b",
                            "phi-3-mini",
                            "opt-125m",
                            "bloom-560m",
                            "gemma-2-2b",
                            "gemma-3-1b",
                            "olmo-1b",
                            "olmo-2-7b",
                            "granite-3.1-2b",
                            "smollm3-3b",
                            "starcoder2-3b",
                            "phi-2",
                            "falcon-7b",
                            "falcon-40b",
                            "gpt-j-6b",
                            "stablelm-3b",
                            "glm-4-9b",
                            "command-r"}) {
    ImportOptions options = Options(4, 64);
    options.dtype = DType::kBFloat16;
    Graph graph = Import(Example(model), options);
    EXPECT_EQ(graph.dtype, DType::kBFloat16);
    auto whole = Differentiate(std::move(graph));
    ASSERT_TRUE(whole.has_value()) << whole.error().ToString();
    EXPECT_FALSE(whole->gradients.empty()) << model;
  }
}

TEST(Llama, RotaryGroupsAndNoBiases) {
  const Graph graph = Import(Example("llama-3-8b"), Options());
  const Node& rotary = NodeNamed(graph, "model.layers.0.self_attn.rotary_q");
  EXPECT_EQ(rotary.attribute("theta"), 500000);
  EXPECT_EQ(rotary.attribute("fraction"), 1);
  // 8 groups of 4 query heads of 128.
  EXPECT_EQ(TensorNamed(graph, "model.layers.0.self_attn.q_proj.weight")->shape,
            (Shape{8, 4, 128, 4096}));
  EXPECT_EQ(TensorNamed(graph, "model.layers.0.self_attn.k_proj.weight")->shape,
            (Shape{8, 128, 4096}));
  EXPECT_EQ(TensorNamed(graph, "model.layers.0.self_attn.q_proj.bias"),
            nullptr);
  const Node& attention = NodeNamed(graph, "model.layers.0.self_attn");
  EXPECT_DOUBLE_EQ(attention.attribute("scale"), 0.08838834764831845);
  EXPECT_EQ(attention.attribute("window"), 0);
}

// Which transformers' Llama does not read; Phi-3 does.
TEST(Llama, APartOfTheFeaturesIsWarnedOf) {
  for (const std::string model : {"llama-3-8b", "phi-3-mini"}) {
    std::vector<std::string> warnings;
    ImportOptions options = Options();
    options.warnings = &warnings;
    options.overrides["partial_rotary_factor"] =
        ParseJson("{\"x\": 0.5}")->Field("x");
    Import(Example(model), options);
    if (model == "phi-3-mini") {
      EXPECT_THAT(warnings, ElementsAre());
    } else {
      EXPECT_THAT(warnings, ElementsAre(HasSubstr(
                                "partial_rotary_factor=0.5: is applied; "
                                "transformers' model of this family "
                                "turns all features")));
    }
  }
}

// The key that the file has is named, not one that it leaves to its default.
TEST(Llama, HeadsOfAnOddSizeCannotTurn) {
  const auto error = [](std::map<std::string, std::string> values) {
    ImportOptions options = Options();
    for (const auto& [key, value] : values) {
      options.overrides[key] = ParseJson("{\"x\": " + value + "}")->Field("x");
    }
    const auto graph = ImportModel(Example("llama-3-8b"), options);
    return graph ? "none" : graph.error().ToString();
  };
  EXPECT_THAT(error({{"head_dim", "241"}}),
              HasSubstr("head_dim: makes heads of size 241, of which 1 is "
                        "turned: expected an even number of turned features"));
  EXPECT_THAT(error({{"hidden_size", "4000"}}),
              HasSubstr("hidden_size: makes heads of size 125, of which 1 is "
                        "turned: expected an even number"));
  EXPECT_THAT(error({{"head_dim", "241"}, {"partial_rotary_factor", "0.5"}}),
              HasSubstr("partial_rotary_factor: is 0.5 of heads of size 241: "
                        "expected an even number of turned features"));
}

TEST(Mistral, HasAWindow) {
  const Graph graph = Import(Example("mistral-7b"), Options());
  EXPECT_EQ(NodeNamed(graph, "model.layers.31.self_attn").attribute("window"),
            4096);
}

TEST(Mixtral, ExpertsSlotsAndAuxiliaryLoss) {
  ImportOptions options = Options(4, 64);
  options.dtype = DType::kBFloat16;
  const Graph graph = Import(Example("mixtral-tiny"), options);
  const std::string moe = "model.layers.1.block_sparse_moe.";
  EXPECT_EQ(TensorNamed(graph, moe + "experts.w1.weight")->shape,
            (Shape{4, 192, 96}));
  // ceil(1.25 * 2 * 64 / 4) slots of each expert and sample.
  EXPECT_EQ(TensorNamed(graph, moe + "dispatch")->shape, (Shape{4, 4, 40, 96}));
  // Routing is decided in fp32, and slots are numbers.
  EXPECT_EQ(TensorNamed(graph, moe + "gate")->dtype, DType::kFloat32);
  EXPECT_EQ(TensorNamed(graph, moe + "routes")->dtype, DType::kBFloat16);
  EXPECT_EQ(TensorNamed(graph, moe + "routes:1")->dtype, DType::kInt32);
  EXPECT_EQ(graph.tensor(graph.loss).name, "loss.total");
}

// As transformers trains where nothing reads the router's logits.
TEST(Mixtral, NoAuxiliaryLossWhereTheConfigSaysSo) {
  ImportOptions options = Options(4, 64);
  for (const bool reads : {true, false}) {
    options.overrides["output_router_logits"] =
        ParseJson(reads ? "{\"x\": true}" : "{\"x\": false}")->Field("x");
    const Graph graph = Import(Example("mixtral-tiny"), options);
    EXPECT_EQ(graph.tensor(graph.loss).name, reads ? "loss.total" : "loss");
  }
}

// By default ceil(1.25 * 2 * 128 / 8); 0 gives an expert room for every token.
TEST(Mixtral, CapacityOfExperts) {
  ImportOptions options = Options(1, 128);
  const auto capacity = [&] {
    const Graph graph = Import("zoo:mixtral-8x7b", options);
    return NodeNamed(graph, "model.layers.0.block_sparse_moe.dispatch")
        .attribute("capacity");
  };
  EXPECT_EQ(capacity(), 40);
  JsonValue none;
  none.kind = JsonValue::Kind::kNumber;
  options.overrides = {{"expert_capacity_factor", none}};
  EXPECT_EQ(capacity(), 128);
}

TEST(Deepseek, LatentsRoutingAndShapes) {
  const Graph graph = Import(Example("deepseek-v3"), Options(1, 128));
  const std::string attention = "model.layers.3.self_attn";
  const auto shape = [&](const std::string& name) {
    const Tensor* tensor = TensorNamed(graph, name);
    TESSERA_CHECK(tensor != nullptr) << name;
    return tensor->shape;
  };
  EXPECT_EQ(shape(attention + ".q_a_proj.weight"), (Shape{1536, 7168}));
  EXPECT_EQ(shape(attention + ".q_a_layernorm.weight"), (Shape{1536}));
  EXPECT_EQ(shape(attention + ".q_b_proj.weight"), (Shape{128, 1, 192, 1536}));
  EXPECT_EQ(shape(attention + ".kv_a_proj_with_mqa.latent.weight"),
            (Shape{512, 7168}));
  EXPECT_EQ(shape(attention + ".kv_a_proj_with_mqa.rotary.weight"),
            (Shape{64, 7168}));
  EXPECT_EQ(shape(attention + ".kv_b_proj.k.weight"), (Shape{128, 128, 512}));
  EXPECT_EQ(shape(attention + ".o_proj.weight"), (Shape{7168, 128, 1, 128}));
  EXPECT_EQ(shape(attention + ".keys"), (Shape{1, 128, 128, 192}));
  // 192^-0.5 * (0.1 ln 40 + 1)^2 = 0.0721688 * 1.8738
  EXPECT_NEAR(NodeNamed(graph, attention).attribute("scale"), 0.135234, 1e-6);
  const Node& rotary = NodeNamed(graph, attention + ".rotary_q");
  EXPECT_EQ(rotary.op->name, "rotary_yarn");
  EXPECT_EQ(rotary.attribute("factor"), 40);
  EXPECT_EQ(rotary.attribute("magnitude"), 1);

  EXPECT_EQ(shape("model.layers.2.mlp.gate_proj.weight"), (Shape{18432, 7168}));
  const std::string mlp = "model.layers.3.mlp.";
  EXPECT_EQ(shape(mlp + "experts.down_proj.weight"), (Shape{256, 7168, 2048}));
  EXPECT_EQ(shape(mlp + "shared_experts.up_proj.weight"), (Shape{2048, 7168}));
  const Node& routes = NodeNamed(graph, mlp + "routes");
  for (const auto& [name, value] : {std::pair("sigmoid", 1.0),
                                    {"groups", 8.0},
                                    {"top_groups", 4.0},
                                    {"group_best", 2.0},
                                    {"top_k", 8.0},
                                    {"renormalise", 1.0},
                                    {"scale", 2.5}}) {
    EXPECT_EQ(routes.attribute(name), value) << name;
  }
  // Three dense layers are alike, and 57 layers of experts: the first of them
  // has no auxiliary loss to add its own to.
  const std::vector<int> classes = BlockClasses(graph);
  EXPECT_EQ(classes[3], 1);
  EXPECT_EQ(classes[61], 5);

  const Graph v2 = Import(Example("deepseek-v2"), Options(1, 128));
  const Node& soft = NodeNamed(v2, "model.layers.1.mlp.routes");
  for (const auto& [name, value] : {std::pair("sigmoid", 0.0),
                                    {"groups", 8.0},
                                    {"top_groups", 3.0},
                                    {"group_best", 1.0},
                                    {"top_k", 6.0},
                                    {"renormalise", 0.0},
                                    {"scale", 16.0}}) {
    EXPECT_EQ(soft.attribute(name), value) << name;
  }
}

TEST(Deepseek, WarnsOfWhatIsLeftOut) {
  std::vector<std::string> warnings;
  ImportOptions options = Options(1, 128);
  options.dtype = DType::kBFloat16;
  options.warnings = &warnings;
  Import(Example("deepseek-v3"), options);
  EXPECT_THAT(
      warnings,
      ::testing::ElementsAre(
          HasSubstr("quantization_config: parameters are not quantized, they "
                    "are bf16"),
          HasSubstr("num_nextn_predict_layers: layers that predict further "
                    "tokens are left out"),
          HasSubstr("e_score_correction_bias is left out")));
}

// What a config does not say is what transformers' class has. V2 takes the best
// experts of all, V3 of four of eight groups, and scales their weights.
TEST(Deepseek, HasTheDefaultsOfItsVersion) {
  const auto routes = [](const std::string& version, const std::string& more) {
    const Graph graph = Import(
        WriteTemp("deepseek.json", R"({"model_type": "deepseek_)" + version +
                                       R"(", "hidden_size": 8,
      "num_hidden_layers": 4, "vocab_size": 9, "intermediate_size": 16,
      "num_attention_heads": 2, "kv_lora_rank": 4, "qk_rope_head_dim": 2,
      "qk_nope_head_dim": 2, "v_head_dim": 2, "q_lora_rank": null,
      "max_position_embeddings": 64, "num_experts_per_tok": 2,
      "moe_intermediate_size": 4, "n_routed_experts": 16)" +
                                       more + "}"),
        Options(8, 16));
    EXPECT_EQ(TensorNamed(graph, "model.layers.2.mlp.gate.weight") == nullptr,
              version == "v3");
    return NodeNamed(graph, "model.layers.3.mlp.routes");
  };
  const Node v2 = routes("v2", "");
  EXPECT_EQ(v2.attribute("groups"), 1);
  EXPECT_EQ(v2.attribute("scale"), 1);
  EXPECT_EQ(v2.attribute("renormalise"), 0);
  const Node grouped =
      routes("v2", R"(, "topk_method": "group_limited_greedy", "n_group": 4,
               "topk_group": 2, "norm_topk_prob": true,
               "routed_scaling_factor": 16)");
  EXPECT_EQ(grouped.attribute("groups"), 4);
  EXPECT_EQ(grouped.attribute("scale"), 16);
  EXPECT_EQ(grouped.attribute("renormalise"), 0);
  const Node v3 = routes("v3", "");
  EXPECT_EQ(v3.attribute("groups"), 8);
  EXPECT_EQ(v3.attribute("top_groups"), 4);
  EXPECT_EQ(v3.attribute("scale"), 2.5);
  EXPECT_EQ(v3.attribute("renormalise"), 1);
}

// Where all layers are dense nothing is read of experts.
TEST(Deepseek, DenseModelsNeedNoExperts) {
  const std::string dense = R"({"model_type": "deepseek_v2", "hidden_size": 8,
      "num_hidden_layers": 2, "vocab_size": 9, "intermediate_size": 16,
      "num_attention_heads": 2, "kv_lora_rank": 4, "qk_rope_head_dim": 2,
      "qk_nope_head_dim": 2, "v_head_dim": 2, "q_lora_rank": null,
      "max_position_embeddings": 64, "num_experts_per_tok": null,
      "first_k_dense_replace": )";
  EXPECT_EQ(ErrorOf(dense + "2}"), "");
  EXPECT_THAT(ErrorOf(dense + "2, \"rope_interleave\": false}"),
              HasSubstr("rope_interleave: is false: not supported"));
  EXPECT_THAT(ErrorOf(dense + "1, \"moe_intermediate_size\": 4, "
                              "\"n_routed_experts\": 4}"),
              HasSubstr("num_experts_per_tok: missing"));
}

// A key that nothing reads, and that is like one that is not there.
TEST(Config, MisspeltKeysAreWarnedOf) {
  const auto warned = [](const std::string& more) {
    const std::string path = WriteTemp(
        "misspelt.json",
        R"({"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "intermediate_size": 16,
            "vocab_size": 9, "max_position_embeddings": 64)" +
            more + "}");
    std::vector<std::string> warnings;
    ImportOptions options = Options(8, 16);
    options.warnings = &warnings;
    Import(path, options);
    std::string all;
    for (const std::string& warning : warnings) {
      all += warning.substr(path.size());
    }
    return all;
  };
  EXPECT_EQ(warned(", \"num_key_value_head\": 1"),
            ": num_key_value_head: is not read; did you mean "
            "'num_key_value_heads'?");
  EXPECT_EQ(warned(", \"rms_nrom_eps\": 0.1"),
            ": rms_nrom_eps: is not read; did you mean 'rms_norm_eps'?");
  // It stands beside the key that it is like; those of other programs.
  EXPECT_EQ(warned(", \"num_key_value_head\": 1, \"num_key_value_heads\": 1"),
            "");
  EXPECT_EQ(warned(", \"pad_token_id\": 1, \"use_cache\": true, "
                   "\"torch_dtype\": \"bfloat16\", \"_name_or_path\": \"\""),
            "");
}

// The head is that of the family's own class where another one is not known.
TEST(Config, OtherHeadsAreWarnedOf) {
  const auto warned = [](const std::string& model, const std::string& classes) {
    std::vector<std::string> warnings;
    ImportOptions options = Options(8, 16);
    options.overrides["architectures"] =
        ParseJson("{\"x\": " + classes + "}")->Field("x");
    options.warnings = &warnings;
    Import(Example(model), options);
    std::string all;
    for (const std::string& warning : warnings) {
      const size_t at = warning.find(": architectures: ");
      if (at != std::string::npos) all += warning.substr(at + 17);
    }
    return all;
  };
  EXPECT_THAT(warned("bert-tiny", R"(["BertForMultipleChoice"])"),
              HasSubstr("says 'BertForMultipleChoice'; imported as "
                        "'BertForPreTraining'"));
  EXPECT_THAT(warned("gpt2-tiny", R"(["GPT2DoubleHeadsModel"])"),
              HasSubstr("imported as 'GPT2LMHeadModel'"));
  EXPECT_THAT(warned("bert-tiny", R"(["BertModel"])"),
              HasSubstr("'BertModel' has no loss: it is the mean squared"));
  EXPECT_EQ(warned("bert-tiny", R"(["BertForTokenClassification"])"), "");
  EXPECT_EQ(warned("bert-tiny", R"(["BertForMaskedLM"])"), "");
  EXPECT_EQ(warned("llama-3.2-1b", R"(["LLaMAForCausalLM"])"), "");
  EXPECT_EQ(warned("t5-tiny", R"(["T5WithLMHeadModel"])"), "");
  EXPECT_EQ(warned("gpt2-tiny", "[]"), "");
  // Those of the examples are what is built.
  for (const ZooModel& model : Zoo()) {
    std::vector<std::string> warnings;
    ImportOptions options = Options(8, 0);
    options.warnings = &warnings;
    const std::string name = "zoo:" + std::string(model.name);
    if (!HasOwnLength(name)) options.seq_len = 16;
    Import(name, options);
    for (const std::string& warning : warnings) {
      EXPECT_THAT(warning, ::testing::Not(HasSubstr("architectures")));
    }
  }
  EXPECT_THAT(ErrorOf(R"({"model_type": "gpt2", "architectures": "GPT2"})"),
              HasSubstr("architectures: is \"GPT2\": expected a list"));
}

TEST(Config, SizesHaveOneLimit) {
  for (const std::string layers : {"1000000000", "5000", "0"}) {
    EXPECT_THAT(ErrorOf(R"({"model_type": "gpt2", "n_embd": 8, "n_head": 2,
                            "vocab_size": 9, "n_positions": 16, "n_layer": )" +
                        layers + "}"),
                HasSubstr("n_layer: is " + layers +
                          ": expected a whole number from 1 to 4096"));
  }
}

TEST(Llama, ScaledRotary) {
  const Graph graph = Import(Example("llama-3.2-1b"), Options(1, 16));
  const Node& rotary = NodeNamed(graph, "model.layers.0.self_attn.rotary_k");
  EXPECT_EQ(rotary.op->name, "rotary_llama3");
  EXPECT_EQ(rotary.attribute("factor"), 32);
  EXPECT_EQ(rotary.attribute("original_positions"), 8192);
  EXPECT_EQ(rotary.attribute("high_frequency"), 4);
}

TEST(Llama, PositionsDividedByANumber) {
  const Graph graph = Import(
      WriteTemp("linear.json", R"({"model_type": "llama", "hidden_size": 8,
                 "num_hidden_layers": 1, "num_attention_heads": 2,
                 "vocab_size": 20, "intermediate_size": 16,
                 "max_position_embeddings": 16,
                 "rope_scaling": {"type": "linear", "factor": 2.5}})"),
      Options(2, 16));
  const Node& rotary = NodeNamed(graph, "model.layers.0.self_attn.rotary_q");
  EXPECT_EQ(rotary.op->name, "rotary_linear");
  EXPECT_EQ(rotary.attribute("factor"), 2.5);
}

// Where the config does not say where a model was first trained, the positions
// that it has are meant.
TEST(Llama, YarnOfThePositionsThatThereAre) {
  const auto original = [](const std::string& inside,
                           const std::string& outside) {
    const Graph graph = Import(
        WriteTemp("yarn.json", R"({"model_type": "llama", "hidden_size": 64,
             "vocab_size": 100, "num_hidden_layers": 1,
             "num_attention_heads": 4, "intermediate_size": 96,
             "max_position_embeddings": 128)" +
                                   outside +
                                   R"(, "rope_scaling": {"factor": 4,
             "rope_type": "yarn")" +
                                   inside + "}}"),
        Options(1, 16));
    return NodeNamed(graph, "model.layers.0.self_attn.rotary_q")
        .attribute("original_positions");
  };
  EXPECT_EQ(original("", ""), 128);
  EXPECT_EQ(original(R"(, "original_max_position_embeddings": 32)", ""), 32);
  EXPECT_EQ(original("", R"(, "original_max_position_embeddings": 64)"), 64);
}

// Ding et al. 2024 as in Phi-3's configs: positions of each pair of features
// have a divisor of their own, of one list up to the original positions and of
// another beyond; features are stretched by sqrt(1 + ln(32 / 8) / ln(8)).
TEST(Phi3, LongRope) {
  const auto import = [](const std::string& shorts, int64_t seq_len,
                         const std::string& type = "longrope") {
    return ImportModel(
        WriteTemp("longrope.json",
                  R"({"model_type": "phi3", "hidden_size": 8,
                 "num_hidden_layers": 1, "num_attention_heads": 2,
                 "vocab_size": 20, "intermediate_size": 16,
                 "max_position_embeddings": 32,
                 "original_max_position_embeddings": 8,
                 "rope_scaling": {"long_factor": [2, 5.5], "type": ")" +
                      type + R"(", "short_factor": )" + shorts + "}}"),
        Options(2, seq_len));
  };
  const auto rotary_of = [&](int64_t seq_len) {
    const auto graph = import("[1, 1.25]", seq_len);
    TESSERA_CHECK(graph.has_value()) << graph.error().ToString();
    return NodeNamed(*graph, "model.layers.0.self_attn.rotary_q").attributes;
  };
  const double magnitude = std::sqrt(1 + std::log(4.0) / std::log(8.0));
  EXPECT_EQ(rotary_of(9), (std::vector<Attribute>{{"divisor", 2},
                                                  {"divisor", 5.5},
                                                  {"fraction", 1},
                                                  {"magnitude", magnitude},
                                                  {"theta", 10000}}));
  EXPECT_EQ(rotary_of(8), (std::vector<Attribute>{{"divisor", 1},
                                                  {"divisor", 1.25},
                                                  {"fraction", 1},
                                                  {"magnitude", magnitude},
                                                  {"theta", 10000}}));
  // Its first configs have other names for it.
  for (const char* name : {"su", "yarn"}) {
    const auto graph = import("[1, 1.25]", 8, name);
    ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
    EXPECT_EQ(NodeNamed(*graph, "model.layers.0.self_attn.rotary_q").attributes,
              rotary_of(8));
  }
  const auto wrong = import("[1]", 8);
  ASSERT_FALSE(wrong.has_value());
  EXPECT_THAT(wrong.error().ToString(),
              HasSubstr("short_factor: has 1 items, 1 of them numbers from "
                        "0.001 to 1e+06: expected 2 such numbers"));
}

// Of four layers of a family: 4 layers, heads of 8, a window of 6 in 16 places.
std::string FourLayers(const std::string& family, const std::string& more) {
  return R"({"model_type": ")" + family + R"(", "hidden_size": 32,
      "num_hidden_layers": 4, "num_attention_heads": 4,
      "num_key_value_heads": 2, "intermediate_size": 64,
      "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
      "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
      "vocab_size": 128, "max_position_embeddings": 64, "sliding_window": 6)" +
         more + "}";
}

// 1 where a layer has the window.
std::vector<int> Windowed(const std::string& family, const std::string& more) {
  const Graph graph = Import(
      WriteTemp("windows.json", FourLayers(family, ", \"head_dim\": 8" + more)),
      Options(8, 16));
  std::vector<int> windowed;
  for (const Node& node : graph.nodes) {
    if (!node.op->name.starts_with("attention")) continue;
    EXPECT_TRUE(node.attribute("window") == 0 || node.attribute("window") == 6);
    windowed.push_back(node.attribute("window") == 6 ? 1 : 0);
  }
  return windowed;
}

TEST(Windows, AreThoseOfTheLayersThatHaveThem) {
  const std::string used = R"(, "use_sliding_window": true)";
  const std::string two = used + R"(, "max_window_layers": 2)";
  const std::string types = R"(, "layer_types": ["sliding_attention",
      "full_attention", "full_attention", "sliding_attention"])";
  const std::string full = R"(, "layer_types": ["full_attention",
      "full_attention", "full_attention", "full_attention"])";
  for (const char* family : {"qwen2", "qwen3"}) {
    EXPECT_THAT(Windowed(family, two), ElementsAre(0, 0, 1, 1)) << family;
    EXPECT_THAT(Windowed(family, used), ElementsAre(0, 0, 0, 0)) << family;
    EXPECT_THAT(Windowed(family, two + types), ElementsAre(1, 0, 0, 1));
    EXPECT_THAT(Windowed(family, full), ElementsAre(0, 0, 0, 0)) << family;
  }
  EXPECT_THAT(Windowed("qwen2_moe", two), ElementsAre(1, 0, 0, 0));
  EXPECT_THAT(Windowed("qwen2_moe", used), ElementsAre(1, 0, 1, 0));
  EXPECT_THAT(Windowed("qwen2_moe", two + types), ElementsAre(1, 0, 0, 1));
  EXPECT_THAT(Windowed("qwen3_moe", two), ElementsAre(1, 1, 1, 1));
  EXPECT_THAT(Windowed("mistral", ""), ElementsAre(1, 1, 1, 1));
  EXPECT_THAT(Windowed("llama", full), ElementsAre(0, 0, 0, 0));
  // One type for all layers suits any number of them.
  EXPECT_THAT(Windowed("qwen3", two + R"(, "layer_types": ["full_attention",
                                         "full_attention"])"),
              ElementsAre(0, 0, 0, 0));
}

TEST(Windows, LayerTypesThatAreNotTheModels) {
  const auto error = [](const std::string& family, const std::string& more) {
    return ErrorOf(FourLayers(family, ", \"head_dim\": 8" + more));
  };
  const std::string used = R"(, "use_sliding_window": true)";
  const std::string one = R"(, "layer_types": ["full_attention",
      "full_attention", "sliding_attention", "full_attention"])";
  EXPECT_THAT(error("qwen3", used + R"(, "layer_types": ["full_attention",
                      "sliding_attention"])"),
              HasSubstr("layer_types: has 2 items: expected one for each of 4 "
                        "layers, or null"));
  EXPECT_THAT(error("qwen2", used + R"(, "layer_types": "full_attention")"),
              HasSubstr("layer_types: is \"full_attention\": expected a list"));
  EXPECT_THAT(error("qwen2", used + R"(, "layer_types": [1, 2, 3, 4])"),
              HasSubstr("layer_types: is [1, 2, 3, 4]: expected a list of "
                        "strings"));
  EXPECT_THAT(error("qwen2", used + R"(, "layer_types": ["full_attention",
                  "linear_attention", "conv", "moe"])"),
              HasSubstr("layer_types[1]: is 'linear_attention': expected "
                        "full_attention or sliding_attention"));
  for (const char* family : {"qwen3", "llama", "gemma"}) {
    EXPECT_THAT(error(family, one),
                HasSubstr("layer_types[2]: is 'sliding_attention': expected "
                          "full_attention, as the model has no window"))
        << family;
  }
  EXPECT_THAT(error("mistral", one),
              HasSubstr("layer_types[0]: is 'full_attention': expected "
                        "sliding_attention, as the family has in all such"));
}

// As transformers' classes have them, which the model's own configs write.
TEST(Heads, HaveTheSizeOfTheirFamily) {
  const auto size = [](const std::string& family, const std::string& more) {
    const Graph graph = Import(
        WriteTemp("heads.json", FourLayers(family, more)), Options(8, 16));
    const Tensor* const query =
        TensorNamed(graph, "model.layers.0.self_attn.q_proj.weight");
    return query == nullptr ? 0 : query->shape[2];
  };
  for (const std::string none : {"", R"(, "head_dim": null)"}) {
    EXPECT_EQ(size("qwen3", none), 128);
    EXPECT_EQ(size("gemma", none), 256);
    EXPECT_EQ(size("qwen3_moe", none), 8);  // 32 / 4
    EXPECT_EQ(size("llama", none), 8);
  }
  EXPECT_EQ(size("qwen3", R"(, "head_dim": 16)"), 16);
  EXPECT_EQ(size("stablelm", R"(, "head_dim": 16)"),
            8);  // which has no such key
}

// What rope_parameters does not have is as at the top.
TEST(Rotary, OfBothPlacesIsTheInner) {
  const auto theta = [](const std::string& more,
                        const std::string& family = "llama") {
    const Graph graph = Import(
        WriteTemp("theta.json", FourLayers(family, more)), Options(8, 16));
    return NodeNamed(graph, "model.layers.0.self_attn.rotary_q")
        .attribute("theta");
  };
  EXPECT_EQ(theta(""), 1e4);
  EXPECT_EQ(theta("", "mixtral"), 1e6);
  const std::string top = R"(, "rope_theta": 5000)";
  EXPECT_EQ(theta(top), 5000);
  EXPECT_EQ(theta(top + R"(, "rope_parameters": {"rope_type": "default"})"),
            5000);
  EXPECT_EQ(theta(top + R"(, "rope_scaling": {"rope_type": "default",
                             "rope_theta": 77})"),
            77);
  for (const char* type : {"", R"(, "rope_type": "default")"}) {
    EXPECT_EQ(
        theta(top + R"(, "rope_parameters": {"rope_theta": 700)" + type + "}"),
        700);
  }
}

// Null is as many as there are queries, whatever the family's default is.
TEST(Heads, OfKeysMayBeNull) {
  for (const char* family : {"llama", "smollm3", "starcoder2", "mixtral"}) {
    std::string config = FourLayers(family, "");
    const std::string key = "\"num_key_value_heads\": ";
    config.replace(config.find(key), key.size() + 1, key + "null");
    const Graph graph = Import(WriteTemp("null.json", config), Options(8, 16));
    EXPECT_EQ(
        TensorNamed(graph, "model.layers.0.self_attn.k_proj.weight")->shape[0],
        4)
        << family;
  }
}

TEST(Windows, MistralHasOneWhereItsConfigDoesNotSay) {
  const auto window = [](const std::string& more) {
    const Graph graph =
        Import(WriteTemp("mistral.json", R"({"model_type": "mistral",
            "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 100,
            "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 64, "max_position_embeddings": 8192)" +
                                             more + "}"),
               Options(1, 8192));
    return NodeNamed(graph, "model.layers.0.self_attn").attribute("window");
  };
  EXPECT_EQ(window(""), 4096);
  EXPECT_EQ(window(R"(, "sliding_window": null)"), 0);
}

// Since version 5 transformers calls Qwen's experts as Mixtral's.
TEST(Importer, QwenHasExpertsByEitherName) {
  const auto with = [](const std::string& key) {
    return Import(WriteTemp("qwen3_moe.json", R"({"model_type": "qwen3_moe",
          "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64,
          "moe_intermediate_size": 16, "num_experts_per_tok": 2,
          "vocab_size": 128, "max_position_embeddings": 64, ")" +
                                                  key + R"(": 4})"),
                  Options(8, 16));
  };
  const Graph graph = with("num_local_experts");
  EXPECT_EQ(ParameterCount(graph), ParameterCount(with("num_experts")));
  // Four experts of gate, up and down: 4 * 3 * 32 * 16 of them.
  EXPECT_LT(ParameterCount(graph), 20'000);
}

// Norms stand behind the residual sums, projections around the layers.
TEST(Opt, NarrowEmbeddings) {
  const Graph graph = Import(Example("opt-350m"), Options(1, 16));
  EXPECT_EQ(TensorNamed(graph, "model.decoder.project_in.weight")->shape,
            (Shape{1024, 512}));
  EXPECT_EQ(TensorNamed(graph, "model.decoder.final_layer_norm.weight"),
            nullptr);
  const Node& norm =
      NodeNamed(graph, "model.decoder.layers.0.self_attn_layer_norm");
  EXPECT_EQ(graph.tensor(norm.operands[0]).name,
            "model.decoder.layers.0.self_attn.add");
}

TEST(Relatives, WhatTellsThemApart) {
  const Graph qwen3 = Import(Example("qwen3-30b-a3b"), Options(1, 16));
  EXPECT_EQ(TensorNamed(qwen3, "model.layers.0.self_attn.q_norm.weight")->shape,
            (Shape{128}));
  EXPECT_EQ(
      TensorNamed(qwen3, "model.layers.47.mlp.experts.up_proj.weight")->shape,
      (Shape{128, 768, 2048}));
  EXPECT_EQ(
      NodeNamed(qwen3, "model.layers.0.mlp.routes").attribute("renormalise"),
      1);
  const Graph qwen2 = Import(Example("qwen1.5-moe-a2.7b"), Options(1, 16));
  EXPECT_EQ(
      NodeNamed(qwen2, "model.layers.0.mlp.routes").attribute("renormalise"),
      0);
  EXPECT_EQ(
      TensorNamed(qwen2, "model.layers.0.mlp.shared_expert.down_proj.weight")
          ->shape,
      (Shape{1, 2048, 5632}));
  const Graph gemma = Import(Example("gemma-2b"), Options(1, 16));
  EXPECT_NEAR(NodeNamed(gemma, "model.embed_scale").attribute("factor"),
              45.254834, 1e-6);  // sqrt(2048)
  // Its config says "gelu" and means the approximation.
  EXPECT_EQ(NodeNamed(gemma, "model.layers.0.mlp.act_fn").op->name, "gelu");
  EXPECT_EQ(TensorNamed(gemma, "lm_head.weight"), nullptr);
  const Graph silu =
      Import(WriteTemp("gemma1.json", FourLayers("gemma", R"(, "head_dim": 8,
      "hidden_act": "silu")")),
             Options(1, 16));
  EXPECT_EQ(NodeNamed(silu, "model.layers.0.mlp.act_fn").op->name, "silu");
  const Graph phi3 = Import(Example("phi-3-mini"), Options(1, 16));
  EXPECT_EQ(NodeNamed(phi3, "model.layers.0.self_attn").attribute("window"),
            2047);
  EXPECT_NE(TensorNamed(phi3, "model.layers.0.mlp.gate_up_proj.up.weight"),
            nullptr);
}

// Of a decoder's layer: the windows, thetas and scales of its attention.
TEST(Gemma3, EverySixthLayerReadsAll) {
  const Graph graph = Import(Example("gemma-3-1b"), Options(1, 1024));
  for (int layer = 0; layer < 26; ++layer) {
    const bool all = (layer + 1) % 6 == 0;
    const std::string name =
        "model.layers." + std::to_string(layer) + ".self_attn";
    const Node& attention = NodeNamed(graph, name);
    EXPECT_EQ(attention.attribute("window"), all ? 0 : 512) << layer;
    EXPECT_EQ(attention.attribute("scale"), 1 / 16.0);  // 256^-0.5
    const Node& rotary = NodeNamed(graph, name + ".rotary_k");
    EXPECT_EQ(rotary.attribute("theta"), all ? 1e6 : 1e4) << layer;
  }
  EXPECT_EQ(TensorNamed(graph, "model.layers.0.self_attn.q_norm.weight")->shape,
            (Shape{256}));
  // Norms on both sides of what is added to the residual stream.
  const std::string layer = "model.layers.0.";
  const auto reads = [&](const std::string& node, size_t operand) {
    const TensorId read = NodeNamed(graph, layer + node).operands[operand];
    return graph.tensor(read).name;
  };
  EXPECT_EQ(reads("self_attn.add", 1), layer + "post_attention_layernorm");
  EXPECT_EQ(reads("pre_feedforward_layernorm", 0), layer + "self_attn.add");
  EXPECT_EQ(reads("mlp.add", 1), layer + "post_feedforward_layernorm");
}

// Its text, whose missing keys are those of transformers' Gemma3TextConfig;
// positions are scaled where no window is.
TEST(Gemma3, TheTextOfAModelOfImages) {
  std::vector<std::string> warnings;
  ImportOptions options = Options(1, 16);
  options.warnings = &warnings;
  options.overrides["num_hidden_layers"] = ParseJson("{\"x\": 6}")->Field("x");
  const Graph graph = Import("zoo:gemma-3-4b", options);
  EXPECT_THAT(warnings, ElementsAre(HasSubstr(
                            "vision_config: images are left out; the model is "
                            "that of text_config")));
  EXPECT_EQ(TensorNamed(graph, "model.embed_tokens.weight")->shape,
            (Shape{262208, 2560}));
  EXPECT_EQ(graph.blocks.size(), 8u);
  const Node& scaled = NodeNamed(graph, "model.layers.5.self_attn.rotary_q");
  EXPECT_EQ(scaled.op->name, "rotary_linear");
  EXPECT_EQ(scaled.attribute("factor"), 8);
  EXPECT_EQ(NodeNamed(graph, "model.layers.4.self_attn.rotary_q").op->name,
            "rotary");
}

// transformers 5 writes the rotary embeddings by kind of layer.
TEST(Gemma3, RotaryByKindOfLayer) {
  const Graph graph = Import(
      WriteTemp("gemma3.json", FourLayers("gemma3_text", R"(, "head_dim": 8,
          "layer_types": ["full_attention", "sliding_attention",
                          "full_attention", "full_attention"],
          "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0,
                               "rope_theta": 5e4},
            "sliding_attention": {"rope_type": "default",
                                  "rope_theta": 3e2}})")),
      Options(2, 16));
  const Node& whole = NodeNamed(graph, "model.layers.0.self_attn.rotary_q");
  EXPECT_EQ(whole.op->name, "rotary_linear");
  EXPECT_EQ(whole.attribute("theta"), 5e4);
  const Node& local = NodeNamed(graph, "model.layers.1.self_attn.rotary_q");
  EXPECT_EQ(local.op->name, "rotary");
  EXPECT_EQ(local.attribute("theta"), 3e2);
  EXPECT_EQ(NodeNamed(graph, "model.layers.1.self_attn").attribute("window"),
            6);
}

// c tanh(x / c) of scores and logits, in operators.
TEST(Gemma2, CapsScoresAndLogits) {
  const Graph graph = Import(Example("gemma-2-2b"), Options(1, 16));
  const std::string attention = "model.layers.0.self_attn";
  EXPECT_EQ(NodeNamed(graph, attention).op->name, "einsum");
  EXPECT_EQ(NodeNamed(graph, attention + ".narrow").attribute("factor"), 0.02);
  EXPECT_EQ(NodeNamed(graph, attention + ".widen").attribute("factor"), 50);
  EXPECT_EQ(NodeNamed(graph, "lm_head.widen").attribute("factor"), 30);
  const Node& loss = NodeNamed(graph, "loss");
  EXPECT_EQ(graph.tensor(loss.operands[0]).name, "lm_head.widen");
  // Without caps it is attention with a window.
  const Graph whole =
      Import(WriteTemp("gemma2.json", FourLayers("gemma2", R"(, "head_dim": 8,
                  "attn_logit_softcapping": null,
                  "final_logit_softcapping": null)")),
             Options(2, 16));
  EXPECT_EQ(NodeNamed(whole, attention).attribute("window"), 6);
  EXPECT_EQ(NodeNamed(whole, "model.layers.1.self_attn").attribute("window"),
            0);
  EXPECT_EQ(whole.tensor(NodeNamed(whole, "loss").operands[0]).name, "lm_head");
  // Set, null is what it is in the file, which has 50: not the default, 50.
  ImportOptions options = Options(1, 16);
  options.overrides["attn_logit_softcapping"] = JsonValue();
  const Graph set = Import(Example("gemma-2-2b"), options);
  EXPECT_EQ(NodeNamed(set, attention).op->name, "attention");
}

TEST(Decoders, WhatTellsThemApart) {
  // OLMo 2: a norm of all queries, then heads; no norm in front.
  const Graph olmo = Import(Example("olmo-2-7b"), Options(1, 16));
  EXPECT_EQ(TensorNamed(olmo, "model.layers.0.self_attn.q_norm.weight")->shape,
            (Shape{4096}));
  EXPECT_EQ(olmo.tensor(NodeNamed(olmo, "model.layers.0.self_attn.q_proj.heads")
                            .results[0])
                .shape,
            (Shape{1, 16, 32, 1, 128}));
  EXPECT_EQ(TensorNamed(olmo, "model.layers.0.input_layernorm.weight"),
            nullptr);
  const Graph granite = Import(Example("granite-3.1-2b"), Options(1, 16));
  EXPECT_EQ(NodeNamed(granite, "model.embed_scale").attribute("factor"), 12);
  EXPECT_EQ(NodeNamed(granite, "model.layers.3.self_attn").attribute("scale"),
            0.015625);
  EXPECT_EQ(NodeNamed(granite, "model.layers.3.mlp.scaled").attribute("factor"),
            0.22);
  EXPECT_EQ(NodeNamed(granite, "lm_head.scale").attribute("factor"), 0.125);
  // SmolLM3: every fourth layer has no positions.
  const Graph smol = Import(Example("smollm3-3b"), Options(1, 16));
  for (int layer = 0; layer < 36; ++layer) {
    const std::string rotary =
        "model.layers." + std::to_string(layer) + ".self_attn.rotary_q";
    EXPECT_EQ(std::ranges::count(smol.nodes, rotary, &Node::name),
              (layer + 1) % 4 == 0 ? 0 : 1)
        << layer;
  }
  const Graph starcoder = Import(Example("starcoder2-3b"), Options(1, 16));
  EXPECT_EQ(NodeNamed(starcoder, "model.layers.0.input_layernorm").op->name,
            "layer_norm");
  EXPECT_NE(TensorNamed(starcoder, "model.layers.0.mlp.c_fc.bias"), nullptr);
  EXPECT_NE(TensorNamed(starcoder, "model.layers.0.self_attn.o_proj.bias"),
            nullptr);
  // GLM-4: half of each head is turned.
  const Graph glm = Import(Example("glm-4-9b"), Options(1, 16));
  EXPECT_EQ(
      NodeNamed(glm, "model.layers.0.self_attn.rotary_k").attribute("fraction"),
      0.5);
  EXPECT_EQ(TensorNamed(glm, "model.layers.0.self_attn.o_proj.bias"), nullptr);
  const Graph plain = Import(Example("olmo-1b"), Options(1, 16));
  EXPECT_EQ(TensorNamed(plain, "model.norm.weight"), nullptr);
}

// Attention and MLP read one norm, or each its own.
TEST(Decoders, ParallelBlocks) {
  struct Row {
    const char* model;
    const char* layer;
    const char* attention;  // what reads the norms
    const char* mlp;
    const char* first;
    const char* second;
  };
  for (const Row& row :
       {Row{"phi-2", "model.layers.0.", "self_attn.q_proj", "mlp.fc1",
            "input_layernorm", "input_layernorm"},
        Row{"gpt-j-6b", "transformer.h.0.", "attn.q_proj", "mlp.fc_in", "ln_1",
            "ln_1"},
        Row{"falcon-7b", "transformer.h.0.", "self_attention.query_key_value.q",
            "mlp.dense_h_to_4h", "input_layernorm", "input_layernorm"},
        Row{"falcon-40b", "transformer.h.0.",
            "self_attention.query_key_value.q", "mlp.dense_h_to_4h", "ln_attn",
            "ln_mlp"},
        Row{"command-r", "model.layers.0.", "self_attn.q_proj", "mlp.up_proj",
            "input_layernorm", "input_layernorm"}}) {
    SCOPED_TRACE(row.model);
    const Graph graph = Import(Example(row.model), Options(1, 16));
    const std::string layer = row.layer;
    const auto reads = [&](const char* node) {
      return graph.tensor(NodeNamed(graph, layer + node).operands[0]).name;
    };
    EXPECT_EQ(reads(row.attention), layer + row.first);
    EXPECT_EQ(reads(row.mlp), layer + row.second);
  }
  // One group of 71 query heads.
  const Graph falcon = Import(Example("falcon-7b"), Options(1, 16));
  EXPECT_EQ(
      TensorNamed(falcon,
                  "transformer.h.0.self_attention.query_key_value.q.weight")
          ->shape,
      (Shape{1, 71, 64, 4544}));
  const Graph phi = Import(Example("phi-2"), Options(1, 16));
  EXPECT_EQ(TensorNamed(phi, "lm_head.bias")->shape, (Shape{51200}));
  const Graph gptj = Import(Example("gpt-j-6b"), Options(1, 16));
  EXPECT_EQ(
      NodeNamed(gptj, "transformer.h.0.attn.rotary_q").attribute("fraction"),
      0.25);  // 64 of 256
}

// Keys that change what is computed, with values that are not supported.
TEST(Decoders, RefusedKeys) {
  struct Row {
    const char* family;
    const char* keys;
    const char* problem;
  };
  for (const Row& row :
       {Row{"gemma3_text", R"("attn_logit_softcapping": 50)",
            "attn_logit_softcapping: is 50: not supported"},
        Row{"gemma3", R"("final_logit_softcapping": 30)",
            "final_logit_softcapping: is 30: not supported"},
        Row{"gemma", R"("use_bidirectional_attention": true)",
            "use_bidirectional_attention"},
        Row{"gemma3_text", R"("use_bidirectional_attention": true)",
            "use_bidirectional_attention: is true: not supported"},
        Row{"gemma3_text", R"("rope_parameters": {
              "full_attention": {"rope_type": "dynamic"}})",
            "rope_parameters: rope_type: is \"dynamic\": this form"},
        Row{"gemma2", R"("attn_logit_softcapping": 50)",
            "sliding_window: is 6: expected at least the sequence length, 16, "
            "where attn_logit_softcapping is not null"},
        Row{"gemma2", R"("sliding_window": 16, "vocab_multiple": 5,
              "tie_word_embeddings": false)",
            "vocab_multiple: is not supported of a head of its own where "
            "final_logit_softcapping is not null"},
        Row{"olmo", R"("clip_qkv": 8)", "clip_qkv: is 8: not supported"},
        Row{"smollm3", R"("no_rope_layers": [1, 0])",
            "no_rope_layers: is [1, 0]: expected a list of 4 to 4 whole "
            "numbers from 0 to 1"},
        Row{"phi", R"("qk_layernorm": true)",
            "qk_layernorm: is true: not supported"},
        Row{"stablelm", R"("qk_layernorm": true)",
            "qk_layernorm: is true: not supported"},
        Row{"stablelm", R"("hidden_dropout": 0.1)",
            "hidden_dropout: is 0.1: expected a number from 0 to 0"},
        Row{"cohere", R"("use_qk_norm": true)",
            "use_qk_norm: is true: not supported"},
        Row{"falcon", R"("alibi": true)", "alibi: is true: not supported"},
        Row{"falcon", R"("hidden_dropout": 0.1)",
            "hidden_dropout: is 0.1: expected a number from 0 to 0"},
        Row{"falcon",
            R"("parallel_attn": false, "new_decoder_architecture": true)",
            "parallel_attn: is false: expected true where "
            "new_decoder_architecture is"},
        Row{"falcon", R"("num_ln_in_parallel_attn": 2)",
            "num_ln_in_parallel_attn: is 2: expected at most 1, as "
            "new_decoder_architecture is false"},
        Row{"gptj", R"("n_embd": 32, "n_head": 4, "n_layer": 1,
              "n_positions": 16, "rotary_dim": 12)",
            "rotary_dim: is 12: expected an even number of at most 8, the size "
            "of a head"},
        Row{"gptj", R"("n_embd": 32, "n_head": 4, "n_layer": 1,
              "n_positions": 16, "rotary_dim": null)",
            "rotary_dim: is null: not supported"}}) {
    std::string text = FourLayers(row.family, "");
    // Where a key is twice in a file, the reader keeps one alone.
    if (std::string(row.keys).find("sliding_window") != std::string::npos) {
      text.erase(text.find(", \"sliding_window\": 6"),
                 std::string(", \"sliding_window\": 6").size());
    }
    text.insert(text.size() - 1, std::string(", ") + row.keys);
    EXPECT_THAT(ErrorOf(text), HasSubstr(row.problem)) << row.family;
  }
  ImportOptions documents = Options(8, 16);
  documents.documents = true;
  EXPECT_THAT(
      ErrorOf(FourLayers("gemma2", ""), documents),
      HasSubstr("attn_logit_softcapping: is not null: documents are not kept "
                "apart where scores are capped"));
}

TEST(Bloom, BiasesInsteadOfPositions) {
  const Graph graph = Import(Example("bloom-560m"), Options(1, 16));
  const Node& attention = NodeNamed(graph, "transformer.h.0.self_attention");
  EXPECT_EQ(attention.op->name, "attention_alibi");
  EXPECT_EQ(attention.attribute("alibi_heads"), 16);
}

TEST(Opt, PositionsAndRelu) {
  const Graph graph = Import(Example("opt-125m"), Options(1, 16));
  EXPECT_EQ(TensorNamed(graph, "model.decoder.embed_positions.weight")->shape,
            (Shape{2050, 768}));
  EXPECT_EQ(NodeNamed(graph, "model.decoder.layers.0.act").op->name, "relu");
}

// The published counts are of the model with its pooler, without the heads of
// the two losses.
TEST(Bert, HasTwoSegments) {
  ImportOptions options = Options(1, 16);
  options.overrides["type_vocab_size"] = ParseJson("{\"x\": 1}")->Field("x");
  EXPECT_THAT(ImportModel("zoo:bert-tiny", options).error().ToString(),
              HasSubstr("type_vocab_size: is 1: expected at least 2"));
}

TEST(Bert, HeadsAreBesideThePublishedModel) {
  const std::pair<const char*, int64_t> published[] = {
      {"bert-base", 109482240}, {"bert-large", 335141888}};
  for (const auto& [name, parameters] : published) {
    const Graph graph = Import(Example(name), Options(1, 8));
    int64_t count = 0;
    for (const Tensor& tensor : graph.tensors) {
      if (tensor.kind != TensorKind::kWeight ||
          !tensor.name.starts_with("bert.")) {
        continue;
      }
      count += ElementCount(tensor.shape);
    }
    EXPECT_EQ(count, parameters) << name;
  }
}

TEST(Bert, MaskedTokensAlone) {
  const Graph graph = Import(WriteTemp("bert.json", R"({"model_type": "bert",
                 "architectures": ["BertForMaskedLM"], "num_hidden_layers": 1,
                 "hidden_size": 8, "num_attention_heads": 2,
                 "max_position_embeddings": 16})"),
                             Options(2, 16));
  EXPECT_EQ(TensorNamed(graph, "bert.pooler.dense.weight"), nullptr);
  const Node& attention = NodeNamed(graph, "bert.encoder.layer.0.attention");
  EXPECT_EQ(attention.op->name, "attention_bidirectional");
  EXPECT_THAT(ErrorOf(R"({"model_type": "bert", "num_hidden_layers": 1,
                          "hidden_size": 8, "num_attention_heads": 2,
                          "max_position_embeddings": 16,
                          "position_embedding_type": "relative_key"})"),
              HasSubstr("position_embedding_type: is not 'absolute'"));
}

// Of bert-base in 28,996 words its embeddings, (28,996 + 512 + 2) x 768 and a
// norm, 12 layers of 7,087,872, and 9 labels: the 107,726,601 of transformers'
// BertForTokenClassification.
TEST(Bert, LabelsOfTokens) {
  ImportOptions options = Options(2, 16);
  for (const auto& [key, value] :
       {std::pair<std::string, std::string>{
            "architectures", R"(["BertForTokenClassification"])"},
        {"vocab_size", "28996"},
        {"num_labels", "9"}}) {
    options.overrides[key] = ParseJson("{\"x\": " + value + "}")->Field("x");
  }
  const Graph graph = Import("zoo:bert-base", options);
  EXPECT_EQ(ParameterCount(graph),
            (28996 + 512 + 2) * 768 + 2 * 768 + 12 * 7087872 + 9 * 768 + 9);
  EXPECT_EQ(ParameterCount(graph), 107726601);
  EXPECT_EQ(TensorNamed(graph, "bert.pooler.dense.weight"), nullptr);
  EXPECT_EQ(TensorNamed(graph, "labels")->shape, (Shape{2, 16}));
}

// ---- heads -----------------------------------------------------------------

struct OtherHead {
  const char* model;
  const char* architecture;
  const char* keys;  // of the config besides, as JSON
  int64_t parameters;
  Shape compared;     // what the loss reads, of 2 samples of 16 places
  const char* truth;  // the input that it is compared with
};

ImportOptions OptionsOf(const OtherHead& head) {
  ImportOptions options = Options(2, 16);
  const JsonValue keys = *ParseJson(head.keys);
  options.overrides = {keys.fields.begin(), keys.fields.end()};
  JsonValue name =
      *ParseJson(std::string("{\"x\": [\"") + head.architecture + "\"]}");
  options.overrides["architectures"] = name.Field("x");
  return options;
}

class HeadTest : public ::testing::TestWithParam<OtherHead> {};

TEST_P(HeadTest, IsThatOfTheArchitecture) {
  const OtherHead& head = GetParam();
  ImportOptions options = OptionsOf(head);
  const std::string model = std::string("zoo:") + head.model;
  if (HasNoSequence(model)) options.seq_len = 0;
  const Graph graph = Import(model, options);
  EXPECT_EQ(ParameterCount(graph), head.parameters);
  const Node& loss = NodeNamed(graph, "loss");
  EXPECT_EQ(graph.tensor(loss.operands[0]).shape, head.compared);
  const Tensor& truth = graph.tensor(loss.operands[1]);
  EXPECT_EQ(truth.name, head.truth);
  EXPECT_EQ(loss.op->name,
            truth.name == "targets" ? "mean_squared_error" : "cross_entropy");
  // Each weight has a gradient, and nothing is read in vain.
  const auto trained = Differentiate(graph);
  ASSERT_TRUE(trained.has_value()) << trained.error().ToString();
  for (const Tensor& tensor : graph.tensors) {
    if (tensor.kind != TensorKind::kInput) continue;
    EXPECT_TRUE(std::ranges::any_of(graph.nodes, [&](const Node& node) {
      return std::ranges::any_of(node.operands, [&](TensorId operand) {
        return &graph.tensor(operand) == &tensor;
      });
    })) << tensor.name;
  }
}

// What transformers 5.24 counts of the same configs:
// - BERT: 109,482,240 with the pooler (as HeadsAreBesideThePublishedModel), a
//   classifier of two labels is 2 x 768 + 2; that of tokens lacks the pooler,
//   768 x 768 + 768.
// - ViT: 86,567,656 with its classifier of 1,000 x 769, and instead of that a
//   pooler of 768 x 769.
// - T5: T5Model has the parameters of the tied model; the encoder alone
//   32,128 x 512 embeddings, 6 layers of 4 x 512 x 512 + 2 x 512 x 2048 + 2 x
//   512, 32 x 8 biases and a norm of 512.
// - Decoders: those of the tied model, a matrix of so many labels by features,
//   for tokens with a bias; pythia-1b lacks its own head of 50,304 x 2,048,
//   mixtral-tiny that of the vocabulary, phi-2 51,200 x 2,561.
// - ResNet-50: 25,557,032 without 1,000 x 2,049.
constexpr int64_t kBert = 109482240;
constexpr int64_t kT5Encoder =
    32128 * 512 + 6 * (4 * 512 * 512 + 2 * 512 * 2048 + 2 * 512) + 32 * 8 + 512;
constexpr int64_t kPythia = 1011781632 - 50304 * 2048;
INSTANTIATE_TEST_SUITE_P(
    Models, HeadTest,
    ::testing::Values(
        OtherHead{
            "bert-base", "BertModel", "{}", kBert, {2, 1, 768}, "targets"},
        OtherHead{"bert-base",
                  "BertForSequenceClassification",
                  "{}",
                  kBert + 2 * 768 + 2,
                  {2, 1, 2},
                  "next_token"},
        OtherHead{"bert-base",
                  "BertForTokenClassification",
                  "{}",
                  kBert - 768 * 769 + 2 * 768 + 2,
                  {2, 16, 2},
                  "labels"},
        OtherHead{"vit-base-patch16-224",
                  "ViTModel",
                  "{}",
                  86567656 - 1000 * 769 + 768 * 769,
                  {2, 1, 768},
                  "targets"},
        OtherHead{
            "t5-small", "T5Model", "{}", 60506624, {2, 16, 512}, "targets"},
        OtherHead{"t5-small",
                  "T5EncoderModel",
                  "{}",
                  kT5Encoder,
                  {2, 16, 512},
                  "targets"},
        OtherHead{"t5-small",
                  "T5ForTokenClassification",
                  R"({"num_labels": 3})",
                  kT5Encoder + 3 * 513,
                  {2, 16, 3},
                  "labels"},
        OtherHead{
            "gpt2", "GPT2Model", "{}", 124439808, {2, 16, 768}, "targets"},
        OtherHead{"gpt2",
                  "GPT2ForSequenceClassification",
                  R"({"num_labels": 5})",
                  124439808 + 5 * 768,
                  {2, 1, 5},
                  "next_token"},
        OtherHead{"gpt2",
                  "GPT2ForTokenClassification",
                  R"({"num_labels": 5})",
                  124439808 + 5 * 769,
                  {2, 16, 5},
                  "labels"},
        OtherHead{"llama-3.2-1b",
                  "LlamaModel",
                  "{}",
                  1235814400,
                  {2, 16, 2048},
                  "targets"},
        OtherHead{"llama-3.2-1b",
                  "LlamaForSequenceClassification",
                  R"({"id2label": {"0": "a", "1": "b", "2": "c"}})",
                  1235814400 + 3 * 2048,
                  {2, 1, 3},
                  "next_token"},
        OtherHead{"llama-3.2-1b",
                  "LlamaForTokenClassification",
                  R"({"num_labels": 3})",
                  1235814400 + 3 * 2049,
                  {2, 16, 3},
                  "labels"},
        // Embeddings narrower than the model are what is classified.
        OtherHead{
            "opt-350m", "OPTModel", "{}", 331196416, {2, 16, 512}, "targets"},
        OtherHead{"opt-350m",
                  "OPTForSequenceClassification",
                  R"({"num_labels": 3})",
                  331196416 + 3 * 512,
                  {2, 1, 3},
                  "next_token"},
        OtherHead{"bloom-560m",
                  "BloomForTokenClassification",
                  R"({"num_labels": 3})",
                  559214592 + 3 * 1025,
                  {2, 16, 3},
                  "labels"},
        OtherHead{"pythia-1b",
                  "GPTNeoXModel",
                  "{}",
                  kPythia,
                  {2, 16, 2048},
                  "targets"},
        OtherHead{"pythia-1b",
                  "GPTNeoXForSequenceClassification",
                  R"({"num_labels": 3})",
                  kPythia + 3 * 2048,
                  {2, 1, 3},
                  "next_token"},
        OtherHead{"phi-2",
                  "PhiForSequenceClassification",
                  R"({"num_labels": 3})",
                  2648568320,
                  {2, 1, 3},
                  "next_token"},
        OtherHead{"falcon-7b",
                  "FalconForTokenClassification",
                  R"({"num_labels": 3})",
                  6921720704 + 3 * 4545,
                  {2, 16, 3},
                  "labels"},
        OtherHead{"gemma-3-1b",
                  "Gemma3TextForSequenceClassification",
                  R"({"num_labels": 3})",
                  999885952 + 3 * 1152,
                  {2, 1, 3},
                  "next_token"},
        OtherHead{"olmo-2-7b",
                  "Olmo2Model",
                  "{}",
                  7298617344 - 100352 * 4096,
                  {2, 16, 4096},
                  "targets"},
        OtherHead{"deepseek-v2-lite",
                  "DeepseekV2ForSequenceClassification",
                  R"({"num_labels": 1})",
                  15706484224 - 102400 * 2048 + 2048,
                  {2, 1, 1},
                  "targets"},
        OtherHead{"resnet-50",
                  "ResNetModel",
                  "{}",
                  25557032 - 1000 * 2049,
                  {2, 2048},
                  "targets"}),
    [](const auto& info) { return std::string(info.param.architecture); });

// As transformers chooses losses: by "problem_type", else by the labels.
TEST(Heads, LossFollowsTheProblem) {
  const auto loss = [](const char* keys) {
    const Graph graph = Import(
        "zoo:gpt2-tiny",
        OptionsOf({"", "GPT2ForSequenceClassification", keys, 0, {}, ""}));
    return NodeNamed(graph, "loss").op->name;
  };
  EXPECT_EQ(loss(R"({"num_labels": 2})"), "cross_entropy");
  EXPECT_EQ(loss(R"({"num_labels": 1})"), "mean_squared_error");
  EXPECT_EQ(loss(R"({"num_labels": 4, "problem_type": "regression"})"),
            "mean_squared_error");
  EXPECT_EQ(loss(R"({"problem_type": "multi_label_classification"})"),
            "binary_cross_entropy");
  ImportOptions options = OptionsOf({"",
                                     "GPT2ForSequenceClassification",
                                     R"({"problem_type": "rank"})",
                                     0,
                                     {},
                                     ""});
  const auto graph = ImportModel("zoo:gpt2-tiny", options);
  ASSERT_FALSE(graph.has_value());
  EXPECT_THAT(graph.error().ToString(),
              HasSubstr("unknown problem type 'rank'"));
}

// Of a decoder the last token has read all others; BERT's first one reads all.
TEST(Heads, PlaceOfTheLabel) {
  const auto place = [](const char* model, const char* architecture,
                        const char* node) {
    const Graph graph =
        Import(model, OptionsOf({"", architecture, "{}", 0, {}, ""}));
    return NodeNamed(graph, node).attribute("place");
  };
  EXPECT_EQ(place("zoo:gpt2-tiny", "GPT2ForSequenceClassification",
                  "score.last_token"),
            15);
  EXPECT_EQ(place("zoo:bert-tiny", "BertForSequenceClassification",
                  "bert.pooler.first_token"),
            0);
}

TEST(Heads, DropoutInFrontOfLabels) {
  const auto probability = [](const char* model, const char* architecture,
                              const char* keys, const char* node) {
    const Graph graph =
        Import(model, OptionsOf({"", architecture, keys, 0, {}, ""}));
    return NodeNamed(graph, node).attribute("probability");
  };
  EXPECT_EQ(
      probability("zoo:bert-base", "BertForSequenceClassification",
                  R"({"hidden_dropout_prob": 0.25})", "classifier.dropout"),
      0.25);
  EXPECT_EQ(probability("zoo:bert-base", "BertForSequenceClassification",
                        R"({"classifier_dropout": 0.5})", "classifier.dropout"),
            0.5);
  EXPECT_EQ(probability("zoo:llama-3.2-1b", "LlamaForTokenClassification", "{}",
                        "score.dropout"),
            0.1);
}

TEST(T5, LayersOfEachStackAreOneClassButForTheirEnds) {
  const Graph graph = Import(Example("t5-small"), Options(2, 16));
  // embed, 6 layers, the decoder's embedding, 6 layers, head.
  ASSERT_EQ(graph.blocks.size(), 15u);
  EXPECT_EQ(graph.blocks[7], "decoder.embed");
  const std::vector<int> classes = BlockClasses(*Differentiate(graph));
  for (size_t b = 2; b <= 6; ++b) EXPECT_EQ(classes[b], classes[1]) << b;
  // The last one begins the sum of the gradients of the encoder's result.
  for (size_t b = 9; b <= 12; ++b) EXPECT_EQ(classes[b], classes[8]) << b;
  EXPECT_NE(classes[13], classes[8]);
}

// As transformers 5 has them: a head is scaled where it is tied, unless a key
// that it writes says otherwise.
TEST(T5, HeadsAreScaledByKeys) {
  const auto is_scaled = [](const std::string& keys) {
    const Graph graph =
        Import(WriteTemp("head.json", R"({"model_type": "t5", "d_model": 8,
                   "d_ff": 16, "num_heads": 2, "num_layers": 1,
                   "is_encoder_decoder": true, )" +
                                          keys + "}"),
               Options(2, 16));
    return std::ranges::find(graph.nodes, "lm_head.scale", &Node::name) !=
           graph.nodes.end();
  };
  EXPECT_TRUE(is_scaled(R"("tie_word_embeddings": true)"));
  EXPECT_FALSE(is_scaled(R"("tie_word_embeddings": false)"));
  EXPECT_FALSE(is_scaled(
      R"("tie_word_embeddings": true, "scale_decoder_outputs": false)"));
}

TEST(T5, CrossAttentionAndBiases) {
  const Graph graph =
      Import(WriteTemp("t5.json", R"({"model_type": "t5", "d_model": 8,
                 "d_kv": 3, "d_ff": 16, "num_heads": 2, "num_layers": 1,
                 "num_decoder_layers": 2, "vocab_size": 20,
                 "source_len": 24, "is_encoder_decoder": true})"),
             Options(2, 16));
  const Node& cross =
      NodeNamed(graph, "decoder.block.1.layer.1.EncDecAttention");
  EXPECT_EQ(cross.op->name, "attention_bidirectional");
  EXPECT_EQ(graph.tensor(cross.operands[0]).shape, (Shape{2, 16, 2, 1, 3}));
  EXPECT_EQ(graph.tensor(cross.operands[1]).shape, (Shape{2, 24, 2, 3}));
  EXPECT_EQ(graph.tensor(cross.operands[4]).name, "source_positions");
  const Node& own = NodeNamed(graph, "decoder.block.1.layer.0.SelfAttention");
  EXPECT_EQ(own.attribute("causal"), 1);
  EXPECT_EQ(graph.tensor(own.operands[5]).shape, (Shape{32, 2, 1}));
  EXPECT_EQ(
      own.operands[5],
      NodeNamed(graph, "decoder.block.0.layer.0.SelfAttention").operands[5]);
  EXPECT_NEAR(NodeNamed(graph, "lm_head.scale").attribute("factor"), 0.35355339,
              1e-8);  // 1 / sqrt(8)
}

// The model's FLOPs count all pairs of query and key, causal or not: halving
// takes half of what causal attentions have.
TEST(T5, OnlyCausalAttentionIsHalved) {
  const Graph graph = Import(Example("t5-small"), Options(2, 16));
  const double all = ModelFlops(graph).value;
  const double halved = ModelFlops(graph, /*halve_causal=*/true).value;
  // Six layers of 8 heads: 3 * 2 * (64 + 64) for each of 2 * 16 * 16 pairs.
  const double causal = 6.0 * 8 * 6 * 128 * 2 * 16 * 16;
  EXPECT_DOUBLE_EQ(all - halved, causal / 2);
}

TEST(Vit, PatchesAndAClassToken) {
  const Graph graph = Import(Example("vit-base-patch16-224"), Options(2, 0));
  EXPECT_EQ(graph.seq_len, 197);
  EXPECT_EQ(TensorNamed(graph, "patches")->shape, (Shape{2, 197, 3, 16, 16}));
  EXPECT_EQ(TensorNamed(graph, "labels")->shape, (Shape{2, 1}));
  EXPECT_EQ(graph.tensor(NodeNamed(graph, "classifier").results[0]).shape,
            (Shape{2, 1, 1000}));
}

// Attention and MLP side by side read one norm (Dehghani et al. 2023).
TEST(Vit, BlocksOf22Billion) {
  const Graph graph = Import(Example("vit-22b"), Options(2, 0));
  const std::string layer = "vit.encoder.layer.1.";
  const auto reads = [&](const std::string& node) {
    return graph.tensor(NodeNamed(graph, layer + node).operands[0]).name;
  };
  EXPECT_EQ(reads("intermediate.dense"), layer + "layernorm_before");
  EXPECT_EQ(reads("attention.attention.query"), layer + "layernorm_before");
  EXPECT_EQ(NodeNamed(graph, layer + "layernorm_before").op->name, "rms_norm");
  EXPECT_NE(TensorNamed(graph, layer + "attention.q_norm.weight"), nullptr);
}

TEST(Qwen2, HasBiasesOnQueriesKeysAndValues) {
  const Graph graph = Import(Example("qwen2-7b"), Options());
  const std::string prefix = "model.layers.0.self_attn.";
  for (const char* name : {"q_proj.bias", "k_proj.bias", "v_proj.bias"}) {
    EXPECT_NE(TensorNamed(graph, prefix + name), nullptr) << name;
  }
  EXPECT_EQ(TensorNamed(graph, prefix + "o_proj.bias"), nullptr);
  EXPECT_EQ(NodeNamed(graph, "model.layers.0.self_attn").attribute("window"),
            0);
}

constexpr char kNeox[] = R"("model_type": "gpt_neox", "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50,
    "intermediate_size": 64, "max_position_embeddings": 16,
    "rotary_pct": 0.25)";

TEST(GptNeox, BothResidualForms) {
  const std::string parallel =
      WriteTemp("neox.json", std::string("{") + kNeox + "}");
  const std::string serial =
      WriteTemp("neox_serial.json", std::string("{") + kNeox +
                                        R"(, "use_parallel_residual": false})");
  const Graph a = Import(parallel, Options(2, 16));
  const Graph b = Import(serial, Options(2, 16));
  EXPECT_EQ(ParameterCount(a), ParameterCount(b));
  // Parallel: the second norm reads the layer's own input.
  const std::string layer = "gpt_neox.layers.0.";
  EXPECT_EQ(NodeNamed(a, layer + "post_attention_layernorm").operands[0],
            NodeNamed(a, layer + "input_layernorm").operands[0]);
  EXPECT_EQ(
      b.tensor(NodeNamed(b, layer + "post_attention_layernorm").operands[0])
          .name,
      layer + "attention.add");
  EXPECT_EQ(NodeNamed(a, layer + "mlp.act").op->name, "gelu_erf");
  EXPECT_EQ(NodeNamed(a, layer + "attention.rotary_k").attribute("fraction"),
            0.25);
}

// ---- bad input --------------------------------------------------------------

std::string Gpt2Config(const std::string& more,
                       const std::string& heads = "8") {
  return R"({"model_type": "gpt2", "n_embd": 256, "n_layer": 2,
             "n_positions": 128, "vocab_size": 100, "n_head": )" +
         heads + more + "}";
}

std::string LlamaConfig(const std::string& more) {
  return R"({"model_type": "llama", "hidden_size": 64, "vocab_size": 100,
             "num_hidden_layers": 1, "num_attention_heads": 4,
             "intermediate_size": 96, "max_position_embeddings": 128)" +
         more + "}";
}

TEST(BadFile, IsMissing) {
  const auto graph = ImportModel("/no/such/config.json", Options());
  ASSERT_FALSE(graph.has_value());
  EXPECT_EQ(graph.error().code, ErrorCode::kNotFound);
  EXPECT_THAT(graph.error().ToString(), HasSubstr("/no/such/config.json: "));
}

TEST(BadFile, BreaksOff) {
  // The text ends in line 3, behind the colon at column 12.
  EXPECT_THAT(ErrorOf("{\n  \"model_type\": \"gpt2\",\n  \"n_embd\":"),
              HasSubstr("json:3:12: the file ends early"));
}

TEST(BadFile, NumbersBeyondThoseOf64Bits) {
  for (const char* number : {"1e400", "-1e400", "2e308"}) {
    EXPECT_THAT(ErrorOf("{\n \"model_type\": \"gpt2\",\n \"n_embd\": " +
                        std::string(number) + "}"),
                EndsWith("json:3:12: is " + std::string(number) +
                         ": expected a number from -1.8e308 to 1.8e308"));
  }
  // Too small to tell from zero.
  EXPECT_EQ(ErrorOf(LlamaConfig(R"(, "x": 1e-400)")), "");
}

TEST(BadFile, IsNoUtf8) {
  // Latin-1, too long for what it says, half a pair, the end of a string.
  for (const char* bytes :
       {"caf\xe9", "caf\xc0\x80", "caf\xed\xa0\x80", "caf\xe2\x82"}) {
    EXPECT_THAT(ErrorOf("{\"a\": \"" + std::string(bytes) + "\"}"),
                EndsWith("json:1:11: is no UTF-8: expected text in it"));
  }
  EXPECT_EQ(ErrorOf(LlamaConfig(", \"x\": \"caf\\u00e9 caf\xc3\xa9 \\n\"")),
            "");
  EXPECT_THAT(ErrorOf(R"({"a": "\x41"})"),
              EndsWith("json:1:8: '\\x' is no escape: expected one of JSON's, "
                       "or '\\u' and four hexadecimal digits"));
  EXPECT_THAT(ErrorOf(R"({"a": "\u12g4"})"), HasSubstr("'\\u' is no escape"));
}

TEST(BadFile, AByteOrderMarkIsNone) {
  EXPECT_EQ(ErrorOf("\xef\xbb\xbf" + LlamaConfig("")), "");
}

// One that has a writer would be read once, and once more in vain.
TEST(BadFile, IsAPipe) {
  for (const char* name : {"pipe", "pipe.json", "pipe.onnx", "pipe.pb"}) {
    const std::string path = TempPath(name);
    ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
    EXPECT_FALSE(IsGraphFile(path) && path.ends_with(".json"));
    EXPECT_FALSE(ReadModelConfig(path).has_value());
    const auto graph = ImportModel(path, Options());
    ASSERT_FALSE(graph.has_value());
    EXPECT_EQ(graph.error().ToString(),
              path +
                  ": is no regular file: a model is read more than once, "
                  "which a pipe or device cannot be");
  }
}

TEST(BadFile, UnknownModelType) {
  EXPECT_THAT(
      ErrorOf(R"({"model_type": "gpt3"})"),
      HasSubstr("model_type: unknown model_type 'gpt3'; did you mean "
                "'gpt2'? known: gpt2, llama, mistral, mixtral, "
                "qwen2, qwen2_moe, qwen3, qwen3_moe, gemma, gemma2, "
                "gemma3_text, gemma3, phi3, olmo, olmo2, granite, smollm3, "
                "starcoder2, phi, falcon, gptj, stablelm, glm4, cohere, opt, "
                "bloom, gpt_neox, bert, t5, vit, deepseek_v2, deepseek_v3"));
  EXPECT_THAT(
      ErrorOf(R"({"model_type": "qwen3_next"})"),
      HasSubstr("of others tools/export_torch.py makes a graph file where "
                "transformers is, and torch.onnx an ONNX file "
                "(docs/models.md, PyTorch)"));
  EXPECT_THAT(ErrorOf("{}"), HasSubstr("model_type: missing"));
}

TEST(BadFile, HeadsDoNotDivide) {
  EXPECT_THAT(ErrorOf(Gpt2Config("", "7")),
              HasSubstr("n_head: is 7: expected a divisor of n_embd 256"));
  EXPECT_THAT(ErrorOf(LlamaConfig(R"(, "num_key_value_heads": 3)")),
              HasSubstr("num_key_value_heads: is 3: expected a divisor of "
                        "num_attention_heads 4"));
}

TEST(BadFile, SequenceIsTooLong) {
  EXPECT_THAT(ErrorOf(Gpt2Config(""), Options(8, 129)),
              HasSubstr("n_positions: is 128: a sequence length of 129"));
  EXPECT_EQ(ErrorOf(Gpt2Config(""), Options(8, 128)), "");
  EXPECT_THAT(ErrorOf(LlamaConfig(""), Options(8, 129)),
              HasSubstr("max_position_embeddings: is 128"));
}

TEST(BadFile, WrongValues) {
  EXPECT_THAT(ErrorOf(Gpt2Config(R"(, "n_inner": "many")")),
              HasSubstr("n_inner: is \"many\": expected a whole number"));
  EXPECT_THAT(ErrorOf(Gpt2Config(R"(, "resid_pdrop": 1.5)")),
              HasSubstr("resid_pdrop: is 1.5: expected a number from 0"));
  EXPECT_THAT(ErrorOf(Gpt2Config("", "2.5")), HasSubstr("n_head: is 2.5"));
  EXPECT_THAT(ErrorOf(R"({"model_type": "gpt2"})"),
              HasSubstr("n_embd: missing"));
}

TEST(BadFile, UnsupportedFeatures) {
  EXPECT_THAT(ErrorOf(Gpt2Config(R"(, "activation_function": "gelo")")),
              HasSubstr("activation_function: unknown activation 'gelo'; did "
                        "you mean 'gelu'?"));
  EXPECT_THAT(
      ErrorOf(Gpt2Config(R"(, "scale_attn_by_inverse_layer_idx": true)")),
      HasSubstr("scale_attn_by_inverse_layer_idx: is true: not supported"));
  EXPECT_THAT(
      ErrorOf(LlamaConfig(R"(, "rope_scaling": {"rope_type": "dynamic"})")),
      HasSubstr("rope_scaling: rope_type: is \"dynamic\": this form of rotary "
                "embeddings is not supported; known: default, linear, yarn, "
                "llama3, longrope"));
  // Of which the other fields are lists of many numbers.
  EXPECT_THAT(ErrorOf(LlamaConfig(R"(, "rope_scaling": {"type": "su",
                  "short_factor": [1, 1], "long_factor": [2, 3]})")),
              HasSubstr("rope_scaling: type: is \"su\": this form of rotary"));
  EXPECT_THAT(ErrorOf(LlamaConfig(R"(, "rope_scaling": {"factor": 2})")),
              HasSubstr("rope_scaling: type: missing: expected a form of "
                        "rotary embeddings; known: default"));
  for (const char* form : {"linear", "yarn"}) {
    EXPECT_THAT(ErrorOf(LlamaConfig(R"(, "rope_scaling": {"rope_type": ")" +
                                    std::string(form) + "\"}")),
                HasSubstr("rope_scaling: factor: missing: expected a number of "
                          "at least 1"))
        << form;
  }
  EXPECT_THAT(
      ErrorOf(LlamaConfig(R"(, "rope_scaling": {"rope_type": "llama3"})")),
      HasSubstr("rope_scaling: original_max_position_embeddings: missing"));
  EXPECT_EQ(ErrorOf(LlamaConfig(R"(, "rope_scaling": null)")), "");
  EXPECT_EQ(ErrorOf(LlamaConfig(R"(, "use_cache": true, "x": [1, {}])")), "");
}

TEST(BadFile, BatchIsNotGiven) {
  EXPECT_THAT(ErrorOf(Gpt2Config(""), Options(0, 16)),
              HasSubstr("global batch"));
  EXPECT_THAT(ErrorOf(Gpt2Config(""), Options(8, 0)),
              HasSubstr("sequence length"));
}

TEST(Importers, NamesAreUnique) {
  std::vector<std::string_view> names;
  for (const Importer& importer : Importers()) names.push_back(importer.name);
  for (const ModelFamily& family : ModelFamilies()) {
    names.push_back(family.name);
  }
  std::sort(names.begin(), names.end());
  EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end());
}

}  // namespace
}  // namespace tessera
