// Layer norm (Ba et al. 2016) and RMS norm (Zhang and Sennrich 2019) over the
// last dimension, of rows that are tokens or heads of tokens. Results behind y
// are the statistics that backward reads: mean and reciprocal standard
// deviation, or the reciprocal root mean square.

#include "planner/ir/op.h"

namespace tessera {
namespace {

// Whether x and y are (rows, features), the others but x (features), and the
// statistics (rows); features cannot be split.
bool IsNorm(const IndexRule& rule) {
  if (rule.operands.size() < 2 || rule.results.size() != rule.operands.size()) {
    return false;
  }
  const Indices& x = rule.operands[0];
  if (x.size() < 2 || rule.factors[x.back()].splittable ||
      rule.results[0] != x) {
    return false;
  }
  const Indices rows(x.begin(), x.end() - 1);
  for (size_t i = 1; i < rule.operands.size(); ++i) {
    if (rule.operands[i] != Indices{x.back()} || rule.results[i] != rows) {
      return false;
    }
  }
  return true;
}

constexpr RuleForm kNormForm = {
    "x, scale -> y, statistics, as in 'bsgd!,d->bsgd,bsg', or with a shift",
    IsNorm};

}  // namespace

std::vector<OpDef> NormOps() {
  return {
      {.name = "layer_norm",
       .summary = "layer norm with scale and shift",
       .rule = "bsh!,h,h->bsh,bs,bs",
       .form = kNormForm,
       .adjoints = {{"layer_norm_dx", "dy0,x0,x1,y1,y2->dx0"},
                    {"layer_norm_dw", "dy0,x0,y1,y2->dx1,dx2"}},
       .flops = FlopsPerPoint<8>,
       .attributes = {{.name = "epsilon", .least = 0}}},
      {.name = "layer_norm_dx",
       .summary = "gradient of layer norm's input",
       .flops = FlopsPerPoint<11>,
       .linear = {{0}}},
      {.name = "layer_norm_dw",
       .summary = "gradients of layer norm's scale and shift",
       .flops = FlopsPerPoint<5>,
       .linear = {{0}},
       .accumulation = Accumulation::kAll},
      {.name = "rms_norm",
       .summary = "root-mean-square norm with scale",
       .rule = "bsh!,h->bsh,bs",
       .form = kNormForm,
       .adjoints = {{"rms_norm_dx", "dy0,x0,x1,y1->dx0"},
                    {"rms_norm_dw", "dy0,x0,y1->dx1"}},
       .flops = FlopsPerPoint<4>,
       .attributes = {{.name = "epsilon", .least = 0}}},
      {.name = "rms_norm_dx",
       .summary = "gradient of RMS norm's input",
       .flops = FlopsPerPoint<7>,
       .linear = {{0}}},
      {.name = "rms_norm_dw",
       .summary = "gradient of RMS norm's scale",
       .flops = FlopsPerPoint<3>,
       .linear = {{0}},
       .accumulation = Accumulation::kAll},
  };
}

}  // namespace tessera
