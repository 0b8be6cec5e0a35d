// Changes the ZeRO stage of one weight, of its like in equal blocks or of all
// weights, and where there are several nodes whether they are cut within nodes
// only. They must agree before, as they do after, but for weights that
// several groups read, which follow as far as they can. Symmetric: weight,
// reach and the new cut are uniform, and a weight that several groups read
// changes alone, to what it can have: no two cuts lead to one plan.

#include <numeric>
#include <vector>

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

std::optional<double> Edit(Draft& draft, Rng& rng) {
  const SearchSpace& space = draft.space();
  const GraphIndex& index = space.index;
  const Plan& plan = draft.plan();
  if (index.weights.empty()) return std::nullopt;
  const size_t chosen = rng.Below(static_cast<uint32_t>(index.weights.size()));
  const uint32_t reach = DrawReach(draft, 3, rng);  // one, class, all
  if (reach != 0 && IsTiedAcrossGroups(index, plan, chosen)) {
    return std::nullopt;
  }
  const uint32_t cuts = space.cluster->num_nodes() > 1 ? kCuts : kStages;
  const bool within = draft.CutWithinNode(chosen);
  const int stage = plan.weights[chosen].zero_stage;
  const uint32_t cut =
      static_cast<uint32_t>(stage) + (within ? kStages - 1 : 0);
  const uint32_t next = (cut + 1 + rng.Below(cuts - 1)) % cuts;
  const int wanted = StageOf(next);
  if (HighestZeroStage(index, plan, chosen, wanted) != wanted) {
    return std::nullopt;
  }
  std::vector<size_t> changing = {chosen};
  if (reach == 1)
    changing = space.weights_of_kind[space.kind_of_weight[chosen]];
  if (reach == 2) {
    changing.resize(index.weights.size());
    std::iota(changing.begin(), changing.end(), size_t{0});
  }
  for (size_t w : changing) {
    if (plan.weights[w].zero_stage != HighestZeroStage(index, plan, w, stage) ||
        draft.CutWithinNode(w) != within) {
      return std::nullopt;
    }
    draft.TouchWeight(w);
    draft.edited().weights[w].zero_stage =
        HighestZeroStage(index, plan, w, wanted);
    draft.CutWithinNode(w, next >= kStages);
  }
  return 0;
}

}  // namespace

extern const Move kZero;
const Move kZero = {"zero", "ZeRO cut of a weight, its like or all", 2, Edit};

}  // namespace tessera
