#pragma once
// Peak bytes on the devices of a plan, from the lifetimes of values.
//
// Tasks are walked in issue order: the order in which a rank's memory is taken
// and given back, whatever the clock says. A persistent value counts always;
// another one from the first task that touches it to the last (LastUses), both
// included. An alias is its root. A task's staging and its kernel's scratch
// (planner/lower/staging.h) count while it runs. The world's values have a copy
// on every device.
//
// A file is as long as its layout (planner/lower/file_layout.h): the parts are
// what persists, and all behind it counts as activations.

#include <span>
#include <string>
#include <vector>

#include "planner/ir/graph.h"
#include "planner/lower/task_graph.h"
#include "planner/plan/evaluation.h"
#include "planner/plan/stages.h"

namespace tessera {

// By DeviceSets of the plan's groups (planner/plan/stages.h), what each device
// keeps on a tier: what all its groups do. The parts are those at the first
// moment of the peak. Where shards are not equal, the largest counts for every
// device.
std::vector<MemoryUse> PeakMemory(const TaskGraph& tasks,
                                  MemoryTier tier = MemoryTier::kDevice);

// The same of each of `devices` by what it has itself: its own shards, and what
// it stages.
std::vector<MemoryUse> PeakMemoryOf(const TaskGraph& tasks,
                                    std::span<const DeviceId> devices,
                                    MemoryTier tier = MemoryTier::kDevice);

// The devices of each set, parted into those with shards of the same sizes.
// (These may differ in what they stage, where one of several replicas sends.)
std::vector<DeviceSet> AlikeDevices(const TaskGraph& tasks);

struct HeldBuffer {
  Bytes bytes;
  MemoryCategory category = MemoryCategory::kActivation;
  ValueId value;  // invalid: what the task stages, or its kernel's scratch
  bool operator==(const HeldBuffer&) const = default;
};
// What a device of the set keeps on a tier at the first moment of the peak of
// PeakMemory, the largest `most` buffers, largest first. All of them together
// are the peak; of files, but for the gaps of their layout.
std::vector<HeldBuffer> LargestAtPeak(const TaskGraph& tasks,
                                      const DeviceSet& devices, size_t most,
                                      MemoryTier tier = MemoryTier::kDevice);

// "1.23 GB parameter wte.weight, 310 MB gradient wte.weight, ...": for people
// whose plan does not fit.
std::string LargestAtPeakText(const TaskGraph& tasks, const Graph& graph,
                              const DeviceSet& devices,
                              MemoryTier tier = MemoryTier::kDevice,
                              size_t most = 5);

}  // namespace tessera
