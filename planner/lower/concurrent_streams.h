#pragma once
// Whether all devices of a plan compute and communicate at the same time: then
// tasks have a stream for each of both, else one for all. Pure.

#include <algorithm>

#include "planner/ir/cluster.h"
#include "planner/plan/plan.h"

namespace tessera {

inline bool HasConcurrentStreams(const Cluster& cluster, const Plan& plan) {
  if (!cluster.stack.overlaps) return false;
  if (std::ranges::all_of(cluster.device_types,
                          &DeviceType::concurrent_streams)) {
    return true;
  }
  return std::ranges::all_of(plan.groups, [&](const DeviceGroup& group) {
    return std::ranges::all_of(group.devices, [&](DeviceId device) {
      return cluster.TypeOf(device).concurrent_streams;
    });
  });
}

}  // namespace tessera
