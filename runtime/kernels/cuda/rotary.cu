// Rotary position embedding: x[j] and x[j + n/2], n = fraction * d, turn by
// position times the angle of pair j. One block for each position, whose sines
// are computed in double and serve all heads.

#include <algorithm>

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
// ones of x.
template <typename T>
__global__ void Turn(Elements<T> x, const int32_t* positions, Elements<T> y,
                     int64_t heads, int64_t width, int half, Angles angles,
                     double direction) {
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
        y.Store(first + half, Span(), a);
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
      y.Store(first, Span(), a);
      y.Store(first + half, Span(), b);
    }
    return;
  }
  for (int64_t i = threadIdx.x; i < heads * width; i += kThreads) {
    const auto j = static_cast<int>(i % width);
    const int64_t at = begin + i;
    const float value = x.Get(at);
    if (j < half) {
      y.Set(at, value * cosine[j] - x.Get(at + half) * sine[j]);
    } else if (j < 2 * half) {
      y.Set(at, value * cosine[j - half] + x.Get(at - half) * sine[j - half]);
    } else {
      y.Set(at, value);
    }
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
  TESSERA_CHECK(half <= kMostPairs) << 2 * half << " turned features";
  Angles angles = {.of = {}, .magnitude = by_pair.magnitude};
  std::ranges::copy(by_pair.of_pair, angles.of);
  ByType({x, y}, [&]<typename T>() {
    Launch(Turn<T>, static_cast<unsigned>(tokens), kThreads, 0, *call.queue,
           Elements<T>(x), positions.as<const int32_t>(), Elements<T>(y),
           x.elements() / std::max<int64_t>(tokens * width, 1), width,
           static_cast<int>(half), angles, direction);
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
  return {{"rotary", Rotary},          {"rotary_dx", RotaryDx},
          {"rotary_linear", Rotary},   {"rotary_linear_dx", RotaryDx},
          {"rotary_yarn", Rotary},     {"rotary_yarn_dx", RotaryDx},
          {"rotary_llama3", Rotary},   {"rotary_llama3_dx", RotaryDx},
          {"rotary_longrope", Rotary}, {"rotary_longrope_dx", RotaryDx}};
}

}  // namespace tessera
