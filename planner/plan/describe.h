#pragma once
// A plan and its parts in words, for people, and what differs between two
// plans.
//
// Functions without state; thread-safe.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "planner/plan/graph_index.h"
#include "planner/plan/plan.h"

namespace tessera {

// The plan in words for people, several lines: stages with their devices, runs
// of equal blocks and how they are split, ZeRO, schedule and microbatches.
std::string Describe(const Graph& graph, const Cluster& cluster,
                     const Plan& plan);

// Of how much of the whole something is: " for 28% of the parameters", where
// `what` are "parameters"; empty of all of them. REQUIRES: a positive total.
std::string ShareText(int64_t count, int64_t total, std::string_view what);

// One thing that two plans have otherwise.
struct PlanDifference {
  std::string what;  // "h.0 … h.11 (12)", "microbatches"
  std::string from;
  std::string to;
};

// What differs, coarse before fine; runs of equal blocks with one difference
// are one row. Empty for plans that are equal but for the names of groups, axes
// and cluster. REQUIRES: both are valid plans of the index's graph.
std::vector<PlanDifference> ChangesBetween(const GraphIndex& index,
                                           const Cluster& cluster,
                                           const Plan& from, const Plan& to);

}  // namespace tessera
