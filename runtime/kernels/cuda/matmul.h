#pragma once
// CudaMatMul: the matrix products of the CUDA kernels, behind an interface, so
// that kernels which multiply can be tested without a GPU
// (tests/support/host_matmul.h); cublaslt_matmul.h is the one that trains.
//
// All matrices are row-major and, but for lda, contiguous, and
//   D (m x n) = op(A) (m x k) op(B) (k x n),
// with fp32 sums whatever the data's type. The experts of a mixture are a
// batch: their slots have a fixed capacity (planner/ops/moe.cc), so that every
// expert's product has the same shape, known on the host, and no product needs
// row counts from the device.

#include <compare>
#include <cstdint>
#include <string>

#include "planner/ir/dtype.h"

namespace tessera {

struct CudaQueue;

enum class MatMulEpilogue {
  kNone,
  kBias,  // D += bias, n values of D's dtype, to every row
  // Pre-activations go to `aux`, of D's shape and dtype, and their GELU in its
  // tanh form (Hendrycks and Gimpel 2016) to D. The second one adds a bias
  // first.
  kGelu,
  kBiasGelu,
  // D is the product times the derivative of that GELU at `aux`.
  kGeluGradient,
};

// The shape of a product: what an algorithm is chosen by, but for alignment.
struct MatMulProblem {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  bool transpose_a = false;  // A is stored k x m
  bool transpose_b = false;  // B is stored n x k
  DType a = DType::kFloat32;
  DType b = DType::kFloat32;
  DType d = DType::kFloat32;
  // Elements from one row of A, as it is stored, to the next; 0: no gaps. No
  // batch has gaps.
  int64_t lda = 0;
  // So many products of matrices that follow one another in memory.
  int64_t batch = 1;
  MatMulEpilogue epilogue = MatMulEpilogue::kNone;
  bool accumulate = false;  // D += instead of D =; before the epilogue

  int64_t row_of_a() const { return transpose_a ? m : k; }
  int64_t stride_of_a() const { return lda > 0 ? lda : row_of_a(); }

  auto operator<=>(const MatMulProblem&) const = default;
};

// "1024x4096x1024 A B^T bf16,bf16->fp32 += bias"
std::string Describe(const MatMulProblem& problem);

struct MatMulData {
  const void* a = nullptr;
  const void* b = nullptr;
  void* d = nullptr;
  const void* bias = nullptr;  // of kBias and kBiasGelu
  void* aux = nullptr;         // written by the GELUs, read by kGeluGradient
};

// Belongs to the thread of its queue.
class CudaMatMul {
 public:
  virtual ~CudaMatMul() = default;

  // Whether Run takes such a product; what it does not take are dtypes of A and
  // B that differ, and epilogues that its library lacks for the dtypes.
  virtual bool Takes(const MatMulProblem& problem) const = 0;

  // Enqueues the product. Errors are kept in the queue and name the problem.
  // Uses the first matmul_bytes of the queue's workspace. The same call gives
  // the same bits, unless another algorithm has been chosen in between.
  // REQUIRES: Takes(problem).
  virtual void Run(const MatMulProblem& problem, const MatMulData& data,
                   CudaQueue& queue) = 0;
};

}  // namespace tessera
