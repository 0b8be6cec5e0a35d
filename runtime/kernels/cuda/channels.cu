// Channels of images behind each other (planner/ops/channels.cc).

#include "runtime/kernels/cuda/elements.h"
#include "runtime/kernels/places.h"

namespace tessera {
namespace {

// Copies run `block` of samples: sizes elements each, `from_step` and `to_step`
// apart.
template <typename T>
__global__ void CopyRuns(Elements<T> from, int64_t from_step, Elements<T> to,
                         int64_t to_step, int64_t to_first, int64_t from_first,
                         int64_t size, int64_t elements) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements;
       i += step) {
    const int64_t sample = i / size;
    const int64_t at = i % size;
    to.Set(sample * to_step + to_first + at,
           from.Get(sample * from_step + from_first + at));
  }
}

// A tensor has a run of elements for each index in front of the joint
// dimension.

// x0, x1, ... -> z.
void ConcatChannels(const KernelCall& call) {
  const LocalTensor& z = call.results[0];
  const int64_t runs = PlacesOfCall(call).first.outer;
  int64_t first = 0;
  for (const LocalTensor& x : call.operands) {
    const int64_t size = x.elements() / runs;
    ByType({x, z}, [&]<typename T>() {
      Launch(CopyRuns<T>, BlocksFor(*call.queue, x.elements()), kThreads, 0,
             *call.queue, Elements<T>(x), size, Elements<T>(z),
             z.elements() / runs, first, int64_t{0}, size, x.elements());
    });
    first += size;
  }
}

// dz -> dx0, dx1, ...
void ConcatChannelsDx(const KernelCall& call) {
  const LocalTensor& dz = call.operands[0];
  const int64_t runs = PlacesOfCall(call).first.outer;
  int64_t first = 0;
  for (const LocalTensor& dx : call.results) {
    const int64_t size = dx.elements() / runs;
    ByType({dz, dx}, [&]<typename T>() {
      Launch(CopyRuns<T>, BlocksFor(*call.queue, dx.elements()), kThreads, 0,
             *call.queue, Elements<T>(dz), dz.elements() / runs,
             Elements<T>(dx), size, int64_t{0}, first, size, dx.elements());
    });
    first += size;
  }
}

}  // namespace

std::vector<Kernel> CudaChannelsKernels() {
  return {
      {"concat_channels", ConcatChannels},
      {"concat_channels_dx", ConcatChannelsDx},
  };
}

}  // namespace tessera
