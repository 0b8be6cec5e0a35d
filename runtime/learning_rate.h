#pragma once
// The learning rate of each step: a linear warm-up to the peak (Goyal et al.
// 2017), then a decay over the rest of the run. A row of the table each.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "planner/base/result.h"

namespace tessera {

struct Decay {
  std::string_view name;
  std::string_view summary;
  // From 1 towards 0, for the part of the decay that has passed, in [0, 1].
  double (*factor)(double passed);
};

std::span<const Decay> Decays();
Result<const Decay*> FindDecay(std::string_view name);

struct LearningRate {
  const Decay* decay = nullptr;  // null: constant
  double peak = 0;
  double least = 0;    // where the decay ends
  int64_t warmup = 0;  // steps
  int64_t steps = 0;   // of warm-up and decay; factor(1) from then on
};

// peak (step + 1) / warmup while step < warmup, then
// least + (peak - least) factor((step - warmup) / (steps - warmup)).
// `step` counts from 0 since the start of training, resumed or not.
double RateAt(const LearningRate& rate, int64_t step);

}  // namespace tessera
