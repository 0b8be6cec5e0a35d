#pragma once
// Sums in rank order.

#include <cstddef>
#include <cstdint>
#include <span>

#include "planner/ir/dtype.h"

namespace tessera {

// For every element e: ((sources[0][e] + sources[1][e]) + sources[2][e]) + ...
// into `sum`, which may be one of the sources, and into `staged` unless that is
// null. 16-bit elements are added in fp32 and the sum is rounded once, so that
// its error does not grow with the number of sources. `sum` is written past the
// cache if `past_cache` (copy.h).
// REQUIRES: sources not empty.
void SumInOrder(std::span<const std::byte* const> sources, std::byte* sum,
                std::byte* staged, int64_t count, DType dtype, bool past_cache);

}  // namespace tessera
