// Gathers the parameters of ZeRO stage 3 another number of blocks ahead, from a
// short list, uniformly: symmetric. A plan with a depth of its own keeps it.

#include <algorithm>
#include <array>

#include "planner/search/moves/scope.h"

namespace tessera {
namespace {

constexpr std::array kDepths = {0, 1, 2, 4};

std::optional<Proposal> Propose(const Plan& plan, const SearchSpace& space,
                                Rng& rng) {
  const uint32_t drawn = rng.Below(kDepths.size());
  const bool listed =
      std::ranges::find(kDepths, plan.prefetch) != kDepths.end();
  const bool gathers = std::ranges::any_of(
      plan.weights, [](const WeightPlacement& w) { return w.zero_stage == 3; });
  if (!listed || !gathers) return std::nullopt;
  Plan candidate = plan;
  candidate.prefetch = kDepths[drawn];
  return Finish(space, plan, std::move(candidate), 0);
}

}  // namespace

extern const Move kPrefetch;
const Move kPrefetch = {"prefetch", "blocks that parameters are gathered ahead",
                        1, Propose};

}  // namespace tessera
