#pragma once
// The last step of a search: plans that differ by chance made alike.

#include <functional>

#include "planner/search/objective.h"
#include "planner/search/search_space.h"

namespace tessera {

// A walk leaves equal blocks placed differently where that costs little. Gives
// them, stage by stage and then over the plan, the placements and ZeRO cuts
// of one of them wherever the plan gets no worse by it; then ZeRO to all
// weights alike. `evaluation` is that of `plan`, before and after. Ends as soon
// as `stop` says so (called before each evaluation, at least). Returns the
// number of evaluations. REQUIRES: `plan` is canonical.
int Tidy(const SearchSpace& space, const Objective& objective,
         const std::function<bool()>& stop, Plan& plan, Evaluation& evaluation);

}  // namespace tessera
