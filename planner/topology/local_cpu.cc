// Ranks on the cores of one host, which exchange data by copies through shared
// memory. The copies of all ranks pass one link: the host's memory. The figures
// are fallbacks (hardware.cc), the same on every host.

#include "planner/topology/fabric.h"
#include "planner/topology/hardware.h"
#include "planner/topology/rows.h"

namespace tessera {

Result<Cluster> MakeLocalCpu(int ranks, std::optional<int>) {
  Cluster cluster;
  cluster.hosts = {HostOf("local-cpu")};
  const int device = UseDeviceType(cluster, "cpu-core");
  const int copy = UseLinkType(cluster, "shm-copy");
  const int memory = UseLinkType(cluster, "shm-memory");
  const VertexId in =
      AddVertex(cluster, VertexKind::kBridge, InNode(0, "memory.in"));
  const VertexId out =
      AddVertex(cluster, VertexKind::kBridge, InNode(0, "memory.out"));
  cluster.links.push_back({in, out, memory});
  for (int r = 0; r < ranks; ++r) {
    const DeviceId id = AddDevice(cluster, device, 0, InNode(0, "cpu", r));
    const VertexId cpu = cluster.devices[id.index()].vertex;
    cluster.links.push_back({cpu, in, copy});
    cluster.links.push_back({out, cpu, copy});
  }
  return cluster;
}

}  // namespace tessera
