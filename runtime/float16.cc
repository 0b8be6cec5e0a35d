#include "runtime/float16.h"

#include "planner/base/check.h"

namespace tessera {

void Widen(const void* from, DType dtype, int64_t n, float* to) {
  TESSERA_CHECK(Is16Bit(dtype)) << NameOf(dtype);
  if (dtype == DType::kBFloat16) {
    const auto* const values = static_cast<const BFloat16*>(from);
    for (int64_t i = 0; i < n; ++i) to[i] = ToFloat(values[i]);
  } else {
    const auto* const values = static_cast<const Float16*>(from);
    for (int64_t i = 0; i < n; ++i) to[i] = ToFloat(values[i]);
  }
}

void Narrow(const float* from, int64_t n, DType dtype, void* to) {
  TESSERA_CHECK(Is16Bit(dtype)) << NameOf(dtype);
  if (dtype == DType::kBFloat16) {
    auto* const values = static_cast<BFloat16*>(to);
    for (int64_t i = 0; i < n; ++i) values[i] = ToBFloat16(from[i]);
  } else {
    auto* const values = static_cast<Float16*>(to);
    for (int64_t i = 0; i < n; ++i) values[i] = ToFloat16(from[i]);
  }
}

void StoreNumber(void* to, DType dtype, int64_t i, double value) {
  const auto single = static_cast<float>(value);
  switch (dtype) {
    case DType::kFloat64:
      static_cast<double*>(to)[i] = value;
      break;
    case DType::kFloat32:
      static_cast<float*>(to)[i] = single;
      break;
    case DType::kBFloat16:
      static_cast<BFloat16*>(to)[i] = ToBFloat16(single);
      break;
    case DType::kFloat16:
      static_cast<Float16*>(to)[i] = ToFloat16(single);
      break;
    case DType::kInt32:
      static_cast<int32_t*>(to)[i] = static_cast<int32_t>(value);
      break;
  }
}

}  // namespace tessera
