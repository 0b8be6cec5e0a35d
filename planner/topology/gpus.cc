#include "planner/topology/gpus.h"

#include <algorithm>
#include <array>

namespace tessera {
namespace {

constexpr std::array kGpus = {
    KnownGpu{"NVIDIA GB300", "gb300-288gb", "nvlink5-nvl72", 18, "gb300-nvl72"},
    KnownGpu{"NVIDIA B300 SXM6 AC", "b300-sxm-288gb", "nvlink5", 18,
             "dgx-b300"},
    KnownGpu{"NVIDIA GB200", "gb200-186gb", "nvlink5-nvl72", 18, "gb200-nvl72"},
    KnownGpu{"NVIDIA B200", "b200-sxm-180gb", "nvlink5", 18, "dgx-b200"},
    KnownGpu{"NVIDIA H200", "h200-sxm5-141gb", "nvlink4", 18, "dgx-h200"},
    KnownGpu{"NVIDIA H100 80GB HBM3", "h100-sxm5-80gb", "nvlink4", 18,
             "dgx-h100"},
    KnownGpu{"NVIDIA H800", "h800-sxm5-80gb", "nvlink4-x8", 8, "hgx-h800"},
    KnownGpu{"NVIDIA H20", "h20-96gb", "nvlink4", 18, "hgx-h20"},
    KnownGpu{"NVIDIA H100 PCIe", "h100-pcie-80gb", "", 0, "pcie-h100"},
    KnownGpu{"NVIDIA A800-SXM4-80GB", "a800-sxm4-80gb", "nvlink3-x8", 8,
             "hgx-a800"},
    KnownGpu{"NVIDIA A100 80GB PCIe", "a100-pcie-80gb", "", 0, "pcie-a100"},
    KnownGpu{"NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb", "nvlink3", 12,
             "dgx-a100-80gb"},
    KnownGpu{"NVIDIA A100-SXM4-40GB", "a100-sxm4-40gb", "nvlink3", 12,
             "dgx-a100-40gb"},
    KnownGpu{"NVIDIA A40", "a40-48gb", "", 0, "pcie-a40"},
    KnownGpu{"NVIDIA L40S", "l40s-48gb", "", 0, "pcie-l40s"},
    KnownGpu{"NVIDIA A10G", "a10g-24gb", "", 0, "g5.48xlarge"},
    KnownGpu{"NVIDIA L4", "l4-24gb", "", 0, "g6.48xlarge"},
    KnownGpu{"Tesla T4", "t4-16gb", "", 0, "g4dn.12xlarge"},
    KnownGpu{"Tesla V100-SXM2-32GB", "v100-sxm2-32gb", "nvlink2", 1,
             "dgx1-v100-32gb"},
    KnownGpu{"Tesla V100-SXM2-16GB", "v100-sxm2-16gb", "nvlink2", 1,
             "p3.16xlarge"},
    KnownGpu{"NVIDIA TITAN RTX", "titan-rtx-24gb", "nvlink2", 1,
             "titan-rtx-pair"},
    KnownGpu{"TITAN RTX", "titan-rtx-24gb", "nvlink2", 1, "titan-rtx-pair"},
    KnownGpu{"Tesla P100-SXM2-16GB", "p100-sxm2-16gb", "nvlink1", 1,
             "p100-edr"},
    KnownGpu{"Tesla K80", "k80-gk210-12gb", "", 0, "k80-fdr"},
};

}  // namespace

std::span<const KnownGpu> KnownGpus() {
  return kGpus;
}

const KnownGpu* FindGpu(std::string_view name) {
  const auto* const found = std::ranges::find(kGpus, name, &KnownGpu::name);
  return found == kGpus.end() ? nullptr : found;
}

}  // namespace tessera
