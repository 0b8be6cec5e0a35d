// Mixture-of-experts layers (Shazeer et al. 2017; GShard, Lepikhin et al. 2020;
// Mixtral, Jiang et al. 2024). A token takes its `top_k` most likely experts.
//
// Scores are the softmax of a token's logits, or their sigmoids. Where experts
// are in `groups` of equal size, a token may choose only from the `top_groups`
// groups whose `group_best` best scores have the largest sums (DeepSeek-V2,
// arXiv 2405.04434, section 2.2.2: one; DeepSeek-V3, arXiv 2412.19437: two).
//
// The routing group is the sample: each expert has `capacity` slots for each
// sample, given out in the order of the tokens (and of a token's choices, best
// first); what finds none is dropped. A capacity of the sequence length drops
// nothing. Splits of the batch leave the routing as it is, and a split of the
// sequence does not exist for the router: its few logits are gathered.
//
// Slots are [e, b, s, h]: expert, sample, slot, features; the letter s is that
// of sequences, so that what splits sequences splits slots. Outside of experts
// the axes of expert parallelism split samples, inside experts: both exchanges
// between tokens and slots are then all-to-alls that the layouts imply.

#include "planner/ir/op.h"

namespace tessera {

namespace {

constexpr AttributeDef kTopK = {.name = "top_k", .least = 1, .whole = true};
constexpr AttributeDef kCapacity = {
    .name = "capacity", .least = 1, .whole = true};

// How a router chooses.
constexpr AttributeDef kGroupBest = {
    .name = "group_best", .least = 1, .whole = true};
constexpr AttributeDef kGroups = {.name = "groups", .least = 1, .whole = true};
constexpr AttributeDef kSigmoid = {
    .name = "sigmoid", .least = 0, .most = 1, .whole = true};
constexpr AttributeDef kTopGroups = {
    .name = "top_groups", .least = 1, .whole = true};

// Of operators with the logits of `e` experts.
std::string RoutingProblem(const OpCall& call) {
  const auto whole = [&](const char* name) {
    return static_cast<int64_t>(call.attribute(name));
  };
  const auto at_most = [&](const char* name, int64_t most,
                           const std::string& what) {
    if (whole(name) <= most) return std::string();
    return std::string(name) + " is " + std::to_string(whole(name)) +
           ": expected at most " + std::to_string(most) + ", " + what;
  };
  const int64_t experts = call.Extent('e');
  const int64_t groups = whole("groups");
  if (experts % groups != 0) {
    return "groups is " + std::to_string(groups) + ": expected a divisor of " +
           std::to_string(experts) + ", the number of experts";
  }
  const int64_t each = experts / groups;
  std::string problem = at_most("top_groups", groups, "the number of groups");
  if (problem.empty()) {
    problem = at_most("group_best", each, "the experts of a group");
  }
  if (problem.empty()) {
    problem = at_most("top_k", whole("top_groups") * each,
                      groups == 1 ? "the number of experts"
                                  : "the experts of the chosen groups");
  }
  return problem;
}

}  // namespace

std::vector<OpDef> MoeOps() {
  return {
      // The k largest scores of each token, divided by their sum where
      // `renormalise` is not 0, times `scale`. Results: weights, and the slot
      // of each choice: expert * capacity + place, or -1 where it is dropped.
      {.name = "moe_gate",
       .summary = "weights and slots of each token's top-k experts",
       .rule = "bs!e!->bsk,bsk",
       .adjoints = {{"moe_gate_dx", "dy0,x0->dx0"}},
       .flops = FlopsPerPoint<2>,
       .attributes = {kCapacity,
                      kGroupBest,
                      kGroups,
                      {.name = "renormalise", .least = 0, .most = 1},
                      {.name = "scale", .least = 1e-6},
                      kSigmoid,
                      kTopGroups,
                      kTopK},
       .problem = RoutingProblem,
       .integer_results = {1},
       .sizes = {{'k', "top_k"}}},
      {.name = "moe_gate_dx",
       .summary = "gradient of moe_gate's logits",
       .flops = FlopsPerPoint<2>},
      // The auxiliary loss of Fedus et al. 2022 (Switch Transformer, equations
      // 4 to 6) with the sample as its unit: coefficient * e * sum over e of
      // (share of the choices, drops included) * (mean probability), averaged
      // over the samples of the global batch. 1 * coefficient when balanced.
      // The probability of an expert is its share of a token's scores.
      {.name = "moe_balance",
       .summary = "load-balance loss of a router",
       .rule = "bs!e!->",
       .adjoints = {{"moe_balance_dx", "x0->dx0"}},
       .flops = FlopsPerPoint<4>,
       .attributes = {{.name = "coefficient", .least = 0},
                      kGroupBest,
                      kGroups,
                      kSigmoid,
                      kTopGroups,
                      kTopK},
       .problem = RoutingProblem,
       .accumulation = Accumulation::kAll},
      {.name = "moe_balance_dx",
       .summary = "gradient of moe_balance's logits",
       .flops = FlopsPerPoint<4>},
      // Tokens into their slots; empty slots are zero. Tokens and their slots
      // are read whole along the sequence t; a split of it would leave partial
      // sums.
      {.name = "moe_dispatch",
       .summary = "tokens into the slots of their experts",
       .rule = "bth,btk->ebsh",
       .adjoints = {{"moe_dispatch_dx", "dy0,x1->dx0"}},
       .attributes = {kCapacity,
                      {.name = "experts", .least = 1, .whole = true}},
       .integer_operands = {1},
       .sizes = {{'e', "experts"}, {'s', "capacity"}}},
      {.name = "moe_dispatch_dx",
       .summary = "gradient of moe_dispatch's tokens"},
      // One matrix for each expert. All slots are computed, filled or not.
      {.name = "expert_linear",
       .summary = "dense layer of each expert",
       .rule = "ebsi,eoi->ebso",
       .op_class = OpClass::kMatmul,
       .adjoints = {{"expert_linear_dx", "dy0,x1->dx0"},
                    {"expert_linear_dw", "dy0,x0->dx1"}},
       .flops = FlopsPerPoint<2>,
       .attributes = {kTopK},
       .accumulation = Accumulation::kAll},
      {.name = "expert_linear_dx",
       .summary = "gradient of expert_linear's input",
       .op_class = OpClass::kMatmul,
       .flops = FlopsPerPoint<2>,
       .accumulation = Accumulation::kAll},
      {.name = "expert_linear_dw",
       .summary = "gradient of expert_linear's weight",
       .op_class = OpClass::kMatmul,
       .flops = FlopsPerPoint<2>,
       .accumulation = Accumulation::kAll},
      // The slot of each of a token's choices; zero where it was dropped. Its
      // result is what moe_combine's backward reads: saved as it arrives, so
      // that backward does not exchange the slots again.
      {.name = "moe_collect",
       .summary = "rows of slots, one for each choice of a token",
       .rule = "ebth,bsk->bskh",
       .adjoints = {{"moe_collect_dx", "dy0,x1->dx0"}},
       .integer_operands = {1}},
      {.name = "moe_collect_dx", .summary = "gradient of moe_collect's slots"},
      {.name = "moe_combine",
       .summary = "weighted sum of a token's choices",
       .rule = "bskh,bsk->bsh",
       .adjoints = {{"moe_combine_dx", "dy0,x1->dx0"},
                    {"moe_combine_dw", "dy0,x0->dx1"}},
       .flops = FlopsPerPoint<2>},
      {.name = "moe_combine_dx",
       .summary = "gradient of moe_combine's choices",
       .flops = FlopsPerPoint<1>},
      {.name = "moe_combine_dw",
       .summary = "gradient of moe_combine's weights",
       .flops = FlopsPerPoint<2>},
  };
}

}  // namespace tessera
