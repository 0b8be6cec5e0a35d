// Multiplies or divides the number of microbatches by a prime factor of the
// batch. Symmetric: prime and direction are uniform.

#include "planner/search/move.h"

namespace tessera {
namespace {

std::optional<double> Edit(Draft& draft, Rng& rng) {
  const SearchSpace& space = draft.space();
  const auto& primes = space.batch_primes;
  if (primes.empty()) return std::nullopt;
  const int prime = primes[rng.Below(static_cast<uint32_t>(primes.size()))];
  const bool more = rng.Below(2) == 1;
  const int64_t batch = space.index.graph->global_batch;
  int64_t microbatches = draft.plan().microbatches;
  if (more) {
    microbatches *= prime;
  } else if (microbatches % prime == 0) {
    microbatches /= prime;
  } else {
    return std::nullopt;
  }
  if (batch % microbatches != 0) return std::nullopt;
  draft.edited().microbatches = static_cast<int>(microbatches);
  return 0;
}

}  // namespace

extern const Move kMicrobatches;
const Move kMicrobatches = {"microbatches", "more or fewer microbatches", 2,
                            Edit};

}  // namespace tessera
