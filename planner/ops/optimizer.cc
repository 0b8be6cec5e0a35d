// Operators of the optimizer step. They have no place in a model's graph: the
// lowering calls them on flat shards, "n" being the elements of a shard.

#include "planner/ir/op.h"

namespace tessera {

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
       .bytes = [](const OpCall& call) -> Bytes {
         int64_t per_element = SizeOf(call.operand_dtypes[0]);
         for (DType updated : call.result_dtypes) {
           per_element += 2 * SizeOf(updated);  // read and written
         }
         return {call.Extent('n') * per_element};
       }},
      // parameter -= lr * clip coefficient * gradient.
      {.name = "sgd",
       .summary = "plain gradient descent step",
       .rule = "n,->n",
       .flops = FlopsPerPoint<2>,
       .bytes = [](const OpCall& call) -> Bytes {
         return {call.Extent('n') * (SizeOf(call.operand_dtypes[0]) +
                                     2 * SizeOf(call.result_dtypes[0]))};
       }},
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
