#pragma once
// How far rotary embeddings turn: the angle of each pair of features at
// position 1, by the operators of planner/ops/rotary.cc.

#include <vector>

#include "runtime/kernels/kernel.h"

namespace tessera {

struct RotaryAngles {
  std::vector<double> of_pair;  // radians for each position
  double magnitude = 1;         // turned features are multiplied by it
};

// REQUIRES: `call` is one of an operator of planner/ops/rotary.cc on features
// of `width`.
RotaryAngles RotaryAnglesOf(const KernelCall& call, int64_t width);

}  // namespace tessera
