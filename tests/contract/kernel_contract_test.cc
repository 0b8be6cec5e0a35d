// The contract of every kernel, over a table of cases
// (tests/support/kernel_cases.h): gradients match finite differences, shards of
// every split give the unsplit result, fp32 agrees with fp64, 16-bit data is
// computed in fp32 and rounded once, accumulation adds, and no bit depends on
// the alignment of buffers.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "runtime/kernels/kernel.h"
#include "runtime/thread_pool.h"
#include "tests/support/kernel_cases.h"

namespace tessera {
namespace {

// ---- The contract -----------------------------------------------------------

class KernelContract : public ::testing::TestWithParam<KernelCase> {};

INSTANTIATE_TEST_SUITE_P(, KernelContract, ::testing::ValuesIn(KernelCases()),
                         [](const auto& info) { return info.param.name; });

// Sum of dy * y0, and of the gradients of further results times these.
double Loss(const Problem& problem, const HostTensor& dy) {
  const Tensors y = Compute(problem);
  double loss = 0;
  for (size_t k = 0; k < ResultsWithGradients(problem); ++k) {
    const HostTensor gradient = GradientOfResult(dy, k);
    for (int64_t i = 0; i < y[k].elements(); ++i) {
      loss += gradient.At(i) * y[k].At(i);
    }
  }
  return loss;
}

// (loss(x + h u) - loss(x - h u)) / 2h for operand x. In fp64 with h = 1e-5
// both the truncation, O(h^2), and the rounding, O(1e-16 / h), are near 1e-10.
double Slope(const Problem& problem, const HostTensor& dy, size_t operand,
             const std::vector<double>& direction) {
  constexpr double kStep = 1e-5;
  double loss[2];
  for (int side = 0; side < 2; ++side) {
    Problem moved = problem;
    HostTensor& x = moved.operands[operand];
    for (int64_t i = 0; i < x.elements(); ++i) {
      x.Set(i, x.At(i) + (side == 0 ? -kStep : kStep) *
                             direction[static_cast<size_t>(i)]);
    }
    loss[side] = Loss(moved, dy);
  }
  return (loss[1] - loss[0]) / (2 * kStep);
}

void ExpectGradient(const Problem& problem, const HostTensor& dy,
                    size_t operand, const HostTensor& gradient) {
  const auto n = static_cast<size_t>(gradient.elements());
  constexpr size_t kEveryElement = 300;
  if (n <= kEveryElement) {
    for (size_t i = 0; i < n; ++i) {
      std::vector<double> direction(n);
      direction[i] = 1;
      const double expected = Slope(problem, dy, operand, direction);
      EXPECT_NEAR(gradient.At(static_cast<int64_t>(i)), expected,
                  1e-8 * (1 + std::abs(expected)))
          << "operand " << operand << " element " << i;
    }
    return;
  }
  Rng rng(17);
  for (int repeat = 0; repeat < 5; ++repeat) {
    std::vector<double> direction(n);
    double expected = 0;
    for (size_t i = 0; i < n; ++i) {
      direction[i] = 2 * rng.Uniform01() - 1;
      expected += direction[i] * gradient.At(static_cast<int64_t>(i));
    }
    const double slope = Slope(problem, dy, operand, direction);
    EXPECT_NEAR(expected, slope, 1e-7 * (1 + std::abs(slope)))
        << "operand " << operand;
  }
}

TEST_P(KernelContract, GradientsMatchFiniteDifferences) {
  const Problem problem = ForwardProblem(GetParam());
  if (problem.op->adjoints.empty()) return;
  const Tensors results = Compute(problem);
  const HostTensor dy = OutputGradient(problem);
  std::set<size_t> covered;
  for (const AdjointDef& adjoint : problem.op->adjoints) {
    if (adjoint.op.empty()) {
      const size_t operand =
          Symbols(adjoint.signature.substr(adjoint.signature.find('>') + 1))[0]
              .index;
      ExpectGradient(problem, dy, operand, dy);
      covered.insert(operand);
      continue;
    }
    const auto backward = Adjoint(problem, results, dy, adjoint);
    if (!backward) continue;
    const Tensors gradients = Compute(backward->problem);
    for (size_t k = 0; k < gradients.size(); ++k) {
      const size_t operand = backward->gradients_of[k];
      covered.insert(operand);
      // In the place of running averages' gradients are their distances:
      // RunningAverages, below.
      if (problem.op->name.starts_with("tracked_") && operand > 2) continue;
      ExpectGradient(problem, dy, operand, gradients[k]);
    }
  }
  for (size_t i = 0; i < problem.operands.size(); ++i) {
    const HostTensor& operand = problem.operands[i];
    const bool differentiable = IsFloat(operand.dtype()) &&
                                !operand.shape().empty() &&
                                !GetParam().conditions.contains(i);
    EXPECT_EQ(covered.count(i), differentiable ? 1u : 0u) << "operand " << i;
  }
}

TEST_P(KernelContract, ShardsOfEverySplitGiveTheWhole) {
  for (const Problem& problem : AllProblems(GetParam())) {
    const Tensors whole = Compute(problem);
    for (size_t f = 0; f < problem.rule.factors.size(); ++f) {
      const int factor = static_cast<int>(f);
      if (!problem.rule.factors[f].splittable) continue;
      for (int64_t parts : {2, 3}) {
        if (Extent(problem, factor) < parts) continue;
        EXPECT_LE(Difference(whole, ComputeSplit(problem, factor, parts)),
                  1e-12)
            << problem.op->name << " split " << parts << " ways on "
            << problem.rule.factors[f].letter;
      }
    }
  }
}

TEST_P(KernelContract, Fp32AgreesWithFp64) {
  for (const Problem& problem : AllProblems(GetParam())) {
    const Tensors single = Compute(Converted(problem, DType::kFloat32, 0));
    // Rounding of 2^-24 = 6e-8, some hundreds of times, in a random walk.
    EXPECT_LE(Difference(Compute(problem), single), 5e-6) << problem.op->name;
  }
}

// On the same 16-bit values: what fp64 gives, but for the error of fp32 and
// half a unit in the last of 8 or 11 bits.
TEST_P(KernelContract, SixteenBitResultsAreRoundedOnce) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    const double half_unit = dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
    for (const Problem& problem : AllProblems(GetParam())) {
      const Problem stored = Converted(problem, dtype, 0);
      const Tensors exact = Compute(Converted(stored, DType::kFloat64, 0));
      EXPECT_LE(Difference(exact, Compute(stored)), half_unit + 5e-6)
          << problem.op->name << " " << NameOf(dtype);
    }
  }
}

// As gradients of weights are.
TEST_P(KernelContract, Fp32ResultsOf16BitOperandsAreNotRounded) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const Problem& problem : AllProblems(GetParam())) {
      Problem stored = problem;
      for (HostTensor& tensor : stored.operands) tensor = tensor.As(dtype);
      for (HostTensor& tensor : stored.initial) {
        tensor = tensor.As(DType::kFloat32);
      }
      const Tensors results = Compute(stored);
      const Tensors expected = Compute(Converted(stored, DType::kFloat32, 0));
      for (size_t k = 0; k < results.size(); ++k) {
        EXPECT_TRUE(results[k].SameBits(expected[k]))
            << problem.op->name << " result " << k << " " << NameOf(dtype);
      }
    }
  }
}

TEST_P(KernelContract, BitsDoNotDependOnAlignment) {
  for (const Problem& problem : AllProblems(GetParam())) {
    for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16,
                        DType::kFloat16}) {
      const Tensors aligned = Compute(Converted(problem, dtype, 0));
      for (int64_t skew : {1, 3, 5}) {
        const Tensors skewed = Compute(Converted(problem, dtype, skew));
        for (size_t k = 0; k < aligned.size(); ++k) {
          EXPECT_TRUE(aligned[k].SameBits(skewed[k]))
              << problem.op->name << " result " << k << " " << NameOf(dtype)
              << " skew " << skew;
        }
      }
    }
  }
}

// The case with so many samples, or elements, that threads share the work.
KernelCase Enlarged(KernelCase c) {
  for (char factor : {'b', 'n'}) {
    const auto it = c.extents.find(factor);
    if (it == c.extents.end()) continue;
    const int64_t elements = ForwardProblem(c).operands[0].elements();
    it->second *= 1 + 70000 / elements;
  }
  return c;
}

TEST_P(KernelContract, BitsDoNotDependOnThreads) {
  for (const Problem& problem : AllProblems(Enlarged(GetParam()))) {
    const Problem single = Converted(problem, DType::kFloat32, 0);
    const Tensors expected = Compute(single);
    for (int count : {2, 3}) {
      ThreadPool threads(count);
      const Tensors actual = Compute(single, {.threads = &threads});
      for (size_t k = 0; k < actual.size(); ++k) {
        EXPECT_TRUE(actual[k].SameBits(expected[k]))
            << problem.op->name << " result " << k << ", " << count
            << " threads";
      }
    }
  }
}

TEST_P(KernelContract, AccumulationAdds) {
  for (const Problem& problem : AllProblems(GetParam())) {
    if (!FindCpuKernel(problem.op->name).value()->accumulates) continue;
    // Merges (tests/unit/runtime/kernels_test.cc).
    if (problem.op->name.starts_with("attention") &&
        !problem.op->adjoints.empty()) {
      continue;
    }
    const Tensors fresh = Compute(problem);
    Problem again = problem;
    for (HostTensor& result : again.initial) {
      for (int64_t i = 0; i < result.elements(); ++i) result.Set(i, 1);
    }
    const Tensors sums = Compute(again, {.accumulate = true});
    for (size_t k = 0; k < sums.size(); ++k) {
      const double base = AddsToResult(*problem.op, k) ? 1 : 0;
      for (int64_t i = 0; i < sums[k].elements(); ++i) {
        EXPECT_NEAR(sums[k].At(i), base + fresh[k].At(i), 1e-12)
            << problem.op->name << " result " << k << " element " << i;
      }
    }
  }
}

// f(a + b) = f(a) + f(b) in each set of operands that OpDef::linear declares.
TEST_P(KernelContract, LinearWhereDeclared) {
  const std::vector<Problem> problems = AllProblems(GetParam());
  for (size_t p = 0; p < problems.size(); ++p) {
    for (const std::vector<size_t>& set : problems[p].op->linear) {
      Problem a = problems[p];
      if (set.back() >= a.operands.size()) continue;
      const auto in_set = [&](size_t i) {
        return std::find(set.begin(), set.end(), i) != set.end();
      };
      for (size_t i = 0; i < a.operands.size(); ++i) {
        if (in_set(i) || a.rule.terms[i] == a.rule.terms[set[0]]) continue;
        for (int64_t e = 0; e < a.operands[i].elements(); ++e) {
          a.operands[i].Set(e, 0);
        }
      }
      Problem b = a;
      Problem sum = a;
      Rng rng(17);
      for (size_t i : set) {
        FillRandom(b.operands[i], rng);
        for (int64_t e = 0; e < sum.operands[i].elements(); ++e) {
          sum.operands[i].Set(e, a.operands[i].At(e) + b.operands[i].At(e));
        }
      }
      const Tensors of_a = Compute(a);
      const Tensors of_b = Compute(b);
      const Tensors of_sum = Compute(sum);
      const size_t results = p == 0 ? 1 : of_sum.size();
      for (size_t k = 0; k < results; ++k) {
        for (int64_t e = 0; e < of_sum[k].elements(); ++e) {
          ASSERT_NEAR(of_sum[k].At(e), of_a[k].At(e) + of_b[k].At(e), 1e-9)
              << a.op->name << " result " << k << " element " << e;
        }
      }
    }
  }
}

// ---- Running averages -------------------------------------------------------

// One channel of values 1, 2, 3, 6: mean 3, variance 14/4, unbiased 14/3.
Problem Tracked(const std::string& op, std::vector<Attribute> attributes) {
  Problem problem;
  problem.op = &OpNamed(op);
  const std::string statistics = op == "tracked_batch_norm" ? "c" : "bc";
  problem.rule =
      IndexRule::Parse("bc,c,c,c,c->bc," + statistics + "," + statistics)
          .value();
  problem.attributes = std::move(attributes);
  const auto add = [&](const Shape& shape, const std::vector<double>& values) {
    problem.operands.emplace_back(shape, DType::kFloat64);
    for (size_t i = 0; i < values.size(); ++i) {
      problem.operands.back().Set(static_cast<int64_t>(i), values[i]);
    }
  };
  add({4, 1}, {1, 2, 3, 6});
  add({1}, {2});    // scale
  add({1}, {0.5});  // shift
  add({1}, {1});    // the average of means
  add({1}, {2});    // and of variances
  problem.initial.emplace_back(Shape{4, 1}, DType::kFloat64);
  for (int k = 0; k < 2; ++k) {
    problem.initial.emplace_back(statistics == "c" ? Shape{1} : Shape{4, 1},
                                 DType::kFloat64);
  }
  return problem;
}

Tensors DistancesOf(const Problem& problem) {
  const auto backward =
      Adjoint(problem, Compute(problem), OutputGradient(problem),
              problem.op->adjoints[0]);
  const Tensors gradients = Compute(backward->problem);
  return {gradients[3], gradients[4]};
}

TEST(RunningAverages, AreAsFarFromTheBatchAsPyTorchSays) {
  const Tensors distances = DistancesOf(
      Tracked("tracked_batch_norm", {{"epsilon", 1e-5}, {"momentum", 0.1}}));
  EXPECT_NEAR(distances[0].At(0), 1 - 3, 1e-12);
  EXPECT_NEAR(distances[1].At(0), 2 - 14.0 / 3, 1e-12);
}

// Groups 1, 2 and 3, 6: means 1.5 and 4.5, unbiased variances 0.5 and 4.5.
TEST(RunningAverages, OfGroupsAreTheirMean) {
  const Tensors distances = DistancesOf(
      Tracked("tracked_ghost_batch_norm",
              {{"epsilon", 1e-5}, {"groups", 2}, {"momentum", 0.1}}));
  EXPECT_NEAR(distances[0].At(0), 1 - 3, 1e-12);
  EXPECT_NEAR(distances[1].At(0), 2 - 2.5, 1e-12);
}

// A loss without training has a negative momentum (runtime/executor.cc).
TEST(RunningAverages, NormOutsideOfTraining) {
  for (const char* op : {"tracked_batch_norm", "tracked_ghost_batch_norm"}) {
    const Tensors y = Compute(
        Tracked(op, {{"epsilon", 0.25}, {"groups", 2}, {"momentum", -1}}));
    for (int64_t i = 0; i < 4; ++i) {
      const double x = std::vector<double>{1, 2, 3, 6}[static_cast<size_t>(i)];
      // sqrt(2 + 0.25) = 1.5
      EXPECT_NEAR(y[0].At(i), (x - 1) / 1.5 * 2 + 0.5, 1e-12) << op;
    }
  }
}

// ---- The tables -------------------------------------------------------------

TEST(KernelTable, EveryOperatorHasItsKernels) {
  std::set<std::string> wanted;
  for (const OpDef& op : Ops()) {
    wanted.insert(std::string(op.name));
    if (op.coupling.exists()) wanted.insert(std::string(op.name) + ".state");
  }
  std::multiset<std::string> found;
  for (const Kernel& kernel : CpuKernels()) {
    found.insert(std::string(kernel.name));
  }
  EXPECT_THAT(found, ::testing::ElementsAreArray(wanted));
}

// Lowering relies on it.
TEST(KernelTable, AccumulateAsTheirOperatorsSay) {
  for (const OpDef& op : Ops()) {
    if (const auto kernel = FindCpuKernel(op.name)) {
      EXPECT_EQ((*kernel)->accumulates, op.accumulation != Accumulation::kNone)
          << op.name;
    }
  }
}

TEST(KernelTable, EveryOperatorHasACase) {
  std::set<std::string_view> tested;
  for (const KernelCase& c : KernelCases()) {
    tested.insert(c.op);
    for (const AdjointDef& adjoint : OpNamed(c.op).adjoints) {
      tested.insert(adjoint.op);
    }
  }
  for (const OpDef& op : Ops()) {
    EXPECT_EQ(tested.count(op.name), 1u)
        << op.name << ": add a case to tests/support/kernel_cases.cc";
  }
}

TEST(KernelTable, UnknownNameIsAnError) {
  const auto kernel = FindCpuKernel("layer_nrom");
  ASSERT_FALSE(kernel.has_value());
  EXPECT_THAT(kernel.error().message,
              ::testing::HasSubstr("did you mean 'layer_norm'"));
}

// ---- Mistakes that the splitting contract must catch ------------------------

// Looks up every id somewhere in its shard.
void UnmaskedEmbedding(std::string_view, const KernelCall& call) {
  LocalTensor table = call.operands[1];
  HostTensor ids(call.operands[0].shape, DType::kInt32);
  for (int64_t i = 0; i < ids.elements(); ++i) {
    const int64_t id = call.operands[0].as<int32_t>()[i];
    ids.Set(i, static_cast<double>(table.offset[0] + id % table.shape[0]));
  }
  const std::vector<LocalTensor> operands = {ids.Local(), table};
  KernelCall unmasked = call;
  unmasked.operands = operands;
  RunCpuKernel("embedding", unmasked);
}

void ExpectCaught(std::string_view name, char letter, Mistake mistake,
                  const CallOptions& options = {}) {
  const Problem problem = ForwardProblem(KernelCaseNamed(name));
  const int factor = problem.rule.FactorOf(letter);
  const Tensors whole = Compute(problem);
  for (int64_t parts : {2, 3}) {
    EXPECT_LE(Difference(whole, ComputeSplit(problem, factor, parts)), 1e-12);
    EXPECT_GT(Difference(whole, ComputeSplit(problem, factor, parts, options,
                                             mistake)),
              0.01)
        << parts << " parts";
  }
}

TEST(PlantedMistake, BiasOnEveryShard) {
  ExpectCaught("linear_bias", 'i', Mistake::kTermsEverywhere);
}

TEST(PlantedMistake, LocalDropoutIndex) {
  for (char factor : {'b', 's', 'h'}) {
    ExpectCaught("dropout", factor, Mistake::kLocalIndex);
  }
}

TEST(PlantedMistake, UnmaskedEmbedding) {
  ExpectCaught("embedding", 'v', Mistake::kNone, {.run = UnmaskedEmbedding});
}

TEST(PlantedMistake, LocalVocabulary) {
  ExpectCaught("embedding", 'v', Mistake::kLocalIndex);
  ExpectCaught("cross_entropy", 'v', Mistake::kLocalIndex);
}

// Experts, places, tokens of another shard are taken for its own.
TEST(PlantedMistake, LocalSlots) {
  ExpectCaught("moe_collect", 'e', Mistake::kLocalIndex);
  ExpectCaught("moe_collect", 't', Mistake::kLocalIndex);
}

TEST(PlantedMistake, MeanOfShardMeans) {
  ExpectCaught("moe_balance", 'b', Mistake::kLocalIndex);
}

TEST(PlantedMistake, LossOfShardMeans) {
  ExpectCaught("mean_squared_error", 'f', Mistake::kLocalIndex);
  ExpectCaught("binary_cross_entropy", 'b', Mistake::kLocalIndex);
}

TEST(PlantedMistake, LocalIds) {
  ExpectCaught("gather_of_samples", 'v', Mistake::kLocalIndex);
  ExpectCaught("embedding_bag_mean", 'v', Mistake::kLocalIndex);
}

TEST(PlantedMistake, UnmergedStates) {
  ExpectCaught("cross_entropy", 'v', Mistake::kOwnStateOnly);
  ExpectCaught("batch_norm", 'b', Mistake::kOwnStateOnly);
  // 5 groups are cut by 2 and by 3 shards.
  ExpectCaught("ghost_batch_norm", 'b', Mistake::kOwnStateOnly);
}

TEST(PlantedMistake, BiasOfEveryShardOfChannels) {
  ExpectCaught("conv2d_strided", 'c', Mistake::kTermsEverywhere);
}

TEST(PlantedMistake, MeanOfShardsOfAnImage) {
  ExpectCaught("image_mean", 'h', Mistake::kLocalIndex);
}

}  // namespace
}  // namespace tessera
