#pragma once
// Reductions of the CUDA kernels: over the threads of a block, along rows, and
// down columns. For .cu files. The order of every sum is fixed by the shapes.

#include <cstring>
#include <type_traits>

#include "runtime/kernels/cuda/elements.h"

namespace tessera {

inline constexpr unsigned kAllLanes = ~0u;
inline constexpr unsigned kWarp = 32;

// ---- Over threads -----------------------------------------------------------

// A value of another lane; V consists of 32-bit words.
template <typename V, typename Shuffle>
__device__ V Shuffled(V value, Shuffle shuffle) {
  constexpr size_t kWords = sizeof(V) / sizeof(uint32_t);
  uint32_t words[kWords];
  memcpy(words, &value, sizeof(V));
#pragma unroll
  for (size_t i = 0; i < kWords; ++i) words[i] = shuffle(words[i]);
  memcpy(&value, words, sizeof(V));
  return value;
}

template <typename V, typename Merge>
__device__ V ReduceWarp(V value, Merge merge) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    value = merge(value, Shuffled(value, [step](uint32_t word) {
                    return __shfl_xor_sync(kAllLanes, word, step);
                  }));
  }
  // Where `merge` rounds its arguments unequally, lanes differ.
  return Shuffled(
      value, [](uint32_t word) { return __shfl_sync(kAllLanes, word, 0); });
}

// Merges the values of the threads with this threadIdx.y; all get the result.
// REQUIRES: blockDim.x is 32, or a larger multiple of it and blockDim.y is 1.
template <typename V, typename Merge>
__device__ V Reduce(V value, V identity, Merge merge) {
  value = ReduceWarp(value, merge);
  if (blockDim.x == kWarp) return value;
  TESSERA_SHARED(of_warp, V[kWarp]);
  const unsigned lane = threadIdx.x % kWarp;
  if (lane == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = lane < blockDim.x / kWarp ? of_warp[lane] : identity;
  value = ReduceWarp(value, merge);
  __syncthreads();  // `of_warp` may be written again
  return value;
}

template <typename V>
__device__ V Sum(V value) {
  return Reduce(value, V{0}, [](V a, V b) { return a + b; });
}

// ---- Sums of a whole tensor -------------------------------------------------

inline constexpr unsigned kSumThreads = 512;

// total = sum of the n partial sums [/ divisor, where it is not null and
// positive], or adds it.
template <bool kAccumulate>
__global__ void SumPartials(const double* partial, int64_t n,
                            Elements<Any> divisor, Elements<Any> total) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) sum += partial[i];
  sum = Sum(sum);
  if (threadIdx.x > 0) return;
  if (divisor.data != nullptr) {
    const double count = divisor.Get(0);
    sum = count > 0 ? sum / count : 0;
  }
  if (kAccumulate) sum += total.Get(0);
  total.Set(0, static_cast<float>(sum));
}

// The same of partial sums in the workspace.
inline void CallSumPartials(const KernelCall& call, int64_t n,
                            Elements<Any> divisor = {}) {
  Launch(call.accumulate ? SumPartials<true> : SumPartials<false>, 1,
         kSumThreads, 0, *call.queue,
         reinterpret_cast<const double*>(call.queue->workspace), n, divisor,
         Elements<Any>(call.results[0]));
}

// ---- Along rows -------------------------------------------------------------

// The threads that share a row keep kHeld vectors of it each, and load what is
// wider again. Kernels of rows have __launch_bounds__(kMostRowThreads), so that
// so many find their registers.
inline constexpr int kHeld = 4;
inline constexpr unsigned kMostRowThreads = 512;

struct RowGrid {
  dim3 grid;
  dim3 block;  // x threads share a row, y rows share a block
};

inline RowGrid RowGridFor(int64_t rows, int64_t width) {
  const int64_t vectors =
      width % kVector == 0 ? width / kVector : width / kVector + 2;
  const int64_t warps = DivideUp(vectors, kHeld * kWarp);
  const auto threads = static_cast<unsigned>(
      std::clamp<int64_t>(warps * kWarp, kWarp, kMostRowThreads));
  const unsigned shared = threads == kWarp ? 4 : 1;
  return {dim3(BlocksOf(rows, shared)), dim3(threads, shared)};
}

// The row of the calling thread. One that is not there needs no thread: it is
// in a block without barriers.
__device__ inline int64_t RowOfThread() {
  return int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
}

// A row of `width` elements from `first` on, in vectors; for each of them
// load(first, column, span, x) fills x[kOperands][kVector], with zeros outside
// of the span. Element j of a vector is column `column` + j, which is negative
// before the row's begin.
template <int kOperands, typename LoadVector>
class Row {
 public:
  using Values = float[kOperands][kVector];

  __device__ Row(int64_t first, int64_t width, LoadVector load)
      : begin_(first),
        width_(width),
        base_(first / kVector * kVector),
        vectors_(DivideUp(first + width - base_, kVector)),
        load_(load) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int64_t i = threadIdx.x + k * int64_t{blockDim.x};
      if (i < vectors_) Load(i, held_[k]);
    }
  }

  // Calls f(first, column, span, x) for the vectors of this thread.
  template <typename F>
  __device__ void ForEach(F f) const {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int64_t i = threadIdx.x + k * int64_t{blockDim.x};
      if (i < vectors_) f(First(i), First(i) - begin_, SpanOf(i), held_[k]);
    }
    for (int64_t i = threadIdx.x + kHeld * int64_t{blockDim.x}; i < vectors_;
         i += blockDim.x) {
      Values x;
      Load(i, x);
      f(First(i), First(i) - begin_, SpanOf(i), x);
    }
  }

 private:
  __device__ int64_t First(int64_t i) const {
    return base_ + i * kVector;
  }
  __device__ Span SpanOf(int64_t i) const {
    const int64_t before = begin_ - First(i);
    const int64_t left = begin_ + width_ - First(i);
    return {static_cast<int>(before > 0 ? before : 0),
            static_cast<int>(left < kVector ? left : int64_t{kVector})};
  }
  __device__ void Load(int64_t i, Values& x) const {
    load_(First(i), First(i) - begin_, SpanOf(i), x);
  }

  int64_t begin_;
  int64_t width_;
  int64_t base_;
  int64_t vectors_;
  LoadVector load_;
  Values held_[kHeld];
};

template <int kOperands, typename LoadVector>
__device__ Row<kOperands, LoadVector> MakeRow(int64_t row, int64_t width,
                                              LoadVector load) {
  return Row<kOperands, LoadVector>(row * width, width, load);
}

// Row number `row` of matrices of one shape: as Row, with their elements as x.
// It keeps them as they are stored. With kWhole they HaveWholeRows, and spans
// are a WholeSpan: half of the registers.
template <int kOperands, typename T, bool kWhole = false>
class StoredRow {
 public:
  using Values = float[kOperands][kVector];
  using SpanOfVector = std::conditional_t<kWhole, WholeSpan, Span>;

  __device__ StoredRow(int64_t row, int64_t width,
                       const Elements<T> (&operands)[kOperands])
      : begin_(row * width), width_(width) {
#pragma unroll
    for (int o = 0; o < kOperands; ++o) operands_[o] = operands[o];
    base_ = kWhole ? begin_ : begin_ / kVector * kVector;
    vectors_ = static_cast<int>(DivideUp(begin_ + width - base_, kVector));
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int i = Index(k);
      if (i >= vectors_) break;
#pragma unroll
      for (int o = 0; o < kOperands; ++o) {
        held_[k][o] = operands_[o].LoadStored(First(i), SpanOf(i));
      }
    }
  }

  // Calls f(first, column, span, x) for the vectors of this thread.
  template <typename F>
  __device__ void ForEach(F f) const {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int i = Index(k);
      if (i >= vectors_) break;
      Values x;
#pragma unroll
      for (int o = 0; o < kOperands; ++o) held_[k][o].Unpack(x[o]);
      f(First(i), First(i) - begin_, SpanOf(i), x);
    }
    for (int i = Index(kHeld); i < vectors_;
         i += static_cast<int>(blockDim.x)) {
      Values x;
#pragma unroll
      for (int o = 0; o < kOperands; ++o) {
        operands_[o].Load(First(i), SpanOf(i), x[o]);
      }
      f(First(i), First(i) - begin_, SpanOf(i), x);
    }
  }

 private:
  __device__ static int Index(int k) {
    return static_cast<int>(threadIdx.x) + k * static_cast<int>(blockDim.x);
  }
  __device__ int64_t First(int i) const {
    return base_ + int64_t{i} * kVector;
  }
  __device__ SpanOfVector SpanOf(int i) const {
    if constexpr (kWhole) {
      return {};
    } else {
      const int64_t before = begin_ - First(i);
      const int64_t left = begin_ + width_ - First(i);
      return {static_cast<int>(before > 0 ? before : 0),
              static_cast<int>(left < kVector ? left : int64_t{kVector})};
    }
  }

  Elements<T> operands_[kOperands];
  int64_t begin_;
  int64_t width_;
  int64_t base_;
  int vectors_;
  Stored<T> held_[kHeld][kOperands];
};

template <typename T>
__device__ StoredRow<1, T> RowOf(Elements<T> x, int64_t row, int64_t width) {
  const Elements<T> operands[1] = {x};
  return {row, width, operands};
}

// ---- Down columns -----------------------------------------------------------

template <bool kWhole>
__device__ auto SpanAt(int64_t left) {
  if constexpr (kWhole) {
    return WholeSpan();
  } else {
    return FirstOf(left);
  }
}

// Gradients of what all rows share. Rows are summed in chunks, chunks by a
// second kernel.
inline constexpr unsigned kColumnsOfBlock = kWarp * kVector;
inline constexpr unsigned kRowsAtOnce = 8;

// term(row, column, span, sums) adds the terms of one row to kSums sums of
// kVector columns. Partial sums go to partial[chunk][kSums][width]. With kWhole
// rows are whole vectors, and spans a WholeSpan: nothing then keeps the loads
// of several rows from being under way together.
template <int kSums, bool kWhole, typename Term>
__global__ void SumChunks(Term term, int64_t rows, int64_t width,
                          int64_t chunk_rows, float* partial) {
  TESSERA_SHARED(shared, float[kRowsAtOnce][kSums][kColumnsOfBlock]);
  const int64_t first_column = int64_t{blockIdx.x} * kColumnsOfBlock;
  const int64_t column = first_column + threadIdx.x * kVector;
  const int64_t begin = blockIdx.y * chunk_rows;
  const int64_t end = begin + chunk_rows < rows ? begin + chunk_rows : rows;
  float sums[kSums][kVector] = {};
  if (column < width) {
    const auto span = SpanAt<kWhole>(width - column);
#pragma unroll 4
    for (int64_t row = begin + threadIdx.y; row < end; row += kRowsAtOnce) {
      term(row, column, span, sums);
    }
  }
#pragma unroll
  for (int k = 0; k < kSums; ++k) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      shared[threadIdx.y][k][threadIdx.x * kVector + j] = sums[k][j];
    }
  }
  __syncthreads();
  const unsigned mine = threadIdx.y * kWarp + threadIdx.x;
  if (first_column + mine >= width) return;
  for (int k = 0; k < kSums; ++k) {
    float sum = 0;
    for (unsigned y = 0; y < kRowsAtOnce; ++y) sum += shared[y][k][mine];
    partial[(blockIdx.y * kSums + k) * width + first_column + mine] = sum;
  }
}

template <int kSums>
struct ColumnSums {
  Elements<Any> of[kSums];
};

inline constexpr unsigned kChunksAtOnce = 32;
template <int kSums>
__global__ void __launch_bounds__(kWarp* kChunksAtOnce)
    AddChunks(const float* partial, int64_t chunks, int64_t width,
              ColumnSums<kSums> results, bool accumulate) {
  TESSERA_SHARED(shared, float[kChunksAtOnce][kWarp]);
  const int64_t n = kSums * width;
  const int64_t i = int64_t{blockIdx.x} * kWarp + threadIdx.x;
  float sum = 0;
  if (i < n) {
#pragma unroll 4
    for (int64_t chunk = threadIdx.y; chunk < chunks; chunk += kChunksAtOnce) {
      sum += partial[chunk * n + i];
    }
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || i >= n) return;
#pragma unroll
  for (unsigned y = 1; y < kChunksAtOnce; ++y) sum += shared[y][threadIdx.x];
#pragma unroll
  for (int k = 0; k < kSums; ++k) {
    if (i / width != k) continue;
    const int64_t column = i - k * width;
    if (accumulate) sum += results.of[k].Get(column);
    results.of[k].Set(column, sum);
  }
}

// results[k][column] (+)= the sum over the chunks of
// partial[chunk][kSums][width].
template <int kSums>
void AddChunksOf(const KernelCall& call, std::span<const LocalTensor> results,
                 const float* partial, int64_t chunks, int64_t width) {
  ColumnSums<kSums> sums;
  for (int k = 0; k < kSums; ++k) {
    sums.of[k] = Elements<Any>(results[static_cast<size_t>(k)]);
  }
  Launch(AddChunks<kSums>, BlocksOf(kSums * width, kWarp),
         dim3(kWarp, kChunksAtOnce), 0, *call.queue, partial, chunks, width,
         sums, call.accumulate);
}

// results[k][column] (+)= the sum over all rows. Uses the workspace.
template <int kSums, bool kWhole = false, typename Term>
void SumColumns(const KernelCall& call, Term term, int64_t rows,
                int64_t width) {
  CudaQueue& queue = *call.queue;
  // A wave: on Hopper a multiprocessor has registers for three of these blocks.
  const int64_t blocks = 3 * std::max(queue.multiprocessors, 1);
  constexpr int64_t kRowsOfRound = 4 * kRowsAtOnce;  // the loop is unrolled
  const int64_t across = DivideUp(width, kColumnsOfBlock);
  const auto partial_bytes =
      static_cast<int64_t>(kSums * sizeof(float)) * std::max<int64_t>(width, 1);
  const int64_t most =
      std::min(std::max<int64_t>(blocks / std::max<int64_t>(across, 1), 1),
               queue.workspace_bytes / partial_bytes);
  if (most == 0) {
    (void)queue.Workspace(partial_bytes, "a sum of columns");
    return;
  }
  const int64_t rounds = DivideUp(rows, most * kRowsOfRound);
  const int64_t chunk_rows = std::max<int64_t>(rounds, 1) * kRowsOfRound;
  const int64_t chunks = DivideUp(rows, chunk_rows);
  auto* const partial = reinterpret_cast<float*>(queue.workspace);
  Launch(SumChunks<kSums, kWhole, Term>,
         dim3(static_cast<unsigned>(across), static_cast<unsigned>(chunks)),
         dim3(kWarp, kRowsAtOnce), 0, queue, term, rows, width, chunk_rows,
         partial);
  AddChunksOf<kSums>(call, call.results, partial, chunks, width);
}

}  // namespace tessera
