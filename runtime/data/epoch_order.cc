#include "runtime/data/epoch_order.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "planner/base/check.h"
#include "planner/base/rng.h"

namespace tessera {
namespace {

// A permutation of [0, n), another for each key: four rounds of a Feistel
// network over the least 4^k >= n numbers, repeated until the result is below n
// (Luby and Rackoff 1988; Black and Rogaway 2002).
int64_t Permuted(uint64_t key, int64_t i, int64_t n) {
  TESSERA_CHECK(i >= 0 && i < n) << i << " of " << n;
  const int bits = std::bit_width(static_cast<uint64_t>(n - 1));
  const int half = std::max(1, (bits + 1) / 2);
  const uint64_t mask = (uint64_t{1} << half) - 1;
  auto x = static_cast<uint64_t>(i);
  do {
    uint64_t left = x >> half;
    uint64_t right = x & mask;
    for (uint64_t round = 0; round < 4; ++round) {
      const uint64_t mixed = Mix64(key ^ Mix64(4 * right + round));
      left = std::exchange(right, left ^ (mixed & mask));
    }
    x = left << half | right;
  } while (x >= static_cast<uint64_t>(n));
  return static_cast<int64_t>(x);
}

}  // namespace

Result<EpochOrder> EpochOrder::Of(uint64_t seed, int64_t all, int64_t held_out,
                                  std::string_view samples,
                                  const std::string& path) {
  if (all > held_out) return EpochOrder{seed, all - held_out};
  return InvalidInput("holds " + std::to_string(all) + " " +
                          std::string(samples) + ": --validate-batches holds " +
                          std::to_string(held_out) +
                          " out, and none is left to train on",
                      path);
}

uint64_t EpochOrder::KeyAt(int64_t sample) const {
  return Mix64(Mix64(seed) ^ static_cast<uint64_t>(sample / size));
}

int64_t EpochOrder::Training(int64_t sample) const {
  return Permuted(KeyAt(sample), sample % size, size);
}

}  // namespace tessera
