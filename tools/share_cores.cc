#include "tools/share_cores.h"

#include <algorithm>

#include "planner/base/format.h"

namespace tessera {

void ShareCores(Cluster& cluster, int cores, int threads) {
  const auto ranks = static_cast<double>(cluster.devices.size());
  const double share = std::min<double>(threads, cores / ranks);
  if (share == 1) return;
  for (DeviceType& type : cluster.device_types) {
    type.source += "; times " + FormatNumber(share) +
                   ", which a rank has of the host's " + std::to_string(cores) +
                   " cores";
    for (FlopsPerSecond* peak :
         {&type.peak_fp64, &type.peak_fp32, &type.peak_bf16, &type.peak_fp16}) {
      peak->value *= share;
    }
    type.memory_bandwidth.value *= share;
  }
}

}  // namespace tessera
