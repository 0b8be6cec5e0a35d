#pragma once
// `tessera explain --as NAME`: a plan in the settings of another training
// program, for who trains with that: Megatron-LM as of d98e8a64 (August 2026,
// megatron/training/arguments.py and what it reads), DeepSpeed by its
// docs/_pages/config-json.md of that time.

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"
#include "planner/plan/graph_index.h"
#include "planner/plan/plan.h"
#include "planner/plan/strategy.h"
#include "tools/json.h"

namespace tessera {

// A plan that a strategy gives, and what else the settings are made of.
struct UniformPlan {
  const GraphIndex& index;
  const Plan& plan;
  Strategy strategy;  // with dp and mbs
  DType gradients;    // reduced
  const TrainingOptions& training;
};

struct TrainerSettings {
  Json settings;     // as the program takes them: its arguments, or its file
  std::string text;  // the same: arguments for a shell, a file as it is
  // What of the plan they do not say, and what is to be done besides.
  std::vector<std::string> notes;
};

struct Trainer {
  std::string_view name;
  std::string_view summary;
  // Error: the program cannot split the model as the plan does.
  Result<TrainerSettings> (*settings)(const UniformPlan& plan);
};

std::span<const Trainer> Trainers();

// Errors: a name that is none of Trainers(), a plan that is not uniform, and
// those of Trainer::settings.
Result<TrainerSettings> SettingsOf(std::string_view trainer,
                                   const GraphIndex& index,
                                   const Cluster& cluster, const Plan& plan,
                                   const TrainingOptions& training);

}  // namespace tessera
