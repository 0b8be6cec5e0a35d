// The contract of the CUDA kernels: each does what the CPU's kernel of its name
// does, on the cases of tests/support/kernel_cases.h and on larger ones, where
// rows take several warps and grids several blocks. Part of two binaries:
// tests/kernels/kernel_device.h.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "tests/kernels/kernel_device.h"
#include "tests/support/kernel_cases.h"

namespace tessera {
namespace {

// Rows of several warps, ragged widths, several blocks.
std::vector<KernelCase> AllCases() {
  std::vector<KernelCase> cases = KernelCases();
  const std::vector<KernelCase> large = {
      {"gelu_large", "gelu", "bsf->bsf", {{'b', 3}, {'s', 50}, {'f', 129}}},
      {"silu_large", "silu", "bsf->bsf", {{'b', 2}, {'s', 50}, {'f', 256}}},
      {"embedding_large",
       "embedding",
       "",
       {{'b', 2}, {'s', 300}, {'v', 600}, {'h', 264}},
       {},
       {{0, Ints{Ints::kRandom, 0, 600}}}},
      // Nearly all tokens are of few rows.
      {"embedding_skewed",
       "embedding",
       "",
       {{'b', 2}, {'s', 700}, {'v', 700}, {'h', 11}},
       {},
       {{0, Ints{Ints::kRandom, 510, 514}}}},
      {"layer_norm_warps",
       "layer_norm",
       "",
       {{'b', 2}, {'s', 3}, {'h', 2304}},
       {{"epsilon", 1e-5}}},
      {"layer_norm_ragged",
       "layer_norm",
       "",
       {{'b', 3}, {'s', 15}, {'h', 1031}},
       {{"epsilon", 1e-5}}},
      {"rms_norm_widest",  // more than the threads hold
       "rms_norm",
       "",
       {{'b', 1}, {'s', 2}, {'h', 33001}},
       {{"epsilon", 1e-6}}},
      {"rms_norm_aligned",
       "rms_norm",
       "",
       {{'b', 5}, {'s', 41}, {'h', 256}},
       {{"epsilon", 1e-6}}},
      {"row_mean_large", "row_mean", "", {{'b', 2}, {'s', 9}, {'h', 1160}}},
      {"row_std_large",
       "row_std",
       "",
       {{'b', 2}, {'s', 9}, {'h', 1160}},
       {{"epsilon", 1e-5}}},
      {"normalize_large", "normalize", "", {{'b', 3}, {'s', 40}, {'h', 1160}}},
      {"rotary_vectors",
       "rotary",
       "bsgrd!,bs->bsgrd",
       {{'b', 2}, {'s', 5}, {'g', 2}, {'r', 3}, {'d', 64}},
       {{"fraction", 1}, {"theta", 10000}},
       {{1, Ints{Ints::kRandom, 0, 100000}}}},
      {"rotary_vectors_in_part",
       "rotary",
       "bsgd!,bs->bsgd",
       {{'b', 2}, {'s', 5}, {'g', 9}, {'d', 64}},
       {{"fraction", 0.25}, {"theta", 10000}},
       {{1, Ints{Ints::kIncreasing}}}},
      {"moe_gate_large",
       "moe_gate",
       "",
       {{'b', 2}, {'s', 100}, {'e', 40}, {'k', 3}},
       {{"capacity", 9},
        {"group_best", 2},
        {"groups", 8},
        {"renormalise", 1},
        {"scale", 2.5},
        {"sigmoid", 1},
        {"top_groups", 3},
        {"top_k", 3}}},
      {"moe_balance_large",
       "moe_balance",
       "",
       {{'b', 3}, {'s', 45}, {'e', 40}},
       {{"coefficient", 0.3},
        {"group_best", 1},
        {"groups", 1},
        {"sigmoid", 0},
        {"top_groups", 1},
        {"top_k", 2}}},
      {"moe_dispatch_large",
       "moe_dispatch",
       "",
       {{'b', 3}, {'t', 60}, {'h', 264}, {'k', 2}, {'e', 8}, {'s', 24}},
       {{"capacity", 24}, {"experts", 8}},
       {{1, Ints{Ints::kRandom, -30, 192}}}},
      {"moe_combine_large",
       "moe_combine",
       "",
       {{'b', 2}, {'s', 30}, {'k', 2}, {'h', 264}}},
      {"dropout_large",
       "dropout",
       "bsh->bsh",
       {{'b', 3}, {'s', 50}, {'h', 129}},
       {{"probability", 0.1}, {"salt", 3}}},
      {"count_labels_large",
       "count_labels",
       "",
       {{'b', 3}, {'s', 900}},
       {},
       {{0, Ints{Ints::kRandom, -2, 7}}}},
      {"cross_entropy_large",
       "cross_entropy",
       "",
       {{'b', 3}, {'s', 7}, {'v', 1237}},
       {},
       {{1, Ints{Ints::kRandom, -20, 1237}}}},
      {"cross_entropy_aligned",
       "cross_entropy",
       "",
       {{'b', 2}, {'s', 3}, {'v', 5000}},
       {},
       {{1, Ints{Ints::kRandom, -20, 5000}}}},
      {"mean_squared_error_large",
       "mean_squared_error",
       "bsf,bsf->",
       {{'b', 3}, {'s', 60}, {'f', 129}},
       {{"weight", 1}}},
      {"binary_cross_entropy_large",
       "binary_cross_entropy",
       "bf,bf->",
       {{'b', 50}, {'f', 413}},
       {{"weight", 0.5}}},
      {"gather_large",
       "gather",
       "bvh,bt->bth",
       {{'b', 3}, {'t', 60}, {'v', 70}, {'h', 41}},
       {},
       {{1, Ints{Ints::kRandom, -3, 75}}}},
      {"embedding_bag_large",
       "embedding_bag",
       "",
       {{'b', 150}, {'n', 4}, {'v', 600}, {'h', 264}},
       {{"mean", 1}},
       {{0, Ints{Ints::kRandom, -100, 600}}}},
      {"embedding_bag_ragged",
       "embedding_bag",
       "",
       {{'b', 70}, {'n', 9}, {'v', 33}, {'h', 13}},
       {{"mean", 0}},
       {{0, Ints{Ints::kRandom, -5, 33}}}},
      {"pairwise_dot_large",
       "pairwise_dot",
       "",
       {{'b', 9}, {'n', 27}, {'h', 128}, {'p', 351}},
       {{"pairs", 351}}},
      // Several tiles and blocks, split depths.
      {"conv2d_large",
       "conv2d",
       "bch!w!,ock!l!+o->boyx",
       {{'b', 3},
        {'c', 7},
        {'h', 13},
        {'w', 14},
        {'o', 70},
        {'k', 3},
        {'l', 3},
        {'y', 7},
        {'x', 7}},
       {{"dilation_height", 1},
        {"dilation_width", 1},
        {"out_height", 7},
        {"out_width", 7},
        {"pad_left", 1},
        {"pad_top", 1},
        {"stride_height", 2},
        {"stride_width", 2}}},
      {"batch_norm_large",
       "batch_norm",
       "bchw,c,c->bchw,c,c",
       {{'b', 3}, {'c', 5}, {'h', 20}, {'w', 21}},
       {{"epsilon", 1e-5}}},
      {"ghost_batch_norm_large",
       "ghost_batch_norm",
       "bchw,c,c->bchw,bc,bc",
       {{'b', 6}, {'c', 5}, {'h', 20}, {'w', 21}},
       {{"epsilon", 1e-5}, {"groups", 2}}},
      {"adamw_large",
       "adamw",
       "",
       {{'n', 40003}},
       {{"beta1", 0.9},
        {"beta2", 0.95},
        {"epsilon", 1e-8},
        {"lr", 0.01},
        {"weight_decay", 0.1}},
       {},
       /*in_place=*/true},
      // Several blocks of columns and chunks of rows; sums that fp16 holds.
      {"adafactor_sums_large",
       "adafactor_sums",
       "",
       {{'b', 2}, {'r', 70}, {'c', 201}}},
      // Many matrices with short rows, as of convolutions.
      {"adafactor_sums_many",
       "adafactor_sums",
       "",
       {{'b', 500}, {'r', 3}, {'c', 5}}},
      {"lstm_gates_large",
       "lstm_gates",
       "bg!j,bj->bj,bj",
       {{'b', 40}, {'g', 4}, {'j', 300}}},
      {"gru_gates_large",
       "gru_gates",
       "bg!j,j,bg!j,bj->bj",
       {{'b', 40}, {'g', 3}, {'j', 300}}},
      {"cast_large", "cast", "", {{'n', 40003}}},
      {"square_sum_large", "square_sum", "", {{'n', 150001}}},
      {"sum_large",
       "sum",
       "bsf,bsf,bsf,bsf->bsf",
       {{'b', 3}, {'s', 50}, {'f', 131}}},
  };
  cases.insert(cases.end(), large.begin(), large.end());
  // More steps than one launch copies.
  std::string steps = "bh";
  for (int i = 1; i < 130; ++i) steps += ",bh";
  cases.push_back({"stack_large",
                   "stack",
                   steps + "->bd!h",
                   {{'b', 3}, {'d', 130}, {'h', 37}},
                   {{"steps", 130}}});
  return cases;
}

class CudaKernelContract : public ::testing::TestWithParam<KernelCase> {
 protected:
  void SetUp() override {
    device_ = MakeKernelDevice();
    if (device_ == nullptr) GTEST_SKIP() << "no CUDA device";
    problems_ = AllProblems(GetParam());
  }

  CallOptions OnDevice(bool accumulate = false) {
    return {.run =
                [this](std::string_view kernel, const KernelCall& call) {
                  RunOnDevice(*device_, kernel, call, GetParam().in_place);
                },
            .accumulate = accumulate};
  }

  std::unique_ptr<KernelDevice> device_;
  std::vector<Problem> problems_;
};

INSTANTIATE_TEST_SUITE_P(, CudaKernelContract, ::testing::ValuesIn(AllCases()),
                         [](const auto& info) { return info.param.name; });

// fp32 sums of up to some thousand terms: 2^-24 = 6e-8 a hundred times, in a
// random walk. Values are relative to the largest of a tensor.
constexpr double kFp32Error = 5e-6;

double HalfUnit(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return 0x1p-8;
    case DType::kFloat16:
      return 0x1p-11;
    default:
      return 0;
  }
}

constexpr DType kStored[] = {DType::kFloat32, DType::kBFloat16,
                             DType::kFloat16};

// What the CPU gives in fp64 for the very values that are stored.
Tensors Exact(const Problem& stored) {
  return Compute(Converted(stored, DType::kFloat64, 0));
}

TEST_P(CudaKernelContract, EqualsTheCpu) {
  for (const Problem& problem : problems_) {
    for (const DType dtype : kStored) {
      for (const int64_t skew : {0, 3}) {
        const Problem stored = Converted(problem, dtype, skew);
        EXPECT_LE(Difference(Exact(stored), Compute(stored, OnDevice())),
                  HalfUnit(dtype) + kFp32Error)
            << problem.op->name << " " << NameOf(dtype) << " skew " << skew;
      }
    }
  }
}

// As gradients of weights are.
TEST_P(CudaKernelContract, Fp32ResultsOf16BitOperandsAreNotRounded) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (Problem stored : problems_) {
      for (HostTensor& tensor : stored.operands) tensor = tensor.As(dtype);
      for (HostTensor& tensor : stored.initial) {
        tensor = tensor.As(DType::kFloat32);
      }
      EXPECT_LE(Difference(Exact(stored), Compute(stored, OnDevice())),
                kFp32Error)
          << stored.op->name << " " << NameOf(dtype);
    }
  }
}

TEST_P(CudaKernelContract, ShardsOfEverySplitGiveTheWhole) {
  for (const Problem& problem : problems_) {
    const Problem stored = Converted(problem, DType::kFloat32, 0);
    const Tensors exact = Exact(stored);
    for (size_t f = 0; f < stored.rule.factors.size(); ++f) {
      const int factor = static_cast<int>(f);
      if (!stored.rule.factors[f].splittable) continue;
      for (const int64_t parts : {2, 3}) {
        if (Extent(stored, factor) < parts) continue;
        EXPECT_LE(
            Difference(exact, ComputeSplit(stored, factor, parts, OnDevice())),
            kFp32Error)
            << stored.op->name << " split " << parts << " ways on "
            << stored.rule.factors[f].letter;
      }
    }
  }
}

TEST_P(CudaKernelContract, AccumulationAdds) {
  for (const Problem& problem : problems_) {
    const Kernel& kernel = *FindCudaKernel(problem.op->name).value();
    EXPECT_EQ(kernel.accumulates,
              FindCpuKernel(problem.op->name).value()->accumulates);
    if (!kernel.accumulates) continue;
    for (const DType dtype : kStored) {
      Problem stored = Converted(problem, dtype, 0);
      for (HostTensor& result : stored.initial) {
        for (int64_t i = 0; i < result.elements(); ++i) result.Set(i, 1);
      }
      const Problem wide = Converted(stored, DType::kFloat64, 0);
      // A product of cuBLASLt may be rounded before it is added.
      EXPECT_LE(Difference(Compute(wide, {.accumulate = true}),
                           Compute(stored, OnDevice(/*accumulate=*/true))),
                2 * HalfUnit(dtype) + kFp32Error)
          << problem.op->name << " " << NameOf(dtype);
    }
  }
}

// Whatever the order of threads and blocks, and the alignment of buffers.
TEST_P(CudaKernelContract, GivesTheSameBitsAgain) {
  for (const Problem& problem : problems_) {
    const Problem stored = Converted(problem, DType::kBFloat16, 0);
    device_->Reorder(1);
    const Tensors once = Compute(stored, OnDevice());
    device_->Reorder(2);
    // The library of matrix products chooses by alignment how it sums.
    const int64_t skew = problem.op->op_class == OpClass::kMatmul ? 0 : 1;
    const Tensors again =
        Compute(Converted(problem, DType::kBFloat16, skew), OnDevice());
    for (size_t k = 0; k < once.size(); ++k) {
      EXPECT_TRUE(once[k].SameBits(again[k]))
          << problem.op->name << " result " << k;
    }
  }
}

TEST(CudaKernelTable, HasEveryKernelOfTheCpu) {
  const auto names = [](std::span<const Kernel> kernels) {
    std::multiset<std::string_view> result;
    for (const Kernel& kernel : kernels) result.insert(kernel.name);
    return result;
  };
  EXPECT_EQ(names(CudaKernels()), names(CpuKernels()));
}

}  // namespace
}  // namespace tessera
