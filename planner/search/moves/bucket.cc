// Takes another size of gradient buckets from a short list, uniformly:
// symmetric. A plan with a size of its own keeps it.

#include <algorithm>
#include <array>

#include "planner/search/moves/scope.h"

namespace tessera {
namespace {

// One for each block, then about where latency stops to matter on fast and slow
// links; 25 MB is PyTorch's (Li et al. 2020).
constexpr std::array<int64_t, 4> kSizes = {0, 5'000'000, 25'000'000,
                                           100'000'000};

std::optional<Proposal> Propose(const Plan& plan, const SearchSpace& space,
                                Rng& rng) {
  const uint32_t drawn = rng.Below(kSizes.size());
  if (std::ranges::find(kSizes, plan.bucket_bytes.value) == kSizes.end()) {
    return std::nullopt;
  }
  Plan candidate = plan;
  candidate.bucket_bytes = {kSizes[drawn]};
  return Finish(space, plan, std::move(candidate), 0);
}

}  // namespace

extern const Move kBucket;
const Move kBucket = {"bucket", "size of gradient buckets", 1, Propose};

}  // namespace tessera
