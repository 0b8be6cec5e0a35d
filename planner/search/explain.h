#pragma once
// Why a plan is as it is: each decision beside what else it could be, priced by
// the objective.
//
// Thread-safe, as the objective is.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "planner/plan/describe.h"
#include "planner/plan/strategy.h"
#include "planner/search/move.h"
#include "planner/search/objective.h"
#include "planner/search/search_space.h"

namespace tessera {

// Another choice in one decision, all else equal.
struct Alternative {
  std::string choice;  // "tp 4, dp 16"
  std::string with;    // what else differs, if anything: "mbs 8, sp"
  Strategy strategy;
  Score score;
};

struct Decision {
  std::string_view name;                  // "tensor parallelism"
  std::string chosen;                     // "tp 8, dp 8"
  std::vector<Alternative> alternatives;  // best first, one for each choice
  int invalid = 0;                        // choices that give no valid plan
};

// The decisions of a uniform plan that have a valid alternative: degrees of
// tensor, pipeline, context and expert parallelism (data parallelism makes up
// the devices, and where it makes up the ZeRO groups no more state is cut
// within nodes or over all), samples of a microbatch, ZeRO, recomputation,
// sequence parallelism, schedule, the order of ranks on the fabric and
// offloading. With each choice the microbatch is chosen anew. Calls `each`, if
// any, with each as soon as it is there. Ends when `stop` says so, with those
// that are complete.
std::vector<Decision> DecisionsOf(
    const SearchSpace& space, const Objective& objective,
    const Strategy& strategy, int threads, const std::function<bool()>& stop,
    const std::function<void(const Decision&)>& each = {});

// The uniform strategy that a plan is nearest to: its own, or that of most of
// its FLOPs and parameters. Nothing where that gives no valid plan.
std::optional<Strategy> NearestStrategy(const SearchSpace& space,
                                        const Plan& plan);

// What differs between two plans (ChangesBetween) and can be named: of plans
// that only details without a name tell apart, nothing.
std::vector<PlanDifference> NamedChanges(const SearchSpace& space,
                                         const Plan& from, const Plan& to);

// The best that one draw of a move leads to.
struct Neighbour {
  const Move* move = nullptr;
  Plan plan;
  Evaluation evaluation;
  std::vector<PlanDifference> changes;  // named, at least one
  int candidates = 0;                   // different plans that its draws led to
};

// Of `draws` draws of every move, best first; moves that do not apply, or lead
// to no plan that can be told by name and is evaluated otherwise than `plan`,
// are left out. Stops early when `stop` says so.
// REQUIRES: `plan` is canonical.
std::vector<Neighbour> NeighboursOf(const SearchSpace& space,
                                    const Objective& objective,
                                    const Plan& plan, int draws, uint64_t seed,
                                    const std::function<bool()>& stop);

// What people call it: "ZeRO-1 data parallelism (8) with tensor parallelism (8)
// inside the node and a pipeline of 4 stages". Of a plan that is not uniform
// the name of its nearest strategy, and that it differs.
std::string TextbookName(const SearchSpace& space, const Plan& plan);

}  // namespace tessera
