#pragma once
// Surroundings: what a block's programs depend on beyond its own decisions.
//
// The decisions of the blocks around it reach a block only through the tensors
// that it shares with them: their layouts, who makes and reads them, where
// their weights are stored, and which of these it fetches ahead. So blocks
// with equal decisions whose surroundings are equal have equal programs, though
// their neighbours differ.

#include <functional>

#include "costmodel/evaluate/block_template.h"
#include "costmodel/price.h"
#include "planner/base/ids.h"
#include "planner/lower/lower.h"

namespace tessera {

// Appends the surroundings of block `block`, whose shape is `shape`, to `key`.
// Parameters are fetched up to `prefetch` blocks ahead, 0 where none is.
// `number_of` numbers groups relative to the block; `splits`: its backwards are
// split. REQUIRES: every block lies on one group, and nothing has a root or
// leaves the device.
void AppendSurroundings(const LoweringContext& context, int block,
                        const BlockShape& shape, int prefetch, bool splits,
                        const std::function<int64_t(GroupId)>& number_of,
                        IntKey& key);

}  // namespace tessera
