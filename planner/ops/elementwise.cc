// Elementwise operators; the node's rule names its own factors.

#include "planner/ir/op.h"

namespace tessera {
namespace {

// An operator of one operand, and the one that is its gradient.
struct UnaryDef {
  std::string_view name;
  std::string_view summary;
  AdjointDef adjoint;
  Flops (*flops)(const OpCall&);
  std::vector<AttributeDef> attributes = {};
};

// The functions of mathematics: forward and backward, in pairs.
void AddFunctions(std::vector<OpDef>& ops) {
  const UnaryDef rows[] = {
      {"exp", "e to the x", {"exp_dx", "dy0,y0->dx0"}, FlopsPerPoint<4>},
      {"log", "natural logarithm", {"log_dx", "dy0,x0->dx0"}, FlopsPerPoint<4>},
      {"sqrt", "square root", {"sqrt_dx", "dy0,y0->dx0"}, FlopsPerPoint<2>},
      {"reciprocal",
       "1 / x",
       {"reciprocal_dx", "dy0,y0->dx0"},
       FlopsPerPoint<1>},
      {"abs", "|x|", {"abs_dx", "dy0,x0->dx0"}, FlopsPerPoint<1>},
      {"erf", "error function", {"erf_dx", "dy0,x0->dx0"}, FlopsPerPoint<8>},
      {"sin", "sine", {"sin_dx", "dy0,x0->dx0"}, FlopsPerPoint<8>},
      {"cos", "cosine", {"cos_dx", "dy0,x0->dx0"}, FlopsPerPoint<8>},
      {"softplus",
       "log(1 + exp(x))",
       {"softplus_dx", "dy0,x0->dx0"},
       FlopsPerPoint<6>},
      {"hard_sigmoid",
       "x / 6 + 1/2 within 0 and 1",
       {"hard_sigmoid_dx", "dy0,x0->dx0"},
       FlopsPerPoint<4>},
      // Howard et al. 2019, "Searching for MobileNetV3".
      {"hard_swish",
       "x * hard_sigmoid(x)",
       {"hard_swish_dx", "dy0,x0->dx0"},
       FlopsPerPoint<5>},
      {"power",
       "x to a constant power",
       {"power_dx", "dy0,x0->dx0"},
       FlopsPerPoint<8>,
       {{"exponent"}}},
      {"clip",
       "x within bounds",
       {"clip_dx", "dy0,x0->dx0"},
       FlopsPerPoint<2>,
       {{"least"}, {"most"}}},
      {"leaky_relu",
       "x, times the slope where it is negative",
       {"leaky_relu_dx", "dy0,x0->dx0"},
       FlopsPerPoint<2>,
       {{"slope"}}},
      {"elu",
       "x, or alpha (exp(x) - 1) where it is negative",
       {"elu_dx", "dy0,x0->dx0"},
       FlopsPerPoint<5>,
       {{"alpha"}}},
  };
  for (const UnaryDef& row : rows) {
    ops.push_back({.name = row.name,
                   .summary = row.summary,
                   .form = kUnaryForm,
                   .adjoints = {row.adjoint},
                   .flops = row.flops,
                   .attributes = row.attributes});
    ops.push_back({.name = row.adjoint.op,
                   .summary = "gradient of an elementwise function",
                   .flops = FlopsPerPoint<3>,
                   .linear = {{0}}});
  }
}

}  // namespace

std::vector<OpDef> ElementwiseOps() {
  std::vector<OpDef> ops = {
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
       .linear = {{0}},
       .accumulation = Accumulation::kAll},
      {.name = "offset",
       .summary = "x plus a number",
       .form = kUnaryForm,
       .adjoints = {{"", "dy0->dx0"}},
       .flops = FlopsPerPoint<1>,
       .attributes = {{"amount"}}},
      {.name = "add",
       .summary = "elementwise sum",
       .form = kBinaryForm,
       .adjoints = {{"", "dy0->dx0"}, {"", "dy0->dx1"}},
       .flops = FlopsPerPoint<1>,
       .linear = {{0, 1}},
       .accumulation = Accumulation::kAll},
      // Where gradients meet. It adds operands of equal layout first and
      // passes a partial sum through when all of them agree.
      {.name = "sum",
       .summary = "sum of gradients",
       .flops = [](const OpCall& call) -> Flops {
         return {call.Points() *
                 static_cast<double>(call.operand_dtypes.size() - 1)};
       },
       .accumulation = Accumulation::kAll},
  };
  AddFunctions(ops);
  return ops;
}

}  // namespace tessera
