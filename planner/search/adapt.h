#pragma once
// Plans for a cluster from one that was made for another: machines came, went
// or were replaced.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "planner/plan/strategy.h"
#include "planner/search/search_space.h"

namespace tessera {

// What a plan of any cluster is nearest to, by most of its FLOPs and
// parameters. Degrees are of the plan's own devices.
Strategy RoughStrategy(const GraphIndex& index, const Plan& plan);

// As in planner/plan/idle_keys.h, for who needs no notes.
Strategy WithoutIdleKeys(const SearchSpace& space, const Strategy& strategy);

// `plan`, which was made for `from` samples a step, for `to`: with microbatches
// of as nearly as many samples as they divide. A table of actions is of so many
// microbatches: of others the stages run 1f1b, or of several chunks
// interleaved.
Plan ForBatch(Plan plan, int64_t from, int64_t to);

// Up to `count` valid plans near `old` that the space's constraints allow, the
// nearest first: itself where it is one, then uniform plans with its ZeRO,
// recomputation, schedule (as far as they have an effect) and (as nearly as the
// batch divides) microbatch, by how far their degrees are from its own: the sum
// of |log(new / old)| over tp, pp, cp and ep. REQUIRES: `old` is a plan of the
// same graph.
std::vector<Plan> AdaptedPlans(const SearchSpace& space, const Plan& old,
                               size_t count);

// The nearest uniform strategy of the cluster's degrees that is a pipeline as
// `rough` is, or none as it is: first by how far the number of stages is from
// its own, then by the other degrees; with as many microbatches, as nearly as
// the batch divides. Context parallelism may take the place of
// data parallelism that the batch does not divide by. Nothing where none of the
// kind is valid.
std::optional<Strategy> NearestOfItsKind(const SearchSpace& space,
                                         const Strategy& rough);

}  // namespace tessera
