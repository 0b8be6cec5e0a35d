// A number in place of scores of later places, or zero of their gradients.

#include "runtime/kernels/causal_mask.h"

#include "runtime/kernels/cpu/call.h"

namespace tessera {
namespace {

int64_t PlaceOf(const DimensionPlaces& places, int64_t i) {
  return i / places.stride % places.count + places.offset;
}

template <typename T>
void Mask(const KernelCall& call, T hidden) {
  const DimensionPlaces looking = PlacesOf(call, 'q');
  const DimensionPlaces seen = PlacesOf(call, 'k');
  const T* const x = call.operands[0].as<const T>();
  T* const y = call.results[0].as<T>();
  ForEachRange(call, call.operands[0].elements(), kGrainElements,
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   y[i] =
                       PlaceOf(seen, i) <= PlaceOf(looking, i) ? x[i] : hidden;
                 }
               });
}

template <typename T>
void CausalMask(const KernelCall& call) {
  Mask(call, static_cast<T>(call.attribute("value")));
}

template <typename T>
void CausalMaskDx(const KernelCall& call) {
  Mask(call, T{0});
}

}  // namespace

std::vector<Kernel> CpuCausalMaskKernels() {
  return {
      {"causal_mask", ByDType<CausalMask<float>, CausalMask<double>>},
      {"causal_mask_dx", ByDType<CausalMaskDx<float>, CausalMaskDx<double>>},
  };
}

}  // namespace tessera
