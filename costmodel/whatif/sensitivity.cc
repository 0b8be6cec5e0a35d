#include "costmodel/whatif/sensitivity.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "costmodel/whatif/degrade.h"
#include "costmodel/whatif/fabric.h"

namespace tessera {
namespace {

constexpr double kStep = 0.001;

Duration Divided(Duration time, double factor) {
  return Duration::FromSeconds(time.seconds() / factor);
}

bool ImproveFlops(double factor, Cluster& cluster) {
  for (DeviceType& type : cluster.device_types) {
    ScalePeaks(factor, type);
  }
  return true;
}

bool ImproveMemory(double factor, Cluster& cluster) {
  for (DeviceType& type : cluster.device_types) {
    type.memory_bandwidth = type.memory_bandwidth * factor;
  }
  return true;
}

bool ImproveLaunch(double factor, Cluster& cluster) {
  bool any = false;
  for (DeviceType& type : cluster.device_types) {
    any |= type.launch_overhead > Duration{};
    type.launch_overhead = Divided(type.launch_overhead, factor);
  }
  return any;
}

bool ImproveHostPerOperator(double factor, Cluster& cluster) {
  Stack& stack = cluster.stack;
  const bool any = stack.host_per_operator > Duration{};
  stack.host_per_operator = Divided(stack.host_per_operator, factor);
  return any;
}

template <LinkClass kClass>
bool ImproveBandwidth(double factor, Cluster& cluster) {
  return ScaleLinks(kClass, factor, 1, cluster);
}
template <LinkClass kClass>
bool ImproveLatency(double factor, Cluster& cluster) {
  return ScaleLinks(kClass, 1, 1 / factor, cluster);
}

bool ImproveHost(double factor, Cluster& cluster) {
  for (Host& host : cluster.hosts) {
    for (BytesPerSecond* rate : {&host.memory_bandwidth, &host.device_link,
                                 &host.storage_read, &host.storage_write}) {
      *rate = *rate * factor;
    }
  }
  return !cluster.hosts.empty();
}

constexpr std::string_view kIntra = "links within nodes";
constexpr std::string_view kInter = "links between nodes";

// Whether anything is kept off the devices.
bool UsesHost(const Plan& plan) {
  const auto away = [](MemoryTier tier) { return tier != MemoryTier::kDevice; };
  return std::ranges::any_of(
             plan.ops,
             [&](const OpPlacement& op) { return away(op.activation_tier); }) ||
         std::ranges::any_of(plan.weights, [&](const WeightPlacement& weight) {
           return away(weight.optimizer_tier) || away(weight.parameter_tier);
         });
}

}  // namespace

std::span<const Resource> Resources() {
  static constexpr std::array kTable = {
      Resource{"device.flops", "compute", ImproveFlops},
      Resource{"device.bandwidth", "memory bandwidth", ImproveMemory},
      Resource{"device.launch", "kernel launches", ImproveLaunch},
      Resource{"stack.host_seconds_per_operator", "kernel launches",
               ImproveHostPerOperator},
      Resource{"fabric.intra.bandwidth", kIntra,
               ImproveBandwidth<LinkClass::kIntra>},
      Resource{"fabric.intra.latency", kIntra,
               ImproveLatency<LinkClass::kIntra>},
      Resource{"fabric.pcie.bandwidth", "PCIe",
               ImproveBandwidth<LinkClass::kPcie>},
      Resource{"fabric.pcie.latency", "PCIe", ImproveLatency<LinkClass::kPcie>},
      Resource{"fabric.inter.bandwidth", kInter,
               ImproveBandwidth<LinkClass::kInter>},
      Resource{"fabric.inter.latency", kInter,
               ImproveLatency<LinkClass::kInter>},
      Resource{"host", "hosts and storage", ImproveHost},
  };
  return kTable;
}

Sensitivity SensitivityOf(const Graph& graph, const Cluster& cluster,
                          const Plan& plan, const Evaluator& evaluator,
                          const ProfileDb* profile,
                          const TrainingOptions& training) {
  const double usual = evaluator.Evaluate(plan).step_time.seconds();
  Sensitivity result;
  result.unexplained = 1;
  for (const Resource& resource : Resources()) {
    Cluster changed = cluster;
    if (!resource.improve(1 + kStep, changed)) continue;
    // The cluster that a profile is of has what is improved, too.
    std::optional<Cluster> whole;
    if (evaluator.whole() != nullptr) {
      whole = *evaluator.whole();
      resource.improve(1 + kStep, *whole);
    }
    double elasticity = 0;
    if (resource.improve != ImproveHost || UsesHost(plan)) {
      const double better =
          Evaluator(graph, changed, profile, training, Evaluator::kUnlimited,
                    whole ? &*whole : nullptr)
              .Evaluate(plan)
              .step_time.seconds();
      elasticity = std::log(usual / better) / std::log(1 + kStep);
    }
    result.resources.push_back({&resource, elasticity});
    result.unexplained -= elasticity;
  }
  return result;
}

}  // namespace tessera
