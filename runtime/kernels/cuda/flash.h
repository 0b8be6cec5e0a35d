#pragma once
// What the attention kernels share: the problem as a kernel takes it, who sees
// whom, and the entries of the tensor-core kernels. For .cu files.
//
// Tensors are those of planner/ops/attention.cc, row-major: q (b, s, g, r, d),
// k (b, t, g, d), v (b, t, g, e), o (b, s, g, r, e), lse (b, s, g, r); the
// gradients are like what they belong to. A head is one of the g * r.

#include <algorithm>
#include <cstdint>

#include "planner/base/divide.h"
#include "runtime/kernels/cuda/elements.h"
#include "runtime/kernels/cuda/launch.h"

namespace tessera {

// Two neighbouring elements, as fp32.
inline __device__ float2 LoadTwo(const __nv_bfloat162* from) {
  return __bfloat1622float2(*from);
}
inline __device__ float2 LoadTwo(const __half2* from) {
  return __half22float2(*from);
}
inline __device__ float2 LoadTwo(const float2* from) {
  return *from;
}
inline __device__ void StoreTwo(__nv_bfloat162* to, float2 value) {
  *to = __floats2bfloat162_rn(value.x, value.y);
}
inline __device__ void StoreTwo(__half2* to, float2 value) {
  *to = __floats2half2_rn(value.x, value.y);
}
inline __device__ void StoreTwo(float2* to, float2 value) {
  *to = value;
}

// body(pairs): a tensor's elements, two at a time. REQUIRES: its address is a
// multiple of two elements.
template <typename Body>
__device__ void InPairs(const Elements<Any>& of, Body body) {
  switch (of.dtype) {
    case DType::kBFloat16:
      return body(static_cast<__nv_bfloat162*>(of.data));
    case DType::kFloat16:
      return body(static_cast<__half2*>(of.data));
    default:
      return body(static_cast<float2*>(of.data));
  }
}

// The lowest and the highest of kRangeRows consecutive positions.
struct PositionRange {
  int32_t lowest;
  int32_t highest;
};
constexpr int kRangeRows = 32;

constexpr uint32_t kNoWindow = 1u << 31;

// Who sees whom, in one comparison for each pair: a query at p sees the keys at
// positions in (p + shift - span, p + shift], modulo 2^32, except those that
// are never shown.
struct Sight {
  uint32_t shift;
  uint32_t span;
  bool shows_negative;

  // Of a query.
  __host__ __device__ uint32_t Of(int32_t query) const {
    return static_cast<uint32_t>(query) + shift;
  }
  __host__ __device__ bool Shows(int32_t key) const {
    return shows_negative || key >= 0;
  }
  // REQUIRES: Shows(key).
  __host__ __device__ bool Sees(uint32_t sight, int32_t key) const {
    return sight - static_cast<uint32_t>(key) < span;
  }
};

// What a tile of queries sees of a tile of keys.
enum class Seen { kNothing, kSome, kAll };

struct AttentionProblem {
  int b, s, g, r, t, d, e;
  float scale;
  // A query at p sees the keys at positions in (p - window, p], where `causal`,
  // and else those that are not negative in (p - window, p + window).
  uint32_t window;
  bool causal;
  bool biased;                        // by distance
  const int32_t* query_positions;     // (b, s)
  const int32_t* key_positions;       // (b, t)
  const PositionRange* query_ranges;  // (b, s / kRangeRows, rounded up)
  const PositionRange* key_ranges;    // (b, t / kRangeRows, rounded up)

  __host__ __device__ int heads() const { return g * r; }
  // Of a row of o in units of e elements, and of lse in elements.
  __host__ __device__ int64_t Row(int sample, int query, int head) const {
    return (int64_t{sample} * s + query) * heads() + head;
  }
  // Of a row of k or v in units of d or e elements.
  __host__ __device__ int64_t KeyRow(int sample, int key, int group) const {
    return (int64_t{sample} * t + key) * g + group;
  }

  __host__ __device__ Sight sight() const {
    if (causal) return {0, window, true};
    // All: positions are less than 2^31 - 1 apart.
    if (window == kNoWindow) return {kNoWindow, ~0u, false};
    return {window - 1, 2 * window - 1, false};
  }
  __host__ __device__ bool Sees(int32_t query, int32_t key) const {
    const Sight by = sight();
    return by.Shows(key) && by.Sees(by.Of(query), key);
  }

  // The range of rows [first, first + rows) of a sample, of which there are n.
  static __device__ PositionRange Range(const PositionRange* ranges, int sample,
                                        int first, int rows, int n) {
    const int per_sample = DivideUp(n, kRangeRows);
    const int begin = first / kRangeRows;
    const int end = min((first + rows) / kRangeRows, per_sample);
    PositionRange range = ranges[sample * per_sample + begin];
    for (int i = begin + 1; i < end; ++i) {
      const PositionRange next = ranges[sample * per_sample + i];
      range.lowest = min(range.lowest, next.lowest);
      range.highest = max(range.highest, next.highest);
    }
    return range;
  }
  __device__ PositionRange Queries(int sample, int first, int rows) const {
    return Range(query_ranges, sample, first, rows, s);
  }
  __device__ PositionRange Keys(int sample, int first, int rows) const {
    return Range(key_ranges, sample, first, rows, t);
  }
  // kSome where it is not certain.
  __device__ Seen SeenOf(PositionRange queries, PositionRange keys) const {
    const auto w = static_cast<int64_t>(window);
    // How far keys lie behind queries, at least and at most.
    const int64_t least = int64_t{queries.lowest} - keys.highest;
    const int64_t most = int64_t{queries.highest} - keys.lowest;
    if (!causal) {
      const bool any = window == kNoWindow || (least < w && -most < w);
      if (keys.highest < 0 || !any) return Seen::kNothing;
      const bool all = window == kNoWindow || (most < w && -least < w);
      return keys.lowest >= 0 && all ? Seen::kAll : Seen::kSome;
    }
    if (most < 0 || least >= w) return Seen::kNothing;
    return least >= 0 && most < w ? Seen::kAll : Seen::kSome;
  }
};

struct AttentionForward {
  AttentionProblem problem;
  const void* q;
  const void* k;
  const void* v;
  Elements<Any> o;
  Elements<Any> lse;
  // Begin with what o and lse hold, as one more tile of keys.
  bool accumulate;
};

// Rows of `statistics` are a multiple of this.
constexpr int kStatisticRows = 64;

struct AttentionBackward {
  AttentionProblem problem;
  // So many groups are worked on, from those to which the pointers point; rows
  // of tensors have all of the problem's.
  int groups;
  const void* d_o;
  const void* q;
  const void* k;
  const void* v;
  // Of each sample, head and query: log2(e) lse, or 0 where it is infinite, and
  // rowsum(do o). (2, b, heads(), padded_s); zeros behind the last query.
  const float* statistics;
  int padded_s;
  Elements<Any> dq;
  Elements<Any> dk;
  Elements<Any> dv;
  // Elements from one position's gradients to those of the next.
  int64_t dq_stride;
  int64_t dk_stride;
  int64_t dv_stride;
  bool accumulate;

  __host__ __device__ int heads() const { return groups * problem.r; }
  __host__ __device__ int64_t statistic_rows() const {
    return int64_t{problem.b} * heads() * padded_s;
  }
  __host__ __device__ int64_t StatisticRow(int sample, int head) const {
    return (int64_t{sample} * heads() + head) * padded_s;
  }
  // Where the gradients of a row begin.
  __host__ __device__ int64_t DqRow(int sample, int query, int head) const {
    return (int64_t{sample} * problem.s + query) * dq_stride +
           int64_t{head} * problem.d;
  }
  __host__ __device__ int64_t DkRow(int sample, int key, int group) const {
    return (int64_t{sample} * problem.t + key) * dk_stride +
           int64_t{group} * problem.d;
  }
  __host__ __device__ int64_t DvRow(int sample, int key, int group) const {
    return (int64_t{sample} * problem.t + key) * dv_stride +
           int64_t{group} * problem.e;
  }
};

inline bool Aligned(std::initializer_list<LocalTensor> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const LocalTensor& t) {
    return reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
  });
}

// Whether the tensor-core kernels take these operands, of bf16 or fp16: rows
// of 16 bytes and of at most 256 elements, and a positive scale. Results have
// to be Aligned.
inline bool FlashTakes(const AttentionProblem& p,
                       std::initializer_list<LocalTensor> tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [&](const LocalTensor& t) {
                       return Is16Bit(t.dtype) &&
                              t.dtype == tensors.begin()->dtype;
                     }) &&
         Aligned(tensors) && p.d % 8 == 0 && p.e % 8 == 0 &&
         std::max(p.d, p.e) <= 256 && p.scale > 0 && !p.biased;
}

// Attention in tiles with the running softmax of Dao et al. 2022 (the order of
// loops of Dao 2023), on tensor cores: `dtype` is that of q, k, v and do.
void FlashForward(const AttentionForward& call, DType dtype, CudaQueue& queue);
// dq by one kernel, dk and dv by another: 7 products instead of 5, and every
// sum in a fixed order.
void FlashBackward(const AttentionBackward& call, DType dtype,
                   CudaQueue& queue);

}  // namespace tessera
