// Dense layer with optional bias: y[M,N] = x[M,K] w[N,K]^T + bias[N], where M,
// N and K are runs of factors: "bsi,oi+o->bso", "bsi,grdi+grd->bsgrd". The
// node gives the rule; x is (M, K), w is (N, K), y is (M, N), in these orders.

#include "planner/ir/op.h"

namespace tessera {
namespace {

// Whether x is (M, K), w is (N, K), y is (M, N) and the bias, if any, is an
// additive N: as a product it would be added once for each shard of K.
bool IsLinear(const IndexRule& rule) {
  const size_t operands = rule.operands.size();
  if ((operands != 2 && operands != 3) || rule.results.size() != 1 ||
      rule.terms[1] != rule.terms[0]) {
    return false;
  }
  const Indices& x = rule.operands[0];
  const Indices& w = rule.operands[1];
  Indices m;
  Indices n;
  Indices k;
  for (uint8_t f : x) (Holds(w, f) ? k : m).push_back(f);
  for (uint8_t f : w) {
    if (!Holds(x, f)) n.push_back(f);
  }
  const auto is = [](const Indices& indices, Indices first,
                     const Indices& second) {
    first.insert(first.end(), second.begin(), second.end());
    return indices == first;
  };
  return is(x, m, k) && is(w, n, k) && is(rule.results[0], m, n) &&
         (operands == 2 ||
          (rule.operands[2] == n && rule.terms[2] != rule.terms[0]));
}

}  // namespace

std::vector<OpDef> LinearOps() {
  return {
      {.name = "linear",
       .summary = "dense layer, optional bias",
       .form = {"'M K,N K->M N' or 'M K,N K+N->M N' of runs of factors, such "
                "as 'bsi,oi+o->bso'",
                IsLinear},
       .op_class = OpClass::kMatmul,
       .adjoints = {{"linear_dx", "dy0,x1->dx0"},
                    {"linear_dw", "dy0,x0->dx1"},
                    {"linear_db", "dy0->dx2"}},
       .flops = FlopsPerPoint<2>,
       .linear = {{0}, {1}},
       .accumulation = Accumulation::kAll},
      // Its logits decide discretely: a router's choices should not depend on
      // how 16-bit sums are rounded.
      {.name = "linear_fp32",
       .summary = "dense layer with a result of at least fp32 (a router)",
       .form = {"as of linear", IsLinear},
       .op_class = OpClass::kMatmul,
       .adjoints = {{"linear_dx", "dy0,x1->dx0"},
                    {"linear_dw", "dy0,x0->dx1"},
                    {"linear_db", "dy0->dx2"}},
       .flops = FlopsPerPoint<2>,
       .wide = true,
       .accumulation = Accumulation::kAll},
      {.name = "linear_dx",
       .summary = "gradient of linear's input: dy w",
       .op_class = OpClass::kMatmul,
       .flops = FlopsPerPoint<2>,
       .linear = {{0}, {1}},
       .accumulation = Accumulation::kAll},
      {.name = "linear_dw",
       .summary = "gradient of linear's weight: dy^T x",
       .op_class = OpClass::kMatmul,
       .flops = FlopsPerPoint<2>,
       .linear = {{0}, {1}},
       .accumulation = Accumulation::kAll},
      {.name = "linear_db",
       .summary = "gradient of linear's bias: column sums of dy",
       .flops = FlopsPerPoint<1>,
       .linear = {{0}},
       .accumulation = Accumulation::kAll},
  };
}

}  // namespace tessera
