// Elementwise operators; the node's rule names its own factors.

#include "planner/ir/op.h"

namespace tessera {

std::vector<OpDef> ElementwiseOps() {
  return {
      // 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): GPT-2's GELU.
      {.name = "gelu",
       .summary = "GELU, tanh form",
       .form = kUnaryForm,
       .adjoints = {{"gelu_dx", "dy0,x0->dx0"}},
       .flops = FlopsPerPoint<10>},
      {.name = "gelu_dx",
       .summary = "gradient of gelu",
       .flops = FlopsPerPoint<18>,
       .linear = {{0}}},
      // 0.5 x (1 + erf(x / sqrt 2)).
      {.name = "gelu_erf",
       .summary = "GELU, exact form",
       .form = kUnaryForm,
       .adjoints = {{"gelu_erf_dx", "dy0,x0->dx0"}},
       .flops = FlopsPerPoint<10>},
      {.name = "gelu_erf_dx",
       .summary = "gradient of gelu_erf",
       .flops = FlopsPerPoint<18>,
       .linear = {{0}}},
      {.name = "silu",
       .summary = "x * sigmoid(x)",
       .form = kUnaryForm,
       .adjoints = {{"silu_dx", "dy0,x0->dx0"}},
       .flops = FlopsPerPoint<5>},
      {.name = "silu_dx",
       .summary = "gradient of silu",
       .flops = FlopsPerPoint<9>,
       .linear = {{0}}},
      {.name = "relu",
       .summary = "max(x, 0)",
       .form = kUnaryForm,
       .adjoints = {{"relu_dx", "dy0,x0->dx0"}},
       .flops = FlopsPerPoint<1>},
      {.name = "relu_dx",
       .summary = "gradient of relu",
       .flops = FlopsPerPoint<1>,
       .linear = {{0}}},
      {.name = "sigmoid",
       .summary = "1 / (1 + exp(-x))",
       .form = kUnaryForm,
       .adjoints = {{"sigmoid_dx", "dy0,y0->dx0"}},
       .flops = FlopsPerPoint<4>},
      {.name = "sigmoid_dx",
       .summary = "gradient of sigmoid",
       .flops = FlopsPerPoint<3>,
       .linear = {{0}}},
      {.name = "tanh",
       .summary = "hyperbolic tangent",
       .form = kUnaryForm,
       .adjoints = {{"tanh_dx", "dy0,y0->dx0"}},
       .flops = FlopsPerPoint<5>},
      {.name = "tanh_dx",
       .summary = "gradient of tanh",
       .flops = FlopsPerPoint<3>,
       .linear = {{0}}},
      {.name = "scale",
       .summary = "x times a number",
       .form = kUnaryForm,
       .adjoints = {{"scale", "dy0->dx0"}},
       .flops = FlopsPerPoint<1>,
       .attributes = {{"factor"}},
       .linear = {{0}}},
      {.name = "multiply",
       .summary = "elementwise product",
       .form = kBinaryForm,
       .adjoints = {{"multiply", "dy0,x1->dx0"}, {"multiply", "dy0,x0->dx1"}},
       .flops = FlopsPerPoint<1>,
       .linear = {{0}, {1}}},
      {.name = "add",
       .summary = "elementwise sum",
       .form = kBinaryForm,
       .adjoints = {{"", "dy0->dx0"}, {"", "dy0->dx1"}},
       .flops = FlopsPerPoint<1>,
       .linear = {{0, 1}}},
      // Where gradients meet. It adds operands of equal layout first and
      // passes a partial sum through when all of them agree.
      {.name = "sum",
       .summary = "sum of gradients",
       .flops = [](const OpCall& call) -> Flops {
         return {call.Points() *
                 static_cast<double>(call.operand_dtypes.size() - 1)};
       }},
  };
}

}  // namespace tessera
