// Channels of images behind each other.

#include <algorithm>

#include "runtime/kernels/cpu/call.h"

namespace tessera {
namespace {

// The product of the extents in front of the joint dimension, in which an
// operand and a result differ: so many runs of elements does a tensor have.
int64_t RunsOf(const KernelCall& call) {
  const Indices& x = call.rule->operands[0];
  const Indices& z = call.rule->results[0];
  int64_t runs = 1;
  for (size_t d = 0; d < x.size() && x[d] == z[d]; ++d) {
    runs *= call.operands[0].shape[d];
  }
  return runs;
}

// x0, x1, ... -> z.
template <typename T>
void ConcatChannels(const KernelCall& call) {
  T* to = call.results[0].as<T>();
  const int64_t runs = RunsOf(call);
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
  const int64_t runs = RunsOf(call);
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
