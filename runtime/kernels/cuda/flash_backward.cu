// Gradients of attention on tensor cores. With P = exp(scale q k^T - lse):
// dv = P^T do, and with dS = P (do v^T - rowsum(do o)): dk = scale dS^T q,
// dq = scale dS k. One kernel has a tile of keys and goes through the queries
// that see it, of all heads of its group; the other has a tile of queries and
// goes through the keys that they see. Either holds its products so that P and
// dS never leave the registers: the first one transposed, keys by queries.

#include "runtime/kernels/cuda/flash_tile.h"

namespace tessera {
namespace {

using namespace flash;

// Tile sizes. What a block holds are 16 kBlocks rows of each of kWarps warps,
// what it goes through are kStep rows at a time; kColumns columns of dk and dv
// are a block's. kWidth is the head's, rounded up.
template <int kWidth>
struct KeyGradients {
  static constexpr int kWarps = 4;
  static constexpr int kBlocks = 1;
  static constexpr int kStep = kWidth == 256 ? 32 : 64;
  static constexpr int kColumns = kWidth == 256 ? 128 : kWidth;
  static constexpr int kBlocksPerMultiprocessor = kWidth == 64    ? 3
                                                  : kWidth == 256 ? 1
                                                                  : 2;
};
template <int kWidth>
struct QueryGradients {
  static constexpr int kWarps = 4;
  static constexpr int kBlocks = kWidth == 64 || kWidth == 128 ? 2 : 1;
  static constexpr int kStep = kWidth == 64 || kWidth == 96 ? 64 : 32;
  static constexpr int kBlocksPerMultiprocessor = kWidth == 256 ? 1 : 2;
};
template <typename Sizes>
constexpr int kRows = 16 * Sizes::kBlocks* Sizes::kWarps;

// Shared memory: two tiles that the block holds, two stages of two that it goes
// through, each with two statistics of its rows.
template <typename Sizes, int kWidth>
constexpr size_t kSharedBytes = 2 * TileBytes<kWidth>(kRows<Sizes>) +
                                4 * TileBytes<kWidth>(Sizes::kStep) +
                                4 * Sizes::kStep * sizeof(float);

template <typename T, int kWidth>
__global__ void __launch_bounds__(
    32 * KeyGradients<kWidth>::kWarps,
    KeyGradients<kWidth>::kBlocksPerMultiprocessor)
    FlashKeyGradients(AttentionBackward call) {
  using Sizes = KeyGradients<kWidth>;
  constexpr int kThreads = 32 * Sizes::kWarps;
  constexpr int kBlocks = Sizes::kBlocks;
  constexpr int kKeys = kRows<Sizes>;
  constexpr int kQueries = Sizes::kStep;
  constexpr int kColumns = Sizes::kColumns;
  constexpr int kTileElements = kQueries * kPitch<kWidth>;
  const AttentionProblem& p = call.problem;
  T* const keys = reinterpret_cast<T*>(DynamicShared());
  T* const values = keys + kKeys * kPitch<kWidth>;
  // Of two stages each.
  T* const queries = values + kKeys * kPitch<kWidth>;
  T* const gradients = queries + 2 * kTileElements;
  float* const statistics =
      reinterpret_cast<float*>(gradients + 2 * kTileElements);

  // Keys that are seen most come first, so that the last blocks are short.
  const int first = blockIdx.x * kKeys;
  constexpr int kParts = kWidth / kColumns;
  const int group = blockIdx.y / kParts;
  const int first_column = blockIdx.y % kParts * kColumns;
  const int sample = blockIdx.z;
  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * 16 * kBlocks;
  const PositionRange range = p.Keys(sample, first, kKeys);
  const int tiles = DivideUp(p.s, kQueries);
  const bool whole = first + kKeys <= p.t;
  // A tile of queries of one head, which see something of the keys: those of
  // one head after the other.
  struct Step {
    int number;
    Seen seen;
  };
  const int steps = p.r * tiles;
  const auto next_after = [&](int number) -> Step {
    while (++number < steps) {
      const Seen seen = p.SeenOf(
          p.Queries(sample, number % tiles * kQueries, kQueries), range);
      if (seen == Seen::kNothing) continue;
      return {number, whole ? seen : Seen::kSome};
    }
    return {steps, Seen::kNothing};
  };
  const auto copy_queries = [&](int step, int stage) {
    const int query = step % tiles * kQueries;
    const int head = group * p.r + step / tiles;
    const int64_t row = p.Row(sample, query, head);
    CopyTile<T, kQueries, kWidth, kThreads>(
        queries + stage * kTileElements,
        static_cast<const T*>(call.q) + row * p.d, int64_t{p.heads()} * p.d,
        p.s - query, p.d);
    CopyTile<T, kQueries, kWidth, kThreads>(
        gradients + stage * kTileElements,
        static_cast<const T*>(call.d_o) + row * p.e, int64_t{p.heads()} * p.e,
        p.s - query, p.e);
    // The two statistics, 4 of their numbers to a thread.
    static_assert(kStatisticRows % kQueries == 0 && kThreads >= kQueries / 2);
    const int which = threadIdx.x / (kQueries / 4);
    const int at = threadIdx.x % (kQueries / 4) * 4;
    if (which < 2) {
      CopyAsync16(statistics + (2 * stage + which) * kQueries + at,
                  call.statistics + which * call.statistic_rows() +
                      call.StatisticRow(sample, head) + query + at);
    }
  };

  Step step = next_after(-1);
  if (step.number < steps) {
    const int64_t row = p.KeyRow(sample, first, group);
    CopyTile<T, kKeys, kWidth, kThreads>(
        keys, static_cast<const T*>(call.k) + row * p.d, int64_t{p.g} * p.d,
        p.t - first, p.d);
    CopyTile<T, kKeys, kWidth, kThreads>(
        values, static_cast<const T*>(call.v) + row * p.e, int64_t{p.g} * p.e,
        p.t - first, p.e);
    copy_queries(step.number, 0);
  }
  CommitCopies();

  const Sight sight = p.sight();
  // Row 2 block + half of a thread.
  int32_t position[2 * kBlocks];
  bool shown[2 * kBlocks];
#pragma unroll
  for (int i = 0; i < 2 * kBlocks; ++i) {
    const int key = first + warp_row + 8 * i + lane / 4;
    const bool exists = key < p.t;
    position[i] = exists ? p.key_positions[int64_t{sample} * p.t + key] : 0;
    shown[i] = exists && sight.Shows(position[i]);
  }
  float dk[kBlocks][kColumns / 8][4];
  float dv[kBlocks][kColumns / 8][4];
  Clear(dk);
  Clear(dv);
  const float scale = p.scale * kLog2E;
  for (int stage = 0; step.number < steps; stage ^= 1) {
    const Step next = next_after(step.number);
    WaitForCopies<0>();
    __syncthreads();
    if (next.number < steps) copy_queries(next.number, stage ^ 1);
    CommitCopies();

    const T* const q = queries + stage * kTileElements;
    const T* const d_o = gradients + stage * kTileElements;
    const float* const lse = statistics + 2 * stage * kQueries;
    const float* const dot = lse + kQueries;
    float weights[kBlocks][kQueries / 8][4];
    Clear(weights);
    MultiplyTransposed<T, kWidth>(keys + warp_row * kPitch<kWidth>, q, weights);
#pragma unroll
    for (int column = 0; column < kQueries / 8; ++column) {
      const int x = 8 * column + lane % 4 * 2;
      const float2 shift = *reinterpret_cast<const float2*>(lse + x);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& weight = weights[block][column][i];
          weight = Exp2(fmaf(weight, scale, i % 2 == 0 ? -shift.x : -shift.y));
        }
      }
    }
    if (step.seen == Seen::kSome) {
#pragma unroll
      for (int column = 0; column < kQueries / 8; ++column) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const int query = min(
              step.number % tiles * kQueries + 8 * column + lane % 4 * 2 + odd,
              p.s - 1);
          const uint32_t sees =
              sight.Of(p.query_positions[int64_t{sample} * p.s + query]);
#pragma unroll
          for (int i = 0; i < 2 * kBlocks; ++i) {
            float& weight = weights[i / 2][column][i % 2 * 2 + odd];
            weight = shown[i] && sight.Sees(sees, position[i]) ? weight : 0;
          }
        }
      }
    }
    MultiplyWeights<T, kWidth>(weights, d_o + first_column, dv);
    float slopes[kBlocks][kQueries / 8][4];
    Clear(slopes);
    MultiplyTransposed<T, kWidth>(values + warp_row * kPitch<kWidth>, d_o,
                                  slopes);
#pragma unroll
    for (int column = 0; column < kQueries / 8; ++column) {
      const int x = 8 * column + lane % 4 * 2;
      const float2 shift = *reinterpret_cast<const float2*>(dot + x);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& slope = slopes[block][column][i];
          slope = weights[block][column][i] *
                  (slope - (i % 2 == 0 ? shift.x : shift.y));
        }
      }
    }
    MultiplyWeights<T, kWidth>(slopes, q + first_column, dk);
    step = next;
  }
  const int key = first + warp_row;
  Store(dk, p.scale, call.dk, call.DkRow(sample, key, group) + first_column,
        call.dk_stride, p.t - key, p.d - first_column, call.accumulate);
  Store(dv, 1.0f, call.dv, call.DvRow(sample, key, group) + first_column,
        call.dv_stride, p.t - key, p.e - first_column, call.accumulate);
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(
    32 * QueryGradients<kWidth>::kWarps,
    QueryGradients<kWidth>::kBlocksPerMultiprocessor)
    FlashQueryGradients(AttentionBackward call) {
  using Sizes = QueryGradients<kWidth>;
  constexpr int kThreads = 32 * Sizes::kWarps;
  constexpr int kBlocks = Sizes::kBlocks;
  constexpr int kQueries = kRows<Sizes>;
  constexpr int kKeys = Sizes::kStep;
  constexpr int kTileElements = kKeys * kPitch<kWidth>;
  const AttentionProblem& p = call.problem;
  T* const queries = reinterpret_cast<T*>(DynamicShared());
  T* const gradients = queries + kQueries * kPitch<kWidth>;
  // Of two stages each.
  T* const keys = gradients + kQueries * kPitch<kWidth>;
  T* const values = keys + 2 * kTileElements;

  // Queries that see most come first, so that the last blocks are short.
  const int first = (gridDim.x - 1 - blockIdx.x) * kQueries;
  const int head = blockIdx.y;
  const int group = head / p.r;
  const int sample = blockIdx.z;
  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * 16 * kBlocks;
  const PositionRange range = p.Queries(sample, first, kQueries);
  const KeyTiles<kKeys> tiles = {p, sample, range};
  const auto copy_keys = [&](int tile, int stage) {
    const int key = tile * kKeys;
    const int64_t row = p.KeyRow(sample, key, group);
    CopyTile<T, kKeys, kWidth, kThreads>(
        keys + stage * kTileElements, static_cast<const T*>(call.k) + row * p.d,
        int64_t{p.g} * p.d, p.t - key, p.d);
    CopyTile<T, kKeys, kWidth, kThreads>(
        values + stage * kTileElements,
        static_cast<const T*>(call.v) + row * p.e, int64_t{p.g} * p.e,
        p.t - key, p.e);
  };

  auto step = tiles.After(-1);
  if (step.number < tiles.count()) {
    const int64_t row = p.Row(sample, first, head);
    CopyTile<T, kQueries, kWidth, kThreads>(
        queries, static_cast<const T*>(call.q) + row * p.d,
        int64_t{p.heads()} * p.d, p.s - first, p.d);
    CopyTile<T, kQueries, kWidth, kThreads>(
        gradients, static_cast<const T*>(call.d_o) + row * p.e,
        int64_t{p.heads()} * p.e, p.s - first, p.e);
    copy_keys(step.number, 0);
  }
  CommitCopies();

  const Sight sight = p.sight();
  // Row 2 block + half of a thread.
  uint32_t sees[2 * kBlocks];
  float lse[2 * kBlocks];
  float dot[2 * kBlocks];
#pragma unroll
  for (int i = 0; i < 2 * kBlocks; ++i) {
    const int query = min(first + warp_row + 8 * i + lane / 4, p.s - 1);
    const int64_t row = call.StatisticRow(sample, head) + query;
    sees[i] = sight.Of(p.query_positions[int64_t{sample} * p.s + query]);
    lse[i] = call.statistics[row];
    dot[i] = call.statistics[call.statistic_rows() + row];
  }
  float dq[kBlocks][kWidth / 8][4];
  Clear(dq);
  const float scale = p.scale * kLog2E;
  for (int stage = 0; step.number < tiles.count(); stage ^= 1) {
    const auto next = tiles.After(step.number);
    WaitForCopies<0>();
    __syncthreads();
    if (next.number < tiles.count()) copy_keys(next.number, stage ^ 1);
    CommitCopies();

    const T* const k = keys + stage * kTileElements;
    float weights[kBlocks][kKeys / 8][4];
    Clear(weights);
    MultiplyTransposed<T, kWidth>(queries + warp_row * kPitch<kWidth>, k,
                                  weights);
    if (step.seen == Seen::kSome) {
      Mask(p, sample, step.number * kKeys, sight, sees, weights);
    }
    float slopes[kBlocks][kKeys / 8][4];
    Clear(slopes);
    MultiplyTransposed<T, kWidth>(gradients + warp_row * kPitch<kWidth>,
                                  values + stage * kTileElements, slopes);
#pragma unroll
    for (int column = 0; column < kKeys / 8; ++column) {
#pragma unroll
      for (int i = 0; i < 2 * kBlocks; ++i) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const float weight = Exp2(
              fmaf(weights[i / 2][column][i % 2 * 2 + odd], scale, -lse[i]));
          float& slope = slopes[i / 2][column][i % 2 * 2 + odd];
          slope = weight * (slope - dot[i]);
        }
      }
    }
    MultiplyWeights<T, kWidth>(slopes, k, dq);
    step = next;
  }
  Store(dq, p.scale, call.dq, call.DqRow(sample, first + warp_row, head),
        call.dq_stride, p.s - first - warp_row, p.d, call.accumulate);
}

template <typename T, int kWidth>
void Run(const AttentionBackward& call, CudaQueue& queue) {
  const AttentionProblem& p = call.problem;
  using Keys = KeyGradients<kWidth>;
  using Queries = QueryGradients<kWidth>;
  Launch(FlashKeyGradients<T, kWidth>,
         dim3(BlocksOf(p.t, kRows<Keys>),
              static_cast<unsigned>(call.groups * (kWidth / Keys::kColumns)),
              static_cast<unsigned>(p.b)),
         32 * Keys::kWarps, kSharedBytes<Keys, kWidth>, queue, call);
  Launch(FlashQueryGradients<T, kWidth>,
         dim3(BlocksOf(p.s, kRows<Queries>),
              static_cast<unsigned>(call.heads()), static_cast<unsigned>(p.b)),
         32 * Queries::kWarps, kSharedBytes<Queries, kWidth>, queue, call);
}

template <typename T>
void Run(const AttentionBackward& call, CudaQueue& queue) {
  const int width = std::max(call.problem.d, call.problem.e);
  if (width <= 64) return Run<T, 64>(call, queue);
  if (width <= 96) return Run<T, 96>(call, queue);
  if (width <= 128) return Run<T, 128>(call, queue);
  Run<T, 256>(call, queue);
}

}  // namespace

void FlashBackward(const AttentionBackward& call, DType dtype,
                   CudaQueue& queue) {
  if (dtype == DType::kBFloat16) {
    Run<__nv_bfloat16>(call, queue);
  } else {
    Run<__half>(call, queue);
  }
}

}  // namespace tessera
