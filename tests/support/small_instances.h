#pragma once
// Problems small enough to enumerate all plans of: random chains of lookups and
// dense layers on two to four devices, sized so that compute, communication and
// memory matter alike. For tests of the search and of bounds.

#include <cstdint>
#include <optional>
#include <string>

#include "planner/ir/cluster.h"
#include "planner/ir/graph.h"
#include "tests/support/exhaustive.h"

namespace tessera::testing {

struct SmallInstance {
  std::string name;
  Graph graph;  // differentiated
  Cluster cluster;
};

// The instance of that number: always the same.
SmallInstance MakeSmallInstance(uint64_t number);

// The best of all plans, of one stage and of pipelines with every boundary
// between stages, that ForEachPlan visits; nothing where it goes through more
// than `limit`, valid or not, or none is valid. In its own placements nothing
// is recomputed, tiled or offloaded.
std::optional<ExhaustiveResult> BestOfAll(const SearchSpace& space,
                                          const Objective& objective,
                                          int64_t limit);

}  // namespace tessera::testing
