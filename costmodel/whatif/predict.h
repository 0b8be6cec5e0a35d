#pragma once
// Prediction: what a case's plan does in a step, what holds it up, and what it
// costs.

#include <optional>
#include <string>
#include <vector>

#include "costmodel/profile/profile_db.h"
#include "costmodel/whatif/goodput.h"
#include "costmodel/whatif/scenario.h"
#include "costmodel/whatif/sensitivity.h"
#include "planner/plan/evaluation.h"
#include "planner/plan/plan.h"

namespace tessera {

// What the run is asked for besides its step.
struct RunQuestion {
  double tokens = 0;         // of the whole run; 0: not asked
  int checkpoint_every = 0;  // steps; 0: the best interval
  double restart = 0;        // s behind a failure, beside reading the state
};

struct PredictOptions {
  TrainingOptions training;
  const ProfileDb* profile = nullptr;
  // Only the step time and memory, by the evaluator: no breakdown, no time lost
  // on shared links.
  bool fast = false;
  bool sensitivity = true;
  RunQuestion run;
};

struct Prediction {
  std::string strategy;  // in words
  int devices = 0;
  int nodes = 0;
  int64_t global_batch = 0;
  Evaluation evaluation;  // with a breakdown, unless fast
  double tokens_per_s = 0;
  double mfu = 0;
  Bytes memory;          // of the device that has least left
  MemoryUse memory_use;  // the same by category
  Bytes capacity;        // of the same
  std::optional<Sensitivity> sensitivity;
  std::string bottleneck;
  double bottleneck_share = 0;  // of the step

  std::optional<double> usd_per_hour;  // of all devices
  std::optional<double> watts;
  std::optional<Goodput> goodput;    // where the figures are known
  std::optional<RunCost> run;        // where tokens were asked for
  std::vector<std::string> missing;  // figures that the cluster lacks
};

// REQUIRES: `plan` is valid for the case.
Prediction Predict(const Case& of, const Plan& plan,
                   const PredictOptions& options);

// Bytes of parameters and optimizer state that a checkpoint keeps: fp32 weights
// and, with AdamW, two moments (Rajbhandari et al. 2020: 12 bytes a parameter).
double CheckpointBytes(const Graph& graph, const TrainingOptions& training);

}  // namespace tessera
