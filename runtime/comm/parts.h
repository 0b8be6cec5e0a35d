#pragma once
// The parts that the ranks of a group have of a buffer, by rank.

#include <cstdint>
#include <span>
#include <vector>

#include "planner/base/result.h"

namespace tessera {

// kInvalidInput unless there are `size` lengths, none negative.
Result<void> CheckLengths(std::span<const int64_t> lengths, int size);

// Where each part begins, and the end of all.
std::vector<int64_t> Offsets(std::span<const int64_t> lengths);

}  // namespace tessera
