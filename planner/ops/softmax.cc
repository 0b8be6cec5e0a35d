// Softmax and its logarithm over factor 'z', in whichever dimension it stands:
// "bhqz->bhqz". The dimension can be split: forward a shard's state is, for
// each row, (maximum, sum of exp(x - maximum)), merged by the log-sum-exp rule,
// and backward the sum that the gradient needs: of dy y for a softmax, of dy
// for its logarithm.

#include <algorithm>

#include "planner/ir/op.h"

namespace tessera {
namespace {

// States are numbered by shard and row, and have a width.
constexpr size_t kMostDims = kMaxDims - 1;

bool IsSoftmax(const IndexRule& rule) {
  return IsElementwise<1>(rule) && rule.results[0].size() <= kMostDims &&
         rule.FactorOf('z') >= 0;
}

constexpr RuleForm kSoftmaxForm = {
    "one operand of at most 5 dimensions, with the indices of the result, "
    "among them 'z', over which it is taken",
    IsSoftmax};

// All letters but 'z', in the order of the alphabet.
constexpr std::string_view kRows =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxy";

}  // namespace

std::vector<OpDef> SoftmaxOps() {
  return {
      {.name = "softmax",
       .summary = "softmax over factor z",
       .form = kSoftmaxForm,
       .adjoints = {{"softmax_dx", "dy0,y0->dx0"}},
       .flops = FlopsPerPoint<6>,
       .coupling = {"z", kRows, 2}},
      {.name = "softmax_dx",
       .summary = "gradient of softmax",
       .flops = FlopsPerPoint<4>,
       .coupling = {"z", kRows, 1},
       .accumulation = Accumulation::kAll},
      {.name = "log_softmax",
       .summary = "logarithm of the softmax over factor z",
       .form = kSoftmaxForm,
       .adjoints = {{"log_softmax_dx", "dy0,y0->dx0"}},
       .flops = FlopsPerPoint<6>,
       .coupling = {"z", kRows, 2}},
      {.name = "log_softmax_dx",
       .summary = "gradient of log_softmax",
       .flops = FlopsPerPoint<6>,
       .coupling = {"z", kRows, 1},
       .accumulation = Accumulation::kAll},
  };
}

}  // namespace tessera
