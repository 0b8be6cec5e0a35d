// Dense layers as matrix products: x is (M, K), w is (N, K), y is (M, N), where
// M, N and K are runs of dimensions.

#include "runtime/kernels/cpu/call.h"
#include "runtime/kernels/cpu/gemm.h"
#include "runtime/kernels/extent.h"

namespace tessera {
namespace {

// Operand `i` as a row-major matrix of `rows` rows.
template <typename T>
MatrixView<T> Operand(const KernelCall& call, int i, int64_t rows) {
  const LocalTensor& tensor = call.operands[i];
  return {tensor.as<const T>(), tensor.elements() / rows, 1};
}

template <typename T>
void Multiply(const KernelCall& call, int64_t rows, int64_t columns,
              int64_t depth, MatrixView<T> a, MatrixView<T> b,
              const T* bias = nullptr) {
  const LocalTensor& y = call.results[0];
  TESSERA_CHECK(y.elements() == rows * columns)
      << y.elements() << " elements for " << rows << "x" << columns;
  Gemm(rows, columns, depth, a, b, bias, call.accumulate, y.as<T>(),
       call.threads);
}

// x, w [, bias] -> y = x w^T + bias.
template <typename T>
void Linear(const KernelCall& call) {
  const int64_t rows = Extent(call, 0, 1, /*shared=*/false);
  const int64_t columns = Extent(call, 1, 0, /*shared=*/false);
  const auto x = Operand<T>(call, 0, rows);
  const auto w = Operand<T>(call, 1, columns);
  const T* bias = nullptr;
  if (call.operands.size() > 2) bias = call.operands[2].as<const T>();
  Multiply(call, rows, columns, x.row_stride, x, w.Transposed(), bias);
}

// dy, w -> dx = dy w.
template <typename T>
void LinearDx(const KernelCall& call) {
  const int64_t rows = Extent(call, 0, 1, /*shared=*/false);
  const int64_t depth = Extent(call, 1, 0, /*shared=*/true);
  const auto w = Operand<T>(call, 1, depth);
  Multiply(call, rows, w.row_stride, depth, Operand<T>(call, 0, rows), w);
}

// dy, x -> dw = dy^T x.
template <typename T>
void LinearDw(const KernelCall& call) {
  const int64_t depth = Extent(call, 0, 1, /*shared=*/true);
  const auto dy = Operand<T>(call, 0, depth);
  const auto x = Operand<T>(call, 1, depth);
  Multiply(call, dy.row_stride, x.row_stride, depth, dy.Transposed(), x);
}

// dy -> dbias: column sums, in double.
template <typename T>
void LinearDb(const KernelCall& call) {
  const LocalTensor& db = call.results[0];
  const int64_t columns = db.elements();
  const int64_t rows = call.operands[0].elements() / columns;
  ForEachRange(call, columns, RowGrain(rows), [&](int64_t begin, int64_t end) {
    const T* dy = call.operands[0].as<const T>() + begin;
    std::vector<double> sums(end - begin);
    for (int64_t row = 0; row < rows; ++row, dy += columns) {
      for (int64_t j = 0; j < end - begin; ++j) sums[j] += dy[j];
    }
    for (int64_t j = begin; j < end; ++j) {
      PutOrAdd(call, db, j, sums[j - begin]);
    }
  });
}

}  // namespace

std::vector<Kernel> CpuLinearKernels() {
  return {
      {"linear", ByDType<Linear<float>, Linear<double>>, true},
      {"linear_fp32", ByDType<Linear<float>, Linear<double>>, true},
      {"linear_dx", ByDType<LinearDx<float>, LinearDx<double>>, true},
      {"linear_dw", ByDType<LinearDw<float>, LinearDw<double>>, true},
      {"linear_db", ByDType<LinearDb<float>, LinearDb<double>>, true},
  };
}

}  // namespace tessera
