#pragma once
// Which elements dropout keeps: the same on every backend and for every split.

#include <cmath>
#include <cstdint>
#include <limits>

#include "planner/base/rng.h"
#include "planner/plan/graph_index.h"
#include "planner/plan/sequence_order.h"
#include "runtime/kernels/kernel.h"

namespace tessera {

// The sequence in a call's operand, where it is not in its own order: elements
// are counted as if it were, so that a reordered run drops the same ones.
struct ReorderedSequence {
  int ranks = 0;       // of the zigzag order; 0 where there is none
  int64_t length = 0;  // of the sequence
  int64_t inner = 1;   // elements of a position

  explicit ReorderedSequence(const KernelCall& call) {
    if (call.zigzag <= 1) return;
    const int factor = call.rule->FactorOf(kSequenceFactor);
    if (factor < 0) return;
    const Indices& indices = call.rule->operands[0];
    const Shape& shape = call.operands[0].global_shape;
    for (size_t d = indices.size(); d-- > 0;) {
      if (indices[d] == factor) {
        ranks = call.zigzag;
        length = shape[d];
        return;
      }
      inner *= shape[d];
    }
  }

  // The index of an element in the sequence's own order.
  constexpr int64_t Original(int64_t index) const {
    if (ranks == 0) return index;
    const int64_t row = index / (inner * length);
    const int64_t position = index / inner % length;
    return (row * length + ZigzagPosition(length, ranks, position)) * inner +
           index % inner;
  }
  // So many elements from this one on are neighbours in both orders.
  constexpr int64_t Neighbours(int64_t index) const {
    if (ranks == 0) return std::numeric_limits<int64_t>::max() - index;
    return inner - index % inner;
  }
};

// An element is kept where its bits, by its index in the whole tensor and the
// sequence's own order, are no less than this: of 2^32.
inline uint64_t DropoutThreshold(double probability) {
  return static_cast<uint64_t>(std::ceil(probability * 0x1.0p32));
}

// The bits of elements 2 pair (the lower half) and 2 pair + 1. `key` is a
// DropoutKey (counter.h).
constexpr uint64_t DropoutBitsOfTwo(uint64_t key, uint64_t pair) {
  return Mix64(key ^ pair);
}
constexpr uint32_t DropoutBits(uint64_t key, uint64_t index) {
  const uint64_t two = DropoutBitsOfTwo(key, index / 2);
  return static_cast<uint32_t>(index % 2 == 0 ? two : two >> 32);
}

}  // namespace tessera
