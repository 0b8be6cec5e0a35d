// Rotary position embedding (Su et al. 2021) in the half-split order of the
// Hugging Face models: with n = fraction * d, x[j] and x[j + n/2] turn by the
// angle position * theta^(-2j/n); the other d - n features pass. The position
// is an operand, so that packed or permuted sequences are inputs, not modes.
// Positions are divided by a number for each pair in LongRoPE (Ding et al.
// 2024). YaRN (Peng et al. 2023) slows the pairs that turn less than once
// within the positions that a model was first trained on; so do the models from
// Llama 3.1 on, by a formula of their own (runtime/kernels/rotary_angles.cc has
// both); position interpolation (Chen et al. 2023) slows all pairs alike.

#include <algorithm>
#include <cmath>

#include "planner/ir/op.h"

namespace tessera {
namespace {

// Whether the positions have the first indices of x, y has those of x, and x's
// last one, the features, is whole and not of the positions.
bool IsRotary(const IndexRule& rule) {
  if (rule.operands.size() != 2 || rule.results.size() != 1) return false;
  const Indices& x = rule.operands[0];
  const Indices& positions = rule.operands[1];
  return rule.results[0] == x && positions.size() < x.size() &&
         std::equal(positions.begin(), positions.end(), x.begin()) &&
         !rule.factors[x.back()].splittable;
}

// Features are turned in pairs.
std::string RotaryProblem(const OpCall& call) {
  const Indices& x = call.rule->operands[0];
  const int64_t width = call.extents[x.back()];
  const int64_t turned =
      std::llround(call.attribute("fraction") * static_cast<double>(width));
  if (turned % 2 == 0) return "";
  return "turns " + std::to_string(turned) + " of " + std::to_string(width) +
         " features: expected an even number";
}

// The attribute "divisor" is a list, in the order of the pairs.
std::string LongRopeProblem(const OpCall& call) {
  if (std::string problem = RotaryProblem(call); !problem.empty()) {
    return problem;
  }
  const Indices& x = call.rule->operands[0];
  const auto width = static_cast<double>(call.extents[x.back()]);
  const int64_t pairs = std::llround(call.attribute("fraction") * width) / 2;
  const int64_t divisors =
      std::ranges::count(call.attributes, "divisor", &Attribute::name);
  if (divisors == pairs) return "";
  return "has " + std::to_string(divisors) +
         " of the attribute 'divisor': " + "expected one for each of " +
         std::to_string(pairs) + " pairs of features";
}

}  // namespace

std::vector<OpDef> RotaryOps() {
  return {
      {.name = "rotary",
       .summary = "rotary position embedding",
       .form = {"x, positions -> y as in 'bsgd!,bs->bsgd'", IsRotary},
       .adjoints = {{"rotary_dx", "dy0,x1->dx0"}},
       .flops = FlopsPerPoint<3>,
       .attributes = {{"fraction", 0, 1}, {.name = "theta", .least = 1}},
       .problem = RotaryProblem,
       .integer_operands = {1},
       .linear = {{0}}},
      {.name = "rotary_dx",
       .summary = "gradient of rotary: the turn backwards",
       .flops = FlopsPerPoint<3>,
       .linear = {{0}}},
      {.name = "rotary_linear",
       .summary = "rotary position embedding of positions divided by a number",
       .form = {"as of rotary", IsRotary},
       .adjoints = {{"rotary_linear_dx", "dy0,x1->dx0"}},
       .flops = FlopsPerPoint<3>,
       .attributes = {{.name = "factor", .least = 1},
                      {"fraction", 0, 1},
                      {.name = "theta", .least = 1}},
       .problem = RotaryProblem,
       .integer_operands = {1},
       .linear = {{0}}},
      {.name = "rotary_linear_dx",
       .summary = "gradient of rotary_linear: the turn backwards",
       .flops = FlopsPerPoint<3>,
       .linear = {{0}}},
      {.name = "rotary_yarn",
       .summary = "rotary position embedding for longer sequences (YaRN)",
       .form = {"as of rotary", IsRotary},
       .adjoints = {{"rotary_yarn_dx", "dy0,x1->dx0"}},
       .flops = FlopsPerPoint<3>,
       .attributes = {{.name = "beta_fast", .least = 1e-3},
                      {.name = "beta_slow", .least = 1e-3},
                      {.name = "factor", .least = 1},
                      {"fraction", 0, 1},
                      {.name = "magnitude", .least = 0},
                      {.name = "original_positions", .least = 1},
                      {.name = "theta", .least = 1.001}},
       .problem = RotaryProblem,
       .integer_operands = {1},
       .linear = {{0}}},
      {.name = "rotary_yarn_dx",
       .summary = "gradient of rotary_yarn: the turn backwards",
       .flops = FlopsPerPoint<3>,
       .linear = {{0}}},
      {.name = "rotary_llama3",
       .summary = "rotary position embedding for longer sequences (Llama 3.1)",
       .form = {"as of rotary", IsRotary},
       .adjoints = {{"rotary_llama3_dx", "dy0,x1->dx0"}},
       .flops = FlopsPerPoint<3>,
       .attributes = {{.name = "factor", .least = 1},
                      {"fraction", 0, 1},
                      {.name = "high_frequency", .least = 1e-3},
                      {.name = "low_frequency", .least = 1e-3},
                      {.name = "original_positions", .least = 1},
                      {.name = "theta", .least = 1}},
       .problem = RotaryProblem,
       .integer_operands = {1},
       .linear = {{0}}},
      {.name = "rotary_llama3_dx",
       .summary = "gradient of rotary_llama3: the turn backwards",
       .flops = FlopsPerPoint<3>,
       .linear = {{0}}},
      {.name = "rotary_longrope",
       .summary = "rotary position embedding for longer sequences (LongRoPE)",
       .form = {"as of rotary", IsRotary},
       .adjoints = {{"rotary_longrope_dx", "dy0,x1->dx0"}},
       .flops = FlopsPerPoint<3>,
       .attributes = {{.name = "divisor", .least = 1e-3, .list = true},
                      {"fraction", 0, 1},
                      {.name = "magnitude", .least = 0},
                      {.name = "theta", .least = 1}},
       .problem = LongRopeProblem,
       .integer_operands = {1},
       .linear = {{0}}},
      {.name = "rotary_longrope_dx",
       .summary = "gradient of rotary_longrope: the turn backwards",
       .flops = FlopsPerPoint<3>,
       .linear = {{0}}},
  };
}

}  // namespace tessera
