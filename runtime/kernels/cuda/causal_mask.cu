// A number in place of scores of later places, or zero of their gradients.

#include "runtime/kernels/causal_mask.h"
#include "runtime/kernels/cuda/elements.h"

namespace tessera {
namespace {

__device__ int64_t PlaceOf(const DimensionPlaces& places, int64_t i) {
  return i / places.stride % places.count + places.offset;
}

template <typename T>
__global__ void Mask(Elements<T> x, Elements<T> y, int64_t n,
                     DimensionPlaces looking, DimensionPlaces seen,
                     float hidden) {
  ForEachVector(n, [&](int64_t first, Span span) {
    float v[kVector];
    x.Load(first, span, v);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if (PlaceOf(seen, first + j) > PlaceOf(looking, first + j)) v[j] = hidden;
    }
    y.Store(first, span, v);
  });
}

void CallMask(const KernelCall& call, double hidden) {
  const LocalTensor& x = call.operands[0];
  const LocalTensor& y = call.results[0];
  const int64_t n = x.elements();
  ByType({x, y}, [&]<typename T>() {
    Launch(Mask<T>, BlocksForVectors(*call.queue, n), kThreads, 0, *call.queue,
           Elements<T>(x), Elements<T>(y), n, PlacesOf(call, 'q'),
           PlacesOf(call, 'k'), static_cast<float>(hidden));
  });
}

void CausalMask(const KernelCall& call) {
  CallMask(call, call.attribute("value"));
}

void CausalMaskDx(const KernelCall& call) {
  CallMask(call, 0);
}

}  // namespace

std::vector<Kernel> CudaCausalMaskKernels() {
  return {{"causal_mask", CausalMask}, {"causal_mask_dx", CausalMaskDx}};
}

}  // namespace tessera
