// Reductions over the factors that the result lacks, as in "bsh->bs"; the
// node's rule names them. A sum and a mean may be split there, which leaves a
// partial sum. Of a maximum and a variance whole rows are needed: their reduced
// factors are marked, as in "bsh!->bs".

#include <algorithm>

#include "planner/ir/op.h"

namespace tessera {
namespace {

// Whether the result's factors are some of the operand's, in any order.
bool IsReduction(const IndexRule& rule) {
  return rule.operands.size() == 1 && rule.results.size() == 1 &&
         rule.operands[0].size() == rule.factors.size();
}

bool IsReductionOfWhole(const IndexRule& rule) {
  if (!IsReduction(rule)) return false;
  for (size_t f = 0; f < rule.factors.size(); ++f) {
    if (!Holds(rule.results[0], static_cast<int>(f)) &&
        rule.factors[f].splittable) {
      return false;
    }
  }
  return true;
}

bool IsTranspose(const IndexRule& rule) {
  return IsReduction(rule) && rule.results[0].size() == rule.factors.size();
}

constexpr RuleForm kReductionForm = {
    "one operand; the result has some of its factors", IsReduction};
constexpr RuleForm kWholeForm = {
    "one operand; the result has some of its factors, of which the others "
    "cannot be split, as in 'bsh!->bs'",
    IsReductionOfWhole};

}  // namespace

std::vector<OpDef> ReductionOps() {
  return {
      {.name = "transpose",
       .summary = "dimensions in another order",
       .form = {"one operand; the result has its factors in another order",
                IsTranspose},
       .adjoints = {{"transpose", "dy0->dx0"}},
       .linear = {{0}},
       .accumulation = Accumulation::kAll},
      {.name = "reduce_sum",
       .summary = "sum over factors that the result lacks",
       .form = kReductionForm,
       .adjoints = {{"reduce_sum_dx", "dy0->dx0"}},
       .flops = FlopsPerPoint<1>,
       .linear = {{0}},
       .accumulation = Accumulation::kAll},
      {.name = "reduce_sum_dx",
       .summary = "gradient of reduce_sum",
       .linear = {{0}},
       .accumulation = Accumulation::kAll},
      {.name = "reduce_mean",
       .summary = "mean over factors that the result lacks",
       .form = kReductionForm,
       .adjoints = {{"reduce_mean_dx", "dy0->dx0"}},
       .flops = FlopsPerPoint<1>,
       .linear = {{0}},
       .accumulation = Accumulation::kAll},
      {.name = "reduce_mean_dx",
       .summary = "gradient of reduce_mean",
       .flops = FlopsPerPoint<1>,
       .linear = {{0}},
       .accumulation = Accumulation::kAll},
      {.name = "reduce_max",
       .summary = "maximum over factors that the result lacks",
       .form = kWholeForm,
       .adjoints = {{"reduce_max_dx", "dy0,x0,y0->dx0"}},
       .flops = FlopsPerPoint<1>},
      {.name = "reduce_max_dx",
       .summary = "gradient of reduce_max: shared among the largest",
       .flops = FlopsPerPoint<2>,
       .linear = {{0}},
       .accumulation = Accumulation::kAll},
      // The mean of squared deviations; `correction` 1 divides by one less.
      {.name = "reduce_variance",
       .summary = "variance over factors that the result lacks",
       .form = kWholeForm,
       .adjoints = {{"reduce_variance_dx", "dy0,x0->dx0"}},
       .flops = FlopsPerPoint<4>,
       .attributes =
           {{.name = "correction", .least = 0, .most = 1, .whole = true}}},
      {.name = "reduce_variance_dx",
       .summary = "gradient of reduce_variance",
       .flops = FlopsPerPoint<4>,
       .linear = {{0}},
       .accumulation = Accumulation::kAll},
  };
}

}  // namespace tessera
