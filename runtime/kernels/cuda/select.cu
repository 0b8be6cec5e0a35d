// One place of a sequence. x may hold some of the places (a shard of s).

#include "runtime/kernels/cuda/elements.h"
#include "runtime/kernels/cuda/launch.h"

namespace tessera {
namespace {

// Element i of x, (b, length, width), is of the place.
struct Place {
  int64_t place;  // among those of x; may be none of them
  int64_t length;
  int64_t width;

  __device__ bool Has(int64_t i) const { return i / width % length == place; }
  // In y, which has the place of each sample alone.
  __device__ int64_t InSelected(int64_t i) const {
    return i / width / length * width + i % width;
  }
  // Of element i of y, in x.
  __device__ int64_t InWhole(int64_t i) const {
    return (i / width * length + place) * width + i % width;
  }
};

Place PlaceOf(const KernelCall& call, const LocalTensor& x) {
  return {static_cast<int64_t>(call.attribute("place")) - x.offset[1],
          x.shape[1], x.shape[2]};
}

__global__ void TakePlace(Elements<Any> x, Elements<Any> y, int64_t n,
                          Place place) {
  const bool here = place.place >= 0 && place.place < place.length;
  ForEachVector(n, [&](int64_t first, Span span) {
    float v[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      v[j] = here && span.Has(j) ? x.Get(place.InWhole(first + j)) : 0;
    }
    y.Store(first, span, v);
  });
}

__global__ void PutPlace(Elements<Any> dy, Elements<Any> dx, int64_t n,
                         Place place) {
  ForEachVector(n, [&](int64_t first, Span span) {
    float v[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      v[j] = span.Has(j) && place.Has(first + j)
                 ? dy.Get(place.InSelected(first + j))
                 : 0;
    }
    dx.Store(first, span, v);
  });
}

void Select(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const LocalTensor& y = call.results[0];
  const int64_t n = y.elements();
  Launch(TakePlace, BlocksForVectors(*call.queue, n), kThreads, 0, *call.queue,
         Elements<Any>(x), Elements<Any>(y), n, PlaceOf(call, x));
}

void SelectDx(const KernelCall& call) {
  const LocalTensor& dy = call.operands[0];
  const LocalTensor& dx = call.results[0];
  const int64_t n = dx.elements();
  Launch(PutPlace, BlocksForVectors(*call.queue, n), kThreads, 0, *call.queue,
         Elements<Any>(dy), Elements<Any>(dx), n, PlaceOf(call, dx));
}

}  // namespace

std::vector<Kernel> CudaSelectKernels() {
  return {
      {"select", Select},
      {"select_dx", SelectDx},
  };
}

}  // namespace tessera
