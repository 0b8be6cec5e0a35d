#pragma once
// A walk over plans by the search's moves, of which each candidate is priced
// twice: as an edit of the plan before it (Evaluator::EvaluateChange), and as a
// whole by a second evaluator. Both must agree to the bit.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "planner/ir/dtype.h"

namespace tessera::testing {

struct DeltaCase {
  const char* model;  // of the zoo
  int64_t batch;
  int64_t seq_len;  // 0: it has none
  DType dtype;
  const char* cluster;
};
// Tiny models.
std::span<const DeltaCase> SmallDeltaCases();

struct DeltaWalk {
  int64_t candidates = 0;  // priced twice
  int64_t accepted = 0;
  int64_t different = 0;
  // Moves and plans, the first few.
  std::vector<std::string> differences;
  double change_s = 0;  // of all candidates, as edits
  double whole_s = 0;   // as wholes
  // Of every so many: each block and microbatch lowered, priced and simulated.
  int64_t simulated = 0;
  double simulated_s = 0;
};

// `candidates` from random uniform plans on, a new one now and then, accepted
// at a temperature of 5 % of the step. Every `simulate_every`-th is simulated,
// too; 0: none. REQUIRES: a uniform plan is valid.
DeltaWalk WalkByDeltas(const DeltaCase& of, uint64_t seed, int64_t candidates,
                       int64_t simulate_every = 0);

}  // namespace tessera::testing
