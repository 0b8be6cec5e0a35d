#include "planner/topology/upkeep.h"

#include <algorithm>
#include <array>
#include <string>

#include "planner/base/append.h"

namespace tessera {
namespace {

struct Power {
  std::string_view device;
  double watts;
  std::string_view source;
};

// What a board may draw: "TDP" or "maximum power" of the datasheets, without
// the host, the network and cooling.
constexpr std::array kPower = {
    Power{"a100-sxm4-40gb", 400, "NVIDIA A100 datasheet (2020)"},
    Power{"a100-sxm4-80gb", 400, "NVIDIA A100 datasheet (2021)"},
    Power{"h100-sxm5-80gb", 700, "NVIDIA H100 datasheet (2023)"},
    Power{"h200-sxm5-141gb", 700, "NVIDIA H200 datasheet (2024)"},
    Power{"b200-sxm-180gb", 1000, "NVIDIA Blackwell datasheet (2024)"},
    Power{"gb200-186gb", 1200, "NVIDIA Blackwell datasheet (2024)"},
    Power{"b300-sxm-288gb", 1100, "announcement of HGX B300 (2025), unchecked"},
    Power{"gb300-288gb", 1400, "glennklockwood.com, processors/B300 (2025)"},
    Power{"a800-sxm4-40gb", 400, "as A100"},
    Power{"a800-sxm4-80gb", 400, "as A100"},
    Power{"h800-sxm5-80gb", 700, "as H100"},
    Power{"h100-sxm5-96gb", 500,
          "torchtitan's benchmarks of Meta's Grand Teton (2024)"},
    Power{"v100-sxm2-16gb", 300, "NVIDIA V100 datasheet (2018)"},
    Power{"v100-sxm2-32gb", 300, "NVIDIA V100 datasheet (2018)"},
    Power{"a100-pcie-40gb", 250, "NVIDIA A100 datasheet (2021)"},
    Power{"a100-pcie-80gb", 300, "NVIDIA A100 datasheet (2021)"},
    Power{"a40-48gb", 300, "NVIDIA A40 datasheet (2021)"},
    Power{"l40s-48gb", 350, "NVIDIA L40S datasheet (2023)"},
    Power{"h100-pcie-80gb", 350, "NVIDIA H100 datasheet (2023)"},
    Power{"h100-nvl-94gb", 400, "NVIDIA H100 datasheet (2023)"},
    Power{"v100-pcie-16gb", 250, "NVIDIA V100 datasheet (2018)"},
    Power{"v100-pcie-32gb", 250, "NVIDIA V100 datasheet (2018)"},
    Power{"p100-pcie-16gb", 250, "NVIDIA P100 datasheet (2016)"},
    Power{"rtx-3090-24gb", 350, "NVIDIA RTX 3090 product page (2020)"},
    Power{"rtx-4090-24gb", 450, "NVIDIA RTX 4090 product page (2022)"},
    Power{"titan-rtx-24gb", 280, "NVIDIA TITAN RTX product page (2018)"},
    Power{"l4-24gb", 72, "NVIDIA L4 datasheet (2023)"},
    Power{"t4-16gb", 70, "NVIDIA T4 datasheet (2018)"},
    Power{"p100-sxm2-16gb", 300, "NVIDIA P100 datasheet (2016)"},
    Power{"k80-gk210-12gb", 150,
          "NVIDIA K80 datasheet (2014), half of the board's 300 W"},
};

struct Instance {
  std::string_view topology;
  std::string_view device;
  int gpus;
  double price;  // USD/h; 0: not known
};

// AWS's. Prices: on demand, Linux, us-east-1, at the instances' launch (AWS's
// announcements; prices fall later).
constexpr std::array kInstances = {
    Instance{"p3.16xlarge", "v100-sxm2-16gb", 8, 24.48},
    Instance{"p4d.24xlarge", "a100-sxm4-40gb", 8, 32.77},
    Instance{"p5.48xlarge", "h100-sxm5-80gb", 8, 98.32},
    Instance{"p5en.48xlarge", "h200-sxm5-141gb", 8, 0},
    Instance{"p6-b200.48xlarge", "b200-sxm-180gb", 8, 0},
    Instance{"g4dn.12xlarge", "t4-16gb", 4, 3.912},
    Instance{"g5.48xlarge", "a10g-24gb", 8, 16.288},
    Instance{"g6.48xlarge", "l4-24gb", 8, 13.35},
};

// Llama Team, "The Llama 3 Herd of Models" (2024), table 5: 419 unexpected
// interruptions in 54 days on 16,384 GPUs.
constexpr std::string_view kHopper = "h100-sxm5-80gb";
constexpr double kHopperMtbf = 54.0 * 86400 * 16384 / 419;

}  // namespace

double BoardWatts(std::string_view device) {
  const auto* const power = std::ranges::find(kPower, device, &Power::device);
  TESSERA_CHECK(power != kPower.end()) << device;
  return power->watts;
}

void SetUpkeep(std::string_view topology, Cluster& cluster) {
  for (DeviceType& type : cluster.device_types) {
    Upkeep& upkeep = type.upkeep;
    const auto power = std::ranges::find(kPower, type.name, &Power::device);
    if (power != kPower.end()) {
      upkeep.power = power->watts;
      AppendTo(upkeep.source, "; ", "power of the board: ");
      upkeep.source += power->source;
    }
    const auto instance =
        std::ranges::find(kInstances, topology, &Instance::topology);
    if (instance != kInstances.end() && instance->price > 0) {
      upkeep.price = instance->price / instance->gpus;
      AppendTo(
          upkeep.source, "; ",
          "price: AWS on demand, us-east-1, at the launch of the instance");
    }
    if (type.name == kHopper) {
      upkeep.mtbf = kHopperMtbf;
      AppendTo(upkeep.source, "; ",
               "failures: Llama 3 (2024), 419 in 54 days on 16,384 GPUs");
    }
  }
}

int InstanceDevices(std::string_view topology, std::string_view device) {
  const auto instance =
      std::ranges::find_if(kInstances, [&](const Instance& row) {
        return row.topology == topology && row.device == device;
      });
  return instance == kInstances.end() ? 0 : instance->gpus;
}

}  // namespace tessera
