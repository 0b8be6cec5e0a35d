#include "costmodel/source/measured_products.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "costmodel/source/cost_source.h"

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

// The product that a row's kernel makes. Gradients of weights are in fp32.
std::optional<MatmulShape> ShapeOf(const ProfileKey& key) {
  if (key.name == kProductName && key.rule != kProductRule) {
    return std::nullopt;
  }
  const OpDef* const op = OperatorOf(key.name);
  const bool own = op != nullptr && op->op_class == OpClass::kMatmul;
  if (!own && key.name != kProductName) return std::nullopt;
  const auto rule = IndexRule::Parse(key.rule);
  if (!rule || rule->factors.size() != key.extents.size()) return std::nullopt;
  const std::vector<DType> operands(rule->operands.size(), key.dtype);
  const bool of_weight = own && op->name.ends_with("_dw");
  const std::vector<DType> results(rule->results.size(),
                                   of_weight ? DType::kFloat32 : key.dtype);
  return MatmulShapeOf({.rule = &*rule,
                        .extents = key.extents,
                        .operand_dtypes = operands,
                        .result_dtypes = results,
                        .attributes = {}});
}

}  // namespace

MeasuredProducts::MeasuredProducts(const ProfileDb* profile,
                                   std::span<const DeviceType> device_types) {
  if (profile == nullptr) return;
  for (const auto& [key, row] : profile->rows) {
    for (const DeviceType& device : device_types) {
      if (device.name == key.device && HasKernelTimes(device)) {
        Add(key, row, device);
        break;
      }
    }
  }
}

void MeasuredProducts::Add(const ProfileKey& key, const Measurement& measured,
                           const DeviceType& device) {
  const MatmulMode mode = {.dtype = key.dtype,
                           .loaded = key.name != kProductName};
  if (!(PeakOf(device, mode).value > 0)) return;
  const auto shape = ShapeOf(key);
  if (!shape) return;
  rows_[{key.name, device.name, SizeOf(key.dtype)}].push_back(
      {LogsOf(*shape),
       std::log(measured.median_s / MatmulSeconds(device, *shape, mode))});
}

std::optional<double> MeasuredProducts::Factor(std::string_view name,
                                               std::string_view device,
                                               DType dtype,
                                               const MatmulShape& shape) const {
  if (rows_.empty()) return std::nullopt;
  const auto rows = rows_.find(std::tuple(
      std::string(name), std::string(device), int64_t{SizeOf(dtype)}));
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
