#pragma once
// The algorithms that timing chose for matrix products, and the text file that
// keeps them from one run to the next. What an algorithm is only one version of
// cuBLASLt knows, and how fast it is only one kind of GPU: the file names both.
//
//   matmul-choices 2
//   device NVIDIA H200
//   cublaslt 130100
//   m n k ta tb a b d lda batch epilogue accumulate alignment tf32 us algorithm
//   1024 4096 1024 0 1 bf16 bf16 bf16 0 1 bias 0 16 0 21.5 00…(128 digits)
//
// The fourth line is the heading of those that follow; their order is that of
// MatMulKey.

#include <array>
#include <compare>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "planner/base/result.h"
#include "runtime/kernels/cuda/matmul.h"

namespace tessera {

// Everything that decides about an algorithm.
struct MatMulKey {
  MatMulProblem problem;
  int alignment = 16;  // of all its matrices, in bytes: a power of 2 up to 16
  bool tf32 = false;

  auto operator<=>(const MatMulKey&) const = default;
};

struct MatMulChoice {
  std::array<uint64_t, 8> algorithm = {};  // cublasLtMatmulAlgo_t
  double microseconds = 0;                 // as it was timed

  bool operator==(const MatMulChoice&) const = default;
};

struct MatMulChoices {
  std::string device;   // "NVIDIA H200"
  int64_t version = 0;  // cublasLtGetVersion
  std::map<MatMulKey, MatMulChoice> rows;

  bool operator==(const MatMulChoices&) const = default;
};

std::string FormatMatMulChoices(const MatMulChoices& choices);

// Errors name `path` and the line.
Result<MatMulChoices> ParseMatMulChoices(std::string_view text,
                                         std::string_view path);

// Names of epilogues in the file and in messages: "none" "bias" "gelu"
// "bias_gelu" "gelu_gradient".
std::string_view NameOf(MatMulEpilogue epilogue);

}  // namespace tessera
