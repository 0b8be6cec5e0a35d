#pragma once
// What the CPU's and CUDA's causal masks (planner/ops/causal_mask.cc) share.

#include <algorithm>

#include "runtime/kernels/kernel.h"

namespace tessera {

// A dimension of places in a block: that of element i is
// i / stride % count + offset.
struct DimensionPlaces {
  int64_t stride = 1;
  int64_t count = 1;
  int64_t offset = 0;
};

// Those of the factor `letter` in the call's operand.
inline DimensionPlaces PlacesOf(const KernelCall& call, char letter) {
  const Indices& indices = call.rule->operands[0];
  const LocalTensor& x = call.operands[0];
  const auto d = static_cast<size_t>(
      std::ranges::find(indices, call.rule->FactorOf(letter)) -
      indices.begin());
  DimensionPlaces places = {1, x.shape[d], x.offset[d]};
  for (size_t inner = d + 1; inner < x.shape.size(); ++inner) {
    places.stride *= x.shape[inner];
  }
  return places;
}

}  // namespace tessera
