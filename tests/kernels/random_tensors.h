#pragma once
// Operands of the kernels under test, and what rounding may change of results.

#include "planner/base/rng.h"
#include "tests/support/host_tensor.h"

namespace tessera {

// What one rounding of a result may change, and of the factors of its sums.
inline double Rounding(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return 0x1p-8;
    case DType::kFloat16:
      return 0x1p-11;
    default:
      return 1e-6;
  }
}

// Between -1 and 1.
inline HostTensor Random(const Shape& shape, DType dtype, Rng& rng) {
  HostTensor tensor(shape, dtype);
  for (int64_t i = 0; i < tensor.elements(); ++i) {
    tensor.Set(i, 2 * rng.Uniform01() - 1);
  }
  return tensor;
}

}  // namespace tessera
