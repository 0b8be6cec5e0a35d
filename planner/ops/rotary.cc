// Rotary position embedding (Su et al. 2021) in the half-split order of the
// Hugging Face models: with n = fraction * d, x[j] and x[j + n/2] turn by the
// angle position * theta^(-2j/n); the other d - n features pass. The position
// is an operand, so that packed or permuted sequences are inputs, not modes.

#include "planner/ir/op.h"

namespace tessera {

std::vector<OpDef> RotaryOps() {
  return {
      {.name = "rotary",
       .summary = "rotary position embedding",
       .adjoints = {{"rotary_dx", "dy0,x1->dx0"}},
       .flops = FlopsPerPoint<3>,
       .attributes = {"fraction", "theta"}},
      {.name = "rotary_dx",
       .summary = "gradient of rotary: the turn backwards",
       .flops = FlopsPerPoint<3>},
  };
}

}  // namespace tessera
