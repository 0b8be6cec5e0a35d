// Elementwise nodes have the values that ONNX's standard says, whatever their
// numbers are: random graphs of them are held against intervals, node by node,
// that rounding to fp32 stays within. Where such an interval is wide, as beside
// a jump or in a difference of large numbers, nothing is said.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "planner/base/rng.h"
#include "planner/io/onnx.h"
#include "tests/support/onnx_bytes.h"
#include "tests/support/onnx_values.h"
#include "tests/support/temp_path.h"

namespace tessera {
namespace {

constexpr int64_t kSamples = 3;
constexpr int64_t kFeatures = 16;
constexpr int kOnnxFloat32 = 1;

// ---- Intervals --------------------------------------------------------------

// Not finite: nothing is known.
struct Interval {
  double low = 0;
  double high = 0;

  bool Known() const { return std::isfinite(low) && std::isfinite(high); }
  bool IsPoint() const { return low == high; }
};
constexpr Interval kUnknown = {-HUGE_VAL, HUGE_VAL};
constexpr Interval kEither = {0, 1};  // of truths

Interval Point(double x) {
  return {x, x};
}

// Within what a few operations in fp32 make of it, `steps` of them.
Interval Rounded(double low, double high, double steps = 1) {
  constexpr double kRelative = 1e-6;
  constexpr double kLeast = 1e-37;  // smaller ones may become 0
  constexpr double kMost = 3e38;
  if (!(std::abs(low) < kMost && std::abs(high) < kMost)) return kUnknown;
  return {low - steps * kRelative * std::abs(low) - kLeast,
          high + steps * kRelative * std::abs(high) + kLeast};
}

Interval Sum(const Interval& a, const Interval& b) {
  const double low = a.low + b.low;
  const double high = a.high + b.high;
  const bool exact =
      a.IsPoint() && b.IsPoint() && static_cast<float>(low) == low;
  return exact ? Point(low) : Rounded(low, high);
}

Interval Product(const Interval& a, const Interval& b) {
  const auto unit = [](const Interval& x) {
    return x.IsPoint() && (x.low == 0 || std::abs(x.low) == 1);
  };
  const auto [low, high] = std::minmax(
      {a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high});
  return unit(a) || unit(b) ? Interval{low, high} : Rounded(low, high);
}

Interval Inverse(const Interval& x) {
  if (x.low <= 0 && x.high >= 0) return kUnknown;
  return Rounded(1 / x.high, 1 / x.low);
}

Interval Negated(const Interval& x) {
  return {-x.high, -x.low};
}

Interval Size(const Interval& x) {
  if (x.low >= 0) return x;
  if (x.high <= 0) return Negated(x);
  return {0, std::max(-x.low, x.high)};
}

// Of a function that does not fall.
template <typename F>
Interval Rising(const Interval& x, F f) {
  return Rounded(f(x.low), f(x.high));
}

// Of one that nowhere changes faster than its argument.
template <typename F>
Interval Slow(const Interval& x, F f) {
  const double at = f((x.low + x.high) / 2);
  const double within = (x.high - x.low) / 2 + 1e-6;
  return {at - within, at + within};
}

Interval Truth(bool surely, bool surely_not) {
  return surely ? Point(1) : surely_not ? Point(0) : kEither;
}

double Softplus(double x) {
  return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
}

// `x`: operands, those that are left out unknown.
Interval Apply(const std::string& op, const std::vector<Interval>& x) {
  if (op == "Where") {
    if (!x[0].IsPoint()) return kUnknown;
    return x[0].low != 0 ? x[1] : x[2];
  }
  if (op == "Clip") {
    Interval y = x[0];
    if (!y.Known()) return kUnknown;
    for (size_t i = 1; i < x.size(); ++i) {
      if (!x[i].Known()) continue;
      const auto bound = [&](double v) {
        return i == 1 ? std::max(v, x[i].low) : std::min(v, x[i].low);
      };
      y = {bound(y.low), bound(y.high)};
    }
    return y;
  }
  for (const Interval& operand : x) {
    if (!operand.Known()) return kUnknown;
  }
  const Interval& a = x[0];
  const Interval& b = x.back();
  if (op == "Add") return Sum(a, b);
  if (op == "Sub") return Sum(a, Negated(b));
  if (op == "Mul") return Product(a, b);
  if (op == "Div") {
    const Interval inverse = Inverse(b);
    if (!inverse.Known()) return kUnknown;
    const Interval y = Product(a, inverse);
    return Rounded(y.low, y.high);
  }
  if (op == "Max") return {std::max(a.low, b.low), std::max(a.high, b.high)};
  if (op == "Min") return {std::min(a.low, b.low), std::min(a.high, b.high)};
  if (op == "Neg") return Negated(a);
  if (op == "Abs") return Size(a);
  if (op == "Reciprocal") return Inverse(a);
  if (op == "Relu") return {std::max(a.low, 0.0), std::max(a.high, 0.0)};
  if (op == "Pow") {
    if (b.low == 2) return Product(Size(a), Size(a));
    if (b.low == 3) return Rising(a, [](double v) { return v * v * v; });
    return a.low < 0 ? kUnknown
                     : Rising(a, [](double v) { return std::sqrt(v); });
  }
  if (op == "Sqrt") {
    return a.low < 0 ? kUnknown
                     : Rising(a, [](double v) { return std::sqrt(v); });
  }
  if (op == "Log") {
    if (a.low < 1e-30) return kUnknown;
    const Interval y = Rising(a, [](double v) { return std::log(v); });
    return {y.low - 1e-7, y.high + 1e-7};  // near 1
  }
  if (op == "Exp") return Rising(a, [](double v) { return std::exp(v); });
  if (op == "Sigmoid") {
    return Rising(a, [](double v) { return 1 / (1 + std::exp(-v)); });
  }
  if (op == "Tanh") {
    return Rising(a, [](double v) { return std::tanh(v); });
  }
  if (op == "Erf") return Rising(a, [](double v) { return std::erf(v); });
  if (op == "Softplus") return Rising(a, Softplus);
  if (op == "Elu") {
    return Rising(a, [](double v) { return v > 0 ? v : std::expm1(v); });
  }
  if (op == "LeakyRelu") {
    return Rising(a, [](double v) { return v > 0 ? v : 0.01 * v; });
  }
  if (op == "Sin") return Slow(a, [](double v) { return std::sin(v); });
  if (op == "Cos") return Slow(a, [](double v) { return std::cos(v); });
  if (op == "Equal") {
    return Truth(a.IsPoint() && b.IsPoint() && a.low == b.low,
                 a.high < b.low || a.low > b.high);
  }
  if (op == "Less") return Truth(a.high < b.low, a.low >= b.high);
  if (op == "LessOrEqual") return Truth(a.high <= b.low, a.low > b.high);
  if (op == "Greater") return Truth(a.low > b.high, a.high <= b.low);
  if (op == "GreaterOrEqual") return Truth(a.low >= b.high, a.high < b.low);
  if (op == "Not") return {1 - a.high, 1 - a.low};
  if (op == "And") return {a.low * b.low, a.high * b.high};
  if (op == "Or") return {std::max(a.low, b.low), std::max(a.high, b.high)};
  if (op == "Xor") {
    return a.IsPoint() && b.IsPoint() ? Point(a.low != b.low ? 1 : 0) : kEither;
  }
  EXPECT_EQ(op, "Cast");
  return a;
}

// ---- Graphs -----------------------------------------------------------------

struct Step {
  std::string op;
  std::vector<std::string> inputs;  // "": left out
  std::string output;
};

struct Numbers {
  std::vector<std::string> names;
  std::vector<float> values;

  std::string Name(double value) {
    values.push_back(static_cast<float>(value));
    return names.emplace_back("c" + std::to_string(values.size()));
  }
  bool IsZero(const std::string& name) const {
    return !names.empty() && names.back() == name && values.back() == 0;
  }
};

// Of "x" and "y", to the output of the last step.
struct Steps {
  Numbers numbers;
  std::vector<Step> steps;

  std::string Add(const std::string& op, std::vector<std::string> inputs) {
    const std::string name = "v" + std::to_string(steps.size());
    steps.push_back({op, std::move(inputs), name});
    return name;
  }
  std::string ToString() const {
    std::string text;
    for (const Step& step : steps) {
      text += step.output + " = " + step.op;
      for (const std::string& input : step.inputs) {
        text += " " + (input.empty() ? "-" : input);
        for (size_t i = 0; i < numbers.names.size(); ++i) {
          if (numbers.names[i] == input) {
            text += "=" + std::to_string(numbers.values[i]);
          }
        }
      }
      text += "\n";
    }
    return text;
  }
};

// What jumps and bends is met at 0, at +-1 and far away.
double ValueOf(const std::string& input, int64_t i) {
  constexpr double kValues[kFeatures] = {0,    1e-3, -1e-3, 0.5, -0.5, 1,
                                         -1,   2.5,  -2.5,  7,   -7,   30,
                                         -100, 100,  -1e4,  1e4};
  const int64_t sample = i / kFeatures;
  const int64_t f = i % kFeatures;
  if (input == "x") {
    return sample == 0 ? kValues[f]
                       : 0.125 * static_cast<double>((i * 37) % 61 - 30);
  }
  // Equal to x in some places.
  if (f % 4 == 0) return ValueOf("x", i);
  return kValues[(f * 5 + sample + 3) % kFeatures];
}

Result<std::vector<double>> Computed(const Steps& graph) {
  Parts parts;
  for (const char* input : {"x", "y"}) {
    const bool read = std::ranges::any_of(graph.steps, [&](const Step& step) {
      return std::ranges::count(step.inputs, input) > 0;
    });
    if (read) parts.inputs.push_back(InputOf(input, kOnnxFloat32, {"n", "16"}));
  }
  for (size_t i = 0; i < graph.numbers.names.size(); ++i) {
    parts.weights.push_back(
        FloatsOf(graph.numbers.names[i], {}, {graph.numbers.values[i]}));
  }
  for (const Step& step : graph.steps) {
    std::vector<Message> attributes;
    if (step.op == "Cast") attributes.push_back(IntAttribute("to", 1));
    parts.nodes.push_back(NodeOf(step.op, "node_" + step.output, step.inputs,
                                 step.output, attributes));
  }
  parts.output = graph.steps.back().output;
  const std::string path = TempPath("elementwise.onnx");
  std::ofstream(path, std::ios::binary) << BytesOf(parts);
  ImportOptions options;
  options.global_batch = kSamples;
  TESSERA_TRY(const OnnxComputation made, ImportOnnxComputation(path, options));
  TESSERA_TRY(const auto tensors,
              ComputeOnnx(made, path, [&](TensorId id, HostTensor& tensor) {
                const auto input = std::ranges::find(
                    made.inputs, id, &OnnxComputation::Input::tensor);
                for (int64_t i = 0; i < tensor.elements(); ++i) {
                  tensor.Set(i, ValueOf(input->name, i));
                }
                return Result<void>();
              }));
  return ValuesOf(made.outputs[0], tensors);
}

Interval Expected(const Steps& graph, int64_t i) {
  std::map<std::string, Interval> values;
  for (const char* input : {"x", "y"}) {
    values[input] =
        Point(static_cast<double>(static_cast<float>(ValueOf(input, i))));
  }
  for (size_t n = 0; n < graph.numbers.names.size(); ++n) {
    values[graph.numbers.names[n]] =
        Point(static_cast<double>(graph.numbers.values[n]));
  }
  values[""] = kUnknown;
  for (const Step& step : graph.steps) {
    std::vector<Interval> operands;
    for (const std::string& input : step.inputs) {
      operands.push_back(values.at(input));
    }
    values[step.output] = Apply(step.op, operands);
  }
  return values.at(graph.steps.back().output);
}

// How many elements were compared.
int64_t Compare(const Steps& graph) {
  const auto computed = Computed(graph);
  if (!computed) {
    ADD_FAILURE() << computed.error().ToString() << "\n" << graph.ToString();
    return 0;
  }
  EXPECT_EQ(std::ssize(*computed), kSamples * kFeatures) << graph.ToString();
  int64_t compared = 0;
  for (int64_t i = 0; i < std::ssize(*computed); ++i) {
    const Interval expected = Expected(graph, i);
    constexpr double kWide = 1e-2;
    const double size =
        std::max(std::abs(expected.low), std::abs(expected.high));
    if (!expected.Known() ||
        expected.high - expected.low > kWide * std::max(size, kWide)) {
      continue;
    }
    ++compared;
    const double made = (*computed)[static_cast<size_t>(i)];
    EXPECT_TRUE(made >= expected.low && made <= expected.high)
        << made << " is not within " << expected.low << " and " << expected.high
        << " where x is " << ValueOf("x", i) << " and y is " << ValueOf("y", i)
        << ":\n"
        << graph.ToString();
  }
  return compared;
}

// ---- Random graphs ----------------------------------------------------------

class Maker {
 public:
  explicit Maker(uint32_t seed) : rng_(seed) {}

  Steps Make() {
    const size_t count = 2 + Below(9);
    for (size_t i = 0; i < count; ++i) AddStep();
    if (std::ranges::count(truths_, graph_.steps.back().output) > 0) {
      graph_.Add("Cast", {graph_.steps.back().output});
    }
    return std::move(graph_);
  }

 private:
  size_t Below(size_t n) { return rng_.Below(static_cast<uint32_t>(n)); }

  template <size_t n>
  std::string OneOf(const std::array<const char*, n>& names) {
    return names[Below(n)];
  }

  // More often one of the last.
  std::string Of(const std::vector<std::string>& values) {
    const size_t last = values.size() - 1;
    return values[last - std::min(Below(values.size()), Below(4))];
  }

  std::string Number() {
    constexpr double kNumbers[] = {0,    1,     -1,       0.5,  2,    3,   -3,
                                   6,    1e-3,  -1e-3,    1e-6, 0.01, 100, 80,
                                   -80,  0.125, 1 - 1e-5, 1e-7, 30,   -30, 1e4,
                                   -1e4, 5e-2,  1.0 / 6,  1e3,  -0.5};
    return graph_.numbers.Name(kNumbers[Below(std::size(kNumbers))]);
  }

  // Two operands, one of them a number half of the time.
  std::vector<std::string> Two() {
    std::vector<std::string> operands = {Of(values_), Of(values_)};
    if (Below(2) == 0) operands[Below(4) == 0 ? 0 : 1] = Number();
    return operands;
  }

  void AddValue(const std::string& op, std::vector<std::string> inputs) {
    values_.push_back(graph_.Add(op, std::move(inputs)));
  }
  void AddTruth(const std::string& op, std::vector<std::string> inputs) {
    truths_.push_back(graph_.Add(op, std::move(inputs)));
  }

  void AddStep() {
    constexpr std::array kOne = {
        "Neg", "Abs",      "Reciprocal", "Relu", "Sqrt",     "Log",
        "Exp", "Sigmoid",  "Sigmoid",    "Tanh", "Tanh",     "Erf",
        "Elu", "Softplus", "Sin",        "Cos",  "LeakyRelu"};
    constexpr std::array kTwo = {"Add", "Sub", "Mul", "Mul",
                                 "Div", "Max", "Min"};
    constexpr std::array kComparisons = {"Equal", "Less", "LessOrEqual",
                                         "Greater", "GreaterOrEqual"};
    constexpr std::array kOfTruths = {"And", "Or", "Xor", "Not", "Not"};
    constexpr double kExponents[] = {2, 3, 0.5};
    switch (Below(truths_.empty() ? 8 : 12)) {
      case 0:
      case 1:
        return AddValue(OneOf(kOne), {Of(values_)});
      case 2:
      case 3:
      case 4: {
        const std::string op = OneOf(kTwo);
        std::vector<std::string> operands = Two();
        // Which is refused.
        const bool by_zero = op == "Div" && graph_.numbers.IsZero(operands[1]);
        return AddValue(by_zero ? "Sub" : op, std::move(operands));
      }
      case 5:
        return AddValue("Clip",
                        {Of(values_), Below(4) == 0 ? "" : Number(), Number()});
      case 6:
        return AddValue(
            "Pow", {Of(values_), graph_.numbers.Name(kExponents[Below(3)])});
      case 7:
      case 8:
        return AddTruth(OneOf(kComparisons), Two());
      case 9: {
        const std::string op = OneOf(kOfTruths);
        if (op == "Not") return AddTruth(op, {Of(truths_)});
        std::string other = Of(truths_);
        if (Below(3) == 0) {
          other = graph_.numbers.Name(static_cast<double>(Below(2)));
        }
        return AddTruth(op, {Of(truths_), std::move(other)});
      }
      case 10:
        return AddValue("Cast", {Of(truths_)});
      default: {
        std::vector<std::string> operands = Two();
        operands.insert(operands.begin(), Of(truths_));
        return AddValue("Where", std::move(operands));
      }
    }
  }

  Rng rng_;
  Steps graph_;
  std::vector<std::string> values_ = {"x", "x", "y"};
  std::vector<std::string> truths_;
};

TEST(OnnxElementwise, RandomGraphsHaveTheirNodesValues) {
  constexpr uint32_t kGraphs = 3000;
  int64_t compared = 0;
  for (uint32_t seed = 0; seed < kGraphs && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    compared += Compare(Maker(seed).Make());
  }
  // Else the intervals say too little.
  EXPECT_GT(compared, kGraphs * kSamples * kFeatures / 2);
}

// ---- Graphs that exporters write --------------------------------------------

// Of two tensors' comparison, and of what it is part of.
TEST(OnnxElementwise, TruthsAreNegated) {
  for (const char* op : {"Greater", "Equal", "Or", "Not"}) {
    Steps graph;
    std::string truth = graph.Add(*op == 'G' ? "Greater" : "Equal", {"x", "y"});
    if (*op == 'O') {
      truth = graph.Add("Or", {truth, graph.Add("Less", {"x", "y"})});
    }
    if (*op == 'N') truth = graph.Add("Not", {truth});
    truth = graph.Add("Not", {truth});
    Steps chosen = graph;
    graph.Add("Cast", {truth});
    EXPECT_EQ(Compare(graph), kSamples * kFeatures) << op;
    chosen.Add("Where", {truth, "x", "y"});
    EXPECT_EQ(Compare(chosen), kSamples * kFeatures) << op;
  }
}

TEST(OnnxElementwise, ZerosAreFound) {
  for (const char* of : {"x", "Abs", "Mul"}) {
    Steps graph;
    std::string x = "x";
    if (*of == 'A') x = graph.Add("Abs", {"x"});
    if (*of == 'M') x = graph.Add("Mul", {"x", "x"});
    const std::string zero = graph.numbers.Name(0);
    const std::string truth =
        graph.Add(*of == 'x' ? "Equal" : "LessOrEqual", {x, zero});
    graph.Add("Where", {truth, graph.numbers.Name(7), "x"});
    EXPECT_EQ(Compare(graph), kSamples * kFeatures) << of;
  }
}

TEST(OnnxElementwise, BoundsBindAtAnyScale) {
  struct Case {
    double factor;
    double offset;
    double least;
    double most;
  };
  for (const Case& c :
       {Case{0.01, 0, -1, 1}, Case{1.0 / 30, 0, -3, 3}, Case{1, 100, 5, 1e30},
        Case{1, 0, -80, 1e30}, Case{1e3, 0, -1e-6, 1e-6}, Case{1, 0, 1, -1}}) {
    Steps graph;
    const std::string x = graph.Add("Mul", {"x", graph.numbers.Name(c.factor)});
    const std::string moved =
        graph.Add("Add", {x, graph.numbers.Name(c.offset)});
    const std::string bound = graph.numbers.Name(c.least);
    graph.Add("Clip", {moved, bound, graph.numbers.Name(c.most)});
    EXPECT_GT(Compare(graph), kSamples * kFeatures / 2) << c.factor;
  }
}

// Such bounds keep logarithms finite.
TEST(OnnxElementwise, BoundsNearOneStay) {
  Steps graph;
  const std::string p = graph.Add("Sigmoid", {"x"});
  const std::string most = graph.Add("Min", {p, graph.numbers.Name(1 - 1e-5)});
  const std::string rest = graph.Add("Sub", {graph.numbers.Name(1), most});
  graph.Add("Log", {rest});
  EXPECT_GT(Compare(graph), kSamples * kFeatures / 4);
  const auto computed = Computed(graph);
  ASSERT_TRUE(computed.has_value());
  for (double value : *computed) EXPECT_GT(value, -12);
}

}  // namespace
}  // namespace tessera
