#include <algorithm>
#include <cstdint>

#include "planner/base/divide.h"
#include "runtime/device/cuda_copy.h"

namespace tessera {
namespace {

// A StridedCopy in words.
struct WordCopy {
  int64_t words = 0;  // in all
  int64_t run = 0;    // words in a run
  int dims = 0;
  int64_t extents[kMaxDims] = {};
  int64_t from_strides[kMaxDims] = {};
  int64_t to_strides[kMaxDims] = {};
};

template <typename Word>
__global__ void CopyWords(Word* to, const Word* from, WordCopy copy) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       i < copy.words; i += step) {
    int64_t point = i / copy.run;
    const int64_t within = i - point * copy.run;
    int64_t source = within;
    int64_t target = within;
    for (int d = copy.dims - 1; d >= 0; --d) {
      const int64_t next = point / copy.extents[d];
      const int64_t at = point - next * copy.extents[d];
      source += at * copy.from_strides[d];
      target += at * copy.to_strides[d];
      point = next;
    }
    to[target] = from[source];
  }
}

template <typename Word>
cudaError_t Launch(void* to, const void* from, const StridedCopy& copy,
                   cudaStream_t stream) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(Word));
  WordCopy words;
  words.run = copy.run_bytes / kBytes;
  words.words = words.run;
  words.dims = copy.dims;
  for (int d = 0; d < copy.dims; ++d) {
    const auto dim = static_cast<size_t>(d);
    words.words *= copy.extents[dim];
    words.extents[d] = copy.extents[dim];
    words.from_strides[d] = copy.from_strides[dim] / kBytes;
    words.to_strides[d] = copy.to_strides[dim] / kBytes;
  }
  constexpr int64_t kThreads = 256;
  // Some waves on any device of today (an H200 runs 132 x 8 such blocks at
  // once); each thread loops over the rest.
  constexpr int64_t kMostBlocks = 4096;
  const int64_t blocks = std::min(DivideUp(words.words, kThreads), kMostBlocks);
  CopyWords<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      static_cast<Word*>(to), static_cast<const Word*>(from), words);
  return cudaGetLastError();
}

// Outer dimensions of one point are dropped, and an innermost dimension whose
// runs follow one another on both sides becomes part of the run.
StridedCopy Collapsed(const StridedCopy& copy) {
  StridedCopy result;
  result.run_bytes = copy.run_bytes;
  for (int d = 0; d < copy.dims; ++d) {
    const auto dim = static_cast<size_t>(d);
    TESSERA_CHECK(copy.extents[dim] >= 1) << d;
    if (copy.extents[dim] == 1) continue;
    const auto last = static_cast<size_t>(result.dims++);
    result.extents[last] = copy.extents[dim];
    result.from_strides[last] = copy.from_strides[dim];
    result.to_strides[last] = copy.to_strides[dim];
  }
  while (result.dims > 0) {
    const auto last = static_cast<size_t>(result.dims - 1);
    if (result.from_strides[last] != result.run_bytes ||
        result.to_strides[last] != result.run_bytes) {
      break;
    }
    result.run_bytes *= result.extents[last];
    --result.dims;
  }
  return result;
}

}  // namespace

cudaError_t EnqueueCopy(void* to, const void* from, const StridedCopy& copy,
                        cudaStream_t stream) {
  const StridedCopy flat = Collapsed(copy);
  uint64_t alignment = reinterpret_cast<uintptr_t>(to) |
                       reinterpret_cast<uintptr_t>(from) |
                       static_cast<uint64_t>(flat.run_bytes);
  if (flat.run_bytes == 0) return cudaSuccess;
  for (int d = 0; d < flat.dims; ++d) {
    const auto dim = static_cast<size_t>(d);
    alignment |= static_cast<uint64_t>(flat.from_strides[dim]) |
                 static_cast<uint64_t>(flat.to_strides[dim]);
  }
  if (flat.dims == 0) {
    return cudaMemcpyAsync(to, from, static_cast<size_t>(flat.run_bytes),
                           cudaMemcpyDeviceToDevice, stream);
  }
  if (alignment % 16 == 0) return Launch<int4>(to, from, flat, stream);
  if (alignment % 8 == 0) return Launch<int2>(to, from, flat, stream);
  if (alignment % 4 == 0) return Launch<int>(to, from, flat, stream);
  if (alignment % 2 == 0) return Launch<short>(to, from, flat, stream);
  return Launch<char>(to, from, flat, stream);
}

}  // namespace tessera
