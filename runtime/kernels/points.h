#pragma once
// Points: a loop nest over some factors of a call, and where its tensors have
// their elements there. What kernels whose rule is the node's own loop over, on
// the CPU and in CUDA.

#include <cstdint>
#include <span>

#include "runtime/kernels/kernel.h"

namespace tessera {

// At most so many tensors have places in a loop.
inline constexpr int kMostPlaces = 4;

// Dimensions with their extents, outermost first, and the strides of each
// tensor along them, in elements. Point i has its indices row by row. A plain
// value, which CUDA kernels are given.
struct Points {
  int dims = 0;
  int64_t count = 1;
  int64_t extents[kMaxFactors] = {};
  int64_t strides[kMaxFactors][kMostPlaces] = {};
};

// A tensor of a call and the factors of its dimensions.
struct Placed {
  const LocalTensor* tensor = nullptr;
  const Indices* indices = nullptr;
};
inline Placed PlacedOperand(const KernelCall& call, size_t i) {
  return {&call.operands[i], &call.rule->operands[i]};
}
inline Placed PlacedResult(const KernelCall& call, size_t k) {
  return {&call.results[k], &call.rule->results[k]};
}

// The loop over `factors` of the call's rule, the first one outermost. A tensor
// that lacks a factor stays where it is along it. Dimensions that all tensors
// have behind one another are one.
Points PointsOver(const KernelCall& call, std::span<const uint8_t> factors,
                  std::span<const Placed> tensors);

// The factors of the rule that `indices` lacks, in the rule's order.
Indices FactorsBut(const IndexRule& rule, const Indices& indices);

// The points of `kept`, and at each of them those of all other factors: what a
// reduction loops over.
struct NestedPoints {
  Points outer;
  Points inner;
};
NestedPoints NestedOver(const KernelCall& call, const Indices& kept,
                        std::span<const Placed> tensors);

// The extent of a factor in the whole tensors, over all ranks.
int64_t GlobalExtent(const KernelCall& call, uint8_t factor);

// A product of matrices that follow one another in memory, or none.
struct MatrixBatch {
  bool exists = false;
  bool swapped = false;  // the second operand is the left matrix
  int64_t batch = 1;
  int64_t m = 1;
  int64_t n = 1;
  int64_t k = 1;
  bool transpose_a = false;  // the left one is stored k x m
  bool transpose_b = false;  // the right one is stored n x k
};
// An einsum's operands 0 and 1 and its result as such a product.
MatrixBatch AsMatrixBatch(const KernelCall& call);

}  // namespace tessera
