#pragma once
// Pipelines whose stages may be unlike, as a start of the search: in layers, in
// devices and in how these split a layer. The cheapest cuts (stage_cuts.h) by
// estimates of the blocks, of unlike devices on those where a stage lies, or
// else on the first of the cluster; what stages send one another, and what of a
// stage's exchanges hides behind others' work, is left out. Stages follow each
// other on the devices as the cluster lists them, on unlike ones also from the
// last to the first. The plans are priced as any other.

#include <functional>
#include <vector>

#include "planner/search/found_plan.h"
#include "planner/search/objective.h"
#include "planner/search/search_space.h"

namespace tessera {

// Plans of this kind that fit, the best first: with the splits beside data and
// tensor parallelism of the first of `likely` uniform strategies that have a
// pipeline, ZeRO near theirs, microbatches of any size, those near theirs
// first, and the schedule that is best; with small microbatches and no other
// splits where none has one. `strategies` say what degrees of tensor
// parallelism, ZeRO stages and schedules there are. None that seem much slower
// than `than`. Empty for more than 256 blocks, and where devices cannot be
// dealt out in at most 64 equal units that divide a host or hold whole ones.
// The same on any number of threads, which all ask `stop`.
std::vector<FoundPlan> UnlikeStages(const SearchSpace& space,
                                    const Objective& objective,
                                    const std::vector<Strategy>& likely,
                                    const std::vector<Strategy>& strategies,
                                    const Score& than, int threads,
                                    const std::function<bool()>& stop);

}  // namespace tessera
