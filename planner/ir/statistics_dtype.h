#pragma once
// Statistics, losses, scalars, weight gradients and optimizer states are kept
// in at least fp32: fp64 for what is fp64.

#include "planner/ir/dtype.h"

namespace tessera {

constexpr DType StatisticsDType(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

}  // namespace tessera
