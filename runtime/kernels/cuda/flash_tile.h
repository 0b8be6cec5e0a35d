#pragma once
// The parts of which flash_forward.cu and flash_backward.cu are made: tiles in
// shared memory and products of them by a warp. A warp has kBlocks runs of 16
// rows of a product in registers, as accumulators of mma (runtime/kernels/cuda/
// mma.h): element (16 block + g + 8 (i / 2), 8 column + 2 t + i % 2) of it is
// c[block][column][i], g = lane / 4, t = lane % 4.

#include "runtime/kernels/cuda/flash.h"
#include "runtime/kernels/cuda/mma.h"

namespace tessera::flash {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kMinusInfinity = -INFINITY;

// 2^x to 2 units in the last place; 0 below 2^-126.
inline __device__ float Exp2(float x) {
#ifdef TESSERA_EMULATE_CUDA
  return exp2f(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// Two 16-bit numbers as one register.
template <typename Pair>
inline __device__ uint32_t Bits(const Pair& two) {
  static_assert(sizeof(Pair) == sizeof(uint32_t));
  uint32_t bits = 0;
  memcpy(&bits, &two, sizeof(bits));
  return bits;
}

template <typename T>
struct Half;
template <>
struct Half<__nv_bfloat16> {
  static __device__ uint32_t Pack(float low, float high) {
    const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
    return Bits(two);
  }
  static __device__ void Mma(float (&c)[4], const uint32_t (&a)[4],
                             const uint32_t (&b)[2]) {
    MmaBFloat16(c, a, b);
  }
};
template <>
struct Half<__half> {
  static __device__ uint32_t Pack(float low, float high) {
    const __half2 two = __floats2half2_rn(low, high);
    return Bits(two);
  }
  static __device__ void Mma(float (&c)[4], const uint32_t (&a)[4],
                             const uint32_t (&b)[2]) {
    MmaFloat16(c, a, b);
  }
};

// Rows of a tile in shared memory are so many elements apart: 16 bytes more
// than they hold, so that 8 rows of ldmatrix lie in different banks (a row has
// an odd number of 16 bytes).
template <int kWidth>
constexpr int kPitch = kWidth + 8;
template <int kWidth>
constexpr size_t TileBytes(int rows) {
  return size_t{2} * rows * kPitch<kWidth>;
}

// Copies `rows` rows of `width` elements, `stride` elements apart, to a tile of
// kRows rows of kWidth, and zeros to the rest of it.
template <typename T, int kRows, int kWidth, int kThreads>
__device__ void CopyTile(T* tile, const T* from, int64_t stride, int rows,
                         int width) {
  constexpr int kPieces = kWidth / 8;
  static_assert(kRows * kPieces % kThreads == 0);
  if constexpr (kThreads % kPieces == 0) {
    // A thread's pieces are below each other.
    constexpr int kStep = kThreads / kPieces;
    const int row = threadIdx.x / kPieces;
    const int column = threadIdx.x % kPieces * 8;
    const T* piece = from + row * stride + column;
    T* const to = tile + row * kPitch<kWidth> + column;
#pragma unroll
    for (int i = 0; i < kRows / kStep; ++i) {
      CopyAsync16(to + i * kStep * kPitch<kWidth>, piece,
                  row + i * kStep < rows && column < width);
      piece += kStep * stride;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRows * kPieces / kThreads; ++i) {
      const int piece = i * kThreads + threadIdx.x;
      const int row = piece / kPieces;
      const int column = piece % kPieces * 8;
      CopyAsync16(tile + row * kPitch<kWidth> + column,
                  from + row * stride + column, row < rows && column < width);
    }
  }
}

// The tiles of kKeys keys that a tile of queries sees something of.
template <int kKeys>
struct KeyTiles {
  const AttentionProblem& p;
  int sample;
  PositionRange queries;

  struct Tile {
    int number;
    Seen seen;
  };
  __device__ int count() const { return DivideUp(p.t, kKeys); }
  // The next one; number `count` where there is none.
  __device__ Tile After(int number) const {
    while (++number < count()) {
      const Seen seen =
          p.SeenOf(queries, p.Keys(sample, number * kKeys, kKeys));
      if (seen == Seen::kNothing) continue;
      // Keys behind the last are masked.
      return {number, (number + 1) * kKeys > p.t ? Seen::kSome : seen};
    }
    return {number, Seen::kNothing};
  }
};

template <int kBlocks, int kColumns>
__device__ void Clear(float (&c)[kBlocks][kColumns][4]) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
#pragma unroll
      for (int i = 0; i < 4; ++i) c[block][column][i] = 0;
    }
  }
}

// c += a b^T. `a` is the warp's first row of a tile of kWidth elements, `b` a
// tile of 8 kColumns rows.
template <typename T, int kWidth, int kBlocks, int kColumns>
__device__ void MultiplyTransposed(const T* a, const T* b,
                                   float (&c)[kBlocks][kColumns][4]) {
  constexpr int kRow = kPitch<kWidth>;
  const int lane = threadIdx.x % 32;
  const T* const a_row = a + lane % 16 * kRow + lane / 16 * 8;
  const T* const b_row =
      b + (lane / 16 * 8 + lane % 8) * kRow + lane / 8 % 2 * 8;
#pragma unroll
  for (int k = 0; k < kWidth / 16; ++k) {
    uint32_t left[kBlocks][4];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      LoadMatrix(left[block], a_row + block * 16 * kRow + k * 16);
    }
#pragma unroll
    for (int pair = 0; pair < kColumns / 2; ++pair) {
      uint32_t right[4];
      LoadMatrix(right, b_row + pair * 16 * kRow + k * 16);
      const uint32_t first[2] = {right[0], right[1]};
      const uint32_t second[2] = {right[2], right[3]};
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        Half<T>::Mma(c[block][2 * pair], left[block], first);
        Half<T>::Mma(c[block][2 * pair + 1], left[block], second);
      }
    }
  }
}

// c += weights b: the weights, accumulators of an earlier product, are rounded
// to T. `b` is a tile of kWidth elements; its rows are the weights' columns.
// The product's columns are b's from that to which `b` points.
template <typename T, int kWidth, int kBlocks, int kRows, int kColumns>
__device__ void MultiplyWeights(const float (&weights)[kBlocks][kRows][4],
                                const T* b, float (&c)[kBlocks][kColumns][4]) {
  constexpr int kRow = kPitch<kWidth>;
  const int lane = threadIdx.x % 32;
  const T* const b_row = b + lane % 16 * kRow + lane / 16 * 8;
#pragma unroll
  for (int k = 0; k < kRows / 2; ++k) {
    uint32_t left[kBlocks][4];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const two = weights[block][2 * k + i / 2] + i % 2 * 2;
        left[block][i] = Half<T>::Pack(two[0], two[1]);
      }
    }
#pragma unroll
    for (int pair = 0; pair < kColumns / 2; ++pair) {
      uint32_t right[4];
      LoadMatrixTransposed(right, b_row + k * 16 * kRow + pair * 16);
      const uint32_t first[2] = {right[0], right[1]};
      const uint32_t second[2] = {right[2], right[3]};
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        Half<T>::Mma(c[block][2 * pair], left[block], first);
        Half<T>::Mma(c[block][2 * pair + 1], left[block], second);
      }
    }
  }
}

// Takes to minus infinity the scores of what is not seen: rows 2 block + half
// of a thread are queries of which `sees` says what they see, the first column
// is key `first`.
template <int kBlocks, int kColumns>
__device__ void Mask(const AttentionProblem& p, int sample, int first,
                     const Sight& sight, const uint32_t (&sees)[2 * kBlocks],
                     float (&scores)[kBlocks][kColumns][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int column = 0; column < kColumns; ++column) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int key = first + 8 * column + lane % 4 * 2 + odd;
      const bool exists = key < p.t;
      const int32_t at =
          exists ? p.key_positions[int64_t{sample} * p.t + key] : 0;
      const bool shown = exists && sight.Shows(at);
#pragma unroll
      for (int i = 0; i < 2 * kBlocks; ++i) {
        float& score = scores[i / 2][column][i % 2 * 2 + odd];
        score = shown && sight.Sees(sees[i], at) ? score : kMinusInfinity;
      }
    }
  }
}

// Adds factor c, or sets to it, where the row is below `rows` and the column
// below `width`. The product's first element is element `first` of the tensor;
// its rows are `stride` elements apart.
template <int kBlocks, int kColumns>
__device__ void Store(const float (&c)[kBlocks][kColumns][4], float factor,
                      const Elements<Any>& to, int64_t first, int64_t stride,
                      int rows, int width, bool accumulate) {
  const int lane = threadIdx.x % 32;
  InPairs(to, [&](auto* pairs) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * block + lane / 4 + 8 * half;
        if (row >= rows) continue;
        auto* const of_row = pairs + (first + row * stride) / 2 + lane % 4;
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
          if (8 * column + lane % 4 * 2 >= width) continue;
          float2 value = make_float2(factor * c[block][column][2 * half],
                                     factor * c[block][column][2 * half + 1]);
          if (accumulate) {
            const float2 old = LoadTwo(of_row + 4 * column);
            value.x += old.x;
            value.y += old.y;
          }
          StoreTwo(of_row + 4 * column, value);
        }
      }
    }
  });
}

}  // namespace tessera::flash
