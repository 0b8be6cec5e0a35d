// What is not a number stays visible, on the CPU and on CUDA, where PyTorch
// keeps it: by ReLU, bounds and the largest of several; and so do gradients.
// Part of two binaries: tests/kernels/kernel_device.h.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "tests/kernels/kernel_device.h"
#include "tests/support/host_tensor.h"

namespace tessera {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

struct NanCase {
  std::string kernel;
  std::string rule;
  std::vector<Attribute> attributes;
  std::vector<HostTensor> operands;
  Shape shape;  // of the result
  std::vector<double> expected;
};

HostTensor F32(Shape shape, const std::vector<double>& values) {
  return HostTensor(std::move(shape), DType::kFloat32, values);
}

// What PyTorch gives for relu, clamp, max_pool2d, amax, maximum and minimum.
std::vector<NanCase> Cases() {
  const std::vector<Attribute> bounds = {{"least", -1}, {"most", 1}};
  const std::vector<Attribute> pool = {
      {"ceil", 0},         {"pad_bottom", 0},    {"pad_left", 0},
      {"pad_right", 0},    {"pad_top", 0},       {"stride_height", 1},
      {"stride_width", 4}, {"window_height", 1}, {"window_width", 4}};
  const std::string pooled = "bch!w!->bcyx";
  const std::string pooled_dx = "bcyx,bch!w!->bch!w!";
  const HostTensor x = F32({4}, {kNan, -2, 0, 3});
  const HostTensor dy = F32({4}, {5, 6, 7, 8});
  const HostTensor a = F32({5}, {kNan, 1, 2, kNan, 3});
  const HostTensor b = F32({5}, {1, kNan, 2, kNan, 4});
  const HostTensor dab = F32({5}, {5, 6, 7, 8, 9});
  const HostTensor image =
      F32({1, 1, 1, 12}, {1, kNan, 3, 2, kNan, 1, kNan, 2, 5, 5, 1, 2});
  const HostTensor dimage = F32({1, 1, 1, 3}, {5, 6, 7});
  const HostTensor rows = F32({2, 3}, {1, kNan, 3, 4, 2, 4});
  return {
      {"relu", "n->n", {}, {x}, {4}, {kNan, 0, 0, 3}},
      {"relu_dx", "n,n->n", {}, {dy, x}, {4}, {5, 0, 0, 8}},
      {"clip", "n->n", bounds, {x}, {4}, {kNan, -1, 0, 1}},
      {"clip_dx", "n,n->n", bounds, {dy, x}, {4}, {0, 0, 7, 0}},
      {"maximum", "n,n->n", {}, {a, b}, {5}, {kNan, kNan, 2, kNan, 4}},
      {"minimum", "n,n->n", {}, {a, b}, {5}, {kNan, kNan, 2, kNan, 3}},
      {"maximum_dx", "n,n,n->n", {}, {dab, a, b}, {5}, {5, 6, 3.5, 8, 0}},
      {"minimum_dx", "n,n,n->n", {}, {dab, a, b}, {5}, {5, 6, 3.5, 8, 9}},
      {"max_pool", pooled, pool, {image}, {1, 1, 1, 3}, {kNan, kNan, 5}},
      {"max_pool_dx",
       pooled_dx,
       pool,
       {dimage, image},
       {1, 1, 1, 12},
       {0, 5, 0, 0, 0, 0, 6, 0, 7, 0, 0, 0}},
      {"reduce_max", "rc->r", {}, {rows}, {2}, {kNan, 4}},
      {"reduce_max_dx",
       "r,rc,r->rc",
       {},
       {F32({2}, {6, 8}), rows, F32({2}, {kNan, 4})},
       {2, 3},
       {kNan, kNan, kNan, 4, 0, 4}},
  };
}

void PrintTo(const NanCase& c, std::ostream* out) {
  *out << c.kernel;
}

class NotANumber : public ::testing::TestWithParam<NanCase> {
 protected:
  template <typename Run>
  void ExpectExpected(Run run) {
    const NanCase& c = GetParam();
    const IndexRule rule = IndexRule::Parse(c.rule).value();
    std::vector<LocalTensor> operands;
    for (const HostTensor& operand : c.operands) {
      operands.push_back(operand.Local());
    }
    const HostTensor result(c.shape, DType::kFloat32);
    const std::vector<LocalTensor> results = {result.Local()};
    KernelCall call;
    call.rule = &rule;
    call.attributes = c.attributes;
    call.operands = operands;
    call.results = results;
    run(call);
    for (size_t i = 0; i < c.expected.size(); ++i) {
      const double value = result.At(static_cast<int64_t>(i));
      EXPECT_TRUE(value == c.expected[i] ||
                  (std::isnan(value) && std::isnan(c.expected[i])))
          << i << ": " << value << ", not " << c.expected[i];
    }
  }
};

INSTANTIATE_TEST_SUITE_P(, NotANumber, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.kernel; });

TEST_P(NotANumber, StaysOnTheCpu) {
  ExpectExpected([](const KernelCall& call) {
    FindCpuKernel(GetParam().kernel).value()->run(call);
  });
}

TEST_P(NotANumber, StaysOnCuda) {
  const auto device = MakeKernelDevice();
  if (device == nullptr) GTEST_SKIP() << "no CUDA device";
  ExpectExpected([&](const KernelCall& call) {
    RunOnDevice(*device, GetParam().kernel, call, /*in_place=*/false);
  });
}

}  // namespace
}  // namespace tessera
