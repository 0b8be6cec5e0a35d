#pragma once
// StridedCopy on a GPU.

#include <cuda_runtime_api.h>

#include "runtime/device/device.h"

namespace tessera {

// Enqueues the copy on `stream`. The two sides do not overlap.
cudaError_t EnqueueCopy(void* to, const void* from, const StridedCopy& copy,
                        cudaStream_t stream);

}  // namespace tessera
