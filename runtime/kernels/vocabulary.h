#pragma once
// The columns of logits that are tokens (planner/ir/vocabulary.h). Functions
// without state.

#include <algorithm>
#include <cstdint>

#include "planner/ir/vocabulary.h"
#include "runtime/kernels/kernel.h"

namespace tessera {

// How many of the columns of a shard of logits are tokens; the others, behind
// them, are padding. 0: all are padding.
inline int64_t TokenColumns(const KernelCall& call, const LocalTensor& logits) {
  const int64_t first = logits.offset.back();
  const int64_t width = logits.shape.back();
  const int64_t tokens = TokensOf(call.attributes, first + width);
  return std::clamp<int64_t>(tokens - first, 0, width);
}

}  // namespace tessera
