#include "runtime/kernels/relative_bias.h"

#include <cmath>

namespace tessera {

RelativeBuckets RelativeBucketsOf(const KernelCall& call, int64_t buckets) {
  RelativeBuckets result;
  result.causal = call.attribute("causal") != 0;
  const auto side = static_cast<int32_t>(result.causal ? buckets : buckets / 2);
  result.behind = result.causal ? 0 : side;
  const int32_t exact = side / 2;
  const double most = call.attribute("max_distance");
  for (int32_t distance = 0; distance <= static_cast<int32_t>(most);
       ++distance) {
    int32_t bucket = distance;
    if (distance >= exact) {
      // In fp32, as the published weights were trained.
      const float share =
          std::log(static_cast<float>(distance) / static_cast<float>(exact)) /
          static_cast<float>(std::log(most / exact)) *
          static_cast<float>(side - exact);
      bucket = std::min(exact + static_cast<int32_t>(share), side - 1);
    }
    result.of_distance.push_back(bucket);
  }
  return result;
}

}  // namespace tessera
