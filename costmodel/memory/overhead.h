#pragma once
// What a device's memory holds beside a plan's values: the share of the
// training software (Stack::memory). Tessera's own runtime has none.

#include "planner/ir/stack.h"
#include "planner/plan/evaluation.h"
#include "planner/plan/plan.h"
#include "planner/plan/stages.h"

namespace tessera {

// How many communicators a device of the set belongs to: one for each mesh
// dimension over more than one rank (axes "tp0" and "tp1" are one), one of the
// pipeline where there are several groups, one of all devices.
int CommunicatorsOf(const Plan& plan, const DeviceSet& set);

// Adds to a device's peak
//   framework      context + communicators * communicator
//   communication  2 * zero_bucket
//   allocator      fragmentation * (activations + communication + workspace),
//                  and where fp16 gradients are copied for the step, in fp32
//                  those that the device's optimizer reads: 4 bytes of its 12 a
//                  parameter (AdamW's master and moments; Rajbhandari et al.
//                  2020, section 3.1), or of its 4 without moments.
// Copies for the step live when activations do not, but are of other sizes, so
// that the allocator does not reuse blocks of the ones for the others.
void AddOverhead(const Stack& stack, const TrainingOptions& options,
                 DType dtype, const Plan& plan, const DeviceSet& set,
                 MemoryUse& use);

}  // namespace tessera
