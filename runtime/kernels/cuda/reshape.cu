// Other dimensions (planner/ops/reshape.cc): a copy, since those that change
// are whole.

#include "runtime/kernels/cuda/elements.h"

namespace tessera {
namespace {

template <typename T>
__global__ void CopyElements(Elements<T> x, Elements<T> y, int64_t n) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
       i += stride) {
    y.Set(i, x.Get(i));
  }
}

void Reshape(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const LocalTensor& y = call.results[0];
  ByType({x, y}, [&]<typename T>() {
    Launch(CopyElements<T>, BlocksFor(*call.queue, y.elements()), kThreads, 0,
           *call.queue, Elements<T>(x), Elements<T>(y), y.elements());
  });
}

}  // namespace

std::vector<Kernel> CudaReshapeKernels() {
  return {
      {"reshape", Reshape},
      {"reshape_dx", Reshape},
  };
}

}  // namespace tessera
