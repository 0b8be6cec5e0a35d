#pragma once
// Kernels in place of several kernels of tasks, so that less passes through
// memory: names and meaning. Each is of two, of which the first may be such a
// kernel itself; some are there only as the first one of others. A device may
// have any of them (runtime/kernels).

#include <cstddef>
#include <span>
#include <string_view>

#include "planner/ir/index_rule.h"

namespace tessera {

struct FusedKernel {
  enum class Kind {
    // The second works on the first one's first result. Operands: those of the
    // first, then the others of the second. Of optimizer kernels, whose tasks
    // list weights, weight by weight.
    kChain,
    // All operands of the second are operands of the first, and their first one
    // is the same. Operands: those of the first.
    kSiblings,
    // Their first operand is the same. Operands: those of the first, then the
    // others of the second.
    kBranches,
  };
  // Of a sum, whose operands may stand in any order.
  static constexpr size_t kAnyOperand = ~size_t{0};

  std::string_view first;  // perhaps a fused one
  std::string_view second;
  std::string_view name;
  Kind kind = Kind::kChain;
  size_t operand = 0;  // of the second in a chain: the first one's result
  // Results are all of the first one's, then those of the second; without, the
  // first one's first result is left out.
  bool keeps_first = true;
  // Of its results, the gradients of weights may be added to.
  bool accumulates = false;
  // Operands and results all have one shape: no broadcast.
  bool alike = false;
  // Of a chain of two kernels: runs where the second one would, and not the
  // first, since the other operands of the second are made in between.
  bool late = false;
};

// For a first kernel, what is to be tried first stands first.
std::span<const FusedKernel> FusedKernels();

// Whether an operator is elementwise and broadcasts nothing.
bool HasOneShape(const IndexRule& rule);

}  // namespace tessera
