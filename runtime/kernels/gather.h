#pragma once
// The loops of gather and scatter_add (planner/ops/gather.cc), on the CPU and
// in CUDA.

#include <algorithm>

#include "runtime/kernels/points.h"

namespace tessera {

// The dimension that ids address, of the tensor that has it.
struct IdAxis {
  int64_t first = 0;  // global place of its first element
  int64_t places = 0;
  int64_t stride = 1;  // in elements

  // The element of the tensor, beyond that of place 0, which `id` addresses;
  // or -1.
  constexpr int64_t At(int64_t id) const {
    const int64_t place = id - first;
    return place >= 0 && place < places ? place * stride : -1;
  }
};

// `table` is the tensor that ids address: an operand or a result of the call.
inline uint8_t AxisFactor(const IndexRule& rule, const Indices& table) {
  const bool is_operand = table == rule.operands[0];
  const Indices& picked = is_operand ? rule.results[0] : rule.operands[0];
  return *std::ranges::find_if(table,
                               [&](uint8_t f) { return !Holds(picked, f); });
}

inline IdAxis AxisOf(const Placed& table, uint8_t factor) {
  IdAxis axis;
  for (size_t d = table.indices->size(); d-- > 0;) {
    if ((*table.indices)[d] == factor) {
      axis.first = table.tensor->offset[d];
      axis.places = table.tensor->shape[d];
      return axis;
    }
    axis.stride *= table.tensor->shape[d];
  }
  return axis;
}

}  // namespace tessera
