#pragma once
// Sums of rows by bucket: the gradient of a table that tokens look up, and the
// slots of experts that tokens go to. For .cu files.
//
// The items of a bucket are added in their order. An index lists them: every
// thread of ListItems owns one bucket and goes through all items, of which its
// block first finds those of its buckets. That takes time linear in the items
// however they are spread, and neither sorting nor atomics.

#include "runtime/kernels/cuda/reduce.h"

namespace tessera {

inline constexpr unsigned kListThreads = 512;

// bucket_of(i) is the bucket of item i, or -1. Counts the items of each bucket
// or, where the counts have become the begins of their lists, lists them.
template <bool kList, typename BucketOf>
__global__ void __launch_bounds__(kListThreads)
    ListItems(BucketOf bucket_of, int64_t items, int64_t buckets,
              int32_t* counts, int32_t* list) {
  constexpr unsigned kWarps = kListThreads / kWarp;
  TESSERA_SHARED(found_buckets, uint16_t[kListThreads]);  // of the block's
  TESSERA_SHARED(found_items, int32_t[kListThreads]);
  TESSERA_SHARED(found_by_warp, unsigned[kWarps]);
  const int64_t first = int64_t{blockIdx.x} * kListThreads;
  const int64_t mine = first + threadIdx.x;
  const bool owner = mine < buckets;
  const unsigned lane = threadIdx.x % kWarp;
  const unsigned warp = threadIdx.x / kWarp;
  int32_t at = kList && owner ? counts[mine] : 0;
  for (int64_t begin = 0; begin < items; begin += kListThreads) {
    const int64_t item = begin + threadIdx.x;
    const int64_t bucket = item < items ? bucket_of(item) - first : -1;
    const bool found = bucket >= 0 && bucket < kListThreads;
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
      found_buckets[place] = static_cast<uint16_t>(bucket);
      found_items[place] = static_cast<int32_t>(item);
    }
    __syncthreads();
    for (unsigned i = 0; i < total; ++i) {
      if (found_buckets[i] != threadIdx.x) continue;
      if (kList) list[at] = found_items[i];
      ++at;
    }
  }
  if (!kList && owner) counts[mine] = at;
}

// counts[0, n) become the sums of those before; counts[n] that of all.
inline constexpr unsigned kScanThreads = 1024;
template <typename = void>
__global__ void __launch_bounds__(kScanThreads)
    ScanCounts(int32_t* counts, int64_t n) {
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

// Items that are added as they are.
struct Unweighted {
  __device__ float operator()(int64_t) const { return 1; }
};

// A warp for each bucket and its vectors blockIdx.y * 32, ...; row_of(i) is the
// row of `from` that item i adds, weight_of(i) times.
template <typename T, typename W, typename RowOfItem, typename WeightOfItem>
__global__ void AddItems(Elements<T> from, RowOfItem row_of,
                         WeightOfItem weight_of, const int32_t* starts,
                         const int32_t* list, Elements<W> to, int64_t buckets,
                         int64_t width, bool accumulate) {
  const int64_t bucket = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const int64_t column =
      (int64_t{blockIdx.y} * kWarp + threadIdx.x) * int64_t{kVector};
  if (bucket >= buckets || column >= width) return;
  const int32_t begin = starts[bucket];
  const int32_t end = starts[bucket + 1];
  if (accumulate && begin == end) return;
  const Span span = FirstOf(width - column);
  float sum[kVector] = {};
  if (accumulate) to.Load(bucket * width + column, span, sum);
#pragma unroll 4
  for (int32_t i = begin; i < end; ++i) {
    float v[kVector];
    from.Load(row_of(list[i]) * width + column, span, v);
    const float weight = weight_of(list[i]);
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum[j] += weight * v[j];
  }
  to.Store(bucket * width + column, span, sum);
}

// Row b of `to` becomes, or has added, the sum of the rows row_of(i) of `from`
// for the items i of bucket b, each weight_of(i) times. Uses the workspace.
template <typename BucketOf, typename RowOfItem,
          typename WeightOfItem = Unweighted>
void AddByBucket(const KernelCall& call, int64_t items, BucketOf bucket_of,
                 RowOfItem row_of, const LocalTensor& from,
                 const LocalTensor& to, WeightOfItem weight_of = {}) {
  CudaQueue& queue = *call.queue;
  const int64_t width = to.shape.back();
  const int64_t buckets = width == 0 ? 0 : to.elements() / width;
  auto* const counts = reinterpret_cast<int32_t*>(queue.Workspace(
      (buckets + 1 + items) * int64_t{sizeof(int32_t)}, "a sum by buckets"));
  if (counts == nullptr) return;
  int32_t* const list = counts + buckets + 1;
  const auto blocks =
      static_cast<unsigned>((buckets + kListThreads - 1) / kListThreads);
  Launch(ListItems<false, BucketOf>, blocks, kListThreads, 0, queue, bucket_of,
         items, buckets, counts, list);
  Launch(ScanCounts<>, 1, kScanThreads, 0, queue, counts, buckets);
  Launch(ListItems<true, BucketOf>, blocks, kListThreads, 0, queue, bucket_of,
         items, buckets, counts, list);
  constexpr unsigned kBuckets = 8;
  const dim3 grid(
      static_cast<unsigned>((buckets + kBuckets - 1) / kBuckets),
      static_cast<unsigned>((width + kWarp * kVector - 1) / (kWarp * kVector)));
  ByType({from}, [&]<typename T>() {
    ByType({to}, [&]<typename W>() {
      Launch(AddItems<T, W, RowOfItem, WeightOfItem>, grid,
             dim3(kWarp, kBuckets), 0, queue, Elements<T>(from), row_of,
             weight_of, static_cast<const int32_t*>(counts),
             static_cast<const int32_t*>(list), Elements<W>(to), buckets, width,
             call.accumulate);
    });
  });
}

}  // namespace tessera
