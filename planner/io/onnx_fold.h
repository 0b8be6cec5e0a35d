#pragma once
// Constants of an ONNX graph: what its nodes make of tensors whose elements are
// known while the file is read, such as the shape that a Reshape is given.
// Thread-safe: functions without state.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
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

// Larger ones are not computed.
inline constexpr int64_t kMostOnnxValues = int64_t{1} << 20;

// The elements of a shape, or nothing where an extent is negative or they are
// more than kMostOnnxValues.
std::optional<int64_t> OnnxElements(const Shape& shape);

// `constant` with its dimensions in another order.
OnnxConstant TransposeOnnx(const OnnxConstant& constant,
                           std::span<const size_t> order);

// Applies elementwise operator `op` ("Add", "Erf", ...) to scalars, or nothing
// where it is none. `y` is not read by operators of one operand.
std::optional<double> ApplyOnnx(const std::string& op, double x, double y,
                                bool is_float);

// The first result of a node of constants; null stands for an operand that is
// left out. Nothing where its operator is not one that is computed here; an
// error where its operands do not fit, kInfeasible where it is too large.
Result<std::optional<OnnxConstant>> FoldOnnx(
    const OnnxNode& node, std::span<const OnnxConstant* const> operands);

// What a node of a shape and a number makes, Expand or ConstantOfShape, with
// that number alone, however large it is; nothing for others.
std::optional<OnnxConstant> UniformOnnx(
    const OnnxNode& node, std::span<const OnnxConstant* const> operands);

}  // namespace tessera
