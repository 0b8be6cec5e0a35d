#pragma once
// The columns of logits that are tokens (planner/ir/vocabulary.h). A plain
// value.

#include <algorithm>
#include <cstdint>

#include "planner/ir/vocabulary.h"
#include "runtime/kernels/kernel.h"

namespace tessera {

// How many of the columns of a shard of logits are tokens; the others, behind
// them, are padding. 0: all are padding.
inline int64_t TokenColumns(const KernelCall& call, const LocalTensor& logits) {
  const int64_t tokens = TokensOf(call.attributes, logits.global_shape.back());
  return std::clamp<int64_t>(tokens - logits.offset.back(), 0,
                             logits.shape.back());
}

}  // namespace tessera
