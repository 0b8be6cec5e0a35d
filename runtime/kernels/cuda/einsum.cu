// Products of two tensors: a batch of matrix products where they are stored as
// such and the library takes their types, or else sums element by element.

#include "runtime/kernels/cuda/matmul.h"
#include "runtime/kernels/cuda/sum_over.h"

namespace tessera {
namespace {

struct Product {
  __device__ float operator()(const float (&v)[2]) const { return v[0] * v[1]; }
};

void Einsum(const KernelCall& call) {
  const MatrixBatch p = AsMatrixBatch(call);
  if (p.exists) {
    const LocalTensor& a = call.operands[p.swapped ? 1 : 0];
    const LocalTensor& b = call.operands[p.swapped ? 0 : 1];
    const LocalTensor& d = call.results[0];
    MatMulProblem problem;
    problem.m = p.m;
    problem.n = p.n;
    problem.k = p.k;
    problem.transpose_a = p.transpose_a;
    problem.transpose_b = p.transpose_b;
    problem.a = a.dtype;
    problem.b = b.dtype;
    problem.d = d.dtype;
    problem.batch = p.batch;
    problem.accumulate = call.accumulate;
    if (call.queue->matmul->Takes(problem)) {
      const MatMulData data = {.a = a.data, .b = b.data, .d = d.data};
      return call.queue->matmul->Run(problem, data, *call.queue);
    }
  }
  SumOver<2>(call, Product());
}

}  // namespace

std::vector<Kernel> CudaEinsumKernels() {
  return {{"einsum", Einsum, true}};
}

}  // namespace tessera
