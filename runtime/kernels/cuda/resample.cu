// A dimension read at equally spaced places (planner/ops/resample.cc). A thread
// writes an element; backward it adds up what looks at it, in order.

#include "runtime/kernels/cuda/elements.h"
#include "runtime/kernels/resample.h"

namespace tessera {
namespace {

template <typename T>
__global__ void ResampleForward(Resampling r, Elements<T> x, Elements<T> y,
                                int64_t n) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
       i += stride) {
    const int64_t row = i / r.to.inner / r.to.places;
    const int64_t within = i % r.to.inner;
    const Resampling::Look look = r.At(i / r.to.inner % r.to.places);
    const auto t = static_cast<float>(look.t);
    const int64_t first = row * r.from.places;
    const float low = x.Get((first + look.low) * r.from.inner + within);
    const float high = x.Get((first + look.high) * r.from.inner + within);
    y.Set(i, (1 - t) * low + t * high);
  }
}

template <typename T>
__global__ void ResampleBackward(Resampling r, Elements<T> dy, Elements<T> dx,
                                 int64_t n) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
       i += stride) {
    const int64_t row = i / r.from.inner / r.from.places;
    const int64_t within = i % r.from.inner;
    const int64_t m = i / r.from.inner % r.from.places;
    float sum = 0;
    const int64_t last = r.Last(m);
    for (int64_t at = r.First(m); at <= last; ++at) {
      const Resampling::Look look = r.At(at);
      const auto t = static_cast<float>(look.t);
      const float weight =
          (look.low == m ? 1 - t : 0.0f) + (look.high == m ? t : 0.0f);
      if (weight == 0) continue;
      sum += weight * dy.Get((row * r.to.places + at) * r.to.inner + within);
    }
    dx.Set(i, sum);
  }
}

void Resample(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const LocalTensor& y = call.results[0];
  ByType({x, y}, [&]<typename T>() {
    Launch(ResampleForward<T>, BlocksFor(*call.queue, y.elements()), kThreads,
           0, *call.queue, ResamplingOf(call, /*backward=*/false),
           Elements<T>(x), Elements<T>(y), y.elements());
  });
}

void ResampleDx(const KernelCall& call) {
  const LocalTensor& dy = call.operands[0];
  const LocalTensor& dx = call.results[0];
  ByType({dy, dx}, [&]<typename T>() {
    Launch(ResampleBackward<T>, BlocksFor(*call.queue, dx.elements()), kThreads,
           0, *call.queue, ResamplingOf(call, /*backward=*/true),
           Elements<T>(dy), Elements<T>(dx), dx.elements());
  });
}

}  // namespace

std::vector<Kernel> CudaResampleKernels() {
  return {
      {"resample", Resample},
      {"resample_dx", ResampleDx},
  };
}

}  // namespace tessera
