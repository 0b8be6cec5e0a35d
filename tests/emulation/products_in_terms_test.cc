// Which products of fp32 by bf16 the matmul is given, and in how many pieces.
// That results are right tests/kernels shows too, with and without a matmul.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "planner/base/rng.h"
#include "runtime/kernels/kernel.h"
#include "tests/kernels/kernel_device.h"
#include "tests/kernels/random_tensors.h"
#include "tests/support/host_matmul.h"
#include "tests/support/host_tensor.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class RecordingMatMul : public HostMatMul {
 public:
  void Run(const MatMulProblem& p, const MatMulData& data,
           CudaQueue& queue) override {
    ran.push_back(Describe(p));
    HostMatMul::Run(p, data, queue);
  }
  std::vector<std::string> ran;
};

// The gradients of a router's logits: of 200 tokens of width 40, with 3
// experts.
class ProductsInTerms : public ::testing::Test {
 protected:
  static constexpr int64_t kTokens = 200;
  static constexpr int64_t kWidth = 40;
  static constexpr int64_t kExperts = 3;

  ProductsInTerms() { device_->queue().matmul = &matmul_; }

  // Runs the kernel, with so much of the workspace behind the matmul's, and
  // compares it with the CPU's in fp64.
  void ExpectRight(const char* kernel, const char* rule,
                   const std::vector<HostTensor>& operands,
                   const HostTensor& start, bool accumulate,
                   int64_t workspace_bytes = 1 << 19) {
    matmul_.ran.clear();
    device_->queue().matmul_bytes = 1000;
    device_->queue().workspace_bytes = 1024 + workspace_bytes;
    const IndexRule parsed = IndexRule::Parse(rule).value();
    const auto run = [&](DType dtype, bool on_cpu) {
      const bool wide = dtype == DType::kFloat64;
      std::vector<HostTensor> values;
      std::vector<LocalTensor> in;
      for (const HostTensor& tensor : operands) {
        values.push_back(wide ? tensor.As(dtype) : tensor);
      }
      for (const HostTensor& tensor : values) in.push_back(tensor.Local());
      HostTensor result = wide ? start.As(dtype) : start;
      const std::vector<LocalTensor> out = {result.Local()};
      const KernelCall call = {.rule = &parsed,
                               .attributes = {},
                               .operands = in,
                               .results = out,
                               .accumulate = accumulate};
      if (on_cpu) {
        FindCpuKernel(kernel).value()->run(call);
      } else {
        RunOnDevice(*device_, kernel, call, /*in_place=*/false);
      }
      return result;
    };
    const HostTensor actual = run(start.dtype(), /*on_cpu=*/false);
    const HostTensor expected = run(DType::kFloat64, /*on_cpu=*/true);
    // As of fp32 operands: those of bf16 would be 2^-9 off.
    const double rounding = start.dtype() == DType::kFloat32 ? 1e-6 : 0x1p-8;
    for (int64_t i = 0; i < actual.elements(); ++i) {
      const double x = expected.At(i);
      ASSERT_NEAR(actual.At(i), x, 2 * rounding * std::max(1.0, std::abs(x)))
          << i;
    }
  }

  Rng rng_{5};
  const HostTensor dy_ = Random({1, kTokens, kExperts}, DType::kFloat32, rng_);
  const HostTensor w_ = Random({kExperts, kWidth}, DType::kBFloat16, rng_);
  const HostTensor x_ = Random({1, kTokens, kWidth}, DType::kBFloat16, rng_);
  RecordingMatMul matmul_;
  const std::unique_ptr<KernelDevice> device_ = MakeKernelDevice();
};

TEST_F(ProductsInTerms, InputsGradientsAreOneProductWithAllTerms) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const bool accumulate : {false, true}) {
      const HostTensor dx = Random(x_.shape(), dtype, rng_);
      ExpectRight("linear_dx", "bso,oi->bsi", {dy_, w_}, dx, accumulate);
      EXPECT_THAT(matmul_.ran, ElementsAre("200x40x9 A B bf16,bf16->" +
                                           std::string(NameOf(dtype)) +
                                           (accumulate ? " +=" : "")));
    }
  }
}

TEST_F(ProductsInTerms, WeightsGradientsAddTheTermsUp) {
  const HostTensor dw = Random(w_.shape(), DType::kFloat32, rng_);
  const std::string one = "3x40x200 A^T B bf16,bf16->fp32 lda 9";
  for (const bool accumulate : {false, true}) {
    ExpectRight("linear_dw", "bso,bsi->oi", {dy_, x_}, dw, accumulate);
    EXPECT_THAT(matmul_.ran, ElementsAre(accumulate ? one + " +=" : one,
                                         one + " +=", one + " +="));
  }
}

// Behind the copies of the weight, 720 bytes that end at 768, or none, there is
// room for the terms of 70 tokens, of 18 bytes each: three pieces of 67, the
// last one of 66.
TEST_F(ProductsInTerms, PiecesFitTheWorkspace) {
  const HostTensor dx = Random(x_.shape(), DType::kBFloat16, rng_);
  ExpectRight("linear_dx", "bso,oi->bsi", {dy_, w_}, dx, true, 768 + 70 * 18);
  EXPECT_THAT(matmul_.ran, ElementsAre("67x40x9 A B bf16,bf16->bf16 +=",
                                       "67x40x9 A B bf16,bf16->bf16 +=",
                                       "66x40x9 A B bf16,bf16->bf16 +="));
  const HostTensor dw = Random(w_.shape(), DType::kFloat32, rng_);
  ExpectRight("linear_dw", "bso,bsi->oi", {dy_, x_}, dw, false, 70 * 18);
  ASSERT_EQ(matmul_.ran.size(), 9u);
  EXPECT_EQ(matmul_.ran[0], "3x40x67 A^T B bf16,bf16->fp32 lda 9");
  EXPECT_EQ(matmul_.ran[8], "3x40x66 A^T B bf16,bf16->fp32 lda 9 +=");
}

TEST_F(ProductsInTerms, WithoutRoomTheKernelMultipliesItself) {
  const HostTensor dx = Random(x_.shape(), DType::kBFloat16, rng_);
  ExpectRight("linear_dx", "bso,oi->bsi", {dy_, w_}, dx, false, 768 + 63 * 18);
  EXPECT_THAT(matmul_.ran, IsEmpty());
  // Sums in bf16 would be rounded between the terms.
  const HostTensor dw = Random(w_.shape(), DType::kBFloat16, rng_);
  ExpectRight("linear_dw", "bso,bsi->oi", {dy_, x_}, dw, false);
  EXPECT_THAT(matmul_.ran, IsEmpty());
}

// Infinite gradients stay so: the step is then skipped.
TEST_F(ProductsInTerms, InfinityIsOneTerm) {
  HostTensor dy = dy_;
  dy.Set(4, INFINITY);  // of token 1, expert 1
  HostTensor dx(x_.shape(), DType::kBFloat16);
  const IndexRule rule = IndexRule::Parse("bso,oi->bsi").value();
  const std::vector<LocalTensor> in = {dy.Local(), w_.Local()};
  const std::vector<LocalTensor> out = {dx.Local()};
  RunOnDevice(*device_, "linear_dx",
              {.rule = &rule, .attributes = {}, .operands = in, .results = out},
              /*in_place=*/false);
  for (int64_t i = 0; i < kWidth; ++i) {
    EXPECT_TRUE(std::isfinite(dx.At(i)));
    EXPECT_EQ(dx.At(kWidth + i), w_.At(kWidth + i) > 0 ? INFINITY : -INFINITY)
        << i;
  }
}

}  // namespace
}  // namespace tessera
