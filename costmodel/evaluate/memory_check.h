#pragma once
// Whether a plan fits the memory of its devices and hosts.

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "planner/ir/cluster.h"
#include "planner/lower/lower.h"
#include "planner/lower/task_graph.h"
#include "planner/plan/evaluation.h"
#include "planner/plan/graph_index.h"
#include "planner/plan/plan.h"
#include "planner/plan/stages.h"

namespace tessera {

// AlikeDevices (memory/peak_memory.h), parted into devices of one type.
std::vector<DeviceSet> DeviceKinds(const Cluster& cluster,
                                   const TaskGraph& tasks);

// What the stack takes beside the values (memory/overhead.h): of one device of
// each set. `index` may be null where communicators take nothing.
void AddOverheads(const LoweringFacts& facts, const GraphIndex* index,
                  const Plan& plan, const std::vector<DeviceSet>& sets,
                  std::vector<MemoryUse>& memory);

// The devices of a set of `groups` by type and by where they are on axes with
// shares.
std::vector<DeviceSet> KindsByShare(const Cluster& cluster,
                                    std::span<const DeviceGroup> groups,
                                    const DeviceSet& set);

// What some devices of a set keep, the fullest of them by its own shards.
struct KindMemory {
  DeviceSet devices;
  MemoryUse memory;
};
// All devices of a set.
using MemoryByKind = std::function<std::vector<KindMemory>(const DeviceSet&)>;

// The node whose host lacks most of a tier, kHost or kFile, for what its ranks
// keep there by the memory of `result`; where devices are the host's cores,
// what they compute with lies there, too. Nothing where none lacks any.
struct HostLack {
  int node = 0;
  Bytes needed;
  Bytes has;
};
std::optional<HostLack> LackingHost(const Cluster& cluster, const Plan& plan,
                                    const Evaluation& result, MemoryTier tier);

// Adds that to the memory of a result, and to its violations and overflow what
// does not fit. The fullest device counts, but where shares are unequal smaller
// devices may have less: then each kind is looked at.
void CheckMemoryFits(const LoweringFacts& facts, const GraphIndex* index,
                     const Plan& plan, const MemoryByKind& memory_of,
                     Evaluation& result);

}  // namespace tessera
