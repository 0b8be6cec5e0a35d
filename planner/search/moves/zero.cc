// Changes the ZeRO stage of one weight, of its like in equal blocks or of all
// weights. They must agree before, as they do after, but for weights that
// several groups read, which follow as far as they can. Symmetric: weight,
// reach and the new stage are uniform, and a weight that several groups read
// changes alone.

#include "planner/plan/axis_roles.h"
#include "planner/search/moves/scope.h"

namespace tessera {
namespace {

constexpr uint32_t kStages = 4;  // 0 to 3

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
  const int stage = plan.weights[chosen].zero_stage;
  const int wanted = (stage + 1 + static_cast<int>(rng.Below(kStages - 1))) %
                     static_cast<int>(kStages);
  Plan candidate = plan;
  for (size_t w = 0; w < index.weights.size(); ++w) {
    const GraphIndex::Use& other = index.weights[w].home;
    const bool like = block_class(other) == block_class(home) &&
                      index.position[other.node.index()] ==
                          index.position[home.node.index()] &&
                      other.operand == home.operand;
    if (w != chosen && reach != 2 && !(reach == 1 && like)) continue;
    if (plan.weights[w].zero_stage != HighestZeroStage(index, plan, w, stage)) {
      return std::nullopt;
    }
    candidate.weights[w].zero_stage = HighestZeroStage(index, plan, w, wanted);
  }
  return Finish(space, plan, std::move(candidate), 0);
}

}  // namespace

extern const Move kZero;
const Move kZero = {"zero", "ZeRO stage of a weight, its like or all", 2,
                    Propose};

}  // namespace tessera
