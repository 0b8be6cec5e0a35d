#pragma once
// How long one kernel takes on a GPU, from its shape and the device's figures.
// Pure functions; constants belong to a GPU's generation and are fitted to
// published timings by tools/fit_kernels.py (matmul_constants.inc).
//
// A product of batch x (m, k) by (k, n) is cut into tiles of 32 to 256 rows and
// columns, and k into up to 16 splits. Each of the device's multiprocessors
// works on one tile at a time, so that tiles are done in waves:
//   rate(tile)  = peak * reached / multiprocessors * rate of this tile's size
//   one(tile)   = 2 tm tn ceil(k / split) / rate(tile) + prologue
//   busy        = batch ceil(m / tm) ceil(n / tn) split / multiprocessors
//   waves       = q ceil(busy) + (1 - q) max(busy, 1)
//   compute     = waves one(tile), slower where the clock falls under the power
//                 limit: in a long product, or amid a long load
//   memory      = bytes of operands and result, and of the partial sums of
//                 splits, / (bandwidth * reached)
//   time        = min over tiles and splits of
//                 cbrt(compute^3 + memory^3) + reduction of the splits
//                 + floor
// (the cubes: what overlaps but for a part near the ridge). `reached` of the
// peak is the device type's compute_efficiency, which is that of its large
// products, times the generation's headroom over it. Since every term is
// monotone in every extent, so is the time.

#include <optional>

#include "planner/base/units.h"
#include "planner/ir/cluster.h"
#include "planner/ir/op.h"

namespace tessera {

struct MatmulShape {
  double batch = 1;
  double m = 1;
  double n = 1;
  double k = 1;
  // Of one element.
  double operand_bytes = 2;
  double result_bytes = 2;
};

// The product that a call of an operator of class kMatmul is: factors of both
// operands and the result are its batch, those of no result its k. Nothing
// where a factor is of one operand only.
std::optional<MatmulShape> MatmulShapeOf(const OpCall& call);

struct MatmulMode {
  DType dtype = DType::kBFloat16;  // of the operands
  // Operands are rounded to 8 bits; the shape then counts a byte for each.
  bool fp8 = false;
  // Amid the load of a whole training step, rather than after a pause: the
  // clock is what the power limit leaves.
  bool loaded = true;
};

// Whether the device is a GPU whose multiprocessors are known.
bool HasKernelTimes(const DeviceType& device);

// The device's peak in that mode; zero where it has none.
FlopsPerSecond PeakOf(const DeviceType& device, const MatmulMode& mode);

// Seconds of one product.
// REQUIRES: HasKernelTimes(device), a positive peak.
double MatmulSeconds(const DeviceType& device, const MatmulShape& shape,
                     const MatmulMode& mode);

}  // namespace tessera
