#pragma once
// What other software keeps of a model's tensors between the passes, and what
// its kernels need while they run, where that is more or less than Tessera's
// own (Stack::memory, Stack::attention). For the layers of GPT as Korthikanti
// et al. (2022, "Reducing Activation Recomputation in Large Transformer
// Models", section 4.1) count them this comes to their sbh(34 + 5as/h).

#include <cstdint>
#include <optional>
#include <vector>

#include "planner/ir/graph.h"
#include "planner/ir/stack.h"

namespace tessera {

// Bytes for each element of a tensor that the node reads or makes.
struct KernelScratch {
  TensorId of;
  int64_t bytes = 0;
};

struct KernelMemory {
  // By tensor: bytes kept of an element, where not by its type.
  std::vector<std::optional<int64_t>> kept;
  // By node.
  std::vector<KernelScratch> scratch;
};

// Where scores of attention go through memory, the statistics of a row stand
// for its probabilities and what dropout makes of them. The result of a layer
// norm stands for its input's dropout mask, too: each norm but the first has
// one before it, and the two are split and recomputed alike. The logits are
// what the loss keeps of them. Both are empty for Tessera's own runtime.
KernelMemory KernelMemoryOf(const Graph& graph, const Stack& stack);

}  // namespace tessera
