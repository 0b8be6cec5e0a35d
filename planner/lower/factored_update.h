#pragma once
// The step of a factored optimizer as tasks. Adafactor (Shazeer and Stern 2018,
// algorithm 4) as torch.optim.Adafactor has it: of a matrix with m rows and n
// columns, gradient G (clipped by global norm), parameter P, in step t = 1, …
//
//   b = 1 - t^beta2_decay
//   R = b R + (1 - b) row means of G^2, C likewise of columns
//   V = R C / max(mean of R, epsilon1)
//   U = G / sqrt(max(V, epsilon1^2))
//   P = P (1 - lr weight_decay) - max(epsilon2, rms(P)) min(lr, 1 / sqrt(t))
//                                 * U / max(1, rms(U) / d)
//
// rms(X) is the root of the mean square over the whole weight, P that before
// the step. Of what is no matrix V = b V + (1 - b) G^2. The mean of R is kept
// itself: that of all elements, which R and C have in common.
//
// Each rank adds up what it has of a weight, whatever part of it that is (a
// shard of tensor parallelism, a run of ZeRO's that begins amid a row): sums of
// rows and columns, laid out as the weight's dimensions are. They are reduced
// over the axes that cut what they sum over, and so are the squares of P, and
// then those of U. Replicas do the same, to the bit. Row and column states are
// sharded along their dimensions as the weight is, and replicated elsewhere:
// ZeRO does not cut them.
//
//   square_sum              P^2
//   adafactor_sums          sums of G^2: rows, columns, all of a matrix
//   (all-reduces)
//   adafactor_factors       R, C and mean; R / max(mean, epsilon1)
//   adafactor_norm          U^2
//   adafactor_vector_norm   the same of what is no matrix, and V
//   (all-reduces)
//   adafactor_step, adafactor_vector_step

#include <string_view>

namespace tessera {

// How many lists a kernel's task has. Its reads are `piece_reads` lists with an
// entry for each piece (gradient, …), then `weight_reads` lists with one for
// each weight, then the scalars, which have no tensor: the clip coefficient (if
// gradients are clipped or scaled) and in fp16 the state of the loss scale. Its
// writes are likewise. Weights are in the order of their first pieces. The
// kernel is called for each piece, or for each weight where no list is of
// pieces, with one entry of each list; the first call for a weight overwrites
// what it writes of it, further ones (of tiles) add.
struct FactoredKernel {
  std::string_view name;
  int piece_reads = 0;
  int weight_reads = 0;
  int piece_writes = 0;
  int weight_writes = 0;
};
// Null where no kernel is called so.
const FactoredKernel* FindFactoredKernel(std::string_view name);

}  // namespace tessera
