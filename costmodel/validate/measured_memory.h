#pragma once
// What a published figure of a device's memory counts.

#include <string_view>

#include "costmodel/validate/published_run.h"
#include "planner/base/units.h"
#include "planner/ir/cluster.h"
#include "planner/plan/evaluation.h"
#include "planner/plan/plan.h"

namespace tessera {

enum class MemoryMeasure : uint8_t {
  kAllocated,  // what tensors and kernels hold (torch's max_memory_allocated,
               // the peak of XLA's allocator)
  kReserved,   // the allocator's blocks (torch's max_memory_reserved)
  kDevice,     // all that the driver says is in use (nvidia-smi), on the
               // first host, where one looks
};
std::string_view NameOf(MemoryMeasure measure);

struct MeasuredMemory {
  Bytes bytes;
  MemoryMeasure measure = MemoryMeasure::kAllocated;
};

// By the words of the row's source, unit included.
MeasuredMemory MeasuredMemoryOf(const PublishedRun& run);

// What of a prediction the measure counts.
Bytes CountedBy(MemoryMeasure measure, const MemoryUse& use);

// Of the devices that the measure is read on the fullest. REQUIRES: the
// evaluation is of the plan.
const MemoryUse& ReadBy(MemoryMeasure measure, const Cluster& cluster,
                        const Plan& plan, const Evaluation& evaluation);

}  // namespace tessera
