#pragma once
// The devices of a strategy: a group for each stage, with the axes of its
// degrees, and which blocks each position of its pipeline has.
//
// Functions without state; thread-safe. REQUIRES everywhere: a strategy that is
// given is complete (Complete, strategy.h).

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "planner/ir/cluster.h"
#include "planner/plan/graph_index.h"
#include "planner/plan/plan.h"
#include "planner/plan/strategy.h"

namespace tessera {

// Begins the names of axes along which tensor ranks have other experts each.
inline constexpr std::string_view kFoldedAxes = "tpe";

// In which ranks are usually laid on the fabric, innermost dimension first; the
// default is the first of them.
std::span<const std::vector<MeshDimension>> UsualOrders();

// The samples of a microbatch over all replicas.
int64_t SamplesOf(const Strategy& strategy);

// Gives data axes ("dp…") across unlike devices shares of `samples`, those of
// one microbatch.
void ShareSamples(const Cluster& cluster, DType dtype, int64_t samples,
                  DeviceGroup& group);

// By stage, with the shares of data axes across unlike devices.
std::vector<DeviceGroup> GroupsOf(const GraphIndex& index,
                                  const Cluster& cluster,
                                  const Strategy& strategy);

// The first block of each position; `groups` are the strategy's.
std::vector<int> PositionStarts(const GraphIndex& index, const Cluster& cluster,
                                const Strategy& strategy,
                                const std::vector<DeviceGroup>& groups);

}  // namespace tessera
