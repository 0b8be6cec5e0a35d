#pragma once
// How many devices hosts have, and what the fastest and the slowest do. Pure.

#include <algorithm>
#include <span>
#include <vector>

#include "planner/ir/cluster.h"

namespace tessera {

// By host.
inline std::vector<int> DevicesOfHosts(const Cluster& cluster) {
  std::vector<int> count(static_cast<size_t>(cluster.num_nodes()));
  for (const Device& device : cluster.devices) {
    ++count[static_cast<size_t>(device.node)];
  }
  return count;
}

// As many as a host has at most. REQUIRES: there are devices.
inline int MostDevicesOfHost(const Cluster& cluster) {
  return std::ranges::max(DevicesOfHosts(cluster));
}

// As many as nodes of each row of `cluster.hosts` have at most.
inline std::vector<double> MostDevicesByHost(const Cluster& cluster) {
  const std::vector<int> count = DevicesOfHosts(cluster);
  std::vector<double> most(cluster.hosts.size());
  if (most.empty()) return most;
  for (const Device& device : cluster.devices) {
    const DeviceType& type =
        cluster.device_types[static_cast<size_t>(device.type)];
    double& of_host = most[static_cast<size_t>(type.host)];
    of_host =
        std::max<double>(of_host, count[static_cast<size_t>(device.node)]);
  }
  return most;
}

// As few as a host has that has some. REQUIRES: there are devices.
inline int LeastDevicesOfHost(const Cluster& cluster) {
  std::vector<int> count = DevicesOfHosts(cluster);
  std::erase(count, 0);
  return std::ranges::min(count);
}

// With the best rates of all hosts. Zeros where there are none.
inline Host FastestHost(const Cluster& cluster) {
  Host best;
  for (const Host& host : cluster.hosts) {
    for (BytesPerSecond Host::*const rate :
         {&Host::memory_bandwidth, &Host::device_link, &Host::storage_read,
          &Host::storage_write}) {
      (best.*rate).value = std::max((best.*rate).value, (host.*rate).value);
    }
  }
  return best;
}

// What the devices' hosts wait for; zero where one does not know its own, or
// there are none.
inline BytesPerSecond SlowestOfHosts(const Cluster& cluster,
                                     std::span<const DeviceId> devices,
                                     BytesPerSecond Host::*rate) {
  if (cluster.hosts.empty()) return {};
  BytesPerSecond slowest = FastestHost(cluster).*rate;
  for (const DeviceId device : devices) {
    slowest.value =
        std::min(slowest.value, (cluster.HostOf(device).*rate).value);
  }
  return slowest;
}

}  // namespace tessera
