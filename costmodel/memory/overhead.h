#pragma once
// What a device's memory holds beside a plan's values: the share of the
// training software (Stack::memory). Tessera's own runtime has none.

#include <vector>

#include "planner/ir/stack.h"
#include "planner/plan/evaluation.h"
#include "planner/plan/graph_index.h"
#include "planner/plan/plan.h"
#include "planner/plan/stages.h"

namespace tessera {

// How many communicators a device of each set belongs to: one for each mesh
// dimension over more than one rank, one of the pipeline where there are
// several groups, one of all devices. Axes are of one dimension where they
// split the same of samples, experts, sequences and weights, whatever their
// names.
std::vector<int> CommunicatorsOf(const GraphIndex& index, const Plan& plan,
                                 const std::vector<DeviceSet>& sets);

// Adds to the peak of a device of so many communicators
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
                 DType dtype, int communicators, MemoryUse& use);

}  // namespace tessera
