#pragma once
// Element types of tensors.

#include <cstdint>
#include <string_view>

#include "planner/base/result.h"

namespace tessera {

enum class DType : uint8_t {
  kFloat64,
  kFloat32,
  kBFloat16,
  kFloat16,
  kInt32,
};

// Bytes of one element.
int64_t SizeOf(DType dtype);
bool IsFloat(DType dtype);

// "fp64" "fp32" "bf16" "fp16" "int32": the names used in files and flags.
std::string_view NameOf(DType dtype);
Result<DType> ParseDType(std::string_view name);

}  // namespace tessera
