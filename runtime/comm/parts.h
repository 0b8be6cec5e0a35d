#pragma once
// The parts that the ranks of a group have of a buffer, by rank.

#include <cstdint>
#include <span>
#include <vector>

#include "planner/base/result.h"

namespace tessera {

// kInvalidInput unless there are `size` lengths, none negative.
Result<void> CheckLengths(std::span<const int64_t> lengths, int size);

// The same of what `rank` of `size` sends to each and receives from each in an
// all-to-all, where its part for itself has one length.
Result<void> CheckExchange(std::span<const int64_t> send_bytes,
                           std::span<const int64_t> recv_bytes, int rank,
                           int size);

// Where each part begins, and the end of all.
std::vector<int64_t> Offsets(std::span<const int64_t> lengths);

}  // namespace tessera
