#pragma once
// What `search` and `explain --which-strategy` tell a search alike.

#include "planner/search/mcmc.h"
#include "tools/options.h"

namespace tessera {

// Seed, chains, threads and limits: --proposals, --time-limit, or without both
// kDefaultSearchTime. Of nothing (0 proposals, 0 seconds) there is a search as
// well, of the starting plans.
inline constexpr double kDefaultSearchTime = 10;  // seconds
// Zero means no limit to the search, and no time at all to the user.
inline constexpr double kNoTime = 1e-9;
SearchOptions SearchOptionsOf(const Options& options);

}  // namespace tessera
