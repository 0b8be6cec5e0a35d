#pragma once
// Warp-wide matrix instructions and asynchronous copies of sm_80 and later, for
// .cu files. All 32 lanes of a warp call them together. Layouts of fragments:
// PTX ISA, "Matrix Fragments for mma.m16n8k16" and "ldmatrix". With g = lane /
// 4 and t = lane % 4, element i of a 32-bit register its lower half first:
//   A 16 x 16: a[0] (g, 2t + i), a[1] (g + 8, 2t + i), a[2] (g, 2t + 8 + i),
//              a[3] (g + 8, 2t + 8 + i)
//   B 16 x 8:  b[0] (2t + i, g), b[1] (2t + 8 + i, g)
//   C 16 x 8:  c[i] (g, 2t + i), c[2 + i] (g + 8, 2t + i)

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "runtime/kernels/cuda/launch.h"

namespace tessera {

#ifdef __CUDACC__

// c += a b, in fp32.
inline __device__ void MmaBFloat16(float (&c)[4], const uint32_t (&a)[4],
                                   const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
inline __device__ void MmaFloat16(float (&c)[4], const uint32_t (&a)[4],
                                  const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8 x 8 matrices of 16-bit elements out of shared memory. Lane l gives the
// address of row l % 8 (16 bytes, aligned) of matrix l / 8, and gets elements
// (g, 2t + i) of matrix j in r[j]; transposed, elements (2t + i, g).
// The memory clobbers keep what follows in its place among other accesses of
// shared memory and barriers.
inline __device__ void LoadMatrix(uint32_t (&r)[4], const void* row) {
  asm volatile(
      "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
      : "memory");
}
inline __device__ void LoadMatrixTransposed(uint32_t (&r)[4], const void* row) {
  asm volatile(
      "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
      : "memory");
}

// Copies 16 bytes from global to shared memory, both aligned; zeros where not
// `valid`, and nothing is read then. They are there, for this thread, after a
// WaitForCopies that leaves fewer committed groups than came after theirs.
inline __device__ void CopyAsync16(void* shared, const void* global,
                                   bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
                 "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0)
               : "memory");
}
inline __device__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kGroupsLeft>
__device__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroupsLeft) : "memory");
}

#elif defined(TESSERA_EMULATE_CUDA)

namespace emulation {

inline float HalfOf(uint32_t two, int which, __nv_bfloat16) {
  return std::bit_cast<float>((two >> (16 * which) & 0xffffu) << 16);
}
inline float HalfOf(uint32_t two, int which, __half) {
  const auto bits = static_cast<unsigned short>(two >> (16 * which));
  return __half2float(__ushort_as_half(bits));
}

struct MmaOperands {
  float c[4];
  uint32_t a[4];
  uint32_t b[2];
};
struct FourFloats {
  float of[4];
};

template <typename T>
void Mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
         Site site) {
  MmaOperands in;
  std::copy_n(c, 4, in.c);
  std::copy_n(a, 4, in.a);
  std::copy_n(b, 2, in.b);
  const FourFloats out = InWarp<MmaOperands, FourFloats>(
      ~0u, in,
      [](auto of, int lane) {
        FourFloats sums;
        for (int i = 0; i < 4; ++i) {
          const int row = lane / 4 + (i >= 2 ? 8 : 0);
          const int column = lane % 4 * 2 + i % 2;
          float sum = of(lane)->in.c[i];
          for (int k = 0; k < 16; ++k) {
            const auto& left = of(row % 8 * 4 + k % 8 / 2)->in.a;
            const auto& right = of(column * 4 + k % 8 / 2)->in.b;
            sum += HalfOf(left[(row >= 8) + 2 * (k >= 8)], k % 2, T()) *
                   HalfOf(right[k >= 8], k % 2, T());
          }
          sums.of[i] = sum;
        }
        return sums;
      },
      "mma", site);
  std::copy_n(out.of, 4, c);
}

struct FourWords {
  uint32_t of[4];
};

// Matrix i of four has its rows at the addresses of lanes 8i, ..., 8i + 7.
inline void LoadMatrices(uint32_t (&r)[4], const void* row, bool transposed,
                         Site site) {
  const FourWords out = InWarp<const void*, FourWords>(
      ~0u, row,
      [transposed](auto of, int lane) {
        FourWords words = {};
        for (int i = 0; i < 4; ++i) {
          for (int half = 0; half < 2; ++half) {
            int y = lane / 4;
            int x = lane % 4 * 2 + half;
            if (transposed) std::swap(x, y);
            const auto* const from =
                static_cast<const uint16_t*>(of(8 * i + y)->in);
            words.of[i] |= uint32_t{from[x]} << (16 * half);
          }
        }
        return words;
      },
      "ldmatrix", site);
  std::copy_n(out.of, 4, r);
}

}  // namespace emulation

inline void MmaBFloat16(float (&c)[4], const uint32_t (&a)[4],
                        const uint32_t (&b)[2],
                        emulation::Site site = emulation::Site::current()) {
  emulation::Mma<__nv_bfloat16>(c, a, b, site);
}
inline void MmaFloat16(float (&c)[4], const uint32_t (&a)[4],
                       const uint32_t (&b)[2],
                       emulation::Site site = emulation::Site::current()) {
  emulation::Mma<__half>(c, a, b, site);
}

inline void LoadMatrix(uint32_t (&r)[4], const void* row,
                       emulation::Site site = emulation::Site::current()) {
  emulation::LoadMatrices(r, row, false, site);
}
inline void LoadMatrixTransposed(
    uint32_t (&r)[4], const void* row,
    emulation::Site site = emulation::Site::current()) {
  emulation::LoadMatrices(r, row, true, site);
}

inline void CopyAsync16(void* shared, const void* global, bool valid = true) {
  emulation::CopyLater(shared, global, 16, valid ? 16 : 0);
}
inline void CommitCopies() {
  emulation::CommitCopies();
}
template <int kGroupsLeft>
void WaitForCopies() {
  emulation::WaitForCopies(kGroupsLeft);
}

#endif

}  // namespace tessera
