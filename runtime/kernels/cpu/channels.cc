// Channels of images behind each other.

#include <algorithm>

#include "runtime/kernels/cpu/call.h"

namespace tessera {
namespace {

// Elements of one sample.
int64_t SampleSize(const LocalTensor& tensor) {
  return tensor.elements() / tensor.shape[0];
}

// Images x0, x1, ... -> z.
template <typename T>
void ConcatChannels(const KernelCall& call) {
  T* to = call.results[0].as<T>();
  for (int64_t sample = 0; sample < call.results[0].shape[0]; ++sample) {
    for (const LocalTensor& x : call.operands) {
      const int64_t size = SampleSize(x);
      to = std::copy_n(x.as<const T>() + sample * size, size, to);
    }
  }
}

// dz -> dx0, dx1, ...
template <typename T>
void ConcatChannelsDx(const KernelCall& call) {
  const T* from = call.operands[0].as<const T>();
  for (int64_t sample = 0; sample < call.operands[0].shape[0]; ++sample) {
    for (const LocalTensor& dx : call.results) {
      const int64_t size = SampleSize(dx);
      std::copy_n(from, size, dx.as<T>() + sample * size);
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
