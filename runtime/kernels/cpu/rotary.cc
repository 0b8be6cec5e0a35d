// Rotary position embedding: x[j] and x[j + n/2], n = fraction * d, turn by
// position times the angle of pair j. Sines are computed in double, once for
// each position, and serve all heads.

#include <algorithm>
#include <cmath>

#include "runtime/kernels/cpu/call.h"
#include "runtime/kernels/rotary_angles.h"

namespace tessera {
namespace {

// x, positions -> y; `direction` -1 turns backwards. The dimensions of the
// positions are the first ones of x.
template <typename T>
void Turn(const KernelCall& call, double direction) {
  const LocalTensor& positions = call.operands[1];
  const int64_t width = call.operands[0].shape.back();
  const int64_t tokens = positions.elements();
  const int64_t heads = call.operands[0].elements() / (tokens * width);
  const RotaryAngles angles = RotaryAnglesOf(call, width);
  const auto half = static_cast<int64_t>(angles.of_pair.size());
  const int64_t turned = 2 * half;

  const int64_t grain = RowGrain(heads * width);
  ForEachRange(call, tokens, grain, [&](int64_t begin, int64_t end) {
    const T* x = call.operands[0].as<const T>() + begin * heads * width;
    T* y = call.results[0].as<T>() + begin * heads * width;
    std::vector<T> cosine(half);
    std::vector<T> sine(half);
    for (int64_t token = begin; token < end; ++token) {
      const double position = positions.as<const int32_t>()[token];
      for (int64_t j = 0; j < half; ++j) {
        const double angle = position * angles.of_pair[j];
        cosine[j] = static_cast<T>(angles.magnitude * std::cos(angle));
        sine[j] =
            static_cast<T>(direction * angles.magnitude * std::sin(angle));
      }
      for (int64_t head = 0; head < heads; ++head, x += width, y += width) {
        for (int64_t j = 0; j < half; ++j) {
          const T a = x[j];
          const T b = x[j + half];
          y[j] = a * cosine[j] - b * sine[j];
          y[j + half] = b * cosine[j] + a * sine[j];
        }
        std::copy(x + turned, x + width, y + turned);
      }
    }
  });
}

template <typename T>
void Rotary(const KernelCall& call) {
  Turn<T>(call, 1);
}

// dy, positions -> dx.
template <typename T>
void RotaryDx(const KernelCall& call) {
  Turn<T>(call, -1);
}

}  // namespace

std::vector<Kernel> CpuRotaryKernels() {
  return {
      {"rotary", ByDType<Rotary<float>, Rotary<double>>},
      {"rotary_dx", ByDType<RotaryDx<float>, RotaryDx<double>>},
      {"rotary_linear", ByDType<Rotary<float>, Rotary<double>>},
      {"rotary_linear_dx", ByDType<RotaryDx<float>, RotaryDx<double>>},
      {"rotary_yarn", ByDType<Rotary<float>, Rotary<double>>},
      {"rotary_yarn_dx", ByDType<RotaryDx<float>, RotaryDx<double>>},
      {"rotary_llama3", ByDType<Rotary<float>, Rotary<double>>},
      {"rotary_llama3_dx", ByDType<RotaryDx<float>, RotaryDx<double>>},
      {"rotary_longrope", ByDType<Rotary<float>, Rotary<double>>},
      {"rotary_longrope_dx", ByDType<RotaryDx<float>, RotaryDx<double>>},
  };
}

}  // namespace tessera
