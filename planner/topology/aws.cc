// Amazon EC2's instances with NVSwitch. p4d: four NICs, one per pair of GPUs on
// a PCIe switch. p5: 32 NICs, four per GPU, over which the NCCL plugin stripes
// every transfer, so that they are one link here. p5en: 16 NICs, two per GPU,
// striped alike; p6-b200: one NIC per GPU (EC2 accelerated computing pages,
// 2023 to 2025).

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

Result<Cluster> MakeP5en(int nodes, std::optional<int> gpus) {
  return MakeNvSwitchCluster({.device = "h200-sxm5-141gb",
                              .nvlink = "nvlink4",
                              .pcie = "pcie5-x16",
                              .gpus_per_pcie_switch = 1,
                              .gpus_per_nic = 1,
                              .nic = "efa-2x200g",
                              .host = "p5en.48xlarge"},
                             nodes, gpus);
}

Result<Cluster> MakeP6B200(int nodes, std::optional<int> gpus) {
  return MakeNvSwitchCluster({.device = "b200-sxm-180gb",
                              .nvlink = "nvlink5",
                              .pcie = "pcie5-x16",
                              .gpus_per_pcie_switch = 1,
                              .gpus_per_nic = 1,
                              .nic = "efa-400g",
                              .host = "p5en.48xlarge"},
                             nodes, gpus);
}

}  // namespace tessera
