#include "costmodel/source/kernel_time.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "planner/ops/window.h"
#include "planner/topology/hardware.h"

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
// The clock has fallen half of its way after a product as long as this: a
// choice, by which tools/fit_kernels.py fits how far it falls (`sag`).
constexpr double kSagSeconds = 2e-3;

struct MatmulConstants {
  GpuGeneration generation;
  bool single;      // of fp32 and fp64, without matrix units but for fp64
  double headroom;  // of the largest tiles over compute_efficiency
  double rate[kTileClasses];  // of each class over that of the largest
  double prologue;            // s: loads before and stores after a tile's sums
  double floor;               // s: the least time of a kernel (FloorOn)
  double memory;              // reached fraction of the memory's bandwidth
  double waves;               // how far waves are whole
  double split;               // s: the sum of a split product's parts
  double sag;                 // slower by in a long product
};

constexpr MatmulConstants kMatmul[] = {
#include "costmodel/source/matmul_constants.inc"
};

// What fp8 products reach of their peak, over what 16-bit ones do of theirs: so
// that the best fp8 product of a GPU is predicted as well as its best bf16 one.
// H100: 1,402.6 TFLOP/s at 1024 x 9216 x 14336 and 794.5 at 2048 x 2048 x
// 13312; B200: 3,432.5 at 15360 x 4096 x 3072 and 1,745 at 1792 x 16128 x 3072
// (stas00/ml-engineering, maximum achievable matrix products). Ada: as Hopper;
// fp4, of which there is no such figure: as fp8.
double EightBitReach(GpuGeneration generation) {
  return generation == GpuGeneration::kBlackwell ? 0.98 : 0.95;
}

const MatmulConstants& ConstantsOf(GpuGeneration generation, bool single) {
  const auto row = std::ranges::find_if(kMatmul, [&](const auto& c) {
    return c.generation == generation && c.single == single;
  });
  TESSERA_CHECK(row != std::end(kMatmul)) << NameOf(generation);
  return *row;
}

struct AttentionConstants {
  AttentionKernel kernel;
  GpuGeneration generation;
  // Of compute_efficiency, for wide heads.
  double forward;
  double backward;
  double half_width;     // of heads that reach half of it
  double prologue_keys;  // what a block costs beside its keys, in keys
};

constexpr AttentionConstants kAttention[] = {
#include "costmodel/source/attention_constants.inc"
};

constexpr double kQueriesPerBlock = 128;
// Of the memory's bandwidth, as kernels of products reach it.
constexpr double kAttentionMemory = 0.8;
// The least time of a kernel, s: a choice, by which tools/fit_kernels.py fits
// the constants above.
constexpr double kAttentionFloor = 3e-6;

// The row of the kernel, or of the best one before it, of the generation or the
// latest one before it that has one; before Ampere the first on Ampere.
const AttentionConstants& ConstantsOf(AttentionKernel kernel,
                                      GpuGeneration generation) {
  for (int k = static_cast<int>(kernel); k >= 0; --k) {
    for (int g = static_cast<int>(generation); g >= 0; --g) {
      for (const AttentionConstants& row : kAttention) {
        if (static_cast<int>(row.kernel) == k &&
            static_cast<int>(row.generation) == g) {
          return row;
        }
      }
    }
  }
  return ConstantsOf(AttentionKernel::kFlash1, GpuGeneration::kAmpere);
}

double Cube(double x) {
  return x * x * x;
}

// The fitted least time of a kernel, as much longer or shorter as the device
// launches kernels than the table's devices of its generation do.
double FloorOn(const DeviceType& device, double fitted) {
  const Duration beyond =
      device.launch_overhead - KernelFloor(device.generation);
  return std::max(0.0, fitted + beyond.seconds());
}

// The product that a convolution or a gradient of one is; nothing for other
// calls. Rows are the places of what is made, but for a weight's gradient; as
// many operations as the call has.
std::optional<MatmulShape> ConvolutionShape(const OpCall& call) {
  const IndexRule& rule = *call.rule;
  const Indices* image = nullptr;
  const Indices* weight = nullptr;
  const Indices* result = nullptr;
  const bool tall = rule.FactorOf('h') >= 0;  // else of signals
  for (const auto* sides : {&rule.operands, &rule.results}) {
    for (const Indices& indices : *sides) {
      if (EndsIn(rule, indices, tall ? 'h' : 0, 'w')) image = &indices;
      if (EndsIn(rule, indices, tall ? 'k' : 0, 'l')) weight = &indices;
      if (EndsIn(rule, indices, tall ? 'y' : 0, 'x')) result = &indices;
    }
  }
  if (image == nullptr || weight == nullptr || result == nullptr) return {};
  MatmulShape shape;
  double in = 1;
  double out = 1;
  for (size_t d = 0; d + (tall ? 2 : 1) < weight->size(); ++d) {
    const uint8_t f = (*weight)[d];
    const bool read = Holds(*image, f);
    (read && Holds(*result, f) ? shape.batch
     : read                    ? in
                               : out) *= static_cast<double>(call.extents[f]);
  }
  const auto of = [&](char letter) {
    return rule.FactorOf(letter) < 0 ? 1.0
                                     : static_cast<double>(call.Extent(letter));
  };
  const double samples = static_cast<double>(call.extents[(*image)[0]]);
  const double window = of('k') * of('l');
  const double made = of('y') * of('x');
  const Indices* const writes = &rule.results[0];
  if (writes == image) {
    const double pixels = of('h') * of('w');
    shape.m = samples * pixels;
    shape.n = in;
    shape.k = out * window * made / pixels;
  } else if (writes == weight) {
    shape.m = out;
    shape.n = in * window;
    shape.k = samples * made;
  } else {
    shape.m = samples * made;
    shape.n = out;
    shape.k = in * window;
  }
  shape.traffic = static_cast<double>(OperandBytes(call).value);
  return shape;
}

}  // namespace

std::optional<MatmulShape> MatmulShapeOf(const OpCall& call) {
  const IndexRule& rule = *call.rule;
  if (const auto convolution = ConvolutionShape(call)) return convolution;
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
  switch (mode.products) {
    case ProductType::kFp8:
      return device.peak_fp8;
    case ProductType::kFp4:
      return device.peak_fp4;
    case ProductType::kAsValues:
      break;
  }
  return device.Peak(mode.dtype);
}

double MatmulSeconds(const DeviceType& device, const MatmulShape& shape,
                     const MatmulMode& mode) {
  const bool single = SizeOf(mode.dtype) > 2;
  const MatmulConstants& c = ConstantsOf(device.generation, single);
  const double peak = PeakOf(device, mode).value;
  TESSERA_CHECK(peak > 0) << device.name << " has no " << NameOf(mode.dtype);
  double reached = std::min(1.0, device.compute_efficiency * c.headroom);
  if (mode.products != ProductType::kAsValues) {
    reached *= EightBitReach(device.generation);
  }
  const double rate = peak * reached / device.multiprocessors;
  const double loaded =
      device.sustained_rate > 0 ? 1 / device.sustained_rate : 1 + c.sag;
  const double bandwidth = device.memory_bandwidth.value * c.memory;
  const double results = shape.batch * shape.m * shape.n;
  const double traffic = shape.traffic.value_or(
      shape.operand_bytes * shape.batch * (shape.m + shape.n) * shape.k +
      shape.result_bytes * results);

  // Cubes of the best without splits and with them.
  double unsplit = std::numeric_limits<double>::infinity();
  double split_up = std::numeric_limits<double>::infinity();
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
      compute *=
          mode.loaded ? loaded : 1 + c.sag * compute / (compute + kSagSeconds);
      // Splits write and read their sums in fp32.
      const double sums = split > 1 ? 4 * split * results : 0;
      const double cubes = Cube(compute) + Cube((traffic + sums) / bandwidth);
      double& best = split > 1 ? split_up : unsplit;
      best = std::min(best, cubes);
    }
  }
  const double best =
      std::min(std::cbrt(unsplit), std::cbrt(split_up) + c.split);
  return best + FloorOn(device, c.floor);
}

bool IsAttentionBackward(const OpDef& op) {
  return op.name.ends_with("_dqkv");
}

AttentionShape AttentionShapeOf(const OpCall& call) {
  const auto of = [&](char letter) {
    return static_cast<double>(call.Extent(letter));
  };
  AttentionShape shape;
  shape.batch = of('b');
  shape.kv_heads = of('g');
  shape.heads = of('g') * of('r');
  shape.queries = of('s');
  shape.keys = of('t');
  shape.qk_width = of('d');
  shape.v_width = of('e');
  shape.pairs = shape.queries * shape.keys;
  shape.element_bytes = static_cast<double>(SizeOf(call.operand_dtypes[0]));
  return shape;
}

AttentionKernel DefaultAttention(GpuGeneration generation) {
  if (generation >= GpuGeneration::kHopper) return AttentionKernel::kCudnn;
  return generation >= GpuGeneration::kAmpere ? AttentionKernel::kFlash2
                                              : AttentionKernel::kFlash1;
}

namespace {

// Heads are as wide as a kernel that there is: FlashAttention's of 16, 32, 64
// and 128 (csrc/flash_attn, v0.2 to v1), then of multiples of 32 (v2's
// flash_fwd_hdim32 to 256). Wider ones as they are.
double KernelWidth(AttentionKernel kernel, double width) {
  if (kernel == AttentionKernel::kFlash1) {
    for (const double known : {16, 32, 64, 128}) {
      if (width <= known) return known;
    }
  }
  if (kernel == AttentionKernel::kFlash2 && width <= 256) {
    return std::ceil(width / 32) * 32;
  }
  return width;
}

}  // namespace

double AttentionSeconds(const DeviceType& device, const AttentionShape& shape,
                        DType dtype, AttentionKernel kernel, bool backward) {
  const AttentionConstants& c = ConstantsOf(kernel, device.generation);
  const double peak = device.Peak(dtype).value;
  TESSERA_CHECK(peak > 0) << device.name << " has no " << NameOf(dtype);
  const double qk_width = KernelWidth(kernel, shape.qk_width);
  const double v_width = KernelWidth(kernel, shape.v_width);
  const double width = (qk_width + v_width) / 2;
  const double reached = std::min(1.0, device.compute_efficiency *
                                           (backward ? c.backward : c.forward) *
                                           width / (width + c.half_width));
  const double rate = peak * reached / device.multiprocessors;
  const double products =
      backward ? 3 * qk_width + 2 * v_width : qk_width + v_width;
  const double per_key = 2 * kQueriesPerBlock * products / rate;
  const double blocks =
      shape.batch * shape.heads * std::ceil(shape.queries / kQueriesPerBlock);
  const double mean = shape.pairs / shape.queries;
  // Blocks on the diagonal of a mask are worked on whole.
  const double worked = mean < shape.keys
                            ? std::min(shape.keys, mean + kQueriesPerBlock / 2)
                            : shape.keys;
  // The mask's last query has twice the keys of the mean one.
  const double most = std::min(shape.keys, 2 * mean);
  const double all =
      blocks / device.multiprocessors * (worked + c.prologue_keys) * per_key;
  const double longest = (most + c.prologue_keys) * per_key;
  const double elements =
      shape.batch * (shape.qk_width + shape.v_width) *
      (shape.heads * shape.queries + shape.kv_heads * shape.keys);
  // Backward reads them all, and the gradients of those that it writes.
  const double memory = (backward ? 2 : 1) * shape.element_bytes * elements /
                        (device.memory_bandwidth.value * kAttentionMemory);
  return std::cbrt(Cube(all) + Cube(longest) + Cube(memory)) +
         FloorOn(device, kAttentionFloor);
}

double UnfusedAttentionSeconds(const DeviceType& device,
                               const AttentionShape& shape, DType dtype,
                               double passes, bool backward) {
  const double batch = shape.batch * shape.heads;
  const MatmulMode mode = {.dtype = dtype};
  const auto product = [&](double m, double n, double k) {
    return MatmulSeconds(
        device, {batch, m, n, k, shape.element_bytes, shape.element_bytes},
        mode);
  };
  const double s = shape.queries;
  const double t = shape.keys;
  const double d = shape.qk_width;
  const double e = shape.v_width;
  const double products = backward ? product(t, e, s) + product(s, t, e) +
                                         product(s, d, t) + product(t, d, s)
                                   : product(s, t, d) + product(s, e, t);
  const double scores = batch * s * t * shape.element_bytes;
  return products +
         passes * scores /
             (device.memory_bandwidth.value * device.memory_efficiency);
}

}  // namespace tessera
