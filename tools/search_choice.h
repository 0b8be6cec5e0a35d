#pragma once
// The choice of the answer of `tessera search` among the plans that it found.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/whatif/band.h"
#include "planner/base/result.h"
#include "planner/base/units.h"
#include "planner/io/plan_io.h"
#include "planner/plan/evaluation.h"
#include "planner/plan/plan.h"
#include "planner/search/mcmc.h"
#include "planner/search/search_space.h"
#include "tools/answer_time.h"
#include "tools/inputs.h"
#include "tools/options.h"

namespace tessera {

// A plan that may be the answer.
struct Choice {
  std::string kind;  // "search", "uniform", or the baseline's name
  Plan plan;
  Score score;
  std::optional<Duration> confirmed;  // with the time lost on shared links
  std::optional<Evaluation> step;     // as it was confirmed here
  std::optional<Duration> measured;   // on this host
  bool no_time = false;  // may be the answer, but was not confirmed in time

  Duration time() const { return confirmed.value_or(score.step_time); }
};

// What is chosen among the plans that were found, and why.
struct Decided {
  std::vector<Choice> choices;  // what the search found first, best first
  size_t fastest = 0;
  size_t chosen = 0;
  std::optional<size_t> baseline;  // the best that is allowed
  double margin = 0;               // of its time over the fastest's, at least
  std::optional<ErrorBand> band;   // of predictions; none of what was run

  bool measured() const { return choices[fastest].measured.has_value(); }
  // Without shared links the baseline is faster than the fastest with them.
  // REQUIRES: there is a baseline.
  bool baseline_is_open() const {
    return !measured() && margin < 0 && !choices[*baseline].confirmed;
  }
  int64_t no_time() const {
    return std::ranges::count_if(choices, &Choice::no_time);
  }
};

// Confirms what may be the answer, as long as there is time, and chooses by
// --prefer.
Decided Decide(const Options& options, const Inputs& inputs,
               const SearchSpace& space, const Evaluator& evaluator,
               const SearchResult& result, bool interrupted, AnswerTime& time);

// --verify: runs the plans that are fastest by prediction, and the best
// baseline, and takes what was fastest here.
Result<void> Verify(const Options& options, const Inputs& inputs,
                    const SearchSpace& space, Decided& decided);

// Of the chosen plan, for its file.
PlanPrediction PredictionOf(const Decided& decided);

}  // namespace tessera
