// Causal attention with grouped-query heads: g key/value groups of r queries.
//   o[b,s,g,r,:] = sum_t softmax_t(scale * q[b,s,g,r,:].k[b,t,g,:]) v[b,t,g,:]
// over the keys t with position[b,t] <= position[b,s], and, where `window` is
// positive, position[b,s] - position[b,t] < window. The second result is the
// log-sum-exp of each row, which backward reads instead of the probabilities
// (Dao et al. 2022). Splitting s leaves k and v whole: gathered context
// parallelism; splitting r leaves dk and dv partial. Blocks of t may come one
// by one: results (o1, lse1) and (o2, lse2) over disjoint keys merge to
//   lse = log(exp(lse1) + exp(lse2)), o = sum_i exp(lse_i - lse) o_i.
//
// ALiBi (Press et al. 2022) adds slope * (position[b,t] - position[b,s]) to the
// scores of each head, counted over g and r; of n heads the first m, the
// largest power of two, have the slopes 2^(-8 (i + 1) / m), the others 2^(-4 (2
// (i - m) + 1) / m).

#include <string>

#include "planner/ir/op.h"

namespace tessera {
namespace {

// `products` matrix products of 2*d (or 2*e) operations for every pair of
// query and key. Causal masking is not credited, as in the model's FLOPs.
template <int kProductsQk, int kProductsV>
Flops AttentionFlops(const OpCall& call) {
  double pairs = 1;
  for (char letter : {'b', 's', 'g', 'r', 't'}) {
    pairs *= static_cast<double>(call.Extent(letter));
  }
  return {2 * pairs *
          static_cast<double>(kProductsQk * call.Extent('d') +
                              kProductsV * call.Extent('e'))};
}

std::string AlibiProblem(const OpCall& call) {
  const int64_t heads = call.Extent('g') * call.Extent('r');
  if (call.attribute("alibi_heads") == static_cast<double>(heads)) return "";
  return "alibi_heads is not the number of heads, " + std::to_string(heads);
}

}  // namespace

std::vector<OpDef> AttentionOps() {
  return {
      {.name = "attention",
       .summary = "causal grouped-query attention",
       .rule = "bsgrd!,bt!gd,btge!,bs,bt->bsgre,bsgr",
       .op_class = OpClass::kAttention,
       .adjoints = {{"attention_dqkv",
                     "dy0,x0,x1,x2,x3,x4,y0,y1->dx0,dx1,dx2"}},
       .flops = AttentionFlops<1, 1>,
       .attributes = {{"scale"}, {.name = "window", .least = 0, .whole = true}},
       .integer_operands = {3, 4},
       .streamed = 't',
       .linear = {{2}}},
      // Five products: the scores again, dv, dp, dq and dk.
      {.name = "attention_dqkv",
       .summary = "gradients of attention's queries, keys and values",
       .op_class = OpClass::kAttention,
       .flops = AttentionFlops<3, 2>,
       .streamed = 't',
       .linear = {{0}}},
      {.name = "attention_alibi",
       .summary = "causal grouped-query attention with linear biases",
       .rule = "bsgrd!,bt!gd,btge!,bs,bt->bsgre,bsgr",
       .op_class = OpClass::kAttention,
       .adjoints = {{"attention_alibi_dqkv",
                     "dy0,x0,x1,x2,x3,x4,y0,y1->dx0,dx1,dx2"}},
       .flops = AttentionFlops<1, 1>,
       .attributes = {{.name = "alibi_heads", .least = 1, .whole = true},
                      {"scale"},
                      {.name = "window", .least = 0, .whole = true}},
       .problem = AlibiProblem,
       .integer_operands = {3, 4},
       .streamed = 't',
       .linear = {{2}}},
      {.name = "attention_alibi_dqkv",
       .summary = "gradients of attention_alibi's queries, keys and values",
       .op_class = OpClass::kAttention,
       .flops = AttentionFlops<3, 2>,
       .streamed = 't',
       .linear = {{0}}},
  };
}

}  // namespace tessera
