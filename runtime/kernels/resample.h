#pragma once
// Which places of a dimension a resampled one looks at
// (planner/ops/resample.cc), on the CPU and in CUDA. They are computed in
// double by both, so that both look at the same ones.

#include <cstdint>

#include "runtime/kernels/kernel.h"
#include "runtime/kernels/places.h"

namespace tessera {

// A plain value, which CUDA kernels are given; constexpr for these.
struct Resampling {
  PlacesOf from;  // the operand of the forward operator
  PlacesOf to;    // and its result
  double start = 0;
  double step = 1;
  bool linear = false;

  // Place i of the result is (1 - t) x[low] + t x[high].
  struct Look {
    int64_t low = 0;
    int64_t high = 0;
    double t = 0;
  };
  constexpr Look At(int64_t i) const {
    const double at = start + static_cast<double>(i) * step;
    const int64_t last = from.places - 1;
    if (!(at > 0)) return {0, 0, 0};
    if (at >= static_cast<double>(last)) return {last, last, 0};
    const auto below = static_cast<int64_t>(at);
    if (!linear) return {below, below, 0};
    return {below, below + 1, at - static_cast<double>(below)};
  }

  // Of the result, no others look at place m: [First(m), Last(m)]. What looks
  // between m - 1 and m + 1, and one more for rounding, or beyond an end.
  constexpr int64_t First(int64_t m) const {
    return m == 0 ? 0 : Near((static_cast<double>(m - 1) - start) / step - 1);
  }
  constexpr int64_t Last(int64_t m) const {
    return m == from.places - 1
               ? to.places - 1
               : Near((static_cast<double>(m + 1) - start) / step + 1);
  }

 private:
  constexpr int64_t Near(double i) const {
    if (!(i > 0)) return 0;
    return i < static_cast<double>(to.places) ? static_cast<int64_t>(i)
                                              : to.places - 1;
  }
};

// `backward`: of the gradient's call, whose operand is the result's.
inline Resampling ResamplingOf(const KernelCall& call, bool backward) {
  const auto [x, y] = PlacesOfCall(call);
  return {backward ? y : x, backward ? x : y, call.attribute("start"),
          call.attribute("step"), call.attribute("linear") != 0};
}

}  // namespace tessera
