// Channels of images behind each other.

#include <algorithm>

#include "runtime/kernels/cpu/call.h"
#include "runtime/kernels/places.h"

namespace tessera {
namespace {

// A tensor has a run of elements for each index in front of the joint
// dimension.

// x0, x1, ... -> z.
template <typename T>
void ConcatChannels(const KernelCall& call) {
  T* to = call.results[0].as<T>();
  const int64_t runs = PlacesOfCall(call).first.outer;
  for (int64_t run = 0; run < runs; ++run) {
    for (const LocalTensor& x : call.operands) {
      const int64_t size = x.elements() / runs;
      to = std::copy_n(x.as<const T>() + run * size, size, to);
    }
  }
}

// dz -> dx0, dx1, ...
template <typename T>
void ConcatChannelsDx(const KernelCall& call) {
  const T* from = call.operands[0].as<const T>();
  const int64_t runs = PlacesOfCall(call).first.outer;
  for (int64_t run = 0; run < runs; ++run) {
    for (const LocalTensor& dx : call.results) {
      const int64_t size = dx.elements() / runs;
      std::copy_n(from, size, dx.as<T>() + run * size);
      from += size;
    }
  }
}

}  // namespace

std::vector<Kernel> CpuChannelsKernels() {
  return {
      {"concat_channels",
       ByDType<ConcatChannels<float>, ConcatChannels<double>>},
      {"concat_channels_dx",
       ByDType<ConcatChannelsDx<float>, ConcatChannelsDx<double>>},
  };
}

}  // namespace tessera
