#pragma once
// Statistics, losses, scalars, weight gradients and optimizer states are kept
// in at least fp32: fp64 for what is fp64.

#include "planner/ir/dtype.h"
#include "planner/ir/stack.h"

namespace tessera {

constexpr DType StatisticsDType(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// What the gradient of a weight is added up and reduced in.
constexpr DType GradientDType(DType weight, const StackMemory& memory) {
  const bool half = (weight == DType::kFloat16 && memory.fp16_gradients) ||
                    (weight == DType::kBFloat16 && memory.bf16_gradients);
  return half ? weight : StatisticsDType(weight);
}

}  // namespace tessera
