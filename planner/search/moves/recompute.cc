// Changes how much a layer, its like in the stage or its like everywhere
// computes again. They must agree before, as they do after. Symmetric: layer,
// reach and the new level are uniform, and a level that a layer does not tell
// from a lower one is not drawn.

#include "planner/plan/recompute.h"

#include "planner/search/moves/scope.h"

namespace tessera {
namespace {

std::optional<Proposal> Propose(const Plan& plan, const SearchSpace& space,
                                Rng& rng) {
  const auto [first, last] = Layers(space.index);
  const int block = DrawBlock(space, rng);
  const auto scope = static_cast<Scope>(rng.Below(3));  // up to kClass
  const auto levels = static_cast<uint32_t>(RecomputeLevels().size());
  const uint32_t step = 1 + rng.Below(levels - 1);
  if (block < first || block >= last) return std::nullopt;
  const auto level = RecomputeOf(space.index, plan, block);
  const auto blocks = BlocksIn(space, plan, block, scope);
  if (!level.has_value() || !blocks.has_value()) return std::nullopt;
  const auto wanted = static_cast<RecomputeLevel>(
      (static_cast<uint32_t>(*level) + step) % levels);
  Plan candidate = plan;
  for (int b : *blocks) {
    if (RecomputeOf(space.index, plan, b) != level) return std::nullopt;
    SetRecompute(space.index, b, wanted, candidate);
    if (RecomputeOf(space.index, candidate, b) != wanted) return std::nullopt;
  }
  return Finish(space, plan, std::move(candidate), 0);
}

}  // namespace

extern const Move kRecompute;
const Move kRecompute = {"recompute", "what layers compute again in backward",
                         2, Propose};

}  // namespace tessera
