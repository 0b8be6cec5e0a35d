// CUDA kernels at their limits: little workspace, more blocks than a grid has
// in one direction, the largest and the next larger sizes that they have room
// for. Part of two binaries: tests/kernels/kernel_device.h.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>

#include "runtime/kernels/cuda/pieces.h"
#include "tests/kernels/kernel_device.h"
#include "tests/support/kernel_cases.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

// Of fp32 sums of few terms, relative to the largest value.
constexpr double kFp32Error = 5e-6;

class KernelLimits : public ::testing::Test {
 protected:
  void SetUp() override {
    device_ = MakeKernelDevice();
    if (device_ == nullptr) GTEST_SKIP() << "no CUDA device";
    whole_ = device_->queue().workspace_bytes;
  }
  void TearDown() override {
    if (larger_ != nullptr) device_->Free(larger_);
  }

  void SetWorkspace(int64_t bytes) {
    device_->queue().workspace_bytes = std::min(bytes, whole_);
  }
  void MakeWorkspace(int64_t bytes) {
    larger_ = device_->Allocate(static_cast<size_t>(bytes));
    device_->queue().workspace = larger_;
    whole_ = device_->queue().workspace_bytes = bytes;
  }

  // On the device; the first error goes to `error_`.
  CallOptions OnDevice(bool in_place = false, bool accumulate = false) {
    error_ = "";
    return {
        .run =
            [this, in_place](std::string_view kernel, const KernelCall& call) {
              const std::string error =
                  ErrorOnDevice(*device_, kernel, call, in_place);
              if (error_.empty()) error_ = error;
            },
        .accumulate = accumulate};
  }
  // Without an error the results are the CPU's.
  void ExpectTheCpus(const Problem& problem, double error = kFp32Error) {
    const Tensors actual = Compute(problem, OnDevice());
    EXPECT_EQ(error_, "") << problem.op->name;
    const Tensors expected = Compute(Converted(problem, DType::kFloat64, 0));
    EXPECT_LE(Difference(expected, actual), error) << problem.op->name;
  }
  // Of the case's operator and its adjoints.
  void ExpectErrors(const KernelCase& c, const std::string& error) {
    for (const Problem& problem : AllProblems(c)) {
      (void)Compute(Converted(problem, DType::kFloat32, 0), OnDevice());
      EXPECT_EQ(error_, error) << problem.op->name;
    }
  }
  void ExpectWorks(const KernelCase& c) {
    for (const Problem& problem : AllProblems(c)) {
      ExpectTheCpus(Converted(problem, DType::kFloat32, 0));
    }
  }

  std::unique_ptr<KernelDevice> device_;
  std::string error_;
  int64_t whole_ = 0;
  std::byte* larger_ = nullptr;
};

// ---- Workspace --------------------------------------------------------------

class LittleWorkspace : public KernelLimits,
                        public ::testing::WithParamInterface<KernelCase> {};

INSTANTIATE_TEST_SUITE_P(, LittleWorkspace, ::testing::ValuesIn(KernelCases()),
                         [](const auto& info) { return info.param.name; });

// Kernels work within the workspace that there is, or say how much they need,
// which then is enough.
TEST_P(LittleWorkspace, IsEnoughOrTheErrorSaysHowMuchIs) {
  for (const Problem& problem : AllProblems(GetParam())) {
    const Problem stored = Converted(problem, DType::kFloat32, 0);
    const Tensors exact = Compute(Converted(problem, DType::kFloat64, 0));
    int64_t bytes = 64;
    Tensors actual;
    for (int tries = 0; tries < 3; ++tries) {
      SetWorkspace(bytes);
      actual = Compute(stored, OnDevice(GetParam().in_place));
      std::smatch needs;
      if (!std::regex_search(error_, needs,
                             std::regex("needs ([0-9]+) bytes of workspace"))) {
        break;
      }
      bytes = std::stoll(needs[1]);
    }
    EXPECT_EQ(error_, "") << problem.op->name;
    EXPECT_LE(Difference(exact, actual), kFp32Error)
        << problem.op->name << " with " << bytes << " bytes";
  }
}

KernelCase AttentionCase(const std::string& op) {
  KernelCase c = KernelCaseNamed("attention_window");
  c.op = op;
  c.extents = {{'b', 5}, {'s', 9},  {'g', 4}, {'r', 2},
               {'d', 8}, {'t', 11}, {'e', 8}};
  c.attributes = {{"scale", 0.6}};
  if (op != "attention_relative") c.attributes.push_back({"window", 0});
  if (op == "attention_alibi") {
    c.attributes.insert(c.attributes.begin(), {"alibi_heads", 8});
  }
  if (op == "attention_bidirectional") {
    c.attributes.insert(c.attributes.begin(), {"causal", 0});
  }
  if (op == "attention_relative") {
    c.extents['n'] = 8;
    c.attributes = {{"causal", 0}, {"max_distance", 6}, {"scale", 0.6}};
  }
  return c;
}

// Samples and heads do not meet: the same bits in pieces of samples, and
// backward of groups of one sample.
TEST_F(KernelLimits, AttentionInPiecesOfTheWorkspace) {
  // Backward, of each sample: ranges of queries and keys, 256 bytes each and
  // for all; statistics of 64 queries, 1024 bytes for each of four groups; T5's
  // bias gradient 256 bytes.
  constexpr int64_t kRanges = 512;
  constexpr int64_t kOfGroup = 1024;
  for (const std::string op :
       {"attention", "attention_alibi", "attention_bidirectional",
        "attention_relative"}) {
    for (const Problem& problem : AllProblems(AttentionCase(op))) {
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        // Sums of samples that are stored in fp32 are not rounded between
        // pieces.
        Problem stored = Converted(problem, dtype, 0);
        for (HostTensor& result : stored.initial) {
          result = result.As(DType::kFloat32);
          for (int64_t i = 0; i < result.elements(); ++i) result.Set(i, 0.5);
        }
        for (const bool accumulate : {false, true}) {
          SetWorkspace(whole_);
          const Tensors at_once = Compute(stored, OnDevice(false, accumulate));
          ASSERT_EQ(error_, "");
          for (const int64_t bytes :
               {kRanges + 3 * 4 * kOfGroup + 1024, kRanges + 4 * kOfGroup + 256,
                kRanges + 2 * kOfGroup + 256, kRanges + kOfGroup + 256}) {
            SetWorkspace(bytes);
            const Tensors pieces = Compute(stored, OnDevice(false, accumulate));
            EXPECT_EQ(error_, "") << bytes;
            for (size_t k = 0; k < at_once.size(); ++k) {
              EXPECT_TRUE(pieces[k].SameBits(at_once[k]))
                  << problem.op->name << " " << NameOf(dtype) << " result " << k
                  << " with " << bytes << " bytes";
            }
          }
        }
      }
      SetWorkspace(256);
      (void)Compute(Converted(problem, DType::kFloat32, 0), OnDevice());
      EXPECT_THAT(error_, HasSubstr("bytes of workspace: there are 256"));
    }
  }
}

TEST_F(KernelLimits, RoutingInPiecesOfTheWorkspace) {
  // Of a sample 7 x 3 choices, or 2 x 5 loads, of 4 bytes each.
  for (const KernelCase& c : KernelCases()) {
    if (c.op != "moe_gate" && c.op != "moe_balance") continue;
    for (const Problem& problem : AllProblems(c)) {
      const Problem stored = Converted(problem, DType::kFloat32, 0);
      SetWorkspace(whole_);
      const Tensors at_once = Compute(stored, OnDevice());
      ASSERT_EQ(error_, "");
      for (const int64_t bytes : {200, 100}) {
        SetWorkspace(bytes);
        const Tensors pieces = Compute(stored, OnDevice());
        EXPECT_EQ(error_, "") << c.name;
        EXPECT_LE(Difference(at_once, pieces), kFp32Error)
            << problem.op->name << " with " << bytes << " bytes";
      }
    }
  }
}

// ---- Grids ------------------------------------------------------------------

// More samples than a grid has blocks along z. In fp32 and with biases by the
// plain kernels, in bf16 on tensor cores. Emulated they would take minutes.
TEST_F(KernelLimits, AttentionOfManySamples) {
  const int64_t samples = kMostBlocksAcross + 2;
  MakeWorkspace(int64_t{64} << 20);
  const bool runs = !device_->OnlyCheckLaunches(true);
  for (const char* op : {"attention_relative", "attention"}) {
    KernelCase c = AttentionCase(op);
    for (auto& [letter, extent] : c.extents) {
      extent = letter == 'b' ? samples : letter == 'n' ? 8 : 1;
    }
    c.extents['d'] = c.extents['e'] = 8;
    for (const Problem& problem : AllProblems(c)) {
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        const Problem stored = Converted(problem, dtype, 0);
        const Tensors actual = Compute(stored, OnDevice());
        EXPECT_EQ(error_, "") << problem.op->name << " " << NameOf(dtype);
        if (!runs) continue;
        EXPECT_LE(
            Difference(Compute(Converted(stored, DType::kFloat64, 0)), actual),
            dtype == DType::kFloat32 ? 1e-4 : 0.02)
            << problem.op->name << " " << NameOf(dtype);
      }
    }
  }
  device_->OnlyCheckLaunches(false);
}

// Of bf16 by fp32, which cuBLASLt does not take.
TEST_F(KernelLimits, ProductsOfManyRows) {
  constexpr int64_t kRows = 64 * kMostBlocksAcross + 1;
  const IndexRule rule = IndexRule::Parse("bh,oh->bo").value();
  HostTensor x({kRows, 1}, DType::kFloat32);
  for (int64_t i = 0; i < kRows; ++i) x.Set(i, static_cast<double>(i % 1000));
  const HostTensor w({1, 1}, DType::kBFloat16, {2});
  const HostTensor y({kRows, 1}, DType::kFloat32);
  const std::vector<LocalTensor> operands = {x.Local(), w.Local()};
  const LocalTensor result = y.Local();
  RunOnDevice(*device_, "linear",
              {.rule = &rule,
               .attributes = {},
               .operands = operands,
               .results = {&result, 1}},
              /*in_place=*/false);
  for (int64_t i = 0; i < kRows; ++i) {
    ASSERT_EQ(y.At(i), static_cast<double>(i % 1000 * 2)) << i;
  }
}

// ---- Numbers of things ------------------------------------------------------

// As many terms as one launch adds, and more than two launches do.
TEST_F(KernelLimits, SumsOfManyTerms) {
  for (const int terms : {63, 64, 65, 127, 128, 200}) {
    std::string rule = "bf";
    for (int i = 1; i < terms; ++i) rule += ",bf";
    const KernelCase c = {"sum", "sum", rule + "->bf", {{'b', 3}, {'f', 11}}};
    const Problem problem = AllProblems(c)[0];
    for (const bool accumulate : {false, true}) {
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        Problem stored = Converted(problem, dtype, 0);
        for (int64_t i = 0; i < 33; ++i) stored.initial[0].Set(i, 1);
        const Tensors expected = Compute(Converted(stored, DType::kFloat64, 0),
                                         {.accumulate = accumulate});
        const Tensors actual = Compute(stored, OnDevice(false, accumulate));
        EXPECT_EQ(error_, "");
        // Rounded once by each launch.
        EXPECT_LE(Difference(expected, actual),
                  dtype == DType::kFloat32 ? kFp32Error : 4 * 0x1p-8)
            << terms << " " << NameOf(dtype);
      }
    }
  }
}

KernelCase GateCase(int64_t experts, int64_t choices, int64_t groups) {
  KernelCase c;
  c.name = c.op = "moe_gate";
  c.extents = {{'b', 1}, {'s', 3}, {'e', experts}, {'k', choices}};
  c.attributes = {{"capacity", 4},
                  {"group_best", 1},
                  {"groups", static_cast<double>(groups)},
                  {"renormalise", 1},
                  {"scale", 1},
                  {"sigmoid", 0},
                  {"top_groups", static_cast<double>(groups)},
                  {"top_k", static_cast<double>(choices)}};
  return c;
}
KernelCase BalanceCase(int64_t experts) {
  KernelCase c;
  c.name = c.op = "moe_balance";
  c.extents = {{'b', 1}, {'s', 3}, {'e', experts}};
  c.attributes = {{"coefficient", 0.3}, {"group_best", 1}, {"groups", 1},
                  {"sigmoid", 0},       {"top_groups", 1}, {"top_k", 2}};
  return c;
}

TEST_F(KernelLimits, Routers) {
  ExpectWorks(GateCase(1024, 2, 1));
  ExpectWorks(BalanceCase(1024));
  for (const KernelCase& c : {GateCase(1025, 2, 1), BalanceCase(1025)}) {
    ExpectErrors(c, "a router with 1025 experts: CUDA kernels have up to 1024");
  }
  ExpectWorks(GateCase(64, 32, 1));
  ExpectErrors(GateCase(64, 33, 1),
               "a router with 33 experts for each token: CUDA kernels have up "
               "to 32");
  ExpectWorks(GateCase(64, 2, 32));
  ExpectErrors(GateCase(66, 2, 33),
               "a router with 33 groups of experts: CUDA kernels have up to "
               "32");
}

TEST_F(KernelLimits, HeadsOfAttention) {
  KernelCase c = AttentionCase("attention_alibi");
  const auto of = [&](int64_t heads, int64_t width) {
    c.extents = {{'b', 1},     {'s', 2}, {'g', heads}, {'r', 1},
                 {'d', width}, {'t', 2}, {'e', 8}};
    c.attributes = {{"alibi_heads", static_cast<double>(heads)},
                    {"scale", 0.6},
                    {"window", 0}};
    return c;
  };
  ExpectWorks(of(256, 8));
  ExpectErrors(of(257, 8),
               "attention with 257 heads with biases: CUDA kernels have up to "
               "256");
  ExpectWorks(of(1, 256));
  ExpectErrors(of(1, 257),
               "attention with heads of 257 elements: CUDA kernels have up to "
               "256");
}

TEST_F(KernelLimits, BucketsOfAttention) {
  KernelCase c = AttentionCase("attention_relative");
  const auto of = [&](int64_t buckets) {
    c.extents['n'] = buckets;
    c.attributes = {{"causal", 0}, {"max_distance", 100}, {"scale", 0.6}};
    return c;
  };
  ExpectWorks(of(128));
  ExpectErrors(of(130),
               "attention with 130 buckets of distances: CUDA kernels have up "
               "to 128");
}

TEST_F(KernelLimits, TurnedFeatures) {
  KernelCase c = KernelCaseNamed("rotary_queries");
  c.extents = {{'b', 1}, {'s', 3}, {'g', 1}, {'r', 2}, {'d', 512}};
  ExpectWorks(c);
  c.extents['d'] = 514;
  ExpectErrors(c,
               "rotary embedding of 514 features of a head: CUDA kernels turn "
               "up to 512");
}

}  // namespace
}  // namespace tessera
