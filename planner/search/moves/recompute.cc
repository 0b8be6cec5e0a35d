// Changes how much a layer, its like in the stage or its like everywhere
// computes again. They must agree before, as they do after. Symmetric: layer,
// reach and the new level are uniform, and a level that a layer does not tell
// from a lower one is not drawn.

#include "planner/plan/recompute.h"

#include "planner/search/moves/scope.h"

namespace tessera {
namespace {

std::optional<double> Edit(Draft& draft, Rng& rng) {
  const SearchSpace& space = draft.space();
  const Plan& plan = draft.plan();
  const auto [first, last] = Layers(space.index);
  const int block = DrawBlock(space, rng);
  // Up to kClass, one layer in a folded walk too.
  const auto scope = static_cast<Scope>(rng.Below(3));
  const auto levels = static_cast<uint32_t>(RecomputeLevels().size());
  const uint32_t step = 1 + rng.Below(levels - 1);
  if (block < first || block >= last) return std::nullopt;
  const auto level = RecomputeOf(space.index, plan, block);
  const auto blocks = BlocksIn(space, plan, block, scope);
  if (!level.has_value() || !blocks.has_value()) return std::nullopt;
  const auto wanted = static_cast<RecomputeLevel>(
      (static_cast<uint32_t>(*level) + step) % levels);
  for (int b : *blocks) {
    if (RecomputeOf(space.index, plan, b) != level) return std::nullopt;
    draft.TouchBlock(b);
    SetRecompute(space.index, b, wanted, draft.edited());
    if (RecomputeOf(space.index, plan, b) != wanted) return std::nullopt;
  }
  return 0;
}

}  // namespace

extern const Move kRecompute;
const Move kRecompute = {"recompute", "what layers compute again in backward",
                         2, Edit};

}  // namespace tessera
