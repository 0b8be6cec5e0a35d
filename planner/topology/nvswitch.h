#pragma once
// Nodes whose GPUs all meet at one NVSwitch: the shape of DGX A100 and later,
// of their cloud twins and of NVL72 racks.

#include <optional>
#include <string_view>

#include "planner/ir/cluster.h"

namespace tessera {

struct NvSwitchNode {
  std::string_view device;
  int gpus = 8;
  std::string_view nvlink;   // between a GPU and the NVSwitch
  std::string_view pcie;     // between GPU or NIC and their PCIe switch
  int gpus_per_pcie_switch;  // consecutive GPUs
  int gpus_per_nic;          // consecutive GPUs; divides gpus_per_pcie_switch
  std::string_view nic;      // between a NIC and its leaf switch
  std::string_view host;     // of HostOf
};

// The first `gpus_per_node` GPUs of each of `nodes` nodes, with their own
// PCIe switches and NICs. REQUIRES: as Topology::make.
Cluster MakeNvSwitchCluster(const NvSwitchNode& node, int nodes,
                            std::optional<int> gpus_per_node);

}  // namespace tessera
