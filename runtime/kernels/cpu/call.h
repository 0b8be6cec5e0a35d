#pragma once
// What the CPU kernels share: dispatch by dtype, and access to the few numbers
// (statistics, scalars) whose dtype is not the data's.

#include <algorithm>
#include <cstdint>

#include "runtime/float16.h"
#include "runtime/kernels/kernel.h"
#include "runtime/thread_pool.h"

namespace tessera {

// Calls f(begin, end) for ranges that together are [0, n), on the threads of
// the call. Ranges have at least `grain` iterations, which should take some 10
// us; what f makes of an iteration does not depend on where its range ends.
template <typename F>
void ForEachRange(const KernelCall& call, int64_t n, int64_t grain, F f) {
  constexpr int64_t kRangesPerThread = 4;  // threads may be held up
  const int64_t threads = call.threads != nullptr ? call.threads->threads() : 1;
  const int64_t ranges = std::min(threads * kRangesPerThread, n / grain);
  if (threads == 1 || ranges <= 1) return f(int64_t{0}, n);
  call.threads->For(
      ranges, [&](int64_t i) { f(i * n / ranges, (i + 1) * n / ranges); });
}

// So many elements of an elementwise kernel take some 10 us.
inline constexpr int64_t kGrainElements = 16384;

// Rows of `width` elements.
inline int64_t RowGrain(int64_t width) {
  return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, width));
}

// The dtype of the first 16-bit tensor of the call, or of its first
// floating-point tensor where none has 16 bits.
inline DType DataType(const KernelCall& call) {
  const LocalTensor* first = nullptr;
  for (const auto& tensors : {call.operands, call.results}) {
    for (const LocalTensor& tensor : tensors) {
      if (!IsFloat(tensor.dtype)) continue;
      if (SizeOf(tensor.dtype) == 2) return tensor.dtype;
      if (first == nullptr) first = &tensor;
    }
  }
  TESSERA_CHECK(first != nullptr) << "a call without floating-point tensors";
  return first->dtype;
}

// Runs an fp32 kernel on a call with 16-bit tensors: these are widened, and
// what it makes of the results is rounded once.
void RunWidened(const KernelCall& call, void (*kernel)(const KernelCall&));

// A Kernel::run that picks one of two instances of a kernel template. 16-bit
// data is computed in fp32.
template <void (*kFloat)(const KernelCall&), void (*kDouble)(const KernelCall&)>
void ByDType(const KernelCall& call) {
  switch (DataType(call)) {
    case DType::kFloat32:
      return kFloat(call);
    case DType::kFloat64:
      return kDouble(call);
    case DType::kBFloat16:
    case DType::kFloat16:
      return RunWidened(call, kFloat);
    default:
      TESSERA_CHECK(false) << "the CPU has no kernels for "
                           << NameOf(DataType(call));
  }
}

// Element `i` of a floating-point tensor.
inline double Get(const LocalTensor& tensor, int64_t i) {
  switch (tensor.dtype) {
    case DType::kFloat64:
      return tensor.as<const double>()[i];
    case DType::kBFloat16:
      return ToFloat(tensor.as<const BFloat16>()[i]);
    case DType::kFloat16:
      return ToFloat(tensor.as<const Float16>()[i]);
    default:
      return tensor.as<const float>()[i];
  }
}
inline void Put(const LocalTensor& tensor, int64_t i, double value) {
  const auto single = static_cast<float>(value);
  switch (tensor.dtype) {
    case DType::kFloat64:
      tensor.as<double>()[i] = value;
      break;
    case DType::kBFloat16:
      tensor.as<BFloat16>()[i] = ToBFloat16(single);
      break;
    case DType::kFloat16:
      tensor.as<Float16>()[i] = ToFloat16(single);
      break;
    default:
      tensor.as<float>()[i] = single;
  }
}
// Puts or, where the call accumulates, adds.
inline void PutOrAdd(const KernelCall& call, const LocalTensor& tensor,
                     int64_t i, double value) {
  Put(tensor, i, call.accumulate ? Get(tensor, i) + value : value);
}

}  // namespace tessera
