// Takes another size of gradient buckets from a short list, uniformly:
// symmetric. A plan with a size of its own keeps it.

#include <algorithm>
#include <array>

#include "planner/search/move.h"

namespace tessera {
namespace {

// One for each block, then about where latency stops to matter on fast and slow
// links; 25 MB is PyTorch's (Li et al. 2020).
constexpr std::array<int64_t, 4> kSizes = {0, 5'000'000, 25'000'000,
                                           100'000'000};

std::optional<double> Edit(Draft& draft, Rng& rng) {
  const uint32_t drawn = rng.Below(kSizes.size());
  const int64_t size = draft.plan().bucket_bytes.value;
  if (std::ranges::find(kSizes, size) == kSizes.end()) return std::nullopt;
  draft.edited().bucket_bytes = {kSizes[drawn]};
  return 0;
}

}  // namespace

extern const Move kBucket;
const Move kBucket = {"bucket", "size of gradient buckets", 1, Edit};

}  // namespace tessera
