// Some places of a dimension, and a dimension with more of them
// (planner/ops/slice.cc). A thread writes an element.

#include "runtime/kernels/attributes.h"
#include "runtime/kernels/cuda/elements.h"
#include "runtime/kernels/places.h"

namespace tessera {
namespace {

// Place i of the result is place `first` + i `step` of the operand.
template <typename T>
__global__ void TakePlaces(PlacesOf from, PlacesOf to, int64_t first,
                           int64_t step, Elements<T> x, Elements<T> y,
                           int64_t n) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
       i += stride) {
    const int64_t place = i / to.inner % to.places;
    const int64_t row = i / to.inner / to.places;
    y.Set(i, x.Get((row * from.places + first + place * step) * from.inner +
                   i % to.inner));
  }
}

// Place `first` + i `step` of the result is place i of the operand; the others
// are `value`.
template <typename T>
__global__ void SpreadPlaces(PlacesOf from, PlacesOf to, int64_t first,
                             int64_t step, float value, Elements<T> x,
                             Elements<T> y, int64_t n) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
       i += stride) {
    const int64_t ahead = i / to.inner % to.places - first;
    const int64_t place = ahead / step;
    const bool there = ahead % step == 0 && place >= 0 && place < from.places;
    const int64_t row = i / to.inner / to.places;
    y.Set(i,
          there ? x.Get((row * from.places + place) * from.inner + i % to.inner)
                : value);
  }
}

void Take(const KernelCall& call, int64_t first, int64_t step) {
  const auto places = PlacesOfCall(call);
  const LocalTensor& x = call.operands[0];
  const LocalTensor& y = call.results[0];
  ByType({x, y}, [&]<typename T>() {
    Launch(TakePlaces<T>, BlocksFor(*call.queue, y.elements()), kThreads, 0,
           *call.queue, places.first, places.second, first, step,
           Elements<T>(x), Elements<T>(y), y.elements());
  });
}

void Spread(const KernelCall& call, int64_t first, int64_t step, float value) {
  const auto places = PlacesOfCall(call);
  const LocalTensor& x = call.operands[0];
  const LocalTensor& y = call.results[0];
  ByType({x, y}, [&]<typename T>() {
    Launch(SpreadPlaces<T>, BlocksFor(*call.queue, y.elements()), kThreads, 0,
           *call.queue, places.first, places.second, first, step, value,
           Elements<T>(x), Elements<T>(y), y.elements());
  });
}

void Slice(const KernelCall& call) {
  Take(call, WholeAttribute(call, "start"), WholeAttribute(call, "step"));
}
void SliceDx(const KernelCall& call) {
  Spread(call, WholeAttribute(call, "start"), WholeAttribute(call, "step"), 0);
}
void Pad(const KernelCall& call) {
  Spread(call, WholeAttribute(call, "before"), 1,
         static_cast<float>(call.attribute("value")));
}
void PadDx(const KernelCall& call) {
  Take(call, WholeAttribute(call, "before"), 1);
}

}  // namespace

std::vector<Kernel> CudaSliceKernels() {
  return {
      {"slice", Slice},
      {"slice_dx", SliceDx},
      {"pad", Pad},
      {"pad_dx", PadDx},
  };
}

}  // namespace tessera
