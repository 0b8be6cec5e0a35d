// Losses of elements, each `weight` times a mean over all elements of the
// global batch:
//   mean_squared_error    (x - t)^2
//   binary_cross_entropy  max(x, 0) - x t + log(1 + exp(-|x|)), which is
//                         -t log(sigmoid(x)) - (1 - t) log(1 - sigmoid(x))
// of predictions, or logits, x and targets t. A shard of any factor gives its
// share of the mean, a partial sum. (Those of PyTorch: torch.nn.MSELoss,
// torch.nn.BCEWithLogitsLoss.)

#include "planner/ir/op.h"

namespace tessera {
namespace {

bool IsLoss(const IndexRule& rule) {
  return rule.operands.size() == 2 && rule.operands[0] == rule.operands[1] &&
         rule.results.size() == 1 && rule.results[0].empty();
}

constexpr RuleForm kLossForm = {
    "two operands with the same indices and a scalar result, as in 'bf,bf->'",
    IsLoss};

}  // namespace

std::vector<OpDef> LossesOps() {
  const AttributeDef weight = {.name = "weight", .least = 0};
  // In fp16 adjoints are multiplied by the loss scale, which stands behind the
  // operands.
  return {
      {.name = "mean_squared_error",
       .summary = "mean of the squared differences from targets",
       .form = kLossForm,
       .adjoints = {{"mean_squared_error_dx", "x0,x1->dx0"},
                    {"mean_squared_error_dx", "x1,x0->dx1"}},
       .flops = FlopsPerPoint<3>,
       .attributes = {weight},
       .accumulation = Accumulation::kAll},
      {.name = "mean_squared_error_dx",
       .summary = "gradient of mean_squared_error: 2 (x - t) weight / n",
       .flops = FlopsPerPoint<2>},
      {.name = "binary_cross_entropy",
       .summary = "mean cross-entropy of logits and probabilities of 1",
       .form = kLossForm,
       .adjoints = {{"binary_cross_entropy_dx", "x0,x1->dx0"},
                    {"binary_cross_entropy_dt", "x0->dx1"}},
       .flops = FlopsPerPoint<7>,
       .attributes = {weight},
       .accumulation = Accumulation::kAll},
      {.name = "binary_cross_entropy_dx",
       .summary = "(sigmoid - targets) weight / n",
       .flops = FlopsPerPoint<5>},
      {.name = "binary_cross_entropy_dt",
       .summary = "gradient of binary_cross_entropy's targets: -x weight / n",
       .flops = FlopsPerPoint<1>},
  };
}

}  // namespace tessera
