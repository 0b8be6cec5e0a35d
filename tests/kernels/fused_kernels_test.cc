// Fused kernels against the kernels they stand for, one after the other on the
// same device, which the other tests of this folder hold to the CPU's. Part of
// two binaries: tests/kernels/kernel_device.h.

#include "planner/lower/fused_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <ostream>
#include <string>

#include "planner/base/rng.h"
#include "tests/kernels/kernel_device.h"
#include "tests/kernels/random_tensors.h"
#include "tests/support/host_tensor.h"
#include "tests/support/kernel_cases.h"

namespace tessera {
namespace {

using Tensors = std::vector<HostTensor>;

struct FusedCase {
  std::string name;
  std::string kernel;  // the fused one
  std::string rule;
  Tensors operands;
  Tensors results;  // what they hold before
  bool accumulate = false;
};

void PrintTo(const FusedCase& c, std::ostream* out) {
  *out << c.name;
}

// Operands and results of a kernel that is the second one of a fused one.
struct Arity {
  size_t operands;
  size_t results;
};
Arity ArityOf(std::string_view kernel) {
  static const std::map<std::string_view, Arity> kArities = {
      {"gelu", {1, 1}},        {"gelu_dx", {2, 1}},   {"layer_norm", {3, 3}},
      {"rms_norm", {2, 2}},    {"sum", {2, 1}},       {"layer_norm_dw", {4, 2}},
      {"rms_norm_dw", {3, 1}}, {"linear_db", {1, 1}}, {"cast", {1, 1}},
      {"multiply", {2, 1}},    {"silu_dx", {2, 1}},
  };
  return kArities.at(kernel);
}

const FusedKernel* FindFused(std::string_view name) {
  for (const FusedKernel& fused : tessera::FusedKernels()) {
    if (fused.name == name) return &fused;
  }
  return nullptr;
}

class FusedKernelTest : public ::testing::TestWithParam<FusedCase> {
 protected:
  void SetUp() override {
    device_ = MakeKernelDevice();
    if (device_ == nullptr) GTEST_SKIP() << "no CUDA device";
  }

  void Run(std::string_view kernel, const Tensors& operands, Tensors& results,
           bool accumulate, bool in_place) {
    const FusedCase& c = GetParam();
    const IndexRule rule = IndexRule::Parse(c.rule).value();
    const std::vector<Attribute> attributes = {{"epsilon", 1e-5},
                                               {"lr", 1e-2},
                                               {"beta1", 0.9},
                                               {"beta2", 0.95},
                                               {"weight_decay", 0.125}};
    std::vector<LocalTensor> in;
    std::vector<LocalTensor> out;
    for (const HostTensor& tensor : operands) {
      in.push_back(tensor.Local());
    }
    for (HostTensor& tensor : results) out.push_back(tensor.Local());
    KernelCall call;
    call.rule = &rule;
    call.attributes = attributes;
    call.operands = in;
    call.results = out;
    call.accumulate = accumulate;
    const auto fused =
        std::ranges::find(CudaFusedKernels(), kernel, &Kernel::name);
    if (fused != CudaFusedKernels().end()) {
      RunOnDevice(*device_, *fused, call, in_place);
    } else {
      RunOnDevice(*device_, kernel, call, in_place);
    }
  }

  // By the kernels that `kernel` stands for, of which only those that make
  // gradients of weights add to their results.
  void RunByParts(std::string_view kernel, const Tensors& operands,
                  Tensors& results, bool accumulate, bool in_place) {
    const FusedKernel* const fused = FindFused(kernel);
    if (fused == nullptr) {
      const auto adds = FindCudaKernel(kernel).value()->accumulates;
      return Run(kernel, operands, results, accumulate && adds, in_place);
    }
    const Arity second = ArityOf(fused->second);
    const bool chain = fused->kind == FusedKernel::Kind::kChain;
    const bool siblings = fused->kind == FusedKernel::Kind::kSiblings;
    // The first one, perhaps with a result that is not kept.
    const size_t extra = siblings ? 0 : second.operands - 1;
    const Tensors first_operands(operands.begin(), operands.end() - extra);
    Tensors first_results(results.begin(), results.end() - second.results);
    Tensors second_results(results.end() - second.results, results.end());
    if (!fused->keeps_first) {
      first_results.insert(first_results.begin(),
                           HostTensor(results[0].shape(), results[0].dtype()));
    }
    RunByParts(fused->first, first_operands, first_results, accumulate,
               in_place);
    Tensors second_operands;
    if (!siblings) {
      second_operands.assign(operands.end() - extra, operands.end());
      const size_t place =
          fused->operand == FusedKernel::kAnyOperand ? 0 : fused->operand;
      second_operands.insert(
          second_operands.begin() + static_cast<int64_t>(place),
          chain ? first_results[0] : operands[0]);
    } else {  // all but the norm's scale
      second_operands = operands;
      second_operands.erase(second_operands.begin() + 2);
      second_operands.resize(second.operands);
    }
    RunByParts(fused->second, second_operands, second_results,
               accumulate && fused->accumulates, in_place);
    if (!fused->keeps_first) first_results.erase(first_results.begin());
    results = first_results;
    results.insert(results.end(), second_results.begin(), second_results.end());
  }

  std::unique_ptr<KernelDevice> device_;
};

TEST_P(FusedKernelTest, EqualTheirParts) {
  const FusedCase& c = GetParam();
  const bool in_place = c.kernel.ends_with("+cast");
  Tensors expected = c.results;
  RunByParts(c.kernel, c.operands, expected, c.accumulate, in_place);
  Tensors actual = c.results;
  Run(c.kernel, c.operands, actual, c.accumulate, in_place);
  Tensors again = c.results;
  device_->Reorder(2);
  Run(c.kernel, c.operands, again, c.accumulate, in_place);
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t k = 0; k < actual.size(); ++k) {
    // What lies between is rounded on some of the ways.
    EXPECT_LE(Difference({expected[k]}, {actual[k]}),
              3 * Rounding(c.operands[0].dtype()) + 2e-5)
        << "result " << k;
    EXPECT_TRUE(actual[k].SameBits(again[k])) << "result " << k;
  }
}

// ---- Cases ------------------------------------------------------------------

// Where the tensor cores' epilogues serve, and where they do not: odd widths,
// fp32, no bias.
void AddProducts(DType dtype, Rng& rng, std::vector<FusedCase>& cases) {
  constexpr int64_t kRows = 50, kIn = 72;
  for (const int64_t out : {64, 37}) {
    const Shape between = {2, kRows, out};
    const std::string suffix =
        std::string(NameOf(dtype)) + "_" + std::to_string(out);
    for (const bool bias : {true, false}) {
      FusedCase c;
      c.kernel = "linear+gelu";
      c.name = "linear_gelu_" + suffix + (bias ? "_bias" : "");
      c.rule = bias ? "bsi,oi+o->bso" : "bsi,oi->bso";
      c.operands = {Random({2, kRows, kIn}, dtype, rng),
                    Random({out, kIn}, dtype, rng)};
      if (bias) c.operands.push_back(Random({out}, dtype, rng));
      c.results.assign(2, HostTensor(between, dtype));
      cases.push_back(c);
    }
    FusedCase c;
    c.kernel = "linear_dx+gelu_dx";
    c.name = "linear_dx_gelu_dx_" + suffix;
    c.rule = "bso,oi->bsi";
    c.operands = {Random({2, kRows, kIn}, dtype, rng),
                  Random({kIn, out}, dtype, rng), Random(between, dtype, rng)};
    c.results = {HostTensor(between, dtype)};
    cases.push_back(c);
  }
}

void AddGates(DType dtype, Rng& rng, std::vector<FusedCase>& cases) {
  const auto matrix = [&] { return Random({3, 7, 53}, dtype, rng); };
  for (const std::string kernel :
       {"silu+multiply", "multiply+silu_dx", "multiply+silu_dx+multiply"}) {
    FusedCase c;
    c.kernel = kernel;
    c.rule = "bsf,bsf->bsf";
    c.name = kernel + "_" + std::string(NameOf(dtype));
    std::ranges::replace(c.name, '+', '_');
    const bool forward = kernel == "silu+multiply";
    const bool both = kernel.ends_with("multiply");
    const int operands = forward ? 2 : both ? 4 : 3;
    for (int i = 0; i < operands; ++i) c.operands.push_back(matrix());
    for (int i = 0; i < (both ? 2 : 1); ++i) c.results.push_back(matrix());
    cases.push_back(c);
    // Of unlike types.
    c.operands[1] = Random({3, 7, 53}, DType::kFloat32, rng);
    c.name += "_fp32";
    if (dtype != DType::kFloat32) cases.push_back(c);
  }
}

// Rows of one warp and of several, of which some threads have one vector or
// none; rows of which each thread keeps two vectors, rows that are no vectors,
// and rows too wide to be kept.
void AddNorms(DType dtype, Rng& rng, std::vector<FusedCase>& cases) {
  for (const std::string norm : {"layer_norm", "rms_norm"}) {
    const bool centred = norm == "layer_norm";
    for (const int64_t width : {48, 768, 1608, 37, 4096, 5000, 8320}) {
      const int64_t rows = width > 2000 ? 3 : 70;
      const Shape shape = {1, rows, width};
      const HostTensor x = Random(shape, dtype, rng);
      const HostTensor scale = Random({width}, dtype, rng);
      const auto matrix = [&] { return Random(shape, dtype, rng); };
      const auto vector = [&] { return Random({width}, DType::kFloat32, rng); };
      // Far from what they would be: they are only read.
      Tensors statistics;
      for (int i = 0; i < (centred ? 2 : 1); ++i) {
        statistics.push_back(Random({1, rows}, DType::kFloat32, rng));
      }
      const auto add = [&](const std::string& kernel, Tensors operands,
                           Tensors results, bool accumulate = false) {
        FusedCase c;
        c.kernel = kernel;
        c.rule = "bsi->bsi";
        c.name = kernel + "_" + std::string(NameOf(dtype)) + "_" +
                 std::to_string(width) + (accumulate ? "_adds" : "");
        std::ranges::replace(c.name, '+', '_');
        c.operands = std::move(operands);
        c.results = std::move(results);
        c.accumulate = accumulate;
        cases.push_back(std::move(c));
      };
      Tensors forward = {x, matrix(), scale};
      Tensors results = {matrix(), matrix()};
      if (centred) forward.push_back(Random({width}, dtype, rng));
      results.insert(results.end(), statistics.begin(), statistics.end());
      add("add+" + norm, forward, results);

      Tensors backward = {matrix(), x, scale};
      backward.insert(backward.end(), statistics.begin(), statistics.end());
      for (const bool adds : {false, true}) {
        std::string kernel = norm + "_dx";
        Tensors gradients = {matrix()};
        if (adds) {
          backward.push_back(matrix());
          kernel += "+sum";
          add(kernel, backward, gradients);
        }
        kernel += "+dw";
        gradients.push_back(vector());
        if (centred) gradients.push_back(vector());
        add(kernel, backward, gradients);
        add(kernel, backward, gradients, true);
        if (!centred) continue;
        gradients.push_back(vector());
        add(kernel + "+db", backward, gradients);
        add(kernel + "+db", backward, gradients, true);
        // A bias of five heads, each of which has the norm.
        gradients.back() = Random({5, width}, DType::kFloat32, rng);
        add(kernel + "+db", backward, gradients);
        cases.back().name += "_of_heads";
      }
    }
  }
}

void AddUpdates(DType dtype, Rng& rng, std::vector<FusedCase>& cases) {
  // A negative coefficient says that the step is skipped: a copy is made all
  // the same.
  for (const auto& [kernel, coefficient] :
       {std::pair<std::string, double>{"adamw", 0.5},
        {"adamw", -1},
        {"adam", 0.5}}) {
    const DType gradient = kernel == "adam" ? dtype : DType::kFloat32;
    FusedCase c;
    c.kernel = kernel + "+cast";
    c.rule = "i->i";
    c.name = kernel + "_cast_" + std::string(NameOf(gradient)) + "_" +
             std::string(NameOf(dtype)) + (coefficient < 0 ? "_skipped" : "");
    const Shape shape = {1003};
    c.operands = {Random(shape, gradient, rng),
                  HostTensor({}, DType::kFloat32, {coefficient})};
    c.results = {Random(shape, DType::kFloat32, rng),
                 Random(shape, DType::kFloat32, rng),
                 HostTensor(shape, DType::kFloat32), HostTensor(shape, dtype)};
    for (int64_t i = 0; i < 1003; ++i) c.results[2].Set(i, rng.Uniform01());
    cases.push_back(c);
  }
}

std::vector<FusedCase> Cases() {
  Rng rng(7);
  std::vector<FusedCase> cases;
  for (const DType dtype :
       {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    AddProducts(dtype, rng, cases);
    AddGates(dtype, rng, cases);
    AddNorms(dtype, rng, cases);
    AddUpdates(dtype, rng, cases);
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, FusedKernelTest, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.name; });

// CUDA has all of the table, and there is a case for each.
TEST(FusedKernelTable, HasACaseForEach) {
  const auto cases = Cases();
  EXPECT_EQ(CudaFusedKernels().size(), tessera::FusedKernels().size());
  for (const Kernel& kernel : CudaFusedKernels()) {
    EXPECT_TRUE(std::ranges::any_of(cases, [&](const FusedCase& c) {
      return c.kernel == kernel.name;
    })) << kernel.name;
    ASSERT_NE(FindFused(kernel.name), nullptr) << kernel.name;
    EXPECT_EQ(FindFused(kernel.name)->accumulates, kernel.accumulates)
        << kernel.name;
  }
}

}  // namespace
}  // namespace tessera
