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
//                 (DeviceType::sustained_rate)
//   memory      = bytes of operands and result, and of the partial sums of
//                 splits, / (bandwidth * reached)
//   time        = min over tiles and splits of
//                 cbrt(compute^3 + memory^3) + reduction of the splits
//                 + floor
// (the cubes: what overlaps but for a part near the ridge). `reached` of the
// peak is the device type's compute_efficiency, which is that of its large
// products, times the generation's headroom over it. The floor is the
// generation's, and what DeviceType::launch_overhead is beyond KernelFloor of
// it (planner/topology/hardware.h), but not below 0. Since every term is
// monotone in every extent, so is the time.

#include <cstdint>
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
  // Memory traffic, where it is not that of the three matrices.
  std::optional<double> traffic = {};
};

// The product that a call of an operator of class kMatmul is: factors of both
// operands and the result are its batch, those of no result its k. Nothing
// where a factor is of one operand only. A convolution is one that never stores
// the matrix of its windows (Chetlur et al. 2014): its traffic is that of the
// image, the weight and the result.
std::optional<MatmulShape> MatmulShapeOf(const OpCall& call);

struct MatmulMode {
  DType dtype = DType::kBFloat16;  // of the operands
  // What operands are rounded to; the shape counts their bytes so.
  ProductType products = ProductType::kAsValues;
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

// ---- Attention --------------------------------------------------------------

// A fused attention never stores the scores. One block of 128 queries of a head
// is one piece of work, which goes over the keys:
//   one(keys)   = 2 * 128 * keys * (sum of the products' widths) / rate
//   rate        = peak * reached * w / (w + half width) / multiprocessors, w
//                 the mean width of a head
//   all         = blocks / multiprocessors * one(keys of the mean query + half
//                 a block on the diagonal of a mask + prologue)
//   longest     = one(keys of the last query + prologue)
//   memory      = bytes of operands and results / bandwidth reached
//   time        = cbrt(all^3 + longest^3 + memory^3) + floor
// Backward has five products (the scores again, dv, dp, dq, dk) for two. The
// constants are of a kernel on a generation (attention_constants.inc).
enum class AttentionKernel : uint8_t {
  kFlash1,  // FlashAttention, and memory-efficient kernels of its time
  kFlash2,
  kFlash3,
  kCudnn,  // cuDNN 9's and TensorRT-LLM's
};

struct AttentionShape {
  double batch = 1;
  double heads = 1;     // of queries
  double kv_heads = 1;  // of keys and values
  double queries = 1;
  double keys = 1;
  double qk_width = 1;  // of a head
  double v_width = 1;
  double pairs = 1;  // of a query and a key that a mask leaves, of one head
  double element_bytes = 2;
};

// The shape of a call of `attention` or its gradient, with all of the pairs.
// REQUIRES: the rule has attention's factors.
AttentionShape AttentionShapeOf(const OpCall& call);
// Whether an operator of attention's class has the five products of a whole
// gradient; the gradient of biases has two, as forward has.
bool IsAttentionBackward(const OpDef& op);

// What frameworks run by default: cuDNN's from Hopper on, FlashAttention-2 on
// Ampere and Ada, memory-efficient kernels before.
AttentionKernel DefaultAttention(GpuGeneration generation);

// Seconds of a fused attention, forward or backward. A kernel that a
// generation lacks stands for the best one that it has.
// REQUIRES: HasKernelTimes(device), a positive peak of `dtype`.
double AttentionSeconds(const DeviceType& device, const AttentionShape& shape,
                        DType dtype, AttentionKernel kernel, bool backward);

// Seconds of an attention that stores the scores: the products, two forward and
// four backward, of all pairs of a query and a key, and `passes` over the
// stored scores by kernels in between: a read or a write of all of them each.
double UnfusedAttentionSeconds(const DeviceType& device,
                               const AttentionShape& shape, DType dtype,
                               double passes, bool backward);

}  // namespace tessera
