#pragma once
// Starts: where the chains of a search may begin (chain_starts.h says which
// does where). What people choose without a search, the best uniform
// strategies, those that fit once some of their work runs again, pipelines of
// unlike stages, and what the caller gives.

#include <cstdint>
#include <optional>
#include <vector>

#include "planner/search/baselines.h"
#include "planner/search/found_plan.h"
#include "planner/search/mcmc.h"
#include "planner/search/objective.h"
#include "planner/search/search_clock.h"

namespace tessera {

// Until which part of a time limit starting plans are looked for.
inline constexpr double kStartEnd = 0.4;

struct Starts {
  std::vector<Plan> given;  // the caller's
  // The best of all that was looked at, best first; where that loses on shared
  // links, what is best with them is in front.
  std::vector<FoundPlan> ranked;
  // The best uniform plan with a pipeline where ranked[0] has none, or without.
  std::optional<Plan> other;
  // The best of unlike stages that has a named schedule.
  std::optional<Plan> unlike;
  std::vector<Plan> baselines;

  // What was priced on the way, for the result.
  std::vector<Baseline> all_baselines;
  // Not by the sweep: baselines, the caller's, those that repeat all work,
  // those of unlike stages, and those in whose place others have orders of
  // actions made for them.
  std::vector<FoundPlan> priced;
  std::optional<FoundPlan> uniform;  // the best uniform plan, also on a part
  int64_t uniform_strategies = 0;    // that were looked at
  bool swept_all = false;  // whether there was time to find the best of them
};

// An error where no plan is valid at all; otherwise `ranked` has one.
Result<Starts> FindStarts(const SearchSpace& space, const Objective& objective,
                          const SearchOptions& options, SearchClock& clock);

}  // namespace tessera
