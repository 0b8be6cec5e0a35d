#pragma once
// What a rank starts from: weights and optimizer state, and the rows of data.

#include "planner/base/result.h"
#include "runtime/data/tokens.h"
#include "runtime/executor.h"

namespace tessera {

// Sets every persistent value of this rank: weights by their initializers and
// `seed`, the same values under every plan, those of 16 bits rounded from the
// fp32 values of their masters; everything else zero. Fails where a file does.
Result<void> InitialiseState(const Graph& graph, uint64_t seed,
                             RankExecutor& executor);

// Inputs by name: "tokens" and "labels" from `data`, which outlives the
// result, in the order that `seed` gives; "positions" count from 0 in every
// row. kInvalidInput for an input of another name.
LoadInput LoadFrom(const TokenData& data, uint64_t seed, const Graph& graph);

}  // namespace tessera
