// Changes the ZeRO stage of one weight, of its like in equal blocks or of all
// weights, and where there are several nodes whether they are cut within nodes
// only. They must agree before, as they do after, but for weights that
// several groups read, which follow as far as they can. Symmetric: weight,
// reach and the new cut are uniform, and a weight that several groups read
// changes alone, to what it can have: no two cuts lead to one plan.

#include "planner/plan/axis_roles.h"
#include "planner/search/moves/scope.h"

namespace tessera {
namespace {

// Stages 0 to 3 over all axes, then 1 to 3 within nodes.
constexpr uint32_t kStages = 4;
constexpr uint32_t kCuts = 7;

int StageOf(uint32_t cut) {
  return static_cast<int>(cut < kStages ? cut : cut - kStages + 1);
}

std::optional<Proposal> Propose(const Plan& plan, const SearchSpace& space,
                                Rng& rng) {
  const GraphIndex& index = space.index;
  if (index.weights.empty()) return std::nullopt;
  const size_t chosen = rng.Below(static_cast<uint32_t>(index.weights.size()));
  const uint32_t reach = rng.Below(3);  // one, class, all
  const GraphIndex::Use& home = index.weights[chosen].home;
  const auto block_class = [&](const GraphIndex::Use& use) {
    return index
        .block_class[static_cast<size_t>(index.graph->node(use.node).block)];
  };
  if (reach != 0 && IsTiedAcrossGroups(index, plan, chosen)) {
    return std::nullopt;
  }
  const uint32_t cuts = space.cluster->num_nodes() > 1 ? kCuts : kStages;
  std::vector<bool> within = CutWithinNode(space, plan);
  const bool chosen_within = within[chosen];
  const int stage = plan.weights[chosen].zero_stage;
  const uint32_t cut =
      static_cast<uint32_t>(stage) + (chosen_within ? kStages - 1 : 0);
  const uint32_t next = (cut + 1 + rng.Below(cuts - 1)) % cuts;
  const int wanted = StageOf(next);
  if (HighestZeroStage(index, plan, chosen, wanted) != wanted) {
    return std::nullopt;
  }
  Plan candidate = plan;
  for (size_t w = 0; w < index.weights.size(); ++w) {
    const GraphIndex::Use& other = index.weights[w].home;
    const bool like = block_class(other) == block_class(home) &&
                      index.position[other.node.index()] ==
                          index.position[home.node.index()] &&
                      other.operand == home.operand;
    if (w != chosen && reach != 2 && !(reach == 1 && like)) continue;
    if (plan.weights[w].zero_stage != HighestZeroStage(index, plan, w, stage) ||
        within[w] != chosen_within) {
      return std::nullopt;
    }
    candidate.weights[w].zero_stage = HighestZeroStage(index, plan, w, wanted);
    within[w] = next >= kStages;
  }
  return Finish(space, plan, std::move(candidate), 0, within);
}

}  // namespace

extern const Move kZero;
const Move kZero = {"zero", "ZeRO cut of a weight, its like or all", 2,
                    Propose};

}  // namespace tessera
