#pragma once
// Prediction: what a case's plan does in a step, what holds it up, and what it
// costs.

#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "costmodel/profile/profile_db.h"
#include "costmodel/whatif/band.h"
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

// Who waits for long work.
struct Watch {
  const std::atomic<bool>* stop = nullptr;        // ends it early
  std::function<void(const std::string&)> hears;  // where it is; often, from
                                                  // any thread
  bool stopped() const { return stop != nullptr && stop->load(); }
  void Tell(const std::string& text) const {
    if (hears) hears(text);
  }
};

struct PredictOptions {
  TrainingOptions training;
  const ProfileDb* profile = nullptr;
  // Only the step time and memory, by the evaluator: no breakdown, no time lost
  // on shared links.
  bool fast = false;
  // Also says what holds a step up; takes the evaluator once for each
  // resource.
  bool sensitivity = true;
  RunQuestion run;
  Watch watch;
};

struct Prediction {
  std::string strategy;  // in words
  // TextbookName of a plan that is not uniform, where it was searched for.
  std::string plan_name;
  int devices = 0;  // of the cluster, but for what failures took
  int used = 0;     // by the plan
  int nodes = 0;    // of the devices
  int64_t global_batch = 0;
  Evaluation evaluation;  // with a breakdown, unless fast
  ErrorBand band;         // of its step time, under the case's stack
  double tokens_per_s = 0;
  std::string_view unit = "tokens";  // what that counts: UnitOf
  std::optional<double> mfu;         // UtilizationOf
  Bytes memory;                      // of the fullest device
  MemoryUse memory_use;              // the same by category
  Bytes capacity;                    // of the same
  std::optional<Sensitivity> sensitivity;
  // "links between nodes"; of a plan that does not fit, the capacity that it
  // lacks. Empty where it was not asked for, neither by a breakdown nor by
  // sensitivity, and of a plan that cannot run for another reason.
  std::string bottleneck;
  double bottleneck_share = 0;  // of the step

  // Of all devices that are rented (rent.h), those that stand by behind a
  // failure too.
  std::optional<double> usd_per_hour;
  std::optional<double> watts;       // of all devices that failures left
  Goodput goodput;                   // what is not known takes no time
  std::optional<RunCost> run;        // where tokens were asked for
  std::vector<std::string> missing;  // figures that the cluster lacks

  // A plan that takes too long for a price (Evaluator) has neither times nor
  // bytes.
  bool priced() const { return evaluation.step_time > Duration{}; }
};

// The part of the dense peak in `dtype` of the devices that the plan uses that
// so much work in a step is. Nothing of no work, in no time, and of a host's
// cores, whose peak is assumed.
std::optional<double> UtilizationOf(Flops work, const Cluster& cluster,
                                    const Plan& plan, DType dtype,
                                    Duration step);

// The device that uses the largest share of its memory.
struct FullestDevice {
  MemoryUse use;
  Bytes capacity;
};
// Where an evaluation has not what each device keeps, each of a set is taken to
// keep what the one of them does that keeps most.
FullestDevice FullestOf(const Cluster& cluster, const Plan& plan,
                        const Evaluation& evaluation);

// A part of the step, by what it waits for.
struct StepPart {
  std::string_view name;  // "links between nodes"
  double share = 0;
};
// First the pipeline's bubble, by the breakdown; then what is left of the step
// by the elasticities, where these are known.
std::vector<StepPart> BindingParts(const Prediction& prediction);

// REQUIRES: `plan` is valid for the case.
Prediction Predict(const Case& of, const Plan& plan,
                   const PredictOptions& options);

// Why the run that was asked for never ends, where it does not; else empty.
std::string_view EndlessText(const Prediction& prediction);

// Bytes of parameters and optimizer state that a checkpoint keeps: fp32 weights
// and, with AdamW, two moments (Rajbhandari et al. 2020: 12 bytes a parameter).
double CheckpointBytes(const Graph& graph, const TrainingOptions& training);

// Bytes of the samples of a step in a file that runs read (runtime/data): a
// byte for each pixel of an image and one for its label; 4 for each number, id
// and label of a click; 4 for each token (the widest format), from which labels
// and positions follow.
double DataBytes(const Graph& graph);

}  // namespace tessera
