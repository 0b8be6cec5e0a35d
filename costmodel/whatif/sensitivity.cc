#include "costmodel/whatif/sensitivity.h"

#include <array>
#include <cmath>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/whatif/fabric.h"

namespace tessera {
namespace {

constexpr double kStep = 0.01;

Duration Divided(Duration time, double factor) {
  return Duration::FromSeconds(time.seconds() / factor);
}

bool ImproveFlops(double factor, Cluster& cluster) {
  for (DeviceType& type : cluster.device_types) {
    for (FlopsPerSecond* peak :
         {&type.peak_fp64, &type.peak_fp32, &type.peak_bf16, &type.peak_fp16,
          &type.peak_fp8, &type.peak_fp4}) {
      *peak = *peak * factor;
    }
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
  Stack& stack = cluster.stack;
  bool any = stack.host_per_operator > Duration{};
  stack.host_per_operator = Divided(stack.host_per_operator, factor);
  for (DeviceType& type : cluster.device_types) {
    any |= type.launch_overhead > Duration{};
    type.launch_overhead = Divided(type.launch_overhead, factor);
  }
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
  if (!cluster.host) return false;
  Host& host = *cluster.host;
  for (BytesPerSecond* rate : {&host.memory_bandwidth, &host.device_link,
                               &host.storage_read, &host.storage_write}) {
    *rate = *rate * factor;
  }
  return true;
}

constexpr std::string_view kIntra = "links within nodes";
constexpr std::string_view kInter = "links between nodes";

}  // namespace

std::span<const Resource> Resources() {
  static constexpr std::array kTable = {
      Resource{"device.flops", "compute", ImproveFlops},
      Resource{"device.bandwidth", "device memory", ImproveMemory},
      Resource{"device.launch", "kernel launches", ImproveLaunch},
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
                          const Plan& plan, const ProfileDb* profile,
                          const TrainingOptions& training) {
  Sensitivity result;
  result.unexplained = 1;
  for (const Resource& resource : Resources()) {
    const auto seconds = [&](double factor) {
      Cluster changed = cluster;
      if (!resource.improve(factor, changed)) return 0.0;
      return Evaluator(graph, changed, profile, training)
          .Evaluate(plan)
          .step_time.seconds();
    };
    const double better = seconds(1 + kStep);
    if (better == 0) continue;
    const double worse = seconds(1 / (1 + kStep));
    const double elasticity =
        std::log(worse / better) / (2 * std::log(1 + kStep));
    result.resources.push_back({&resource, elasticity});
    result.unexplained -= elasticity;
  }
  return result;
}

}  // namespace tessera
