#pragma once
// StepBound: what no plan of a graph on a cluster is faster than.
//
// Every operator of the step and its gradients runs at least once, in one piece
// or in shards whose extents add up to no less than the whole. A kernel takes
// no less than its operations at the rate that products of unlimited size
// reach (kernel_time.h: waves, prologues, memory traffic and floors only add to
// that), and one between products no less than its bytes at the memory's
// bandwidth. A device runs one kernel at a time, so of D devices one takes no
// less than
//   (sum over operators of the least over device types) / D,
// and with any worth w of a second on a device of each type, 1 in the mean over
// the D devices, no less than the same of the operators' worth: in a step of T
// seconds all devices spend no more than the worth of D * T. The bound is the
// largest of those with w = 1 and with w as each type is fast, and of the first
// with the optimizer's step, as much of whose traffic as the hosts' memory can
// carry meanwhile is theirs.
//
// Communication can be hidden behind compute, and a plan may do without almost
// all of it (a pipeline sends activations only), so it adds nothing.
//
// Functions without state; thread-safe.

#include <optional>

#include "planner/base/units.h"
#include "planner/ir/cluster.h"
#include "planner/ir/graph.h"
#include "planner/plan/plan.h"

namespace tessera {

struct StepBound {
  Duration step_time;  // rounded down
  // Of these the share of products and attention; the rest moves memory.
  double products = 0;
  // What some device keeps at least: parameters and the optimizer's state,
  // evenly over all. More than it has room for has to be offloaded.
  Bytes memory;
};

// Of prices without a profile: what a profile measures is bound by nothing.
// REQUIRES: `graph` is differentiated.
StepBound LowerBound(const Graph& graph, const Cluster& cluster,
                     const TrainingOptions& options);

}  // namespace tessera
