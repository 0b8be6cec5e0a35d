#pragma once
// The dimension in which an operand and a result differ: that which a slice or
// a pad changes, or concat_channels joins (planner/ops/{slice,channels}.cc).

#include <cstdint>
#include <utility>

#include "runtime/kernels/kernel.h"

namespace tessera {

// A tensor as (outer, places, inner).
struct PlacesOf {
  int64_t outer = 1;
  int64_t places = 1;
  int64_t inner = 1;

  int64_t At(int64_t row, int64_t place) const {
    return (row * places + place) * inner;
  }
};

// Of the operand and of the result: the dimension in which they differ.
inline std::pair<PlacesOf, PlacesOf> PlacesOfCall(const KernelCall& call) {
  const Indices& x = call.rule->operands[0];
  const Indices& y = call.rule->results[0];
  std::pair<PlacesOf, PlacesOf> places;
  bool behind = false;
  for (size_t d = 0; d < x.size(); ++d) {
    const int64_t from = call.operands[0].shape[d];
    const int64_t to = call.results[0].shape[d];
    if (x[d] != y[d]) {
      places.first.places = from;
      places.second.places = to;
      behind = true;
      continue;
    }
    (behind ? places.first.inner : places.first.outer) *= from;
    (behind ? places.second.inner : places.second.outer) *= to;
  }
  return places;
}

}  // namespace tessera
