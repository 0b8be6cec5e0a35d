// Losses that are means over elements (planner/ops/losses.cc). Sums are in
// double.

#include "runtime/kernels/losses.h"

#include <cmath>

#include "runtime/kernels/cpu/call.h"

namespace tessera {
namespace {

// These elements' share of the weighted mean of f(x, t).
template <typename T, typename F>
void MeanOf(const KernelCall& call, F f) {
  const LocalTensor& of = call.operands[0];
  const T* const x = of.as<const T>();
  const T* const t = call.operands[1].as<const T>();
  double sum = 0;
  for (int64_t i = 0; i < of.elements(); ++i) {
    sum += f(static_cast<double>(x[i]), static_cast<double>(t[i]));
  }
  PutOrAdd(call, call.results[0], 0, sum * WeightOf(call, of));
}

// f(i) weighted, times the loss scale if that is operand `scale`.
template <typename T, typename F>
void GradientOf(const KernelCall& call, size_t scale, F f) {
  const LocalTensor& dx = call.results[0];
  const double loss_scale =
      call.operands.size() > scale ? Get(call.operands[scale], 0) : 1;
  const T weight = static_cast<T>(loss_scale * WeightOf(call, dx));
  T* const to = dx.as<T>();
  ForEachRange(call, dx.elements(), kGrainElements,
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) to[i] = f(i) * weight;
               });
}

template <typename T>
void MeanSquaredError(const KernelCall& call) {
  MeanOf<T>(call, [](double x, double t) { return (x - t) * (x - t); });
}

// One side, the other one [, loss scale] -> gradient of the one side.
template <typename T>
void MeanSquaredErrorDx(const KernelCall& call) {
  const T* const x = call.operands[0].as<const T>();
  const T* const t = call.operands[1].as<const T>();
  GradientOf<T>(call, 2, [&](int64_t i) { return 2 * (x[i] - t[i]); });
}

template <typename T>
void BinaryCrossEntropy(const KernelCall& call) {
  MeanOf<T>(call, [](double x, double t) {
    return std::max(x, 0.0) - x * t + std::log1p(std::exp(-std::abs(x)));
  });
}

// Logits, targets [, loss scale] -> dlogits.
template <typename T>
void BinaryCrossEntropyDx(const KernelCall& call) {
  const T* const x = call.operands[0].as<const T>();
  const T* const t = call.operands[1].as<const T>();
  GradientOf<T>(call, 2,
                [&](int64_t i) { return 1 / (1 + std::exp(-x[i])) - t[i]; });
}

// Logits [, loss scale] -> dtargets.
template <typename T>
void BinaryCrossEntropyDt(const KernelCall& call) {
  const T* const x = call.operands[0].as<const T>();
  GradientOf<T>(call, 1, [&](int64_t i) { return -x[i]; });
}

}  // namespace

std::vector<Kernel> CpuLossesKernels() {
  return {
      {"mean_squared_error",
       ByDType<MeanSquaredError<float>, MeanSquaredError<double>>, true},
      {"mean_squared_error_dx",
       ByDType<MeanSquaredErrorDx<float>, MeanSquaredErrorDx<double>>},
      {"binary_cross_entropy",
       ByDType<BinaryCrossEntropy<float>, BinaryCrossEntropy<double>>, true},
      {"binary_cross_entropy_dx",
       ByDType<BinaryCrossEntropyDx<float>, BinaryCrossEntropyDx<double>>},
      {"binary_cross_entropy_dt",
       ByDType<BinaryCrossEntropyDt<float>, BinaryCrossEntropyDt<double>>},
  };
}

}  // namespace tessera
