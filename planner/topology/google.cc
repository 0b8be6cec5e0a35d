// Google Cloud's A3 machines with eight H100 (Compute Engine GPU machine types,
// 2024). High: four network cards, one per pair of GPUs. Mega: eight.

#include "planner/topology/nvswitch.h"
#include "planner/topology/rows.h"

namespace tessera {

Result<Cluster> MakeA3High(int nodes, std::optional<int> gpus) {
  return MakeNvSwitchCluster({.device = "h100-sxm5-80gb",
                              .nvlink = "nvlink4",
                              .pcie = "pcie5-x16",
                              .gpus_per_pcie_switch = 2,
                              .gpus_per_nic = 2,
                              .nic = "tcpx-200g",
                              .host = "a3"},
                             nodes, gpus);
}

Result<Cluster> MakeA3Mega(int nodes, std::optional<int> gpus) {
  return MakeNvSwitchCluster({.device = "h100-sxm5-80gb",
                              .nvlink = "nvlink4",
                              .pcie = "pcie5-x16",
                              .gpus_per_pcie_switch = 1,
                              .gpus_per_nic = 1,
                              .nic = "tcpxo-200g",
                              .host = "a3"},
                             nodes, gpus);
}

}  // namespace tessera
