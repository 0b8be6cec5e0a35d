// Gathers the parameters of ZeRO stage 3 another number of blocks ahead, from a
// short list, uniformly: symmetric. A plan with a depth of its own keeps it.

#include <algorithm>
#include <array>

#include "planner/search/move.h"

namespace tessera {
namespace {

constexpr std::array kDepths = {0, 1, 2, 4};

std::optional<double> Edit(Draft& draft, Rng& rng) {
  const Plan& plan = draft.plan();
  const uint32_t drawn = rng.Below(kDepths.size());
  const bool listed =
      std::ranges::find(kDepths, plan.prefetch) != kDepths.end();
  const bool gathers = std::ranges::any_of(
      plan.weights, [](const WeightPlacement& w) { return w.zero_stage == 3; });
  if (!listed || !gathers) return std::nullopt;
  draft.edited().prefetch = kDepths[drawn];
  return 0;
}

}  // namespace

extern const Move kPrefetch;
const Move kPrefetch = {"prefetch", "blocks that parameters are gathered ahead",
                        1, Edit};

}  // namespace tessera
