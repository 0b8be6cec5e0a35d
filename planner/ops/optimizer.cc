// Operators of the optimizer step. They have no place in a model's graph: the
// lowering calls them on flat shards, "n" being the elements of a shard.

#include "planner/ir/op.h"

namespace tessera {
namespace {

// The gradient is read, the parameter and its moments are read and written.
Bytes UpdateBytes(const OpCall& call) {
  int64_t per_element = SizeOf(call.operand_dtypes[0]);
  for (DType updated : call.result_dtypes) per_element += 2 * SizeOf(updated);
  return {call.Extent('n') * per_element};
}

}  // namespace

std::vector<OpDef> OptimizerOps() {
  return {
      // Loshchilov and Hutter 2019, algorithm 2, with bias correction. The
      // gradient is scaled by the clip coefficient first. Operands: gradient,
      // clip coefficient, in fp16 the loss scale; updated in place: parameter,
      // m, v.
      {.name = "adamw",
       .summary = "AdamW step",
       .rule = "n,->n,n,n",
       .flops = FlopsPerPoint<14>,
       .bytes = UpdateBytes},
      // m = beta1 m + clip coefficient * gradient; parameter -= lr m. As
      // torch.optim.SGD has it, without dampening (Sutskever et al. 2013).
      {.name = "momentum",
       .summary = "gradient descent step with momentum",
       .rule = "n,->n,n",
       .flops = FlopsPerPoint<5>,
       .bytes = UpdateBytes},
      // parameter -= lr * clip coefficient * gradient.
      {.name = "sgd",
       .summary = "plain gradient descent step",
       .rule = "n,->n",
       .flops = FlopsPerPoint<2>,
       .bytes = UpdateBytes},
      // The parameter's own type from its fp32 master.
      {.name = "cast",
       .summary = "conversion of element type",
       .rule = "n->n",
       .flops = FlopsPerPoint<1>},
      // Accumulates the sum of squares of a gradient shard.
      {.name = "square_sum",
       .summary = "sum of squares of a gradient",
       .rule = "n->",
       .flops = FlopsPerPoint<2>},
      // min(1, clip / norm) for the square of the global norm; in fp16 divided
      // by the loss scale, which follows the norm and is updated.
      {.name = "clip_coefficient",
       .summary = "gradient clipping by global norm",
       .rule = "->",
       .flops = FlopsPerPoint<3>},
  };
}

}  // namespace tessera
