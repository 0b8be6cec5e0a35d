// Moves the parameters, the optimizer states, the gradients or the kept
// activations of some blocks to another tier of memory. They must be on one
// tier before, as they are after, but for parameters and gradients of weights
// that several groups read, which stay on their devices. Symmetric: blocks,
// what moves and the new tier, of as many as it may have, are uniform. Where a
// plan fits there is little to win by it, and the plans take far longer to
// price than others: they are simulated.

#include "planner/plan/recompute.h"
#include "planner/search/moves/scope.h"

namespace tessera {
namespace {

enum class What : uint8_t { kParameters, kOptimizer, kGradients, kActivations };
constexpr uint32_t kWhats = 4;

// The tiers of what moves in a block, to be edited.
std::vector<MemoryTier*> TiersIn(int block, What what, Draft& draft) {
  const GraphIndex& index = draft.space().index;
  Plan& plan = draft.edited();
  std::vector<MemoryTier*> tiers;
  if (what == What::kActivations) {
    for (NodeId id : index.nodes_of_block[static_cast<size_t>(block)]) {
      if (!KeepsResults(index, plan, id)) continue;
      draft.Touch(id);
      tiers.push_back(&plan.ops[id.index()].activation_tier);
    }
    return tiers;
  }
  for (size_t w : draft.space().weights_of_block[static_cast<size_t>(block)]) {
    WeightPlacement& weight = plan.weights[w];
    if (what == What::kOptimizer) {
      draft.TouchWeight(w);
      tiers.push_back(&weight.optimizer_tier);
    } else if (!IsTiedAcrossGroups(index, plan, w)) {
      draft.TouchWeight(w);
      tiers.push_back(what == What::kGradients ? &weight.gradient_tier
                                               : &weight.parameter_tier);
    }
  }
  return tiers;
}

std::optional<double> Edit(Draft& draft, Rng& rng) {
  const SearchSpace& space = draft.space();
  if (space.cluster->hosts.empty()) return std::nullopt;
  const bool has_files = space.cluster->HasStorage();
  const int block = DrawBlock(space, rng);
  const auto scope = DrawScope(draft, kScopes, rng);
  const auto what = static_cast<What>(rng.Below(kWhats));
  const uint32_t tiers = has_files && what != What::kGradients ? 3 : 2;
  const uint32_t step = 1 + rng.Below(tiers - 1);
  const auto blocks = BlocksIn(space, draft.plan(), block, scope);
  if (!blocks.has_value()) return std::nullopt;
  std::optional<MemoryTier> before;
  for (int b : *blocks) {
    for (MemoryTier* tier : TiersIn(b, what, draft)) {
      if (!before) before = *tier;
      if (*tier != *before) return std::nullopt;
      *tier = static_cast<MemoryTier>((static_cast<uint32_t>(*tier) + step) %
                                      tiers);
    }
  }
  return 0;
}

}  // namespace

extern const Move kOffload;
const Move kOffload = {
    "offload",
    "tier of memory of parameters, optimizer states, gradients or activations",
    1, Edit, MoveNeeds::kOffloads};

}  // namespace tessera
