#pragma once
// Clusters and uniform plans by their texts, for tests whose texts are right.

#include <string>
#include <string_view>

#include "planner/base/check.h"
#include "planner/plan/strategy.h"
#include "planner/search/search_space.h"
#include "planner/topology/topologies.h"

namespace tessera::testing {

// That many ranks on one host.
inline Cluster Ranks(int count) {
  auto cluster = MakeCluster("local-cpu:" + std::to_string(count));
  TESSERA_CHECK(cluster.has_value()) << cluster.error().ToString();
  return *std::move(cluster);
}

inline Plan Uniform(const SearchSpace& space, std::string_view text) {
  const auto strategy = ParseStrategy(text);
  TESSERA_CHECK(strategy.has_value()) << strategy.error().ToString();
  auto plan = PlanFromStrategy(space.index, *space.cluster, *strategy);
  TESSERA_CHECK(plan.has_value()) << plan.error().ToString();
  return *std::move(plan);
}

}  // namespace tessera::testing
