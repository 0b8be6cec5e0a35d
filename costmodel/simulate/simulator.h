#pragma once
// The simulator: runs a task graph with a clock, as the runtime
// (runtime/executor.h) runs it with kernels.
//
// A task starts at max(end of the task before it in its stream, ends of its
// dependencies) and takes the time that the Pricer gives it. A stream is
// (group, role), for communication (group, role, axes); a task of a compute
// stream also waits for the earlier ones of groups that share a device with
// its own: a device computes for one group at a time. So without sharing of
// links the timeline is the longest path through the task graph in issue
// order, exact in integer picoseconds.
//
// With `share_links`, communication that overlaps in time shares the links it
// has in common: each task runs at its max-min fair rate (link/fair_share.h),
// which changes whenever another one starts or ends; ends are rounded up to
// whole picoseconds. Where no link is ever asked for more than it has, the
// timeline is the unshared one, to the picosecond.
//
// Deterministic, without state. Spans are in issue order with rank -1.

#include <span>
#include <vector>

#include "costmodel/price.h"
#include "costmodel/profile/profile_db.h"
#include "planner/base/units.h"
#include "planner/lower/task_graph.h"
#include "planner/lower/timeline.h"

namespace tessera {

struct SimulationOptions {
  bool share_links = true;
};

// One training step.
Timeline Simulate(const Pricer& pricer, const TaskGraph& tasks,
                  SimulationOptions options = {});

// The price of every task.
std::vector<TaskCost> PriceTasks(const Pricer& pricer, const TaskGraph& tasks);
// What of a profile would be exactly its time (Pricer::ProfileKeyOf).
std::vector<ProfileKey> ProfileKeysOf(const Pricer& pricer,
                                      const TaskGraph& tasks);

// The bytes that devices send one another in the step, at the least that each
// exchange can be done with: of n ranks with payloads p (costmodel/collective)
// an all-reduce sends 2 (n - 1) p.
Bytes MovedBytes(const Pricer& pricer, const TaskGraph& tasks);

// For each task the number of its stream; streams are numbered in order of
// first use.
std::vector<int> StreamsOf(const TaskGraph& tasks);

// The unshared timeline for given durations, one for each task.
Timeline LongestPath(const TaskGraph& tasks, std::span<const TaskCost> costs);

}  // namespace tessera
