#pragma once
// Zigzag order: positions of a sequence reordered so that ranks which split it
// evenly have equal shares of a causal mask (Zhu 2024, "ring-flash-attention";
// Dubey et al. 2024, "The Llama 3 Herd of Models", section 3.3.2).
//
// The sequence is cut into 2n chunks and shard i of n holds chunks i and
// 2n-1-i: of the pairs of query and key that a causal mask leaves, an n-th
// each. In order, shard i has (2i+1)/n^2 of them, the last one 2-1/n times the
// mean. Attention and rotary embeddings read positions, which are permuted like
// the tokens, and every other operator treats positions alike; so nothing but
// the loading of inputs knows of the order.

#include <cstdint>

namespace tessera {

// The position in a sequence of length `length` of element `i` in the zigzag
// order of `ranks`. REQUIRES: length is a multiple of 2 * ranks, and
// 0 <= i < length.
inline int64_t ZigzagPosition(int64_t length, int ranks, int64_t i) {
  const int64_t chunk = length / (2 * ranks);
  const int64_t shard = i / (2 * chunk);
  const int64_t within = i % (2 * chunk);
  return within < chunk ? shard * chunk + within
                        : (2 * ranks - 2 - shard) * chunk + within;
}

}  // namespace tessera
