#pragma once
// Constants of an ONNX graph: what its nodes make of tensors whose elements are
// known while the file is read, such as the shape that a Reshape is given.
// Thread-safe: functions without state.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"
#include "planner/io/onnx_file.h"
#include "planner/ir/graph.h"

namespace tessera {

struct OnnxConstant {
  Shape shape;
  std::vector<double> values;  // row by row
  bool is_float = false;

  // As whole numbers, of at most 2^53 in size.
  std::vector<int64_t> Ints() const;
};

// `axis` of `dims` dimensions, from the back where it is negative; nothing
// where there is none.
std::optional<size_t> AxisOf(int64_t axis, size_t dims);

// The shape of what a Gather takes along `axis`, by ids of the shape `ids`.
Shape GatheredShape(const Shape& shape, size_t axis, const Shape& ids);

// Larger ones are not computed.
inline constexpr int64_t kMostOnnxValues = int64_t{1} << 20;

// The elements of a shape, or nothing where an extent is negative or they are
// more than kMostOnnxValues.
std::optional<int64_t> OnnxElements(const Shape& shape);

// Strides of a row-major tensor. One without elements has no place to go to,
// and may have extents whose product is no number.
Shape OnnxStrides(const Shape& shape);

// The shape that operands are broadcast to, or nothing.
std::optional<Shape> OnnxBroadcast(const Shape& a, const Shape& b);

// The places of a dimension of `extent` that a Slice takes from `start` to
// `end`, which are counted from the back where they are negative and may be
// beyond it: `first`, and every `step`-th behind it. REQUIRES: step != 0.
struct OnnxPlaces {
  int64_t first = 0;
  int64_t count = 0;
};
OnnxPlaces OnnxPlacesOf(int64_t extent, int64_t start, int64_t end,
                        int64_t step);

// The places of a Slice of a tensor in each dimension: `first`, and every
// `step`-th behind it. `operands` are the node's; the first is not read.
// Nothing where they do not fit.
struct OnnxSlice {
  Shape shape;
  std::vector<int64_t> first;
  std::vector<int64_t> step;
};
std::optional<OnnxSlice> OnnxSliceOf(
    const Shape& shape, std::span<const OnnxConstant* const> operands);

// `constant` with its dimensions in another order.
OnnxConstant TransposeOnnx(const OnnxConstant& constant,
                           std::span<const size_t> order);

// Elementwise operators ("Add", "Erf", ...) of scalars; null where `op` is
// none. The second argument is not read by those of one operand.
using OnnxFunction = double (*)(double x, double y);
OnnxFunction OnnxFunctionOf(std::string_view op, bool is_float);
// Tessera's operator for one that makes bools of numbers, "less" for "Less";
// empty for others.
std::string_view ComparisonOf(std::string_view op);

// Applies elementwise operator `op` ("Add", "Erf", ...) to scalars, or nothing
// where it is none. `y` is not read by operators of one operand.
std::optional<double> ApplyOnnx(const std::string& op, double x, double y,
                                bool is_float);

// The first result of a node of constants; null stands for an operand that is
// left out. Nothing where its operator is not one that is computed here; an
// error where its operands do not fit, kInfeasible where it is too large.
Result<std::optional<OnnxConstant>> FoldOnnx(
    const OnnxNode& node, std::span<const OnnxConstant* const> operands);

}  // namespace tessera
