#pragma once
// What the CPU kernels share: dispatch by dtype, and access to the few numbers
// (statistics, scalars) whose dtype is not the data's.

#include <cstdint>

#include "runtime/kernels/kernel.h"

namespace tessera {

// The dtype of the first floating-point tensor of the call.
inline DType DataType(const KernelCall& call) {
  for (const LocalTensor& tensor : call.operands) {
    if (IsFloat(tensor.dtype)) return tensor.dtype;
  }
  for (const LocalTensor& tensor : call.results) {
    if (IsFloat(tensor.dtype)) return tensor.dtype;
  }
  TESSERA_CHECK(false) << "a call without floating-point tensors";
  return DType::kFloat32;
}

// A Kernel::run that picks one of two instances of a kernel template.
template <void (*kFloat)(const KernelCall&), void (*kDouble)(const KernelCall&)>
void ByDType(const KernelCall& call) {
  switch (DataType(call)) {
    case DType::kFloat32:
      return kFloat(call);
    case DType::kFloat64:
      return kDouble(call);
    default:
      TESSERA_CHECK(false) << "the CPU has no kernels for "
                           << NameOf(DataType(call));
  }
}

// Element `i` of an fp32 or fp64 tensor.
inline double Get(const LocalTensor& tensor, int64_t i) {
  return tensor.dtype == DType::kFloat64
             ? tensor.as<const double>()[i]
             : static_cast<double>(tensor.as<const float>()[i]);
}
inline void Put(const LocalTensor& tensor, int64_t i, double value) {
  if (tensor.dtype == DType::kFloat64) {
    tensor.as<double>()[i] = value;
  } else {
    tensor.as<float>()[i] = static_cast<float>(value);
  }
}
// Puts or, where the call accumulates, adds.
inline void PutOrAdd(const KernelCall& call, const LocalTensor& tensor,
                     int64_t i, double value) {
  Put(tensor, i, call.accumulate ? Get(tensor, i) + value : value);
}

}  // namespace tessera
