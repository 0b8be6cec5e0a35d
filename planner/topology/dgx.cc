// NVIDIA's systems with NVSwitch.
//
// DGX A100: two GPUs and two compute NICs on each PCIe 4 switch (DGX A100
// System User Guide, 2020). DGX H100 to B200: one ConnectX-7 per GPU (their
// datasheets). GB200 NVL72: 72 GPUs in one NVLink domain, one 400 Gb/s NIC per
// GPU (datasheet, 2024); a node is the rack. B300 and GB300: one ConnectX-8 of
// 800 Gb/s per GPU (datasheets, 2025). HGX boards of A800, H800 and H20 as
// those of A100 and H100.

#include "planner/topology/nvswitch.h"
#include "planner/topology/rows.h"

namespace tessera {
namespace {

constexpr NvSwitchNode DgxA100(std::string_view device, std::string_view host) {
  return {.device = device,
          .nvlink = "nvlink3",
          .pcie = "pcie4-x16",
          .gpus_per_pcie_switch = 2,
          .gpus_per_nic = 1,
          .nic = "ib-hdr",
          .host = host};
}

constexpr NvSwitchNode OneNicPerGpu(std::string_view device, int gpus,
                                    std::string_view nvlink,
                                    std::string_view host) {
  return {.device = device,
          .gpus = gpus,
          .nvlink = nvlink,
          .pcie = "pcie5-x16",
          .gpus_per_pcie_switch = 1,
          .gpus_per_nic = 1,
          .nic = "ib-ndr",
          .host = host};
}

// With ConnectX-8, whose PCIe switch is of generation 6.
constexpr NvSwitchNode WithXdr(NvSwitchNode node) {
  node.pcie = "pcie6-x16";
  node.nic = "ib-xdr";
  return node;
}

}  // namespace

Result<Cluster> MakeDgxA100With40GB(int nodes, std::optional<int> gpus) {
  return MakeNvSwitchCluster(DgxA100("a100-sxm4-40gb", "dgx-a100-40gb"), nodes,
                             gpus);
}

Result<Cluster> MakeDgxA100With80GB(int nodes, std::optional<int> gpus) {
  return MakeNvSwitchCluster(DgxA100("a100-sxm4-80gb", "dgx-a100-80gb"), nodes,
                             gpus);
}

Result<Cluster> MakeDgxH100(int nodes, std::optional<int> gpus) {
  return MakeNvSwitchCluster(
      OneNicPerGpu("h100-sxm5-80gb", 8, "nvlink4", "dgx-h100"), nodes, gpus);
}

Result<Cluster> MakeDgxH200(int nodes, std::optional<int> gpus) {
  return MakeNvSwitchCluster(
      OneNicPerGpu("h200-sxm5-141gb", 8, "nvlink4", "dgx-h100"), nodes, gpus);
}

Result<Cluster> MakeDgxB200(int nodes, std::optional<int> gpus) {
  return MakeNvSwitchCluster(
      OneNicPerGpu("b200-sxm-180gb", 8, "nvlink5", "dgx-b200"), nodes, gpus);
}

Result<Cluster> MakeGb200Nvl72(int nodes, std::optional<int> gpus) {
  return MakeNvSwitchCluster(
      OneNicPerGpu("gb200-186gb", 72, "nvlink5-nvl72", "gb200-nvl72"), nodes,
      gpus);
}

Result<Cluster> MakeHgxA800(int nodes, std::optional<int> gpus) {
  NvSwitchNode node = DgxA100("a800-sxm4-80gb", "dgx-a100-80gb");
  node.nvlink = "nvlink3-x8";
  return MakeNvSwitchCluster(node, nodes, gpus);
}

Result<Cluster> MakeHgxH800(int nodes, std::optional<int> gpus) {
  return MakeNvSwitchCluster(
      OneNicPerGpu("h800-sxm5-80gb", 8, "nvlink4-x8", "dgx-h100"), nodes, gpus);
}

Result<Cluster> MakeHgxH20(int nodes, std::optional<int> gpus) {
  return MakeNvSwitchCluster(OneNicPerGpu("h20-96gb", 8, "nvlink4", "dgx-h100"),
                             nodes, gpus);
}

Result<Cluster> MakeDgxB300(int nodes, std::optional<int> gpus) {
  return MakeNvSwitchCluster(
      WithXdr(OneNicPerGpu("b300-sxm-288gb", 8, "nvlink5", "dgx-b200")), nodes,
      gpus);
}

Result<Cluster> MakeGb300Nvl72(int nodes, std::optional<int> gpus) {
  return MakeNvSwitchCluster(
      WithXdr(OneNicPerGpu("gb300-288gb", 72, "nvlink5-nvl72", "gb200-nvl72")),
      nodes, gpus);
}

}  // namespace tessera
