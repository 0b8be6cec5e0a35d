// Dropout (Srivastava et al. 2014), inverted: x / (1 - probability) where kept.
// What is kept is a function of (seed, step, salt, global index), so that no
// split and no recomputation changes it; the gradient is the same operator.

#include "planner/ir/op.h"

namespace tessera {

// What is kept is divided by 1 - probability.
constexpr double kMostDropout = 1 - 1e-6;

std::vector<OpDef> DropoutOps() {
  return {
      {.name = "dropout",
       .summary = "inverted dropout, counter-based",
       .form = kUnaryForm,
       .adjoints = {{"dropout", "dy0->dx0"}},
       .flops = FlopsPerPoint<2>,
       .attributes = {{"probability", 0, kMostDropout},
                      {"salt", 0, 0x1p53, true}},
       .linear = {{0}}},
  };
}

}  // namespace tessera
