// cuBLASLt's products against plain loops: every dtype, direction and epilogue,
// whole and ragged, aligned and not.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "planner/base/rng.h"
#include "runtime/device/cuda_device.h"
#include "runtime/kernels/cuda/cublaslt_matmul.h"
#include "runtime/kernels/cuda/queue.h"
#include "tests/support/host_matmul.h"
#include "tests/support/host_tensor.h"

namespace tessera {
namespace {

std::vector<MatMulProblem> Problems() {
  constexpr DType kBf16 = DType::kBFloat16;
  constexpr DType kFp16 = DType::kFloat16;
  constexpr DType kFp32 = DType::kFloat32;
  std::vector<MatMulProblem> problems;
  MatMulProblem p;
  for (const auto& [in, out] : {std::pair{kBf16, kBf16},
                                {kBf16, kFp32},
                                {kFp16, kFp16},
                                {kFp16, kFp32},
                                {kFp32, kFp32}}) {
    p.a = p.b = in;
    p.d = out;
    for (const int64_t size : {int64_t{64}, int64_t{37}}) {
      p.m = size + 8;
      p.n = size;
      p.k = 2 * size + 16;
      for (const bool transpose_a : {false, true}) {
        for (const bool transpose_b : {false, true}) {
          p.transpose_a = transpose_a;
          p.transpose_b = transpose_b;
          for (const bool accumulate : {false, true}) {
            p.accumulate = accumulate;
            for (const int64_t batch : {1, 3}) {
              p.batch = batch;
              for (const MatMulEpilogue epilogue :
                   {MatMulEpilogue::kNone, MatMulEpilogue::kBias,
                    MatMulEpilogue::kGelu, MatMulEpilogue::kBiasGelu,
                    MatMulEpilogue::kGeluGradient}) {
                p.epilogue = epilogue;
                // Sums that are then transformed are of no use to a layer.
                const bool gelu = epilogue > MatMulEpilogue::kBias;
                if (gelu && accumulate) continue;
                if (HostMatMul().Takes(p)) problems.push_back(p);
              }
            }
          }
        }
      }
    }
  }
  return problems;
}

class CublasLtMatMulGpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (CudaDeviceCount() == 0) GTEST_SKIP() << "no CUDA device";
    device_ = MakeCudaDevice(0).value();
    matmul_ = CublasLtMatMul::Make().value();
  }

  static HostTensor Random(int64_t n, DType dtype, Rng& rng) {
    HostTensor tensor({n}, dtype);
    for (int64_t i = 0; i < n; ++i) tensor.Set(i, 2 * rng.Uniform01() - 1);
    return tensor;
  }

  // D and aux by the GPU, of memory that is `skew` elements off its alignment.
  std::vector<HostTensor> OnGpu(const MatMulProblem& p,
                                std::vector<HostTensor> tensors, int64_t skew) {
    std::vector<void*> memory;
    const auto bytes = [](const HostTensor& tensor) {
      return Bytes{tensor.elements() * SizeOf(tensor.dtype())};
    };
    std::vector<std::byte*> at;
    for (const HostTensor& tensor : tensors) {
      memory.push_back(device_
                           ->Allocate({bytes(tensor).value + 256},
                                      MemoryCategory::kActivation)
                           .value());
      at.push_back(static_cast<std::byte*>(memory.back()) +
                   skew * SizeOf(tensor.dtype()));
      device_->Write(at.back(), tensor.Local().data, bytes(tensor));
    }
    matmul_->Run(
        p, {.a = at[0], .b = at[1], .d = at[2], .bias = at[3], .aux = at[4]},
        *device_->kernel_queue());
    for (size_t i = 0; i < tensors.size(); ++i) {
      device_->Read(tensors[i].Local().data, at[i], bytes(tensors[i]));
    }
    const auto done = device_->Synchronize();
    EXPECT_TRUE(done) << Describe(p) << ": " << done.error().ToString();
    for (void* data : memory) device_->Free(data);
    return tensors;
  }

  void ExpectEqualsPlainLoops(const MatMulProblem& p, int64_t skew) {
    Rng rng(9);
    std::vector<HostTensor> tensors = {Random(p.batch * p.m * p.k, p.a, rng),
                                       Random(p.batch * p.k * p.n, p.b, rng),
                                       Random(p.batch * p.m * p.n, p.d, rng),
                                       Random(p.n, p.d, rng),
                                       Random(p.m * p.n, p.d, rng)};
    const std::vector<HostTensor> actual = OnGpu(p, tensors, skew);
    CudaQueue unused;
    HostMatMul().Run(p,
                     {.a = tensors[0].Local().data,
                      .b = tensors[1].Local().data,
                      .d = tensors[2].Local().data,
                      .bias = tensors[3].Local().data,
                      .aux = tensors[4].Local().data},
                     unused);
    const double unit = p.d == DType::kBFloat16  ? 0x1p-7
                        : p.d == DType::kFloat16 ? 0x1p-10
                                                 : 1e-5;
    for (const size_t result : {2, 4}) {
      double largest = 1;
      for (const double x : tensors[result].Values()) {
        largest = std::max(largest, std::abs(x));
      }
      for (int64_t i = 0; i < tensors[result].elements(); ++i) {
        ASSERT_NEAR(actual[result].At(i), tensors[result].At(i), unit * largest)
            << Describe(p) << " tensor " << result << " element " << i
            << " skew " << skew;
      }
    }
  }

  std::unique_ptr<CudaDevice> device_;
  std::unique_ptr<CublasLtMatMul> matmul_;
};

TEST_F(CublasLtMatMulGpuTest, EqualsPlainLoops) {
  for (const MatMulProblem& problem : Problems()) {
    EXPECT_TRUE(matmul_->Takes(problem)) << Describe(problem);
    ExpectEqualsPlainLoops(problem, 0);
    // Auxiliary matrices are never of odd addresses.
    if (problem.epilogue == MatMulEpilogue::kNone) {
      ExpectEqualsPlainLoops(problem, 1);
    }
    if (HasFatalFailure()) return;
  }
}

TEST_F(CublasLtMatMulGpuTest, TunedChoicesAreAdoptedByAnother) {
  MatMulKey key;
  key.problem = {.m = 256, .n = 512, .k = 128};
  key.problem.a = key.problem.b = key.problem.d = DType::kBFloat16;
  key.problem.transpose_b = true;
  ExpectEqualsPlainLoops(key.problem, 0);
  EXPECT_THAT(matmul_->TakeUntuned(), ::testing::ElementsAre(key));
  EXPECT_THAT(matmul_->TakeUntuned(), ::testing::IsEmpty());
  const auto times = matmul_->Tune(key, 8, *device_->kernel_queue());
  ASSERT_TRUE(times) << times.error().ToString();
  EXPECT_GE(times->size(), 1u);
  const auto read =
      ParseMatMulChoices(FormatMatMulChoices(matmul_->choices()), "choices");
  ASSERT_TRUE(read) << read.error().ToString();
  matmul_ = CublasLtMatMul::Make().value();
  ASSERT_TRUE(matmul_->Adopt(*read));
  ExpectEqualsPlainLoops(key.problem, 0);
  EXPECT_THAT(matmul_->TakeUntuned(), ::testing::IsEmpty());

  MatMulChoices others = *read;
  others.version += 1;
  EXPECT_FALSE(matmul_->Adopt(others));
  others = *read;
  others.device += " II";
  EXPECT_FALSE(matmul_->Adopt(others));
}

}  // namespace
}  // namespace tessera
