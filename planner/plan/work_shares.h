#pragma once
// How work is shared among pipeline positions and among devices that are not
// equally fast.
//
// Functions without state; thread-safe.

#include <cstdint>
#include <span>
#include <vector>

#include "planner/ir/cluster.h"
#include "planner/plan/graph_index.h"
#include "planner/plan/plan.h"

namespace tessera {

// The first block of each position, for `positions` of at most as many blocks.
std::vector<int> StageStarts(const GraphIndex& index, int positions);
// The same for positions of such speeds, whose work over it is as equal as may
// be.
std::vector<int> StageStarts(const GraphIndex& index,
                             std::span<const double> speeds);

// FLOP/s that large products of the type reach on a device.
double SpeedOf(const Cluster& cluster, DeviceId device, DType dtype);
// That of the slowest of a group's.
double SlowestSpeed(const Cluster& cluster, const DeviceGroup& group,
                    DType dtype);
// Whether devices differ in it.
bool HasUnlikeSpeeds(const Cluster& cluster, DType dtype);

// How `units` are best shared among workers of such speeds: each has one at
// least, and what takes longest takes as short as may be. REQUIRES: as many
// units as workers.
std::vector<int> SharesBySpeed(int64_t units, std::span<const double> speeds);

// Shares as an axis has them (MeshAxis::shares): without a common divisor, and
// none where all are equal.
std::vector<int> ReducedShares(std::vector<int> shares);

}  // namespace tessera
