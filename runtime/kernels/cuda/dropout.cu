// Inverted dropout; its gradient is the same operator on dy. What is kept is
// what the CPU keeps, bit for bit.

#include <algorithm>

#include "runtime/kernels/counter.h"
#include "runtime/kernels/cuda/elements.h"
#include "runtime/kernels/dropout.h"

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

  // So many elements from this one on are neighbours in both.
  __device__ int64_t Neighbours(int64_t i) const {
    return dims == 1 ? shape[0] - i : shape[dims - 1] - i % shape[dims - 1];
  }
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

struct Draw {
  uint64_t seed;
  StepArgument now;
  uint64_t salt;
  uint64_t threshold;
  float scale;
};

template <typename T>
__global__ void Dropout(Elements<T> x, Elements<T> y, int64_t n, Place place,
                        ReorderedSequence sequence, Draw draw) {
  const uint64_t key = DropoutKey(draw.seed, draw.now.Get().step, draw.salt);
  ForEachVector(n, [&](int64_t first, Span span) {
    float v[kVector];
    x.Load(first, span, v);
    const auto keep = [&](int j, uint32_t bits) {
      v[j] = bits >= draw.threshold ? v[j] * draw.scale : 0;
    };
    const int64_t global = place.Global(first);
    const int64_t neighbours =
        min(place.Neighbours(first), sequence.Neighbours(global));
    const int64_t index = sequence.Original(global);
    if (neighbours >= kVector && index % 2 == 0) {
#pragma unroll
      for (int j = 0; j < kVector; j += 2) {
        const uint64_t two =
            DropoutBitsOfTwo(key, static_cast<uint64_t>(index + j) / 2);
        keep(j, static_cast<uint32_t>(two));
        keep(j + 1, static_cast<uint32_t>(two >> 32));
      }
    } else {
      for (int j = 0; j < kVector; ++j) {
        const int64_t at = sequence.Original(place.Global(first + j));
        keep(j, DropoutBits(key, static_cast<uint64_t>(at)));
      }
    }
    y.Store(first, span, v);
  });
}

void CallDropout(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const LocalTensor& y = call.results[0];
  const int64_t n = x.elements();
  const double probability = call.attribute("probability");
  const Draw draw = {call.seed, call.step_argument(),
                     static_cast<uint64_t>(call.attribute("salt")),
                     DropoutThreshold(probability),
                     static_cast<float>(1 / (1 - probability))};
  ByType({x, y}, [&]<typename T>() {
    Launch(Dropout<T>, BlocksForVectors(*call.queue, n), kThreads, 0,
           *call.queue, Elements<T>(x), Elements<T>(y), n, Place(x),
           ReorderedSequence(call), draw);
  });
}

}  // namespace

std::vector<Kernel> CudaDropoutKernels() {
  return {{"dropout", CallDropout}};
}

}  // namespace tessera
