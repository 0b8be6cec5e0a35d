// Trades a prime factor between the number of stages and data, tensor or
// context parallelism in a uniform plan. The samples of a microbatch and a
// replica stay. Symmetric: prime, direction and partner are uniform, and both
// plans are uniform.

#include "planner/plan/strategy.h"
#include "planner/search/move.h"

namespace tessera {
namespace {

std::optional<double> Edit(Draft& draft, Rng& rng) {
  const SearchSpace& space = draft.space();
  const auto& primes = space.device_primes;
  if (primes.empty()) return std::nullopt;
  const int prime = primes[rng.Below(static_cast<uint32_t>(primes.size()))];
  const bool more_stages = rng.Below(2) == 1;
  constexpr int Strategy::*kPartners[] = {&Strategy::dp, &Strategy::tp,
                                          &Strategy::cp};
  const auto partner = kPartners[rng.Below(3)];

  std::optional<Strategy> strategy = draft.strategy();
  if (!strategy.has_value()) return std::nullopt;
  int& from = more_stages ? (*strategy).*partner : strategy->pp;
  int& to = more_stages ? strategy->pp : (*strategy).*partner;
  if (from % prime != 0) return std::nullopt;
  from /= prime;
  to *= prime;
  if (strategy->tp == 1 && strategy->sp) return std::nullopt;
  auto made = PlanFromStrategy(space.index, *space.cluster, *strategy);
  // The way back starts from the strategy that the plan shows.
  if (!made || UniformStrategy(space.index, *space.cluster, *made) !=
                   std::optional<Strategy>(*strategy)) {
    return std::nullopt;
  }
  NameAxes(space.index, *made);
  draft.Replace(*std::move(made));
  return 0;
}

}  // namespace

extern const Move kStageCount;
const Move kStageCount = {"stage-count",
                          "stages against data, tensor or context parallelism",
                          1, Edit};

}  // namespace tessera
