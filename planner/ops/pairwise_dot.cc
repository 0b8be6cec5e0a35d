// The products of all pairs of a sample's vectors, which recommendation models
// take for the interactions of their features (Naumov et al. 2019, DLRM,
// section 2.1.4): y[b, p] = sum over h of x[b,i,h] x[b,j,h] with
// p = i (i - 1) / 2 + j for i > j, row by row of the triangle below the
// diagonal. A split of h leaves a partial sum.

#include "planner/ir/op.h"

namespace tessera {
namespace {

// A multiply-add for each pair and feature.
Flops PairFlops(const OpCall& call) {
  const auto n = static_cast<double>(call.Extent('n'));
  return {static_cast<double>(call.Extent('b') * call.Extent('h')) * n *
          (n - 1)};
}
// Twice as many: each pair has two gradients.
Flops PairFlopsDx(const OpCall& call) {
  return PairFlops(call) * 2;
}

std::string PairProblem(const OpCall& call) {
  const int64_t n = call.Extent('n');
  if (call.Extent('p') == n * (n - 1) / 2) return "";
  return "has " + std::to_string(call.Extent('p')) + " pairs of " +
         std::to_string(n) + " vectors";
}

}  // namespace

std::vector<OpDef> PairwiseDotOps() {
  return {
      {.name = "pairwise_dot",
       .summary = "products of all pairs of a sample's vectors",
       .rule = "bn!h->bp!",
       .adjoints = {{"pairwise_dot_dx", "dy0,x0->dx0"}},
       .flops = PairFlops,
       .attributes = {{.name = "pairs", .least = 1, .whole = true}},
       .problem = PairProblem,
       .sizes = {{'p', "pairs"}}},
      {.name = "pairwise_dot_dx",
       .summary = "gradient of pairwise_dot",
       .flops = PairFlopsDx,
       .linear = {{0}}},
  };
}

}  // namespace tessera
