// Products of all pairs of a sample's vectors (planner/ops/pairwise_dot.cc).

#include "runtime/kernels/cuda/reduce.h"

namespace tessera {
namespace {

// A warp for each pair: p = i (i - 1) / 2 + j.
template <typename T>
__global__ void PairwiseDot(Elements<T> x, Elements<T> y, int64_t samples,
                            int64_t vectors, int64_t width) {
  const int64_t pairs = vectors * (vectors - 1) / 2;
  const int64_t row = RowOfThread();
  if (row >= samples * pairs) return;
  const int64_t pair = row % pairs;
  // The root is exact to a unit; the loops mend it.
  auto i =
      static_cast<int64_t>((1 + sqrtf(1 + 8 * static_cast<float>(pair))) / 2);
  while (i * (i - 1) / 2 > pair) --i;
  while (i * (i + 1) / 2 <= pair) ++i;
  const int64_t j = pair - i * (i - 1) / 2;
  const int64_t first = row / pairs * vectors * width;
  float sum = 0;
  for (int64_t h = threadIdx.x; h < width; h += kWarp) {
    sum += x.Get(first + i * width + h) * x.Get(first + j * width + h);
  }
  sum = Sum(sum);
  if (threadIdx.x == 0) y.Set(row, sum);
}

// A thread for each element of dx.
template <typename T>
__global__ void PairwiseDotDx(Elements<T> dy, Elements<T> x, Elements<T> dx,
                              int64_t n, int64_t vectors, int64_t width) {
  const int64_t pairs = vectors * (vectors - 1) / 2;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; at < n;
       at += step) {
    const int64_t h = at % width;
    const int64_t i = at / width % vectors;
    const int64_t sample = at / width / vectors;
    float sum = 0;
    for (int64_t j = 0; j < vectors; ++j) {
      if (j == i) continue;
      const int64_t larger = i > j ? i : j;
      const int64_t pair = larger * (larger - 1) / 2 + (i > j ? j : i);
      sum += dy.Get(sample * pairs + pair) *
             x.Get((sample * vectors + j) * width + h);
    }
    dx.Set(at, sum);
  }
}

void CallPairwiseDot(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const LocalTensor& y = call.results[0];
  constexpr unsigned kRowsOfBlock = 8;
  const unsigned blocks = BlocksOf(y.elements(), kRowsOfBlock);
  ByType({x, y}, [&]<typename T>() {
    Launch(PairwiseDot<T>, blocks, dim3(kWarp, kRowsOfBlock), 0, *call.queue,
           Elements<T>(x), Elements<T>(y), x.shape[0], x.shape[1], x.shape[2]);
  });
}

void CallPairwiseDotDx(const KernelCall& call) {
  const LocalTensor& dy = call.operands[0];
  const LocalTensor& x = call.operands[1];
  const LocalTensor& dx = call.results[0];
  ByType({dy, x, dx}, [&]<typename T>() {
    Launch(PairwiseDotDx<T>, BlocksFor(*call.queue, dx.elements()), kThreads, 0,
           *call.queue, Elements<T>(dy), Elements<T>(x), Elements<T>(dx),
           dx.elements(), x.shape[1], x.shape[2]);
  });
}

}  // namespace

std::vector<Kernel> CudaPairwiseDotKernels() {
  return {
      {"pairwise_dot", CallPairwiseDot},
      {"pairwise_dot_dx", CallPairwiseDotDx},
  };
}

}  // namespace tessera
