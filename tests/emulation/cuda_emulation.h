#pragma once
// Runs CUDA kernels on the host: a .cu file that is compiled as C++ with this
// header included first finds in it what nvcc knows by itself. The kernels of
// runtime/kernels/cuda are tested so where there is no GPU.
//
// The threads of a block are fibers of one host thread. A fiber runs until it
// waits for others, in __syncthreads or a warp's collective; who goes on then
// is drawn at random, as is the order of blocks (SetSeed). So a missing barrier
// or a race between blocks gives wrong results with some seed. Reported as
// errors of the launch, where a GPU would hang or worse:
//  - a barrier or collective that some of its threads never reach, or reach at
//    different places,
//  - launches that no device accepts.
// Shared memory holds NaNs (bytes 0xff) when a block starts. It is allocated in
// its exact size, so that AddressSanitizer finds accesses beyond it.
//
// Not emulated: what depends on threads of a warp running in lock step, memory
// order, streams (a launch is over when Run returns), clusters, and grids whose
// blocks wait for each other.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <source_location>
#include <string>

// Kernels declare shared memory by TESSERA_SHARED (runtime/kernels/cuda/
// launch.h): an automatic variable would not be shared.
#undef __shared__
#define __shared__ tessera_shared_memory_is_declared_by_TESSERA_SHARED

// Of the fiber that runs.
inline uint3 threadIdx;
inline uint3 blockIdx;
inline dim3 blockDim;
inline dim3 gridDim;
inline constexpr int warpSize = 32;
#undef __grid_constant__
#define __grid_constant__
#define __launch_bounds__(...)

namespace tessera::emulation {

using Site = std::source_location;

// Runs `thread` once for every thread of the grid. Returns when all have ended;
// what went wrong goes to `error` unless there is one. Calls wait for each
// other.
void Run(const std::function<void()>& thread, dim3 grid, dim3 block,
         size_t shared_bytes, std::string* error);

// The orders of blocks and threads of the launches that follow.
void SetSeed(uint64_t seed);

// Whether the launches that follow run their blocks, as at first, or are only
// checked.
void SetRunsBlocks(bool yes);

// The running block's variable of that tag, `bytes` large.
void* SharedVariable(const void* tag, size_t bytes);
template <typename T>
T& Shared(const void* tag) {
  return *static_cast<T*>(SharedVariable(tag, sizeof(T)));
}
std::byte* DynamicShared();

// The threads of `mask` in the running thread's warp meet here, or (BlockMeets)
// all threads of the block. The last to come calls all(lanes), with each one's
// `mine` at its lane or, in a block, its number; then all go on. `name` is the
// function's, for messages.
using All = std::function<void(void* const* lanes)>;
void WarpMeets(unsigned mask, void* mine, const All& all, const char* name,
               Site site);
void BlockMeets(void* mine, const All& all, const char* name, Site site);

inline int Lane() {
  return static_cast<int>(
      (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) %
      warpSize);
}

// A collective in which each lane of `mask` gets f(lanes, its lane).
template <typename In, typename Out, typename F>
Out InWarp(unsigned mask, In in, F f, const char* name, Site site) {
  struct Mine {
    In in;
    Out out;
  } mine = {in, {}};
  WarpMeets(
      mask, &mine,
      [&](void* const* lanes) {
        const auto of = [lanes](int lane) {
          return static_cast<Mine*>(lanes[lane]);
        };
        for (int lane = 0; lane < warpSize; ++lane) {
          if (lanes[lane] == nullptr) continue;
          of(lane)->out = f(of, lane);
        }
      },
      name, site);
  return mine.out;
}

// Each lane gets the value of the lane `from`; NaN bits where that one does not
// take part.
template <typename T>
T Shuffle(unsigned mask, T value, int from, const char* name, Site site) {
  struct In {
    T value;
    int from;
  };
  return InWarp<In, T>(
      mask, In{value, from},
      [](auto of, int lane) {
        T result;
        std::memset(&result, 0xff, sizeof(T));
        const auto* const source = of(of(lane)->in.from);
        return source != nullptr ? source->in.value : result;
      },
      name, site);
}

// Copies of cp.async: kept until the thread waits for them, so that a kernel
// that does not wait reads NaNs.
void CopyLater(void* to, const void* from, size_t bytes, size_t valid_bytes);
void CommitCopies();
void WaitForCopies(int groups_left);

}  // namespace tessera::emulation

// ---- What nvcc knows --------------------------------------------------------

inline void __syncthreads(
    std::source_location site = std::source_location::current()) {
  tessera::emulation::BlockMeets(
      nullptr, [](void* const*) {}, "__syncthreads", site);
}

inline int __syncthreads_count(
    int predicate,
    std::source_location site = std::source_location::current()) {
  struct {
    int predicate;
    int count;
  } mine = {predicate, 0};
  using Mine = decltype(mine);
  tessera::emulation::BlockMeets(
      &mine,
      [](void* const* threads) {
        const unsigned n = blockDim.x * blockDim.y * blockDim.z;
        int count = 0;
        for (unsigned i = 0; i < n; ++i) {
          count += static_cast<Mine*>(threads[i])->predicate != 0;
        }
        for (unsigned i = 0; i < n; ++i) {
          static_cast<Mine*>(threads[i])->count = count;
        }
      },
      "__syncthreads_count", site);
  return mine.count;
}
inline int __syncthreads_or(
    int predicate,
    std::source_location site = std::source_location::current()) {
  return __syncthreads_count(predicate, site) > 0;
}

inline void __syncwarp(
    unsigned mask = ~0u,
    std::source_location site = std::source_location::current()) {
  tessera::emulation::WarpMeets(
      mask, &mask, [](void* const*) {}, "__syncwarp", site);
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, int width = warpSize,
              std::source_location site = std::source_location::current()) {
  const int first = tessera::emulation::Lane() / width * width;
  return tessera::emulation::Shuffle(mask, value, first + lane % width,
                                     "__shfl_sync", site);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = warpSize,
                  std::source_location site = std::source_location::current()) {
  const int lane = tessera::emulation::Lane();
  const int from = lane ^ lanes;
  return tessera::emulation::Shuffle(mask, value,
                                     from / width == lane / width ? from : lane,
                                     "__shfl_xor_sync", site);
}
template <typename T>
T __shfl_down_sync(
    unsigned mask, T value, unsigned lanes, int width = warpSize,
    std::source_location site = std::source_location::current()) {
  const int lane = tessera::emulation::Lane();
  const int from = lane + static_cast<int>(lanes);
  return tessera::emulation::Shuffle(mask, value,
                                     from / width == lane / width ? from : lane,
                                     "__shfl_down_sync", site);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = warpSize,
                 std::source_location site = std::source_location::current()) {
  const int lane = tessera::emulation::Lane();
  const int from = lane - static_cast<int>(lanes);
  return tessera::emulation::Shuffle(mask, value,
                                     from >= lane / width * width ? from : lane,
                                     "__shfl_up_sync", site);
}

inline unsigned __ballot_sync(
    unsigned mask, int predicate,
    std::source_location site = std::source_location::current()) {
  return tessera::emulation::InWarp<int, unsigned>(
      mask, predicate,
      [](auto of, int) {
        unsigned votes = 0;
        for (int lane = 0; lane < warpSize; ++lane) {
          if (of(lane) != nullptr && of(lane)->in != 0) votes |= 1u << lane;
        }
        return votes;
      },
      "__ballot_sync", site);
}
inline int __any_sync(
    unsigned mask, int predicate,
    std::source_location site = std::source_location::current()) {
  return __ballot_sync(mask, predicate, site) != 0;
}
inline int __all_sync(
    unsigned mask, int predicate,
    std::source_location site = std::source_location::current()) {
  return __ballot_sync(mask, predicate, site) == mask;
}

// One fiber runs at a time, so that every access is atomic.
template <typename T>
T atomicAdd(T* at, T value) {
  const T old = *at;
  *at = old + value;
  return old;
}
template <typename T>
T atomicMax(T* at, T value) {
  const T old = *at;
  *at = std::max(old, value);
  return old;
}
template <typename T>
T atomicExch(T* at, T value) {
  return std::exchange(*at, value);
}

inline void __threadfence() {}
inline void __threadfence_block() {}
template <typename T>
T __ldg(const T* at) {
  return *at;
}
template <typename T>
T __ldcs(const T* at) {
  return *at;
}
template <typename T>
void __stcs(T* at, T value) {
  *at = value;
}

template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}

inline int __popc(unsigned x) {
  return std::popcount(x);
}
inline int __clz(int x) {
  return std::countl_zero(static_cast<unsigned>(x));
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline unsigned __float_as_uint(float x) {
  return std::bit_cast<unsigned>(x);
}
inline float __uint_as_float(unsigned x) {
  return std::bit_cast<float>(x);
}
inline float __expf(float x) {
  return std::exp(x);
}
inline float __logf(float x) {
  return std::log(x);
}
inline float __fdividef(float x, float y) {
  return x / y;
}
inline float __frcp_rn(float x) {
  return 1 / x;
}
inline float rsqrtf(float x) {
  return 1 / std::sqrt(x);
}
