// Features before features: z = (x, y) along the last dimension, x repeated
// along the rows that it lacks.

#include <algorithm>
#include <vector>

#include "runtime/kernels/cpu/call.h"

namespace tessera {
namespace {

// For each row of z, in order, the row of x beside it.
std::vector<int64_t> RowsOfX(const Indices& z, const Indices& x,
                             const Shape& shape) {
  const size_t dims = z.size() - 1;
  std::vector<int64_t> stride(dims, 0);  // of x, by dimension of z
  int64_t rows = 1;
  int64_t in_x = 1;
  for (size_t d = dims; d-- > 0;) {
    const auto last = x.end() - 1;
    if (std::find(x.begin(), last, z[d]) != last) {
      stride[d] = in_x;
      in_x *= shape[d];
    }
    rows *= shape[d];
  }
  std::vector<int64_t> rows_of_x(static_cast<size_t>(rows));
  for (int64_t row = 0; row < rows; ++row) {
    int64_t left = row;
    for (size_t d = dims; d-- > 0; left /= shape[d]) {
      rows_of_x[row] += left % shape[d] * stride[d];
    }
  }
  return rows_of_x;
}

// x, y -> z.
template <typename T>
void Concat(const KernelCall& call) {
  const LocalTensor& z = call.results[0];
  const int64_t width_x = call.operands[0].shape.back();
  const int64_t width_y = call.operands[1].shape.back();
  const T* const x = call.operands[0].as<const T>();
  const T* y = call.operands[1].as<const T>();
  T* to = z.as<T>();
  for (const int64_t row :
       RowsOfX(call.rule->results[0], call.rule->operands[0], z.shape)) {
    to = std::copy_n(x + row * width_x, width_x, to);
    to = std::copy_n(y, width_y, to);
    y += width_y;
  }
}

// dz -> dx, dy.
template <typename T>
void ConcatDx(const KernelCall& call) {
  const LocalTensor& dz = call.operands[0];
  const LocalTensor& dx = call.results[0];
  const int64_t width_x = dx.shape.back();
  const int64_t width_y = call.results[1].shape.back();
  std::fill_n(dx.as<T>(), dx.elements(), T{0});
  const T* from = dz.as<const T>();
  T* dy = call.results[1].as<T>();
  for (const int64_t row :
       RowsOfX(call.rule->operands[0], call.rule->results[0], dz.shape)) {
    T* const sum = dx.as<T>() + row * width_x;
    for (int64_t i = 0; i < width_x; ++i) sum[i] += from[i];
    dy = std::copy_n(from + width_x, width_y, dy);
    from += width_x + width_y;
  }
}

}  // namespace

std::vector<Kernel> CpuConcatKernels() {
  return {
      {"concat", ByDType<Concat<float>, Concat<double>>},
      {"concat_dx", ByDType<ConcatDx<float>, ConcatDx<double>>},
  };
}

}  // namespace tessera
