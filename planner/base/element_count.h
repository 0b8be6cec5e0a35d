#pragma once
// The size of tensors.

#include <cstdint>
#include <span>

namespace tessera {

// How many elements a tensor of these extents has: 1 of a scalar.
inline int64_t ElementCount(std::span<const int64_t> shape) {
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  return count;
}

// The same where it may be more than int64 holds.
inline double LargeElementCount(std::span<const int64_t> shape) {
  double count = 1;
  for (const int64_t extent : shape) count *= static_cast<double>(extent);
  return count;
}

}  // namespace tessera
