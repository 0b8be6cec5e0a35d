// The emulation itself: what kernels may do works, and what they must not do is
// caught.

#include "tests/emulation/cuda_emulation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <set>
#include <vector>

#include "runtime/kernels/cuda/launch.h"
#include "runtime/kernels/cuda/mma.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr unsigned kAll = ~0u;

// Runs a kernel with some seeds, each of which must fill `out` with `expected`.
template <typename... Params, typename... Args>
bool AlwaysGives(const std::vector<float>& expected,
                 void (*kernel)(float*, Params...), dim3 grid, dim3 block,
                 Args... args) {
  for (uint64_t seed = 0; seed < 5; ++seed) {
    emulation::SetSeed(seed);
    CudaQueue queue;
    std::vector<float> out(expected.size(), -1);
    Launch(kernel, grid, block, 0, queue, out.data(), args...);
    EXPECT_EQ(queue.error, "");
    if (out != expected) return false;
  }
  return true;
}

// ---- What kernels may do ----------------------------------------------------

__global__ void Index(float* out) {
  const unsigned thread = threadIdx.x + blockDim.x * threadIdx.y;
  const unsigned block = blockIdx.x + gridDim.x * blockIdx.y;
  out[block * blockDim.x * blockDim.y + thread] = static_cast<float>(
      1000 * blockIdx.y + 100 * blockIdx.x + 10 * threadIdx.y + threadIdx.x);
}

TEST(Emulation, RunsEveryThreadOfEveryBlock) {
  std::vector<float> expected;
  for (int by = 0; by < 2; ++by) {
    for (int bx = 0; bx < 3; ++bx) {
      for (int y = 0; y < 4; ++y) {
        for (int x = 0; x < 5; ++x) {
          expected.push_back(
              static_cast<float>(1000 * by + 100 * bx + 10 * y + x));
        }
      }
    }
  }
  EXPECT_TRUE(AlwaysGives(expected, Index, dim3(3, 2), dim3(5, 4)));
}

// Each block turns its 100 elements round; without the barrier most threads
// read what is not written yet.
template <bool kBarrier>
__global__ void Reverse(float* out) {
  TESSERA_SHARED(held, float[100]);
  held[threadIdx.x] = static_cast<float>(blockIdx.x * 100 + threadIdx.x);
  if (kBarrier) __syncthreads();
  out[blockIdx.x * 100 + threadIdx.x] = held[99 - threadIdx.x];
}

std::vector<float> Reversed() {
  std::vector<float> expected;
  for (int block = 0; block < 3; ++block) {
    for (int i = 99; i >= 0; --i) {
      expected.push_back(static_cast<float>(100 * block + i));
    }
  }
  return expected;
}

TEST(Emulation, BarrierMakesWritesVisible) {
  EXPECT_TRUE(AlwaysGives(Reversed(), Reverse<true>, 3, 100));
}

__global__ void Collectives(float* out) {
  const int lane = static_cast<int>(threadIdx.x);
  float sum = static_cast<float>(lane);
  for (int step = 16; step > 0; step /= 2) {
    sum += __shfl_xor_sync(kAll, sum, step);
  }
  const unsigned odd = __ballot_sync(kAll, lane % 2);
  const float next = __shfl_down_sync(kAll, static_cast<float>(lane), 1);
  const float third = __shfl_sync(kAll, static_cast<float>(lane), 3, 8);
  const float before = __shfl_up_sync(kAll, static_cast<float>(lane), 2);
  const int some = __syncthreads_or(lane == 7);
  const int many = __syncthreads_count(lane < 7);
  const bool right = sum == 31 * 16 && odd == 0xaaaaaaaau &&
                     next == static_cast<float>(std::min(lane + 1, 31)) &&
                     third == static_cast<float>(lane / 8 * 8 + 3) &&
                     before == static_cast<float>(lane < 2 ? lane : lane - 2) &&
                     some == 1 && many == 7;
  out[lane] = right ? 1 : 0;
}

TEST(Emulation, CollectivesExchangeValues) {
  EXPECT_TRUE(AlwaysGives(std::vector<float>(32, 1), Collectives, 1, 32));
}

// Halves of a warp have collectives of their own.
__global__ void HalfWarps(float* out) {
  const unsigned lane = threadIdx.x;
  const bool low = lane < 16;
  float value = static_cast<float>(lane);
  for (int i = 0; i < (low ? 1 : 3); ++i) {
    value += __shfl_xor_sync(low ? 0xffffu : 0xffff0000u, value, 1);
  }
  __syncwarp();
  out[lane] = value;
}

TEST(Emulation, MasksDivideAWarp) {
  std::vector<float> expected;
  for (int lane = 0; lane < 32; ++lane) {
    const int pair = lane / 2 * 4 + 1;
    expected.push_back(static_cast<float>(lane < 16 ? pair : 4 * pair));
  }
  EXPECT_TRUE(AlwaysGives(expected, HalfWarps, 1, 32));
}

__global__ void CountAll(int* count) {
  atomicAdd(count, 1);
}

TEST(Emulation, AtomicsAndManyThreads) {
  CudaQueue queue;
  int count = 0;
  Launch(CountAll, 7, 1024, 0, queue, &count);
  EXPECT_EQ(count, 7 * 1024);
  EXPECT_EQ(queue.error, "");
}

// One warp multiplies A[16, 16] by B[8, 16]^T, whose fragments ldmatrix gives.
template <bool kBFloat16>
__global__ void Multiply(float* out, const uint16_t* a, const uint16_t* b) {
  TESSERA_SHARED(left, uint16_t[16 * 16]);
  TESSERA_SHARED(right, uint16_t[16 * 16]);
  const unsigned lane = threadIdx.x;
  for (unsigned i = lane; i < 256; i += 32) {
    left[i] = a[i];
    right[i] = i < 128 ? b[i] : 0;
  }
  __syncthreads();
  uint32_t of_a[4];
  LoadMatrix(of_a, &left[lane % 16 * 16 + lane / 16 * 8]);
  uint32_t of_b[4];
  LoadMatrix(of_b, &right[lane % 8 * 16 + lane / 8 % 2 * 8]);
  const uint32_t pair[2] = {of_b[0], of_b[1]};
  float c[4] = {1, 1, 1, 1};
  if (kBFloat16) {
    MmaBFloat16(c, of_a, pair);
  } else {
    MmaFloat16(c, of_a, pair);
  }
  for (unsigned i = 0; i < 4; ++i) {
    out[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = c[i];
  }
}

template <bool kBFloat16>
void ExpectProduct() {
  std::array<float, 256> a;
  std::array<float, 128> b;
  std::array<uint16_t, 256> stored_a;
  std::array<uint16_t, 128> stored_b;
  const auto store = [](float x) {
    return kBFloat16 ? __bfloat16_as_ushort(__float2bfloat16_rn(x))
                     : __half_as_ushort(__float2half_rn(x));
  };
  for (size_t i = 0; i < a.size(); ++i) {
    a[i] = static_cast<float>(i * 7 % 13) - 6;
    stored_a[i] = store(a[i]);
  }
  for (size_t i = 0; i < b.size(); ++i) {
    b[i] = static_cast<float>(i * 5 % 11) - 5;
    stored_b[i] = store(b[i]);
  }
  std::vector<float> expected;  // small integers, so exact
  for (size_t row = 0; row < 16; ++row) {
    for (size_t column = 0; column < 8; ++column) {
      float sum = 1;
      for (size_t k = 0; k < 16; ++k)
        sum += a[row * 16 + k] * b[column * 16 + k];
      expected.push_back(sum);
    }
  }
  EXPECT_TRUE(AlwaysGives(expected, Multiply<kBFloat16>, 1, 32, stored_a.data(),
                          stored_b.data()));
}

TEST(Emulation, MatrixInstructionsMultiply) {
  ExpectProduct<true>();
  ExpectProduct<false>();
}

__global__ void Transpose(float* out) {
  TESSERA_SHARED(held, uint16_t[4 * 64]);
  const unsigned lane = threadIdx.x;
  for (unsigned i = lane; i < 256; i += 32) held[i] = static_cast<uint16_t>(i);
  __syncwarp();
  uint32_t r[4];
  LoadMatrixTransposed(r, &held[lane * 8]);
  for (unsigned j = 0; j < 4; ++j) {
    for (unsigned i = 0; i < 2; ++i) {
      out[64 * j + lane / 4 * 8 + lane % 4 * 2 + i] =
          static_cast<float>(r[j] >> (16 * i) & 0xffff);
    }
  }
}

TEST(Emulation, MatricesAreLoadedTransposed) {
  std::vector<float> expected;
  for (int i = 0; i < 256; ++i) {
    expected.push_back(
        static_cast<float>(i / 64 * 64 + i % 8 * 8 + i % 64 / 8));
  }
  EXPECT_TRUE(AlwaysGives(expected, Transpose, 1, 32));
}

// Two groups of copies, of which the first is waited for.
template <int kGroupsLeft>
__global__ void CopyAsynchronously(float* out, const float* in) {
  TESSERA_SHARED(held, float4[3]);
  CopyAsync16(&held[0], in);
  CommitCopies();
  CopyAsync16(&held[1], in + 4);
  CopyAsync16(&held[2], in, false);
  CommitCopies();
  WaitForCopies<kGroupsLeft>();
  out[0] = held[0].y;
  out[1] = held[1].y;
  out[2] = held[2].y;
}

TEST(Emulation, CopiesArriveWhenWaitedFor) {
  alignas(16) const float in[8] = {0, 1, 2, 3, 4, 5, 6, 7};
  EXPECT_TRUE(AlwaysGives({1, 5, 0}, CopyAsynchronously<0>, 1, 1, &in[0]));
  CudaQueue queue;
  std::vector<float> out(3);
  Launch(CopyAsynchronously<1>, 1, 1, 0, queue, out.data(), &in[0]);
  EXPECT_EQ(out[0], 1);
  EXPECT_TRUE(std::isnan(out[1]));
  EXPECT_TRUE(std::isnan(out[2]));
}

// ---- What they must not do --------------------------------------------------

TEST(PlantedKernelMistake, MissingBarrier) {
  EXPECT_FALSE(AlwaysGives(Reversed(), Reverse<false>, 3, 100));
}

template <typename... Params, typename... Args>
std::string ErrorOf(void (*kernel)(Params...), dim3 grid, dim3 block,
                    size_t shared_bytes, Args... args) {
  CudaQueue queue;
  Launch(kernel, grid, block, shared_bytes, queue, args...);
  return queue.error;
}

__global__ void ExitEarly(unsigned threads) {
  if (threadIdx.x >= threads) return;
  __syncthreads();
}

TEST(PlantedKernelMistake, BarrierThatSomeThreadsMiss) {
  EXPECT_THAT(ErrorOf(ExitEarly, 1, 100, 0, 70),
              AllOf(HasSubstr("block (0, 0, 0): stuck: 70 threads wait at "
                              "__syncthreads in cuda_emulation_test.cc:"),
                    HasSubstr("30 have ended")));
  // The machine is well afterwards.
  EXPECT_EQ(ErrorOf(ExitEarly, 2, 100, 0, 100), "");
}

__global__ void BarriersOfBothBranches() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

TEST(PlantedKernelMistake, DifferentBarriers) {
  EXPECT_THAT(ErrorOf(BarriersOfBothBranches, 1, 64, 0),
              HasSubstr("while others wait at __syncthreads"));
}

__global__ void ShuffleInABranch(float* out) {
  if (threadIdx.x < 16) out[0] = __shfl_xor_sync(kAll, 1.0F, 1);
}

TEST(PlantedKernelMistake, CollectiveThatSomeLanesMiss) {
  float out = 0;
  EXPECT_THAT(ErrorOf(ShuffleInABranch, 1, 32, 0, &out),
              HasSubstr("16 threads wait at __shfl_xor_sync"));
}

__global__ void ReadUnwritten(float* out) {
  TESSERA_SHARED(held, float[2]);
  const auto* const dynamic = reinterpret_cast<const float*>(DynamicShared());
  out[0] = held[1];
  out[1] = dynamic[3];
  held[1] = 3;  // gone when the next block starts
}

TEST(PlantedKernelMistake, UnwrittenSharedMemory) {
  CudaQueue queue;
  float out[2] = {};
  Launch(ReadUnwritten, 3, 1, 16, queue, &out[0]);
  EXPECT_TRUE(std::isnan(out[0]));
  EXPECT_TRUE(std::isnan(out[1]));
}

// The block that runs last leaves its number.
__global__ void Race(float* out) {
  out[0] = static_cast<float>(blockIdx.x);
}

TEST(PlantedKernelMistake, RaceBetweenBlocks) {
  EXPECT_FALSE(AlwaysGives({9}, Race, 10, 1));
}

__global__ void Nothing() {}

// Without running a block.
TEST(PlantedKernelMistake, ImpossibleLaunchThatIsOnlyChecked) {
  emulation::SetRunsBlocks(false);
  EXPECT_EQ(ErrorOf(ExitEarly, 1, 100, 0, 70), "");
  EXPECT_THAT(ErrorOf(Nothing, dim3(1, 1, 70000), 1, 0),
              HasSubstr("no device launches"));
  emulation::SetRunsBlocks(true);
}

TEST(PlantedKernelMistake, ImpossibleLaunch) {
  EXPECT_THAT(ErrorOf(Nothing, 1, 1025, 0), HasSubstr("no device launches"));
  EXPECT_THAT(ErrorOf(Nothing, dim3(1, 70000), 1, 0),
              HasSubstr("no device launches"));
  EXPECT_THAT(ErrorOf(Nothing, 1, 1, 300000),
              HasSubstr("300000 bytes of shared memory"));
}

#ifdef __SANITIZE_ADDRESS__
__global__ void ReadAt(float* out, const float* in, int at) {
  TESSERA_SHARED(held, float[4]);
  if (threadIdx.x < 4) held[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0) out[0] = in[at] + held[at];
}

TEST(PlantedKernelMistakeDeathTest, AccessOutOfBounds) {
  const std::vector<float> in(4, 1);
  const std::vector<float> more(5, 1);
  float out = 0;
  EXPECT_EQ(ErrorOf(ReadAt, 1, 32, 0, &out, in.data(), 3), "");
  EXPECT_DEATH(ErrorOf(ReadAt, 1, 32, 0, &out, in.data(), 4),
               "heap-buffer-overflow");
  EXPECT_DEATH(ErrorOf(ReadAt, 1, 32, 0, &out, more.data(), 4),
               "heap-buffer-overflow|out of bounds");
}
#endif

}  // namespace
}  // namespace tessera
