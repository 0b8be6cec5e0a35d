#pragma once
// The sum of what several ranks have, in their order.

#include <cstddef>
#include <cstdint>
#include <span>

#include "planner/ir/dtype.h"
#include "runtime/kernels/cuda/queue.h"

namespace tessera {

// SumInOrder (runtime/comm/reduce.h) of buffers that this GPU reaches, bit for
// bit. `to` may be one of the sources.
// REQUIRES: between 1 and QueueDevice::kMostSources sources.
void EnqueueRankSum(std::span<const std::byte* const> sources, std::byte* to,
                    int64_t count, DType dtype, CudaQueue& queue);

}  // namespace tessera
