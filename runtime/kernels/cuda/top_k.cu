// The best elements of rows, and their places (planner/ops/top_k.cc).

#include "runtime/kernels/cuda/sum_over.h"
#include "runtime/kernels/top_k.h"

namespace tessera {
namespace {

// A thread has a row: rows are short, such as a router's experts.
template <typename T>
__global__ void ChooseBest(TopKRows rows, Elements<T> x, Elements<T> y,
                           int32_t* ids) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       row < rows.rows.count; row += step) {
    LoopPlaces at;
    at.Add(rows.rows, row);
    int64_t before = -1;
    float value_before = 0;
    for (int64_t k = 0; k < rows.choices; ++k) {
      int64_t best = -1;
      float value = 0;
      for (int64_t i = 0; i < rows.places; ++i) {
        const float v = x.Get(at.of[0] + i * rows.stride);
        if (before >= 0 && !IsInFront(rows, value_before, before, v, i)) {
          continue;
        }
        if (best >= 0 && !IsInFront(rows, v, i, value, best)) continue;
        best = i;
        value = v;
      }
      y.Set(at.of[1] + k * rows.step, value);
      ids[at.of[2] + k * rows.step] = static_cast<int32_t>(best);
      before = best;
      value_before = value;
    }
  }
}

void CallTopK(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const LocalTensor& y = call.results[0];
  const TopKRows rows = TopKRowsOf(call);
  ByType({x, y}, [&]<typename T>() {
    Launch(ChooseBest<T>, BlocksFor(*call.queue, rows.rows.count), kThreads, 0,
           *call.queue, rows, Elements<T>(x), Elements<T>(y),
           call.results[1].as<int32_t>());
  });
}

}  // namespace

std::vector<Kernel> CudaTopKKernels() {
  return {{"top_k", CallTopK}};
}

}  // namespace tessera
