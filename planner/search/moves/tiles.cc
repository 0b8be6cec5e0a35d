// Gives the linears of a layer, of its like in the stage or of its like
// everywhere another number of tiles, from a short list. They must agree
// before, as they do after. Symmetric: layer, reach and the new number are
// uniform, and one that a layer has no room for is not drawn. Layers with a
// number of their own keep it.

#include "planner/plan/tiles.h"

#include <algorithm>
#include <array>

#include "planner/search/moves/scope.h"

namespace tessera {
namespace {

constexpr std::array kNumbers = {1, 2, 4, 8};

std::optional<double> Edit(Draft& draft, Rng& rng) {
  const SearchSpace& space = draft.space();
  const Plan& plan = draft.plan();
  const int block = DrawBlock(space, rng);
  const auto scope = DrawScope(draft, 3, rng);  // up to kClass
  const uint32_t step = 1 + rng.Below(kNumbers.size() - 1);
  const auto tiles = TilesOf(space.index, plan, block);
  const auto blocks = BlocksIn(space, plan, block, scope);
  if (!tiles.has_value() || !blocks.has_value()) return std::nullopt;
  const auto* const known = std::ranges::find(kNumbers, *tiles);
  if (known == kNumbers.end()) return std::nullopt;
  const size_t at = static_cast<size_t>(known - kNumbers.begin());
  const int wanted = kNumbers[(at + step) % kNumbers.size()];
  for (int b : *blocks) {
    if (TilesOf(space.index, plan, b) != tiles) return std::nullopt;
    draft.TouchBlock(b);
    SetTiles(space.index, b, wanted, draft.edited());
    if (TilesOf(space.index, plan, b) != wanted) return std::nullopt;
  }
  return 0;
}

}  // namespace

extern const Move kTiles;
const Move kTiles = {"tiles", "tiles that linears run in, one after another", 1,
                     Edit};

}  // namespace tessera
