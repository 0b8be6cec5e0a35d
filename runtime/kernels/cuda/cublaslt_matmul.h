#pragma once
// Matrix products by cuBLASLt.
//
// Descriptors and algorithm are looked up once for each MatMulKey. The
// algorithm is one that was chosen before (Tune, Adopt) or the heuristic's
// first. Only algorithms that sum in fp32 are considered: partial sums of a
// split k are never rounded to 16 bits.

#include <cublasLt.h>

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/kernels/cuda/matmul_choices.h"

namespace tessera {

struct CublasLtOptions {
  // Products of fp32 operands on tensor cores, with 10 bits of fraction.
  bool tf32 = false;
};

class CublasLtMatMul : public CudaMatMul {
 public:
  // For the calling thread's current GPU. kUnavailable without one.
  static Result<std::unique_ptr<CublasLtMatMul>> Make(
      const CublasLtOptions& options = {});
  CublasLtMatMul(const CublasLtMatMul&) = delete;
  CublasLtMatMul& operator=(const CublasLtMatMul&) = delete;
  ~CublasLtMatMul() override;

  // A and B both bf16, both fp16 or both fp32; D of their dtype or fp32. The
  // GELUs need 16-bit D, n a multiple of 8, and no batch; a bias no batch.
  bool Takes(const MatMulProblem& problem) const override;
  void Run(const MatMulProblem& problem, const MatMulData& data,
           CudaQueue& queue) override;

  // Times the heuristic's first `candidates` algorithms with cold caches, on
  // memory of its own, keeps the fastest for Run, and returns the microseconds
  // of each, in the heuristic's order: medians of several runs. Waits for the
  // GPU.
  Result<std::vector<double>> Tune(const MatMulKey& key, int candidates,
                                   CudaQueue& queue);

  // The keys that Run found no choice for since the last call.
  std::vector<MatMulKey> TakeUntuned() { return std::exchange(untuned_, {}); }
  // What was timed or adopted so far.
  const MatMulChoices& choices() const { return choices_; }
  // Uses these from now on. kInvalidInput where another GPU or another version
  // of cuBLASLt made them.
  Result<void> Adopt(const MatMulChoices& choices);

 private:
  // A product as cuBLASLt describes it.
  struct Plan {
    cublasLtMatmulDescOpaque_t product;
    cublasLtMatrixLayoutOpaque_t a, b, d;  // row-major ones, of this header
    cublasLtMatmulAlgo_t algorithm;
  };

  explicit CublasLtMatMul(const CublasLtOptions& options);
  Result<Plan> MakePlan(const MatMulKey& key) const;
  static Result<void> SetPointers(Plan& plan, MatMulEpilogue epilogue,
                                  const MatMulData& data);
  Result<std::vector<cublasLtMatmulHeuristicResult_t>> Candidates(
      const MatMulKey& key, Plan& plan, const MatMulData& data, int count,
      const CudaQueue& queue) const;
  Result<void> Enqueue(Plan plan, const MatMulKey& key, const MatMulData& data,
                       const CudaQueue& queue) const;

  CublasLtOptions options_;
  cublasLtHandle_t handle_ = nullptr;
  MatMulChoices choices_;
  std::map<MatMulKey, Plan> plans_;
  std::vector<MatMulKey> untuned_;
};

}  // namespace tessera
