#include "planner/io/onnx_large.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace tessera {
namespace {

using Formula = std::shared_ptr<const OnnxFormula>;
using Operands = std::span<const OnnxLarge* const>;

// A formula that is made of more is not kept.
constexpr int kMostFormulas = 64;

Formula Numbers(OnnxConstant constant, Shape strides, int64_t first = 0) {
  OnnxFormula numbers;
  numbers.values = std::make_shared<const OnnxConstant>(std::move(constant));
  numbers.first = first;
  numbers.strides = std::move(strides);
  return std::make_shared<const OnnxFormula>(std::move(numbers));
}

std::optional<double> Uniform(const OnnxFormula& formula, const Shape& shape) {
  if (formula.values == nullptr) return std::nullopt;
  const std::vector<double>& values = formula.values->values;
  const double number = values[static_cast<size_t>(formula.first)];
  for (size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] == 1 || formula.strides[d] == 0) continue;
    const bool same = std::ranges::all_of(
        values, [&](double value) { return value == number; });
    return same ? std::optional(number) : std::nullopt;
  }
  return number;
}

// Null where one of them is, or where they are too many.
Formula Applied(OnnxFunction f, std::vector<Formula> of, const Shape& shape) {
  OnnxFormula made;
  std::vector<double> numbers;
  for (const Formula& x : of) {
    if (x == nullptr) return nullptr;
    made.size += x->size;
    if (const auto number = Uniform(*x, shape)) numbers.push_back(*number);
  }
  if (numbers.size() == of.size()) {
    const double y = of.size() == 3 ? numbers[numbers[0] != 0 ? 1 : 2]
                                    : f(numbers[0], numbers.back());
    return Numbers({{}, {y}}, Shape(shape.size(), 0));
  }
  if (made.size > kMostFormulas) return nullptr;
  made.f = f;
  made.of = std::move(of);
  return std::make_shared<const OnnxFormula>(std::move(made));
}

// Where a dimension of a constant is in a view of it: at `first` and every
// `step`-th place behind that, as the view's dimension `dim`; none: at `first`.
struct Seen {
  std::optional<size_t> dim;
  int64_t first = 0;
  int64_t step = 1;
};

Formula Viewed(const Formula& formula, std::span<const Seen> seen,
               size_t dims) {
  if (formula == nullptr) return nullptr;
  OnnxFormula view = *formula;
  if (formula->values == nullptr) {
    for (Formula& x : view.of) x = Viewed(x, seen, dims);
    return std::make_shared<const OnnxFormula>(std::move(view));
  }
  view.strides.assign(dims, 0);
  for (size_t d = 0; d < seen.size(); ++d) {
    view.first += seen[d].first * formula->strides[d];
    if (!seen[d].dim) continue;
    view.strides[*seen[d].dim] += seen[d].step * formula->strides[d];
  }
  return std::make_shared<const OnnxFormula>(std::move(view));
}

// Broadcast to a shape that it can be broadcast to.
Formula Spread(const OnnxLarge& x, const Shape& shape) {
  if (x.shape == shape) return x.formula;
  const size_t missing = shape.size() - x.shape.size();
  std::vector<Seen> seen(x.shape.size());
  for (size_t d = 0; d < seen.size(); ++d) {
    if (x.shape[d] == shape[missing + d]) seen[d].dim = missing + d;
  }
  return Viewed(x.formula, seen, shape.size());
}

// The elements themselves, of a small constant as it was given.
const OnnxConstant* Small(Operands operands, size_t i) {
  if (i >= operands.size() || operands[i] == nullptr) return nullptr;
  const OnnxLarge& x = *operands[i];
  const bool whole = x.formula != nullptr && x.formula->values != nullptr &&
                     x.formula->first == 0 &&
                     x.formula->values->shape == x.shape &&
                     x.formula->strides == OnnxStrides(x.shape);
  return whole ? x.formula->values.get() : nullptr;
}

std::optional<OnnxLarge> Elementwise(OnnxFunction f, bool is_float,
                                     Operands operands) {
  OnnxLarge y = {operands[0]->shape, is_float, nullptr};
  for (const OnnxLarge* x : operands.subspan(1)) {
    const auto shape = OnnxBroadcast(y.shape, x->shape);
    if (!shape) return std::nullopt;
    y.shape = *shape;
  }
  std::vector<Formula> of;
  for (const OnnxLarge* x : operands) of.push_back(Spread(*x, y.shape));
  y.formula = Applied(f, std::move(of), y.shape);
  return y;
}

std::optional<OnnxLarge> Sliced(const OnnxLarge& x, Operands operands) {
  std::vector<const OnnxConstant*> places;
  for (size_t i = 0; i < operands.size(); ++i) {
    places.push_back(Small(operands, i));
    if (i > 0 && operands[i] != nullptr && places[i] == nullptr) {
      return std::nullopt;
    }
  }
  const auto slice = OnnxSliceOf(x.shape, places);
  if (!slice) return std::nullopt;
  std::vector<Seen> seen(x.shape.size());
  for (size_t d = 0; d < seen.size(); ++d) {
    seen[d] = {d, slice->first[d], slice->step[d]};
    if (slice->shape[d] == 1) seen[d].dim.reset();
    if (slice->shape[d] == 0) return OnnxLarge{slice->shape, x.is_float, {}};
  }
  return OnnxLarge{slice->shape, x.is_float,
                   Viewed(x.formula, seen, seen.size())};
}

std::optional<OnnxLarge> Joined(const OnnxNode& node, Operands operands) {
  OnnxLarge y = {operands[0]->shape, operands[0]->is_float, nullptr};
  const auto d = AxisOf(node.Int("axis", 0), y.shape.size());
  if (!d) return std::nullopt;
  for (const OnnxLarge* x : operands.subspan(1)) {
    if (x == nullptr || x->shape.size() != y.shape.size()) return std::nullopt;
    y.shape[*d] += x->shape[*d];
  }
  return y;
}

// Elements of `x`, which are all the same, by ids of whatever elements.
std::optional<OnnxLarge> Gathered(const OnnxNode& node, const OnnxLarge& x,
                                  const OnnxLarge& ids) {
  Shape shape = ids.shape;
  if (node.op == "GatherND") {
    if (node.Int("batch_dims", 0) != 0 || shape.empty()) return std::nullopt;
    const int64_t depth = shape.back();
    if (depth < 1 || depth > std::ssize(x.shape)) return std::nullopt;
    shape.pop_back();
    shape.insert(shape.end(), x.shape.begin() + depth, x.shape.end());
  } else if (node.op == "Gather") {
    const auto axis = AxisOf(node.Int("axis", 0), x.shape.size());
    if (!axis) return std::nullopt;
    shape = GatheredShape(x.shape, *axis, ids.shape);
  }
  const auto number = UniformOnnx(x);
  if (number) return LargeOnnx(std::move(shape), *number, x.is_float);
  return OnnxLarge{std::move(shape), x.is_float, nullptr};
}

// Zeros above or below the diagonal of the last two dimensions.
std::optional<OnnxLarge> Triangle(const OnnxNode& node, const OnnxLarge& x,
                                  double k) {
  const size_t rank = x.shape.size();
  if (rank < 2) return std::nullopt;
  const int64_t rows = x.shape[rank - 2];
  const int64_t columns = x.shape[rank - 1];
  if (rows < 1 || columns < 1 || rows > kMostOnnxValues ||
      columns > kMostOnnxValues) {
    return OnnxLarge{x.shape, x.is_float, nullptr};
  }
  // The column's number less the row's.
  OnnxConstant apart = {{rows + columns - 1}, {}};
  apart.values.resize(static_cast<size_t>(rows + columns - 1));
  std::iota(apart.values.begin(), apart.values.end(),
            1 - static_cast<double>(rows));
  Shape strides(rank, 0);
  strides[rank - 2] = -1;
  strides[rank - 1] = 1;
  const bool upper = node.Int("upper", 1) != 0;
  const Shape by(rank, 0);
  const Formula kept =
      Applied(OnnxFunctionOf(upper ? "GreaterOrEqual" : "LessOrEqual", true),
              {Numbers(std::move(apart), std::move(strides), rows - 1),
               Numbers({{}, {k}}, by)},
              x.shape);
  return OnnxLarge{
      x.shape, x.is_float,
      Applied(nullptr, {kept, x.formula, Numbers({{}, {0}}, by)}, x.shape)};
}

// Elements from `first` on, `count` of them.
void Fill(const OnnxFormula& formula, std::span<const int64_t> index,
          size_t count, std::vector<double>& row) {
  row.resize(count);
  if (formula.values != nullptr) {
    int64_t from = formula.first;
    for (size_t d = 0; d < index.size(); ++d) {
      from += index[d] * formula.strides[d];
    }
    const int64_t stride = formula.strides.back();
    for (double& y : row) {
      y = formula.values->values[static_cast<size_t>(from)];
      from += stride;
    }
    return;
  }
  Fill(*formula.of[0], index, count, row);
  std::vector<double> second;
  if (formula.of.size() > 1) Fill(*formula.of[1], index, count, second);
  if (formula.of.size() < 3) {
    for (size_t i = 0; i < count; ++i) {
      row[i] = formula.f(row[i], second.empty() ? 0 : second[i]);
    }
    return;
  }
  std::vector<double> third;
  Fill(*formula.of[2], index, count, third);
  for (size_t i = 0; i < count; ++i) {
    row[i] = row[i] != 0 ? second[i] : third[i];
  }
}

}  // namespace

OnnxLarge LargeOnnx(OnnxConstant constant) {
  OnnxLarge large = {constant.shape, constant.is_float, nullptr};
  if (constant.values.empty()) return large;
  Shape strides = OnnxStrides(constant.shape);
  large.formula = Numbers(std::move(constant), std::move(strides));
  return large;
}

OnnxLarge LargeOnnx(Shape shape, double value, bool is_float) {
  Shape strides(shape.size(), 0);
  return {std::move(shape), is_float,
          Numbers({{}, {value}, is_float}, std::move(strides))};
}

std::optional<OnnxLarge> FoldLargeOnnx(const OnnxNode& node,
                                       Operands operands) {
  if (operands.empty() || operands[0] == nullptr) return std::nullopt;
  const OnnxLarge& x = *operands[0];
  const size_t given = operands.size() - static_cast<size_t>(std::ranges::count(
                                             operands, nullptr));
  const bool all = given == operands.size();
  if (const OnnxFunction f = OnnxFunctionOf(node.op, x.is_float)) {
    if (!all || given > 2 || node.Int("fmod", 0) != 0) return std::nullopt;
    return Elementwise(f, x.is_float && ComparisonOf(node.op).empty(),
                       operands);
  }
  if (node.op == "Where" && all && given == 3) {
    return Elementwise(nullptr, operands[1]->is_float, operands);
  }
  if (node.op == "Identity") return x;
  if (node.op == "Cast") {
    const auto type = static_cast<int>(node.Int("to", kOnnxFloat));
    OnnxLarge y = {x.shape, IsOnnxFloat(type), x.formula};
    const OnnxFunction f =
        type == kOnnxBool
            ? OnnxFunction([](double v, double) { return v != 0 ? 1.0 : 0.0; })
            : OnnxFunction([](double v, double) { return std::trunc(v); });
    if (!y.is_float) y.formula = Applied(f, {x.formula}, y.shape);
    return y;
  }
  if (node.op == "Expand" || node.op == "ConstantOfShape") {
    const bool expands = node.op == "Expand";
    const OnnxConstant* const sizes = Small(operands, expands ? 1 : 0);
    if (sizes == nullptr) return std::nullopt;
    const Shape to = sizes->Ints();
    if (expands) {
      const auto shape = OnnxBroadcast(x.shape, to);
      if (!shape) return std::nullopt;
      return OnnxLarge{*shape, x.is_float, Spread(x, *shape)};
    }
    const OnnxAttribute* const value = node.Find("value");
    if (value == nullptr) return LargeOnnx(to, 0, true);
    const std::vector<double> values = value->t.Values();
    if (values.size() != 1) return std::nullopt;
    return LargeOnnx(to, values[0], IsOnnxFloat(value->t.type));
  }
  if (node.op == "Slice") return Sliced(x, operands);
  if (node.op == "Concat" && all) return Joined(node, operands);
  if (node.op.starts_with("Gather") && all && given == 2) {
    return Gathered(node, x, *operands[1]);
  }
  if (node.op == "Trilu") {
    const OnnxConstant* const k = Small(operands, 1);
    if (given > 1 && (k == nullptr || k->values.size() != 1)) {
      return std::nullopt;
    }
    return Triangle(node, x, k == nullptr ? 0 : k->values[0]);
  }
  return std::nullopt;
}

OnnxLarge ReshapeLargeOnnx(const OnnxLarge& x, const Shape& shape) {
  OnnxLarge y = {shape, x.is_float, nullptr};
  if (const auto number = UniformOnnx(x)) {
    return LargeOnnx(shape, *number, x.is_float);
  }
  // Dimensions of 1 come and go.
  std::vector<Seen> seen(x.shape.size());
  size_t next = 0;
  const auto skip_ones = [&] {
    while (next < shape.size() && shape[next] == 1) ++next;
  };
  for (size_t d = 0; d < seen.size(); ++d) {
    if (x.shape[d] == 1) continue;
    skip_ones();
    if (next == shape.size() || shape[next] != x.shape[d]) return y;
    seen[d].dim = next++;
  }
  skip_ones();
  if (next == shape.size()) y.formula = Viewed(x.formula, seen, shape.size());
  return y;
}

OnnxLarge TransposeLargeOnnx(const OnnxLarge& x,
                             std::span<const size_t> order) {
  OnnxLarge y = {{}, x.is_float, nullptr};
  std::vector<Seen> seen(order.size());
  for (size_t d = 0; d < order.size(); ++d) {
    y.shape.push_back(x.shape[order[d]]);
    seen[order[d]].dim = d;
  }
  y.formula = Viewed(x.formula, seen, order.size());
  return y;
}

std::optional<double> UniformOnnx(const OnnxLarge& x) {
  if (x.formula == nullptr) return std::nullopt;
  return Uniform(*x.formula, x.shape);
}

bool DependsOn(const OnnxFormula& formula, size_t d) {
  if (formula.values != nullptr) return formula.strides[d] != 0;
  return std::ranges::any_of(
      formula.of, [&](const Formula& x) { return DependsOn(*x, d); });
}

bool SameFormula(const OnnxFormula& a, const OnnxFormula& b) {
  if (&a == &b) return true;
  if (a.f != b.f || a.size != b.size || a.first != b.first ||
      a.strides != b.strides ||
      (a.values == nullptr) != (b.values == nullptr)) {
    return false;
  }
  if (a.values != nullptr) {
    return a.values == b.values || a.values->values == b.values->values;
  }
  return std::ranges::equal(a.of, b.of, [](const Formula& x, const Formula& y) {
    return SameFormula(*x, *y);
  });
}

std::optional<OnnxConstant> ComputedOnnx(const OnnxLarge& x) {
  const auto elements = OnnxElements(x.shape);
  if (!elements || *elements == 0 || x.formula == nullptr) return std::nullopt;
  OnnxConstant y = {x.shape, {}, x.is_float};
  if (const auto number = UniformOnnx(x)) {
    y.values.assign(static_cast<size_t>(*elements), *number);
    return y;
  }
  Shape index(x.shape.size() - 1, 0);
  std::vector<double> row;
  while (std::ssize(y.values) < *elements) {
    RowOf(x, index, row);
    y.values.insert(y.values.end(), row.begin(), row.end());
    for (size_t d = index.size(); d-- > 0;) {
      if (++index[d] < x.shape[d]) break;
      index[d] = 0;
    }
  }
  return y;
}

void RowOf(const OnnxLarge& x, std::span<const int64_t> index,
           std::vector<double>& row) {
  Fill(*x.formula, index, static_cast<size_t>(x.shape.back()), row);
}

}  // namespace tessera
