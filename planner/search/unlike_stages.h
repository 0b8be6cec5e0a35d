#pragma once
// Pipelines whose stages may be unlike, as a start of the search: in layers, in
// devices and in how these split a layer. An exact dynamic programme over the
// chain of blocks, as Alpa's (Zheng et al., OSDI 2022, section 5.2): of all
// ways to cut the blocks into stages, and the devices among these, one that
// takes the least
//
//   sum over stages of T(s) + (m - 1) max over stages of T(s)
//
// for m microbatches (a pipeline that fills, runs at the pace of its slowest
// stage, and drains), where each stage has room for its parameters and for the
// microbatches that it keeps.
//
// Estimates of blocks add up to a stage's, as on the first devices of the
// cluster; what stages send one another, and what of a stage's exchanges hides
// behind others' work, is left out. The plans are priced as any other. Clusters
// of unlike hosts or devices have no such estimates (LayerCosts), and so none.

#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "planner/search/mcmc.h"
#include "planner/search/objective.h"
#include "planner/search/search_space.h"

namespace tessera {

// How a stage may run on some devices.
struct StageOption {
  int units = 1;  // of devices
  int align = 1;  // its first unit is a multiple of this
  // By block, whether it may run so; empty: all may.
  std::vector<bool> may = {};
  std::vector<LayerCost> costs;  // by block
  // With all that runs again. Where memory lacks without, some of it does:
  // what saves a part p of those bytes is taken to take p^2 of that time (a
  // guess: operators that save most bytes for their time run again first).
  // Empty: none does.
  std::vector<LayerCost> again;
};

struct StageProblem {
  int units = 1;  // of devices, all of which are used
  int64_t microbatches = 1;
  double memory = 0;  // bytes of a device
  // Microbatches that a stage keeps, by stages from it to the end, itself
  // included.
  std::function<int(int)> in_flight;
  std::vector<StageOption> options;  // of as many blocks each
  double limit = std::numeric_limits<double>::infinity();  // picoseconds
};

// A stage: its last block's next, and its option.
struct StageCut {
  int end = 0;
  int option = 0;
};
struct StagesFound {
  std::vector<StageCut> stages;
  double time = 0;  // picoseconds
};

// Times of the slowest stage are tried in steps of this part of it: that far
// may an answer be from the best.
inline constexpr double kPaceStep = 0.01;

// For numbers of stages from 2 on that can do it in `limit` a way, the fastest
// first, which is the best of all. Ends early when `stop` says so, with what it
// has.
std::vector<StagesFound> CheapestStages(const StageProblem& problem,
                                        const std::function<bool()>& stop);

// Plans of this kind that fit, the best first: with the splits beside data and
// tensor parallelism of the first of `likely` uniform strategies that have a
// pipeline, microbatches and ZeRO near theirs, and the schedule that is best;
// with small microbatches and no other splits where none has one. `strategies`
// say what degrees of tensor parallelism, ZeRO stages and schedules there are.
// None that seem much slower than `than`. Empty for more than 256 blocks, and
// where devices cannot be dealt out in at most 64 equal units that divide a
// host or hold whole ones.
std::vector<FoundPlan> UnlikeStages(const SearchSpace& space,
                                    const Objective& objective,
                                    const std::vector<Strategy>& likely,
                                    const std::vector<Strategy>& strategies,
                                    const Score& than,
                                    const std::function<bool()>& stop);

}  // namespace tessera
