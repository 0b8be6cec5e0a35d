// Inverted dropout; its gradient is the same operator on dy. What is kept is
// what the CPU keeps, bit for bit (runtime/kernels/counter.h).

#include "runtime/kernels/counter.h"
#include "runtime/kernels/cuda/elements.h"

namespace tessera {
namespace {

// Where a block lies in its whole tensor. Dimensions that the block has whole
// are one with those before them.
struct Place {
  int dims = 0;
  int64_t shape[kMaxDims] = {};
  int64_t offset[kMaxDims] = {};
  int64_t global_shape[kMaxDims] = {};

  explicit Place(const LocalTensor& block) {
    for (size_t d = 0; d < block.shape.size(); ++d) {
      const bool whole = block.shape[d] == block.global_shape[d];
      if (whole && dims > 0) {
        shape[dims - 1] *= block.shape[d];
        offset[dims - 1] *= block.shape[d];
        global_shape[dims - 1] *= block.shape[d];
      } else {
        shape[dims] = block.shape[d];
        offset[dims] = block.offset[d];
        global_shape[dims++] = block.global_shape[d];
      }
    }
    if (dims > 0) return;
    dims = shape[0] = global_shape[0] = 1;
  }

  __device__ int64_t Length() const { return shape[dims - 1]; }
  // The global index of element `i` of the block.
  __device__ int64_t Global(int64_t i) const {
    int64_t global = 0;
    int64_t stride = 1;
    for (int d = dims - 1; d >= 0; --d) {
      const int64_t outer = d == 0 ? 0 : i / shape[d];
      global += stride * (offset[d] + i - outer * shape[d]);
      stride *= global_shape[d];
      i = outer;
    }
    return global;
  }
};

template <typename T>
__global__ void Dropout(Elements<T> x, Elements<T> y, int64_t n, Place place,
                        uint64_t seed, StepArgument now, uint64_t salt,
                        uint64_t threshold, float scale) {
  const uint64_t key = DropoutKey(seed, now.Get().step, salt);
  ForEachVector(n, [&](int64_t first, Span span) {
    float v[kVector];
    x.Load(first, span, v);
    const auto draw = [&](int j, int64_t global) {
      const uint64_t bits = CounterBits53(key, static_cast<uint64_t>(global));
      v[j] = bits >= threshold ? v[j] * scale : 0;
    };
    const int64_t global = place.Global(first);
    const int64_t left = place.Length() - first % place.Length();  // of the run
    if (left >= kVector) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) draw(j, global + j);
    } else {
      for (int j = 0; j < kVector; ++j) draw(j, place.Global(first + j));
    }
    y.Store(first, span, v);
  });
}

void CallDropout(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const LocalTensor& y = call.results[0];
  const int64_t n = x.elements();
  const double probability = call.attribute("probability");
  ByType({x, y}, [&]<typename T>() {
    Launch(Dropout<T>, BlocksForVectors(*call.queue, n), kThreads, 0,
           *call.queue, Elements<T>(x), Elements<T>(y), n, Place(x), call.seed,
           call.step_argument(), static_cast<uint64_t>(call.attribute("salt")),
           DropoutThreshold(probability),
           static_cast<float>(1 / (1 - probability)));
  });
}

}  // namespace

std::vector<Kernel> CudaDropoutKernels() {
  return {{"dropout", CallDropout}};
}

}  // namespace tessera
