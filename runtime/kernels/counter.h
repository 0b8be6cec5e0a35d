#pragma once
// Randomness by global index: what a shard draws depends on where its elements
// lie in the whole tensor and on nothing else, so that every split draws alike.

#include <cmath>
#include <cstdint>

#include "planner/base/rng.h"
#include "runtime/kernels/kernel.h"

namespace tessera {

// Runs of elements that are neighbours in the block and in the whole tensor:
// those along the last dimension.
inline int64_t RunLength(const LocalTensor& tensor) {
  return tensor.shape.empty() ? 1 : tensor.shape.back();
}
inline int64_t RunCount(const LocalTensor& tensor) {
  const int64_t length = RunLength(tensor);
  return length == 0 ? 0 : tensor.elements() / length;
}

// Calls run(local, global, length) for the runs [begin, end), in order; `local`
// and `global` are the row-major indices of the run's first element.
template <typename Run>
void ForEachRun(const LocalTensor& tensor, int64_t begin, int64_t end,
                Run run) {
  const size_t dims = tensor.shape.size();
  const int64_t length = RunLength(tensor);
  for (int64_t i = begin; i < end; ++i) {
    int64_t rest = i;
    int64_t global = dims == 0 ? 0 : tensor.offset[dims - 1];
    int64_t stride = dims == 0 ? 1 : tensor.global_shape[dims - 1];
    for (size_t dim = dims; dim-- > 1;) {
      const int64_t outer = dim - 1;
      global += stride * (tensor.offset[outer] + rest % tensor.shape[outer]);
      rest /= tensor.shape[outer];
      stride *= tensor.global_shape[outer];
    }
    run(i * length, global, length);
  }
}

// The key of one dropout node in one step. An element is kept where
// CounterUniform01(key, its global index) >= probability.
constexpr uint64_t DropoutKey(uint64_t seed, int64_t step, uint64_t salt) {
  return Mix64(seed ^ Mix64(static_cast<uint64_t>(step) ^ Mix64(salt)));
}
// The same in integers: an element is kept where CounterBits53(key, its global
// index) >= this. Multiplying by a power of two is exact.
inline uint64_t DropoutThreshold(double probability) {
  return static_cast<uint64_t>(std::ceil(probability * 0x1.0p53));
}

}  // namespace tessera
