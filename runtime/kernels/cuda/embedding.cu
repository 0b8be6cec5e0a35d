// y[b,s,:] = table[ids[b,s], :], and of bags y[b,:] = sum over n of
// table[ids[b,n], :]. Ids are global, the table may hold some of the rows (a
// shard of v) and some of the columns (a shard of h).

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

// The ids of each sample.
struct Bags {
  const int32_t* ids;
  int64_t length;
  bool mean;

  // What each row of a bag counts: 1, or of a mean one over the ids that are
  // no padding, whichever shards have their rows.
  __device__ float Weight(int64_t bag) const {
    if (!mean) return 1;
    int counted = 0;
    for (int64_t i = 0; i < length; ++i) {
      counted += ids[bag * length + i] >= 0 ? 1 : 0;
    }
    return 1 / static_cast<float>(counted > 1 ? counted : 1);
  }
};

// Without padding, whose ids are negative.
__device__ inline int64_t RowOfId(const RowRange& range, int32_t id) {
  return id < 0 ? -1 : range.RowOf(id);
}

// A thread adds up a vector of a bag, or what of it the bag's row has.
template <typename T>
__global__ void EmbeddingBag(Bags bags, Elements<T> table, Elements<T> y,
                             int64_t count, int64_t width, RowRange range) {
  const int64_t vectors = DivideUp(width, kVector);
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       i < count * vectors; i += step) {
    const int64_t bag = i / vectors;
    const int64_t column = i % vectors * kVector;
    const Span span = FirstOf(width - column);
    float sum[kVector] = {};
    for (int64_t n = 0; n < bags.length; ++n) {
      const int64_t row = RowOfId(range, bags.ids[bag * bags.length + n]);
      if (row < 0) continue;
      float v[kVector];
      table.Load(row * width + column, span, v);
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum[j] += v[j];
    }
    const float weight = bags.Weight(bag);
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum[j] *= weight;
    y.Store(bag * width + column, span, sum);
  }
}

// The id of a bag is an item of its row's bucket, and adds the bag's gradient.
struct RowOfBagsId {
  const int32_t* ids;
  RowRange range;

  __device__ int64_t operator()(int64_t i) const {
    return RowOfId(range, ids[i]);
  }
};
struct BagOfId {
  int64_t length;
  __device__ int64_t operator()(int64_t i) const { return i / length; }
};
struct WeightOfId {
  Bags bags;
  __device__ float operator()(int64_t i) const {
    return bags.Weight(i / bags.length);
  }
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

Bags BagsOf(const KernelCall& call, const LocalTensor& ids) {
  return {ids.as<const int32_t>(), ids.shape[1], call.attribute("mean") != 0};
}

// ids, table -> y.
void CallEmbeddingBag(const KernelCall& call) {
  const LocalTensor& ids = call.operands[0];
  const LocalTensor& table = call.operands[1];
  const LocalTensor& y = call.results[0];
  const int64_t width = table.shape[1];
  const int64_t vectors = DivideUp(width, kVector);
  ByType({table, y}, [&]<typename T>() {
    Launch(EmbeddingBag<T>, BlocksFor(*call.queue, ids.shape[0] * vectors),
           kThreads, 0, *call.queue, BagsOf(call, ids), Elements<T>(table),
           Elements<T>(y), ids.shape[0], width,
           RowRange{table.offset[0], table.shape[0]});
  });
}

// dy, ids -> dtable.
void CallEmbeddingBagDw(const KernelCall& call) {
  const LocalTensor& ids = call.operands[1];
  const LocalTensor& table = call.results[0];
  AddByBucket(
      call, ids.elements(),
      RowOfBagsId{ids.as<const int32_t>(), {table.offset[0], table.shape[0]}},
      BagOfId{ids.shape[1]}, call.operands[0], table,
      WeightOfId{BagsOf(call, ids)});
}

}  // namespace

std::vector<Kernel> CudaEmbeddingKernels() {
  return {
      {"embedding", CallEmbedding},
      {"embedding_dw", CallEmbeddingDw, true},
      {"embedding_bag", CallEmbeddingBag},
      {"embedding_bag_dw", CallEmbeddingBagDw, true},
  };
}

}  // namespace tessera
