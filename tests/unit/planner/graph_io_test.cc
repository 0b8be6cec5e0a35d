#include "planner/io/graph_io.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>

#include "planner/base/file.h"
#include "planner/base/rng.h"
#include "planner/io/cluster_io.h"
#include "planner/io/huggingface.h"
#include "planner/io/importer.h"
#include "planner/topology/topologies.h"
#include "tests/support/paths.h"
#include "tests/support/temp_path.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

std::string Path(const std::string& ending) {
  return TempPath("graph" + ending);
}

// A random chain of layers, each of a random operator.
Graph RandomGraph(uint64_t seed) {
  Rng rng(seed);
  const auto extent = [&] { return int64_t{1} + rng.Below(9); };
  const int64_t batch = extent();
  const int64_t seq_len = extent();
  const int64_t hidden = extent();
  const int64_t vocabulary = 1 + extent();
  constexpr DType kDTypes[] = {DType::kFloat64, DType::kFloat32,
                               DType::kBFloat16, DType::kFloat16};
  GraphBuilder builder("random-" + std::to_string(seed), batch, seq_len,
                       kDTypes[rng.Below(4)]);
  builder.BeginBlock("embed");
  const TensorId tokens =
      builder.Input("tokens", {batch, seq_len}, DType::kInt32);
  const TensorId labels =
      builder.Input("labels", {batch, seq_len}, DType::kInt32);
  const TensorId table = builder.Weight("table", {vocabulary, hidden},
                                        {.stddev = rng.Uniform01()}, true);
  TensorId x = builder.Add1("embedding", "lookup", {tokens, table});
  const uint32_t layers = rng.Below(6);
  for (uint32_t i = 0; i < layers; ++i) {
    const std::string name = "layer." + std::to_string(i);
    if (rng.Below(2) == 0) builder.BeginBlock(name);
    switch (rng.Below(4)) {
      case 0: {
        const TensorId w = builder.Weight(name + ".weight", {hidden, hidden},
                                          {.stddev = 0.1}, true);
        const TensorId b = builder.Weight(name + ".bias", {hidden},
                                          {.constant = rng.Uniform01()}, false);
        x = builder.Add1("linear", name, {x, w, b}, "bsi,oi+o->bso");
        break;
      }
      case 1:
        x = builder.Add1("dropout", name, {x}, "bsh->bsh",
                         {{"salt", 1.0 * i}, {"probability", rng.Uniform01()}});
        break;
      case 2: {
        const TensorId w =
            builder.Weight(name + ".weight", {hidden}, {.constant = 1}, false);
        x = builder.Add1("rms_norm", name, {x, w}, "",
                         {{"epsilon", rng.Uniform01()}});
        break;
      }
      default:
        x = builder.Add1("add", name, {x, x}, "bsh,bsh->bsh");
    }
  }
  const TensorId logits =
      builder.Add1("linear", "head", {x, table}, "bsi,vi->bsv");
  const TensorId count = builder.Add1("count_labels", "count", {labels});
  auto graph = builder.Finish(
      builder.Add1("cross_entropy", "loss", {logits, labels, count}));
  TESSERA_CHECK(graph.has_value()) << graph.error().ToString();
  return *std::move(graph);
}

TEST(GraphIo, RoundTripInEveryEncoding) {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    const Graph graph = RandomGraph(seed);
    for (const char* ending : {".txtpb", ".json", ".pb"}) {
      const std::string path = Path(ending);
      ASSERT_TRUE(WriteGraph(path, graph).has_value());
      const auto read = ReadGraph(path);
      ASSERT_TRUE(read.has_value()) << read.error().ToString();
      EXPECT_EQ(*read, graph) << "seed " << seed << ending;
      EXPECT_EQ(Fingerprint(*read), Fingerprint(graph));
      const std::string bytes = *ReadFile(path);
      ASSERT_TRUE(WriteGraph(path, *read).has_value());
      EXPECT_EQ(*ReadFile(path), bytes);
    }
  }
}

// Forward operators without a rule of their own, and without gradients.
TEST(GraphIo, RoundTripOfComparisons) {
  GraphBuilder builder("choices", 4, 1, DType::kFloat32);
  const TensorId x = builder.Input("images", {4, 3}, DType::kFloat32);
  const TensorId targets = builder.Input("targets", {4, 3}, DType::kFloat32);
  const TensorId w = builder.Weight("w", {3}, {.constant = 1}, false);
  const TensorId above = builder.Add1("greater", "above", {x, w}, "bf,f->bf");
  const TensorId y = builder.Add1("where", "y", {above, x, w}, "bf,bf,f->bf");
  const auto graph = builder.Finish(builder.Add1(
      "mean_squared_error", "loss", {y, targets}, "bf,bf->", {{"weight", 1}}));
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  const std::string path = Path(".json");
  ASSERT_TRUE(WriteGraph(path, *graph).has_value());
  const auto read = ReadGraph(path);
  ASSERT_TRUE(read.has_value()) << read.error().ToString();
  EXPECT_EQ(*read, *graph);
}

// x times six known numbers, one of them no finite one.
Graph WithConstant() {
  GraphBuilder builder("known", 4, 1, DType::kFloat32);
  const TensorId x = builder.Input("images", {4, 6}, DType::kFloat32);
  const TensorId targets = builder.Input("targets", {4, 6}, DType::kFloat32);
  const TensorId w = builder.Weight("w", {6}, {.constant = 1}, false);
  const TensorId known = builder.Constant(
      "known", {6},
      {0.1, -2, 1e-300, 3e38, -std::numeric_limits<double>::infinity(), 0});
  TensorId y = builder.Add1("multiply", "trained", {x, w}, "bf,f->bf");
  y = builder.Add1("minimum", "least", {y, known}, "bf,f->bf");
  auto graph = builder.Finish(builder.Add1(
      "mean_squared_error", "loss", {y, targets}, "bf,bf->", {{"weight", 1}}));
  TESSERA_CHECK(graph.has_value()) << graph.error().ToString();
  return *std::move(graph);
}

TEST(GraphIo, RoundTripOfConstants) {
  const Graph graph = WithConstant();
  // w alone is trained, and has a gradient.
  EXPECT_EQ(ParameterCount(graph), 6);
  const auto differentiated = Differentiate(graph);
  ASSERT_TRUE(differentiated.has_value());
  EXPECT_EQ(differentiated->gradients.size(), 1u);
  for (const char* ending : {".txtpb", ".json", ".pb"}) {
    const std::string path = Path(ending);
    ASSERT_TRUE(WriteGraph(path, graph).has_value());
    const auto read = ReadGraph(path);
    ASSERT_TRUE(read.has_value()) << read.error().ToString();
    EXPECT_EQ(*read, graph) << ending;
  }
}

TEST(GraphIo, ConstantsThatAreWrong) {
  const auto error = [](auto change) {
    Graph graph = WithConstant();
    for (Tensor& tensor : graph.tensors) {
      if (tensor.name == "known") change(tensor);
    }
    const std::vector<Error> errors = Validate(graph);
    return errors.empty() ? "" : errors[0].ToString();
  };
  EXPECT_EQ(error([](Tensor&) {}), "");
  EXPECT_THAT(error([](Tensor& t) { t.values.pop_back(); }),
              HasSubstr("'known' has 5 values: expected those of [6]"));
  EXPECT_THAT(error([](Tensor& t) { t.values[0] = std::nan(""); }),
              HasSubstr("'known' has a value that is no number"));
  EXPECT_THAT(error([](Tensor& t) { t.kind = TensorKind::kWeight; }),
              HasSubstr("only inputs without samples"));
  EXPECT_THAT(error([](Tensor& t) { t.dtype = DType::kInt32; }),
              HasSubstr("no whole number of 32 bits"));
  EXPECT_THAT(error([](Tensor& t) {
                t.shape = {kMostConstants + 1};
                t.values.assign(kMostConstants + 1, 0);
              }),
              HasSubstr("more than 4194304 numbers together"));
}

// Imported, written, read and written again: the same graph and bytes.
void ExpectRoundTrip(const std::string& model, int64_t seq_len) {
  ImportOptions options;
  options.global_batch = 4;
  options.seq_len = seq_len;
  const auto graph = ImportModel(model, options);
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  const std::string path = Path(".json");
  ASSERT_TRUE(WriteGraph(path, *graph).has_value());
  const std::string bytes = *ReadFile(path);
  // The file's own batch, length and type hold where none are given.
  const auto read = ImportModel(path, {});
  ASSERT_TRUE(read.has_value()) << read.error().ToString();
  EXPECT_EQ(*read, *graph) << model;
  ASSERT_TRUE(WriteGraph(path, *read).has_value());
  EXPECT_EQ(*ReadFile(path), bytes) << model;
}

TEST(GraphIo, RoundTripOfEveryFamily) {
  std::set<std::string> families;
  for (const char* model : {"alexnet",           "bert-tiny",
                            "bloom-560m",        "command-r",
                            "deepseek-tiny",     "deepseek-v2-lite",
                            "dlrm-tiny",         "falcon-7b",
                            "gemma-2b",          "gemma-2-2b",
                            "gemma-3-1b",        "gemma-3-4b",
                            "glm-4-9b",          "gpt-j-6b",
                            "gpt2-tiny",         "granite-3.1-2b",
                            "llama-2-7b",        "llama-3.2-1b",
                            "mistral-7b",        "mixtral-tiny",
                            "nmt-tiny",          "olmo-1b",
                            "olmo-2-7b",         "opt-125m",
                            "opt-350m",          "phi-2",
                            "phi-3-mini",        "pythia-1b",
                            "qwen1.5-moe-a2.7b", "qwen2-7b",
                            "qwen3-30b-a3b",     "qwen3-8b",
                            "resnet-tiny",       "resnext-50",
                            "rnn-tiny",          "rnntc",
                            "smollm3-3b",        "stablelm-3b",
                            "starcoder2-3b",     "t5-tiny",
                            "vit-22b",           "vit-tiny"}) {
    const std::string path = std::string("zoo:") + model;
    families.insert(ReadModelConfig(path)->Field("model_type").text);
    ExpectRoundTrip(path, HasNoSequence(path) ? 0 : 16);
  }
  for (const ModelFamily& family : ModelFamilies()) {
    EXPECT_TRUE(families.contains(std::string(family.name))) << family.name;
  }
}

TEST(GraphIo, RoundTripOfOnnxFiles) {
  int files = 0;
  for (const auto& file :
       std::filesystem::directory_iterator(TestdataPath("onnx"))) {
    if (file.path().extension() != ".onnx") continue;
    ExpectRoundTrip(file.path().string(), 16);
    ++files;
  }
  EXPECT_GE(files, 12);
}

// y = dropout(lookup(ids)), then the loss; small enough to break by hand.
constexpr char kText[] = R"(schema_version: 1
name: "toy"
global_batch: 2
seq_len: 3
dtype: "fp32"
blocks: "main"
tensors { name: "ids" kind: TENSOR_KIND_INPUT shape: [2, 3] dtype: "int32"
          sample_dim: 0 }
tensors { name: "w" kind: TENSOR_KIND_WEIGHT shape: [5, 4] dtype: "fp32"
          init { stddev: 0.5 } }
tensors { name: "x" kind: TENSOR_KIND_ACTIVATION shape: [2, 3, 4]
          dtype: "fp32" sample_dim: 0 }
tensors { name: "y" kind: TENSOR_KIND_ACTIVATION shape: [2, 3, 4]
          dtype: "fp32" sample_dim: 0 }
tensors { name: "n" kind: TENSOR_KIND_ACTIVATION dtype: "fp32" }
nodes { name: "x" op: "embedding" operands: ["ids", "w"] results: "x"
        block: "main" }
nodes { name: "y" op: "gelu" rule: "bsh->bsh" operands: "x" results: "y"
        block: "main" }
nodes { name: "n" op: "count_labels" operands: "ids" results: "n"
        block: "main" }
loss: "n"
)";

// The error of kText with `from` replaced by `to`.
std::string ErrorWith(const std::string& from, const std::string& to) {
  std::string text = kText;
  const size_t at = text.find(from);
  TESSERA_CHECK(at != std::string::npos) << from;
  text.replace(at, from.size(), to);
  const std::string path = Path(".txtpb");
  std::ofstream(path) << text;
  const auto graph = ReadGraph(path);
  if (graph.has_value()) return "";
  EXPECT_THAT(graph.error().where, HasSubstr(path));
  return graph.error().ToString();
}

TEST(GraphIo, HandWrittenFileIsRead) {
  EXPECT_EQ(ErrorWith("toy", "toys"), "");
}

TEST(GraphIo, EveryTruncationIsAnError) {
  const std::string whole = kText;
  const std::string path = Path(".txtpb");
  // The last prefix lacks the newline and the closing quote.
  for (size_t length = 0; length + 2 <= whole.size(); length += 3) {
    std::ofstream(path) << whole.substr(0, length);
    EXPECT_FALSE(ReadGraph(path).has_value()) << length;
  }
}

TEST(GraphIo, EveryTruncationOfABinaryFileIsAnError) {
  const std::string path = Path(".pb");
  ASSERT_TRUE(WriteGraph(path, RandomGraph(1)).has_value());
  const std::string whole = *ReadFile(path);
  for (size_t length = 0; length < whole.size(); length += 3) {
    std::ofstream(path, std::ios::binary) << whole.substr(0, length);
    EXPECT_FALSE(ReadGraph(path).has_value()) << length;
  }
}

TEST(GraphIo, Cycle) {
  // x reads y, which reads x.
  const std::string error =
      ErrorWith(R"(op: "embedding" operands: ["ids", "w"])",
                R"(op: "gelu" rule: "bsh->bsh"
                                         operands: "y")");
  EXPECT_THAT(error, HasSubstr("nodes[0]"));
  EXPECT_THAT(error, HasSubstr("cycle"));
}

TEST(GraphIo, UnknownNames) {
  EXPECT_THAT(ErrorWith("\"gelu\"", "\"gelo\""),
              HasSubstr("nodes[1].op: unknown operator 'gelo'; did you mean "
                        "'gelu'?"));
  EXPECT_THAT(ErrorWith(R"(["ids", "w"])", R"(["ids", "z"])"),
              HasSubstr("nodes[0].operands[1]: unknown tensor 'z'"));
  EXPECT_THAT(ErrorWith(R"(results: "y")", R"(results: "yy")"),
              HasSubstr("nodes[1].results[0]: unknown tensor 'yy'; did you "
                        "mean 'y'?"));
  EXPECT_THAT(ErrorWith(R"(block: "main" })", R"(block: "mein" })"),
              HasSubstr("nodes[0].block: unknown block 'mein'; did you mean "
                        "'main'?"));
  EXPECT_THAT(ErrorWith(R"(loss: "n")", R"(loss: "m")"),
              HasSubstr("loss: unknown tensor 'm'"));
  EXPECT_THAT(ErrorWith("seq_len: 3", "seq_length: 3"),
              HasSubstr(".txtpb:4:11: unknown field 'seq_length'; did you mean "
                        "'seq_len'?"));
  EXPECT_THAT(ErrorWith(R"(dtype: "fp32")", R"(dtype: "fp31")"),
              HasSubstr("dtype: unknown dtype 'fp31'"));
  EXPECT_THAT(ErrorWith(R"(rule: "bsh->bsh")",
                        R"(rule: "bsh->bsh" attributes { name: "p" })"),
              HasSubstr("nodes[1].attributes[0]: unknown attribute 'p'"));
}

TEST(GraphIo, ShapesDisagree) {
  // The table is 5 by 4, so x has a width of 4.
  EXPECT_THAT(ErrorWith("[2, 3, 4]", "[2, 3, 6]"), HasSubstr("nodes[0]"));
  EXPECT_THAT(ErrorWith("[5, 4]", "[5, 0]"),
              HasSubstr("tensors[1].shape: has the extent 0"));
  EXPECT_THAT(ErrorWith("[5, 4]", "[5000000000, 4000000000]"),
              HasSubstr("tensors[1].shape: has more than 2^50 elements"));
  EXPECT_THAT(ErrorWith("global_batch: 2", "global_batch: 4"),
              HasSubstr("tensors[0].sample_dim: has extent 2: expected the "
                        "global batch 4"));
}

// Throughput is counted by it.
TEST(GraphIo, TheSequenceIsThatOfTheInputs) {
  for (const char* wrong : {"seq_len: 6", "seq_len: 2"}) {
    EXPECT_THAT(ErrorWith("seq_len: 3", wrong),
                HasSubstr("tensors[0].shape: 'ids' has 3 places: expected "
                          "seq_len, " +
                          std::string(wrong).substr(9)));
  }
  // Under no name that says so they may be something else.
  EXPECT_EQ(ErrorWith("seq_len: 3", "seq_len: 1"), "");
  ImportOptions options;
  options.global_batch = 2;
  options.seq_len = 16;
  const auto graph = ImportModel("zoo:gpt2-tiny", options);
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  Graph wrong = *graph;
  for (const int64_t length : {1, 8, 32}) {
    wrong.seq_len = length;
    const std::string path = Path(".json");
    ASSERT_TRUE(WriteGraph(path, wrong).has_value());
    const auto read = ReadGraph(path);
    ASSERT_FALSE(read.has_value());
    EXPECT_EQ(read.error().ToString(),
              path +
                  ": tensors[0].shape: 'tokens' has 16 places: expected "
                  "seq_len, " +
                  std::to_string(length));
  }
}

TEST(GraphIo, FilesOfOtherKinds) {
  const std::string path = Path(".pb");
  const auto error = [&] {
    ::testing::internal::CaptureStderr();
    const auto graph = ReadGraph(path);
    EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
    return graph ? "" : graph.error().ToString();
  };
  ASSERT_TRUE(WriteCluster(path, *MakeCluster("dgx-h100:1")).has_value());
  EXPECT_EQ(error(), path + ": is a cluster: expected a binary Graph");
  std::filesystem::copy_file(TestdataPath("onnx/mlp.onnx"), path,
                             std::filesystem::copy_options::overwrite_existing);
  EXPECT_EQ(error(), path + ": is an ONNX model: expected a binary Graph");
  // Field 2 of three bytes, which are no UTF-8.
  std::ofstream(path, std::ios::binary) << "\x12\x03\xff\xfe\xfd";
  EXPECT_EQ(error(), path +
                         ": not a whole binary Graph: of another kind, "
                         "truncated or garbage");
  // A graph is one, whatever else is in it.
  std::ofstream(path, std::ios::binary) << "\x08\x01\x78\x01";
  EXPECT_EQ(error(), path + ": unknown field number 15 of Graph");
}

TEST(GraphIo, AByteOrderMarkIsNoText) {
  const std::string text = Path(".txtpb");
  std::ofstream(text) << "\xef\xbb\xbf" << kText;
  const auto graph = ReadGraph(text);
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  const std::string json = Path(".json");
  ASSERT_TRUE(WriteGraph(json, *graph).has_value());
  const std::string bytes = *ReadFile(json);
  std::ofstream(json) << "\xef\xbb\xbf" << bytes;
  EXPECT_TRUE(IsGraphFile(json));
  EXPECT_TRUE(ReadGraph(json).has_value());
}

TEST(GraphIo, RulesThatAreNotTheOperators) {
  EXPECT_THAT(
      ErrorWith(R"(op: "count_labels")", R"(op: "count_labels" rule: "xy->")"),
      HasSubstr("nodes[2].rule: is 'xy->': expected count_labels's "
                "own, 'bs->'"));
  EXPECT_THAT(ErrorWith(R"(rule: "bsh->bsh")", ""),
              HasSubstr("nodes[1].rule: missing"));
  EXPECT_THAT(ErrorWith(R"(op: "gelu")", R"(op: "gelu_dx")"),
              HasSubstr("nodes[1].op: 'gelu_dx' is not a forward operator"));
  EXPECT_THAT(ErrorWith(R"(operands: "x")", R"(operands: ["x", "x"])"),
              HasSubstr("nodes[1].operands: has 2: expected 1"));
  // Kernels would walk x in the order of y.
  EXPECT_THAT(ErrorWith(R"(rule: "bsh->bsh")", R"(rule: "bsh->sbh")"),
              HasSubstr("rule 'bsh->sbh' is not of the form of gelu: one "
                        "operand, with the indices of the result"));
}

// ---- operators of a file's own

constexpr const char* kScan = R"(operators {
  name: "scan" rule: "bsh!,h->bsh" flops_per_point: 6
  backward_reads_result: true
})";

// kText with `definition` and a "scan" for its "gelu".
std::string WithOwn(const std::string& definition) {
  std::string text = kText;
  const std::string gelu = R"(op: "gelu" rule: "bsh->bsh" operands: "x")";
  const size_t at = text.find(gelu);
  TESSERA_CHECK(at != std::string::npos);
  text.replace(at, gelu.size(), R"(op: "scan" operands: ["x", "v"])");
  text += R"(tensors { name: "v" kind: TENSOR_KIND_WEIGHT shape: [4]
                       dtype: "fp32" })";
  return text + definition;
}

Result<Graph> ReadText(const std::string& text) {
  const std::string path = Path(".txtpb");
  std::ofstream(path) << text;
  return ReadGraph(path);
}

TEST(GraphIo, OwnOperator) {
  const auto graph = ReadText(WithOwn(kScan));
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  const OpDef& scan = *graph->nodes[1].op;
  EXPECT_EQ(scan.name, "scan");
  ASSERT_EQ(scan.adjoints.size(), 2u);
  EXPECT_EQ(scan.adjoints[1].signature, "dy0,x0,x1,y0->dx1");
  const auto gradient = FindOp(scan.adjoints[1].op);
  ASSERT_TRUE(gradient.has_value());
  EXPECT_EQ((*gradient)->flops_per_point, 6);
  EXPECT_EQ(OwnOpOf(**gradient), OwnOpOf(scan));
  EXPECT_EQ(OwnOpOf(*graph->nodes[0].op), nullptr);
  // 2 x 3 x 4 points: 6 FLOPs each forward, and for each of two gradients.
  EXPECT_EQ(ModelFlops(*graph, false).value, 24 * 6 * 3);
  for (const char* ending : {".txtpb", ".json", ".pb"}) {
    const std::string path = Path(ending);
    ASSERT_TRUE(WriteGraph(path, *graph).has_value());
    const auto read = ReadGraph(path);
    ASSERT_TRUE(read.has_value()) << read.error().ToString();
    EXPECT_EQ(*read, *graph) << ending;
  }
}

// A layer that was timed as a whole, and a loss.
constexpr const char* kMeasured = R"(
schema_version: 1 name: "measured" global_batch: 8 seq_len: 1 dtype: "fp32"
operators { name: "timed" rule: "ba!,tp!->bo!,btm!" exchanged: "t"
            flops_per_point: 1 one_backward: true forward_operands: 0 }
operators { name: "timed_loss" rule: "ba!,q!->" one_backward: true }
blocks: ["h.0", "head"]
tensors { name: "x" kind: TENSOR_KIND_INPUT shape: [8, 3] dtype: "fp32"
          sample_dim: 0 }
tensors { name: "w" kind: TENSOR_KIND_WEIGHT shape: [4, 5] dtype: "fp32" }
tensors { name: "v" kind: TENSOR_KIND_WEIGHT shape: [7] dtype: "fp32" }
tensors { name: "y" kind: TENSOR_KIND_ACTIVATION shape: [8, 3] dtype: "fp32"
          sample_dim: 0 }
tensors { name: "kept" kind: TENSOR_KIND_ACTIVATION shape: [8, 4, 6]
          dtype: "fp32" sample_dim: 0 }
tensors { name: "loss" kind: TENSOR_KIND_ACTIVATION dtype: "fp32" }
nodes { name: "h.0" op: "timed" operands: ["x", "w"] results: ["y", "kept"]
        block: "h.0" }
nodes { name: "loss" op: "timed_loss" operands: ["y", "v"] results: "loss"
        block: "head" }
loss: "loss"
)";

TEST(GraphIo, MeasuredLayers) {
  const auto graph = ReadText(kMeasured);
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  const Node& layer = graph->nodes[0];
  // What backward needs of x is kept; one call makes all gradients.
  ASSERT_EQ(layer.op->adjoints.size(), 1u);
  EXPECT_EQ(layer.op->adjoints[0].op, "timed_d");
  EXPECT_EQ(layer.op->adjoints[0].signature, "dy0,x1,y1->dx0,dx1");
  EXPECT_EQ(layer.op->exchanged, "t");
  // The loss has no gradient that it could read.
  EXPECT_EQ(graph->nodes[1].op->adjoints[0].signature, "x0,x1->dx0,dx1");
  // 8 * 3 * 4 * 5 * 3 * 6 points; backward as much for each of two gradients.
  EXPECT_EQ(ModelFlops(*graph).value, 3 * 8640);
  const auto differentiated = Differentiate(*graph);
  ASSERT_TRUE(differentiated.has_value());
  const Node& backward = differentiated->nodes.back();
  EXPECT_EQ(backward.rule.ToString(), "bo!,tp!,btm!->ba!,tp");
  EXPECT_EQ(differentiated->gradients.size(), 2u);
  for (const char* ending : {".txtpb", ".json", ".pb"}) {
    const std::string path = Path(ending);
    ASSERT_TRUE(WriteGraph(path, *graph).has_value());
    const auto read = ReadGraph(path);
    ASSERT_TRUE(read.has_value()) << read.error().ToString();
    EXPECT_EQ(*read, *graph) << ending;
  }
}

TEST(GraphIo, MeasuredLayersThatAreWrong) {
  const auto with = [](const std::string& from, const std::string& to) {
    std::string text = kMeasured;
    // Other operators than those of the file above, under other names.
    for (size_t at = 0; (at = text.find("timed", at)) != std::string::npos;) {
      text.replace(at, 5, "wrong");
      at += 5;
    }
    const size_t at = text.find(from);
    TESSERA_CHECK(at != std::string::npos) << from;
    text.replace(at, from.size(), to);
    const auto graph = ReadText(text);
    return graph.has_value() ? "" : graph.error().ToString();
  };
  EXPECT_THAT(with("exchanged: \"t\"", "exchanged: \"z\""),
              HasSubstr("operators[0].exchanged: names 'z': expected factors "
                        "of the rule that can be split"));
  EXPECT_THAT(with("exchanged: \"t\"", "exchanged: \"a\""),
              HasSubstr("operators[0].exchanged: names 'a'"));
  EXPECT_THAT(with("forward_operands: 0", "forward_operands: 2"),
              HasSubstr("operators[0].forward_operands: names operand 2: the "
                        "rule has 2"));
  EXPECT_THAT(with("forward_operands: 0", "forward_operands: -1"),
              HasSubstr("operators[0].forward_operands: names operand -1"));
  EXPECT_THAT(with("operands: [\"y\", \"v\"]", "operands: [\"kept\", \"v\"]"),
              HasSubstr("nodes[1] 'loss': reads 'kept', which an operator "
                        "keeps for its own gradients"));
}

TEST(GraphIo, OwnOperatorThatIsWrong) {
  const auto with = [](const std::string& from, const std::string& to) {
    std::string definition = kScan;
    const size_t at = definition.find(from);
    TESSERA_CHECK(at != std::string::npos) << from;
    definition.replace(at, from.size(), to);
    const auto graph = ReadText(WithOwn(definition));
    return graph.has_value() ? "" : graph.error().ToString();
  };
  EXPECT_THAT(with("\"scan\"", "\"gelu\""),
              HasSubstr("operators[0].name: 'gelu' is an operator already"));
  EXPECT_THAT(
      with("\"scan\"", "\"Scan\""),
      HasSubstr("operators[0].name: is 'Scan': expected small letters"));
  EXPECT_THAT(with("bsh!,h->bsh", "bsh!,h"), HasSubstr("operators[0].rule"));
  EXPECT_THAT(with("bsh!,h->bsh", "bsh!,h->bshv"),
              HasSubstr("operators[0].rule: is 'bsh!,h->bshv', of whose "
                        "operands none has 'v': expected one that has it, or "
                        "'v!' in the result"));
  EXPECT_THAT(with("6", "-6"), HasSubstr("operators[0].flops_per_point"));
  EXPECT_THAT(with("6", "nan"), HasSubstr("operators[0].flops_per_point"));
  EXPECT_THAT(with("6", "6 integer_operands: 2"),
              HasSubstr("integer_operands: names operand 2: the rule has 2"));
  EXPECT_THAT(with("6", "6 integer_operands: -1"),
              HasSubstr("operators[0].integer_operands: names operand -1: "
                        "they count from 0"));
  EXPECT_THAT(with("operators",
                   "operators { name: \"other\" rule: "
                   "\"b->b\" } operators"),
              "");
  EXPECT_THAT(with("}", std::string("} ") + kScan),
              HasSubstr("operators[1].name: 'scan' occurs twice"));
  // What another file describes is unknown here.
  EXPECT_THAT(with("\"scan\"", "\"scans\""),
              HasSubstr("nodes[1].op: unknown operator 'scan'; did you mean "
                        "'scans'?"));
}

TEST(GraphIo, OwnOperatorOfIntegers) {
  std::string text = WithOwn(kScan);
  for (size_t at = 0; (at = text.find("\"scan\"", at)) != std::string::npos;) {
    text.replace(at, 6, "\"scan_ids\"");
  }
  ASSERT_TRUE(ReadText(text).has_value());
  const size_t at = text.find("rule: \"bsh!,h->bsh\"");
  text.insert(at, "integer_operands: 0 ");
  const size_t name = text.find("\"scan_ids\"");
  for (size_t i = name; i != std::string::npos;
       i = text.find("\"scan_ids\"", i)) {
    text.replace(i, 10, "\"scan_of_ids\"");
  }
  EXPECT_THAT(ReadText(text).error().ToString(),
              HasSubstr("'x' is fp32; here a graph of fp32 has int32"));
}

TEST(GraphIo, AttributesHaveRanges) {
  const auto with = [](const std::string& node) {
    return ErrorWith(R"(op: "gelu" rule: "bsh->bsh")", node);
  };
  EXPECT_THAT(with(R"(op: "dropout" rule: "bsh->bsh"
                      attributes { name: "probability" value: 1 }
                      attributes { name: "salt" value: 0 })"),
              HasSubstr("nodes[1].attributes[0]: 'probability' is 1: expected "
                        "a finite number of at least 0 and at most 0.999999"));
  EXPECT_THAT(with(R"(op: "dropout" rule: "bsh->bsh"
                      attributes { name: "probability" value: 0.5 }
                      attributes { name: "salt" value: 0.5 })"),
              HasSubstr("'salt' is 0.5: expected a whole number"));
  EXPECT_THAT(with(R"(op: "dropout" rule: "bsh->bsh"
                      attributes { name: "probability" value: nan }
                      attributes { name: "salt" value: 0 })"),
              HasSubstr("'probability' is nan"));
}

TEST(GraphIo, RotaryTurnsPairs) {
  // 0.75 * 4 features cannot be turned in pairs.
  EXPECT_THAT(
      ErrorWith(R"(op: "gelu" rule: "bsh->bsh" operands: "x")",
                R"(op: "rotary" rule: "bsh!,bs->bsh" operands: ["x", "ids"]
                   attributes { name: "fraction" value: 0.75 }
                   attributes { name: "theta" value: 10000 })"),
      HasSubstr("turns 3 of 4 features: expected an even number"));
}

TEST(GraphIo, ElementTypesFollowFromTheGraphs) {
  EXPECT_THAT(ErrorWith(R"("int32")", R"("fp32")"),
              HasSubstr("nodes[0] 'x': 'ids' is fp32; here a graph of fp32 has "
                        "int32"));
  EXPECT_THAT(ErrorWith(R"(dtype: "fp32"
          init)",
                        R"(dtype: "int32"
          init)"),
              HasSubstr("nodes[0] 'x': 'w' is int32; here a graph of fp32 has "
                        "fp32"));
  EXPECT_THAT(
      ErrorWith(R"(ACTIVATION dtype: "fp32")", R"(ACTIVATION dtype: "fp64")"),
      HasSubstr("nodes[2] 'n': 'n' is fp64"));
}

TEST(GraphIo, SampleDimensionsFollowFromTheRules) {
  // Microbatches would cut the ids, but not x.
  EXPECT_THAT(ErrorWith(R"(shape: [2, 3, 4]
          dtype: "fp32" sample_dim: 0)",
                        R"(shape: [2, 3, 4]
          dtype: "fp32")"),
              HasSubstr("nodes[0] 'x': 'x' has the sample dimension -1 (-1: "
                        "none); by the rule 'bs,vh->bsh' it is 0"));
}

TEST(GraphIo, TensorsAreProducedOnce) {
  EXPECT_THAT(ErrorWith(R"(results: "y")", R"(results: "x")"),
              HasSubstr("tensors[3]: no node produces 'y'"));
  EXPECT_THAT(ErrorWith(R"(name: "w")", R"(name: "ids")"),
              HasSubstr("tensors[1].name: 'ids' occurs twice"));
}

TEST(GraphIo, OptionsThatDisagreeWithTheFile) {
  const std::string path = Path(".txtpb");
  std::ofstream(path) << kText;
  ImportOptions options;
  options.global_batch = 3;
  const auto graph = ImportModel(path, options);
  ASSERT_FALSE(graph.has_value());
  EXPECT_THAT(graph.error().ToString(),
              HasSubstr("global_batch: the graph has 2, not 3"));
}

}  // namespace
}  // namespace tessera
