// A sequence as its steps, and the other way round.

#include <algorithm>

#include "runtime/kernels/cpu/call.h"

namespace tessera {
namespace {

// Steps -> sequence.
template <typename T>
void Stack(const KernelCall& call) {
  const LocalTensor& whole = call.results[0];
  const int64_t width = whole.shape[2];
  T* to = whole.as<T>();
  for (int64_t sample = 0; sample < whole.shape[0]; ++sample) {
    for (const LocalTensor& step : call.operands) {
      to = std::copy_n(step.as<const T>() + sample * width, width, to);
    }
  }
}

// Sequence -> steps.
template <typename T>
void Unstack(const KernelCall& call) {
  const LocalTensor& whole = call.operands[0];
  const int64_t width = whole.shape[2];
  const T* from = whole.as<const T>();
  for (int64_t sample = 0; sample < whole.shape[0]; ++sample) {
    for (const LocalTensor& step : call.results) {
      std::copy_n(from, width, step.as<T>() + sample * width);
      from += width;
    }
  }
}

}  // namespace

std::vector<Kernel> CpuStepsKernels() {
  return {
      {"stack", ByDType<Stack<float>, Stack<double>>},
      {"unstack", ByDType<Unstack<float>, Unstack<double>>},
  };
}

}  // namespace tessera
