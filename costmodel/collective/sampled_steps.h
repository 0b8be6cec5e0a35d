#pragma once
// Collectives of so many ranks that a part of their sends stands for all.

#include <vector>

namespace tessera {

// More ranks than this have pairs by the million, all alike.
inline constexpr int kMostExactRanks = 1024;
inline constexpr int kSampledSteps = 255;

// By how many steps those are ahead of it to whom each of a circle of `count`
// sends in place of all others: kSampledSteps of 1 to count - 1. They are the
// same for all, so that all receive alike. REQUIRES: count > kSampledSteps.
std::vector<int> SampledSteps(int count);

}  // namespace tessera
