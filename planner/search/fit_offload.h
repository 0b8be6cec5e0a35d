#pragma once
// Partly offloaded plans: uniform plans that would be fast but for the memory
// that they lack, with the optimizer state of as many weights in the host's
// memory, or in files, as makes them fit. Strategies have the state of all
// weights there, or of none; what the host updates takes about as long for each
// byte, so that a plan that lacks little loses little.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "planner/plan/strategy.h"
#include "planner/search/found_plan.h"
#include "planner/search/objective.h"
#include "planner/search/search_space.h"

namespace tessera {

// `plan` with the optimizer states of some weights on the host, of so few
// elements as each device set that lacks memory needs, and their gradients
// besides where that is faster. What the host has no room for is in files.
// Nothing where that does not make it fit, and perhaps where `stop` says so.
// REQUIRES: it is canonical.
std::optional<FoundPlan> FitByOffloading(const SearchSpace& space,
                                         const Objective& objective,
                                         const Plan& plan,
                                         const std::function<bool()>& stop);

// Plans fitted so, each better than those behind it and than `than`: of those
// of `strategies`, which offload nothing, that seem the fastest, `tried` at
// most. Each is simulated a few times: those of more than `most_operators`,
// each of every microbatch, are left out. Guesses which these are on so many
// threads, until `stop_guessing`, which may be empty, says so; stops early when
// `stop` does. All threads ask these and `objective`. Otherwise the same on any
// number of threads.
std::vector<FoundPlan> PartlyOffloaded(
    const SearchSpace& space, const Objective& objective,
    const std::vector<Strategy>& strategies, size_t tried,
    int64_t most_operators, Score than, int threads,
    const std::function<bool()>& stop,
    const std::function<bool()>& stop_guessing = nullptr);

}  // namespace tessera
