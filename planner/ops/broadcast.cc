// Arithmetic of two operands, each with some of the result's factors: it is the
// same along those that it lacks, as in "bsh,h->bsh". The gradient of such an
// operand is a sum over them, and partial where one of them is split. The
// node's rule names the factors, in any order.
//
// Comparisons give 1 or 0 in the graph's type, and no gradient. Of such values
// "and" is multiply, "or" is maximum, "exclusive or" is not_equal. `where`
// chooses by them, element by element; what is not chosen is not read into the
// result, were it infinite.

#include <algorithm>

#include "planner/ir/op.h"

namespace tessera {
namespace {

// Whether the result has all factors of the operands, but for those that cannot
// be split, whose extents are 1.
template <size_t kOperands>
bool IsBroadcast(const IndexRule& rule) {
  if (rule.operands.size() != kOperands || rule.results.size() != 1) {
    return false;
  }
  for (size_t f = 0; f < rule.factors.size(); ++f) {
    if (!Holds(rule.results[0], static_cast<int>(f)) &&
        rule.factors[f].splittable) {
      return false;
    }
  }
  return std::ranges::all_of(rule.results[0], [&](uint8_t f) {
    return std::ranges::any_of(rule.operands, [f](const Indices& operand) {
      return Holds(operand, f);
    });
  });
}

constexpr RuleForm kBroadcastForm = {
    "two operands, each with some of the result's factors, as in 'bsh,h->bsh'",
    IsBroadcast<2>};
constexpr RuleForm kWhereForm = {
    "three operands, each with some of the result's factors, as in "
    "'bs,bsh,h->bsh'",
    IsBroadcast<3>};

// An extent of 1 is what a factor has that the result lacks.
std::string BroadcastProblem(const OpCall& call) {
  for (size_t f = 0; f < call.extents.size(); ++f) {
    if (call.extents[f] > 1 &&
        !Holds(call.rule->results[0], static_cast<int>(f))) {
      return std::string("the result lacks factor '") +
             call.rule->factors[f].letter + "', whose extent is not 1";
    }
  }
  return "";
}

}  // namespace

std::vector<OpDef> BroadcastOps() {
  std::vector<OpDef> ops = {
      {.name = "multiply",
       .summary = "product",
       .adjoints = {{"multiply", "dy0,x1->dx0"}, {"multiply", "dy0,x0->dx1"}},
       .linear = {{0}, {1}},
       .accumulation = Accumulation::kAll},
      // A sum of equals, where neither is broadcast, is an `add`.
      {.name = "broadcast_add",
       .summary = "sum of operands of different shapes",
       .adjoints = {{"reduce_sum", "dy0->dx0"}, {"reduce_sum", "dy0->dx1"}},
       .linear = {{0, 1}},
       .accumulation = Accumulation::kAll},
      {.name = "subtract",
       .summary = "difference",
       .adjoints = {{"reduce_sum", "dy0->dx0"},
                    {"reduce_negative", "dy0->dx1"}},
       .linear = {{0, 1}},
       .accumulation = Accumulation::kAll},
      {.name = "divide",
       .summary = "quotient",
       .adjoints = {{"divide_dx", "dy0,x1->dx0"},
                    {"divide_dy", "dy0,x0,x1->dx1"}},
       .linear = {{0}},
       .accumulation = Accumulation::kAll},
      {.name = "maximum",
       .summary = "the larger one",
       .adjoints = {{"maximum_dx", "dy0,x0,x1->dx0"},
                    {"maximum_dx", "dy0,x1,x0->dx1"}},
       .accumulation = Accumulation::kAll},
      {.name = "minimum",
       .summary = "the smaller one",
       .adjoints = {{"minimum_dx", "dy0,x0,x1->dx0"},
                    {"minimum_dx", "dy0,x1,x0->dx1"}},
       .accumulation = Accumulation::kAll},
      {.name = "equal",
       .summary = "1 where operands are equal, else 0",
       .accumulation = Accumulation::kAll},
      {.name = "not_equal",
       .summary = "1 where operands differ, else 0",
       .accumulation = Accumulation::kAll},
      {.name = "less",
       .summary = "1 where the first one is less, else 0",
       .accumulation = Accumulation::kAll},
      {.name = "less_equal",
       .summary = "1 where the first one is less or equal, else 0",
       .accumulation = Accumulation::kAll},
      {.name = "greater",
       .summary = "1 where the first one is greater, else 0",
       .accumulation = Accumulation::kAll},
      {.name = "greater_equal",
       .summary = "1 where the first one is greater or equal, else 0",
       .accumulation = Accumulation::kAll},
  };
  for (OpDef& op : ops) {
    op.form = kBroadcastForm;
    op.flops = FlopsPerPoint<1>;
    op.problem = BroadcastProblem;
  }
  // Operands: the condition, what is taken where it is not 0, and where it is.
  ops.push_back(
      {.name = "where",
       .summary = "the second operand where the first is not 0, else "
                  "the third",
       .form = kWhereForm,
       .adjoints = {{"where_dx", "dy0,x0->dx1"}, {"where_dy", "dy0,x0->dx2"}},
       .flops = FlopsPerPoint<1>,
       .problem = BroadcastProblem,
       .linear = {{1, 2}},
       .accumulation = Accumulation::kAll});
  ops.push_back({.name = "where_dx",
                 .summary = "gradient of what is taken where a condition is "
                            "not 0",
                 .flops = FlopsPerPoint<1>,
                 .linear = {{0}},
                 .accumulation = Accumulation::kAll});
  ops.push_back({.name = "where_dy",
                 .summary = "gradient of what is taken where a condition is 0",
                 .flops = FlopsPerPoint<1>,
                 .linear = {{0}},
                 .accumulation = Accumulation::kAll});
  ops.push_back({.name = "reduce_negative",
                 .summary = "minus the sum over factors that the result lacks",
                 .flops = FlopsPerPoint<1>,
                 .linear = {{0}},
                 .accumulation = Accumulation::kAll});
  ops.push_back({.name = "divide_dx",
                 .summary = "gradient of a dividend",
                 .flops = FlopsPerPoint<2>,
                 .linear = {{0}},
                 .accumulation = Accumulation::kAll});
  ops.push_back({.name = "divide_dy",
                 .summary = "gradient of a divisor",
                 .flops = FlopsPerPoint<4>,
                 .linear = {{0}, {1}},
                 .accumulation = Accumulation::kAll});
  // Operands: dy, the operand whose gradient it is, and the other one.
  ops.push_back({.name = "maximum_dx",
                 .summary = "gradient of the larger one; of equals, half each",
                 .flops = FlopsPerPoint<2>,
                 .linear = {{0}},
                 .accumulation = Accumulation::kAll});
  ops.push_back({.name = "minimum_dx",
                 .summary = "gradient of the smaller one; of equals, half each",
                 .flops = FlopsPerPoint<2>,
                 .linear = {{0}},
                 .accumulation = Accumulation::kAll});
  return ops;
}

}  // namespace tessera
