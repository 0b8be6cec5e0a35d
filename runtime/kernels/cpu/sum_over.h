#pragma once
// Loops over the points of a call (runtime/kernels/points.h) on the CPU.

#include <array>
#include <cstdint>

#include "runtime/kernels/cpu/call.h"
#include "runtime/kernels/points.h"

namespace tessera {

using Places = std::array<int64_t, kMostPlaces>;

// Calls f(i, places) for points [begin, end), where the tensors are `from`
// places behind their begin.
template <typename F>
void ForEachPoint(const Points& points, int64_t begin, int64_t end,
                  const Places& from, F f) {
  if (begin >= end) return;
  Places at = from;
  int64_t index[kMaxFactors] = {};
  int64_t rest = begin;
  for (int d = points.dims; d-- > 0;) {
    index[d] = rest % points.extents[d];
    rest /= points.extents[d];
    for (int t = 0; t < kMostPlaces; ++t) {
      at[static_cast<size_t>(t)] += index[d] * points.strides[d][t];
    }
  }
  for (int64_t i = begin;;) {
    f(i, at);
    if (++i == end) return;
    for (int d = points.dims; d-- > 0;) {
      const bool carries = ++index[d] == points.extents[d];
      const int64_t steps = carries ? 1 - points.extents[d] : 1;
      for (int t = 0; t < kMostPlaces; ++t) {
        at[static_cast<size_t>(t)] += steps * points.strides[d][t];
      }
      if (!carries) break;
      index[d] = 0;
    }
  }
}

// Calls f(i, places) for all points, on the threads of the call; `each` is how
// many elements f reads.
template <typename F>
void ForEachPoint(const KernelCall& call, const Points& points, int64_t each,
                  F f) {
  ForEachRange(call, points.count, RowGrain(each),
               [&](int64_t begin, int64_t end) {
                 ForEachPoint(points, begin, end, {}, f);
               });
}

// At each point of result 0: finish(sum of f(elements of the operands) over the
// factors that it lacks), in double; f is given an array of kOperands. Operands
// that are masked to zero are zeros.
template <typename T, size_t kOperands, typename F, typename Finish>
void SumOver(const KernelCall& call, F f, Finish finish) {
  std::array<Placed, kOperands + 1> placed;
  std::array<const T*, kOperands> from;
  for (size_t i = 0; i < kOperands; ++i) {
    placed[i] = PlacedOperand(call, i);
    from[i] = call.operands[i].as<const T>();
  }
  placed[kOperands] = PlacedResult(call, 0);
  T* const to = call.results[0].as<T>();
  const auto [outer, inner] = NestedOver(call, call.rule->results[0], placed);
  ForEachPoint(call, outer, inner.count, [&](int64_t, const Places& start) {
    double sum = 0;
    ForEachPoint(inner, 0, inner.count, start, [&](int64_t, const Places& at) {
      std::array<T, kOperands> values;
      for (size_t i = 0; i < kOperands; ++i) {
        values[i] = from[i] == nullptr ? T{0} : from[i][at[i]];
      }
      sum += static_cast<double>(f(values));
    });
    T& y = to[start[kOperands]];
    const T value = static_cast<T>(finish(sum));
    y = call.accumulate ? y + value : value;
  });
}
template <typename T, size_t kOperands, typename F>
void SumOver(const KernelCall& call, F f) {
  SumOver<T, kOperands>(call, f, [](double sum) { return sum; });
}

}  // namespace tessera
