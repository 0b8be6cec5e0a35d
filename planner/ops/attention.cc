// Attention with grouped-query heads: g key/value groups of r queries.
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
//
// Bidirectional attention (Vaswani et al. 2017; encoders, cross attention) has
// no causal mask: a query sees the keys t with position[b,t] >= 0, so that
// padding has negative positions, and, where `window` is positive,
// |position[b,s] - position[b,t]| < window. Queries and keys may be of
// sequences of different lengths.
//
// Relative attention (T5; Raffel et al. 2020, section 2.1) adds bias[n,g,r] to
// the scores of head (g, r), where n is the bucket of position[b,t] -
// position[b,s] (runtime/kernels/relative_bias.h); its mask is the causal or
// the bidirectional one. The bias is a weight, whose gradient is an operator of
// its own: it adds up over microbatches.

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

// Half of the buckets of each side are of one distance each.
std::string BucketsProblem(const OpCall& call) {
  const int64_t buckets = call.Extent('n');
  const int64_t sides = call.attribute("causal") == 0 ? 2 : 1;
  if (buckets % (2 * sides) != 0) {
    return std::to_string(buckets) + " buckets of distances: expected a " +
           "multiple of " + std::to_string(2 * sides);
  }
  const int64_t exact = buckets / (2 * sides);
  if (call.attribute("max_distance") > static_cast<double>(exact)) return "";
  return "max_distance is not above " + std::to_string(exact) +
         ", the distances with buckets of their own";
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
       .linear = {{2}},
       .accumulation = Accumulation::kAll},
      // Five products: the scores again, dv, dp, dq and dk.
      {.name = "attention_dqkv",
       .summary = "gradients of attention's queries, keys and values",
       .op_class = OpClass::kAttention,
       .flops = AttentionFlops<3, 2>,
       .streamed = 't',
       .linear = {{0}},
       .accumulation = Accumulation::kAll},
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
       .linear = {{2}},
       .accumulation = Accumulation::kAll},
      {.name = "attention_alibi_dqkv",
       .summary = "gradients of attention_alibi's queries, keys and values",
       .op_class = OpClass::kAttention,
       .flops = AttentionFlops<3, 2>,
       .streamed = 't',
       .linear = {{0}},
       .accumulation = Accumulation::kAll},
      {.name = "attention_bidirectional",
       .summary = "grouped-query attention to keys on both sides",
       .rule = "bsgrd!,bt!gd,btge!,bs,bt->bsgre,bsgr",
       .op_class = OpClass::kAttention,
       .adjoints = {{"attention_bidirectional_dqkv",
                     "dy0,x0,x1,x2,x3,x4,y0,y1->dx0,dx1,dx2"}},
       .flops = AttentionFlops<1, 1>,
       .attributes = {{.name = "causal", .least = 0, .most = 0},
                      {"scale"},
                      {.name = "window", .least = 0, .whole = true}},
       .integer_operands = {3, 4},
       .streamed = 't',
       .linear = {{2}},
       .accumulation = Accumulation::kAll},
      {.name = "attention_bidirectional_dqkv",
       .summary =
           "gradients of attention_bidirectional's queries, keys, values",
       .op_class = OpClass::kAttention,
       .flops = AttentionFlops<3, 2>,
       .streamed = 't',
       .linear = {{0}},
       .accumulation = Accumulation::kAll},
      {.name = "attention_relative",
       .summary = "grouped-query attention with biases by distance (T5)",
       .rule = "bsgrd!,bt!gd,btge!,bs,bt,n!gr->bsgre,bsgr",
       .op_class = OpClass::kAttention,
       .adjoints = {{"attention_relative_dqkv",
                     "dy0,x0,x1,x2,x3,x4,x5,y0,y1->dx0,dx1,dx2"},
                    {"attention_relative_dbias",
                     "dy0,x0,x1,x2,x3,x4,x5,y0,y1->dx5"}},
       .flops = AttentionFlops<1, 1>,
       .attributes = {{.name = "causal", .least = 0, .most = 1, .whole = true},
                      {.name = "max_distance", .least = 2, .whole = true},
                      {"scale"}},
       .problem = BucketsProblem,
       .integer_operands = {3, 4},
       .linear = {{2}},
       .accumulation = Accumulation::kAll},
      {.name = "attention_relative_dqkv",
       .summary = "gradients of attention_relative's queries, keys and values",
       .op_class = OpClass::kAttention,
       .flops = AttentionFlops<3, 2>,
       .linear = {{0}},
       .accumulation = Accumulation::kAll},
      // The scores and their gradients again.
      {.name = "attention_relative_dbias",
       .summary = "gradient of attention_relative's biases",
       .op_class = OpClass::kAttention,
       .flops = AttentionFlops<1, 1>,
       .linear = {{0}},
       .accumulation = Accumulation::kAll},
  };
}

}  // namespace tessera
