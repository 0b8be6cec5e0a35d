#pragma once
// The rows of a softmax (planner/ops/softmax.cc): its states are in their
// order.

#include <algorithm>
#include <span>

#include "runtime/kernels/points.h"

namespace tessera {

struct SoftmaxRows {
  Points rows;    // one for each state
  Points places;  // of a row, along factor z
};

inline SoftmaxRows SoftmaxRowsOf(const KernelCall& call,
                                 std::span<const Placed> tensors) {
  const IndexRule& rule = *call.rule;
  const auto z = static_cast<uint8_t>(rule.FactorOf('z'));
  Indices others = FactorsBut(rule, {z});
  // The order of Coupling::state_indices.
  std::ranges::sort(others, {},
                    [&](uint8_t f) { return rule.factors[f].letter; });
  return {PointsOver(call, others, tensors),
          PointsOver(call, Indices{z}, tensors)};
}

}  // namespace tessera
