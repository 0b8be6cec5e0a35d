// Matrix products against sums in double, and what their bits depend on.

#include "runtime/kernels/cpu/gemm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "planner/base/rng.h"

namespace tessera {
namespace {

template <typename T>
std::vector<T> Random(int64_t n, uint64_t key) {
  std::vector<T> values(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    values[static_cast<size_t>(i)] =
        static_cast<T>(2 * CounterUniform01(key, static_cast<uint64_t>(i)) - 1);
  }
  return values;
}

struct Size {
  int64_t rows, columns, depth;
};

// Around the tiles and blocks of gemm.cc: 14 or 6 rows, 8 to 32 columns, depths
// of 512, blocks of 512 columns.
constexpr Size kSizes[] = {{1, 1, 1},     {3, 5, 7},      {14, 32, 512},
                           {15, 33, 513}, {29, 1100, 37}, {1, 70, 1030},
                           {1800, 3, 5},  {40, 1, 600},   {2, 3, 0}};

// Both orders of both operands, with and without a bias and a sum.
template <typename T>
void ExpectProducts(double tolerance) {
  for (const Size& n : kSizes) {
    const std::vector<T> a = Random<T>(n.rows * n.depth, 1);
    const std::vector<T> b = Random<T>(n.depth * n.columns, 2);
    const std::vector<T> bias = Random<T>(n.columns, 3);
    const std::vector<T> before = Random<T>(n.rows * n.columns, 4);
    for (int kind = 0; kind < 16; ++kind) {
      MatrixView<T> left = {a.data(), n.depth, 1};
      if ((kind & 1) != 0) left = {a.data(), 1, n.rows};
      MatrixView<T> right = {b.data(), n.columns, 1};
      if ((kind & 2) != 0) right = {b.data(), 1, n.depth};
      const bool biased = (kind & 4) != 0;
      const bool accumulate = (kind & 8) != 0;
      std::vector<T> c = before;
      Gemm(n.rows, n.columns, n.depth, left, right,
           biased ? bias.data() : nullptr, accumulate, c.data(), nullptr);
      for (int64_t i = 0; i < n.rows; ++i) {
        for (int64_t j = 0; j < n.columns; ++j) {
          const auto at = static_cast<size_t>(i * n.columns + j);
          double sum = accumulate ? before[at] : 0;
          if (biased) sum += bias[static_cast<size_t>(j)];
          for (int64_t k = 0; k < n.depth; ++k) {
            sum +=
                static_cast<double>(
                    left.data[i * left.row_stride + k * left.column_stride]) *
                right.data[k * right.row_stride + j * right.column_stride];
          }
          ASSERT_NEAR(c[at], sum, tolerance)
              << n.rows << "x" << n.columns << "x" << n.depth << " kind "
              << kind << " at " << i << ", " << j;
        }
      }
    }
  }
}

// The sum of 1000 products below 1 is of the order of 30, and its rounding of
// some tens of units of 2^-24 or 2^-53 of that.
TEST(Gemm, Fp32) {
  ExpectProducts<float>(1e-4);
}
TEST(Gemm, Fp64) {
  ExpectProducts<double>(1e-12);
}

// Parts of the rows and columns, on any number of threads, have the bits that
// they have in the whole.
TEST(Gemm, BitsDoNotDependOnSplits) {
  constexpr int64_t kRows = 101;
  constexpr int64_t kColumns = 1203;
  constexpr int64_t kDepth = 700;
  const std::vector<float> a = Random<float>(kRows * kDepth, 1);
  const std::vector<float> b = Random<float>(kDepth * kColumns, 2);
  std::vector<float> whole(kRows * kColumns);
  Gemm(kRows, kColumns, kDepth, {a.data(), kDepth, 1}, {b.data(), kColumns, 1},
       nullptr, false, whole.data(), nullptr);
  for (int count : {2, 3}) {
    ThreadPool threads(count);
    std::vector<float> c(whole.size());
    Gemm(kRows, kColumns, kDepth, {a.data(), kDepth, 1},
         {b.data(), kColumns, 1}, nullptr, false, c.data(), &threads);
    EXPECT_EQ(c, whole) << count << " threads";
  }
  for (const auto& [row, rows] : {std::pair{0, 1}, {5, 20}, {100, 1}}) {
    for (const auto& [column, columns] :
         {std::pair{0, 1}, {7, 500}, {600, 603}}) {
      std::vector<float> part(static_cast<size_t>(rows * columns));
      Gemm(rows, columns, kDepth, {a.data() + row * kDepth, kDepth, 1},
           {b.data() + column, kColumns, 1}, nullptr, false, part.data(),
           nullptr);
      for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < columns; ++j) {
          ASSERT_EQ(
              part[static_cast<size_t>(i * columns + j)],
              whole[static_cast<size_t>((row + i) * kColumns + column + j)]);
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera
