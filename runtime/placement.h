#pragma once
// Where the elements that a rank holds lie in its buffer, and copies between
// such buffers. Plain values and pure functions.

#include <cstdint>
#include <optional>

#include "planner/plan/transfer.h"
#include "runtime/device/device.h"

namespace tessera {

// The block that is all of a tensor.
Box WholeBox(const Shape& shape);

// The index, within the buffer of `outer`, at which all of `inner` lies in one
// piece and in the same order; nothing when it does not.
std::optional<int64_t> ContiguousIn(const Placement& inner,
                                    const Placement& outer);

// A copy of `box` from a buffer placed as `from` to one placed as `to`.
// REQUIRES: both hold the box.
struct BoxCopy {
  int64_t from_offset = 0;  // in bytes
  int64_t to_offset = 0;
  StridedCopy strided;
};
BoxCopy CopyOf(const Box& box, const Placement& from, const Placement& to,
               int64_t element_bytes);

}  // namespace tessera
