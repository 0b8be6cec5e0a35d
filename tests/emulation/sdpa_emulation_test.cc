// Which calls of attention go to cuDNN, and in which form: a stand-in for it
// computes by the CPU's kernels.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "planner/base/rng.h"
#include "runtime/kernels/cuda/queue.h"
#include "runtime/kernels/cuda/sdpa.h"
#include "tests/support/host_tensor.h"

namespace tessera {
namespace {

const IndexRule& Rule(bool backward) {
  static const auto* const rules = new std::vector<IndexRule>{
      IndexRule::Parse("bsgrd,btgd,btge,bs,bt->bsgre,bsgr").value(),
      IndexRule::Parse(
          "bsgre,bsgrd,btgd,btge,bs,bt,bsgre,bsgr->bsgrd,btgd,btge")
          .value()};
  return (*rules)[backward];
}

HostTensor Counting(int64_t b, int64_t n) {
  HostTensor positions({b, n}, DType::kInt32);
  for (int64_t i = 0; i < b * n; ++i) {
    positions.Set(i, static_cast<double>(i % n));
  }
  return positions;
}

class HostSdpa : public CudaSdpa {
 public:
  int runs = 0;
  bool takes = true;

  bool Takes(const SdpaProblem&) override { return takes; }

  void Run(const SdpaProblem& p, const SdpaData& data, CudaQueue&) override {
    ++runs;
    const int64_t b = p.samples, s = p.length, g = p.groups;
    const int64_t r = p.heads / g;
    const auto tensor = [](const void* values, DType dtype, Shape shape) {
      LocalTensor local;
      local.data = const_cast<void*>(values);
      local.dtype = dtype;
      local.shape = std::move(shape);
      return local;
    };
    const HostTensor positions = Counting(b, s);
    const LocalTensor q = tensor(data.q, p.dtype, {b, s, g, r, p.d});
    const LocalTensor k = tensor(data.k, p.dtype, {b, s, g, p.d});
    const LocalTensor v = tensor(data.v, p.dtype, {b, s, g, p.e});
    const LocalTensor o = tensor(data.o, p.dtype, {b, s, g, r, p.e});
    // (b, s, heads) from and to (b, heads, s).
    HostTensor lse({b, s, g, r}, DType::kFloat32);
    const auto theirs = [&](int64_t i) -> float& {
      const int64_t head = i % p.heads;
      const int64_t row = i / p.heads % s;
      return data.lse[(i / p.heads / s * p.heads + head) * s + row];
    };
    KernelCall call;
    const std::vector<Attribute> attributes = {{"scale", p.scale},
                                               {"window", 0}};
    call.rule = &Rule(p.backward);
    call.attributes = attributes;
    if (p.backward) {
      for (int64_t i = 0; i < lse.elements(); ++i) lse.Set(i, theirs(i));
      const std::vector<LocalTensor> operands = {
          tensor(data.d_o, p.dtype, o.shape),
          q,
          k,
          v,
          positions.Local(),
          positions.Local(),
          o,
          lse.Local()};
      const std::vector<LocalTensor> results = {
          tensor(data.dq, p.dtype, q.shape), tensor(data.dk, p.dtype, k.shape),
          tensor(data.dv, p.dtype, v.shape)};
      call.operands = operands;
      call.results = results;
      FindCpuKernel("attention_dqkv").value()->run(call);
      return;
    }
    const std::vector<LocalTensor> operands = {q, k, v, positions.Local(),
                                               positions.Local()};
    const std::vector<LocalTensor> results = {o, lse.Local()};
    call.operands = operands;
    call.results = results;
    FindCpuKernel("attention").value()->run(call);
    for (int64_t i = 0; i < lse.elements(); ++i) {
      theirs(i) = static_cast<float>(lse.At(i));
    }
  }
};

// A call of attention and one of its gradients, by the CUDA kernels.
class SdpaEmulationTest : public ::testing::Test {
 protected:
  static constexpr int64_t kB = 2, kS = 9, kG = 2, kR = 3, kD = 8;

  SdpaEmulationTest() {
    queue_.workspace = workspace_.data();
    queue_.workspace_bytes = static_cast<int64_t>(workspace_.size());
    queue_.multiprocessors = 2;
    queue_.sdpa = &sdpa_;
  }

  static HostTensor Random(Shape shape, DType dtype) {
    Rng rng(5);
    HostTensor tensor(std::move(shape), dtype);
    for (int64_t i = 0; i < tensor.elements(); ++i) {
      tensor.Set(i, 2 * rng.Uniform01() - 1);
    }
    return tensor;
  }

  // The results of both, one after the other.
  std::vector<HostTensor> Run(CudaQueue* queue) {
    const HostTensor q = Random({kB, kS, kG, kR, kD}, dtype_);
    const HostTensor k = Random({kB, kS, kG, kD}, dtype_);
    const HostTensor v = Random({kB, kS, kG, kD}, dtype_);
    const HostTensor positions = Counting(kB, kS);
    HostTensor o(q.shape(), result_);
    HostTensor lse({kB, kS, kG, kR}, DType::kFloat32);
    std::vector<HostTensor> gradients = {HostTensor(q.shape(), result_),
                                         HostTensor(k.shape(), result_),
                                         HostTensor(v.shape(), result_)};
    const std::vector<Attribute> attributes = {{"scale", 0.7},
                                               {"window", window_}};
    const auto run = [&](const char* name, std::vector<LocalTensor> operands,
                         std::vector<LocalTensor> results) {
      KernelCall call;
      call.rule = &Rule(operands.size() > 5);
      call.attributes = attributes;
      // Queries that stand elsewhere.
      operands[operands.size() > 5 ? 1 : 0].offset[1] = first_query_;
      call.operands = operands;
      call.results = results;
      call.accumulate = accumulate_;
      call.places_are_positions = places_are_positions_;
      call.queue = queue;
      const auto kernel =
          queue == nullptr ? FindCpuKernel(name) : FindCudaKernel(name);
      kernel.value()->run(call);
    };
    run("attention",
        {q.Local(), k.Local(), v.Local(), positions.Local(), positions.Local()},
        {o.Local(), lse.Local()});
    const HostTensor stored = o.As(dtype_);
    run("attention_dqkv",
        {q.Local(), q.Local(), k.Local(), v.Local(), positions.Local(),
         positions.Local(), stored.Local(), lse.Local()},
        {gradients[0].Local(), gradients[1].Local(), gradients[2].Local()});
    gradients.push_back(o);
    gradients.push_back(lse);
    return gradients;
  }

  // Runs both and compares with the CPU's kernels; of the two calls, so many
  // went to cuDNN.
  void Expect(int runs) {
    const std::vector<HostTensor> actual = Run(&queue_);
    EXPECT_EQ(queue_.error, "");
    EXPECT_EQ(sdpa_.runs, runs);
    const std::vector<HostTensor> expected = Run(nullptr);
    for (size_t k = 0; k < actual.size(); ++k) {
      for (int64_t i = 0; i < actual[k].elements(); ++i) {
        ASSERT_NEAR(actual[k].At(i), expected[k].At(i), 0.04)
            << "result " << k << " element " << i;
      }
    }
  }

  std::vector<std::byte> workspace_ = std::vector<std::byte>(1 << 16);
  HostSdpa sdpa_;
  CudaQueue queue_;
  DType dtype_ = DType::kBFloat16;
  DType result_ = DType::kBFloat16;
  double window_ = 0;
  int64_t first_query_ = 0;
  bool accumulate_ = false;
  bool places_are_positions_ = true;
};

TEST_F(SdpaEmulationTest, WholeOrderedRowsGoToCudnn) {
  Expect(2);
}

// 4 bytes for each of a sample's 9 x 6 log-sum-exps.
TEST_F(SdpaEmulationTest, SamplesGoInPiecesOfTheWorkspace) {
  queue_.workspace_bytes = 4 * kS * kG * kR;
  Expect(2 * kB);
}

TEST_F(SdpaEmulationTest, WhatItDoesNotTakeDoesNot) {
  sdpa_.takes = false;
  Expect(0);
}

TEST_F(SdpaEmulationTest, PositionsOfTheDataDoNot) {
  places_are_positions_ = false;
  Expect(0);
}

TEST_F(SdpaEmulationTest, WindowsDoNot) {
  window_ = 4;
  Expect(0);
}

TEST_F(SdpaEmulationTest, BlocksOfARingDoNot) {
  first_query_ = 3;
  Expect(0);
}

TEST_F(SdpaEmulationTest, SumsDoNot) {
  accumulate_ = true;
  Expect(0);
}

TEST_F(SdpaEmulationTest, Fp32DoesNot) {
  dtype_ = result_ = DType::kFloat32;
  Expect(0);
}

TEST_F(SdpaEmulationTest, WideResultsDoNot) {
  result_ = DType::kFloat32;
  Expect(0);
}

}  // namespace
}  // namespace tessera
