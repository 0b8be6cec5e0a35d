#include "planner/ir/dtype.h"

#include <array>

#include "planner/base/table.h"

namespace tessera {
namespace {

struct DTypeRow {
  std::string_view name;
  DType dtype;
  int64_t size;
  bool is_float;
};

constexpr std::array kDTypes = {
    DTypeRow{"fp64", DType::kFloat64, 8, true},
    DTypeRow{"fp32", DType::kFloat32, 4, true},
    DTypeRow{"bf16", DType::kBFloat16, 2, true},
    DTypeRow{"fp16", DType::kFloat16, 2, true},
    DTypeRow{"int32", DType::kInt32, 4, false},
};

const DTypeRow& RowOf(DType dtype) {
  return kDTypes[static_cast<size_t>(dtype)];
}

}  // namespace

int64_t SizeOf(DType dtype) {
  return RowOf(dtype).size;
}
bool IsFloat(DType dtype) {
  return RowOf(dtype).is_float;
}
std::string_view NameOf(DType dtype) {
  return RowOf(dtype).name;
}

Result<DType> ParseDType(std::string_view name) {
  TESSERA_TRY(const DTypeRow* row,
              Find("dtype", std::span<const DTypeRow>(kDTypes), name));
  return row->dtype;
}

}  // namespace tessera
