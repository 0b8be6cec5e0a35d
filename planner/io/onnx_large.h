#pragma once
// Constants of an ONNX graph that have too many elements to be all computed,
// such as a causal mask of thousands of places for each sample: how each
// element is computed, which is done where it is looked at. Thread-safe:
// functions without state.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "planner/io/onnx_file.h"
#include "planner/io/onnx_fold.h"
#include "planner/ir/graph.h"

namespace tessera {

// How the elements of a constant are computed, by their index. Immutable.
struct OnnxFormula {
  // Elements of `values`, that at `first` + index . `strides`.
  std::shared_ptr<const OnnxConstant> values;
  int64_t first = 0;
  Shape strides;
  // Where there are no values: `f` of what others are at the same index; of
  // three the second where the first is not 0, else the third.
  OnnxFunction f = nullptr;
  std::vector<std::shared_ptr<const OnnxFormula>> of;
  int size = 1;  // formulas that it is made of
};

struct OnnxLarge {
  Shape shape;
  bool is_float = false;
  std::shared_ptr<const OnnxFormula> formula;  // null: not known
};

OnnxLarge LargeOnnx(OnnxConstant constant);
// All elements are `value`.
OnnxLarge LargeOnnx(Shape shape, double value, bool is_float);

// The first result of a node, with or without a formula; null stands for an
// operand that is left out. Nothing where even its shape is not known.
// REQUIRES: operands that have the shapes which the node asks for, or not: then
// nothing, too.
std::optional<OnnxLarge> FoldLargeOnnx(
    const OnnxNode& node, std::span<const OnnxLarge* const> operands);

// In another shape of as many elements. REQUIRES: as many.
OnnxLarge ReshapeLargeOnnx(const OnnxLarge& x, const Shape& shape);
// With its dimensions in another order.
OnnxLarge TransposeLargeOnnx(const OnnxLarge& x, std::span<const size_t> order);

// The number that all elements are, where the formula says so.
std::optional<double> UniformOnnx(const OnnxLarge& x);

// All elements, where they are known and not too many after all.
std::optional<OnnxConstant> ComputedOnnx(const OnnxLarge& x);

// Whether an element depends on its index in dimension d.
bool DependsOn(const OnnxFormula& formula, size_t d);

// Whether both are the same function of the same numbers.
bool SameFormula(const OnnxFormula& a, const OnnxFormula& b);

// The elements behind each other in the last dimension, whose index is left out
// of `index`, and into `row`. REQUIRES: a formula, and a dimension.
void RowOf(const OnnxLarge& x, std::span<const int64_t> index,
           std::vector<double>& row);

}  // namespace tessera
