#pragma once
// What Adafactor's kernels share (planner/lower/factored_update.h): which part
// of a weight a call has, and the numbers of the step. Plain values.
//
// The gradient of a call is a block of b matrices with r rows and c columns, of
// which KernelCall::run is here; sums and moments of rows are (b, r), of
// columns (b, c), of matrices (b). They may hold more than the block: the
// difference of LocalTensor::offset says where the block begins in them.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "planner/base/divide.h"
#include "runtime/kernels/kernel.h"

namespace tessera {

// A run of a block's elements, row by row. Rows are counted through all
// matrices.
struct MatrixRun {
  int64_t rows = 1;  // of a matrix
  int64_t columns = 1;
  Range run;

  explicit MatrixRun(const KernelCall& call) {
    const LocalTensor& gradient = call.operands[0];
    rows = std::max<int64_t>(1, gradient.shape[1]);
    columns = std::max<int64_t>(1, gradient.shape[2]);
    run = call.run.value_or(Range{0, gradient.elements()});
  }
  // The rows of which there is some element.
  Range Rows() const {
    return {run.begin / columns, DivideUp(run.end, columns)};
  }
  // The columns of a row that are here.
  Range Columns(int64_t row) const {
    const int64_t begin = row * columns;
    return {std::max<int64_t>(run.begin - begin, 0),
            std::min(run.end - begin, columns)};
  }
};

// Where in numbers of rows or of columns those of a block are.
struct VectorPlace {
  int64_t width = 0;  // numbers of a matrix
  int64_t first = 0;  // that of the block's first matrix and index

  // `dim` is 1 for rows and 2 for columns.
  VectorPlace(const LocalTensor& gradient, const LocalTensor& numbers,
              size_t dim)
      : width(numbers.shape[1]),
        first((gradient.offset[0] - numbers.offset[0]) * width +
              gradient.offset[dim] - numbers.offset[1]) {}
};

// How many elements of the gradient the buffers hold.
inline int64_t ElementsHere(const KernelCall& call) {
  return call.run ? call.run->size() : call.operands[0].elements();
}

inline int64_t WholeElements(const LocalTensor& tensor) {
  int64_t elements = 1;
  for (const int64_t extent : tensor.global_shape) elements *= extent;
  return elements;
}

// The numbers of a step; what depends on `skipped` steps (fp16) is computed
// where these are known.
struct AdafactorOptions {
  StepArgument now;  // the step: skipped ones included
  double beta2_decay, d, epsilon1, epsilon2, weight_decay;
  double elements;  // of the whole weight

  explicit AdafactorOptions(const KernelCall& call)
      : now(call.step_argument()),
        beta2_decay(call.attribute("beta2_decay")),
        d(call.attribute("d")),
        epsilon1(call.attribute("epsilon1")),
        epsilon2(call.attribute("epsilon2")),
        weight_decay(call.attribute("weight_decay")),
        elements(static_cast<double>(WholeElements(call.operands[0]))) {}
};

}  // namespace tessera
