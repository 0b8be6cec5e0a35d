#pragma once
// Plans that short searches return, of random small models on random clusters
// where work, messages and memory matter alike: what the search finds has to
// run, whatever it is.

#include <cstdint>
#include <string>
#include <vector>

#include "planner/ir/cluster.h"
#include "planner/plan/plan.h"
#include "tests/support/plan_check.h"

namespace tessera {

struct SearchedPlans {
  GraphSpec graph;
  int optimizer = 0;        // of PlanSpec
  Cluster cluster;          // of 2 to 8 devices
  std::string text;         // of both, for messages
  std::vector<Plan> plans;  // different ones; empty where nothing fits
};

// Those of a number: always the same. `checker` makes the model.
SearchedPlans SearchPlans(uint64_t number, PlanChecker& checker);

}  // namespace tessera
