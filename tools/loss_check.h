#pragma once
// `tessera run --check`: the losses of a plan's first steps beside those of one
// rank of the CPU backend.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "planner/ir/dtype.h"
#include "tools/json.h"

namespace tessera {

// By how much a loss may differ, for a model that computes in `dtype`. fp32 and
// the 16-bit types: what llm.c allows GPT-2's losses over 10 AdamW steps
// against PyTorch's (test_gpt2.cu: 1e-5 in fp32, 0.05 in bf16). fp64: what the
// tests of random plans allow (tests/support/train_in_memory.h).
double LossTolerance(DType dtype);

struct LossCheck {
  std::vector<double> losses;  // of one rank of the CPU
  double max_difference = 0;   // not a number where a loss is none
  double tolerance = 0;

  bool agrees() const { return max_difference <= tolerance; }
};

// Of the first steps of a run, as many as `expected` has. REQUIRES: no more
// than it has taken, and at least one.
LossCheck CheckLosses(std::span<const double> losses,
                      std::vector<double> expected, DType dtype);

// "max |difference| to one rank of the CPU over the first 3 steps: 4.8e-07 (at
// most 1e-05)".
std::string CheckText(const LossCheck& check);
Json CheckJson(const LossCheck& check);

}  // namespace tessera
