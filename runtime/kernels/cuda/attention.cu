// Grouped-query attention (planner/ops/attention.cc). 16-bit heads of
// ordinary widths without biases go to cuDNN (sdpa.h) where it is and what a
// query sees is known beforehand, otherwise to the tensor cores (flash.h); fp32
// and the rest to the kernels of this file, the same algorithm in plain fp32,
// which take any dtypes and heads of up to 256 elements.
//
// What a query sees is decided by positions, which only the device knows: every
// call first finds the range of each run of positions, so that tiles that see
// nothing of each other are skipped and those that see all are not masked.
//
// Workspace: 8 bytes for 32 positions of q and of k; backward 8 bytes for each
// head and query, too; the gradient of T5's biases 4 bytes for each sample and
// bias; cuDNN's log-sum-exps 4 bytes for each head and query. Where that is
// more than there is, samples are worked on in pieces, and backward groups of
// one sample.

#include <optional>

#include "runtime/kernels/alibi.h"
#include "runtime/kernels/attributes.h"
#include "runtime/kernels/cuda/flash.h"
#include "runtime/kernels/cuda/pieces.h"
#include "runtime/kernels/cuda/sdpa.h"
#include "runtime/kernels/relative_bias.h"

namespace tessera {
namespace {

constexpr float kMinusInfinity = -INFINITY;

// What lies in the workspace begins at multiples of this.
constexpr int64_t kAligned = 256;

// ---- Before the tiles -------------------------------------------------------

// A warp finds one range.
__global__ void __launch_bounds__(kThreads)
    FindRanges(const int32_t* positions, int samples, int n,
               PositionRange* ranges) {
  const int per_sample = DivideUp(n, kRangeRows);
  const int64_t range =
      (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kRangeRows;
  if (range >= int64_t{samples} * per_sample) return;
  const int64_t sample = range / per_sample;
  const int64_t first = range % per_sample * kRangeRows;
  const int lane = threadIdx.x % kRangeRows;
  const int64_t row = min(first + lane, int64_t{n} - 1);
  PositionRange found;
  found.lowest = found.highest = positions[sample * n + row];
  for (int lanes = kRangeRows / 2; lanes > 0; lanes /= 2) {
    found.lowest = min(found.lowest, __shfl_xor_sync(~0u, found.lowest, lanes));
    found.highest =
        max(found.highest, __shfl_xor_sync(~0u, found.highest, lanes));
  }
  if (lane == 0) ranges[range] = found;
}

// Elements i and, if there are two, i + 1; by one access where they are pairs.
__device__ float2 TwoOf(const Elements<Any>& from, int64_t i, bool two,
                        bool in_pairs) {
  if (!in_pairs) return make_float2(from.Get(i), two ? from.Get(i + 1) : 0.0f);
  float2 pair;
  InPairs(from, [&](const auto* pairs) { pair = LoadTwo(pairs + i / 2); });
  return pair;
}

// A warp writes the two statistics of one row (AttentionBackward::statistics).
__global__ void __launch_bounds__(kThreads)
    FindStatistics(AttentionBackward call, Elements<Any> d_o, Elements<Any> o,
                   Elements<Any> lse, bool in_pairs, float* statistics) {
  const AttentionProblem& p = call.problem;
  const int64_t warp = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  if (warp >= call.statistic_rows()) return;
  const int heads = call.heads();
  const int head = static_cast<int>(warp % heads);
  const int query = static_cast<int>(warp / heads % call.padded_s);
  const int sample = static_cast<int>(warp / heads / call.padded_s);
  const int lane = threadIdx.x % 32;
  float dot = 0;
  float shift = 0;
  if (query < p.s) {
    const int64_t row = p.Row(sample, query, head);
    for (int x = 2 * lane; x < p.e; x += 64) {
      const float2 a = TwoOf(d_o, row * p.e + x, x + 1 < p.e, in_pairs);
      const float2 b = TwoOf(o, row * p.e + x, x + 1 < p.e, in_pairs);
      dot += a.x * b.x + a.y * b.y;
    }
    shift = lse.Get(row) * 1.4426950408889634f;  // log2(e)
    if (shift == kMinusInfinity) shift = 0;
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    dot += __shfl_xor_sync(~0u, dot, lanes);
  }
  if (lane != 0) return;
  const int64_t to = call.StatisticRow(sample, head) + query;
  statistics[to] = shift;
  statistics[call.statistic_rows() + to] = dot;
}

// ---- Attention without tensor cores -----------------------------------------

// A block of 16 x 16 threads has a tile of kTile queries or keys. A thread has
// rows y + 16 i and columns x + 16 j of every product.
template <int kWidth>
constexpr int kTile = kWidth <= 128 ? 64 : 32;
template <int kWidth>
constexpr int kEach = kTile<kWidth> / 16;

template <int kWidth>
struct WideTile {
  float of[kTile<kWidth>][kWidth + 1];

  // Rows are `stride` elements apart; beyond `rows` and `width` are zeros.
  __device__ void Load(const Elements<Any>& from, int64_t first, int64_t stride,
                       int rows, int width) {
    for (int i = threadIdx.x; i < kTile<kWidth> * kWidth; i += kThreads) {
      const int row = i / kWidth;
      const int column = i % kWidth;
      const bool inside = row < rows && column < width;
      of[row][column] = inside ? from.Get(first + row * stride + column) : 0.0f;
    }
  }
};

template <int kWidth>
struct ScoreTile {
  float of[kTile<kWidth>][kTile<kWidth> + 1];
};

// c[i][j] = sum of a[y + 16 i][d] b[x + 16 j][d].
template <int kWidth>
__device__ void Products(const WideTile<kWidth>& a, const WideTile<kWidth>& b,
                         float (&c)[kEach<kWidth>][kEach<kWidth>]) {
  const int x = threadIdx.x % 16;
  const int y = threadIdx.x / 16;
#pragma unroll
  for (int i = 0; i < kEach<kWidth>; ++i) {
#pragma unroll
    for (int j = 0; j < kEach<kWidth>; ++j) c[i][j] = 0;
  }
#pragma unroll 4
  for (int d = 0; d < kWidth; ++d) {
#pragma unroll
    for (int i = 0; i < kEach<kWidth>; ++i) {
#pragma unroll
      for (int j = 0; j < kEach<kWidth>; ++j) {
        c[i][j] += a.of[y + 16 * i][d] * b.of[x + 16 * j][d];
      }
    }
  }
}

// c[i][j] += sum over k of w[y + 16 i][k] b[k][x + 16 j], or of w[k][y + 16 i].
template <int kWidth, bool kTransposed>
__device__ void AddWeighted(const ScoreTile<kWidth>& w,
                            const WideTile<kWidth>& b,
                            float (&c)[kEach<kWidth>][kWidth / 16]) {
  const int x = threadIdx.x % 16;
  const int y = threadIdx.x / 16;
#pragma unroll 2
  for (int k = 0; k < kTile<kWidth>; ++k) {
#pragma unroll
    for (int i = 0; i < kEach<kWidth>; ++i) {
      const float weight =
          kTransposed ? w.of[k][y + 16 * i] : w.of[y + 16 * i][k];
#pragma unroll
      for (int j = 0; j < kWidth / 16; ++j) {
        c[i][j] += weight * b.of[k][x + 16 * j];
      }
    }
  }
}

// Puts factor c, or adds it, to rows that exist.
template <int kWidth>
__device__ void Store(const float (&c)[kEach<kWidth>][kWidth / 16],
                      float factor, const Elements<Any>& to, int64_t first,
                      int64_t stride, int rows, int width, bool accumulate) {
  const int x = threadIdx.x % 16;
  const int y = threadIdx.x / 16;
#pragma unroll
  for (int i = 0; i < kEach<kWidth>; ++i) {
#pragma unroll
    for (int j = 0; j < kWidth / 16; ++j) {
      if (y + 16 * i >= rows || x + 16 * j >= width) continue;
      const int64_t at = first + (y + 16 * i) * stride + x + 16 * j;
      to.Set(at, factor * c[i][j] + (accumulate ? to.Get(at) : 0.0f));
    }
  }
}

// Biases of scores by head and distance: ALiBi's or, of a table, T5's.
constexpr int kMostBiasedHeads = 256;
constexpr int kMostBuckets = 128;
struct Biases {
  float slopes[kMostBiasedHeads] = {};
  Elements<Any> table;  // (buckets, heads); null: ALiBi
  int heads = 0;
  int buckets = 0;  // of a side
  int behind = 0;   // RelativeBuckets::behind
  bool causal = false;
  int32_t nearest[kMostBuckets] = {};  // distance of a side's buckets

  __device__ int Bucket(int32_t query, int32_t key) const {
    const int64_t distance = int64_t{key} - query;
    if (distance > 0 && causal) return 0;
    const int64_t length = distance > 0 ? distance : -distance;
    int bucket = 0;
    while (bucket + 1 < buckets && nearest[bucket + 1] <= length) ++bucket;
    return distance > 0 ? behind + bucket : bucket;
  }
  __device__ float Of(int head, int32_t query, int32_t key) const {
    if (table.data != nullptr) {
      return table.Get(Bucket(query, key) * heads + head);
    }
    return slopes[head] * (static_cast<float>(key) - static_cast<float>(query));
  }
};

Elements<Any> From(Elements<Any> elements, int64_t first) {
  elements.data =
      static_cast<std::byte*>(elements.data) + first * SizeOf(elements.dtype);
  return elements;
}
// The biases of heads from this one on.
Biases FromHead(Biases biases, int head) {
  if (biases.table.data != nullptr) biases.table = From(biases.table, head);
  std::copy(biases.slopes + head, std::end(biases.slopes), biases.slopes);
  return biases;
}

struct AnyForward {
  AttentionForward call;
  Elements<Any> q, k, v;
  Biases biases;
};

template <int kWidth>
__global__ void __launch_bounds__(kThreads) ForwardAny(AnyForward any) {
  constexpr int kRows = kTile<kWidth>;
  struct Shared {
    WideTile<kWidth> queries;
    WideTile<kWidth> keys;  // then values
    ScoreTile<kWidth> scores;
    float fade[kRows];
    float inverse[kRows];
  };
  Shared& shared = *reinterpret_cast<Shared*>(DynamicShared());
  const AttentionForward& call = any.call;
  const AttentionProblem& p = call.problem;
  const int first = (gridDim.x - 1 - blockIdx.x) * kRows;
  const int head = blockIdx.y;
  const int group = head / p.r;
  const int sample = blockIdx.z;
  const int x = threadIdx.x % 16;
  const int y = threadIdx.x / 16;
  const int rows = min(kRows, p.s - first);
  const int64_t row = p.Row(sample, first, head);
  const int64_t stride = int64_t{p.heads()} * p.e;
  const PositionRange range = p.Queries(sample, first, kRows);
  shared.queries.Load(any.q, row * p.d, int64_t{p.heads()} * p.d, rows, p.d);

  // The threads of a row of scores, one after the other.
  constexpr int kLanes = kThreads / kRows;
  const int own = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  float maximum = kMinusInfinity;
  float sum = 0;  // of this lane's columns
  float output[kEach<kWidth>][kWidth / 16] = {};
  if (call.accumulate) {
    const float lse = own < rows
                          ? call.lse.Get(p.Row(sample, first + own, head))
                          : kMinusInfinity;
    if (lse != kMinusInfinity) {
      maximum = lse;
      sum = lane == 0 ? 1 : 0;
    }
    for (int i = 0; i < kEach<kWidth>; ++i) {
      const int query = y + 16 * i;
      if (query >= rows ||
          call.lse.Get(p.Row(sample, first + query, head)) == kMinusInfinity) {
        continue;
      }
      for (int j = 0; j < kWidth / 16; ++j) {
        if (x + 16 * j >= p.e) continue;
        output[i][j] = call.o.Get(row * p.e + query * stride + x + 16 * j);
      }
    }
  }
  for (int key = 0; key < p.t; key += kRows) {
    if (p.SeenOf(range, p.Keys(sample, key, kRows)) == Seen::kNothing) {
      continue;
    }
    const int keys = min(kRows, p.t - key);
    const int64_t key_row = p.KeyRow(sample, key, group);
    __syncthreads();
    shared.keys.Load(any.k, key_row * p.d, int64_t{p.g} * p.d, keys, p.d);
    __syncthreads();
    float scores[kEach<kWidth>][kEach<kWidth>];
    Products(shared.queries, shared.keys, scores);
    for (int i = 0; i < kEach<kWidth>; ++i) {
      const int query = min(first + y + 16 * i, p.s - 1);
      const int32_t position = p.query_positions[int64_t{sample} * p.s + query];
      for (int j = 0; j < kEach<kWidth>; ++j) {
        const int column = x + 16 * j;
        const int32_t key_position =
            p.key_positions[int64_t{sample} * p.t + min(key + column, p.t - 1)];
        const bool seen = column < keys && p.Sees(position, key_position);
        float score = p.scale * scores[i][j];
        if (p.biased) score += any.biases.Of(head, position, key_position);
        shared.scores.of[y + 16 * i][column] = seen ? score : kMinusInfinity;
      }
    }
    __syncthreads();
    shared.keys.Load(any.v, key_row * p.e, int64_t{p.g} * p.e, keys, p.e);
    float* const own_scores = shared.scores.of[own];
    float larger = maximum;
    for (int j = lane; j < kRows; j += kLanes) {
      larger = fmaxf(larger, own_scores[j]);
    }
    for (int lanes = 1; lanes < kLanes; lanes *= 2) {
      larger = fmaxf(larger, __shfl_xor_sync(~0u, larger, lanes));
    }
    const float shift = larger == kMinusInfinity ? 0.0f : larger;
    const float fade = expf(maximum - shift);
    maximum = larger;
    sum *= fade;
    for (int j = lane; j < kRows; j += kLanes) {
      own_scores[j] = expf(own_scores[j] - shift);
      sum += own_scores[j];
    }
    if (lane == 0) shared.fade[own] = fade;
    __syncthreads();
    for (int i = 0; i < kEach<kWidth>; ++i) {
      for (int j = 0; j < kWidth / 16; ++j) {
        output[i][j] *= shared.fade[y + 16 * i];
      }
    }
    AddWeighted<kWidth, false>(shared.scores, shared.keys, output);
  }
  for (int lanes = 1; lanes < kLanes; lanes *= 2) {
    sum += __shfl_xor_sync(~0u, sum, lanes);
  }
  // All of a call that accumulates have read their log-sum-exps.
  __syncthreads();
  if (lane == 0) {
    shared.inverse[own] = sum == 0 ? 0.0f : 1 / sum;
    if (own < rows) {
      call.lse.Set(p.Row(sample, first + own, head),
                   sum == 0 ? kMinusInfinity : maximum + logf(sum));
    }
  }
  __syncthreads();
  for (int i = 0; i < kEach<kWidth>; ++i) {
    for (int j = 0; j < kWidth / 16; ++j) {
      output[i][j] *= shared.inverse[y + 16 * i];
    }
  }
  Store<kWidth>(output, 1.0f, call.o, row * p.e, stride, rows, p.e,
                /*accumulate=*/false);
}

struct AnyBackward {
  AttentionBackward call;
  Elements<Any> d_o, q, k, v;
  Biases biases;
};

template <int kWidth>
struct BackwardTiles {
  WideTile<kWidth> queries;
  WideTile<kWidth> gradients;
  WideTile<kWidth> keys;
  WideTile<kWidth> values;
  ScoreTile<kWidth> weights;  // P
  ScoreTile<kWidth> slopes;   // dS

  __device__ void LoadQueries(const AnyBackward& any, int sample, int head,
                              int first) {
    const AttentionProblem& p = any.call.problem;
    const int64_t row = p.Row(sample, first, head);
    queries.Load(any.q, row * p.d, int64_t{p.heads()} * p.d, p.s - first, p.d);
    gradients.Load(any.d_o, row * p.e, int64_t{p.heads()} * p.e, p.s - first,
                   p.e);
  }
  __device__ void LoadKeys(const AnyBackward& any, int sample, int group,
                           int first) {
    const AttentionProblem& p = any.call.problem;
    const int64_t row = p.KeyRow(sample, first, group);
    keys.Load(any.k, row * p.d, int64_t{p.g} * p.d, p.t - first, p.d);
    values.Load(any.v, row * p.e, int64_t{p.g} * p.e, p.t - first, p.e);
  }

  // P and dS of the tiles that begin at `query` and `key`.
  __device__ void FindScores(const AnyBackward& any, int sample, int head,
                             int query, int key) {
    const AttentionProblem& p = any.call.problem;
    const int x = threadIdx.x % 16;
    const int y = threadIdx.x / 16;
    float scores[kEach<kWidth>][kEach<kWidth>];
    float d_weights[kEach<kWidth>][kEach<kWidth>];
    Products(queries, keys, scores);
    Products(gradients, values, d_weights);
    for (int i = 0; i < kEach<kWidth>; ++i) {
      const int row = query + y + 16 * i;
      const int64_t at =
          any.call.StatisticRow(sample, head) + min(row, p.s - 1);
      const float lse = any.call.statistics[at];
      const float dot = any.call.statistics[any.call.statistic_rows() + at];
      const int32_t position =
          p.query_positions[int64_t{sample} * p.s + min(row, p.s - 1)];
      for (int j = 0; j < kEach<kWidth>; ++j) {
        const int column = key + x + 16 * j;
        const int32_t key_position =
            p.key_positions[int64_t{sample} * p.t + min(column, p.t - 1)];
        const bool seen =
            row < p.s && column < p.t && p.Sees(position, key_position);
        float score = p.scale * scores[i][j];
        if (p.biased) score += any.biases.Of(head, position, key_position);
        const float weight =
            seen ? exp2f(1.4426950408889634f * score - lse) : 0.0f;
        weights.of[y + 16 * i][x + 16 * j] = weight;
        slopes.of[y + 16 * i][x + 16 * j] = weight * (d_weights[i][j] - dot);
      }
    }
  }
};

template <int kWidth>
__global__ void __launch_bounds__(kThreads) QueryGradientsAny(AnyBackward any) {
  constexpr int kRows = kTile<kWidth>;
  auto& tiles = *reinterpret_cast<BackwardTiles<kWidth>*>(DynamicShared());
  const AttentionProblem& p = any.call.problem;
  const int first = (gridDim.x - 1 - blockIdx.x) * kRows;
  const int head = blockIdx.y;
  const int sample = blockIdx.z;
  const PositionRange range = p.Queries(sample, first, kRows);
  tiles.LoadQueries(any, sample, head, first);
  float dq[kEach<kWidth>][kWidth / 16] = {};
  for (int key = 0; key < p.t; key += kRows) {
    if (p.SeenOf(range, p.Keys(sample, key, kRows)) == Seen::kNothing) {
      continue;
    }
    __syncthreads();
    tiles.LoadKeys(any, sample, head / p.r, key);
    __syncthreads();
    tiles.FindScores(any, sample, head, first, key);
    __syncthreads();
    AddWeighted<kWidth, false>(tiles.slopes, tiles.keys, dq);
  }
  Store<kWidth>(dq, p.scale, any.call.dq, any.call.DqRow(sample, first, head),
                any.call.dq_stride, p.s - first, p.d, any.call.accumulate);
}

template <int kWidth>
__global__ void __launch_bounds__(kThreads) KeyGradientsAny(AnyBackward any) {
  constexpr int kRows = kTile<kWidth>;
  auto& tiles = *reinterpret_cast<BackwardTiles<kWidth>*>(DynamicShared());
  const AttentionProblem& p = any.call.problem;
  const int first = blockIdx.x * kRows;
  const int group = blockIdx.y;
  const int sample = blockIdx.z;
  const PositionRange range = p.Keys(sample, first, kRows);
  tiles.LoadKeys(any, sample, group, first);
  float dk[kEach<kWidth>][kWidth / 16] = {};
  float dv[kEach<kWidth>][kWidth / 16] = {};
  for (int head = group * p.r; head < (group + 1) * p.r; ++head) {
    for (int query = 0; query < p.s; query += kRows) {
      if (p.SeenOf(p.Queries(sample, query, kRows), range) == Seen::kNothing) {
        continue;
      }
      __syncthreads();
      tiles.LoadQueries(any, sample, head, query);
      __syncthreads();
      tiles.FindScores(any, sample, head, query, first);
      __syncthreads();
      AddWeighted<kWidth, true>(tiles.weights, tiles.gradients, dv);
      AddWeighted<kWidth, true>(tiles.slopes, tiles.queries, dk);
    }
  }
  Store<kWidth>(dk, p.scale, any.call.dk, any.call.DkRow(sample, first, group),
                any.call.dk_stride, p.t - first, p.d, any.call.accumulate);
  Store<kWidth>(dv, 1.0f, any.call.dv, any.call.DvRow(sample, first, group),
                any.call.dv_stride, p.t - first, p.e, any.call.accumulate);
}

// The gradient of a head's biases from one sample: (samples, buckets, heads).
template <int kWidth>
__global__ void __launch_bounds__(kThreads)
    BiasGradientsAny(AnyBackward any, float* partial) {
  constexpr int kRows = kTile<kWidth>;
  auto& tiles = *reinterpret_cast<BackwardTiles<kWidth>*>(DynamicShared());
  const AttentionProblem& p = any.call.problem;
  const int head = blockIdx.x;
  const int sample = blockIdx.y;
  const int buckets = any.biases.buckets + any.biases.behind;
  const int own = threadIdx.x;  // bucket
  float sum = 0;
  for (int query = 0; query < p.s; query += kRows) {
    const PositionRange range = p.Queries(sample, query, kRows);
    for (int key = 0; key < p.t; key += kRows) {
      if (p.SeenOf(range, p.Keys(sample, key, kRows)) == Seen::kNothing) {
        continue;
      }
      __syncthreads();
      tiles.LoadQueries(any, sample, head, query);
      tiles.LoadKeys(any, sample, head / p.r, key);
      __syncthreads();
      tiles.FindScores(any, sample, head, query, key);
      __syncthreads();
      if (own >= buckets) continue;
      for (int i = 0; i < min(kRows, p.s - query); ++i) {
        const int32_t position =
            p.query_positions[int64_t{sample} * p.s + query + i];
        for (int j = 0; j < min(kRows, p.t - key); ++j) {
          const int32_t key_position =
              p.key_positions[int64_t{sample} * p.t + key + j];
          if (any.biases.Bucket(position, key_position) == own) {
            sum += tiles.slopes.of[i][j];
          }
        }
      }
    }
  }
  if (own < buckets) {
    partial[(int64_t{sample} * buckets + own) * p.heads() + head] = sum;
  }
}

__global__ void AddSamples(const float* partial, int samples, int64_t n,
                           Elements<Any> to, bool accumulate) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= n) return;
  float sum = accumulate ? to.Get(i) : 0;
  for (int sample = 0; sample < samples; ++sample) {
    sum += partial[sample * n + i];
  }
  to.Set(i, sum);
}

template <int kWidth>
dim3 TilesOf(int rows, int heads, int samples) {
  return dim3(BlocksOf(rows, kTile<kWidth>), static_cast<unsigned>(heads),
              static_cast<unsigned>(samples));
}

template <int kWidth>
void RunForwardAny(const AnyForward& any, CudaQueue& queue) {
  const AttentionProblem& p = any.call.problem;
  constexpr size_t kShared = 2 * sizeof(WideTile<kWidth>) +
                             sizeof(ScoreTile<kWidth>) +
                             2 * sizeof(float) * kTile<kWidth>;
  Launch(ForwardAny<kWidth>, TilesOf<kWidth>(p.s, p.heads(), p.b), kThreads,
         kShared, queue, any);
}

template <int kWidth>
void RunBackwardAny(const AnyBackward& any, CudaQueue& queue) {
  const AttentionProblem& p = any.call.problem;
  Launch(KeyGradientsAny<kWidth>, TilesOf<kWidth>(p.t, any.call.groups, p.b),
         kThreads, sizeof(BackwardTiles<kWidth>), queue, any);
  Launch(QueryGradientsAny<kWidth>, TilesOf<kWidth>(p.s, any.call.heads(), p.b),
         kThreads, sizeof(BackwardTiles<kWidth>), queue, any);
}

template <int kWidth>
void RunBiasGradients(const AnyBackward& any, float* partial,
                      CudaQueue& queue) {
  const AttentionProblem& p = any.call.problem;
  Launch(
      BiasGradientsAny<kWidth>,
      dim3(static_cast<unsigned>(any.call.heads()), static_cast<unsigned>(p.b)),
      kThreads, sizeof(BackwardTiles<kWidth>), queue, any, partial);
}

// ---- Of every call ----------------------------------------------------------

constexpr int kWidest = 256;

AttentionProblem ProblemOf(const KernelCall& call, const LocalTensor& q,
                           const LocalTensor& k, const LocalTensor& v,
                           const LocalTensor& query_positions,
                           const LocalTensor& key_positions,
                           const LocalTensor* bias) {
  const auto extent = [](const LocalTensor& tensor, size_t dim) {
    return static_cast<int>(tensor.shape[dim]);
  };
  AttentionProblem p = {};
  p.b = extent(q, 0);
  p.s = extent(q, 1);
  p.g = extent(q, 2);
  p.r = extent(q, 3);
  p.d = extent(q, 4);
  p.t = extent(k, 1);
  p.e = extent(v, 3);
  p.scale = static_cast<float>(call.attribute("scale"));
  const double window = AttributeOr(call, "window", 0);
  p.window = window > 0 ? static_cast<uint32_t>(window) : kNoWindow;
  p.causal = AttributeOr(call, "causal", 1) != 0;
  p.biased = bias != nullptr || !AlibiSlopes(call, q).empty();
  p.query_positions = query_positions.as<const int32_t>();
  p.key_positions = key_positions.as<const int32_t>();
  return p;
}

// The biases of a call; `bias` is the table of T5's, or null. Nothing, and an
// error in the queue, where the kernels have no room for them.
std::optional<Biases> BiasesOf(const KernelCall& call, const LocalTensor& q,
                               const LocalTensor* bias) {
  Biases biases;
  if (bias == nullptr) {
    const std::vector<double> slopes = AlibiSlopes(call, q);
    if (slopes.size() > kMostBiasedHeads) {
      call.queue->Fail("attention with " + std::to_string(slopes.size()) +
                       " heads with biases: CUDA kernels have up to " +
                       std::to_string(kMostBiasedHeads));
      return std::nullopt;
    }
    std::ranges::transform(slopes, biases.slopes, [](double slope) {
      return static_cast<float>(slope);
    });
    return biases;
  }
  if (bias->shape[0] > kMostBuckets) {
    call.queue->Fail("attention with " + std::to_string(bias->shape[0]) +
                     " buckets of distances: CUDA kernels have up to " +
                     std::to_string(kMostBuckets));
    return std::nullopt;
  }
  const RelativeBuckets buckets = RelativeBucketsOf(call, bias->shape[0]);
  biases.table = Elements<Any>(*bias);
  biases.heads = static_cast<int>(bias->shape[1] * bias->shape[2]);
  biases.causal = buckets.causal;
  biases.behind = buckets.behind;
  biases.buckets = static_cast<int>(bias->shape[0]) - buckets.behind;
  std::ranges::fill(biases.nearest, std::numeric_limits<int32_t>::max());
  for (size_t i = buckets.of_distance.size(); i-- > 0;) {
    biases.nearest[buckets.of_distance[i]] = static_cast<int32_t>(i);
  }
  // A bucket that no distance has is never reached.
  for (int i = kMostBuckets - 1; i-- > 0;) {
    biases.nearest[i] = std::min(biases.nearest[i], biases.nearest[i + 1]);
  }
  return biases;
}

// So much of the workspace are the ranges of n positions of each sample, and
// those of queries and keys.
int64_t RangeBytes(int64_t samples, int n) {
  return RoundUp(samples * DivideUp(n, kRangeRows) *
                     static_cast<int64_t>(sizeof(PositionRange)),
                 kAligned);
}
int64_t RangeBytes(const AttentionProblem& p, int64_t samples) {
  return RangeBytes(samples, p.s) + RangeBytes(samples, p.t);
}

// Has the ranges found, in the first RangeBytes of the workspace.
void EnqueueRanges(AttentionProblem& p, CudaQueue& queue) {
  const auto enqueue = [&](const int32_t* positions, int n,
                           PositionRange* ranges) {
    const int64_t threads = int64_t{p.b} * RoundUp(n, kRangeRows);
    Launch(FindRanges, BlocksOf(threads, kThreads), kThreads, 0, queue,
           positions, p.b, n, ranges);
  };
  auto* const queries = reinterpret_cast<PositionRange*>(queue.workspace);
  auto* const keys =
      reinterpret_cast<PositionRange*>(queue.workspace + RangeBytes(p.b, p.s));
  enqueue(p.query_positions, p.s, queries);
  enqueue(p.key_positions, p.t, keys);
  p.query_ranges = queries;
  p.key_ranges = keys;
}

// Whether the kernels take heads of this width; an error where not.
bool HasWidth(const AttentionProblem& p, CudaQueue& queue) {
  const int width = std::max(p.d, p.e);
  if (width <= kWidest) return true;
  queue.Fail("attention with heads of " + std::to_string(width) +
             " elements: CUDA kernels have up to " + std::to_string(kWidest));
  return false;
}

// The samples of a piece of a call, of which so many need bytes_of(samples).
template <typename BytesOf>
int64_t SamplesAtOnce(const AttentionProblem& p, const CudaQueue& queue,
                      BytesOf bytes_of) {
  return PieceOf(p.b, kMostBlocksAcross, queue, bytes_of);
}

// do, q, k, v, query positions, key positions [, biases], o, lse.
struct GradientOperands {
  const LocalTensor& d_o;
  const LocalTensor& q;
  const LocalTensor& k;
  const LocalTensor& v;
  const LocalTensor* bias;
  const LocalTensor& o;
  const LocalTensor& lse;

  explicit GradientOperands(const KernelCall& call)
      : d_o(call.operands[0]),
        q(call.operands[1]),
        k(call.operands[2]),
        v(call.operands[3]),
        bias(call.operands.size() > 8 ? &call.operands[6] : nullptr),
        o(call.operands[call.operands.size() - 2]),
        lse(call.operands[call.operands.size() - 1]) {}
};

AttentionProblem ProblemOf(const KernelCall& call, const GradientOperands& in) {
  return ProblemOf(call, in.q, in.k, in.v, call.operands[4], call.operands[5],
                   in.bias);
}

// ---- By cuDNN ---------------------------------------------------------------

// Copies the log-sum-exps of the operator, (b, s, heads), to cuDNN's,
// (b, heads, s), or back.
template <bool kBack>
__global__ void __launch_bounds__(kThreads)
    CopyStatistics(AttentionProblem p, Elements<Any> lse, float* cudnns) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= int64_t{p.b} * p.s * p.heads()) return;
  const int64_t head = i / p.s % p.heads();
  const int64_t row = (i / p.s / p.heads() * p.s + i % p.s) * p.heads() + head;
  if constexpr (kBack) {
    lse.Set(row, cudnns[i]);
  } else {
    cudnns[i] = lse.Get(row);
  }
}

// Where cuDNN may compute the call, the problem. Queries and keys have to be
// the same positions, in order.
std::optional<SdpaProblem> SdpaOf(const KernelCall& call,
                                  const AttentionProblem& p,
                                  const LocalTensor& q, const LocalTensor& k,
                                  std::initializer_list<LocalTensor> tensors,
                                  bool backward) {
  if (call.queue->sdpa == nullptr || !call.places_are_positions ||
      call.accumulate || !p.causal || p.window != kNoWindow || p.s != p.t ||
      q.offset[1] != k.offset[1] || !FlashTakes(p, tensors)) {
    return std::nullopt;
  }
  SdpaProblem problem = {
      p.b, p.heads(), p.g,     p.s,      p.d,
      p.e, q.dtype,   p.scale, backward, !backward || !call.any_order};
  if (backward) {
    problem.dq_stride = call.results[0].row_stride;
    problem.dk_stride = call.results[1].row_stride;
    problem.dv_stride = call.results[2].row_stride;
  }
  return problem;
}

// Enqueues the call by cuDNN and returns true, or returns false; data_of(part)
// are the tensors of a part of it, and lse_of(part) its log-sum-exps.
template <typename DataOf, typename LseOf>
bool RunSdpa(const KernelCall& call, const AttentionProblem& p,
             std::optional<SdpaProblem> problem, DataOf data_of, LseOf lse_of) {
  if (!problem) return false;
  CudaQueue& queue = *call.queue;
  const auto bytes_of = [&](int64_t samples) {
    return 4 * samples * p.s * p.heads();
  };
  if (bytes_of(1) > queue.workspace_bytes) return false;
  const int64_t piece = SamplesAtOnce(p, queue, bytes_of);
  bool takes = true;
  ForEachPiece(p.b, piece, [&](Range samples) {
    problem->samples = samples.size();
    takes = takes && queue.sdpa->Takes(*problem);
  });
  if (!takes) return false;
  ForEachPieceOfSamples(call, p.b, piece, {}, [&](const KernelCall& part) {
    SdpaData data = data_of(part);
    const Elements<Any> lse(lse_of(part));
    AttentionProblem some = p;
    some.b = static_cast<int>(lse_of(part).shape[0]);
    problem->samples = some.b;
    data.lse = reinterpret_cast<float*>(queue.workspace);
    const auto copy = [&](auto kernel) {
      Launch(kernel, BlocksOf(int64_t{some.b} * p.s * p.heads(), kThreads),
             kThreads, 0, queue, some, lse, data.lse);
    };
    if (problem->backward) copy(CopyStatistics<false>);
    queue.sdpa->Run(*problem, data, queue);
    if (!problem->backward) copy(CopyStatistics<true>);
  });
  return true;
}

bool RunSdpaForward(const KernelCall& call, const AttentionProblem& p) {
  const auto& in = call.operands;
  const LocalTensor& o = call.results[0];
  return RunSdpa(
      call, p,
      SdpaOf(call, p, in[0], in[1], {in[0], in[1], in[2], o},
             /*backward=*/false),
      [](const KernelCall& part) -> SdpaData {
        return {.q = part.operands[0].data,
                .k = part.operands[1].data,
                .v = part.operands[2].data,
                .o = part.results[0].data};
      },
      [](const KernelCall& part) -> const LocalTensor& {
        return part.results[1];
      });
}

bool RunSdpaBackward(const KernelCall& call, const AttentionProblem& p) {
  const GradientOperands all(call);
  const auto& out = call.results;
  return RunSdpa(
      call, p,
      SdpaOf(call, p, all.q, all.k,
             {all.q, all.k, all.v, all.d_o, all.o, out[0], out[1], out[2]},
             /*backward=*/true),
      [](const KernelCall& part) -> SdpaData {
        const GradientOperands in(part);
        return {.q = in.q.data,
                .k = in.k.data,
                .v = in.v.data,
                .o = in.o.data,
                .d_o = in.d_o.data,
                .dq = part.results[0].data,
                .dk = part.results[1].data,
                .dv = part.results[2].data};
      },
      [](const KernelCall& part) -> const LocalTensor& {
        return GradientOperands(part).lse;
      });
}

// ---- The calls --------------------------------------------------------------

AttentionProblem ProblemOf(const KernelCall& call) {
  const auto& in = call.operands;
  return ProblemOf(call, in[0], in[1], in[2], in[3], in[4],
                   in.size() > 5 ? &in[5] : nullptr);
}

// Of samples for which there is workspace.
void AttentionOfSamples(const KernelCall& call) {
  CudaQueue& queue = *call.queue;
  const LocalTensor& q = call.operands[0];
  const LocalTensor& k = call.operands[1];
  const LocalTensor& v = call.operands[2];
  const LocalTensor* const bias =
      call.operands.size() > 5 ? &call.operands[5] : nullptr;
  const LocalTensor& o = call.results[0];
  const LocalTensor& lse = call.results[1];
  AttentionForward forward = {};
  AttentionProblem& p = forward.problem;
  p = ProblemOf(call);
  if (queue.Workspace(RangeBytes(p, p.b), "attention") == nullptr) return;
  EnqueueRanges(p, queue);
  forward.q = q.data;
  forward.k = k.data;
  forward.v = v.data;
  forward.o = Elements<Any>(o);
  forward.lse = Elements<Any>(lse);
  forward.accumulate = call.accumulate;
  if (FlashTakes(p, {q, k, v}) && Aligned({o})) {
    return FlashForward(forward, q.dtype, queue);
  }
  const std::optional<Biases> biases = BiasesOf(call, q, bias);
  if (!biases) return;
  const AnyForward any = {forward, Elements<Any>(q), Elements<Any>(k),
                          Elements<Any>(v), *biases};
  const int width = std::max(p.d, p.e);
  if (width <= 64) return RunForwardAny<64>(any, queue);
  if (width <= 128) return RunForwardAny<128>(any, queue);
  RunForwardAny<kWidest>(any, queue);
}

// q, k, v, query positions, key positions [, biases] -> o, lse. A query that
// sees no key gives zeros and the log-sum-exp -infinity. A call that
// accumulates begins with what o and lse hold, as one more tile of keys.
void Attention(const KernelCall& call) {
  CudaQueue& queue = *call.queue;
  const AttentionProblem p = ProblemOf(call);
  if (RunSdpaForward(call, p) || !HasWidth(p, queue)) return;
  const LocalTensor* const bias =
      call.operands.size() > 5 ? &call.operands[5] : nullptr;
  const int64_t piece = SamplesAtOnce(
      p, queue, [&](int64_t samples) { return RangeBytes(p, samples); });
  ForEachPieceOfSamples(call, p.b, piece, {bias}, AttentionOfSamples);
}

// What backward works on at once, and where that lies in the workspace: the
// ranges, `more` for each sample, statistics of each head and query.
struct BackwardPiece {
  AttentionProblem p;
  int padded_s;
  int64_t more;

  BackwardPiece(const AttentionProblem& problem, int64_t more_of_sample)
      : p(problem),
        padded_s(RoundUp(problem.s, kStatisticRows)),
        more(more_of_sample) {}

  int64_t BeforeStatistics(int64_t samples) const {
    return RangeBytes(p, samples) + RoundUp(samples * more, kAligned);
  }
  int64_t BytesOf(int64_t samples, int64_t groups) const {
    return BeforeStatistics(samples) + 8 * samples * groups * p.r * padded_s;
  }
  int64_t SamplesAtOnce(const CudaQueue& queue) const {
    return PieceOf(p.b, kMostBlocksAcross, queue,
                   [&](int64_t samples) { return BytesOf(samples, p.g); });
  }
  int64_t GroupsAtOnce(const CudaQueue& queue) const {
    return PieceOf(p.g, p.g, queue,
                   [&](int64_t groups) { return BytesOf(p.b, groups); });
  }
};

// Of samples for which there is workspace: has the ranges found, and for each
// piece of groups the statistics, and calls run(backward, first group).
template <typename Run>
void InPiecesOfGroups(const GradientOperands& in, BackwardPiece piece,
                      const char* name, CudaQueue& queue, Run run) {
  AttentionProblem& p = piece.p;
  const int64_t at_once = piece.GroupsAtOnce(queue);
  if (queue.Workspace(piece.BytesOf(p.b, at_once), name) == nullptr) return;
  EnqueueRanges(p, queue);
  auto* const statistics =
      reinterpret_cast<float*>(queue.workspace + piece.BeforeStatistics(p.b));
  ForEachPiece(p.g, at_once, [&](Range groups) {
    const int64_t head = groups.begin * p.r;
    const auto of = [](const LocalTensor& tensor, int64_t first) {
      return From(Elements<Any>(tensor), first);
    };
    AttentionBackward backward = {};
    backward.problem = p;
    backward.groups = static_cast<int>(groups.size());
    backward.padded_s = piece.padded_s;
    backward.d_o = of(in.d_o, head * p.e).data;
    backward.q = of(in.q, head * p.d).data;
    backward.k = of(in.k, groups.begin * p.d).data;
    backward.v = of(in.v, groups.begin * p.e).data;
    backward.statistics = statistics;
    Launch(FindStatistics, BlocksOf(32 * backward.statistic_rows(), kThreads),
           kThreads, 0, queue, backward, of(in.d_o, head * p.e),
           of(in.o, head * p.e), of(in.lse, head),
           p.e % 2 == 0 && Aligned({in.d_o, in.o}), statistics);
    run(backward, groups.begin);
  });
}

AnyBackward AnyOf(const GradientOperands& in, const Biases& biases,
                  const AttentionBackward& backward, int64_t first_group) {
  const auto of = [](const LocalTensor& tensor, const void* data) {
    Elements<Any> elements(tensor);
    elements.data = const_cast<void*>(data);
    return elements;
  };
  const int64_t head = first_group * backward.problem.r;
  return {backward,
          of(in.d_o, backward.d_o),
          of(in.q, backward.q),
          of(in.k, backward.k),
          of(in.v, backward.v),
          FromHead(biases, static_cast<int>(head))};
}

// Of samples for which there is workspace.
void DqkvOfSamples(const KernelCall& call) {
  CudaQueue& queue = *call.queue;
  const GradientOperands in(call);
  const AttentionProblem p = ProblemOf(call, in);
  const auto& results = call.results;
  const auto stride = [](const LocalTensor& gradient, int64_t row) {
    TESSERA_CHECK(gradient.row_stride == 0 || gradient.row == row)
        << "rows of " << gradient.row << ", not of " << row;
    return gradient.row_stride > 0 ? gradient.row_stride : row;
  };
  const bool by_tiles = FlashTakes(p, {in.q, in.k, in.v, in.d_o}) &&
                        Aligned({results[0], results[1], results[2]});
  std::optional<Biases> biases;
  if (!by_tiles) {
    biases = BiasesOf(call, in.q, in.bias);
    if (!biases) return;
  }
  InPiecesOfGroups(
      in, BackwardPiece(p, 0), "attention_dqkv", queue,
      [&](AttentionBackward backward, int64_t group) {
        backward.dq_stride = stride(results[0], int64_t{p.heads()} * p.d);
        backward.dk_stride = stride(results[1], int64_t{p.g} * p.d);
        backward.dv_stride = stride(results[2], int64_t{p.g} * p.e);
        backward.dq = From(Elements<Any>(results[0]), group * p.r * p.d);
        backward.dk = From(Elements<Any>(results[1]), group * p.d);
        backward.dv = From(Elements<Any>(results[2]), group * p.e);
        backward.accumulate = call.accumulate;
        if (by_tiles) return FlashBackward(backward, in.q.dtype, queue);
        const AnyBackward any = AnyOf(in, *biases, backward, group);
        const int width = std::max(p.d, p.e);
        if (width <= 64) return RunBackwardAny<64>(any, queue);
        if (width <= 128) return RunBackwardAny<128>(any, queue);
        RunBackwardAny<kWidest>(any, queue);
      });
}

// -> dq, dk, dv.
void AttentionDqkv(const KernelCall& call) {
  CudaQueue& queue = *call.queue;
  const GradientOperands in(call);
  const AttentionProblem p = ProblemOf(call, in);
  if (RunSdpaBackward(call, p) || !HasWidth(p, queue)) return;
  ForEachPieceOfSamples(call, p.b, BackwardPiece(p, 0).SamplesAtOnce(queue),
                        {in.bias}, DqkvOfSamples);
}

// Of samples for which there is workspace.
void DbiasOfSamples(const KernelCall& call) {
  CudaQueue& queue = *call.queue;
  const GradientOperands in(call);
  const AttentionProblem p = ProblemOf(call, in);
  const LocalTensor& result = call.results[0];
  const int64_t n = result.elements();
  const std::optional<Biases> biases = BiasesOf(call, in.q, in.bias);
  if (!biases) return;
  auto* const partial =
      reinterpret_cast<float*>(queue.workspace + RangeBytes(p, p.b));
  InPiecesOfGroups(
      in, BackwardPiece(p, 4 * n), "attention_relative_dbias", queue,
      [&](const AttentionBackward& backward, int64_t group) {
        const AnyBackward any = AnyOf(in, *biases, backward, group);
        float* const of_heads = partial + group * p.r;
        const int width = std::max(p.d, p.e);
        if (width <= 64) {
          RunBiasGradients<64>(any, of_heads, queue);
        } else if (width <= 128) {
          RunBiasGradients<128>(any, of_heads, queue);
        } else {
          RunBiasGradients<kWidest>(any, of_heads, queue);
        }
      });
  if (!queue.error.empty()) return;
  Launch(AddSamples, BlocksOf(n, kThreads), kThreads, 0, queue, partial, p.b, n,
         Elements<Any>(result), call.accumulate);
}

// -> dbias: of each sample first, then of all.
void AttentionDbias(const KernelCall& call) {
  CudaQueue& queue = *call.queue;
  const GradientOperands in(call);
  const AttentionProblem p = ProblemOf(call, in);
  if (!HasWidth(p, queue)) return;
  const BackwardPiece piece(p, 4 * call.results[0].elements());
  ForEachPieceOfSamples(call, p.b, piece.SamplesAtOnce(queue),
                        {in.bias, &call.results[0]}, DbiasOfSamples);
}

}  // namespace

std::vector<Kernel> CudaAttentionKernels() {
  return {
      {"attention", Attention, true},
      {"attention_dqkv", AttentionDqkv, true, nullptr, RowsApart::kResults},
      {"attention_alibi", Attention, true},
      {"attention_alibi_dqkv", AttentionDqkv, true, nullptr,
       RowsApart::kResults},
      {"attention_bidirectional", Attention, true},
      {"attention_bidirectional_dqkv", AttentionDqkv, true, nullptr,
       RowsApart::kResults},
      {"attention_relative", Attention, true},
      {"attention_relative_dqkv", AttentionDqkv, true, nullptr,
       RowsApart::kResults},
      {"attention_relative_dbias", AttentionDbias, true},
  };
}

}  // namespace tessera
