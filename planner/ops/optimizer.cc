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

// kReads times the first operand and kUpdates times the first result: what is
// not of these shapes is small.
template <int kReads, int kUpdates>
Bytes ElementBytes(const OpCall& call) {
  const int64_t per_element = kReads * SizeOf(call.operand_dtypes[0]) +
                              kUpdates * SizeOf(call.result_dtypes[0]);
  return {static_cast<int64_t>(call.Points()) * per_element};
}

// Sums are read, moments read and written, and what the step wants is written.
Bytes FactorBytes(const OpCall& call) {
  return {call.Extent('b') * (call.Extent('r') + call.Extent('c')) * 4 *
          SizeOf(call.operand_dtypes[0])};
}

Flops FactorFlops(const OpCall& call) {
  constexpr int64_t kPerNumber = 5;
  return {static_cast<double>(
      call.Extent('b') * (call.Extent('r') + call.Extent('c')) * kPerNumber)};
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
      // Kingma and Ba 2015: the same without a decay of weights.
      {.name = "adam",
       .summary = "Adam step",
       .rule = "n,->n,n,n",
       .flops = FlopsPerPoint<13>,
       .bytes = UpdateBytes},
      // m = beta1 m + g; parameter -= lr m, where g is the gradient times the
      // clip coefficient and the weight decay times the parameter. As
      // torch.optim.SGD has it, without dampening (Sutskever et al. 2013).
      {.name = "momentum",
       .summary = "gradient descent step with momentum",
       .rule = "n,->n,n",
       .flops = FlopsPerPoint<7>,
       .bytes = UpdateBytes},
      // parameter -= lr g, of the same g.
      {.name = "sgd",
       .summary = "plain gradient descent step",
       .rule = "n,->n",
       .flops = FlopsPerPoint<4>,
       .bytes = UpdateBytes},
      // running average -= rate * its distance (planner/ir/running_average.h).
      // In the place of the gradient is the distance's mean over a step's
      // microbatches; the rate, 1 - (1 - momentum)^microbatches, forgets as
      // much as an update for each of these.
      {.name = "running_average",
       .summary = "step of running averages",
       .rule = "n->n",
       .flops = FlopsPerPoint<2>,
       .bytes = UpdateBytes},
      // Adafactor (planner/lower/factored_update.h), of b matrices with r rows
      // and c columns, or of n elements of what is no matrix. The gradient is
      // scaled by the clip coefficient first, which follows the operands that
      // are listed there and precedes the loss scale.
      {.name = "adafactor_sums",
       .summary = "Adafactor: sums of squares of rows, columns and matrices",
       .rule = "brc,->br,bc,b",
       .flops = FlopsPerPoint<4>,
       // Read along rows and down columns.
       .bytes = ElementBytes<2, 0>,
       .accumulation = Accumulation::kAll},
      {.name = "adafactor_factors",
       .summary = "Adafactor: moments of rows and columns",
       .rule = "br!,bc!,b,->br,bc,b,br",
       .flops = FactorFlops,
       .bytes = FactorBytes},
      {.name = "adafactor_norm",
       .summary = "Adafactor: sum of squares of a matrix's update",
       .rule = "brc,br,bc,->",
       .flops = FlopsPerPoint<6>,
       .bytes = ElementBytes<1, 0>,
       .accumulation = Accumulation::kAll},
      {.name = "adafactor_step",
       .summary = "Adafactor: step of a matrix",
       .rule = "brc,br,bc,,,->brc",
       .flops = FlopsPerPoint<7>,
       .bytes = ElementBytes<1, 2>},
      {.name = "adafactor_vector_norm",
       .summary = "Adafactor: moment and sum of squares of a vector's update",
       .rule = "n,->n,",
       .flops = FlopsPerPoint<9>,
       .bytes = ElementBytes<1, 2>},
      {.name = "adafactor_vector_step",
       .summary = "Adafactor: step of a vector",
       .rule = "n,n,,,->n",
       .flops = FlopsPerPoint<6>,
       .bytes = ElementBytes<2, 2>},
      // The parameter's own type from its fp32 master.
      {.name = "cast",
       .summary = "conversion of element type",
       .rule = "n->n",
       .flops = FlopsPerPoint<1>},
      // The same to bf16, up or down at random: in the mean it is the master.
      {.name = "stochastic_cast",
       .summary = "conversion of element type, rounded at random",
       .rule = "n->n",
       .flops = FlopsPerPoint<1>},
      // Accumulates the sum of squares of a gradient shard, or of a
      // parameter's.
      {.name = "square_sum",
       .summary = "sum of squares of a gradient",
       .rule = "n->",
       .flops = FlopsPerPoint<2>,
       .accumulation = Accumulation::kAll},
      // min(1, clip / norm) for the square of the global norm; in fp16 divided
      // by the loss scale, which follows the norm and is updated.
      {.name = "clip_coefficient",
       .summary = "gradient clipping by global norm",
       .rule = "->",
       .flops = FlopsPerPoint<3>},
  };
}

}  // namespace tessera
