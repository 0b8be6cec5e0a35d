// Rotary position embedding: x[j] and x[j + n/2], n = fraction * d, turn by
// position times the angle of pair j. One block for each position, whose sines
// are computed in double and serve all heads.

#include <algorithm>
#include <string>

#include "runtime/kernels/cuda/elements.h"
#include "runtime/kernels/rotary_angles.h"

namespace tessera {
namespace {

constexpr int kMostPairs = 256;  // heads of 512
struct Angles {
  double of[kMostPairs];
  double magnitude;
};

// `direction` -1 turns backwards. The dimensions of the positions are the first
// ones of x. Those of y are `y_stride` apart.
template <typename T>
__global__ void Turn(Elements<T> x, const int32_t* positions, Elements<T> y,
                     int64_t y_stride, int64_t heads, int64_t width, int half,
                     Angles angles, double direction) {
  TESSERA_SHARED(cosine, float[kMostPairs]);
  TESSERA_SHARED(sine, float[kMostPairs]);
  const int64_t token = blockIdx.x;
  const double position = positions[token];
  for (int j = static_cast<int>(threadIdx.x); j < half; j += kThreads) {
    const double angle = position * angles.of[j];
    cosine[j] = static_cast<float>(angles.magnitude * cos(angle));
    sine[j] = static_cast<float>(direction * angles.magnitude * sin(angle));
  }
  __syncthreads();
  const int64_t begin = token * heads * width;
  const int64_t shift = token * y_stride - begin;  // from x to y
  if (half % kVector == 0 && width % kVector == 0) {
    // Vectors whose partners are vectors, too; those behind the turned ones
    // are copied.
    const int64_t vectors = width / kVector - half / kVector;
    for (int64_t i = threadIdx.x; i < heads * vectors; i += kThreads) {
      const int64_t head = i / vectors;
      const int64_t at = i - head * vectors;
      const auto j = static_cast<int>(at * kVector);
      const int64_t first = begin + head * width + j;
      float a[kVector];
      float b[kVector];
      if (j >= half) {
        x.Load(first + half, Span(), a);
        y.Store(first + half + shift, Span(), a);
        continue;
      }
      x.Load(first, Span(), a);
      x.Load(first + half, Span(), b);
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        const float turned = a[k] * cosine[j + k] - b[k] * sine[j + k];
        b[k] = b[k] * cosine[j + k] + a[k] * sine[j + k];
        a[k] = turned;
      }
      y.Store(first + shift, Span(), a);
      y.Store(first + half + shift, Span(), b);
    }
    return;
  }
  for (int64_t i = threadIdx.x; i < heads * width; i += kThreads) {
    const auto j = static_cast<int>(i % width);
    const int64_t at = begin + i;
    const float value = x.Get(at);
    float turned = value;
    if (j < half) {
      turned = value * cosine[j] - x.Get(at + half) * sine[j];
    } else if (j < 2 * half) {
      turned = value * cosine[j - half] + x.Get(at - half) * sine[j - half];
    }
    y.Set(at + shift, turned);
  }
}

void CallTurn(const KernelCall& call, double direction) {
  const LocalTensor& x = call.operands[0];
  const LocalTensor& positions = call.operands[1];
  const LocalTensor& y = call.results[0];
  const int64_t width = x.shape.back();
  const int64_t tokens = positions.elements();
  const RotaryAngles by_pair = RotaryAnglesOf(call, width);
  const size_t half = by_pair.of_pair.size();
  if (half > kMostPairs) {
    return call.queue->Fail("rotary embedding of " + std::to_string(2 * half) +
                            " features of a head: CUDA kernels turn up to " +
                            std::to_string(2 * kMostPairs));
  }
  Angles angles = {.of = {}, .magnitude = by_pair.magnitude};
  std::ranges::copy(by_pair.of_pair, angles.of);
  const int64_t heads = x.elements() / std::max<int64_t>(tokens * width, 1);
  TESSERA_CHECK(y.row_stride == 0 || y.row == heads * width)
      << "rows of " << y.row << ", not of " << heads * width;
  const int64_t y_stride = y.row_stride > 0 ? y.row_stride : heads * width;
  ByType({x, y}, [&]<typename T>() {
    Launch(Turn<T>, static_cast<unsigned>(tokens), kThreads, 0, *call.queue,
           Elements<T>(x), positions.as<const int32_t>(), Elements<T>(y),
           y_stride, heads, width, static_cast<int>(half), angles, direction);
  });
}

void Rotary(const KernelCall& call) {
  CallTurn(call, 1);
}

void RotaryDx(const KernelCall& call) {
  CallTurn(call, -1);
}

}  // namespace

std::vector<Kernel> CudaRotaryKernels() {
  std::vector<Kernel> kernels;
  const auto add = [&](std::string_view forward, std::string_view backward) {
    kernels.push_back({forward, Rotary});
    kernels.push_back(
        {backward, RotaryDx, false, nullptr, RowsApart::kResults});
  };
  add("rotary", "rotary_dx");
  add("rotary_linear", "rotary_linear_dx");
  add("rotary_yarn", "rotary_yarn_dx");
  add("rotary_llama3", "rotary_llama3_dx");
  add("rotary_longrope", "rotary_longrope_dx");
  return kernels;
}

}  // namespace tessera
