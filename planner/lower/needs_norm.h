#pragma once
// Whether a step ends with the norm of all gradients: to clip by it, or where
// they are scaled, to see whether one of them is no finite number. Pure.

#include "planner/ir/dtype.h"
#include "planner/plan/plan.h"

namespace tessera {

inline bool NeedsNorm(const TrainingOptions& options, DType dtype) {
  return options.clip > 0 || dtype == DType::kFloat16;
}

}  // namespace tessera
