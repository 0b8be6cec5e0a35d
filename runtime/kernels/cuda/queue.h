#pragma once
// CudaQueue: what a CUDA kernel is enqueued with. Owned by the device; one for
// each of its compute streams. Belongs to one thread at a time.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace tessera {

class CudaMatMul;

struct CudaQueue {
  cudaStream_t stream = nullptr;
  // Scratch of the kernel that is enqueued: the next one in the stream
  // overwrites it. Aligned to 256 bytes.
  std::byte* workspace = nullptr;
  int64_t workspace_bytes = 0;
  int multiprocessors = 0;
  CudaMatMul* matmul = nullptr;  // runtime/kernels/cuda/matmul.h
  // What went wrong first; empty while all is well. The device reports it when
  // it is next synchronized.
  std::string error;

  void Keep(cudaError_t code, const char* what) {
    if (code == cudaSuccess || !error.empty()) return;
    error = std::string(what) + ": " + cudaGetErrorName(code) + " (" +
            cudaGetErrorString(code) + ")";
  }
};

}  // namespace tessera
