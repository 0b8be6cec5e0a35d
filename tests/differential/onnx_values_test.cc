// What ONNX's operators repeat, implicitly or by an Expand, has the values that
// the standard says wherever it goes, or is refused: nodes of small files are
// run and held against sums that stand beside them.

#include "tests/support/onnx_values.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "planner/base/file.h"
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
  int64_t count = 1;
  for (int64_t extent : shape) count *= extent;
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

}  // namespace
}  // namespace tessera
