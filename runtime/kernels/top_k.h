#pragma once
// What the CPU's and CUDA's top_k (planner/ops/top_k.cc) share. Include behind
// the back end's loops.

#include <array>

#include "runtime/kernels/points.h"

namespace tessera {

// A call's rows, and how far elements of a row are from each other.
struct TopKRows {
  Points rows;  // of x, the values and the ids
  int64_t places = 0;
  int64_t stride = 1;  // of places in x
  int64_t choices = 0;
  int64_t step = 1;  // of choices in the results
  bool largest = true;
  bool last = false;  // of equal elements
};

inline TopKRows TopKRowsOf(const KernelCall& call) {
  const IndexRule& rule = *call.rule;
  const std::array<Placed, 3> placed = {
      PlacedOperand(call, 0), PlacedResult(call, 0), PlacedResult(call, 1)};
  const auto v = static_cast<uint8_t>(rule.FactorOf('v'));
  const auto k = static_cast<uint8_t>(rule.FactorOf('k'));
  Indices factors = rule.operands[0];
  std::erase(factors, v);
  TopKRows rows;
  rows.rows = PointsOver(call, factors, placed);
  // Neither is split.
  const Points seen = PointsOver(call, {{v}}, placed);
  const Points chosen = PointsOver(call, {{k}}, placed);
  rows.places = seen.count;
  rows.choices = chosen.count;
  if (seen.dims > 0) rows.stride = seen.strides[0][0];
  if (chosen.dims > 0) rows.step = chosen.strides[0][1];
  rows.largest = call.attribute("largest") != 0;
  rows.last = call.attribute("last") != 0;
  return rows;
}

// Whether value `a` of place i is in front of `b` of place j, in the order of a
// row's values, of equal ones in that of their places, or its reverse. What is
// no number is behind all that is one.
template <typename T>
constexpr bool IsInFront(const TopKRows& rows, T a, int64_t i, T b, int64_t j) {
  const bool number_a = a == a;
  const bool number_b = b == b;
  if (number_a != number_b) return number_a;
  if (a == b || !number_a) return rows.last ? i > j : i < j;
  return rows.largest ? a > b : a < b;
}

}  // namespace tessera
