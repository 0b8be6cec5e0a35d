#pragma once
// Vector and matrix pieces of the CPU kernels. What they compute does not
// depend on the alignment of the data, and an elementwise result not on where
// its element lies either: replicas stay bit-equal whatever the allocator does.
// (Eigen's own loops over a mapped buffer peel to alignment, and its scalar and
// vector exponentials differ in the last bit.)

#include <algorithm>
#include <cstdint>

#define EIGEN_DONT_PARALLELIZE  // the kernels do
// Small products, too, go through packed panels: the coefficient-wise ones peel
// to the result's alignment.
#define EIGEN_GEMM_TO_COEFFBASED_THRESHOLD 0
#include <Eigen/Core>

#include "planner/base/divide.h"
#include "runtime/kernels/cpu/call.h"

namespace tessera {

template <typename T>
using Matrix =
    Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <typename T>
using MatrixMap = Eigen::Map<Matrix<T>>;
template <typename T>
using ConstMatrixMap = Eigen::Map<const Matrix<T>>;

// Elements that are computed together; any multiple of a vector register.
inline constexpr int64_t kBlock = 128;
template <typename T>
using Block = Eigen::Array<T, kBlock, 1>;

// `count` elements, and zeros behind them.
template <typename T>
Block<T> Load(const T* data, int64_t count) {
  if (count == kBlock) return Eigen::Map<const Block<T>>(data);
  Block<T> block = Block<T>::Zero();
  std::copy_n(data, count, block.data());
  return block;
}

template <typename T>
void Store(const Block<T>& block, int64_t count, T* data) {
  std::copy_n(block.data(), count, data);
}

template <typename T>
Block<T> Sigmoid(const Block<T>& x) {
  return (T{1} + (-x).exp()).inverse();
}

// Calls f(first, count) for the blocks of n elements, the last one ragged.
template <typename F>
void ForEachBlock(int64_t n, F f) {
  for (int64_t i = 0; i < n; i += kBlock) f(i, std::min(kBlock, n - i));
}

// The same on the threads of the call.
template <typename F>
void ForEachBlock(const KernelCall& call, int64_t n, F f) {
  const int64_t blocks = DivideUp(n, kBlock);
  ForEachRange(
      call, blocks, kGrainElements / kBlock, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin * kBlock; i < end * kBlock; i += kBlock) {
          f(i, std::min(kBlock, n - i));
        }
      });
}

// term(0) + ... + term(n - 1) in double, over eight lanes.
template <typename Term>
double Sum(int64_t n, Term term) {
  constexpr int64_t kLanes = 8;
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += static_cast<double>(term(i + lane));
    }
  }
  for (int64_t lane = 0; i + lane < n; ++lane) {
    lanes[lane] += static_cast<double>(term(i + lane));
  }
  double sum = 0;
  for (double lane : lanes) sum += lane;
  return sum;
}

}  // namespace tessera
