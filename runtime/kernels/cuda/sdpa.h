#pragma once
// Attention by cuDNN ("scaled dot-product attention"), where it is there: for
// heads of 16 bits whose queries and keys are the same positions, in order.
// Without cuDNN, or where it has no kernel, attention.cu has its own.

#include <compare>
#include <cstdint>
#include <memory>

#include "planner/base/result.h"
#include "planner/ir/dtype.h"

namespace tessera {

struct CudaQueue;

// Causal attention of tensors as in flash.h, with s = t; `heads` of queries
// share `groups` of keys and values.
struct SdpaProblem {
  int64_t samples = 0;
  int64_t heads = 0;
  int64_t groups = 0;
  int64_t length = 0;
  int64_t d = 0;
  int64_t e = 0;
  DType dtype = DType::kBFloat16;
  float scale = 1;
  bool backward = false;
  bool deterministic = true;  // of the backward pass
  // Elements from one position's gradients to the next one's; 0: no gaps.
  int64_t dq_stride = 0;
  int64_t dk_stride = 0;
  int64_t dv_stride = 0;

  auto operator<=>(const SdpaProblem&) const = default;
};

// In the GPU's memory. `lse` is fp32, (samples, heads, length): not the order
// of the operator's.
struct SdpaData {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  void* o = nullptr;
  float* lse = nullptr;
  // Of the backward pass.
  const void* d_o = nullptr;
  void* dq = nullptr;
  void* dk = nullptr;
  void* dv = nullptr;
};

// Belongs to the thread of its queue.
class CudaSdpa {
 public:
  virtual ~CudaSdpa() = default;

  // Whether Run takes the problem. The first question about one takes some
  // tenths of a second, and may allocate GPU memory: not while a graph is
  // captured.
  virtual bool Takes(const SdpaProblem& problem) = 0;

  // Enqueues the attention, or its gradients.
  // Errors are kept in the queue. Scratch memory is its own.
  // REQUIRES: Takes(problem).
  virtual void Run(const SdpaProblem& problem, const SdpaData& data,
                   CudaQueue& queue) = 0;
};

// For the calling thread's current GPU. Null where Tessera was built without
// cudnn-frontend, or libcudnn.so.9 is not found.
std::unique_ptr<CudaSdpa> MakeCudnnSdpa();

}  // namespace tessera
