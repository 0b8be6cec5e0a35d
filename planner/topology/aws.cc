// Amazon EC2's instances with NVSwitch. p4d: four NICs, one per pair of GPUs on
// a PCIe switch. p5: 32 NICs, four per GPU, over which the NCCL plugin stripes
// every transfer, so that they are one link here (EC2 accelerated computing
// pages, 2023).

#include "planner/topology/nvswitch.h"
#include "planner/topology/rows.h"

namespace tessera {

Result<Cluster> MakeP4d(int nodes, std::optional<int> gpus) {
  return MakeNvSwitchCluster({.device = "a100-sxm4-40gb",
                              .nvlink = "nvlink3",
                              .pcie = "pcie4-x16",
                              .gpus_per_pcie_switch = 2,
                              .gpus_per_nic = 2,
                              .nic = "efa-100g",
                              .host = "p4d.24xlarge"},
                             nodes, gpus);
}

Result<Cluster> MakeP5(int nodes, std::optional<int> gpus) {
  return MakeNvSwitchCluster({.device = "h100-sxm5-80gb",
                              .nvlink = "nvlink4",
                              .pcie = "pcie5-x16",
                              .gpus_per_pcie_switch = 1,
                              .gpus_per_nic = 1,
                              .nic = "efa-4x100g",
                              .host = "p5.48xlarge"},
                             nodes, gpus);
}

}  // namespace tessera
