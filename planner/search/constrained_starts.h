#pragma once
// Plans that the space's constraints allow, made of those that they do not, and
// what these take operators from: what constraints leave may have nothing
// uniform.

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "planner/base/rng.h"
#include "planner/plan/strategy.h"
#include "planner/search/search_space.h"

namespace tessera {

// Plans that give operators a split: of strategies that differ in more than
// microbatches and the schedule, and others. To take single operators from:
// constraints need not allow them, and some are not valid as a whole. None
// where nothing is fixed.
std::vector<Plan> GivingPlans(const SearchSpace& space,
                              const std::vector<Strategy>& strategies,
                              const std::function<bool()>& stop);

// `plan` with the operators of each fixed key placed as in a `uniform` plan on
// the same devices that has the key, in as few microbatches as are allowed
// where its own number is not; nothing where the constraints do not allow that.
std::optional<Plan> WithFixed(const SearchSpace& space, Plan plan,
                              std::span<const Plan> uniform,
                              const std::function<bool()>& stop);

// A plan that the constraints allow, by random moves from `plan` of which none
// breaks more of them; nothing where none is found.
std::optional<Plan> Repaired(const SearchSpace& space, Plan plan, Rng& rng,
                             const std::function<bool()>& stop);

}  // namespace tessera
