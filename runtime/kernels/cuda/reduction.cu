// Reductions over the factors that the result lacks. Formulas:
// runtime/kernels/cpu/reduction.cc.

#include <cmath>

#include "runtime/kernels/cuda/sum_over.h"

namespace tessera {
namespace {

struct Same {
  __device__ float operator()(const float (&v)[1]) const { return v[0]; }
};

void ReduceSum(const KernelCall& call) {
  SumOver<1>(call, Same());
}

// One over the elements that a mean is of, on all ranks: over the factors that
// `of` lacks.
float OneOver(const KernelCall& call, const Indices& of) {
  double count = 1;
  for (uint8_t f : FactorsBut(*call.rule, of)) {
    count *= static_cast<double>(GlobalExtent(call, f));
  }
  return static_cast<float>(1 / count);
}

void ReduceMean(const KernelCall& call) {
  SumOver<1>(call, Same(), OneOver(call, call.rule->results[0]));
}
void ReduceMeanDx(const KernelCall& call) {
  SumOver<1>(call, Same(), OneOver(call, call.rule->operands[0]));
}

// Adds to, or sets, an element.
template <typename T>
__device__ void Put(const Elements<T>& to, int64_t place, float value,
                    bool accumulate) {
  to.Set(place, accumulate ? to.Get(place) + value : value);
}

template <typename T>
__global__ void MaxOfRows(Points outer, Points inner, Elements<T> x,
                          Elements<T> y) {
  const int64_t row = RowOfThread();
  if (row >= outer.count) return;
  LoopPlaces start;
  start.Add(outer, row);
  float most = x.Get(start.of[0]);
  ForEachOfRow(inner, start, [&](const LoopPlaces& at) {
    const float value = x.Get(at.of[0]);
    most = value > most || std::isnan(value) ? value : most;
  });
  most = Largest(most);
  if (threadIdx.x == 0) y.Set(start.of[1], most);
}

template <typename T>
__global__ void MaxOfRowsDx(Points outer, Points inner, Elements<T> dy,
                            Elements<T> x, Elements<T> y, Elements<T> dx,
                            bool accumulate) {
  const int64_t row = RowOfThread();
  if (row >= outer.count) return;
  LoopPlaces start;
  start.Add(outer, row);
  const float most = y.Get(start.of[2]);
  float times = 0;
  ForEachOfRow(inner, start, [&](const LoopPlaces& at) {
    times += x.Get(at.of[1]) == most ? 1.0f : 0.0f;
  });
  times = Sum(times);
  const float share = dy.Get(start.of[0]) / times;
  const float rest = 0 / times;
  ForEachOfRow(inner, start, [&](const LoopPlaces& at) {
    Put(dx, at.of[3], x.Get(at.of[1]) == most ? share : rest, accumulate);
  });
}

// The mean of x over the row, of which `k` is the tensor.
template <typename T, int k>
__device__ float MeanOfRow(const Points& inner, const LoopPlaces& start,
                           const Elements<T>& x) {
  float sum = 0;
  ForEachOfRow(inner, start,
               [&](const LoopPlaces& at) { sum += x.Get(at.of[k]); });
  return Sum(sum) / static_cast<float>(inner.count);
}

template <typename T>
__global__ void VarianceOfRows(Points outer, Points inner, Elements<T> x,
                               float divisor, Elements<T> y) {
  const int64_t row = RowOfThread();
  if (row >= outer.count) return;
  LoopPlaces start;
  start.Add(outer, row);
  const float mean = MeanOfRow<T, 0>(inner, start, x);
  float squares = 0;
  ForEachOfRow(inner, start, [&](const LoopPlaces& at) {
    const float d = x.Get(at.of[0]) - mean;
    squares += d * d;
  });
  squares = Sum(squares);
  if (threadIdx.x == 0) y.Set(start.of[1], squares / divisor);
}

template <typename T>
__global__ void VarianceOfRowsDx(Points outer, Points inner, Elements<T> dy,
                                 Elements<T> x, float divisor, Elements<T> dx,
                                 bool accumulate) {
  const int64_t row = RowOfThread();
  if (row >= outer.count) return;
  LoopPlaces start;
  start.Add(outer, row);
  const float mean = MeanOfRow<T, 1>(inner, start, x);
  const float slope = 2 * dy.Get(start.of[0]) / divisor;
  ForEachOfRow(inner, start, [&](const LoopPlaces& at) {
    Put(dx, at.of[2], slope * (x.Get(at.of[1]) - mean), accumulate);
  });
}

void ReduceMax(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const LocalTensor& y = call.results[0];
  const std::array<Placed, 2> placed = {PlacedOperand(call, 0),
                                        PlacedResult(call, 0)};
  const auto [outer, inner] = NestedOver(call, call.rule->results[0], placed);
  ByType({x, y}, [&]<typename T>() {
    Launch(MaxOfRows<T>, GridOfRows(outer.count), BlockOfRows(), 0, *call.queue,
           outer, inner, Elements<T>(x), Elements<T>(y));
  });
}

void ReduceMaxDx(const KernelCall& call) {
  const std::array<Placed, 4> placed = {
      PlacedOperand(call, 0), PlacedOperand(call, 1), PlacedOperand(call, 2),
      PlacedResult(call, 0)};
  const auto [outer, inner] = NestedOver(call, call.rule->operands[0], placed);
  const LocalTensor& dy = call.operands[0];
  const LocalTensor& x = call.operands[1];
  const LocalTensor& y = call.operands[2];
  const LocalTensor& dx = call.results[0];
  ByType({dy, x, y, dx}, [&]<typename T>() {
    Launch(MaxOfRowsDx<T>, GridOfRows(outer.count), BlockOfRows(), 0,
           *call.queue, outer, inner, Elements<T>(dy), Elements<T>(x),
           Elements<T>(y), Elements<T>(dx), call.accumulate);
  });
}

float VarianceDivisor(const KernelCall& call, const Points& inner) {
  return static_cast<float>(static_cast<double>(inner.count) -
                            call.attribute("correction"));
}

void ReduceVariance(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const LocalTensor& y = call.results[0];
  const std::array<Placed, 2> placed = {PlacedOperand(call, 0),
                                        PlacedResult(call, 0)};
  const auto [outer, inner] = NestedOver(call, call.rule->results[0], placed);
  ByType({x, y}, [&]<typename T>() {
    Launch(VarianceOfRows<T>, GridOfRows(outer.count), BlockOfRows(), 0,
           *call.queue, outer, inner, Elements<T>(x),
           VarianceDivisor(call, inner), Elements<T>(y));
  });
}

void ReduceVarianceDx(const KernelCall& call) {
  const std::array<Placed, 3> placed = {
      PlacedOperand(call, 0), PlacedOperand(call, 1), PlacedResult(call, 0)};
  const auto [outer, inner] = NestedOver(call, call.rule->operands[0], placed);
  const LocalTensor& dy = call.operands[0];
  const LocalTensor& x = call.operands[1];
  const LocalTensor& dx = call.results[0];
  ByType({dy, x, dx}, [&]<typename T>() {
    Launch(VarianceOfRowsDx<T>, GridOfRows(outer.count), BlockOfRows(), 0,
           *call.queue, outer, inner, Elements<T>(dy), Elements<T>(x),
           VarianceDivisor(call, inner), Elements<T>(dx), call.accumulate);
  });
}

}  // namespace

std::vector<Kernel> CudaReductionKernels() {
  return {
      {"transpose", ReduceSum, true},
      {"reduce_sum", ReduceSum, true},
      {"reduce_sum_dx", ReduceSum, true},
      {"reduce_mean", ReduceMean, true},
      {"reduce_mean_dx", ReduceMeanDx, true},
      {"reduce_max", ReduceMax},
      {"reduce_max_dx", ReduceMaxDx, true},
      {"reduce_variance", ReduceVariance},
      {"reduce_variance_dx", ReduceVarianceDx, true},
  };
}

}  // namespace tessera
