// A sequence as its steps, and the other way round (planner/ops/steps.cc). As
// many steps as the arguments of a kernel hold are copied by one launch.

#include <algorithm>

#include "runtime/kernels/cuda/elements.h"

namespace tessera {
namespace {

constexpr int kMostCopied = 64;  // by one launch
template <typename T>
struct Steps {
  Elements<T> of[kMostCopied];
  int count = 0;
};

// Steps `first` to first + count of a sequence (b, length, width) to or from
// tensors (b, width) each.
template <bool kToSteps, typename T>
__global__ void CopySteps(Elements<T> whole, Steps<T> steps, int64_t first,
                          int64_t length, int64_t width, int64_t elements) {
  const int64_t grid = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements;
       i += grid) {
    const int64_t feature = i % width;
    const int64_t step = i / width % steps.count;
    const int64_t sample = i / width / steps.count;
    const int64_t in_whole = (sample * length + first + step) * width + feature;
    const Elements<T>& part = steps.of[step];
    if constexpr (kToSteps) {
      part.Set(sample * width + feature, whole.Get(in_whole));
    } else {
      whole.Set(in_whole, part.Get(sample * width + feature));
    }
  }
}

template <bool kToSteps>
void Copy(const KernelCall& call, const LocalTensor& whole,
          std::span<const LocalTensor> parts) {
  std::vector<LocalTensor> tensors(parts.begin(), parts.end());
  tensors.push_back(whole);
  const int64_t width = whole.shape[2];
  ByType(tensors, [&]<typename T>() {
    for (size_t first = 0; first < parts.size(); first += kMostCopied) {
      Steps<T> steps;
      for (const LocalTensor& part : parts.subspan(
               first, std::min<size_t>(kMostCopied, parts.size() - first))) {
        steps.of[steps.count++] = Elements<T>(part);
      }
      const int64_t elements = whole.shape[0] * steps.count * width;
      Launch(CopySteps<kToSteps, T>, BlocksFor(*call.queue, elements), kThreads,
             0, *call.queue, Elements<T>(whole), steps,
             static_cast<int64_t>(first), whole.shape[1], width, elements);
    }
  });
}

void Stack(const KernelCall& call) {
  Copy</*kToSteps=*/false>(call, call.results[0], call.operands);
}

void Unstack(const KernelCall& call) {
  Copy</*kToSteps=*/true>(call, call.operands[0], call.results);
}

}  // namespace

std::vector<Kernel> CudaStepsKernels() {
  return {{"stack", Stack}, {"unstack", Unstack}};
}

}  // namespace tessera
