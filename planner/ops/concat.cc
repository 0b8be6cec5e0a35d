// Features before features: z = (x, y) along the last dimension. x may lack
// dimensions of y, such as the heads, for all of which it is the same: the keys
// of multi-head latent attention are a rotary part that all heads share and a
// part of each head. The joint dimension is never split.

#include <algorithm>

#include "planner/ir/op.h"

namespace tessera {
namespace {

// The dimensions in front of the features.
Indices Rows(const Indices& indices) {
  return {indices.begin(), indices.end() - 1};
}

// Whether z has the rows of y, x a part of them in their order, and the last
// dimensions are three factors that cannot be split.
bool IsConcat(const IndexRule& rule) {
  if (rule.operands.size() != 2 || rule.results.size() != 1) return false;
  const Indices& x = rule.operands[0];
  const Indices& y = rule.operands[1];
  const Indices& z = rule.results[0];
  if (x.empty() || y.empty() || z.empty() || x.back() == y.back() ||
      x.back() == z.back() || y.back() == z.back()) {
    return false;
  }
  const Indices rows = Rows(y);
  size_t matched = 0;
  for (uint8_t f : rows) {
    matched += matched + 1 < x.size() && x[matched] == f;
  }
  return Rows(z) == rows && matched + 1 == x.size() &&
         !rule.factors[x.back()].splittable &&
         !rule.factors[y.back()].splittable &&
         !rule.factors[z.back()].splittable && z.back() == rule.FactorOf('d');
}

std::string ConcatProblem(const OpCall& call) {
  const int64_t x = call.extents[call.rule->operands[0].back()];
  const int64_t y = call.extents[call.rule->operands[1].back()];
  const int64_t z = call.extents[call.rule->results[0].back()];
  if (x + y == z) return "";
  return "makes " + std::to_string(z) + " features of " + std::to_string(x) +
         " and " + std::to_string(y);
}

// A sum where x lacks rows.
Flops ConcatDxFlops(const OpCall& call) {
  const Indices& dx = call.rule->results[0];
  const Indices& dy = call.rule->results[1];
  if (dx.size() == dy.size()) return {};
  double flops = static_cast<double>(call.extents[dx.back()]);
  for (uint8_t f : Rows(dy)) flops *= static_cast<double>(call.extents[f]);
  return {flops};
}

}  // namespace

std::vector<OpDef> ConcatOps() {
  return {
      {.name = "concat",
       .summary = "features before features",
       .form = {"x, y -> z with the rows of y, as in 'bsm!,bsgn!->bsgd!'",
                IsConcat},
       .adjoints = {{"concat_dx", "dy0->dx0,dx1"}},
       .attributes = {{.name = "features", .least = 2, .whole = true}},
       .problem = ConcatProblem,
       .sizes = {{'d', "features"}},
       .linear = {{0, 1}}},
      {.name = "concat_dx",
       .summary = "gradients of concat's parts",
       .flops = ConcatDxFlops,
       .linear = {{0}}},
  };
}

}  // namespace tessera
