#pragma once
// Sums of rows by bucket: the gradient of a table that tokens look up, and the
// slots of experts that tokens go to. For .cu files.
//
// Items are sorted by bucket, those of a bucket in their order, and cut into
// runs of kRun, which warps add up: a token that is half of the text costs no
// more than others. The sums of a bucket that several runs have are added in
// the order of the runs.

#ifndef TESSERA_EMULATE_CUDA
#include <cub/device/device_radix_sort.cuh>
#endif

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>
#include <vector>

#include "runtime/kernels/cuda/reduce.h"

namespace tessera {

inline constexpr int kRun = 32;

// A list of `items` items by bucket: `buckets` stands for those without one,
// which are last.
struct SortedItems {
  const uint32_t* bucket = nullptr;
  const int32_t* item = nullptr;
  int items = 0;

  // The first place whose bucket is not below `of`.
  __device__ int LowerBound(uint32_t of) const {
    int least = 0;
    int most = items;
    while (least < most) {
      const int middle = (least + most) / 2;
      if (bucket[middle] < of) {
        least = middle + 1;
      } else {
        most = middle;
      }
    }
    return least;
  }
  __device__ bool Has(int place, uint32_t of) const {
    return 0 <= place && place < items && bucket[place] == of;
  }
};

// bucket_of(i) is the bucket of item i, or -1.
template <typename BucketOf>
__global__ void FindBuckets(BucketOf bucket_of, int64_t first, int items,
                            uint32_t buckets, uint32_t* bucket, int32_t* item) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= items) return;
  const int64_t found = bucket_of(first + i);
  bucket[i] = found < 0 ? buckets : static_cast<uint32_t>(found);
  item[i] = static_cast<int32_t>(first + i);
}

// The two arrays that are sorted, each with one of its size beside it: the
// result is in the first of each, after they have changed places.
struct ToSort {
  uint32_t* bucket = nullptr;
  uint32_t* other_bucket = nullptr;
  int32_t* item = nullptr;
  int32_t* other_item = nullptr;
  int items = 0;
};

// Sorts by bucket, stably. Without memory to work in, sets how much it needs.
inline cudaError_t SortByBucket(void* scratch, size_t& scratch_bytes,
                                ToSort& arrays, uint32_t buckets,
                                cudaStream_t stream) {
#ifdef TESSERA_EMULATE_CUDA
  (void)buckets, (void)stream;
  scratch_bytes = 1;
  if (scratch == nullptr) return cudaSuccess;
  std::vector<int> order(static_cast<size_t>(arrays.items));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return arrays.bucket[a] < arrays.bucket[b];
  });
  for (int i = 0; i < arrays.items; ++i) {
    const int from = order[static_cast<size_t>(i)];
    arrays.other_bucket[i] = arrays.bucket[from];
    arrays.other_item[i] = arrays.item[from];
  }
  std::swap(arrays.bucket, arrays.other_bucket);
  std::swap(arrays.item, arrays.other_item);
  return cudaSuccess;
#else
  cub::DoubleBuffer<uint32_t> keys(arrays.bucket, arrays.other_bucket);
  cub::DoubleBuffer<int32_t> values(arrays.item, arrays.other_item);
  const cudaError_t code = cub::DeviceRadixSort::SortPairs(
      scratch, scratch_bytes, keys, values, arrays.items, 0,
      static_cast<int>(std::bit_width(buckets)), stream);
  arrays.bucket = keys.Current();
  arrays.other_bucket = keys.Alternate();
  arrays.item = values.Current();
  arrays.other_item = values.Alternate();
  return code;
#endif
}

// Items that are added as they are.
struct Unweighted {
  __device__ float operator()(int64_t) const { return 1; }
};

template <typename W>
struct BucketTable {
  Elements<W> to;
  int64_t width;
  bool accumulate;

  __device__ void Put(uint32_t bucket, int64_t column, Span span,
                      float (&sum)[kVector]) const {
    const int64_t at = bucket * width + column;
    if (accumulate) {
      float before[kVector];
      to.Load(at, span, before);
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum[j] += before[j];
    }
    to.Store(at, span, sum);
  }
};

// Zeros in the rows of buckets that have no item.
template <typename W>
__global__ void ZeroEmptyBuckets(SortedItems sorted, int64_t buckets,
                                 BucketTable<W> table) {
  const int64_t bucket = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const int64_t column =
      (int64_t{blockIdx.y} * kWarp + threadIdx.x) * int64_t{kVector};
  if (bucket >= buckets || column >= table.width) return;
  const auto of = static_cast<uint32_t>(bucket);
  if (sorted.Has(sorted.LowerBound(of), of)) return;
  const float zeros[kVector] = {};
  table.to.Store(bucket * table.width + column, FirstOf(table.width - column),
                 zeros);
}

// A warp for each run and its vectors blockIdx.y * 32, ...; row_of(i) is the
// row of `from` that item i adds, weight_of(i) times. Sums of buckets that no
// other run has go to the table; else partial[run][0] is that of a bucket which
// began in a run before, and partial[run][1] that of one which begins in this.
template <typename T, typename W, typename RowOfItem, typename WeightOfItem>
__global__ void AddRuns(Elements<T> from, RowOfItem row_of,
                        WeightOfItem weight_of, SortedItems sorted,
                        uint32_t buckets, BucketTable<W> table,
                        float* partial) {
  const int run = static_cast<int>(blockIdx.x * blockDim.y + threadIdx.y);
  const int64_t column =
      (int64_t{blockIdx.y} * kWarp + threadIdx.x) * int64_t{kVector};
  const int begin = run * kRun;
  if (begin >= sorted.items || column >= table.width) return;
  const int end = begin + kRun < sorted.items ? begin + kRun : sorted.items;
  const Span span = FirstOf(table.width - column);
  uint32_t bucket = sorted.bucket[begin];
  bool began_before = sorted.Has(begin - 1, bucket);
  float sum[kVector] = {};
  const auto put = [&](bool goes_on) {
    if (!began_before && !goes_on) {
      table.Put(bucket, column, span, sum);
      return;
    }
    float* const to =
        partial + (2 * int64_t{run} + (began_before ? 0 : 1)) * table.width;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if (span.Has(j)) to[column + j] = sum[j];
    }
  };
  constexpr int kAtOnce = 4;
  for (int place = begin; place < end; place += kAtOnce) {
    Stored<T> rows[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (place + k >= end || sorted.bucket[place + k] >= buckets) continue;
      rows[k] = from.LoadStored(
          row_of(sorted.item[place + k]) * table.width + column, span);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (place + k >= end) break;
      const uint32_t next = sorted.bucket[place + k];
      if (next != bucket) {
        if (bucket < buckets) put(/*goes_on=*/false);
        bucket = next;
        began_before = false;
#pragma unroll
        for (int j = 0; j < kVector; ++j) sum[j] = 0;
      }
      if (next >= buckets) return;
      float v[kVector];
      rows[k].Unpack(v);
      const float weight = weight_of(sorted.item[place + k]);
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum[j] += weight * v[j];
    }
  }
  put(/*goes_on=*/sorted.Has(end, bucket));
}

// Adds the partial sums of a bucket, by the warp of the run where it begins.
template <typename W>
__global__ void JoinRuns(SortedItems sorted, uint32_t buckets,
                         BucketTable<W> table, const float* partial) {
  const int run = static_cast<int>(blockIdx.x * blockDim.y + threadIdx.y);
  const int64_t column =
      (int64_t{blockIdx.y} * kWarp + threadIdx.x) * int64_t{kVector};
  const int begin = run * kRun;
  const int end = begin + kRun;
  if (end >= sorted.items || column >= table.width) return;
  const uint32_t bucket = sorted.bucket[end - 1];
  const bool begins_here = !sorted.Has(begin - 1, bucket);
  if (bucket >= buckets || !begins_here || !sorted.Has(end, bucket)) return;
  const int last = (sorted.LowerBound(bucket + 1) - 1) / kRun;
  const Span span = FirstOf(table.width - column);
  float sum[kVector] = {};
#pragma unroll 4
  for (int i = run; i <= last; ++i) {
    const float* const at =
        partial + (2 * int64_t{i} + (i == run ? 1 : 0)) * table.width;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if (span.Has(j)) sum[j] += at[column + j];
    }
  }
  table.Put(bucket, column, span, sum);
}

// Row b of `to` becomes, or has added, the sum of the rows row_of(i) of `from`
// for the items i of bucket b, each weight_of(i) times. Uses the workspace; as
// many items as fit there are worked on at a time.
template <typename BucketOf, typename RowOfItem,
          typename WeightOfItem = Unweighted>
void AddByBucket(const KernelCall& call, int64_t items, BucketOf bucket_of,
                 RowOfItem row_of, const LocalTensor& from,
                 const LocalTensor& to, WeightOfItem weight_of = {}) {
  CudaQueue& queue = *call.queue;
  const int64_t width = to.shape.back();
  if (to.elements() == 0) return;
  const int64_t buckets = to.elements() / width;
  constexpr int64_t kAligned = 256;
  const auto aligned = [](int64_t bytes) { return RoundUp(bytes, kAligned); };
  const auto list_bytes = [&](int64_t n) { return aligned(4 * n); };
  const auto partial_bytes = [&](int64_t n) {
    return aligned(DivideUp(n, kRun) * 2 * width * 4);
  };
  const auto sort_bytes = [&](int64_t n) {
    ToSort sizes = {.items = static_cast<int>(n)};
    size_t bytes = 0;
    queue.Keep(SortByBucket(nullptr, bytes, sizes,
                            static_cast<uint32_t>(buckets), queue.stream),
               "sorting");
    return bytes;
  };
  const auto bytes_of = [&](int64_t n) {
    return 4 * list_bytes(n) + partial_bytes(n) +
           static_cast<int64_t>(sort_bytes(n));
  };
  int64_t piece = std::clamp<int64_t>(items, 1, int64_t{1} << 24);
  while (piece > kRun && bytes_of(piece) > queue.workspace_bytes) piece /= 2;
  constexpr unsigned kWarps = 8;
  const auto grid = [&](int64_t rows) {
    return dim3(BlocksOf(rows, kWarps), BlocksOf(width, kWarp * kVector));
  };
  const dim3 block(kWarp, kWarps);
  for (int64_t first = 0; first < std::max<int64_t>(items, 1); first += piece) {
    const auto n = static_cast<int>(std::min(piece, items - first));
    size_t scratch_bytes = sort_bytes(n);
    std::byte* at = queue.Workspace(4 * list_bytes(n) + partial_bytes(n) +
                                        static_cast<int64_t>(scratch_bytes),
                                    "a sum by buckets");
    if (at == nullptr) return;
    const auto take = [&](int64_t bytes) {
      return std::exchange(at, at + bytes);
    };
    auto* const partial = reinterpret_cast<float*>(take(partial_bytes(n)));
    ToSort arrays = {reinterpret_cast<uint32_t*>(take(list_bytes(n))),
                     reinterpret_cast<uint32_t*>(take(list_bytes(n))),
                     reinterpret_cast<int32_t*>(take(list_bytes(n))),
                     reinterpret_cast<int32_t*>(take(list_bytes(n))), n};
    Launch(FindBuckets<BucketOf>, BlocksOf(n, kThreads), kThreads, 0, queue,
           bucket_of, first, n, static_cast<uint32_t>(buckets), arrays.bucket,
           arrays.item);
    if (n > 0) {
      queue.Keep(SortByBucket(at, scratch_bytes, arrays,
                              static_cast<uint32_t>(buckets), queue.stream),
                 "sorting");
    }
    const SortedItems sorted = {arrays.bucket, arrays.item, n};
    const int64_t runs = DivideUp(n, kRun);
    ByType({from}, [&]<typename T>() {
      ByType({to}, [&]<typename W>() {
        const BucketTable<W> table = {Elements<W>(to), width,
                                      call.accumulate || first > 0};
        if (!table.accumulate) {
          Launch(ZeroEmptyBuckets<W>, grid(buckets), block, 0, queue, sorted,
                 buckets, table);
        }
        Launch(AddRuns<T, W, RowOfItem, WeightOfItem>, grid(runs), block, 0,
               queue, Elements<T>(from), row_of, weight_of, sorted,
               static_cast<uint32_t>(buckets), table, partial);
        Launch(JoinRuns<W>, grid(runs), block, 0, queue, sorted,
               static_cast<uint32_t>(buckets), table,
               static_cast<const float*>(partial));
      });
    });
  }
}

}  // namespace tessera
