#include "costmodel/source/kernel_time.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tessera {
namespace {

// Tiles are taken from a small set, in classes of one rate each.
constexpr int kTileClasses = 5;
struct Tile {
  double rows;
  double columns;
  int rate;
};
constexpr Tile kTiles[] = {{256, 128, 0}, {128, 256, 0}, {128, 128, 1},
                           {128, 64, 2},  {64, 128, 2},  {64, 64, 3},
                           {64, 32, 4},   {32, 64, 4}};
constexpr double kSplits[] = {1, 2, 4, 8, 16};
// k is taken in steps of this many.
constexpr double kDepth = 64;
// The clock has fallen half of its way after a product as long as this.
constexpr double kSagSeconds = 2e-3;

struct MatmulConstants {
  GpuGeneration generation;
  bool single;      // of fp32 and fp64, without matrix units but for fp64
  double headroom;  // of the largest tiles over compute_efficiency
  double rate[kTileClasses];  // of each class over that of the largest
  double prologue;            // s: loads before and stores after a tile's sums
  double floor;               // s: the least time of a kernel
  double memory;              // reached fraction of the memory's bandwidth
  double waves;               // how far waves are whole
  double split;               // s: the sum of a split product's parts
  double sag;   // slower by after a long product on an idle device
  double load;  // slower by amid a long load
};

constexpr MatmulConstants kMatmul[] = {
#include "costmodel/source/matmul_constants.inc"
};

// What fp8 products reach of their peak, over what 16-bit ones do of theirs.
// Hopper: the best of both on H100, 1,402.6 of 1,978.9 against 794.5 of 989.4
// TFLOP/s; Blackwell: on B200, 3,432.5 of 4,500 against 1,745 of 2,250
// (stas00/ml-engineering, maximum achievable matrix products, torch 2.6 to
// 2.8). Ada: as Hopper.
double EightBitReach(GpuGeneration generation) {
  return generation == GpuGeneration::kBlackwell ? 0.98 : 0.88;
}

const MatmulConstants& ConstantsOf(GpuGeneration generation, bool single) {
  const auto row = std::ranges::find_if(kMatmul, [&](const auto& c) {
    return c.generation == generation && c.single == single;
  });
  TESSERA_CHECK(row != std::end(kMatmul)) << NameOf(generation);
  return *row;
}

double Cube(double x) {
  return x * x * x;
}

}  // namespace

std::optional<MatmulShape> MatmulShapeOf(const OpCall& call) {
  const IndexRule& rule = *call.rule;
  if (rule.operands.size() < 2 || rule.results.empty()) return std::nullopt;
  MatmulShape shape;
  for (int f = 0; f < std::ssize(rule.factors); ++f) {
    const bool a = Holds(rule.operands[0], f);
    const bool b = Holds(rule.operands[1], f);
    const bool result = Holds(rule.results[0], f);
    const auto extent =
        static_cast<double>(call.extents[static_cast<size_t>(f)]);
    if (a && b) {
      (result ? shape.batch : shape.k) *= extent;
    } else if (result && a != b) {
      (a ? shape.m : shape.n) *= extent;
    } else {
      return std::nullopt;
    }
  }
  shape.operand_bytes = static_cast<double>(SizeOf(call.operand_dtypes[0]));
  shape.result_bytes = static_cast<double>(SizeOf(call.result_dtypes[0]));
  return shape;
}

bool HasKernelTimes(const DeviceType& device) {
  return device.multiprocessors > 0;
}

FlopsPerSecond PeakOf(const DeviceType& device, const MatmulMode& mode) {
  return mode.fp8 ? device.peak_fp8 : device.Peak(mode.dtype);
}

double MatmulSeconds(const DeviceType& device, const MatmulShape& shape,
                     const MatmulMode& mode) {
  const bool single = SizeOf(mode.dtype) > 2;
  const MatmulConstants& c = ConstantsOf(device.generation, single);
  const double peak = PeakOf(device, mode).value;
  TESSERA_CHECK(peak > 0) << device.name << " has no " << NameOf(mode.dtype);
  double reached = std::min(1.0, device.compute_efficiency * c.headroom);
  if (mode.fp8) reached *= EightBitReach(device.generation);
  const double rate = peak * reached / device.multiprocessors;
  const double bandwidth = device.memory_bandwidth.value * c.memory;
  const double results = shape.batch * shape.m * shape.n;
  const double traffic =
      shape.operand_bytes * shape.batch * (shape.m + shape.n) * shape.k +
      shape.result_bytes * results;

  double best = std::numeric_limits<double>::infinity();
  for (const Tile& tile : kTiles) {
    const double tiles = shape.batch * std::ceil(shape.m / tile.rows) *
                         std::ceil(shape.n / tile.columns);
    const double per_k =
        2 * tile.rows * tile.columns / (rate * c.rate[tile.rate]);
    for (const double split : kSplits) {
      const double depth =
          std::ceil(std::ceil(shape.k / split) / kDepth) * kDepth;
      const double busy = tiles * split / device.multiprocessors;
      const double waves =
          c.waves * std::ceil(busy) + (1 - c.waves) * std::max(busy, 1.0);
      double compute = waves * (depth * per_k + c.prologue);
      compute *= 1 + (mode.loaded ? c.load
                                  : c.sag * compute / (compute + kSagSeconds));
      double memory = traffic / bandwidth;
      double reduction = 0;
      if (split > 1) {
        memory += 4 * split * results / bandwidth;
        reduction = c.split;
      }
      best =
          std::min(best, std::cbrt(Cube(compute) + Cube(memory)) + reduction);
    }
  }
  return best + c.floor;
}

}  // namespace tessera
