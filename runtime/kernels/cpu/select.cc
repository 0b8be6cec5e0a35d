// One place of a sequence. x may hold some of the places (a shard of s).

#include <algorithm>

#include "runtime/kernels/cpu/call.h"

namespace tessera {
namespace {

// The place among those of `x`, or -1.
int64_t LocalPlace(const KernelCall& call, const LocalTensor& x) {
  const int64_t place =
      static_cast<int64_t>(call.attribute("place")) - x.offset[1];
  return place >= 0 && place < x.shape[1] ? place : -1;
}

// x -> y.
template <typename T>
void Select(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const int64_t place = LocalPlace(call, x);
  const int64_t width = x.shape[2];
  T* y = call.results[0].as<T>();
  for (int64_t sample = 0; sample < x.shape[0]; ++sample, y += width) {
    if (place < 0) {
      std::fill_n(y, width, T{0});
    } else {
      std::copy_n(x.as<const T>() + (sample * x.shape[1] + place) * width,
                  width, y);
    }
  }
}

// dy -> dx.
template <typename T>
void SelectDx(const KernelCall& call) {
  const LocalTensor& dx = call.results[0];
  const int64_t place = LocalPlace(call, dx);
  const int64_t width = dx.shape[2];
  std::fill_n(dx.as<T>(), dx.elements(), T{0});
  const T* dy = call.operands[0].as<const T>();
  for (int64_t sample = 0; place >= 0 && sample < dx.shape[0]; ++sample) {
    std::copy_n(dy + sample * width, width,
                dx.as<T>() + (sample * dx.shape[1] + place) * width);
  }
}

}  // namespace

std::vector<Kernel> CpuSelectKernels() {
  return {
      {"select", ByDType<Select<float>, Select<double>>},
      {"select_dx", ByDType<SelectDx<float>, SelectDx<double>>},
  };
}

}  // namespace tessera
