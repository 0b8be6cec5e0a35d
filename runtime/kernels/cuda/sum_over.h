#pragma once
// Loops over the points of a call (runtime/kernels/points.h) in CUDA. For .cu
// files.

#include <array>
#include <cmath>

#include "runtime/kernels/cuda/reduce.h"
#include "runtime/kernels/points.h"

namespace tessera {

// Where the tensors of a loop have their elements.
struct LoopPlaces {
  int64_t of[kMostPlaces] = {};

  // Moves on to point `i` of the loop.
  __device__ void Add(const Points& points, int64_t i) {
    for (int d = points.dims - 1; d >= 0; --d) {
      const int64_t index = i % points.extents[d];
      i /= points.extents[d];
#pragma unroll
      for (int t = 0; t < kMostPlaces; ++t) {
        of[t] += index * points.strides[d][t];
      }
    }
  }
};

template <typename T, int kOperands>
struct Sources {
  Elements<T> of[kOperands];
};

// to = factor * sum of f(elements of the operands) over the inner points. With
// kBlocks a block adds up a point's sum, otherwise a thread.
template <typename T, int kOperands, bool kBlocks, typename F>
__global__ void SumPoints(Points outer, Points inner,
                          Sources<T, kOperands> from, Elements<T> to, F f,
                          float factor, bool accumulate) {
  const int64_t first = kBlocks
                            ? int64_t{blockIdx.x}
                            : int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t step =
      kBlocks ? int64_t{gridDim.x} : int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = first; i < outer.count; i += step) {
    LoopPlaces start;
    start.Add(outer, i);
    float sum = 0;
    for (int64_t j = kBlocks ? threadIdx.x : 0; j < inner.count;
         j += kBlocks ? blockDim.x : 1) {
      LoopPlaces at = start;
      at.Add(inner, j);
      float values[kOperands];
#pragma unroll
      for (int k = 0; k < kOperands; ++k) {
        values[k] =
            from.of[k].data == nullptr ? 0.0f : from.of[k].Get(at.of[k]);
      }
      sum += f(values);
    }
    if (kBlocks) sum = Sum(sum);
    if (kBlocks && threadIdx.x > 0) continue;
    const int64_t place = start.of[kOperands];
    to.Set(place, factor * sum + (accumulate ? to.Get(place) : 0.0f));
  }
}

// At each point of result 0: factor * sum of f(elements of the operands) over
// the factors that it lacks. f is given an array of kOperands.
template <int kOperands, typename F>
void SumOver(const KernelCall& call, F f, float factor = 1) {
  const LocalTensor& y = call.results[0];
  std::vector<LocalTensor> tensors = {y};
  std::array<Placed, kOperands + 1> placed;
  for (size_t i = 0; i < kOperands; ++i) {
    placed[i] = PlacedOperand(call, i);
    tensors.push_back(call.operands[i]);
  }
  placed[kOperands] = PlacedResult(call, 0);
  const auto [outer, inner] = NestedOver(call, call.rule->results[0], placed);
  // Longer sums are shared by the threads of a block.
  constexpr int64_t kLongSum = 64;
  ByType(tensors, [&]<typename T>() {
    Sources<T, kOperands> from;
    for (int i = 0; i < kOperands; ++i) {
      from.of[i] = Elements<T>(tensors[static_cast<size_t>(i) + 1]);
    }
    if (inner.count >= kLongSum) {
      Launch(SumPoints<T, kOperands, true, F>,
             static_cast<unsigned>(
                 std::min<int64_t>(outer.count, int64_t{1} << 20)),
             kThreads, 0, *call.queue, outer, inner, from, Elements<T>(y), f,
             factor, call.accumulate);
    } else {
      Launch(SumPoints<T, kOperands, false, F>,
             BlocksFor(*call.queue, outer.count), kThreads, 0, *call.queue,
             outer, inner, from, Elements<T>(y), f, factor, call.accumulate);
    }
  });
}

// ---- Rows, a warp for each --------------------------------------------------

inline constexpr unsigned kRowsOfBlock = 4;

inline dim3 GridOfRows(int64_t rows) {
  return dim3(BlocksOf(rows, kRowsOfBlock));
}
inline dim3 BlockOfRows() {
  return dim3(kWarp, kRowsOfBlock);
}

// Calls f(places) for the inner points of this warp's row, which the lanes
// share.
template <typename F>
__device__ void ForEachOfRow(const Points& inner, const LoopPlaces& start,
                             F f) {
  for (int64_t j = threadIdx.x; j < inner.count; j += kWarp) {
    LoopPlaces at = start;
    at.Add(inner, j);
    f(at);
  }
}

__device__ inline float Largest(float value) {
  return ReduceWarp(
      value, [](float a, float b) { return a > b || std::isnan(a) ? a : b; });
}

}  // namespace tessera
