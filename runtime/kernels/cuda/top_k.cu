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
    Places at;
    at.Add(rows.rows, row);
    const auto value_at = [&](int64_t i) {
      return x.Get(at.of[0] + i * rows.stride);
    };
    int64_t place = -1;
    for (int64_t k = 0; k < rows.choices; ++k) {
      place = NextPlace(rows, value_at, place);
      y.Set(at.of[1] + k * rows.step, value_at(place));
      ids[at.of[2] + k * rows.step] = static_cast<int32_t>(place);
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
