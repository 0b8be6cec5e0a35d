#pragma once
// The cheapest way to cut a chain of blocks into stages and deal the devices
// out among these: an exact dynamic programme, as Alpa's (Zheng et al., OSDI
// 2022, section 5.2). Of all ways one that takes the least
//
//   sum over stages of T(s) + (m - 1) max over stages of T(s)
//
// for m microbatches (a pipeline that fills, runs at the pace of its slowest
// stage, and drains), where each stage has room for its parameters and for the
// microbatches that it keeps. Blocks' times and bytes add up to a stage's.

#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "planner/search/objective.h"

namespace tessera {

// How a stage may run on some devices.
struct StageOption {
  int units = 1;        // of devices
  uint64_t begins = 0;  // a bit for each that may be its first
  double memory = 0;    // bytes of a device, the least
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
  int units = 1;  // of devices, all of which are used; 64 at most
  int64_t microbatches = 1;
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

// What no stages take less than; without end where there are no options.
double LeastTime(const StageProblem& problem);

// For numbers of stages from 2 on that can do it in `limit` a way, the fastest
// first, which is the best of all. Ends early when `stop` says so, with what it
// has.
std::vector<StagesFound> CheapestStages(const StageProblem& problem,
                                        const std::function<bool()>& stop);

}  // namespace tessera
