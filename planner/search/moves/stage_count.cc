// Trades a prime factor between the number of stages and data, tensor or
// context parallelism in a uniform plan. The samples of a microbatch and a
// replica stay. Symmetric: prime, direction and partner are uniform, and both
// plans are uniform. Where no copies of the weights are left there is no ZeRO;
// where there are some again its stage is uniform among all, which makes the
// ratio.

#include <cmath>

#include "planner/search/move.h"
#include "planner/search/moves/uniform.h"

namespace tessera {
namespace {

constexpr uint32_t kZeroStages = 4;

bool HasCopies(const Strategy& strategy) {
  return int64_t{strategy.dp} * strategy.cp * strategy.ep > 1;
}

std::optional<double> Edit(Draft& draft, Rng& rng) {
  const auto& primes = draft.space().device_primes;
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
  const bool had_copies = HasCopies(*strategy);
  from /= prime;
  to *= prime;
  if (strategy->tp == 1 && strategy->sp) return std::nullopt;
  double log_ratio = 0;
  if (had_copies && !HasCopies(*strategy)) {
    strategy->zero = 0;
    log_ratio = -std::log(static_cast<double>(kZeroStages));
  } else if (!had_copies && HasCopies(*strategy)) {
    strategy->zero = static_cast<int>(rng.Below(kZeroStages));
    log_ratio = std::log(static_cast<double>(kZeroStages));
  }
  if (!ReplaceByStrategy(*strategy, draft)) return std::nullopt;
  return log_ratio;
}

}  // namespace

extern const Move kStageCount;
const Move kStageCount = {"stage-count",
                          "stages against data, tensor or context parallelism",
                          1, Edit};

}  // namespace tessera
