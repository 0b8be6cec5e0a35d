// Reductions over the factors that the result lacks, in double.

#include <algorithm>
#include <array>
#include <cmath>

#include "runtime/kernels/cpu/sum_over.h"

namespace tessera {
namespace {

template <typename T>
void ReduceSum(const KernelCall& call) {
  SumOver<T, 1>(call, [](const auto& v) { return v[0]; });
}

// The elements that a mean is of, on all ranks: over the factors that `of`
// lacks.
double CountOver(const KernelCall& call, const Indices& of) {
  double count = 1;
  for (uint8_t f : FactorsBut(*call.rule, of)) {
    count *= static_cast<double>(GlobalExtent(call, f));
  }
  return count;
}

// The sum over the factors that the result lacks, by the number of elements
// that a mean of indices `of` is of.
template <typename T>
void SumByCount(const KernelCall& call, const Indices& of) {
  const double count = CountOver(call, of);
  SumOver<T, 1>(
      call, [](const auto& v) { return v[0]; },
      [count](double sum) { return sum / count; });
}

// x -> mean. A shard of the reduced factors gives its share.
template <typename T>
void ReduceMean(const KernelCall& call) {
  SumByCount<T>(call, call.rule->results[0]);
}

// dy -> dx.
template <typename T>
void ReduceMeanDx(const KernelCall& call) {
  SumByCount<T>(call, call.rule->operands[0]);
}

// x -> y; not a number where one of x is none.
template <typename T>
void ReduceMax(const KernelCall& call) {
  const std::array<Placed, 2> placed = {PlacedOperand(call, 0),
                                        PlacedResult(call, 0)};
  const auto [outer, inner] = NestedOver(call, call.rule->results[0], placed);
  const T* const x = call.operands[0].as<const T>();
  ForEachPoint(call, outer, inner.count, [&](int64_t, const Places& start) {
    T most = x[start[0]];
    ForEachPoint(inner, 0, inner.count, start, [&](int64_t, const Places& at) {
      const T value = x[at[0]];
      if (value > most || std::isnan(value)) most = value;
    });
    call.results[0].as<T>()[start[1]] = most;
  });
}

// dy, x, y -> dx: as that of PyTorch's amax, not a number wherever y is none.
template <typename T>
void ReduceMaxDx(const KernelCall& call) {
  const std::array<Placed, 4> placed = {
      PlacedOperand(call, 0), PlacedOperand(call, 1), PlacedOperand(call, 2),
      PlacedResult(call, 0)};
  const auto [outer, inner] = NestedOver(call, call.rule->operands[0], placed);
  const T* const x = call.operands[1].as<const T>();
  T* const dx = call.results[0].as<T>();
  ForEachPoint(call, outer, inner.count, [&](int64_t, const Places& start) {
    const T most = call.operands[2].as<const T>()[start[2]];
    double times = 0;
    ForEachPoint(inner, 0, inner.count, start,
                 [&](int64_t, const Places& at) { times += x[at[1]] == most; });
    const T share = static_cast<T>(
        static_cast<double>(call.operands[0].as<const T>()[start[0]]) / times);
    const T rest = static_cast<T>(0 / times);
    ForEachPoint(inner, 0, inner.count, start, [&](int64_t, const Places& at) {
      const T value = x[at[1]] == most ? share : rest;
      T& to = dx[at[3]];
      to = call.accumulate ? to + value : value;
    });
  });
}

// The mean of x over the points of `inner` from places[k] on.
template <typename T>
double MeanOf(const T* x, const Points& inner, const Places& start, size_t k) {
  double sum = 0;
  ForEachPoint(inner, 0, inner.count, start,
               [&](int64_t, const Places& at) { sum += x[at[k]]; });
  return sum / static_cast<double>(inner.count);
}

// x -> y.
template <typename T>
void ReduceVariance(const KernelCall& call) {
  const std::array<Placed, 2> placed = {PlacedOperand(call, 0),
                                        PlacedResult(call, 0)};
  const auto [outer, inner] = NestedOver(call, call.rule->results[0], placed);
  const double divisor =
      static_cast<double>(inner.count) - call.attribute("correction");
  const T* const x = call.operands[0].as<const T>();
  ForEachPoint(call, outer, inner.count, [&](int64_t, const Places& start) {
    const double mean = MeanOf(x, inner, start, 0);
    double squares = 0;
    ForEachPoint(inner, 0, inner.count, start, [&](int64_t, const Places& at) {
      const double d = static_cast<double>(x[at[0]]) - mean;
      squares += d * d;
    });
    call.results[0].as<T>()[start[1]] = static_cast<T>(squares / divisor);
  });
}

// dy, x -> dx = 2 dy (x - mean) / (n - correction).
template <typename T>
void ReduceVarianceDx(const KernelCall& call) {
  const std::array<Placed, 3> placed = {
      PlacedOperand(call, 0), PlacedOperand(call, 1), PlacedResult(call, 0)};
  const auto [outer, inner] = NestedOver(call, call.rule->operands[0], placed);
  const double divisor =
      static_cast<double>(inner.count) - call.attribute("correction");
  const T* const x = call.operands[1].as<const T>();
  T* const dx = call.results[0].as<T>();
  ForEachPoint(call, outer, inner.count, [&](int64_t, const Places& start) {
    const double mean = MeanOf(x, inner, start, 1);
    const double slope =
        2 * static_cast<double>(call.operands[0].as<const T>()[start[0]]) /
        divisor;
    ForEachPoint(inner, 0, inner.count, start, [&](int64_t, const Places& at) {
      const T value =
          static_cast<T>(slope * (static_cast<double>(x[at[1]]) - mean));
      T& to = dx[at[2]];
      to = call.accumulate ? to + value : value;
    });
  });
}

}  // namespace

std::vector<Kernel> CpuReductionKernels() {
  return {
      {"transpose", ByDType<ReduceSum<float>, ReduceSum<double>>, true},
      {"reduce_sum", ByDType<ReduceSum<float>, ReduceSum<double>>, true},
      {"reduce_sum_dx", ByDType<ReduceSum<float>, ReduceSum<double>>, true},
      {"reduce_mean", ByDType<ReduceMean<float>, ReduceMean<double>>, true},
      {"reduce_mean_dx", ByDType<ReduceMeanDx<float>, ReduceMeanDx<double>>,
       true},
      {"reduce_max", ByDType<ReduceMax<float>, ReduceMax<double>>},
      {"reduce_max_dx", ByDType<ReduceMaxDx<float>, ReduceMaxDx<double>>, true},
      {"reduce_variance",
       ByDType<ReduceVariance<float>, ReduceVariance<double>>},
      {"reduce_variance_dx",
       ByDType<ReduceVarianceDx<float>, ReduceVarianceDx<double>>, true},
  };
}

}  // namespace tessera
