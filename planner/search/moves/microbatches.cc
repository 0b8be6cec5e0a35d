// Multiplies or divides the number of microbatches by a prime factor of the
// batch. Symmetric: prime and direction are uniform.

#include "planner/search/moves/scope.h"

namespace tessera {
namespace {

std::optional<Proposal> Propose(const Plan& plan, const SearchSpace& space,
                                Rng& rng) {
  const auto& primes = space.batch_primes;
  if (primes.empty()) return std::nullopt;
  const int prime = primes[rng.Below(static_cast<uint32_t>(primes.size()))];
  const bool more = rng.Below(2) == 1;
  const int64_t batch = space.index.graph->global_batch;
  int64_t microbatches = plan.microbatches;
  if (more) {
    microbatches *= prime;
  } else if (microbatches % prime == 0) {
    microbatches /= prime;
  } else {
    return std::nullopt;
  }
  if (batch % microbatches != 0) return std::nullopt;
  Plan candidate = plan;
  candidate.microbatches = static_cast<int>(microbatches);
  return Finish(space, plan, std::move(candidate), 0);
}

}  // namespace

extern const Move kMicrobatches;
const Move kMicrobatches = {"microbatches", "more or fewer microbatches", 2,
                            Propose};

}  // namespace tessera
