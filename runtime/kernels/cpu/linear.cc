// Dense layers as matrix products: x is (M, K), w is (N, K), y is (M, N), where
// M, N and K are runs of dimensions.

#include "runtime/kernels/cpu/call.h"
#include "runtime/kernels/cpu/vector.h"

namespace tessera {
namespace {

// Product of the extents of those dimensions of operand `a` that are (or are
// not) dimensions of operand `b`.
int64_t Extent(const KernelCall& call, int a, int b, bool shared) {
  const Indices& indices = call.rule->operands[a];
  int64_t extent = 1;
  for (size_t dim = 0; dim < indices.size(); ++dim) {
    if (Holds(call.rule->operands[b], indices[dim]) == shared) {
      extent *= call.operands[a].shape[dim];
    }
  }
  return extent;
}

template <typename T>
ConstMatrixMap<T> Operand(const KernelCall& call, int i, int64_t rows) {
  const LocalTensor& tensor = call.operands[i];
  return {tensor.as<const T>(), rows, tensor.elements() / rows};
}

template <typename T>
MatrixMap<T> FirstResult(const KernelCall& call, int64_t rows,
                         int64_t columns) {
  const LocalTensor& tensor = call.results[0];
  TESSERA_CHECK(tensor.elements() == rows * columns)
      << tensor.elements() << " elements for " << rows << "x" << columns;
  return {tensor.as<T>(), rows, columns};
}

// x, w [, bias] -> y.
template <typename T>
void Linear(const KernelCall& call) {
  const auto x = Operand<T>(call, 0, Extent(call, 0, 1, /*shared=*/false));
  const auto w = Operand<T>(call, 1, Extent(call, 1, 0, /*shared=*/false));
  auto y = FirstResult<T>(call, x.rows(), w.rows());
  if (!call.accumulate) y.setZero();
  if (call.operands.size() > 2 && call.operands[2].data != nullptr) {
    y.rowwise() += Operand<T>(call, 2, 1).row(0);
  }
  y.noalias() += x * w.transpose();
}

// dy, w -> dx.
template <typename T>
void LinearDx(const KernelCall& call) {
  const auto dy = Operand<T>(call, 0, Extent(call, 0, 1, /*shared=*/false));
  const auto w = Operand<T>(call, 1, Extent(call, 1, 0, /*shared=*/true));
  auto dx = FirstResult<T>(call, dy.rows(), w.cols());
  if (!call.accumulate) dx.setZero();
  dx.noalias() += dy * w;
}

// dy, x -> dw.
template <typename T>
void LinearDw(const KernelCall& call) {
  const auto dy = Operand<T>(call, 0, Extent(call, 0, 1, /*shared=*/true));
  const auto x = Operand<T>(call, 1, Extent(call, 1, 0, /*shared=*/true));
  auto dw = FirstResult<T>(call, dy.cols(), x.cols());
  if (!call.accumulate) dw.setZero();
  dw.noalias() += dy.transpose() * x;
}

// dy -> dbias: column sums, in double.
template <typename T>
void LinearDb(const KernelCall& call) {
  const LocalTensor& db = call.results[0];
  const int64_t columns = db.elements();
  const int64_t rows = call.operands[0].elements() / columns;
  const T* dy = call.operands[0].as<const T>();
  std::vector<double> sums(columns);
  for (int64_t row = 0; row < rows; ++row, dy += columns) {
    for (int64_t j = 0; j < columns; ++j) sums[j] += dy[j];
  }
  for (int64_t j = 0; j < columns; ++j) PutOrAdd(call, db, j, sums[j]);
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
