// A sequence as one tensor for each of its steps, and the other way round:
// y[b,i,:] = x_i[b,:]. The joint dimension is never split.

#include <algorithm>
#include <string>

#include "planner/ir/op.h"

namespace tessera {
namespace {

// Whether `whole` is a step with one dimension more, in the middle, which is d
// and is not split, and all steps are alike.
bool IsSequenceOf(const IndexRule& rule, const Indices& whole,
                  const std::vector<Indices>& steps) {
  return whole.size() == 3 && whole[1] == rule.FactorOf('d') &&
         !rule.factors[whole[1]].splittable && !steps.empty() &&
         steps.size() <= kMostSteps &&
         std::ranges::all_of(steps, [&](const Indices& step) {
           return step == Indices{whole[0], whole[2]};
         });
}

bool IsStack(const IndexRule& rule) {
  return rule.results.size() == 1 &&
         IsSequenceOf(rule, rule.results[0], rule.operands);
}

bool IsUnstack(const IndexRule& rule) {
  return rule.operands.size() == 1 &&
         IsSequenceOf(rule, rule.operands[0], rule.results);
}

std::string StepsProblem(const OpCall& call) {
  const bool stacks =
      call.rule->results.size() == 1 && call.rule->results[0].size() == 3;
  const size_t steps =
      stacks ? call.rule->operands.size() : call.rule->results.size();
  if (call.Extent('d') == static_cast<int64_t>(steps)) return "";
  return "has " + std::to_string(steps) + " steps of a sequence of " +
         std::to_string(call.Extent('d'));
}

// "dy0,dy1,...": as many as there can be.
std::string Each(std::string_view symbol) {
  std::string text;
  for (size_t i = 0; i < kMostSteps; ++i) {
    text += (i > 0 ? "," : "") + std::string(symbol) + std::to_string(i);
  }
  return text;
}

}  // namespace

std::vector<OpDef> StepsOps() {
  static const auto* const to_steps = new std::string("dy0->" + Each("dx"));
  static const auto* const of_steps = new std::string(Each("dy") + "->dx0");
  return {
      {.name = "stack",
       .summary = "steps as a sequence",
       .form = {"up to 256 steps -> sequence, as in 'bh,bh,bh->bd!h'", IsStack},
       .adjoints = {{"unstack", *to_steps}},
       .attributes = {{.name = "steps", .least = 1, .whole = true}},
       .problem = StepsProblem,
       .sizes = {{'d', "steps"}}},
      {.name = "unstack",
       .summary = "a sequence as its steps",
       .form = {"sequence -> up to 256 steps, as in 'bd!h->bh,bh,bh'",
                IsUnstack},
       .adjoints = {{"stack", *of_steps}},
       .attributes = {{.name = "steps", .least = 1, .whole = true}},
       .problem = StepsProblem,
       .linear = {{0}}},
  };
}

}  // namespace tessera
