#include "costmodel/whatif/jitter.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/whatif/degrade.h"
#include "planner/base/rng.h"

namespace tessera {
namespace {

// Of a group's devices of one type the slowest counts, so all of them may have
// that one's factor: a type for each group and type instead of one for each
// device. Not where groups share devices.
bool Disjoint(const Plan& plan, size_t devices) {
  std::vector<bool> seen(devices, false);
  for (const DeviceGroup& group : plan.groups) {
    for (const DeviceId device : group.devices) {
      if (seen[device.index()]) return false;
      seen[device.index()] = true;
    }
  }
  return true;
}

Cluster Shaken(const Cluster& cluster, const Plan& plan, bool disjoint,
               const std::vector<double>& factors) {
  Cluster shaken = cluster;
  if (!disjoint) {
    for (size_t d = 0; d < factors.size(); ++d) {
      SlowDown({DeviceId(static_cast<int64_t>(d))}, factors[d], shaken);
    }
    return shaken;
  }
  for (const DeviceGroup& group : plan.groups) {
    std::map<int, std::vector<DeviceId>> of_type;
    for (const DeviceId device : group.devices) {
      of_type[cluster.devices[device.index()].type].push_back(device);
    }
    for (const auto& [type, devices] : of_type) {
      double slowest = 0;
      for (const DeviceId device : devices) {
        slowest = std::max(slowest, factors[device.index()]);
      }
      SlowDown(devices, slowest, shaken);
    }
  }
  return shaken;
}

double Quantile(const std::vector<double>& sorted, double share) {
  const auto rank = static_cast<size_t>(
      std::ceil(share * static_cast<double>(sorted.size())));
  return sorted[std::max<size_t>(rank, 1) - 1];
}

}  // namespace

Jitter JitterOf(const Case& of, const Plan& plan, const PredictOptions& predict,
                const JitterOptions& options) {
  const bool disjoint = Disjoint(plan, of.cluster.devices.size());
  std::vector<double> times;
  for (int s = 0; s < options.samples; ++s) {
    if (s > 0 && predict.watch.stopped()) break;
    predict.watch.Tell(std::to_string(s) + " of " +
                       std::to_string(options.samples) + " jittered steps");
    const uint64_t key = Mix64(options.seed ^ Mix64(static_cast<uint64_t>(s)));
    std::vector<double> factors;
    for (size_t d = 0; d < of.cluster.devices.size(); ++d) {
      const double z = std::clamp(CounterNormal(key, d), -3.0, 3.0);
      factors.push_back(std::max(0.1, 1 + options.sigma * z));
    }
    const Cluster cluster = Shaken(of.cluster, plan, disjoint, factors);
    times.push_back(Evaluator(*of.graph, cluster, predict.profile,
                              predict.training, Evaluator::kUnlimited,
                              of.whole.get())
                        .Evaluate(plan)
                        .step_time.seconds());
  }
  std::ranges::sort(times);
  Jitter jitter;
  jitter.samples = static_cast<int>(times.size());
  jitter.p50 = Quantile(times, 0.5);
  jitter.p95 = Quantile(times, 0.95);
  for (const double time : times) jitter.mean += time / jitter.samples;
  return jitter;
}

}  // namespace tessera
