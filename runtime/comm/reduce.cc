#include "runtime/comm/reduce.h"

#include <algorithm>

#include "planner/base/check.h"
#include "runtime/comm/copy.h"
#include "runtime/float16.h"

namespace tessera {
namespace {

// A block of sums stays in the first-level cache, which also lets a
// destination be a source: the block is stored once it is complete.
constexpr int64_t kBlockBytes = 4096;

template <typename T>
constexpr int64_t kBlock = kBlockBytes / static_cast<int64_t>(sizeof(T));

// `count` is a constant for full blocks, which lets the compiler vectorize.
template <typename T>
inline void Set(T* __restrict sum, const T* __restrict a, const T* __restrict b,
                int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] = a[i] + b[i];
}

template <typename T>
inline void Add(T* __restrict sum, const T* __restrict a, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] += a[i];
}

// Integers are added as unsigned, so that overflow wraps.
template <typename T>
void Sum(std::span<const std::byte* const> sources, std::byte* sum,
         std::byte* staged, int64_t count, bool past_cache) {
  constexpr auto kSize = static_cast<int64_t>(sizeof(T));
  alignas(64) T block[kBlock<T>];
  for (int64_t begin = 0; begin < count; begin += kBlock<T>) {
    const int64_t n = std::min(kBlock<T>, count - begin);
    const auto source = [&](size_t s) {
      return reinterpret_cast<const T*>(sources[s]) + begin;
    };
    if (sources.size() == 1) {
      CopyToCache(block, source(0), n * kSize);
    } else if (n == kBlock<T>) {
      Set(block, source(0), source(1), kBlock<T>);
      for (size_t s = 2; s < sources.size(); ++s) {
        Add(block, source(s), kBlock<T>);
      }
    } else {
      Set(block, source(0), source(1), n);
      for (size_t s = 2; s < sources.size(); ++s) Add(block, source(s), n);
    }
    if (staged != nullptr) {
      CopyToCache(staged + begin * kSize, block, n * kSize);
    }
    if (past_cache) {
      CopyPastCache(sum + begin * kSize, block, n * kSize);
    } else {
      CopyToCache(sum + begin * kSize, block, n * kSize);
    }
  }
}

void Sum16Bit(std::span<const std::byte* const> sources, std::byte* sum,
              std::byte* staged, int64_t count, DType dtype, bool past_cache) {
  constexpr int64_t kSize = 2;
  alignas(64) float block[kBlock<float>];
  alignas(64) float term[kBlock<float>];
  alignas(64) uint16_t rounded[kBlock<float>];
  for (int64_t begin = 0; begin < count; begin += kBlock<float>) {
    const int64_t n = std::min(kBlock<float>, count - begin);
    Widen(sources[0] + begin * kSize, dtype, n, block);
    for (size_t s = 1; s < sources.size(); ++s) {
      Widen(sources[s] + begin * kSize, dtype, n, term);
      Add(block, term, n);
    }
    Narrow(block, n, dtype, rounded);
    if (staged != nullptr) {
      CopyToCache(staged + begin * kSize, rounded, n * kSize);
    }
    if (past_cache) {
      CopyPastCache(sum + begin * kSize, rounded, n * kSize);
    } else {
      CopyToCache(sum + begin * kSize, rounded, n * kSize);
    }
  }
}

}  // namespace

void SumInOrder(std::span<const std::byte* const> sources, std::byte* sum,
                std::byte* staged, int64_t count, DType dtype,
                bool past_cache) {
  switch (dtype) {
    case DType::kFloat64:
      return Sum<double>(sources, sum, staged, count, past_cache);
    case DType::kFloat32:
      return Sum<float>(sources, sum, staged, count, past_cache);
    case DType::kBFloat16:
    case DType::kFloat16:
      return Sum16Bit(sources, sum, staged, count, dtype, past_cache);
    case DType::kInt32:
      return Sum<uint32_t>(sources, sum, staged, count, past_cache);
  }
}

}  // namespace tessera
