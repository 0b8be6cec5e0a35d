#include "costmodel/source/measured_products.h"

#include <algorithm>
#include <cmath>

namespace tessera {
namespace {

constexpr double kNearest = 0.1;
constexpr double kModelWeight = 0.05;

constexpr double MatmulShape::*kExtents[] = {
    &MatmulShape::batch, &MatmulShape::m, &MatmulShape::n, &MatmulShape::k};

MatmulShape LogsOf(const MatmulShape& shape) {
  MatmulShape logs;
  for (const auto extent : kExtents) logs.*extent = std::log2(shape.*extent);
  return logs;
}

}  // namespace

MeasuredProducts::MeasuredProducts(const ProfileDb* profile,
                                   std::span<const DeviceType> device_types) {
  if (profile == nullptr) return;
  for (const DeviceType& device : device_types) {
    if (!HasKernelTimes(device)) continue;
    for (const DType dtype :
         {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
      // Measured alone, the clock is that of a rested device.
      const MatmulMode mode = {.dtype = dtype, .loaded = false};
      if (!(PeakOf(device, mode).value > 0)) continue;
      ProfileKey family;
      family.name = kProductName;
      family.dtype = dtype;
      family.device = device.name;
      const auto [begin, end] = profile->Family(family);
      const auto bytes = static_cast<double>(SizeOf(dtype));
      for (auto row = begin; row != end; ++row) {
        if (row->first.rule != kProductRule) continue;
        const std::vector<int64_t>& e = row->first.extents;  // b, m, k, n
        const MatmulShape shape = {.batch = static_cast<double>(e[0]),
                                   .m = static_cast<double>(e[1]),
                                   .n = static_cast<double>(e[3]),
                                   .k = static_cast<double>(e[2]),
                                   .operand_bytes = bytes,
                                   .result_bytes = bytes};
        rows_[{device.name, SizeOf(dtype)}].push_back(
            {LogsOf(shape), std::log(row->second.median_s /
                                     MatmulSeconds(device, shape, mode))});
      }
    }
  }
}

std::optional<double> MeasuredProducts::Factor(std::string_view device,
                                               DType dtype,
                                               const MatmulShape& shape) const {
  if (rows_.empty()) return std::nullopt;
  const auto rows = rows_.find(
      std::pair(std::string(device), static_cast<int64_t>(SizeOf(dtype))));
  if (rows == rows_.end()) return std::nullopt;
  const MatmulShape logs = LogsOf(shape);
  double sum = 0;
  double weights = kModelWeight;
  for (const Row& row : rows->second) {
    double squares = kNearest;
    for (const auto extent : kExtents) {
      const double difference = row.at.*extent - logs.*extent;
      squares += difference * difference;
    }
    const double weight = 1 / (squares * squares * squares);
    weights += weight;
    sum += weight * row.log_factor;
  }
  return std::exp(sum / weights);
}

}  // namespace tessera
