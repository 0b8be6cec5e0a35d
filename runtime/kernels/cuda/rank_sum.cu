#include "runtime/device/device.h"
#include "runtime/kernels/cuda/elements.h"
#include "runtime/kernels/cuda/rank_sum.h"

namespace tessera {
namespace {

struct Sources {
  const void* of[QueueDevice::kMostSources];
  int count = 0;
};

// In what elements are added: 16-bit types in fp32.
__device__ double Widened(double x) {
  return x;
}
__device__ uint32_t Widened(uint32_t x) {
  return x;
}
template <typename T>
__device__ float Widened(T x) {
  return Fp32(x);
}

template <typename T, typename Sum>
__device__ T Narrowed(Sum x) {
  if constexpr (std::is_same_v<T, Sum>) {
    return x;
  } else {
    return Rounded<T>(x);
  }
}

// Each element is read by the thread that writes it, so that `to` may be a
// source.
template <typename T>
__global__ void SumSources(Sources sources, T* to, int64_t count) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += step) {
    auto sum = Widened(static_cast<const T*>(sources.of[0])[i]);
    for (int s = 1; s < sources.count; ++s) {
      sum += Widened(static_cast<const T*>(sources.of[s])[i]);
    }
    to[i] = Narrowed<T>(sum);
  }
}

template <typename T>
void Enqueue(const Sources& sources, std::byte* to, int64_t count,
             CudaQueue& queue) {
  Launch(SumSources<T>, BlocksFor(queue, count), kThreads, 0, queue, sources,
         reinterpret_cast<T*>(to), count);
}

}  // namespace

void EnqueueRankSum(std::span<const std::byte* const> sources, std::byte* to,
                    int64_t count, DType dtype, CudaQueue& queue) {
  TESSERA_CHECK(!sources.empty() &&
                sources.size() <= size_t{QueueDevice::kMostSources})
      << sources.size();
  Sources all;
  for (const std::byte* source : sources) all.of[all.count++] = source;
  switch (dtype) {
    case DType::kFloat64:
      return Enqueue<double>(all, to, count, queue);
    case DType::kFloat32:
      return Enqueue<float>(all, to, count, queue);
    case DType::kBFloat16:
      return Enqueue<BFloat16>(all, to, count, queue);
    case DType::kFloat16:
      return Enqueue<Float16>(all, to, count, queue);
    case DType::kInt32:  // unsigned, so that overflow wraps
      return Enqueue<uint32_t>(all, to, count, queue);
  }
}

}  // namespace tessera
