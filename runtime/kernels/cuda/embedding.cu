// y[b,s,:] = table[ids[b,s], :]. Ids are global, the table may hold some of the
// rows (a shard of v) and some of the columns (a shard of h).

#include "runtime/kernels/cuda/buckets.h"

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

// The token is an item of its row's bucket.
struct RowOfToken {
  const int32_t* ids;
  RowRange range;

  __device__ int64_t operator()(int64_t token) const {
    return range.RowOf(ids[token]);
  }
};

struct Itself {
  __device__ int64_t operator()(int64_t i) const { return i; }
};

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
  const LocalTensor& ids = call.operands[1];
  const LocalTensor& table = call.results[0];
  AddByBucket(
      call, ids.elements(),
      RowOfToken{ids.as<const int32_t>(), {table.offset[0], table.shape[0]}},
      Itself(), call.operands[0], table);
}

}  // namespace

std::vector<Kernel> CudaEmbeddingKernels() {
  return {
      {"embedding", CallEmbedding},
      {"embedding_dw", CallEmbeddingDw, true},
  };
}

}  // namespace tessera
