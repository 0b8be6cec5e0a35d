#include "planner/io/onnx_fold.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "planner/base/element_count.h"

namespace tessera {
namespace {

using Operands = std::span<const OnnxConstant* const>;
using Folded = Result<std::optional<OnnxConstant>>;

// Calls f(place of the result, index of each dimension).
template <typename F>
void ForEachIndex(const Shape& shape, F f) {
  const int64_t elements = OnnxElements(shape).value_or(0);
  Shape index(shape.size(), 0);
  for (int64_t i = 0; i < elements; ++i) {
    f(static_cast<size_t>(i), index);
    for (size_t d = shape.size(); d-- > 0;) {
      if (++index[d] < shape[d]) break;
      index[d] = 0;
    }
  }
}

// Elements of a constant by the index of a shape that it is broadcast to.
class Spread {
 public:
  Spread(const OnnxConstant& x, size_t dims)
      : values_(x.values), strides_(dims - x.shape.size(), 0) {
    const Shape strides = OnnxStrides(x.shape);
    for (size_t d = 0; d < x.shape.size(); ++d) {
      strides_.push_back(x.shape[d] == 1 ? 0 : strides[d]);
    }
  }
  double operator[](const Shape& index) const {
    return values_[static_cast<size_t>(std::inner_product(
        index.begin(), index.end(), strides_.begin(), int64_t{0}))];
  }

 private:
  const std::vector<double>& values_;
  Shape strides_;
};

Error TooLarge() {
  return {ErrorCode::kInfeasible, "its constant result is too large", ""};
}
Error Misfit() {
  return InvalidInput("its constant operands do not fit");
}

Folded Elementwise(const OnnxNode& node, Operands operands) {
  const OnnxConstant& a = *operands[0];
  // With the sign of the dividend, not the divisor.
  const bool fmod = node.op == "Mod" && node.Int("fmod", 0) != 0;
  const OnnxFunction f =
      fmod ? [](double x, double y) { return std::fmod(x, y); }
           : OnnxFunctionOf(node.op, a.is_float);
  OnnxConstant y = {a.shape, {}, a.is_float && ComparisonOf(node.op).empty()};
  if (operands.size() == 1) {
    for (double value : a.values) y.values.push_back(f(value, 0));
    return std::optional(std::move(y));
  }
  const OnnxConstant& b = *operands[1];
  const auto shape = OnnxBroadcast(a.shape, b.shape);
  if (!shape) return Misfit();
  if (!OnnxElements(*shape)) return TooLarge();
  y.shape = *shape;
  const Spread of_a(a, shape->size());
  const Spread of_b(b, shape->size());
  ForEachIndex(y.shape, [&](size_t, const Shape& index) {
    y.values.push_back(f(of_a[index], of_b[index]));
  });
  return std::optional(std::move(y));
}

Folded Gather(const OnnxNode& node, Operands operands) {
  const OnnxConstant& x = *operands[0];
  const OnnxConstant& ids = *operands[1];
  const auto axis = AxisOf(node.Int("axis", 0), x.shape.size());
  if (!axis) return Misfit();
  const size_t at = *axis;
  OnnxConstant y = {GatheredShape(x.shape, at, ids.shape), {}, x.is_float};
  if (!OnnxElements(y.shape)) return TooLarge();
  const Shape strides = OnnxStrides(x.shape);
  const int64_t outer = strides[at] * x.shape[at];
  const int64_t rows = outer == 0 ? 0 : std::ssize(x.values) / outer;
  for (int64_t row = 0; row < rows; ++row) {
    for (double id : ids.values) {
      const double from = id < 0 ? id + static_cast<double>(x.shape[at]) : id;
      if (!(from >= 0) || from >= static_cast<double>(x.shape[at])) {
        return Misfit();
      }
      const auto first = x.values.begin() + row * outer +
                         static_cast<int64_t>(from) * strides[at];
      y.values.insert(y.values.end(), first, first + strides[at]);
    }
  }
  // Of no elements there are none to choose.
  if (OnnxElements(y.shape) != std::ssize(y.values)) return Misfit();
  return std::optional(std::move(y));
}

Folded Concat(const OnnxNode& node, Operands operands) {
  OnnxConstant y = *operands[0];
  const auto axis = AxisOf(node.Int("axis", 0), y.shape.size());
  if (!axis) return Misfit();
  const size_t at = *axis;
  for (const OnnxConstant* x : operands.subspan(1)) {
    Shape same = x->shape;
    if (same.size() != y.shape.size()) return Misfit();
    same[at] = y.shape[at];
    if (same != y.shape) return Misfit();
    OnnxConstant joint = y;
    joint.shape[at] += x->shape[at];
    const auto elements = OnnxElements(joint.shape);
    if (!elements) return TooLarge();
    joint.values.clear();
    // An operand without elements has no strides; the joint may have some.
    const int64_t inner = OnnxStrides(joint.shape)[at];
    const int64_t of_y = inner * y.shape[at];
    const int64_t of_x = inner * x->shape[at];
    const int64_t rows = *elements == 0 ? 0 : *elements / (of_y + of_x);
    for (int64_t row = 0; row < rows; ++row) {
      const auto append = [&](const OnnxConstant& from, int64_t count) {
        const auto first = from.values.begin() + row * count;
        joint.values.insert(joint.values.end(), first, first + count);
      };
      append(y, of_y);
      append(*x, of_x);
    }
    y = std::move(joint);
  }
  return std::optional(std::move(y));
}

Folded Slice(Operands operands) {
  const OnnxConstant& x = *operands[0];
  const auto slice = OnnxSliceOf(x.shape, operands);
  if (!slice) return Misfit();
  if (!OnnxElements(slice->shape)) return TooLarge();
  OnnxConstant y = {slice->shape, {}, x.is_float};
  const Shape strides = OnnxStrides(x.shape);
  ForEachIndex(y.shape, [&](size_t, const Shape& index) {
    int64_t from = 0;
    for (size_t d = 0; d < index.size(); ++d) {
      from += (slice->first[d] + index[d] * slice->step[d]) * strides[d];
    }
    y.values.push_back(x.values[static_cast<size_t>(from)]);
  });
  return std::optional(std::move(y));
}

Folded Expand(const OnnxConstant& x, const Shape& to) {
  const auto shape = OnnxBroadcast(x.shape, to);
  if (!shape) return Misfit();
  if (!OnnxElements(*shape)) return TooLarge();
  OnnxConstant y = {*shape, {}, x.is_float};
  const Spread of_x(x, shape->size());
  ForEachIndex(y.shape, [&](size_t, const Shape& index) {
    y.values.push_back(of_x[index]);
  });
  return std::optional(std::move(y));
}

Folded Where(Operands operands) {
  if (operands.size() != 3) return Misfit();
  auto shape = OnnxBroadcast(operands[0]->shape, operands[1]->shape);
  if (shape) shape = OnnxBroadcast(*shape, operands[2]->shape);
  if (!shape) return Misfit();
  if (!OnnxElements(*shape)) return TooLarge();
  OnnxConstant y = {*shape, {}, operands[1]->is_float};
  const Spread at[] = {{*operands[0], shape->size()},
                       {*operands[1], shape->size()},
                       {*operands[2], shape->size()}};
  ForEachIndex(y.shape, [&](size_t, const Shape& index) {
    y.values.push_back(at[0][index] != 0 ? at[1][index] : at[2][index]);
  });
  return std::optional(std::move(y));
}

Folded Range(Operands operands) {
  if (operands.size() != 3) return Misfit();
  for (const OnnxConstant* operand : operands) {
    if (operand->values.size() != 1) return Misfit();
  }
  const double first = operands[0]->values[0];
  const double step = operands[2]->values[0];
  const double count = std::ceil((operands[1]->values[0] - first) / step);
  if (!(count <= static_cast<double>(kMostOnnxValues))) return TooLarge();
  OnnxConstant y = {
      {static_cast<int64_t>(std::max(0.0, count))}, {}, operands[0]->is_float};
  for (int64_t i = 0; i < y.shape[0]; ++i) {
    y.values.push_back(first + static_cast<double>(i) * step);
  }
  return std::optional(std::move(y));
}

Folded ConstantOfShape(const OnnxNode& node, const OnnxConstant& of) {
  const OnnxAttribute* const value = node.Find("value");
  double fill = 0;
  if (value != nullptr) {
    const std::vector<double> values = value->t.Values();
    if (values.size() != 1) return Misfit();
    fill = values[0];
  }
  OnnxConstant y = {
      of.Ints(), {}, value == nullptr || IsOnnxFloat(value->t.type)};
  const auto elements = OnnxElements(y.shape);
  if (!elements) return TooLarge();
  y.values.assign(static_cast<size_t>(*elements), fill);
  return std::optional(std::move(y));
}

// Over the last two dimensions.
Folded Trilu(const OnnxNode& node, Operands operands) {
  OnnxConstant y = *operands[0];
  if (y.shape.size() < 2) return Misfit();
  const double k = operands.size() > 1 && operands[1] != nullptr &&
                           operands[1]->values.size() == 1
                       ? operands[1]->values[0]
                       : 0;
  const bool upper = node.Int("upper", 1) != 0;
  ForEachIndex(y.shape, [&](size_t i, const Shape& index) {
    const auto row = static_cast<double>(index[index.size() - 2]);
    const auto column = static_cast<double>(index.back());
    const bool keep = upper ? column >= row + k : column <= row + k;
    if (!keep) y.values[i] = 0;
  });
  return std::optional(std::move(y));
}

Folded CumSum(const OnnxNode& node, Operands operands) {
  OnnxConstant y = *operands[0];
  if (operands.size() != 2 || operands[1] == nullptr ||
      operands[1]->values.size() != 1 || node.Int("exclusive", 0) != 0 ||
      node.Int("reverse", 0) != 0) {
    return Misfit();
  }
  const auto axis = AxisOf(operands[1]->Ints()[0], y.shape.size());
  if (!axis) return Misfit();
  const size_t at = *axis;
  const auto stride = static_cast<size_t>(OnnxStrides(y.shape)[at]);
  ForEachIndex(y.shape, [&](size_t i, const Shape& index) {
    if (index[at] > 0) y.values[i] += y.values[i - stride];
  });
  return std::optional(std::move(y));
}

// Without batch dimensions.
Folded GatherNd(const OnnxNode& node, Operands operands) {
  const OnnxConstant& x = *operands[0];
  const OnnxConstant& places = *operands[1];
  if (node.Int("batch_dims", 0) != 0 || places.shape.empty()) return Misfit();
  const int64_t depth = places.shape.back();
  if (depth < 1 || depth > std::ssize(x.shape)) return Misfit();
  OnnxConstant y = {
      {places.shape.begin(), places.shape.end() - 1}, {}, x.is_float};
  y.shape.insert(y.shape.end(), x.shape.begin() + depth, x.shape.end());
  if (!OnnxElements(y.shape)) return TooLarge();
  const Shape strides = OnnxStrides(x.shape);
  const std::vector<int64_t> ids = places.Ints();
  const int64_t inner = strides[static_cast<size_t>(depth) - 1];
  for (size_t i = 0; i < ids.size(); i += static_cast<size_t>(depth)) {
    int64_t from = 0;
    for (size_t d = 0; d < static_cast<size_t>(depth); ++d) {
      const int64_t id = ids[i + d] < 0 ? ids[i + d] + x.shape[d] : ids[i + d];
      if (id < 0 || id >= x.shape[d]) return Misfit();
      from += id * strides[d];
    }
    if (x.values.empty()) continue;  // there are none to choose
    y.values.insert(y.values.end(), x.values.begin() + from,
                    x.values.begin() + from + inner);
  }
  return std::optional(std::move(y));
}

Folded GatherElements(const OnnxNode& node, Operands operands) {
  const OnnxConstant& x = *operands[0];
  const OnnxConstant& ids = *operands[1];
  const auto axis = AxisOf(node.Int("axis", 0), x.shape.size());
  if (!axis || ids.shape.size() != x.shape.size()) return Misfit();
  const size_t at = *axis;
  for (size_t d = 0; d < x.shape.size(); ++d) {
    if (d != at && ids.shape[d] > x.shape[d]) return Misfit();
  }
  const Shape strides = OnnxStrides(x.shape);
  const std::vector<int64_t> places = ids.Ints();
  OnnxConstant y = {ids.shape, {}, x.is_float};
  bool fits = true;
  ForEachIndex(ids.shape, [&](size_t i, const Shape& index) {
    const int64_t place = places[i] < 0 ? places[i] + x.shape[at] : places[i];
    fits = fits && place >= 0 && place < x.shape[at];
    if (!fits) return;
    int64_t from = place * strides[at];
    for (size_t d = 0; d < index.size(); ++d) {
      if (d != at) from += index[d] * strides[d];
    }
    y.values.push_back(x.values[static_cast<size_t>(from)]);
  });
  if (!fits) return Misfit();
  return std::optional(std::move(y));
}

Folded Product(const OnnxNode& node, const OnnxConstant& x) {
  // Of all elements, as it stands in computations of sizes.
  double product = 1;
  for (double value : x.values) product *= value;
  OnnxConstant y = {{}, {product}, x.is_float};
  if (node.Int("keepdims", 1) != 0) y.shape.assign(x.shape.size(), 1);
  if (x.shape.size() > 1) return std::optional<OnnxConstant>();
  return std::optional(std::move(y));
}

}  // namespace

std::vector<int64_t> OnnxConstant::Ints() const {
  std::vector<int64_t> ints;
  for (double value : values) {
    ints.push_back(std::isnan(value) ? 0
                                     : static_cast<int64_t>(
                                           std::clamp(value, -0x1p53, 0x1p53)));
  }
  return ints;
}

std::optional<size_t> AxisOf(int64_t axis, size_t dims) {
  if (axis < 0) axis += static_cast<int64_t>(dims);
  if (axis < 0 || axis >= static_cast<int64_t>(dims)) return std::nullopt;
  return static_cast<size_t>(axis);
}

Shape GatheredShape(const Shape& shape, size_t axis, const Shape& ids) {
  const auto at = shape.begin() + static_cast<int64_t>(axis);
  Shape gathered(shape.begin(), at);
  gathered.insert(gathered.end(), ids.begin(), ids.end());
  gathered.insert(gathered.end(), at + 1, shape.end());
  return gathered;
}

std::optional<int64_t> OnnxElements(const Shape& shape) {
  int64_t elements = 1;
  for (int64_t extent : shape) {
    if (extent < 0 || extent > kMostOnnxValues) return std::nullopt;
    elements *= extent;
    if (elements > kMostOnnxValues) return std::nullopt;
  }
  return elements;
}

Shape OnnxStrides(const Shape& shape) {
  Shape strides(shape.size(), 1);
  const double elements = LargeElementCount(shape);
  if (!(elements > 0 && elements < 0x1p53)) return strides;
  for (size_t d = shape.size(); d-- > 1;) {
    strides[d - 1] = strides[d] * shape[d];
  }
  return strides;
}

std::optional<Shape> OnnxBroadcast(const Shape& a, const Shape& b) {
  Shape shape(std::max(a.size(), b.size()), 1);
  for (size_t d = 0; d < shape.size(); ++d) {
    const auto extent = [&](const Shape& of) {
      const size_t missing = shape.size() - of.size();
      return d < missing ? 1 : of[d - missing];
    };
    const int64_t x = extent(a);
    const int64_t y = extent(b);
    if (x != y && x != 1 && y != 1) return std::nullopt;
    shape[d] = x == 1 ? y : x;
  }
  return shape;
}

OnnxPlaces OnnxPlacesOf(int64_t extent, int64_t start, int64_t end,
                        int64_t step) {
  if (extent == 0) return {};
  // An end may be in front of the first place, or behind the last; a start that
  // is where no place is begins at the next one.
  const int64_t first = step > 0 ? 0 : -1;
  const int64_t last = step > 0 ? extent : extent - 1;
  const auto place = [&](int64_t at, int64_t least) {
    return at < -extent ? least
                        : std::clamp(at < 0 ? at + extent : at, least, last);
  };
  const int64_t begin = place(start, 0);
  const int64_t room =
      step > 0 ? place(end, first) - begin : begin - place(end, first);
  const int64_t apart = std::abs(step);
  return {begin, (std::max<int64_t>(0, room) + apart - 1) / apart};
}

std::optional<OnnxSlice> OnnxSliceOf(
    const Shape& shape, std::span<const OnnxConstant* const> operands) {
  const auto given = [&](size_t i) {
    return operands.size() > i && operands[i] != nullptr;
  };
  if (!given(1) || !given(2)) return std::nullopt;
  const std::vector<int64_t> starts = operands[1]->Ints();
  const std::vector<int64_t> ends = operands[2]->Ints();
  std::vector<int64_t> axes;
  if (given(3)) {
    axes = operands[3]->Ints();
  } else {
    axes.resize(starts.size());
    std::iota(axes.begin(), axes.end(), 0);
  }
  const std::vector<int64_t> steps =
      given(4) ? operands[4]->Ints() : std::vector<int64_t>(starts.size(), 1);
  if (ends.size() != starts.size() || axes.size() != starts.size() ||
      steps.size() != starts.size()) {
    return std::nullopt;
  }
  OnnxSlice slice = {shape, Shape(shape.size(), 0), Shape(shape.size(), 1)};
  for (size_t i = 0; i < axes.size(); ++i) {
    const auto d = AxisOf(axes[i], shape.size());
    constexpr int64_t kMostStep = int64_t{1} << 31;
    if (!d || steps[i] == 0 || std::abs(steps[i]) > kMostStep) {
      return std::nullopt;
    }
    const OnnxPlaces places =
        OnnxPlacesOf(shape[*d], starts[i], ends[i], steps[i]);
    slice.first[*d] = places.first;
    slice.step[*d] = steps[i];
    slice.shape[*d] = places.count;
  }
  return slice;
}

OnnxConstant TransposeOnnx(const OnnxConstant& constant,
                           std::span<const size_t> order) {
  OnnxConstant y = {{}, {}, constant.is_float};
  for (size_t d : order) y.shape.push_back(constant.shape[d]);
  const Shape strides = OnnxStrides(constant.shape);
  ForEachIndex(y.shape, [&](size_t, const Shape& index) {
    int64_t from = 0;
    for (size_t d = 0; d < index.size(); ++d) {
      from += index[d] * strides[order[d]];
    }
    y.values.push_back(constant.values[static_cast<size_t>(from)]);
  });
  return y;
}

namespace {

struct NamedFunction {
  std::string_view op;
  OnnxFunction f;
};

constexpr NamedFunction kFunctions[] = {
    {"Add", [](double x, double y) { return x + y; }},
    {"Sub", [](double x, double y) { return x - y; }},
    {"Mul", [](double x, double y) { return x * y; }},
    {"Div", [](double x, double y) { return x / y; }},
    {"Mod", [](double x,
               double y) { return y == 0 ? 0.0 : x - y * std::floor(x / y); }},
    {"Pow", [](double x, double y) { return std::pow(x, y); }},
    {"Min", [](double x, double y) { return std::min(x, y); }},
    {"Max", [](double x, double y) { return std::max(x, y); }},
    {"Equal", [](double x, double y) { return x == y ? 1.0 : 0.0; }},
    {"Less", [](double x, double y) { return x < y ? 1.0 : 0.0; }},
    {"LessOrEqual", [](double x, double y) { return x <= y ? 1.0 : 0.0; }},
    {"Greater", [](double x, double y) { return x > y ? 1.0 : 0.0; }},
    {"GreaterOrEqual", [](double x, double y) { return x >= y ? 1.0 : 0.0; }},
    {"And", [](double x, double y) { return x != 0 && y != 0 ? 1.0 : 0.0; }},
    {"Or", [](double x, double y) { return x != 0 || y != 0 ? 1.0 : 0.0; }},
    {"Xor",
     [](double x, double y) { return (x != 0) != (y != 0) ? 1.0 : 0.0; }},
    {"Not", [](double x, double) { return x == 0 ? 1.0 : 0.0; }},
    {"Neg", [](double x, double) { return -x; }},
    {"Abs", [](double x, double) { return std::abs(x); }},
    {"Sqrt", [](double x, double) { return std::sqrt(x); }},
    {"Reciprocal", [](double x, double) { return 1 / x; }},
    {"Floor", [](double x, double) { return std::floor(x); }},
    {"Ceil", [](double x, double) { return std::ceil(x); }},
    {"Exp", [](double x, double) { return std::exp(x); }},
    {"Log", [](double x, double) { return std::log(x); }},
    {"Cos", [](double x, double) { return std::cos(x); }},
    {"Sin", [](double x, double) { return std::sin(x); }},
    {"Erf", [](double x, double) { return std::erf(x); }},
    {"Tanh", [](double x, double) { return std::tanh(x); }},
    {"Sigmoid", [](double x, double) { return 1 / (1 + std::exp(-x)); }},
    {"Relu", [](double x, double) { return std::max(x, 0.0); }},
    {"Softplus",
     [](double x, double) {
       return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
     }},
    {":leaky_relu", [](double x, double y) { return x > 0 ? x : y * x; }},
    {":elu", [](double x, double y) { return x > 0 ? x : y * std::expm1(x); }},
    {"IsNaN", [](double x, double) { return std::isnan(x) ? 1.0 : 0.0; }},
};

}  // namespace

OnnxFunction OnnxFunctionOf(std::string_view op, bool is_float) {
  if (op == "Div" && !is_float) {
    return [](double x, double y) { return y == 0 ? 0.0 : std::trunc(x / y); };
  }
  const auto* const row = std::ranges::find(kFunctions, op, &NamedFunction::op);
  return row == std::end(kFunctions) ? nullptr : row->f;
}

std::string_view ComparisonOf(std::string_view op) {
  constexpr std::pair<std::string_view, std::string_view> kComparisons[] = {
      {"Equal", "equal"},
      {"Less", "less"},
      {"LessOrEqual", "less_equal"},
      {"Greater", "greater"},
      {"GreaterOrEqual", "greater_equal"},
  };
  for (const auto& [theirs, ours] : kComparisons) {
    if (op == theirs) return ours;
  }
  return "";
}

std::optional<double> ApplyOnnx(const std::string& op, double x, double y,
                                bool is_float) {
  const OnnxFunction f = OnnxFunctionOf(op, is_float);
  return f == nullptr ? std::nullopt : std::optional(f(x, y));
}

Result<std::optional<OnnxConstant>> FoldOnnx(
    const OnnxNode& node, std::span<const OnnxConstant* const> operands) {
  if (operands.empty() || operands[0] == nullptr) {
    return std::optional<OnnxConstant>();
  }
  const OnnxConstant& x = *operands[0];
  const auto given = [&](size_t i) {
    return i < operands.size() && operands[i] != nullptr;
  };
  if (ApplyOnnx(node.op, 1, 1, true)) {
    if (operands.size() > 2 || (operands.size() == 2 && !given(1))) {
      return std::optional<OnnxConstant>();
    }
    return Elementwise(node, operands);
  }
  if (node.op == "Gather") return given(1) ? Gather(node, operands) : Misfit();
  if (node.op == "Concat") {
    return std::ranges::count(operands, nullptr) > 0 ? Misfit()
                                                     : Concat(node, operands);
  }
  if (node.op == "Slice") return Slice(operands);
  if (node.op == "Range") {
    return given(1) && given(2) ? Range(operands) : Misfit();
  }
  if (node.op == "Where") {
    return given(1) && given(2) ? Where(operands) : Misfit();
  }
  if (node.op == "Expand") {
    return given(1) ? Expand(x, operands[1]->Ints()) : Misfit();
  }
  if (node.op == "ConstantOfShape") return ConstantOfShape(node, x);
  if (node.op == "CumSum") return CumSum(node, operands);
  if (node.op == "GatherND") {
    return given(1) ? GatherNd(node, operands) : Misfit();
  }
  if (node.op == "GatherElements") {
    return given(1) ? GatherElements(node, operands) : Misfit();
  }
  if (node.op == "Trilu") return Trilu(node, operands);
  if (node.op == "ReduceProd") return Product(node, x);
  if (node.op == "Identity") return std::optional(x);
  if (node.op == "Cast") {
    OnnxConstant y = x;
    const int64_t type = node.Int("to", kOnnxFloat);
    y.is_float = IsOnnxFloat(static_cast<int>(type));
    for (double& value : y.values) {
      if (type == kOnnxBool) value = value != 0 ? 1 : 0;
      if (!y.is_float) value = std::trunc(value);
    }
    return std::optional(std::move(y));
  }
  return std::optional<OnnxConstant>();
}

}  // namespace tessera
