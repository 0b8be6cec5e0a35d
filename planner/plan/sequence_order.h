#pragma once
// The order of positions in a sequence that ranks split, and the work that a
// mask leaves each of them.
//
// In order, shard i of n has (2i+1)/n^2 of the pairs of query and key that a
// causal mask leaves, the last one 2-1/n times the mean. In the zigzag order
// (Zhu 2024, "ring-flash-attention"; Dubey et al. 2024, "The Llama 3 Herd of
// Models", section 3.3.2) the sequence is cut into 2n chunks and shard i holds
// chunks i and 2n-1-i: an n-th of the pairs each. Attention and rotary
// embeddings read positions, which are permuted like the tokens, and every
// other operator treats positions alike; so nothing but the loading of inputs
// knows of the order.
//
// Functions without state; thread-safe.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "planner/plan/graph_index.h"
#include "planner/plan/layout.h"
#include "planner/plan/plan.h"

namespace tessera {

// The position in a sequence of length `length` of element `i` in the zigzag
// order of `ranks`. REQUIRES: length is a multiple of 2 * ranks, and
// 0 <= i < length.
constexpr int64_t ZigzagPosition(int64_t length, int ranks, int64_t i) {
  const int64_t chunk = length / (2 * ranks);
  const int64_t shard = i / (2 * chunk);
  const int64_t within = i % (2 * chunk);
  return within < chunk ? shard * chunk + within
                        : (2 * ranks - 2 - shard) * chunk + within;
}

// The positions of a run of elements in the zigzag order of `zigzag` ranks
// (0: in their own), as runs.
std::vector<Range> PositionsOf(int64_t length, int zigzag, Range elements);

// Which keys a query of an attention sees (planner/ops/attention.cc).
struct AttentionMask {
  bool causal = true;
  int64_t window = 0;  // 0: none
};
// REQUIRES: the node's operator, or its forward's, is an attention.
AttentionMask MaskOf(const Node& node);

// The pairs of a query and a key that it sees: where the mask is causal, one
// that is not behind it; where `window` is positive, one that is less than so
// many positions away.
int64_t SeenPairs(Range queries, Range keys, const AttentionMask& mask);
int64_t SeenPairs(const std::vector<Range>& queries,
                  const std::vector<Range>& keys, const AttentionMask& mask);

// The largest number of ranks that split the sequence of an attention.
int64_t SequenceDegree(const GraphIndex& index, const Plan& plan);

// Why sequences cannot be in zigzag order, however they are split; empty where
// they can, in any that cuts them into equal chunks.
std::string ReorderProblem(const GraphIndex& index);

// Why plan.zigzag balances nothing, or would give other results; empty where it
// is good or 0. REQUIRES: every node's axes are of its group's mesh.
std::string ZigzagProblem(const GraphIndex& index, const Plan& plan);

// Whether there is still none where the placements of `nodes` have changed.
bool StaysZigzag(const GraphIndex& index, const Plan& plan,
                 std::span<const NodeId> nodes);

}  // namespace tessera
