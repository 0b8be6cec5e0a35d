#pragma once
// --backend, and what it gives the ranks of a job to compute on.

#include <optional>

#include "planner/base/result.h"
#include "planner/base/units.h"
#include "runtime/launch/backend.h"
#include "runtime/launch/rank_environment.h"
#include "tools/options.h"

namespace tessera {

// The row that --backend names.
Result<const Backend*> BackendOf(const Options& options);

// What a rank has of its GPU.
struct GpuShare {
  Gpu gpu;
  int ranks = 1;  // that share it
  Bytes memory() const { return {gpu.memory.value / ranks}; }
};

// Nothing where ranks have none. kInvalidInput where there are no GPUs, or
// fewer than ranks.
Result<std::optional<GpuShare>> GpuShareOf(const Backend& backend,
                                           const RankEnvironment& environment);

}  // namespace tessera
