#pragma once
// Sensitivity: by how many per cent a step gets shorter for each per cent that
// a resource gets better, all else and the plan being equal.
//
// The elasticity -d ln(T) / d ln(r), by an improvement of 0.1 % through the
// evaluator, which leaves out the time lost on shared links. A step's time is a
// sum of works over rates and of latencies, so it is homogeneous of degree -1
// in all resources together: by Euler's theorem their elasticities add up to 1,
// but for times that no resource scales (a profile's measurements, constants of
// a protocol), which is `unexplained`.

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/profile/profile_db.h"
#include "planner/ir/cluster.h"
#include "planner/ir/graph.h"
#include "planner/plan/plan.h"

namespace tessera {

struct Resource {
  std::string_view name;  // a path, or "host"
  std::string_view part;  // what a bottleneck is called: "links between nodes"
  // Makes it better by `factor`; false where the cluster does not have it.
  bool (*improve)(double factor, Cluster& cluster);
};
std::span<const Resource> Resources();

struct Elasticity {
  const Resource* resource = nullptr;
  double value = 0;
};

struct Sensitivity {
  std::vector<Elasticity> resources;  // in the order of Resources()
  double unexplained = 0;
};
// REQUIRES: `plan` is valid on `cluster`, and `evaluator` is of these.
// `profile` may be null.
Sensitivity SensitivityOf(const Graph& graph, const Cluster& cluster,
                          const Plan& plan, const Evaluator& evaluator,
                          const ProfileDb* profile,
                          const TrainingOptions& training);

}  // namespace tessera
