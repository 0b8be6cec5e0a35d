#pragma once
// How CUDA kernels are launched, and shared memory. For .cu files, which are
// compiled twice: by nvcc, and for the tests by the host's compiler, where
// tests/emulation/cuda_emulation.h stands in for the device
// (TESSERA_EMULATE_CUDA).

#include <cxxabi.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>

#include "planner/base/divide.h"
#include "runtime/kernels/cuda/queue.h"

namespace tessera {

// Shared memory of a block, as a local variable of a kernel:
//   TESSERA_SHARED(sums, float[32]);
#ifdef TESSERA_EMULATE_CUDA
#define TESSERA_SHARED(name, ...) \
  static char name##_tag;         \
  auto& name = ::tessera::emulation::Shared<__VA_ARGS__>(&name##_tag)
#else
#define TESSERA_SHARED(name, ...)  \
  using name##_type = __VA_ARGS__; \
  __shared__ name##_type name
#endif

// "void tessera::Kernel<float>(float*)<<<(528, 1, 1), (224, 1, 1), 21504>>>".
#ifdef __CUDACC__
inline std::string DescribeLaunch(const void* kernel, dim3 grid, dim3 block,
                                  size_t shared_bytes) {
  const char* mangled = nullptr;
  if (cudaFuncGetName(&mangled, kernel) != cudaSuccess) mangled = "kernel";
  int status = 0;
  char* const demangled =
      abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  const std::string name = status == 0 ? demangled : mangled;
  std::free(demangled);
  const auto text = [](dim3 size) {
    return "(" + std::to_string(size.x) + ", " + std::to_string(size.y) + ", " +
           std::to_string(size.z) + ")";
  };
  return name + "<<<" + text(grid) + ", " + text(block) + ", " +
         std::to_string(shared_bytes) + ">>>";
}
#endif

// Blocks for so many items, of which each has `each`.
inline unsigned BlocksOf(int64_t items, int64_t each) {
  return static_cast<unsigned>(DivideUp(items, each));
}

#if defined(TESSERA_EMULATE_CUDA) || defined(__CUDACC__)

// The shared memory whose size the launch gives, aligned to 128 bytes.
inline __device__ std::byte* DynamicShared() {
#ifdef TESSERA_EMULATE_CUDA
  return emulation::DynamicShared();
#else
  extern __shared__ __align__(128) std::byte tessera_dynamic_shared[];
  return tessera_dynamic_shared;
#endif
}

// Enqueues kernel(args...); nothing where the grid is empty. `shared_bytes` is
// of dynamic shared memory, of which sm_90 has 227 KiB. What goes wrong is kept
// in the queue.
template <typename... Params, typename... Args>
void Launch(void (*kernel)(Params...), dim3 grid, dim3 block,
            size_t shared_bytes, CudaQueue& queue, Args&&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
#ifdef TESSERA_EMULATE_CUDA
  emulation::Run([&] { kernel(static_cast<Params>(args)...); }, grid, block,
                 shared_bytes, &queue.error);
#else
  const auto* const function = reinterpret_cast<const void*>(kernel);
  // Less than what is there without asking, of which static shared memory takes
  // a part.
  constexpr size_t kWithoutAsking = 32 << 10;
  cudaError_t done = cudaSuccess;
  if (shared_bytes > kWithoutAsking) {
    done = cudaFuncSetAttribute(function,
                                cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(shared_bytes));
  }
  if (done == cudaSuccess) {
    // What calls before left behind, of libraries that went another way then,
    // is not this launch's.
    cudaGetLastError();
    kernel<<<grid, block, shared_bytes, queue.stream>>>(
        static_cast<Params>(args)...);
    done = cudaGetLastError();
  }
  if (done != cudaSuccess) {
    queue.Keep(done,
               DescribeLaunch(function, grid, block, shared_bytes).c_str());
  }
#endif
}

#endif

}  // namespace tessera
