// A dimension read at equally spaced places. Tensors are (outer, places,
// inner).

#include "runtime/kernels/resample.h"

#include <algorithm>

#include "runtime/kernels/cpu/call.h"

namespace tessera {
namespace {

// x -> y.
template <typename T>
void Resample(const KernelCall& call) {
  const Resampling r = ResamplingOf(call, /*backward=*/false);
  const T* const x = call.operands[0].as<const T>();
  T* const y = call.results[0].as<T>();
  ForEachRange(call, r.to.outer, RowGrain(r.to.places * r.to.inner),
               [&](int64_t begin, int64_t end) {
                 for (int64_t o = begin; o < end; ++o) {
                   for (int64_t i = 0; i < r.to.places; ++i) {
                     const Resampling::Look look = r.At(i);
                     const T t = static_cast<T>(look.t);
                     const T* const low = x + r.from.At(o, look.low);
                     const T* const high = x + r.from.At(o, look.high);
                     T* const to = y + r.to.At(o, i);
                     for (int64_t j = 0; j < r.to.inner; ++j) {
                       to[j] = (1 - t) * low[j] + t * high[j];
                     }
                   }
                 }
               });
}

// dy -> dx.
template <typename T>
void ResampleDx(const KernelCall& call) {
  const Resampling r = ResamplingOf(call, /*backward=*/true);
  const T* const dy = call.operands[0].as<const T>();
  T* const dx = call.results[0].as<T>();
  ForEachRange(call, r.from.outer, RowGrain(r.to.places * r.to.inner),
               [&](int64_t begin, int64_t end) {
                 std::fill(dx + r.from.At(begin, 0), dx + r.from.At(end, 0),
                           T{0});
                 for (int64_t o = begin; o < end; ++o) {
                   for (int64_t i = 0; i < r.to.places; ++i) {
                     const Resampling::Look look = r.At(i);
                     const T t = static_cast<T>(look.t);
                     const T* const from = dy + r.to.At(o, i);
                     T* const low = dx + r.from.At(o, look.low);
                     T* const high = dx + r.from.At(o, look.high);
                     for (int64_t j = 0; j < r.to.inner; ++j) {
                       low[j] += (1 - t) * from[j];
                       if (t != 0) high[j] += t * from[j];
                     }
                   }
                 }
               });
}

}  // namespace

std::vector<Kernel> CpuResampleKernels() {
  return {
      {"resample", ByDType<Resample<float>, Resample<double>>},
      {"resample_dx", ByDType<ResampleDx<float>, ResampleDx<double>>},
  };
}

}  // namespace tessera
