#pragma once
// Matrix products of any elements, in fp32 without tensor cores. For .cu files.
// A Product says what is multiplied:
//
//   rows() x columns() is each result, of groups() independent products with
//   depth() summands;
//   A(group, row, d) and B(group, d, column) are the elements, and what lies
//   beside an element in memory is the next d where a_by_depth() or
//   b_by_depth(), else the next row or column;
//   Put(group, row, column, sum) stores an element of the result.
//
// Every sum has one order.

#include <algorithm>

#include "runtime/kernels/cuda/elements.h"

namespace tessera {

namespace tiled_product {

// A block computes a tile of the result, a thread 4 x 4 elements of it.
constexpr int kTile = 64;
constexpr int kDepth = 16;
constexpr int kEach = 4;

// What a block has of A or B, from element (first, begin) on: tile[d][i] =
// get(first + i, begin + d), and zeros from `most` and from `end` on.
template <typename Get>
__device__ void LoadTile(bool by_depth, int64_t first, int64_t most,
                         int64_t begin, int64_t end, Get get,
                         float (&tile)[kDepth][kTile + 1]) {
  for (int i = threadIdx.x; i < kTile * kDepth; i += kThreads) {
    const int at = by_depth ? i / kDepth : i % kTile;
    const int deep = by_depth ? i % kDepth : i / kTile;
    const bool inside = first + at < most && begin + deep < end;
    tile[deep][at] = inside ? get(first + at, begin + deep) : 0.0f;
  }
}

// Block z works on group z / parts and the (z mod parts)-th part of the depth.
// Where there are several parts, their sums go to `sums`, one matrix for each
// block z.
template <typename Product>
__global__ void __launch_bounds__(kThreads)
    Multiply(Product p, int parts, float* sums) {
  TESSERA_SHARED(a, float[kDepth][kTile + 1]);
  TESSERA_SHARED(b, float[kDepth][kTile + 1]);
  const int64_t group = blockIdx.z / parts;
  const int64_t part = blockIdx.z % parts;
  const int64_t row = int64_t{blockIdx.x} * kTile;
  const int64_t column = int64_t{blockIdx.y} * kTile;
  const int64_t begin = p.depth() * part / parts;
  const int64_t end = p.depth() * (part + 1) / parts;
  const int x = threadIdx.x % 16;
  const int y = threadIdx.x / 16;
  float total[kEach][kEach] = {};
  for (int64_t d = begin; d < end; d += kDepth) {
    LoadTile(
        p.a_by_depth(), row, p.rows(), d, end,
        [&](int64_t i, int64_t deep) { return p.A(group, i, deep); }, a);
    LoadTile(
        p.b_by_depth(), column, p.columns(), d, end,
        [&](int64_t j, int64_t deep) { return p.B(group, deep, j); }, b);
    __syncthreads();
#pragma unroll
    for (int deep = 0; deep < kDepth; ++deep) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          total[i][j] += a[deep][y + 16 * i] * b[deep][x + 16 * j];
        }
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int64_t to_row = row + y + 16 * i;
      const int64_t to_column = column + x + 16 * j;
      if (to_row >= p.rows() || to_column >= p.columns()) continue;
      if (parts == 1) {
        p.Put(group, to_row, to_column, total[i][j]);
      } else {
        sums[(blockIdx.z * p.rows() + to_row) * p.columns() + to_column] =
            total[i][j];
      }
    }
  }
}

// One thread for each element of the results of all groups.
template <typename Product>
__global__ void __launch_bounds__(kThreads)
    AddParts(Product p, int parts, const float* sums) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t size = p.rows() * p.columns();
  if (i >= p.groups() * size) return;
  const int64_t group = i / size;
  float sum = 0;
  for (int part = 0; part < parts; ++part) {
    sum += sums[(group * parts + part) * size + i % size];
  }
  p.Put(group, i % size / p.columns(), i % p.columns(), sum);
}

}  // namespace tiled_product

// Enqueues a product. Where the result is small, its depth is cut into parts of
// `least_depth` or more, which fill the GPU; their sums take the workspace.
template <typename Product>
void RunTiledProduct(const Product& p, int64_t least_depth, CudaQueue& queue) {
  using tiled_product::kTile;
  const int64_t size = p.groups() * p.rows() * p.columns();
  if (size == 0) return;
  const int64_t rows = DivideUp(p.rows(), kTile);
  const int64_t columns = DivideUp(p.columns(), kTile);
  const auto parts = static_cast<int>(std::max<int64_t>(
      1,
      std::min({2 * queue.multiprocessors / (p.groups() * rows * columns),
                p.depth() / least_depth, queue.workspace_bytes / (size * 4)})));
  auto* const sums =
      parts > 1 ? reinterpret_cast<float*>(queue.workspace) : nullptr;
  Launch(tiled_product::Multiply<Product>,
         dim3(static_cast<unsigned>(rows), static_cast<unsigned>(columns),
              static_cast<unsigned>(p.groups() * parts)),
         kThreads, 0, queue, p, parts, sums);
  if (parts == 1) return;
  Launch(tiled_product::AddParts<Product>, BlocksOf(size, kThreads), kThreads,
         0, queue, p, parts, sums);
}

}  // namespace tessera
