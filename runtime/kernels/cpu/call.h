#pragma once
// What the CPU kernels share: dispatch by dtype, and access to the few numbers
// (statistics, scalars) whose dtype is not the data's.

#include <cstdint>

#include "runtime/float16.h"
#include "runtime/kernels/kernel.h"

namespace tessera {

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
