// Arithmetic of two operands that are broadcast to the result. An adjoint sums
// over the factors that its operand lacks.

#include <cmath>
#include <functional>

#include "runtime/kernels/cpu/sum_over.h"

namespace tessera {
namespace {

// f of both operands, without a loop over factors where they are alike.
template <typename T, typename F>
void OfBoth(const KernelCall& call, F f) {
  const IndexRule& rule = *call.rule;
  if (call.accumulate || rule.operands[0] != rule.results[0] ||
      rule.operands[1] != rule.results[0]) {
    return SumOver<T, 2>(call, f);
  }
  const T* const a = call.operands[0].as<const T>();
  const T* const b = call.operands[1].as<const T>();
  T* const y = call.results[0].as<T>();
  ForEachRange(call, call.results[0].elements(), kGrainElements,
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   y[i] = f(std::array<T, 2>{a[i], b[i]});
                 }
               });
}

template <typename T>
void Multiply(const KernelCall& call) {
  OfBoth<T>(call, [](const auto& v) { return v[0] * v[1]; });
}

template <typename T>
void Add(const KernelCall& call) {
  OfBoth<T>(call, [](const auto& v) { return v[0] + v[1]; });
}

template <typename T>
void Subtract(const KernelCall& call) {
  OfBoth<T>(call, [](const auto& v) { return v[0] - v[1]; });
}

// dy -> dx1.
template <typename T>
void ReduceNegative(const KernelCall& call) {
  SumOver<T, 1>(call, [](const auto& v) { return -v[0]; });
}

template <typename T>
void Divide(const KernelCall& call) {
  OfBoth<T>(call, [](const auto& v) { return v[0] / v[1]; });
}

// dy, a, b -> db.
template <typename T>
void DivideDy(const KernelCall& call) {
  SumOver<T, 3>(call,
                [](const auto& v) { return -v[0] * v[1] / (v[2] * v[2]); });
}

template <typename T>
void Maximum(const KernelCall& call) {
  OfBoth<T>(call, [](const auto& v) {
    return v[0] > v[1] || std::isnan(v[0]) ? v[0] : v[1];
  });
}

// dy, own, other -> gradient of `own`: all of dy where one is not a number.
template <typename T>
void MaximumDx(const KernelCall& call) {
  SumOver<T, 3>(call, [](const auto& v) {
    return v[1] == v[2] ? v[0] / 2 : v[1] < v[2] ? T{0} : v[0];
  });
}

template <typename T>
void Minimum(const KernelCall& call) {
  OfBoth<T>(call, [](const auto& v) {
    return v[0] < v[1] || std::isnan(v[0]) ? v[0] : v[1];
  });
}

template <typename T>
void MinimumDx(const KernelCall& call) {
  SumOver<T, 3>(call, [](const auto& v) {
    return v[1] == v[2] ? v[0] / 2 : v[1] > v[2] ? T{0} : v[0];
  });
}

// 1 where Compare() holds of both operands.
template <typename T, typename Compare>
void CompareBoth(const KernelCall& call) {
  OfBoth<T>(call,
            [](const auto& v) { return Compare()(v[0], v[1]) ? T{1} : T{0}; });
}
template <typename Compare>
constexpr auto kCompare =
    ByDType<CompareBoth<float, Compare>, CompareBoth<double, Compare>>;

// condition, a, b -> y.
template <typename T>
void Where(const KernelCall& call) {
  SumOver<T, 3>(call, [](const auto& v) { return v[0] != 0 ? v[1] : v[2]; });
}

// dy, condition -> da.
template <typename T>
void WhereDx(const KernelCall& call) {
  OfBoth<T>(call, [](const auto& v) { return v[1] != 0 ? v[0] : T{0}; });
}

// dy, condition -> db.
template <typename T>
void WhereDy(const KernelCall& call) {
  OfBoth<T>(call, [](const auto& v) { return v[1] != 0 ? T{0} : v[0]; });
}

}  // namespace

std::vector<Kernel> CpuBroadcastKernels() {
  return {
      {"multiply", ByDType<Multiply<float>, Multiply<double>>, true},
      {"broadcast_add", ByDType<Add<float>, Add<double>>, true},
      {"subtract", ByDType<Subtract<float>, Subtract<double>>, true},
      {"reduce_negative",
       ByDType<ReduceNegative<float>, ReduceNegative<double>>, true},
      {"divide", ByDType<Divide<float>, Divide<double>>, true},
      {"divide_dx", ByDType<Divide<float>, Divide<double>>, true},
      {"divide_dy", ByDType<DivideDy<float>, DivideDy<double>>, true},
      {"maximum", ByDType<Maximum<float>, Maximum<double>>, true},
      {"maximum_dx", ByDType<MaximumDx<float>, MaximumDx<double>>, true},
      {"minimum", ByDType<Minimum<float>, Minimum<double>>, true},
      {"minimum_dx", ByDType<MinimumDx<float>, MinimumDx<double>>, true},
      {"equal", kCompare<std::equal_to<>>, true},
      {"not_equal", kCompare<std::not_equal_to<>>, true},
      {"less", kCompare<std::less<>>, true},
      {"less_equal", kCompare<std::less_equal<>>, true},
      {"greater", kCompare<std::greater<>>, true},
      {"greater_equal", kCompare<std::greater_equal<>>, true},
      {"where", ByDType<Where<float>, Where<double>>, true},
      {"where_dx", ByDType<WhereDx<float>, WhereDx<double>>, true},
      {"where_dy", ByDType<WhereDy<float>, WhereDy<double>>, true},
  };
}

}  // namespace tessera
