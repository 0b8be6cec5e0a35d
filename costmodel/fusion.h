#pragma once
// What a stack's software runs as one kernel where the graph has several
// operators. It changes prices only: tasks stay those of the graph.

#include <vector>

#include "planner/ir/graph.h"
#include "planner/ir/stack.h"

namespace tessera {

// Of one node.
struct Fusion {
  // Outputs of all layers that its product does at once, over those of its own
  // (Stack::fuses_projections): queries, keys and values; gate and up.
  double outputs = 1;
  // Traffic of the kernel that it runs in, over that of its own operands and
  // results; 0 where another node of the kernel carries it
  // (Stack::fuses_elementwise). A kernel of elementwise operators of one
  // direction reads what comes from outside once and writes what goes outside;
  // what lies between stays in registers, also for backward, which makes it
  // again. The last of the operators carries the kernel.
  double traffic = 1;
  // Whether the kernel that makes its first operand also rounds it to 8 or 4
  // bits: a norm or an elementwise kernel of which only linear layers read.
  // Otherwise rounding is a pass of its own.
  bool operand_rounded = false;
  // Whether it is a product of the head, whose logits the loss reads: software
  // of 8 and 4 bits leaves it in 16 (Megatron-Core's output_layer is none of
  // Transformer Engine's; torchtitan's float8.filter_fqns names "output").
  bool of_head = false;
};

// By node. `graph` is differentiated or not.
std::vector<Fusion> FusionOf(const Graph& graph, const Stack& stack);

}  // namespace tessera
