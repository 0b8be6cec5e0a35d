#include "runtime/kernels/cuda/matmul.h"

#include "runtime/kernels/cuda/matmul_choices.h"

namespace tessera {

std::string Describe(const MatMulProblem& p) {
  std::string text = std::to_string(p.m) + "x" + std::to_string(p.n) + "x" +
                     std::to_string(p.k);
  text += p.transpose_a ? " A^T" : " A";
  text += p.transpose_b ? " B^T " : " B ";
  text += NameOf(p.a);
  text += ",";
  text += NameOf(p.b);
  text += "->";
  text += NameOf(p.d);
  if (p.lda > 0) text += " lda " + std::to_string(p.lda);
  if (p.batch > 1) text += " batch " + std::to_string(p.batch);
  if (p.accumulate) text += " +=";
  if (p.epilogue != MatMulEpilogue::kNone) {
    text += " ";
    text += NameOf(p.epilogue);
  }
  return text;
}

}  // namespace tessera
