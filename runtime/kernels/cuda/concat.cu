// Features before features (planner/ops/concat.cc): z = (x, y) along the last
// dimension, x repeated along the rows that it lacks.

#include <algorithm>

#include "runtime/kernels/cuda/elements.h"

namespace tessera {
namespace {

// Which row of x stands beside a row of z, and the other way round. The rows
// are those of z's dimensions; x has a stride of 0 along those that it lacks.
struct RowsOfX {
  int dims = 0;
  int64_t shape[kMaxDims] = {};
  int64_t stride[kMaxDims] = {};  // in rows of x
  int64_t rows = 1;               // of z
  int64_t repeats = 1;            // of each row of x

  RowsOfX(const Indices& z, const Indices& x, const Shape& shape_of_z)
      : dims(static_cast<int>(z.size()) - 1) {
    int64_t in_x = 1;
    for (int d = dims - 1; d >= 0; --d) {
      shape[d] = shape_of_z[d];
      rows *= shape[d];
      const auto last = x.end() - 1;
      if (std::find(x.begin(), last, z[d]) != last) {
        stride[d] = in_x;
        in_x *= shape[d];
      } else {
        repeats *= shape[d];
      }
    }
  }

  __device__ int64_t InX(int64_t row) const {
    int64_t in_x = 0;
    for (int d = dims - 1; d >= 0; --d) {
      in_x += row % shape[d] * stride[d];
      row /= shape[d];
    }
    return in_x;
  }
  // The row of z that is the `repeat`-th beside row `in_x` of x.
  __device__ int64_t InZ(int64_t in_x, int64_t repeat) const {
    int64_t row = 0;
    int64_t of_dim = 1;
    for (int d = dims - 1; d >= 0; --d) {
      int64_t& left = stride[d] > 0 ? in_x : repeat;
      row += left % shape[d] * of_dim;
      left /= shape[d];
      of_dim *= shape[d];
    }
    return row;
  }
};

template <typename T>
__global__ void Concat(Elements<T> x, Elements<T> y, Elements<T> z,
                       RowsOfX rows, int64_t width_x, int64_t width_y) {
  const int64_t width = width_x + width_y;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       i < rows.rows * width; i += step) {
    const int64_t row = i / width;
    const int64_t column = i - row * width;
    z.Set(i, column < width_x ? x.Get(rows.InX(row) * width_x + column)
                              : y.Get(row * width_y + column - width_x));
  }
}

template <typename T>
__global__ void ConcatDx(Elements<T> dz, Elements<T> dx, Elements<T> dy,
                         RowsOfX rows, int64_t width_x, int64_t width_y) {
  const int64_t width = width_x + width_y;
  const int64_t of_x = rows.rows / rows.repeats * width_x;
  const int64_t of_y = rows.rows * width_y;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       i < of_x + of_y; i += step) {
    if (i >= of_x) {
      const int64_t row = (i - of_x) / width_y;
      const int64_t column = (i - of_x) % width_y;
      dy.Set(i - of_x, dz.Get(row * width + width_x + column));
      continue;
    }
    float sum = 0;
    for (int64_t repeat = 0; repeat < rows.repeats; ++repeat) {
      sum += dz.Get(rows.InZ(i / width_x, repeat) * width + i % width_x);
    }
    dx.Set(i, sum);
  }
}

void CallConcat(const KernelCall& call) {
  const LocalTensor& x = call.operands[0];
  const LocalTensor& y = call.operands[1];
  const LocalTensor& z = call.results[0];
  const RowsOfX rows(call.rule->results[0], call.rule->operands[0], z.shape);
  ByType({x, y, z}, [&]<typename T>() {
    Launch(Concat<T>, BlocksFor(*call.queue, z.elements()), kThreads, 0,
           *call.queue, Elements<T>(x), Elements<T>(y), Elements<T>(z), rows,
           x.shape.back(), y.shape.back());
  });
}

void CallConcatDx(const KernelCall& call) {
  const LocalTensor& dz = call.operands[0];
  const LocalTensor& dx = call.results[0];
  const LocalTensor& dy = call.results[1];
  const RowsOfX rows(call.rule->operands[0], call.rule->results[0], dz.shape);
  ByType({dz, dx, dy}, [&]<typename T>() {
    Launch(ConcatDx<T>, BlocksFor(*call.queue, dx.elements() + dy.elements()),
           kThreads, 0, *call.queue, Elements<T>(dz), Elements<T>(dx),
           Elements<T>(dy), rows, dx.shape.back(), dy.shape.back());
  });
}

}  // namespace

std::vector<Kernel> CudaConcatKernels() {
  return {{"concat", CallConcat}, {"concat_dx", CallConcatDx}};
}

}  // namespace tessera
