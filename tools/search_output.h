#pragma once
// What `tessera search` prints at its end.

#include <string>

#include "costmodel/evaluate/step_bound.h"
#include "planner/base/result.h"
#include "planner/plan/evaluation.h"
#include "planner/search/mcmc.h"
#include "planner/search/search_space.h"
#include "tools/inputs.h"
#include "tools/json.h"
#include "tools/options.h"
#include "tools/search_choice.h"

namespace tessera {

struct SearchAnswer {
  const Inputs& inputs;
  const SearchSpace& space;
  const SearchResult& result;
  const Decided& decided;
  bool interrupted = false;
  Evaluation step = {};        // of the chosen plan
  bool too_large = false;      // to be simulated here
  bool late = false;           // there was no time to simulate it
  StepBound bound = {};        // no step time where none is known
  std::string plan_file = {};  // where the plan was written, if it was
};

Result<Json> SearchJson(const Options& options, const SearchAnswer& answer);
std::string SearchText(const Options& options, const SearchAnswer& answer);

}  // namespace tessera
