// Attention on tensor cores. A block has a tile of queries of one head, and
// goes through the tiles of keys that they see, with the next one on its way to
// the other half of its buffer.

#include "runtime/kernels/cuda/flash_tile.h"

namespace tessera {
namespace {

using namespace flash;

// Tile sizes: queries are 16 kBlocks rows of each of kWarps warps. kWidth is
// the head's, rounded up.
template <int kWidth>
struct Forward {
  static constexpr int kWarps = 4;
  static constexpr int kBlocks = 2;
  static constexpr int kKeys = 64;
  static constexpr int kBlocksPerMultiprocessor = 2;
};
template <>
struct Forward<64> {
  static constexpr int kWarps = 4;
  static constexpr int kBlocks = 1;
  static constexpr int kKeys = 64;
  static constexpr int kBlocksPerMultiprocessor = 4;
};
template <>
struct Forward<256> {
  static constexpr int kWarps = 8;
  static constexpr int kBlocks = 1;
  static constexpr int kKeys = 32;
  static constexpr int kBlocksPerMultiprocessor = 1;
};

template <int kWidth>
constexpr int kQueries = 16 * Forward<kWidth>::kBlocks* Forward<kWidth>::kWarps;
template <int kWidth>
constexpr size_t kSharedBytes = TileBytes<kWidth>(kQueries<kWidth>) +
                                4 * TileBytes<kWidth>(Forward<kWidth>::kKeys);

template <typename T, int kWidth>
__global__ void __launch_bounds__(32 * Forward<kWidth>::kWarps,
                                  Forward<kWidth>::kBlocksPerMultiprocessor)
    FlashForwardKernel(AttentionForward call) {
  constexpr int kThreads = 32 * Forward<kWidth>::kWarps;
  constexpr int kBlocks = Forward<kWidth>::kBlocks;
  constexpr int kKeys = Forward<kWidth>::kKeys;
  constexpr int kTileElements = kKeys * kPitch<kWidth>;
  const AttentionProblem& p = call.problem;
  T* const queries = reinterpret_cast<T*>(DynamicShared());
  // Keys and values of two tiles.
  T* const keys = queries + kQueries<kWidth> * kPitch<kWidth>;
  T* const values = keys + 2 * kTileElements;

  // Queries that see most come first, so that the last blocks are short.
  const int first = (gridDim.x - 1 - blockIdx.x) * kQueries<kWidth>;
  const int head = blockIdx.y;
  const int group = head / p.r;
  const int sample = blockIdx.z;
  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * 16 * kBlocks;
  const PositionRange range = p.Queries(sample, first, kQueries<kWidth>);
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
    CopyTile<T, kQueries<kWidth>, kWidth, kThreads>(
        queries,
        static_cast<const T*>(call.q) + p.Row(sample, first, head) * p.d,
        int64_t{p.heads()} * p.d, p.s - first, p.d);
    copy_keys(step.number, 0);
  }
  CommitCopies();

  // Row 2 block + half of a thread is row `RowOf` of the tile. Scores are kept
  // in units of log2(e); sums are of this thread's columns.
  const auto row_of = [&](int i) {
    return warp_row + i / 2 * 16 + i % 2 * 8 + lane / 4;
  };
  float output[kBlocks][kWidth / 8][4];
  float maximum[2 * kBlocks];
  float sum[2 * kBlocks];
  const Sight sight = p.sight();
  uint32_t sees[2 * kBlocks];
  Clear(output);
#pragma unroll
  for (int i = 0; i < 2 * kBlocks; ++i) {
    const int query = min(first + row_of(i), p.s - 1);
    maximum[i] = kMinusInfinity;
    sum[i] = 0;
    sees[i] = sight.Of(p.query_positions[int64_t{sample} * p.s + query]);
    if (!call.accumulate) continue;
    const int64_t row = p.Row(sample, query, head);
    const float lse = call.lse.Get(row);
    if (lse == kMinusInfinity) continue;
    maximum[i] = lse * kLog2E;
    sum[i] = lane % 4 == 0 ? 1 : 0;
    InPairs(call.o, [&](const auto* pairs) {
#pragma unroll
      for (int column = 0; column < kWidth / 8; ++column) {
        const int x = 8 * column + lane % 4 * 2;
        if (x >= p.e) continue;
        const float2 old = LoadTwo(pairs + (row * p.e + x) / 2);
        output[i / 2][column][i % 2 * 2] = old.x;
        output[i / 2][column][i % 2 * 2 + 1] = old.y;
      }
    });
  }

  const float scale = p.scale * kLog2E;
  for (int stage = 0; step.number < tiles.count(); stage ^= 1) {
    const auto next = tiles.After(step.number);
    WaitForCopies<0>();
    __syncthreads();
    if (next.number < tiles.count()) copy_keys(next.number, stage ^ 1);
    CommitCopies();

    float scores[kBlocks][kKeys / 8][4];
    Clear(scores);
    MultiplyTransposed<T, kWidth>(queries + warp_row * kPitch<kWidth>,
                                  keys + stage * kTileElements, scores);
    if (step.seen == Seen::kSome) {
      Mask(p, sample, step.number * kKeys, sight, sees, scores);
    }
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      float larger = kMinusInfinity;
#pragma unroll
      for (int column = 0; column < kKeys / 8; ++column) {
        const float* const two = scores[i / 2][column] + i % 2 * 2;
        larger = fmaxf(larger, fmaxf(two[0], two[1]));
      }
      larger = fmaxf(larger, __shfl_xor_sync(~0u, larger, 1));
      larger = fmaxf(larger, __shfl_xor_sync(~0u, larger, 2));
      larger = fmaxf(maximum[i], larger * scale);
      const float shift = larger == kMinusInfinity ? 0 : larger;
      const float fade = Exp2(maximum[i] - shift);
      maximum[i] = larger;
      sum[i] *= fade;
#pragma unroll
      for (int column = 0; column < kKeys / 8; ++column) {
        float* const two = scores[i / 2][column] + i % 2 * 2;
        two[0] = Exp2(fmaf(two[0], scale, -shift));
        two[1] = Exp2(fmaf(two[1], scale, -shift));
        sum[i] += two[0] + two[1];
      }
#pragma unroll
      for (int column = 0; column < kWidth / 8; ++column) {
        output[i / 2][column][i % 2 * 2] *= fade;
        output[i / 2][column][i % 2 * 2 + 1] *= fade;
      }
    }
    MultiplyWeights<T, kWidth>(scores, values + stage * kTileElements, output);
    step = next;
  }

#pragma unroll
  for (int i = 0; i < 2 * kBlocks; ++i) {
    sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
    sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
    const float inverse = sum[i] == 0 ? 0 : 1 / sum[i];
#pragma unroll
    for (int column = 0; column < kWidth / 8; ++column) {
      output[i / 2][column][i % 2 * 2] *= inverse;
      output[i / 2][column][i % 2 * 2 + 1] *= inverse;
    }
    const int query = first + row_of(i);
    if (query < p.s && lane % 4 == 0) {
      call.lse.Set(
          p.Row(sample, query, head),
          sum[i] == 0 ? kMinusInfinity : maximum[i] * kLn2 + logf(sum[i]));
    }
  }
  Store(output, 1.0f, call.o, p.Row(sample, first + warp_row, head) * p.e,
        int64_t{p.heads()} * p.e, p.s - first - warp_row, p.e,
        /*accumulate=*/false);
}

template <typename T, int kWidth>
void Run(const AttentionForward& call, CudaQueue& queue) {
  const AttentionProblem& p = call.problem;
  Launch(FlashForwardKernel<T, kWidth>,
         dim3(BlocksOf(p.s, kQueries<kWidth>), static_cast<unsigned>(p.heads()),
              static_cast<unsigned>(p.b)),
         32 * Forward<kWidth>::kWarps, kSharedBytes<kWidth>, queue, call);
}

template <typename T>
void Run(const AttentionForward& call, CudaQueue& queue) {
  const int width = std::max(call.problem.d, call.problem.e);
  if (width <= 64) return Run<T, 64>(call, queue);
  if (width <= 96) return Run<T, 96>(call, queue);
  if (width <= 128) return Run<T, 128>(call, queue);
  Run<T, 256>(call, queue);
}

}  // namespace

void FlashForward(const AttentionForward& call, DType dtype, CudaQueue& queue) {
  if (dtype == DType::kBFloat16) {
    Run<__nv_bfloat16>(call, queue);
  } else {
    Run<__half>(call, queue);
  }
}

}  // namespace tessera
