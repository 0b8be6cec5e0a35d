#pragma once
// Sweep: the best of a list of uniform strategies, as if all were priced.
//
// Every strategy gets a loose bound (Objective::BoundUniform). In the order of
// the bounds strategies get quick ones, then close ones, and where these are
// still first, their price, until the next bound is no better than what was
// found: no strategy behind it can be among the best, since no score is better
// than its bound (best-first branch and bound; Land and Doig, 1960).
//
// Where bounds take as long as prices, the same goes before by estimates
// (Objective::EstimateUniform): it finds good strategies early, and that they
// are the best is found out behind.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "planner/plan/strategy.h"
#include "planner/search/objective.h"
#include "planner/search/search_space.h"

namespace tessera {

// A strategy that gives a valid plan.
struct Candidate {
  Strategy strategy;
  Score score;
};

struct SweepResult {
  // The best first; of equal ones the earlier in the list.
  std::vector<Candidate> best;
  int64_t bounded = 0;    // strategies that were looked at
  int64_t closely = 0;    // of these, those that got a close bound
  int64_t priced = 0;     // of these, those whose plans were priced
  bool complete = false;  // nothing stopped it before the best were found
};

// The `count` best of `strategies` that give valid plans, or all where there
// are fewer. Stops early when `stop`, which may be empty, says so (called from
// any thread): then the result is the best of what was priced. Likewise what
// has no loose bound when `stop_bounding` says so is left out. What is no
// better than `than` is left out. Otherwise the same on any number of threads,
// but for `closely` and `priced`.
SweepResult Sweep(const SearchSpace& space, const Objective& objective,
                  const std::vector<Strategy>& strategies, size_t count,
                  int threads, const std::function<bool()>& stop,
                  const std::function<bool()>& stop_bounding = nullptr,
                  const std::optional<Score>& than = std::nullopt);

}  // namespace tessera
