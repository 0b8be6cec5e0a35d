#include "runtime/data/numbers.h"

#include <algorithm>

#include "runtime/float16.h"

namespace tessera {

void PutNumbers(const LocalTensor& block, int64_t first,
                std::span<const double> numbers) {
  const auto put = [&](auto* to, auto rounded) {
    std::ranges::transform(numbers, to + first, rounded);
  };
  switch (block.dtype) {
    case DType::kFloat64:
      return put(block.as<double>(), [](double x) { return x; });
    case DType::kFloat32:
      return put(block.as<float>(),
                 [](double x) { return static_cast<float>(x); });
    case DType::kBFloat16:
      return put(block.as<BFloat16>(),
                 [](double x) { return ToBFloat16(static_cast<float>(x)); });
    case DType::kFloat16:
      return put(block.as<Float16>(),
                 [](double x) { return ToFloat16(static_cast<float>(x)); });
    case DType::kInt32:
      return put(block.as<int32_t>(),
                 [](double x) { return static_cast<int32_t>(x); });
  }
}

}  // namespace tessera
