// Other dimensions: a copy, since those that change are whole.

#include <algorithm>

#include "runtime/kernels/cpu/call.h"

namespace tessera {
namespace {

template <typename T>
void Reshape(const KernelCall& call) {
  const T* const x = call.operands[0].as<const T>();
  T* const y = call.results[0].as<T>();
  ForEachRange(call, call.results[0].elements(), kGrainElements,
               [&](int64_t begin, int64_t end) {
                 std::copy(x + begin, x + end, y + begin);
               });
}

}  // namespace

std::vector<Kernel> CpuReshapeKernels() {
  return {
      {"reshape", ByDType<Reshape<float>, Reshape<double>>},
      {"reshape_dx", ByDType<Reshape<float>, Reshape<double>>},
  };
}

}  // namespace tessera
