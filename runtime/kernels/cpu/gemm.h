#pragma once
// Matrix products, in blocks that fit the caches (Goto and van de Geijn 2008).
//
// An element of a product is the sum, in order, of sums over kDepth products
// each. So its bits depend on its row of A and its column of B alone, not on
// the sizes or the alignment of the matrices nor on the number of threads: a
// split of rows or columns changes nothing.

#include <cstdint>

#include "runtime/thread_pool.h"

namespace tessera {

// Element (i, j) is data[i * row_stride + j * column_stride]; one of the
// strides is 1. 16-bit elements (BFloat16, Float16) are widened to fp32.
template <typename T>
struct MatrixView {
  const T* data = nullptr;
  int64_t row_stride = 0;
  int64_t column_stride = 0;

  MatrixView Transposed() const { return {data, column_stride, row_stride}; }
};

// c (rows x columns, row-major) = a b, plus `bias` in every row unless it is
// null; added to c if `accumulate`. a is rows x depth, b is depth x columns.
void Gemm(int64_t rows, int64_t columns, int64_t depth, MatrixView<float> a,
          MatrixView<float> b, const float* bias, bool accumulate, float* c,
          ThreadPool* threads);
void Gemm(int64_t rows, int64_t columns, int64_t depth, MatrixView<double> a,
          MatrixView<double> b, const double* bias, bool accumulate, double* c,
          ThreadPool* threads);

}  // namespace tessera
