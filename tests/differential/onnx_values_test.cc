// Nodes have the values that ONNX's standard says, or are refused: such as of
// what is repeated, implicitly or by an Expand. Small files are run and held
// against sums that stand beside them, or against nodes in other words.

#include "tests/support/onnx_values.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "planner/base/element_count.h"
#include "planner/base/file.h"
#include "planner/io/published_weights.h"
#include "tests/support/onnx_bytes.h"
#include "tests/support/temp_path.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kSamples = 3;
constexpr int64_t kFeatures = 4;

double InputAt(int64_t i, int64_t f) {
  return 0.5 * static_cast<double>(i) - 0.25 * static_cast<double>(f) + 0.125;
}

// A tensor of the file: elements that differ from each other.
double WeightAt(int64_t i) {
  return 0.375 + 0.0625 * static_cast<double>(i * i % 7) -
         0.125 * static_cast<double>(i % 3);
}
Message Weights(const std::string& name, const Shape& shape) {
  const int64_t count = ElementCount(shape);
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) {
    values.push_back(static_cast<float>(WeightAt(i)));
  }
  return FloatsOf(name, shape, values);
}

// "logits" of nodes that read "x" [samples, features].
Result<std::vector<double>> Computed(std::vector<Message> weights,
                                     std::vector<Message> nodes) {
  Parts parts;
  parts.inputs = {InputOf("x", 1, {"n", "4"})};
  parts.weights = std::move(weights);
  parts.nodes = std::move(nodes);
  const std::string path = TempPath("values.onnx");
  TESSERA_RETURN_IF_ERROR(WriteFileAtomically(path, BytesOf(parts)));
  ImportOptions options;
  options.global_batch = kSamples;
  TESSERA_TRY(const OnnxComputation made, ImportOnnxComputation(path, options));
  TESSERA_TRY(const auto tensors,
              ComputeOnnx(made, path, [&](TensorId, HostTensor& x) {
                for (int64_t i = 0; i < x.elements(); ++i) {
                  x.Set(i, InputAt(i / kFeatures, i % kFeatures));
                }
                return Result<void>();
              }));
  return ValuesOf(made.outputs[0], tensors);
}

void ExpectValues(const Result<std::vector<double>>& computed,
                  const std::function<double(int64_t i, int64_t f)>& expected,
                  int64_t columns = kFeatures) {
  ASSERT_TRUE(computed.has_value()) << computed.error().ToString();
  ASSERT_EQ(std::ssize(*computed), kSamples * columns);
  for (int64_t at = 0; at < std::ssize(*computed); ++at) {
    EXPECT_NEAR((*computed)[static_cast<size_t>(at)],
                expected(at / columns, at % columns), 1e-5)
        << at;
  }
}

std::string Refusal(const Result<std::vector<double>>& computed) {
  return computed ? "computed" : computed.error().ToString();
}

// "logits" = x + "r".
Message Added() {
  return NodeOf("Add", "add", {"x", "r"}, "logits");
}
Message Summed(const std::string& from, const std::string& to) {
  return NodeOf("ReduceSum", "sum", {from, "first"}, to,
                {IntAttribute("keepdims", 1)});
}
Message Expanded(const std::string& from, const std::string& to) {
  return NodeOf("Expand", "expand_" + from, {from, "shape"}, to);
}

TEST(OnnxValues, RowsThatAreRepeatedForSamplesAreAddedToEach) {
  for (const Shape& shape : {Shape{1, 4}, Shape{4}}) {
    ExpectValues(
        Computed({Weights("k", shape), IntsOf("shape", {kSamples, 4})},
                 {Expanded("k", "r"), Added()}),
        [](int64_t i, int64_t f) { return InputAt(i, f) + WeightAt(f); });
  }
  // What is repeated stays so where it meets its like.
  ExpectValues(Computed({Weights("k", {1, 4}), Weights("m", {4}),
                         IntsOf("shape", {kSamples, 4})},
                        {Expanded("k", "kk"), Expanded("m", "mm"),
                         NodeOf("Mul", "product", {"kk", "mm"}, "r"), Added()}),
               [](int64_t i, int64_t f) {
                 return InputAt(i, f) + WeightAt(f) * WeightAt(f);
               });
}

TEST(OnnxValues, AnExpandMayKeepExtentsAndHaveFewerDimensions) {
  for (const std::vector<int64_t>& to :
       {std::vector<int64_t>{1, 1}, {1, 4}, {1}, {4}}) {
    ExpectValues(
        Computed({Weights("k", {1, 4}), IntsOf("shape", to)},
                 {Expanded("k", "r"), Added()}),
        [](int64_t i, int64_t f) { return InputAt(i, f) + WeightAt(f); });
  }
}

// Five equal rows are not one.
TEST(OnnxValues, ASumOfRepeatedRowsIsRefused) {
  for (const Shape& shape : {Shape{1, 4}, Shape{4}}) {
    for (const int64_t rows : {5, 3}) {  // other than samples, and as many
      EXPECT_THAT(
          Refusal(Computed({Weights("k", shape), IntsOf("shape", {rows, 4}),
                            IntsOf("first", {0})},
                           {Expanded("k", "kk"), Summed("kk", "r"), Added()})),
          HasSubstr("that an Expand repeats"));
    }
  }
  for (const char* op : {"ReduceMax", "ReduceMean", "Softmax", "LogSoftmax"}) {
    const bool axis = std::string(op).ends_with("Softmax");
    const std::vector<Message> nodes = {
        NodeOf("Unsqueeze", "u", {"x", "first"}, "u"),
        NodeOf("Expand", "e", {"u", "shape"}, "e"),
        axis ? NodeOf(op, "r", {"e"}, "r", {IntAttribute("axis", 0)})
             : NodeOf(op, "r", {"e"}, "r"),
        NodeOf("Add", "add", {"r", "x"}, "logits")};
    EXPECT_THAT(
        Refusal(Computed(
            {IntsOf("shape", {5, kSamples, 4}), IntsOf("first", {0})}, nodes)),
        HasSubstr("that an Expand repeats"))
        << op;
  }
}

TEST(OnnxValues, RepeatedRowsOfAProductAreItsColumns) {
  // Behind what gives each column a number of its own.
  ExpectValues(
      Computed(
          {Weights("k", {1, 4}), Weights("c", {5}), IntsOf("shape", {5, 4})},
          {Expanded("k", "kk"), NodeOf("Transpose", "turn", {"kk"}, "kt"),
           NodeOf("MatMul", "product", {"x", "kt"}, "p"),
           NodeOf("Add", "add", {"p", "c"}, "logits")}),
      [](int64_t i, int64_t column) {
        double sum = WeightAt(column);
        for (int64_t f = 0; f < 4; ++f) sum += InputAt(i, f) * WeightAt(f);
        return sum;
      },
      5);
  // As the result they would be a tensor that no one has.
  EXPECT_THAT(
      Refusal(Computed(
          {Weights("k", {1, 4}), IntsOf("shape", {5, 4})},
          {Expanded("k", "kk"), NodeOf("Transpose", "turn", {"kk"}, "kt"),
           NodeOf("MatMul", "product", {"x", "kt"}, "logits")})),
      HasSubstr("output 'logits': reads along a dimension that an Expand"));
  // And summed over they count as often as they are there.
  EXPECT_THAT(
      Refusal(Computed(
          {Weights("k", {1, 4}), IntsOf("shape", {kSamples, 5, 4}),
           IntsOf("middle", {1}), Weights("c", {1, 5})},
          {NodeOf("Unsqueeze", "u", {"x", "middle"}, "u"), Expanded("u", "e"),
           NodeOf("MatMul", "product", {"c", "e"}, "p"),
           NodeOf("Squeeze", "s", {"p", "middle"}, "logits")})),
      HasSubstr("that an Expand repeats"));
}

TEST(OnnxValues, RepeatedPlacesMeetTheirNumbers) {
  // Sum over j of x[i, f] m[j, f].
  ExpectValues(
      Computed({Weights("m", {5, 4}), IntsOf("shape", {1, 5, 1}),
                IntsOf("first", {1})},
               {NodeOf("Unsqueeze", "u", {"x", "first"}, "u"),
                Expanded("u", "e"), NodeOf("Mul", "mul", {"e", "m"}, "em"),
                NodeOf("ReduceSum", "sum", {"em", "first"}, "logits",
                       {IntAttribute("keepdims", 0)})}),
      [](int64_t i, int64_t f) {
        double sum = 0;
        for (int64_t j = 0; j < 5; ++j) sum += WeightAt(4 * j + f);
        return InputAt(i, f) * sum;
      });
}

// Learned queries: a layer and a norm of what is the same for all samples.
TEST(OnnxValues, LayersReadWhatIsRepeatedForSamples) {
  const auto product = [](int64_t q, int64_t o) {
    double sum = 0;
    for (int64_t f = 0; f < 4; ++f) {
      sum += WeightAt(4 * q + f) * WeightAt(4 * f + o);
    }
    return sum;
  };
  const auto summed = Computed(
      {Weights("queries", {1, 2, 4}), Weights("w", {4, 4}),
       IntsOf("shape", {kSamples, 2, 4}), IntsOf("middle", {1})},
      {Expanded("queries", "q"), NodeOf("MatMul", "p", {"q", "w"}, "p"),
       NodeOf("Unsqueeze", "u", {"x", "middle"}, "u"),
       NodeOf("Add", "with", {"p", "u"}, "pu"),
       NodeOf("ReduceSum", "sum", {"pu", "middle"}, "logits",
              {IntAttribute("keepdims", 0)})});
  ExpectValues(summed, [&](int64_t i, int64_t f) {
    return 2 * InputAt(i, f) + product(0, f) + product(1, f);
  });
}

// Class tokens, prompts: tokens that are the same for all samples beside those
// of each, [samples, tokens, features], joined as they are named.
TEST(OnnxValues, WhatIsTheSameForAllSamplesIsJoinedToEach) {
  const auto joined = [](const std::vector<std::string>& tokens,
                         const Message& repeat) {
    return Computed(
        {Weights("k", {1, 2, 4}), Weights("m", {4}),
         IntsOf("two", {kSamples, 2, 4}), IntsOf("one", {kSamples, 1, 4}),
         IntsOf("times", {kSamples, 1, 1}), IntsOf("middle", {1}),
         IntsOf("flat", {0, -1})},
        {NodeOf("Unsqueeze", "u", {"x", "middle"}, "u"), repeat,
         NodeOf("Expand", "second", {"m", "one"}, "mm"),
         NodeOf("Concat", "tokens", tokens, "tokens",
                {IntAttribute("axis", 1)}),
         NodeOf("Reshape", "flat", {"tokens", "flat"}, "logits")});
  };
  const Message expand = NodeOf("Expand", "first", {"k", "two"}, "kk");
  for (const Message& repeat :
       {expand, NodeOf("Tile", "first", {"k", "times"}, "kk")}) {
    ExpectValues(
        joined({"kk", "u", "mm"}, repeat),
        [](int64_t i, int64_t f) {
          return f < 8    ? WeightAt(f)
                 : f < 12 ? InputAt(i, f - 8)
                          : WeightAt(f - 12);
        },
        16);
  }
  ExpectValues(
      joined({"u", "mm"}, expand),
      [](int64_t i, int64_t f) {
        return f < 4 ? InputAt(i, f) : WeightAt(f - 4);
      },
      8);
}

// Two tokens that meet each other first, as those of DeiT.
TEST(OnnxValues, AJointOfWhatIsRepeatedIsRepeated) {
  ExpectValues(
      Computed(
          {Weights("k", {1, 1, 4}), Weights("m", {1, 2, 4}),
           IntsOf("one", {kSamples, 1, 4}), IntsOf("two", {kSamples, 2, 4}),
           IntsOf("middle", {1}), IntsOf("flat", {0, -1})},
          {NodeOf("Expand", "first", {"k", "one"}, "kk"),
           NodeOf("Expand", "second", {"m", "two"}, "mm"),
           NodeOf("Concat", "both", {"kk", "mm"}, "both",
                  {IntAttribute("axis", 1)}),
           NodeOf("Unsqueeze", "u", {"x", "middle"}, "u"),
           NodeOf("Concat", "all", {"both", "u"}, "all",
                  {IntAttribute("axis", 1)}),
           NodeOf("Reshape", "flat", {"all", "flat"}, "logits")}),
      [](int64_t i, int64_t f) {
        return f < 4    ? WeightAt(f)
               : f < 12 ? WeightAt(f - 4)
                        : InputAt(i, f - 12);
      },
      16);
}

TEST(OnnxValues, RowsOfTheFileForEachSampleAreNotJoined) {
  EXPECT_THAT(Refusal(Computed({Weights("k", {kSamples, 4})},
                               {NodeOf("Concat", "joint", {"k", "x"}, "logits",
                                       {IntAttribute("axis", 1)})})),
              HasSubstr("node 'joint' (Concat): a tensor that no input makes "
                        "has a dimension of 3 places beside samples"));
}

// A row that PyTorch's newer exporter wrote for each sample, as it does where
// it is given their number, is one weight.
TEST(OnnxValues, EqualRowsOfAFoldedParameterAreOne) {
  const auto joined = [](float last) {
    Parts parts;
    parts.inputs = {InputOf("x", 1, {"n", "4"})};
    parts.weights = {
        FloatsOf("cls", {kSamples, 2}, {0.5, 0.25, 0.5, 0.25, 0.5, last})};
    parts.values = {Message().Text(1, "cls").Add(
        4, NoteOf("pkg.onnxscript.optimizer.folded_from", "['token']"))};
    parts.notes = {NoteOf("pkg.torch.export.ExportedProgram.graph_signature",
                          "p_token: PARAMETER target='token'\n")};
    parts.nodes = {NodeOf("Concat", "joint", {"cls", "x"}, "logits",
                          {IntAttribute("axis", 1)})};
    return parts;
  };
  const std::string path = TempPath("rows.onnx");
  ImportOptions options;
  options.global_batch = kSamples;
  ASSERT_TRUE(WriteFileAtomically(path, BytesOf(joined(0.25))).has_value());
  const auto made = ImportOnnxComputation(path, options);
  ASSERT_TRUE(made.has_value()) << made.error().ToString();
  EXPECT_EQ(ParameterCount(made->graph), 2);
  // Written back, all rows are there.
  ASSERT_EQ(made->layout.pieces.size(), 1u);
  std::vector<int64_t> offsets;
  for (const PublishedPiece& piece : made->layout.pieces.begin()->second) {
    EXPECT_EQ(piece.tensor, "cls");
    EXPECT_EQ(piece.begin, 0);
    EXPECT_EQ(piece.count, 2);
    offsets.push_back(piece.offset);
  }
  EXPECT_THAT(offsets, ::testing::UnorderedElementsAre(0, 2, 4));
  const auto tensors = ComputeOnnx(*made, path, [](TensorId, HostTensor& x) {
    for (int64_t i = 0; i < x.elements(); ++i) {
      x.Set(i, InputAt(i / kFeatures, i % kFeatures));
    }
    return Result<void>();
  });
  ASSERT_TRUE(tensors.has_value()) << tensors.error().ToString();
  ExpectValues(
      ValuesOf(made->outputs[0], *tensors),
      [](int64_t i, int64_t f) {
        return f == 0 ? 0.5 : f == 1 ? 0.25 : InputAt(i, f - 2);
      },
      6);
  // Others are of each sample, which a microbatch does not have.
  ASSERT_TRUE(WriteFileAtomically(path, BytesOf(joined(0.75))).has_value());
  const auto other = ImportOnnxComputation(path, options);
  ASSERT_FALSE(other.has_value());
  EXPECT_THAT(other.error().ToString(), HasSubstr("places beside samples"));
}

TEST(OnnxValues, TilesRepeatPlaces) {
  const auto tiled = [](const std::vector<int64_t>& times) {
    return Computed({IntsOf("times", times)},
                    {NodeOf("Tile", "tile", {"x", "times"}, "logits")});
  };
  ExpectValues(
      tiled({1, 3}), [](int64_t i, int64_t f) { return InputAt(i, f % 4); },
      12);
  EXPECT_THAT(Refusal(tiled({1, 2000})),
              HasSubstr("node 'tile' (Tile): repeats a dimension 2000 times: "
                        "expected at most 1024"));
  EXPECT_THAT(Refusal(tiled({3})),
              HasSubstr("node 'tile' (Tile): expected how often each of [3,4] "
                        "is repeated, found 1 numbers"));
  EXPECT_THAT(Refusal(tiled({1, 0})), HasSubstr("leaves no places"));
  EXPECT_THAT(Refusal(tiled({2, 1})), HasSubstr("(Tile): joins a dimension "
                                                "that is several, or samples"));
}

TEST(OnnxValues, NumbersOfEachSampleMeetWhatAllShare) {
  ExpectValues(
      Computed({Weights("k", {4}), IntsOf("shape", {kSamples, 4})},
               {NodeOf("ConstantOfShape", "zeros", {"shape"}, "zeros"),
                NodeOf("Add", "both", {"zeros", "k"}, "r"), Added()}),
      [](int64_t i, int64_t f) { return InputAt(i, f) + WeightAt(f); });
}

int64_t ParametersOf(std::vector<Message> weights, std::vector<Message> nodes) {
  Parts parts;
  parts.inputs = {InputOf("x", 1, {"n", "4"})};
  parts.weights = std::move(weights);
  parts.nodes = std::move(nodes);
  const std::string path = TempPath("parameters.onnx");
  ImportOptions options;
  options.global_batch = kSamples;
  EXPECT_TRUE(WriteFileAtomically(path, BytesOf(parts)).has_value());
  const auto graph = ImportOnnx(path, options);
  EXPECT_TRUE(graph.has_value()) << graph.error().ToString();
  return graph ? ParameterCount(*graph) : 0;
}

// A loop over cells, whose first state is zeros of each sample: the layer of
// that is the layer of all states.
TEST(OnnxValues, StepsShareTheirLayer) {
  const std::vector<Message> weights = {Weights("k", {4}), Weights("w", {4, 4}),
                                        IntsOf("shape", {kSamples, 4})};
  const auto layer = [](bool gemm, const std::string& of,
                        const std::string& to) -> std::vector<Message> {
    if (gemm) return {NodeOf("Gemm", to, {of, "w", "k"}, to)};
    return {NodeOf("MatMul", to + "p", {of, "w"}, to + "p"),
            NodeOf("Add", to, {to + "p", "k"}, to)};
  };
  for (const bool gemm : {true, false}) {
    std::vector<Message> nodes = {
        NodeOf("ConstantOfShape", "zeros", {"shape"}, "zeros")};
    const auto add = [&](const std::vector<Message>& more) {
      nodes.insert(nodes.end(), more.begin(), more.end());
    };
    add(layer(gemm, "zeros", "a"));
    add({NodeOf("Add", "first", {"a", "x"}, "h")});
    add(layer(gemm, "h", "r"));
    add({Added()});
    ExpectValues(Computed(weights, nodes), [](int64_t i, int64_t o) {
      double sum = InputAt(i, o) + WeightAt(o);
      for (int64_t f = 0; f < 4; ++f) {
        sum += (InputAt(i, f) + WeightAt(f)) * WeightAt(4 * f + o);
      }
      return sum;
    });
    EXPECT_EQ(ParametersOf(weights, nodes), 4 * 4 + 4) << gemm;
  }
}

// The layer behind the mean and behind the largest of an image, as of CBAM, of
// which the one has dimensions of 1 that the other lacks.
TEST(OnnxValues, OneLayerReadsFeaturesOfTwoForms) {
  const std::vector<Message> weights = {Weights("k", {4}), Weights("w", {4, 4}),
                                        IntsOf("image", {0, 4, 1, 1})};
  for (const bool first : {true, false}) {
    const std::vector<Message> nodes = {
        NodeOf("Reshape", "image", {"x", "image"}, "i"),
        NodeOf("MaxPool", "pool", {"i"}, "m",
               {Message().Text(1, "kernel_shape").Number(8, 1).Number(8, 1)}),
        NodeOf("Flatten", "flat", {"m"}, "f"),
        NodeOf("Gemm", "a", {first ? "f" : "x", "w", "k"}, "a"),
        NodeOf("Gemm", "b", {first ? "x" : "f", "w", "k"}, "b"),
        NodeOf("Add", "sum", {"a", "b"}, "logits")};
    ExpectValues(Computed(weights, nodes), [](int64_t i, int64_t o) {
      double sum = WeightAt(o);
      for (int64_t f = 0; f < 4; ++f) {
        sum += InputAt(i, f) * WeightAt(4 * f + o);
      }
      return 2 * sum;
    });
    EXPECT_EQ(ParametersOf(weights, nodes), 4 * 4 + 4) << first;
  }
}

// Gates of a cell: the sum of two layers, in parts.
TEST(OnnxValues, SumsOfLayersAreSplit) {
  const auto product = [](int64_t i, int64_t o, double times) {
    double sum = 0;
    for (int64_t f = 0; f < 4; ++f) {
      sum += times * InputAt(i, f) * WeightAt(8 * f + o);
    }
    return sum;
  };
  const auto gated = [](std::vector<Message> parts) {
    std::vector<Message> nodes = {
        NodeOf("MatMul", "input", {"x", "w"}, "a"),
        NodeOf("Relu", "state", {"x"}, "h"),
        NodeOf("MatMul", "recurrent", {"h", "v"}, "b"),
        NodeOf("Add", "gates", {"a", "b"}, "g")};
    nodes.insert(nodes.end(), parts.begin(), parts.end());
    nodes.push_back(NodeOf("Mul", "cell", {"p", "q"}, "logits"));
    return Computed(
        {Weights("w", {4, 8}), Weights("v", {4, 8}), IntsOf("none", {0}),
         IntsOf("half", {4}), IntsOf("all", {8}), IntsOf("last", {1})},
        std::move(nodes));
  };
  const auto expected = [&](int64_t i, int64_t o) {
    double sums[2] = {product(i, o, 1), product(i, o + 4, 1)};
    for (int64_t f = 0; f < 4; ++f) {
      const double state = std::max(InputAt(i, f), 0.0);
      sums[0] += state * WeightAt(8 * f + o);
      sums[1] += state * WeightAt(8 * f + o + 4);
    }
    return sums[0] * sums[1];
  };
  ExpectValues(gated({NodeOf("Slice", "p", {"g", "none", "half", "last"}, "p"),
                      NodeOf("Slice", "q", {"g", "half", "all", "last"}, "q")}),
               expected);
  ExpectValues(
      gated({NodeOf("Split", "s", {"g"}, "p", {IntAttribute("axis", 1)})
                 .Text(2, "q")}),
      expected);
}

// One place of a dimension that is several, such as an image's pixels.
TEST(OnnxValues, PlacesOfADimensionThatIsSeveral) {
  ExpectValues(
      Computed(
          {IntsOf("square", {0, 2, 2}), IntsOf("flat", {0, 4}),
           IntsOf("two", {2})},
          {NodeOf("Reshape", "square", {"x", "square"}, "s"),
           NodeOf("Transpose", "turn", {"s"}, "t",
                  {Message().Text(1, "perm").Number(8, 0).Number(8, 2).Number(
                      8, 1)}),
           NodeOf("Reshape", "flat", {"t", "flat"}, "f"),
           NodeOf("Gather", "place", {"f", "two"}, "logits",
                  {IntAttribute("axis", 1)})}),
      [](int64_t i, int64_t) { return InputAt(i, 1); }, 1);
}

// The means and the largest of an image's channels, as channels.
TEST(OnnxValues, ImagesAreJoinedAlongChannelsThatTheyLack) {
  ExpectValues(Computed({IntsOf("image", {0, 2, 2, 1}), IntsOf("channels", {1}),
                         IntsOf("flat", {0, -1})},
                        {NodeOf("Reshape", "image", {"x", "image"}, "i"),
                         NodeOf("ReduceSum", "sum", {"i", "channels"}, "s"),
                         NodeOf("ReduceMax", "max", {"i"}, "m",
                                {Message().Text(1, "axes").Number(8, 1)}),
                         NodeOf("Concat", "both", {"s", "m"}, "b",
                                {IntAttribute("axis", 1)}),
                         NodeOf("Relu", "relu", {"b"}, "r"),
                         NodeOf("Reshape", "flat", {"r", "flat"}, "logits")}),
               [](int64_t i, int64_t f) {
                 const double a = InputAt(i, f % 2);
                 const double b = InputAt(i, f % 2 + 2);
                 return std::max(f < 2 ? a + b : std::max(a, b), 0.0);
               });
}

// A place that was selected beside what was added up along its dimension.
TEST(OnnxValues, PlacesAreJoinedToSums) {
  const std::vector<Message> weights = {
      IntsOf("square", {0, 2, 2}), IntsOf("flat", {0, -1}),
      IntsOf("second", {1}), IntsOf("third", {2}),
      Message().Number(2, 7).Text(8, "place").Number(7, 1)};
  const auto expected = [](int64_t i, int64_t f) {
    return f < 2 ? InputAt(i, 2 + f) : InputAt(i, f - 2) + InputAt(i, f);
  };
  for (const bool keeps : {false, true}) {
    ExpectValues(
        Computed(weights,
                 {NodeOf("Reshape", "square", {"x", "square"}, "s"),
                  keeps ? NodeOf("Slice", "place",
                                 {"s", "second", "third", "second"}, "p")
                        : NodeOf("Gather", "place", {"s", "place"}, "p",
                                 {IntAttribute("axis", 1)}),
                  NodeOf("ReduceSum", "sum", {"s", "second"}, "a",
                         {IntAttribute("keepdims", keeps ? 1 : 0)}),
                  NodeOf("Concat", "both", {"p", "a"}, "b",
                         {IntAttribute("axis", keeps ? 2 : 1)}),
                  NodeOf("Reshape", "flat", {"b", "flat"}, "logits")}),
        expected);
  }
}

double ProductAt(int64_t i, int64_t o, int64_t columns) {
  double sum = 0;
  for (int64_t f = 0; f < 4; ++f) {
    sum += InputAt(i, f) * WeightAt(columns * f + o);
  }
  return sum;
}

// A dimension that another node takes apart into three.
TEST(OnnxValues, DimensionsOfManyPartsMeetOnesOfOne) {
  const auto parts = [](std::vector<Message> behind) {
    std::vector<Message> nodes = {
        NodeOf("MatMul", "layer", {"x", "w"}, "a"),
        NodeOf("Reshape", "cube", {"a", "cube"}, "c"),
        NodeOf("Mul", "factors", {"c", "factors"}, "d"),
        NodeOf("Reshape", "flat", {"d", "flat"}, "f")};
    nodes.insert(nodes.end(), behind.begin(), behind.end());
    return Computed({Weights("w", {4, 8}), IntsOf("cube", {0, 2, 2, 2}),
                     Weights("factors", {2, 1, 1}), IntsOf("flat", {0, 8}),
                     Weights("k", {8}), Weights("v", {8, 3})},
                    std::move(nodes));
  };
  const auto made = [](int64_t i, int64_t o) {
    return ProductAt(i, o, 8) * WeightAt(o / 4);
  };
  ExpectValues(
      parts({NodeOf("Mul", "scaled", {"f", "k"}, "logits")}),
      [&](int64_t i, int64_t o) { return made(i, o) * WeightAt(o); }, 8);
  ExpectValues(
      parts({NodeOf("Einsum", "product", {"f", "v"}, "logits",
                    {Message().Text(1, "equation").Text(4, "bi,io->bo")})}),
      [&](int64_t i, int64_t o) {
        double sum = 0;
        for (int64_t f = 0; f < 8; ++f) {
          sum += made(i, f) * WeightAt(3 * f + o);
        }
        return sum;
      },
      3);
}

// Queries and keys that are cut off from a dimension beside their channels.
TEST(OnnxValues, ProductsOverADimensionAndOne) {
  ExpectValues(
      Computed(
          {Weights("w", {4, 8}), IntsOf("shape", {0, 2, 2, 2}),
           IntsOf("first", {1}), IntsOf("flat", {0, 4})},
          {NodeOf("MatMul", "layer", {"x", "w"}, "a"),
           NodeOf("Reshape", "both", {"a", "shape"}, "qk"),
           NodeOf("Split", "split", {"qk"}, "q0", {IntAttribute("axis", 1)})
               .Text(2, "k0"),
           NodeOf("Squeeze", "q", {"q0", "first"}, "q"),
           NodeOf("Squeeze", "k", {"k0", "first"}, "k"),
           NodeOf("Transpose", "turned", {"q"}, "t",
                  {Message().Text(1, "perm").Number(8, 0).Number(8, 2).Number(
                      8, 1)}),
           NodeOf("MatMul", "scores", {"t", "k"}, "s"),
           NodeOf("Reshape", "flat", {"s", "flat"}, "logits")}),
      [](int64_t i, int64_t at) {
        double sum = 0;
        for (int64_t c = 0; c < 2; ++c) {
          sum += ProductAt(i, 2 * c + at / 2, 8) *
                 ProductAt(i, 4 + 2 * c + at % 2, 8);
        }
        return sum;
      });
}

// Of which one node's features are heads.
TEST(OnnxValues, NodesThatShareAMatrixShareHeads) {
  const std::vector<Message> of_heads = {
      NodeOf("MatMul", "a", {"x", "w"}, "a"),
      NodeOf("Reshape", "heads", {"a", "heads"}, "h"),
      NodeOf("ReduceSum", "sum", {"h", "first"}, "s",
             {IntAttribute("keepdims", 0)})};
  const std::vector<Message> of_all = {NodeOf("Relu", "relu", {"x"}, "r"),
                                       NodeOf("MatMul", "b", {"r", "w"}, "b"),
                                       NodeOf("MatMul", "c", {"b", "v"}, "c")};
  for (const bool first : {true, false}) {
    std::vector<Message> nodes = first ? of_heads : of_all;
    const std::vector<Message>& rest = first ? of_all : of_heads;
    nodes.insert(nodes.end(), rest.begin(), rest.end());
    nodes.push_back(NodeOf("Add", "both", {"c", "s"}, "logits"));
    const std::vector<Message> weights = {
        Weights("w", {4, 4}), Weights("v", {4, 2}), IntsOf("heads", {0, 2, 2}),
        IntsOf("first", {1})};
    ExpectValues(
        Computed(weights, nodes),
        [](int64_t i, int64_t o) {
          double sum = ProductAt(i, o, 4) + ProductAt(i, 2 + o, 4);
          for (int64_t f = 0; f < 4; ++f) {
            for (int64_t b = 0; b < 4; ++b) {
              sum += std::max(InputAt(i, f), 0.0) * WeightAt(4 * f + b) *
                     WeightAt(2 * b + o);
            }
          }
          return sum;
        },
        2);
    EXPECT_EQ(ParametersOf(weights, nodes), 16 + 8);
  }
}

// A matrix and its transpose are read from both tensors of the file.
TEST(OnnxValues, TransposesAreTheirMatrix) {
  std::vector<float> turned;
  for (int64_t i = 0; i < 12; ++i) {
    turned.push_back(static_cast<float>(WeightAt(i % 4 * 3 + i / 4)));
  }
  const std::vector<Message> weights = {
      Weights("w", {4, 3}), FloatsOf("onnx::MatMul_7", {3, 4}, turned)};
  const std::vector<Message> nodes = {
      NodeOf("MatMul", "in", {"x", "w"}, "h"),
      NodeOf("MatMul", "out", {"h", "onnx::MatMul_7"}, "logits")};
  ExpectValues(Computed(weights, nodes), [](int64_t i, int64_t o) {
    double sum = 0;
    for (int64_t h = 0; h < 3; ++h) {
      sum += ProductAt(i, h, 3) * WeightAt(3 * o + h);
    }
    return sum;
  });
  EXPECT_EQ(ParametersOf(weights, nodes), 12);
}

TEST(OnnxValues, ShapesThatDoNotFitAreRefused) {
  EXPECT_THAT(Refusal(Computed({Weights("k", {1, 4}), IntsOf("shape", {5, 4})},
                               {Expanded("k", "r"), Added()})),
              HasSubstr("cannot put together [3,4] and [5,4]"));
  for (const std::vector<int64_t>& to :
       {std::vector<int64_t>{5, 4}, {3, 8}, {0, 4}, {3, -1}}) {
    EXPECT_THAT(Refusal(Computed({Weights("k", {3, 4}), IntsOf("shape", to)},
                                 {Expanded("k", "r"), Added()})),
                HasSubstr("cannot repeat [3,4] as "));
  }
}

// A condition that is the same everywhere has a shape all the same.
TEST(OnnxValues, WhereIsOfTheShapeOfAllOperands) {
  const auto chosen = [](int64_t rows, std::vector<Message> behind) {
    std::vector<Message> nodes = {
        NodeOf("ConstantOfShape", "zeros", {"rows"}, "zeros"),
        NodeOf("Equal", "all", {"zeros", "zero"}, "all"),
        NodeOf("Where", "where", {"all", "k", "zero"}, "kk")};
    nodes.insert(nodes.end(), behind.begin(), behind.end());
    return Computed({Weights("k", {1, 4}), FloatsOf("zero", {}, {0}),
                     IntsOf("rows", {rows, 4}), IntsOf("first", {0})},
                    std::move(nodes));
  };
  ExpectValues(
      chosen(kSamples, {NodeOf("Add", "add", {"x", "kk"}, "logits")}),
      [](int64_t i, int64_t f) { return InputAt(i, f) + WeightAt(f); });
  EXPECT_THAT(Refusal(chosen(5, {Summed("kk", "r"), Added()})),
              HasSubstr("that an Expand repeats"));
  EXPECT_THAT(Refusal(chosen(5, {NodeOf("Add", "add", {"x", "kk"}, "logits")})),
              HasSubstr("cannot put together"));
}

// Rows of a table that is no table of places.
TEST(OnnxValues, RowsByNumberAreThoseRows) {
  const auto rows = [](const std::vector<int64_t>& ids) {
    return Computed(
        {Weights("table", {6, 4}), IntsOf("ids", ids), IntsOf("first", {0})},
        {NodeOf("Gather", "rows", {"table", "ids"}, "kk"), Summed("kk", "r"),
         Added()});
  };
  for (const std::vector<int64_t>& ids :
       {std::vector<int64_t>{0}, {0, 1}, {1, 2, 3}, {0, 2, 4}, {5, 3, 1}}) {
    ExpectValues(rows(ids), [&](int64_t i, int64_t f) {
      double sum = InputAt(i, f);
      for (int64_t id : ids) sum += WeightAt(4 * id + f);
      return sum;
    });
  }
  EXPECT_THAT(Refusal(rows({0, 0, 0})), HasSubstr("equally far"));
}

// Those of the file that meet each other have the extents of both.
TEST(OnnxValues, TensorsOfTheFileAreBroadcast) {
  ExpectValues(Computed({Weights("k", {1, 4}), Weights("m", {5, 1}),
                         IntsOf("first", {0})},
                        {NodeOf("Add", "both", {"k", "m"}, "km"),
                         Summed("km", "r"), Added()}),
               [](int64_t i, int64_t f) {
                 double sum = InputAt(i, f);
                 for (int64_t j = 0; j < 5; ++j)
                   sum += WeightAt(f) + WeightAt(j);
                 return sum;
               });
  ExpectValues(
      Computed(
          {Weights("k", {1, 4}), Weights("m", {2, 4}), IntsOf("first", {0})},
          {NodeOf("Concat", "both", {"k", "m"}, "km",
                  {IntAttribute("axis", 0)}),
           Summed("km", "r"), Added()}),
      [](int64_t i, int64_t f) {
        return InputAt(i, f) + WeightAt(f) + WeightAt(f) + WeightAt(4 + f);
      });
  // A number that fills a shape, beside a row.
  ExpectValues(
      Computed(
          {Weights("k", {1, 4}), IntsOf("shape", {5, 4}), IntsOf("first", {0})},
          {NodeOf("ConstantOfShape", "zeros", {"shape"}, "zeros"),
           NodeOf("Add", "both", {"zeros", "k"}, "kk"), Summed("kk", "r"),
           Added()}),
      [](int64_t i, int64_t f) { return InputAt(i, f) + 5 * WeightAt(f); });
}

Message Ints(const std::string& name, const std::vector<int64_t>& values) {
  Message attribute = Message().Text(1, name);
  for (int64_t value : values) attribute.Number(8, value);
  return attribute;
}

// Padding that is counted is counted on each side: as of a Pad in front.
TEST(OnnxValues, MeansCountPaddingOnBothSides) {
  const auto pooled = [](const Shape& image, std::vector<Message> nodes,
                         const std::vector<int64_t>& pads) {
    const bool signal = image.size() == 3;
    nodes.insert(nodes.begin(),
                 {NodeOf("MatMul", "layer", {"x", "w"}, "a"),
                  NodeOf("Reshape", "image", {"a", "shape"}, "image")});
    nodes.push_back(NodeOf("Flatten", "flat", {"pooled"}, "logits"));
    return Computed({Weights("w", {4, signal ? 5 : 25}), IntsOf("shape", image),
                     IntsOf("pads", pads)},
                    std::move(nodes));
  };
  struct Case {
    std::vector<int64_t> window, strides, pads;  // as ONNX has them
    const char* automatic;                       // that pads in the same way
    bool ceil;
  };
  for (const Case& c : {Case{{2, 2}, {2, 2}, {0, 0, 1, 1}, "SAME_UPPER", false},
                        Case{{2, 2}, {2, 2}, {1, 1, 0, 0}, "SAME_LOWER", false},
                        Case{{3, 2}, {1, 2}, {1, 0, 1, 1}, "", false},
                        Case{{3, 3}, {2, 2}, {0, 2, 1, 0}, "", false},
                        Case{{3, 3}, {2, 2}, {1, 0, 0, 2}, "", true},
                        Case{{2}, {2}, {0, 1}, "SAME_UPPER", false},
                        Case{{3}, {2}, {1, 0}, "", true}}) {
    const bool signal = c.window.size() == 1;
    const Shape image = signal ? Shape{0, 1, 5} : Shape{0, 1, 5, 5};
    std::vector<Message> how = {Ints("kernel_shape", c.window),
                                Ints("strides", c.strides),
                                IntAttribute("count_include_pad", 1),
                                IntAttribute("ceil_mode", c.ceil ? 1 : 0)};
    std::vector<int64_t> pads = {0, 0};  // samples and channels
    for (size_t i = 0; i < c.pads.size(); ++i) {
      if (i == c.window.size()) pads.insert(pads.end(), {0, 0});
      pads.push_back(c.pads[i]);
    }
    const auto expected =
        pooled(image,
               {NodeOf("Pad", "pad", {"image", "pads"}, "padded"),
                NodeOf("AveragePool", "pool", {"padded"}, "pooled", how)},
               pads);
    ASSERT_TRUE(expected.has_value()) << expected.error().ToString();
    const int64_t columns = std::ssize(*expected) / kSamples;
    const auto expect_same = [&](const Message& padding) {
      std::vector<Message> padded = how;
      padded.push_back(padding);
      ExpectValues(
          pooled(image,
                 {NodeOf("AveragePool", "pool", {"image"}, "pooled", padded)},
                 pads),
          [&](int64_t i, int64_t f) {
            return (*expected)[static_cast<size_t>(i * columns + f)];
          },
          columns);
    };
    expect_same(Ints("pads", c.pads));
    const std::string automatic = c.automatic;
    if (!automatic.empty()) {
      expect_same(Message().Text(1, "auto_pad").Text(4, automatic));
    }
  }
}

// Of one step, whose state is the activation of the inputs alone.
TEST(OnnxValues, DirectionsHaveActivationsOfTheirOwn) {
  const auto relu = [](double v) { return std::max(v, 0.0); };
  const auto tanh = [](double v) { return std::tanh(v); };
  using Function = double (*)(double);
  const auto states = [](const std::vector<std::string>& activations) {
    Message names = Message().Text(1, "activations");
    for (const std::string& name : activations) names.Text(9, name);
    return Computed(
        {Weights("w", {2, 2, 4}), Weights("r", {2, 2, 2}),
         IntsOf("middle", {1}), IntsOf("shape", {0, 4})},
        {NodeOf("Unsqueeze", "step", {"x", "middle"}, "steps"),
         Message()
             .Text(1, "steps")
             .Text(1, "w")
             .Text(1, "r")
             .Text(2, "")
             .Text(2, "last")
             .Text(3, "rnn")
             .Text(4, "RNN")
             .Add(5, IntAttribute("layout", 1))
             .Add(5, Message().Text(1, "direction").Text(4, "bidirectional"))
             .Add(5, names),
         NodeOf("Reshape", "both", {"last", "shape"}, "logits")});
  };
  struct Case {
    std::vector<std::string> names;
    std::vector<Function> functions;
  };
  for (const Case& c : {Case{{"Relu", "Tanh"}, {relu, tanh}},
                        Case{{"Tanh", "Relu"}, {tanh, relu}},
                        Case{{"relu", "RELU"}, {relu, relu}}}) {
    ExpectValues(states(c.names), [&](int64_t i, int64_t column) {
      double sum = 0;
      for (int64_t f = 0; f < 4; ++f) {
        sum += InputAt(i, f) * WeightAt(4 * column + f);
      }
      return c.functions[static_cast<size_t>(column / 2)](sum);
    });
  }
}

TEST(OnnxValues, SmallFunctionsStayThemselves) {
  const auto function = [](const std::string& op, float by) {
    std::vector<float> large(16, 0);  // undoes it behind the function
    for (size_t i = 0; i < 4; ++i) large[5 * i] = 1 / by;
    return Computed({FloatsOf("by", {}, {by}), FloatsOf("w", {4, 4}, large)},
                    {NodeOf(op, "function", {"x"}, "f"),
                     NodeOf("Mul", "small", {"f", "by"}, "s"),
                     NodeOf("MatMul", "large", {"s", "w"}, "logits")});
  };
  ExpectValues(function("Sigmoid", 1e-5F), [](int64_t i, int64_t f) {
    return 1 / (1 + std::exp(-InputAt(i, f)));
  });
  ExpectValues(function("Abs", 1e-7F),
               [](int64_t i, int64_t f) { return std::abs(InputAt(i, f)); });
}

// Without exponentials that overflow.
TEST(OnnxValues, LogarithmsOfSumsOfExponentials) {
  for (const int64_t keeps : {0, 1}) {
    const auto computed = Computed(
        {FloatsOf("much", {}, {200}), IntsOf("last", {1})},
        {NodeOf("Mul", "large", {"x", "much"}, "a"),
         NodeOf("ReduceLogSumExp", "sum", {"a"}, keeps != 0 ? "s" : "t",
                {Message().Text(1, "axes").Number(8, 1).Number(20, 7),
                 IntAttribute("keepdims", keeps)}),
         keeps != 0 ? NodeOf("Identity", "kept", {"s"}, "r")
                    : NodeOf("Unsqueeze", "kept", {"t", "last"}, "r"),
         NodeOf("Sub", "add", {"a", "r"}, "logits")});
    ExpectValues(computed, [](int64_t i, int64_t f) {
      double sum = 0;
      for (int64_t other = 0; other < kFeatures; ++other) {
        sum += std::exp(200 * (InputAt(i, other) - InputAt(i, f)));
      }
      return -std::log(sum);
    });
  }
}

TEST(OnnxValues, InputsThatAreTakenApartAreInputs) {
  Parts parts;
  parts.inputs = {InputOf("x", 1, {"n", "4"})};
  parts.weights = {IntsOf("halves", {0, 2, 2}), IntsOf("last", {2})};
  parts.nodes = {NodeOf("Reshape", "apart", {"x", "halves"}, "h"),
                 NodeOf("ReduceSum", "sum", {"h", "last"}, "logits",
                        {IntAttribute("keepdims", 0)})};
  const std::string path = TempPath("apart.onnx");
  ASSERT_TRUE(WriteFileAtomically(path, BytesOf(parts)).has_value());
  ImportOptions options;
  options.global_batch = kSamples;
  const auto made = ImportOnnxComputation(path, options);
  ASSERT_TRUE(made.has_value()) << made.error().ToString();
  ASSERT_EQ(made->inputs.size(), 1U);
  EXPECT_EQ(made->graph.tensor(made->inputs[0].tensor).kind,
            TensorKind::kInput);
}

// Of numbers of the file, with the sign of the dividend or the divisor.
TEST(OnnxValues, RemaindersOfNumbers) {
  for (const int64_t fmod : {0, 1}) {
    ExpectValues(Computed({FloatsOf("a", {}, {-5}), FloatsOf("b", {}, {3})},
                          {NodeOf("Mod", "mod", {"a", "b"}, "r",
                                  {IntAttribute("fmod", fmod)}),
                           Added()}),
                 [&](int64_t i, int64_t f) {
                   return InputAt(i, f) + (fmod != 0 ? -2 : 1);
                 });
  }
}

// From behind the last place, and from in front of the first.
TEST(OnnxValues, SlicesBackwardsBeginAtThePlacesThatThereAre) {
  const auto sliced = [](int64_t start, int64_t end) {
    return Computed({IntsOf("start", {start}), IntsOf("end", {end}),
                     IntsOf("axis", {1}), IntsOf("step", {-1})},
                    {NodeOf("Slice", "slice",
                            {"x", "start", "end", "axis", "step"}, "logits")});
  };
  ExpectValues(sliced(100, -100),
               [](int64_t i, int64_t f) { return InputAt(i, 3 - f); });
  ExpectValues(
      sliced(-100, -200), [](int64_t i, int64_t) { return InputAt(i, 0); },
      /*columns=*/1);
}

// Numbers become whole, towards zero.
TEST(OnnxValues, NumbersAreCastToTheTypeOfOthers) {
  const auto cast = [](float number, int64_t type) {
    return Computed({FloatsOf("k", {}, {number}),
                     Message().Number(2, type).Text(8, "like").Text(
                         9, std::string(type == 9 ? 1 : 8, '\1'))},
                    {NodeOf("CastLike", "cast", {"k", "like"}, "c"),
                     NodeOf("CastLike", "back", {"c", "x"}, "r"), Added()});
  };
  struct Case {
    float number;
    int64_t type;  // whole numbers, bools, fp64
    double expected;
  };
  for (const Case& c :
       {Case{2.75F, 7, 2}, Case{-2.75F, 7, -2}, Case{0.25F, 9, 1},
        Case{0, 9, 0}, Case{2.75F, 11, 2.75}}) {
    ExpectValues(cast(c.number, c.type), [&](int64_t i, int64_t f) {
      return InputAt(i, f) + c.expected;
    });
  }
}

// Behind a number they are slices: a layer in pieces has it nowhere.
TEST(OnnxValues, ALayerBehindANumberIsSplit) {
  const auto layer = [](int64_t i, int64_t column) {
    double sum = 0;
    for (int64_t f = 0; f < 4; ++f) {
      sum += InputAt(i, f) * WeightAt(8 * f + column);
    }
    return sum;
  };
  ExpectValues(Computed({Weights("w", {4, 8}), FloatsOf("half", {}, {0.5})},
                        {NodeOf("MatMul", "layer", {"x", "w"}, "a"),
                         NodeOf("Mul", "by", {"a", "half"}, "b"),
                         Message()
                             .Text(1, "b")
                             .Text(2, "c")
                             .Text(2, "d")
                             .Text(3, "split")
                             .Text(4, "Split")
                             .Add(5, IntAttribute("axis", 1)),
                         NodeOf("Sub", "sub", {"c", "d"}, "logits")}),
               [&](int64_t i, int64_t f) {
                 return 0.5 * (layer(i, f) - layer(i, f + 4));
               });
}

// Heads are in front of places, and each of them has the row of its place.
TEST(OnnxValues, RowsOfPlacesAreAddedToEachHead) {
  constexpr int64_t kPlaces = 6;
  constexpr int64_t kHeads = 4;
  constexpr int64_t kWide = 2;
  for (const int64_t samples : {3, 4}) {  // other than heads, and as many
    std::vector<float> same(kHeads * kWide * kHeads * kWide, 0);
    for (size_t i = 0; i < same.size(); i += kHeads * kWide + 1) same[i] = 1;
    Parts parts;
    parts.inputs = {InputOf("tokens", 7, {"n", "s"})};
    parts.weights = {Weights("table", {5, kHeads * kWide}),
                     Weights("rows", {kPlaces, kWide}),
                     FloatsOf("w", {kHeads * kWide, kHeads * kWide}, same),
                     IntsOf("heads", {0, 0, kHeads, kWide}),
                     IntsOf("whole", {0, 0, kHeads * kWide})};
    parts.nodes = {
        NodeOf("Gather", "lookup", {"table", "tokens"}, "l"),
        NodeOf("MatMul", "layer", {"l", "w"}, "a"),
        NodeOf("Reshape", "apart", {"a", "heads"}, "b"),
        NodeOf("Transpose", "turn", {"b"}, "c", {Ints("perm", {0, 2, 1, 3})}),
        NodeOf("Add", "add", {"c", "rows"}, "d"),
        NodeOf("Transpose", "back", {"d"}, "e", {Ints("perm", {0, 2, 1, 3})}),
        NodeOf("Reshape", "join", {"e", "whole"}, "logits")};
    const std::string path = TempPath("rows.onnx");
    ASSERT_TRUE(WriteFileAtomically(path, BytesOf(parts)).has_value());
    ImportOptions options;
    options.global_batch = samples;
    options.seq_len = kPlaces;
    const auto made = ImportOnnxComputation(path, options);
    ASSERT_TRUE(made.has_value()) << made.error().ToString();
    const auto tensors =
        ComputeOnnx(*made, path, [&](TensorId, HostTensor& tokens) {
          for (int64_t i = 0; i < tokens.elements(); ++i) {
            tokens.Set(i, static_cast<double>(i % 5));
          }
          return Result<void>();
        });
    ASSERT_TRUE(tensors.has_value()) << tensors.error().ToString();
    const std::vector<double> values = ValuesOf(made->outputs[0], *tensors);
    ASSERT_EQ(std::ssize(values), samples * kPlaces * kHeads * kWide);
    for (int64_t at = 0; at < std::ssize(values); ++at) {
      const int64_t column = at % (kHeads * kWide);
      const int64_t token = at / (kHeads * kWide) % 5;
      const int64_t place = at / (kHeads * kWide) % kPlaces;
      EXPECT_NEAR(values[static_cast<size_t>(at)],
                  WeightAt(token * kHeads * kWide + column) +
                      WeightAt(place * kWide + column % kWide),
                  1e-6)
          << at;
    }
  }
}

// Places are those of the scale that was rounded to fp32: with p / 10, a pixel
// of place i is at c = 10 i / p, or with centres at half a pixel at
// c = (10 i + 5) / p - 1 / 2. Of the two scales 1.7 is rounded up and 1.9 down,
// so that quotients which are whole come out on either side of it.
TEST(OnnxValues, NearestPlacesAreThoseOfTheDecimalScale) {
  constexpr int64_t kPlaces = 11;
  struct Case {
    const char* coordinates;
    const char* nearest;
    std::function<int64_t(int64_t i, int64_t p)> place;
  };
  const auto ceil = [](int64_t a, int64_t p) { return (a + p - 1) / p; };
  for (const Case& c :
       {Case{"asymmetric", "floor",
             [](int64_t i, int64_t p) { return 10 * i / p; }},
        Case{"asymmetric", "ceil",
             [&](int64_t i, int64_t p) { return ceil(10 * i, p); }},
        Case{"half_pixel", "round_prefer_ceil",
             [](int64_t i, int64_t p) { return (10 * i + 5) / p; }},
        Case{"half_pixel", "round_prefer_floor",
             [&](int64_t i, int64_t p) { return ceil(10 * i + 5, p) - 1; }}}) {
    for (const int64_t p : {17, 19}) {
      const float scale = static_cast<float>(p) / 10;
      SCOPED_TRACE(std::string(c.nearest) + " " + std::to_string(p));
      ExpectValues(
          Computed(
              {Weights("w", {4, kPlaces}), IntsOf("middle", {1}),
               FloatsOf("scales", {3}, {1, 1, scale})},
              {NodeOf("MatMul", "layer", {"x", "w"}, "a"),
               NodeOf("Unsqueeze", "signal", {"a", "middle"}, "b"),
               NodeOf("Resize", "up", {"b", "", "scales"}, "c",
                      {Message()
                           .Text(1, "coordinate_transformation_mode")
                           .Text(4, c.coordinates),
                       Message().Text(1, "nearest_mode").Text(4, c.nearest)}),
               NodeOf("Flatten", "flat", {"c"}, "logits")}),
          [&](int64_t i, int64_t column) {
            const int64_t place = std::min(c.place(column, p), kPlaces - 1);
            double sum = 0;
            for (int64_t f = 0; f < 4; ++f) {
              sum += InputAt(i, f) * WeightAt(kPlaces * f + place);
            }
            return sum;
          },
          kPlaces * p / 10);
    }
  }
}

// Fewer places than none on a side are cut off it, before others are added.
TEST(OnnxValues, PadsCutPlacesOff) {
  struct Case {
    const char* mode;
    int64_t before, behind;
    std::vector<int64_t> places;  // of x; -1: the number
  };
  for (const Case& c :
       {Case{"constant", -1, -1, {1, 2}}, Case{"constant", 0, -3, {0}},
        Case{"constant", -1, 2, {1, 2, 3, -1, -1}},
        Case{"constant", 1, -2, {-1, 0, 1}},
        Case{"edge", 2, -1, {0, 0, 0, 1, 2}},
        Case{"reflect", -1, 1, {1, 2, 3, 2}}}) {
    ExpectValues(
        Computed({IntsOf("pads", {0, c.before, 0, c.behind}),
                  FloatsOf("number", {}, {7})},
                 {NodeOf("Pad", "pad", {"x", "pads", "number"}, "logits",
                         {Message().Text(1, "mode").Text(4, c.mode)})}),
        [&](int64_t i, int64_t column) {
          const int64_t f = c.places[static_cast<size_t>(column)];
          return f < 0 ? 7 : InputAt(i, f);
        },
        std::ssize(c.places));
  }
  EXPECT_THAT(Refusal(Computed({IntsOf("pads", {0, -2, 0, -2})},
                               {NodeOf("Pad", "pad", {"x", "pads"}, "y"),
                                NodeOf("Identity", "i", {"y"}, "logits")})),
              HasSubstr("node 'pad' (Pad): has no places"));
}

// Places of an image are one dimension of a softmax over all of them, and apart
// again where their weights meet the image.
TEST(OnnxValues, SoftmaxesAreOverJointDimensions) {
  constexpr int64_t kPixels = 6;
  const auto layer = [](int64_t i, int64_t column) {
    double sum = 0;
    for (int64_t f = 0; f < 4; ++f) {
      sum += InputAt(i, f) * WeightAt(2 * kPixels * f + column);
    }
    return sum;
  };
  for (const char* op : {"Softmax", "LogSoftmax"}) {
    for (const int64_t axis : {2, 1}) {  // where places are behind channels
      std::vector<Message> nodes = {
          NodeOf("MatMul", "layer", {"x", "w"}, "a"),
          NodeOf("Reshape", "image", {"a", "image"}, "b"),
          NodeOf("Identity", "same", {"b"}, "c"),
          NodeOf("Reshape", "flat", {"c", "pixels"}, "d")};
      const std::vector<Message> along = {IntAttribute("axis", axis)};
      if (axis == 2) {
        nodes.push_back(NodeOf(op, "over", {"d"}, "g", along));
      } else {
        const Message perm = Ints("perm", {0, 2, 1});
        nodes.push_back(NodeOf("Transpose", "turn", {"d"}, "e", {perm}));
        nodes.push_back(NodeOf(op, "over", {"e"}, "f", along));
        nodes.push_back(NodeOf("Transpose", "back", {"f"}, "g", {perm}));
      }
      nodes.push_back(NodeOf("Mul", "weigh", {"g", "d"}, "h"));
      nodes.push_back(NodeOf("Reshape", "all", {"h", "rows"}, "logits"));
      ExpectValues(
          Computed(
              {Weights("w", {4, 2 * kPixels}), IntsOf("image", {0, 2, 2, 3}),
               IntsOf("pixels", {0, 2, -1}), IntsOf("rows", {0, -1})},
              std::move(nodes)),
          [&](int64_t i, int64_t column) {
            const int64_t channel = column / kPixels;
            double sum = 0;
            for (int64_t k = 0; k < kPixels; ++k) {
              sum += std::exp(layer(i, channel * kPixels + k));
            }
            const double log = layer(i, column) - std::log(sum);
            return layer(i, column) *
                   (std::string(op) == "Softmax" ? std::exp(log) : log);
          },
          2 * kPixels);
    }
  }
}

// Two steps from zeros, of gates z, r and n in this order:
// h' = (1 - z) n + z h, where n reads r R h, or R (r h).
TEST(OnnxValues, GrusMayHaveNoBiases) {
  constexpr int64_t kHidden = 2;
  for (const bool resets_behind : {false, true}) {
    const auto states = [&](int64_t i) {
      std::vector<double> h(kHidden, 0);
      for (int64_t step = 0; step < 2; ++step) {
        const auto input = [&](int64_t gate, int64_t j) {
          double sum = 0;
          for (int64_t f = 0; f < 2; ++f) {
            sum += InputAt(i, 2 * step + f) *
                   WeightAt(2 * (kHidden * gate + j) + f);
          }
          return sum;
        };
        const auto recurrent = [&](int64_t gate, int64_t j,
                                   const std::vector<double>& of) {
          double sum = 0;
          for (int64_t k = 0; k < kHidden; ++k) {
            sum += of[static_cast<size_t>(k)] *
                   WeightAt(kHidden * (kHidden * gate + j) + k);
          }
          return sum;
        };
        const auto sigmoid = [](double v) { return 1 / (1 + std::exp(-v)); };
        std::vector<double> r(kHidden);
        std::vector<double> reset(kHidden);
        for (int64_t j = 0; j < kHidden; ++j) {
          const auto at = static_cast<size_t>(j);
          r[at] = sigmoid(input(1, j) + recurrent(1, j, h));
          reset[at] = r[at] * h[at];
        }
        std::vector<double> next(kHidden);
        for (int64_t j = 0; j < kHidden; ++j) {
          const auto at = static_cast<size_t>(j);
          const double z = sigmoid(input(0, j) + recurrent(0, j, h));
          const double n = std::tanh(input(2, j) +
                                     (resets_behind ? r[at] * recurrent(2, j, h)
                                                    : recurrent(2, j, reset)));
          next[at] = (1 - z) * n + z * h[at];
        }
        h = next;
      }
      return h;
    };
    ExpectValues(
        Computed({Weights("w", {1, 3 * kHidden, 2}),
                  Weights("r", {1, 3 * kHidden, kHidden}),
                  IntsOf("steps", {0, 2, 2}), IntsOf("rows", {0, kHidden})},
                 {NodeOf("Reshape", "apart", {"x", "steps"}, "s"),
                  Message()
                      .Text(1, "s")
                      .Text(1, "w")
                      .Text(1, "r")
                      .Text(2, "")
                      .Text(2, "last")
                      .Text(3, "gru")
                      .Text(4, "GRU")
                      .Add(5, IntAttribute("layout", 1))
                      .Add(5, IntAttribute("linear_before_reset",
                                           resets_behind ? 1 : 0)),
                  NodeOf("Reshape", "row", {"last", "rows"}, "logits")}),
        [&](int64_t i, int64_t column) {
          return states(i)[static_cast<size_t>(column)];
        },
        kHidden);
  }
}

}  // namespace
}  // namespace tessera
