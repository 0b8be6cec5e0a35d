#pragma once
// Randomness by global index: what a shard draws depends on where its elements
// lie in the whole tensor and on nothing else, so that every split draws alike.

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

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

// Where the elements of a block lie in the whole tensor, as a formula.
struct BlockIndex {
  int64_t first = 0;         // of the block
  int64_t run = 1;           // so many are neighbours in both
  int64_t runs = 1;          // so many of these lie
  int64_t between_runs = 0;  // so far apart, and the next so many
  int64_t between = 0;       // so far from those

  constexpr uint64_t At(int64_t i) const {
    const int64_t at = i / run;
    return static_cast<uint64_t>(first + at / runs * between +
                                 at % runs * between_runs + i % run);
  }
};

// Nothing where more than two dimensions besides the first are cut.
inline std::optional<BlockIndex> BlockIndexOf(const LocalTensor& tensor) {
  BlockIndex index;
  // Dimensions from the last on, those of which all is here with the next.
  std::vector<std::pair<int64_t, int64_t>> extents = {{1, 1}};  // here, in all
  int64_t stride = 1;
  for (size_t d = tensor.shape.size(); d-- > 0;) {
    index.first += tensor.offset[d] * stride;
    stride *= tensor.global_shape[d];
    auto& [here, all] = extents.back();
    if (here == all) {
      here *= tensor.shape[d];
      all *= tensor.global_shape[d];
    } else {
      extents.emplace_back(tensor.shape[d], tensor.global_shape[d]);
    }
  }
  if (extents.size() > 3) return std::nullopt;
  extents.resize(3, {1, 1});
  index.run = extents[0].first;
  index.between_runs = extents[0].second;
  index.runs = extents[1].first;
  index.between = extents[0].second * extents[1].second;
  return index;
}

// Whether a call of "stochastic_cast" is of the types that are rounded so.
inline bool RoundsAtRandom(const KernelCall& call) {
  return call.operands[0].dtype == DType::kFloat32 &&
         call.results[0].dtype == DType::kBFloat16;
}

// The key of one dropout node, or of a weight's rounding, in one step.
constexpr uint64_t DropoutKey(uint64_t seed, int64_t step, uint64_t salt) {
  return Mix64(seed ^ Mix64(static_cast<uint64_t>(step) ^ Mix64(salt)));
}

}  // namespace tessera
