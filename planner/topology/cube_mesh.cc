// Eight V100 in the hybrid cube mesh of DGX-1 (NVIDIA DGX-1 with Tesla V100
// system architecture whitepaper, 2017), and its cloud twin p3.16xlarge. Each
// GPU has six NVLinks, so that some pairs have two, some one and some none; the
// latter meet over PCIe: two GPUs on a switch, two switches on each CPU.

#include <array>
#include <string_view>
#include <vector>

#include "planner/topology/fabric.h"
#include "planner/topology/hardware.h"
#include "planner/topology/rows.h"

namespace tessera {
namespace {

struct Pair {
  int a;
  int b;
  int nvlinks;
};

// As `nvidia-smi topo -m` prints on a DGX-1V: six NVLinks on each GPU.
constexpr std::array kCubeMesh = {
    Pair{0, 1, 1}, Pair{0, 2, 1}, Pair{0, 3, 2}, Pair{0, 4, 2},
    Pair{1, 2, 2}, Pair{1, 3, 1}, Pair{1, 5, 2}, Pair{2, 3, 2},
    Pair{2, 6, 1}, Pair{3, 7, 1}, Pair{4, 5, 1}, Pair{4, 6, 1},
    Pair{4, 7, 2}, Pair{5, 6, 2}, Pair{5, 7, 1}, Pair{6, 7, 2},
};

// `gpus` GPUs of node `n`, in `cluster`. `nic_per_switch`: a NIC on every PCIe
// switch (DGX-1), else one on the first CPU (p3).
std::vector<VertexId> AddCubeMesh(Cluster& cluster, int n, int gpus,
                                  std::string_view device,
                                  bool nic_per_switch) {
  const int type = UseDeviceType(cluster, device);
  const int one = UseLinkType(cluster, "nvlink2");
  const int two = UseLinkType(cluster, "nvlink2-x2");
  const int pcie = UseLinkType(cluster, "pcie3-x16");
  const int host = UseLinkType(cluster, "pcie3-host");

  std::vector<VertexId> nics;
  std::vector<VertexId> cpus;
  for (int c = 0; c < 2; ++c) {
    cpus.push_back(
        AddVertex(cluster, VertexKind::kBridge, InNode(n, "cpu", c)));
  }
  Connect(cluster, cpus[0], cpus[1], host);
  std::vector<VertexId> vertices;
  VertexId bridge;
  for (int g = 0; g < gpus; ++g) {
    const DeviceId id = AddDevice(cluster, type, n, InNode(n, "gpu", g));
    vertices.push_back(cluster.devices[id.index()].vertex);
    if (g % 2 == 0) {
      bridge =
          AddVertex(cluster, VertexKind::kBridge, InNode(n, "pcie", g / 2));
      Connect(cluster, bridge, cpus[static_cast<size_t>(g / 4)], host);
      if (nic_per_switch) {
        nics.push_back(
            AddVertex(cluster, VertexKind::kNic, InNode(n, "nic", g / 2)));
        Connect(cluster, nics.back(), bridge, pcie);
      }
    }
    Connect(cluster, vertices.back(), bridge, pcie);
  }
  for (const Pair& pair : kCubeMesh) {
    if (pair.a >= gpus || pair.b >= gpus) continue;
    Connect(cluster, vertices[static_cast<size_t>(pair.a)],
            vertices[static_cast<size_t>(pair.b)],
            pair.nvlinks == 2 ? two : one);
  }
  if (!nic_per_switch) {
    nics.push_back(AddVertex(cluster, VertexKind::kNic, InNode(n, "nic")));
    Connect(cluster, nics.back(), cpus[0], pcie);
  }
  return nics;
}

Cluster MakeCubeMesh(int nodes, std::optional<int> gpus,
                     std::string_view device, bool nic_per_switch,
                     std::string_view nic_link, std::string_view host) {
  Cluster cluster;
  cluster.hosts = {HostOf(host)};
  std::vector<std::vector<VertexId>> nics;
  for (int n = 0; n < nodes; ++n) {
    nics.push_back(
        AddCubeMesh(cluster, n, gpus.value_or(8), device, nic_per_switch));
  }
  ConnectRails(cluster, nics, nic_link);
  return cluster;
}

}  // namespace

Result<Cluster> MakeDgx1V100(int nodes, std::optional<int> gpus) {
  return MakeCubeMesh(nodes, gpus, "v100-sxm2-32gb", true, "ib-edr",
                      "dgx1-v100");
}

Result<Cluster> MakeP3(int nodes, std::optional<int> gpus) {
  return MakeCubeMesh(nodes, gpus, "v100-sxm2-16gb", false, "ena-25g",
                      "p3.16xlarge");
}

}  // namespace tessera
