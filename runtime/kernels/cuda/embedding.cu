// y[b,s,:] = table[ids[b,s], :]. Ids are global, the table may hold some of the
// rows (a shard of v) and some of the columns (a shard of h).
//
// The gradient adds the tokens of each row in their order. An index lists them:
// every thread of ListTokens owns one row of the table and goes through all
// ids, of which its block first finds those of its rows. That takes time linear
// in the tokens however they are spread, and neither sorting nor atomics.

#include "runtime/kernels/cuda/reduce.h"

namespace tessera {
namespace {

struct RowRange {
  int64_t first;  // global number of the table's first row
  int64_t rows;

  // The row of the table that holds `id`, or -1.
  __device__ int64_t RowOf(int32_t id) const {
    const int64_t row = id - first;
    return row >= 0 && row < rows ? row : -1;
  }
};

template <typename T>
__global__ void Embedding(const int32_t* ids, Elements<T> table, Elements<T> y,
                          int64_t n, int64_t width, RowRange range) {
  ForEachVector(n, [&](int64_t first, Span span) {
    const int64_t token = first / width;
    const int64_t column = first - token * width;
    float v[kVector];
    if (column + kVector <= width) {  // of one token
      const int64_t row = range.RowOf(ids[token]);
      table.Load(row * width + column, row < 0 ? Span{0, 0} : span, v);
    } else {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const int64_t i = first + j;
        const int64_t row = span.Has(j) ? range.RowOf(ids[i / width]) : -1;
        v[j] = row < 0 ? 0 : table.Get(row * width + i % width);
      }
    }
    y.Store(first, span, v);
  });
}

// ---- The gradient's index ---------------------------------------------------

constexpr unsigned kListThreads = 512;

// Counts the tokens of each row or, where the counts have become the begins of
// their lists, lists them.
template <bool kList>
__global__ void ListTokens(const int32_t* ids, int64_t tokens, RowRange range,
                           int32_t* counts, int32_t* list) {
  constexpr unsigned kWarps = kListThreads / kWarp;
  TESSERA_SHARED(found_rows, uint16_t[kListThreads]);  // within the block's
  TESSERA_SHARED(found_tokens, int32_t[kListThreads]);
  TESSERA_SHARED(found_by_warp, unsigned[kWarps]);
  const int64_t first_row = int64_t{blockIdx.x} * kListThreads;
  const int64_t mine = first_row + threadIdx.x;
  const bool owner = mine < range.rows;
  const unsigned lane = threadIdx.x % kWarp;
  const unsigned warp = threadIdx.x / kWarp;
  int32_t at = kList && owner ? counts[mine] : 0;
  for (int64_t begin = 0; begin < tokens; begin += kListThreads) {
    const int64_t token = begin + threadIdx.x;
    const int64_t row =
        token < tokens ? range.RowOf(ids[token]) - first_row : -1;
    const bool found = row >= 0 && row < kListThreads && first_row + row >= 0;
    const unsigned votes = __ballot_sync(kAllLanes, found);
    if (lane == 0) found_by_warp[warp] = static_cast<unsigned>(__popc(votes));
    __syncthreads();
    unsigned total = 0;
    unsigned place = static_cast<unsigned>(__popc(votes & ((1u << lane) - 1)));
    for (unsigned w = 0; w < kWarps; ++w) {
      if (w < warp) place += found_by_warp[w];
      total += found_by_warp[w];
    }
    if (found) {
      found_rows[place] = static_cast<uint16_t>(row);
      found_tokens[place] = static_cast<int32_t>(token);
    }
    __syncthreads();
    for (unsigned i = 0; i < total; ++i) {
      if (found_rows[i] != threadIdx.x) continue;
      if (kList) list[at] = found_tokens[i];
      ++at;
    }
  }
  if (!kList && owner) counts[mine] = at;
}

// counts[0, n) become the sums of those before; counts[n] that of all.
constexpr unsigned kScanThreads = 1024;
__global__ void ScanCounts(int32_t* counts, int64_t n) {
  TESSERA_SHARED(sums, int32_t[kScanThreads]);
  const int64_t each = (n + kScanThreads - 1) / kScanThreads;
  const int64_t begin = threadIdx.x * each < n ? threadIdx.x * each : n;
  const int64_t end = begin + each < n ? begin + each : n;
  int32_t sum = 0;
  for (int64_t i = begin; i < end; ++i) sum += counts[i];
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (unsigned step = 1; step < kScanThreads; step *= 2) {
    const int32_t before = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
    __syncthreads();
    sums[threadIdx.x] += before;
    __syncthreads();
  }
  int32_t start = sums[threadIdx.x] - sum;
  for (int64_t i = begin; i < end; ++i) {
    const int32_t count = counts[i];
    counts[i] = start;
    start += count;
  }
  if (threadIdx.x == kScanThreads - 1) counts[n] = start;
}

// A warp for each row and its vectors blockIdx.y * 32, ...
template <typename T, typename W>
__global__ void AddTokens(Elements<T> dy, const int32_t* starts,
                          const int32_t* list, Elements<W> table, int64_t rows,
                          int64_t width, bool accumulate) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const int64_t column =
      (int64_t{blockIdx.y} * kWarp + threadIdx.x) * int64_t{kVector};
  if (row >= rows || column >= width) return;
  const int32_t begin = starts[row];
  const int32_t end = starts[row + 1];
  if (accumulate && begin == end) return;
  const Span span = {
      0, static_cast<int>(width - column < kVector ? width - column
                                                   : int64_t{kVector})};
  float sum[kVector] = {};
  if (accumulate) table.Load(row * width + column, span, sum);
#pragma unroll 4
  for (int32_t i = begin; i < end; ++i) {
    float v[kVector];
    dy.Load(list[i] * width + column, span, v);
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum[j] += v[j];
  }
  table.Store(row * width + column, span, sum);
}

// ---- Calls ------------------------------------------------------------------

// ids, table -> y.
void CallEmbedding(const KernelCall& call) {
  const LocalTensor& ids = call.operands[0];
  const LocalTensor& table = call.operands[1];
  const LocalTensor& y = call.results[0];
  const int64_t n = y.elements();
  ByType({table, y}, [&]<typename T>() {
    Launch(Embedding<T>, BlocksForVectors(*call.queue, n), kThreads, 0,
           *call.queue, ids.as<const int32_t>(), Elements<T>(table),
           Elements<T>(y), n, table.shape[1],
           RowRange{table.offset[0], table.shape[0]});
  });
}

// dy, ids -> dtable.
void CallEmbeddingDw(const KernelCall& call) {
  const LocalTensor& dy = call.operands[0];
  const LocalTensor& ids = call.operands[1];
  const LocalTensor& table = call.results[0];
  CudaQueue& queue = *call.queue;
  const int64_t tokens = ids.elements();
  const int64_t rows = table.shape[0];
  const int64_t width = table.shape[1];
  if ((rows + 1 + tokens) * int64_t{sizeof(int32_t)} > queue.workspace_bytes) {
    queue.Fail("the workspace is too small for the gradient of " +
               std::to_string(rows) + " rows by " + std::to_string(tokens) +
               " tokens");
    return;
  }
  auto* const counts = reinterpret_cast<int32_t*>(queue.workspace);
  int32_t* const list = counts + rows + 1;
  const auto* const id = ids.as<const int32_t>();
  const RowRange range = {table.offset[0], rows};
  const auto blocks =
      static_cast<unsigned>((rows + kListThreads - 1) / kListThreads);
  Launch(ListTokens<false>, blocks, kListThreads, 0, queue, id, tokens, range,
         counts, list);
  Launch(ScanCounts, 1, kScanThreads, 0, queue, counts, rows);
  Launch(ListTokens<true>, blocks, kListThreads, 0, queue, id, tokens, range,
         counts, list);
  constexpr unsigned kRows = 8;
  const dim3 grid(
      static_cast<unsigned>((rows + kRows - 1) / kRows),
      static_cast<unsigned>((width + kWarp * kVector - 1) / (kWarp * kVector)));
  const auto add = [&]<typename T, typename W>() {
    Launch(AddTokens<T, W>, grid, dim3(kWarp, kRows), 0, queue, Elements<T>(dy),
           counts, list, Elements<W>(table), rows, width, call.accumulate);
  };
  ByType({dy}, [&]<typename T>() {
    ByType({table}, [&]<typename W>() { add.template operator()<T, W>(); });
  });
}

}  // namespace

std::vector<Kernel> CudaEmbeddingKernels() {
  return {
      {"embedding", CallEmbedding},
      {"embedding_dw", CallEmbeddingDw, true},
  };
}

}  // namespace tessera
