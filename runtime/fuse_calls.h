#pragma once
// FuseCalls: calls of several tasks as one kernel's, where the device has it
// (planner/lower/fused_kernels.h) and nothing else comes between; and products
// that add to one result as one product, for which weights are laid one behind
// the other, and what is multiplied side by side.

#include <vector>

#include "runtime/device/device.h"
#include "runtime/rank_view.h"
#include "runtime/step_buffers.h"
#include "runtime/step_work.h"

namespace tessera {

// `work` is that of a step, in issue order, and keeps its places: whose calls
// are another's has none. Buffers that nothing uses any more are dropped.
// REQUIRES: none has been allocated.
void FuseCalls(const RankView& view, const RankDevice& device,
               StepBuffers& buffers, std::vector<TaskWork>& work);

}  // namespace tessera
