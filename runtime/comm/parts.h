#pragma once
// The parts that the ranks of a group have of a buffer, by rank.

#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

// Where each part begins, and the end of all.
inline std::vector<int64_t> Offsets(std::span<const int64_t> lengths) {
  std::vector<int64_t> offsets = {0};
  for (int64_t length : lengths) offsets.push_back(offsets.back() + length);
  return offsets;
}

}  // namespace tessera
