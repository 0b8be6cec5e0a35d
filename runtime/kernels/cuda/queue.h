#pragma once
// CudaQueue: what a CUDA kernel is enqueued with. Owned by the device; one for
// each of its compute streams. Belongs to one thread at a time.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace tessera {

class CudaMatMul;
class CudaSdpa;

struct CudaQueue {
  cudaStream_t stream = nullptr;
  // Scratch of the kernel that is enqueued: the next one in the stream
  // overwrites it. Aligned to 256 bytes.
  std::byte* workspace = nullptr;
  int64_t workspace_bytes = 0;
  // So many bytes at its beginning are what `matmul` takes of it: a kernel that
  // multiplies may keep operands in those behind.
  int64_t matmul_bytes = 0;
  int multiprocessors = 0;
  CudaMatMul* matmul = nullptr;  // runtime/kernels/cuda/matmul.h
  CudaSdpa* sdpa = nullptr;      // runtime/kernels/cuda/sdpa.h; null: none
  // What went wrong first; empty while all is well. The device reports it when
  // it is next synchronized.
  std::string error;

  void Fail(std::string what) {
    if (error.empty()) error = std::move(what);
  }
  void Keep(cudaError_t code, const char* what) {
    if (code == cudaSuccess) return;
    Fail(std::string(what) + ": " + cudaGetErrorName(code) + " (" +
         cudaGetErrorString(code) + ")");
  }

  // The workspace, of which `kernel` needs so many bytes; null, and an error,
  // where it is smaller.
  std::byte* Workspace(int64_t bytes, const char* kernel) {
    if (bytes <= workspace_bytes) return workspace;
    Fail(std::string(kernel) + " needs " + std::to_string(bytes) +
         " bytes of workspace: there are " + std::to_string(workspace_bytes));
    return nullptr;
  }
};

}  // namespace tessera
