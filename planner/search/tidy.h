#pragma once
// The last step of a search: plans that differ by chance made alike.

#include <functional>

#include "planner/search/objective.h"
#include "planner/search/search_space.h"

namespace tessera {

// A walk leaves differences where they cost little. Takes back, wherever the
// plan gets no worse by it: equal blocks placed and cut differently, stage by
// stage and then over the plan; operators split otherwise than most blocks of
// their group; what runs again in backward; an order of actions or a schedule
// that a plainer one is as fast as; weights cut otherwise than most
// parameters; and sizes of buckets, prefetching, zigzag and tiles. `evaluation`
// is that of `plan`, before and after. Ends as soon as `stop` says so (called
// before each evaluation, at least). Of each kind of difference `keeps`, which
// may be empty, says at last whether the plan without them may stay. Returns
// the number of evaluations. REQUIRES: `plan` is canonical.
int Tidy(const SearchSpace& space, const Objective& objective,
         const std::function<bool()>& stop, Plan& plan, Evaluation& evaluation,
         const std::function<bool(const Plan&)>& keeps = nullptr);

}  // namespace tessera
