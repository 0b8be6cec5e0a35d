// Calls of CUDA kernels that the table of cases does not make: masked operands,
// loss scales, empty tensors, too little workspace. Part of two binaries:
// tests/kernels/kernel_device.h.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "planner/plan/sequence_order.h"
#include "runtime/loss_scale.h"
#include "tests/kernels/kernel_device.h"
#include "tests/support/kernel_cases.h"

namespace tessera {
namespace {

class CudaKernelCalls : public ::testing::Test {
 protected:
  void SetUp() override {
    device_ = MakeKernelDevice();
    if (device_ == nullptr) GTEST_SKIP() << "no CUDA device";
  }

  struct Arguments {
    std::vector<Attribute> attributes;
    Tensors operands;
    Tensors results;  // read, too
    bool accumulate = false;
    std::vector<size_t> masked = {};  // operands that are null
    std::optional<Range> run = {};
  };

  // The results of a CUDA kernel; they have to be the CPU's.
  Tensors Run(std::string_view kernel, const Arguments& arguments) {
    Tensors of_cpu = arguments.results;
    Tensors of_cuda = arguments.results;
    const auto call = [&](Tensors& results, const RunKernel& run) {
      std::vector<LocalTensor> operands;
      std::vector<LocalTensor> locals;
      for (const HostTensor& tensor : arguments.operands) {
        operands.push_back(tensor.Local());
      }
      for (const HostTensor& tensor : results) locals.push_back(tensor.Local());
      for (size_t i : arguments.masked) operands[i].data = nullptr;
      run(kernel, {.attributes = arguments.attributes,
                   .operands = operands,
                   .results = locals,
                   .accumulate = arguments.accumulate,
                   .run = arguments.run,
                   .step = 6});
    };
    call(of_cpu, RunCpuKernel);
    call(of_cuda, [&](std::string_view name, const KernelCall& c) {
      RunOnDevice(*device_, name, c, /*in_place=*/true);
    });
    EXPECT_LE(Difference(of_cpu, of_cuda), 1e-6) << kernel;
    return of_cuda;
  }

  static HostTensor Random(Shape shape, uint64_t seed) {
    HostTensor tensor(std::move(shape), DType::kFloat32);
    Rng rng(seed);
    FillRandom(tensor, rng);
    return tensor;
  }
  static HostTensor Of(const std::vector<double>& values) {
    return {{static_cast<int64_t>(values.size())}, DType::kFloat32, values};
  }
  static HostTensor Scalar(double value) {
    return {{}, DType::kFloat32, {value}};
  }

  std::unique_ptr<KernelDevice> device_;
};

TEST_F(CudaKernelCalls, MaskedTermsAreLeftOut) {
  const Tensors sum =
      Run("sum", {{},
                  {Of({1, 2, 3}), Of({10, 20, 30}), Of({100, 200, 300})},
                  {Of({5, 5, 5})},
                  /*accumulate=*/true,
                  /*masked=*/{1}});
  EXPECT_EQ(sum[0].At(2), 5 + 3 + 300);
  EXPECT_EQ(
      Run("add", {{}, {Of({1}), Of({2})}, {Of({9})}, false, {0, 1}})[0].At(0),
      0);
}

std::vector<Attribute> AdamWAttributes() {
  return {{"lr", 0.01},
          {"beta1", 0.9},
          {"beta2", 0.95},
          {"epsilon", 1e-8},
          {"weight_decay", 0.1}};
}

// 7 steps, of which 3 were skipped.
TEST_F(CudaKernelCalls, AdamWCountsStepsThatWereNotSkipped) {
  const HostTensor scale = Of({65536, 0, 3});
  const HostTensor v(Shape{100}, DType::kFloat32, std::vector<double>(100, 2));
  const Tensors start = {Random({100}, 2), Random({100}, 3), v};
  const Tensors moved =
      Run("adamw",
          {AdamWAttributes(), {Random({100}, 1), Scalar(0.5), scale}, start});
  EXPECT_NE(moved[0].At(0), start[0].At(0));
}

TEST_F(CudaKernelCalls, NegativeCoefficientSkipsTheStep) {
  const Tensors start = {Random({100}, 2), Random({100}, 3), Random({100}, 4)};
  const Tensors after =
      Run("adamw", {AdamWAttributes(), {Random({100}, 1), Scalar(-1)}, start});
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(after[i].SameBits(start[i]));
  const Tensors sgd = Run("sgd", {{{"lr", 0.1}, {"weight_decay", 0.1}},
                                  {Random({100}, 1), Scalar(-1)},
                                  {start[0]}});
  EXPECT_TRUE(sgd[0].SameBits(start[0]));
  const Tensors momentum =
      Run("momentum", {{{"beta1", 0.9}, {"lr", 0.1}, {"weight_decay", 0.1}},
                       {Random({100}, 1), Scalar(-1)},
                       {start[0], start[1]}});
  for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(momentum[i].SameBits(start[i]));
}

// fp32 masters with 16-bit gradients.
TEST_F(CudaKernelCalls, AdamWOfA16BitGradient) {
  const HostTensor v(Shape{99}, DType::kFloat32, std::vector<double>(99, 2));
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    (void)Run("adamw", {AdamWAttributes(),
                        {Random({99}, 1).As(dtype), Scalar(0.5)},
                        {Random({99}, 2), Random({99}, 3), v}});
  }
}

// Of lists: empty tensors, one element, odd numbers, several blocks.
const std::vector<int64_t> kListedSizes = {0, 1, 7, 2049, 0, 4097, 3, 0};

// A list of calls gives the bits that the calls give one after the other, and
// what the CPU's kernel does. Operand 0 and the results are of these sizes; the
// others are shared by all.
struct Listed {
  std::string_view kernel;
  std::vector<Attribute> attributes;
  DType operand = DType::kFloat32;
  std::vector<DType> results;
  Tensors shared;
  bool decay_varies = false;
  std::vector<int64_t> sizes = kListedSizes;
};

void ExpectListEqualsCalls(KernelDevice& device, const Listed& listed) {
  const std::vector<int64_t>& sizes = listed.sizes;
  const auto random = [](int64_t n, DType dtype, uint64_t seed) {
    HostTensor tensor({n}, DType::kFloat32);
    Rng rng(seed);
    FillRandom(tensor, rng);
    // Second moments are not negative.
    for (int64_t i = 0; i < n; ++i) tensor.Set(i, std::abs(tensor.At(i)));
    return tensor.As(dtype);
  };
  struct Call {
    std::vector<Attribute> attributes;
    Tensors operands;
    Tensors results;
    std::vector<LocalTensor> operand_locals;
    std::vector<LocalTensor> result_locals;
  };
  const auto make = [&] {
    std::vector<Call> calls(sizes.size());
    for (size_t c = 0; c < calls.size(); ++c) {
      Call& call = calls[c];
      call.attributes = listed.attributes;
      if (listed.decay_varies) {
        call.attributes.push_back({"weight_decay", 0.1 * (c % 2)});
      }
      call.operands = {random(sizes[c], listed.operand, 10 * c)};
      for (size_t r = 0; r < listed.results.size(); ++r) {
        call.results.push_back(
            random(sizes[c], listed.results[r], 10 * c + r + 1));
      }
    }
    return calls;
  };
  const auto of = [&](std::vector<Call>& calls) {
    std::vector<KernelCall> made;
    for (Call& call : calls) {
      call.operand_locals = {call.operands[0].Local()};
      for (const HostTensor& shared : listed.shared) {
        call.operand_locals.push_back(shared.Local());
      }
      call.result_locals.clear();
      for (const HostTensor& result : call.results) {
        call.result_locals.push_back(result.Local());
      }
      made.push_back({.attributes = call.attributes,
                      .operands = call.operand_locals,
                      .results = call.result_locals,
                      .step = 6});
    }
    return made;
  };
  std::vector<Call> at_once = make();
  std::vector<Call> singly = make();
  std::vector<Call> on_cpu = make();
  RunListOnDevice(device, listed.kernel, of(at_once));
  for (const KernelCall& call : of(singly)) {
    RunOnDevice(device, listed.kernel, call, /*in_place=*/true);
  }
  for (const KernelCall& call : of(on_cpu)) RunCpuKernel(listed.kernel, call);
  for (size_t c = 0; c < sizes.size(); ++c) {
    for (size_t r = 0; r < listed.results.size(); ++r) {
      EXPECT_TRUE(at_once[c].results[r].SameBits(singly[c].results[r]))
          << listed.kernel << " of " << sizes[c];
    }
    if (sizes[c] == 0) continue;
    EXPECT_LE(Difference(on_cpu[c].results, at_once[c].results), 1e-6)
        << listed.kernel << " of " << sizes[c];
  }
}

TEST_F(CudaKernelCalls, ListsOfUpdatesEqualSingleOnes) {
  constexpr DType kFp32 = DType::kFloat32;
  const std::vector<Attribute> adamw = {
      {"lr", 0.01}, {"beta1", 0.9}, {"beta2", 0.95}, {"epsilon", 1e-8}};
  for (const DType gradient : {kFp32, DType::kBFloat16}) {
    ExpectListEqualsCalls(*device_, {"adamw",
                                     adamw,
                                     gradient,
                                     {kFp32, kFp32, kFp32},
                                     {Scalar(0.5), Of({65536, 0, 3})},
                                     true});
  }
  const std::vector<Attribute> plain = {{"beta1", 0.9}, {"lr", 0.1}};
  ExpectListEqualsCalls(
      *device_,
      {"momentum", plain, kFp32, {kFp32, kFp32}, {Scalar(0.5)}, true});
  // More than one launch takes.
  ExpectListEqualsCalls(*device_, {"sgd",
                                   plain,
                                   kFp32,
                                   {kFp32},
                                   {Scalar(0.5)},
                                   true,
                                   std::vector<int64_t>(43, 9)});
  ExpectListEqualsCalls(*device_, {"cast", {}, kFp32, {DType::kBFloat16}, {}});
  ExpectListEqualsCalls(
      *device_,
      {"stochastic_cast", {{"salt", 5}}, kFp32, {DType::kBFloat16}, {}});
}

// Rounded by where the elements lie in the whole tensor, of which here is a
// block that three dimensions cut.
TEST_F(CudaKernelCalls, RoundsCutBlocksAtRandomAsTheCpu) {
  const HostTensor from = Random({2, 3, 3, 2, 3}, 1);
  const std::vector<Attribute> attributes = {{"salt", 9}};
  const std::vector<LocalTensor> operands = {from.Local()};
  const auto rounded = [&](bool on_device) {
    HostTensor to({2, 3, 3, 2, 3}, DType::kBFloat16);
    std::vector<LocalTensor> results = {to.Local()};
    results[0].offset = {1, 0, 2, 0, 1};
    results[0].global_shape = {4, 3, 6, 2, 5};
    const KernelCall call = {.attributes = attributes,
                             .operands = operands,
                             .results = results,
                             .seed = 4,
                             .step = 2};
    if (on_device) {
      RunOnDevice(*device_, "stochastic_cast", call, /*in_place=*/false);
    } else {
      RunCpuKernel("stochastic_cast", call);
    }
    return to;
  };
  EXPECT_TRUE(rounded(true).SameBits(rounded(false)));
}

// Sums of squares add to one number in the order of the calls, or are one each.
TEST_F(CudaKernelCalls, ListsOfSquareSumsEqualSingleOnes) {
  Tensors xs;
  for (const int64_t n : {0, 131'073, 1, 768}) {  // two blocks, one each
    xs.push_back(Random({n}, static_cast<uint64_t>(n)));
  }
  for (const bool together : {true, false}) {
    Tensors at_once(together ? 1 : xs.size(), Scalar(3));
    Tensors singly = at_once;
    std::vector<std::vector<LocalTensor>> locals;
    for (const HostTensor& x : xs) locals.push_back({x.Local()});
    const auto calls = [&](Tensors& results,
                           std::vector<std::vector<LocalTensor>>& sums) {
      std::vector<KernelCall> made;
      for (size_t i = 0; i < xs.size(); ++i) {
        sums.push_back({results[together ? 0 : i].Local()});
      }
      for (size_t i = 0; i < xs.size(); ++i) {
        made.push_back({.attributes = {},
                        .operands = locals[i],
                        .results = sums[i],
                        .accumulate = together || i % 2 == 0});
      }
      return made;
    };
    std::vector<std::vector<LocalTensor>> sums;
    std::vector<std::vector<LocalTensor>> single_sums;
    RunListOnDevice(*device_, "square_sum", calls(at_once, sums));
    double expected = 3;
    for (const KernelCall& call : calls(singly, single_sums)) {
      RunOnDevice(*device_, "square_sum", call, /*in_place=*/true);
    }
    for (size_t i = 0; i < at_once.size(); ++i) {
      EXPECT_TRUE(at_once[i].SameBits(singly[i])) << i;
    }
    for (const HostTensor& x : xs) {
      for (const double value : x.Values()) expected += value * value;
    }
    if (together) {
      EXPECT_NEAR(at_once[0].At(0), expected, 1e-6 * expected);
    }
  }
}

std::vector<Attribute> AdafactorAttributes() {
  return {{"beta2_decay", -0.8}, {"d", 1},    {"epsilon1", 1e-6},
          {"epsilon2", 1e-3},    {"lr", 0.1}, {"weight_decay", 0.1}};
}

HostTensor Absolute(HostTensor tensor) {
  for (int64_t i = 0; i < tensor.elements(); ++i) {
    tensor.Set(i, std::abs(tensor.At(i)));
  }
  return tensor;
}

// A run that begins and ends amid rows of two matrices; its buffers are its
// own, at the front of the tensors here. Sums of tiles add.
TEST_F(CudaKernelCalls, AdafactorOfARun) {
  for (const Range run :
       {Range{0, 2 * 9 * 35}, {20, 401}, {330, 331}, {40, 40}}) {
    for (const bool accumulate : {false, true}) {
      (void)Run("adafactor_sums",
                {{},
                 {Random({2, 9, 35}, 1), Scalar(0.5)},
                 {Random({2, 9}, 2), Random({2, 35}, 3), Random({2}, 4)},
                 accumulate,
                 {},
                 run});
      (void)Run("adafactor_norm",
                {AdafactorAttributes(),
                 {Random({2, 9, 35}, 1), Absolute(Random({2, 9}, 2)),
                  Absolute(Random({2, 35}, 3)), Scalar(0.5)},
                 {Scalar(7)},
                 accumulate,
                 {},
                 run});
    }
    (void)Run(
        "adafactor_step",
        {AdafactorAttributes(),
         {Random({2, 9, 35}, 1), Absolute(Random({2, 9}, 2)),
          Absolute(Random({2, 35}, 3)), Scalar(30), Scalar(900), Scalar(0.5)},
         {Random({2, 9, 35}, 5)},
         false,
         {},
         run});
  }
}

// Several blocks of elements each.
TEST_F(CudaKernelCalls, AdafactorOfALargeMatrix) {
  const HostTensor g = Random({1, 301, 913}, 1);
  const HostTensor factors = Absolute(Random({1, 301}, 2));
  const HostTensor columns = Absolute(Random({1, 913}, 3));
  (void)Run(
      "adafactor_norm",
      {AdafactorAttributes(), {g, factors, columns, Scalar(0.5)}, {Scalar(0)}});
  (void)Run("adafactor_step",
            {AdafactorAttributes(),
             {g, factors, columns, Scalar(30), Scalar(9e5), Scalar(0.5)},
             {Random({1, 301, 913}, 5)}});
}

// The same of many short rows, and of many matrices.
TEST_F(CudaKernelCalls, AdafactorOfARunOfManyMatrices) {
  for (const Shape& shape : {Shape{40, 3, 5}, Shape{10, 2, 150}}) {
    (void)Run("adafactor_sums",
              {{},
               {Random(shape, 1), Scalar(0.5)},
               {Random({shape[0], shape[1]}, 2),
                Random({shape[0], shape[2]}, 3), Random({shape[0]}, 4)},
               true,
               {},
               Range{101, 497}});
  }
}

// A block of all rows that a rank has, and of its tile: offsets differ.
TEST_F(CudaKernelCalls, AdafactorOfATile) {
  const HostTensor whole = Random({1, 12, 21}, 1);
  const HostTensor tile = whole.Part(1, 4, 9);
  const Tensors sums =
      Run("adafactor_sums", {{},
                             {tile, Scalar(1)},
                             {HostTensor({1, 12}, DType::kFloat32),
                              HostTensor({1, 21}, DType::kFloat32),
                              HostTensor({1}, DType::kFloat32)}});
  EXPECT_EQ(sums[0].At(3), 0);
  EXPECT_GT(sums[0].At(4), 0);
  EXPECT_GT(sums[0].At(8), 0);
  EXPECT_EQ(sums[0].At(9), 0);
}

// 7 steps, of which 3 were skipped; and a step that is skipped.
TEST_F(CudaKernelCalls, AdafactorSkipsSteps) {
  const HostTensor scale = Of({65536, 0, 3});
  for (const double clip : {0.5, -1.0}) {
    const Tensors moments = {
        Absolute(Random({2, 9}, 2)), Absolute(Random({2, 35}, 3)),
        Absolute(Random({2}, 4)), Absolute(Random({2, 9}, 5))};
    const Tensors factors =
        Run("adafactor_factors",
            {AdafactorAttributes(),
             {Absolute(Random({2, 9}, 6)), Absolute(Random({2, 35}, 7)),
              Absolute(Random({2}, 8)), Scalar(clip), scale},
             moments});
    const HostTensor v = Absolute(Random({99}, 2));
    const Tensors vector =
        Run("adafactor_vector_norm", {AdafactorAttributes(),
                                      {Random({99}, 1), Scalar(clip), scale},
                                      {v, Scalar(0)}});
    const HostTensor start = Random({99}, 3);
    const Tensors moved =
        Run("adafactor_vector_step",
            {AdafactorAttributes(),
             {Random({99}, 1), v, Scalar(30), Scalar(120), Scalar(clip), scale},
             {start}});
    EXPECT_EQ(factors[0].SameBits(moments[0]), clip < 0);
    EXPECT_EQ(vector[0].SameBits(v), clip < 0);
    EXPECT_EQ(moved[0].SameBits(start), clip < 0);
  }
}

TEST_F(CudaKernelCalls, ClippingKeepsTheLossScale) {
  const auto clip = [&](double square, const HostTensor& scale, double limit) {
    return Run(
        "clip_coefficient",
        {{{"clip", limit}}, {Scalar(square), scale}, {Scalar(0), scale}});
  };
  // The norm is 8 of gradients that are 4 times too large: 2, clipped to 0.5.
  const Tensors clipped = clip(64, Of({4, 7, 1}), 0.5);
  EXPECT_NEAR(clipped[0].At(0), 0.25 / 4, 1e-6);
  EXPECT_EQ(clipped[1].At(1), 8);
  // The last of the good steps that double it.
  EXPECT_EQ(clip(64, Of({4, 1999, 1}), 0)[1].Values(),
            (std::vector<double>{8, 0, 1}));
  // Where that is infinite the scale stays.
  EXPECT_EQ(clip(64, Of({0x1p127, 1999, 1}), 0)[1].Values(),
            (std::vector<double>{0x1p127, 0, 1}));
  const Tensors skipped = clip(INFINITY, Of({4, 7, 1}), 0.5);
  EXPECT_EQ(skipped[0].At(0), -1);
  EXPECT_EQ(skipped[1].Values(), (std::vector<double>{2, 0, 2}));
  EXPECT_EQ(clip(NAN, Of({1, 7, 1}), 0.5)[1].At(0), 1);
}

TEST_F(CudaKernelCalls, LossScalesMultiplyGradients) {
  HostTensor labels({2, 3}, DType::kInt32, {0, 4, -1, 2, 2, 1});
  HostTensor lse({2, 3}, DType::kFloat32, {1, 2, 1, 2, 1, 2});
  const HostTensor loss_scale = Of({1024, 0, 0});
  const Tensors logits =
      Run("cross_entropy_dx",
          {{},
           {Random({2, 3, 5}, 1), labels, Scalar(5), lse, loss_scale},
           {HostTensor({2, 3, 5}, DType::kFloat32)}});
  EXPECT_GT(std::abs(logits[0].At(0)), 1);
  (void)Run("moe_balance_dx", {{{"coefficient", 0.3},
                                {"group_best", 1},
                                {"groups", 1},
                                {"sigmoid", 0},
                                {"top_groups", 1},
                                {"top_k", 2}},
                               {Random({2, 3, 5}, 1), loss_scale},
                               {HostTensor({2, 3, 5}, DType::kFloat32)}});
}

// Scores that fp32 has as zero are divided by a sum that is none.
TEST_F(CudaKernelCalls, ScoresOfNothingMayBeRenormalised) {
  const HostTensor logits({1, 1, 4}, DType::kFloat32,
                          {-1000, -2000, -1000, -1000});
  const std::vector<Attribute> attributes = {
      {"capacity", 4}, {"group_best", 1}, {"groups", 1},     {"renormalise", 1},
      {"scale", 2.5},  {"sigmoid", 1},    {"top_groups", 1}, {"top_k", 2}};
  const HostTensor of_choices({1, 1, 2}, DType::kFloat32);
  const HostTensor slots({1, 1, 2}, DType::kInt32);
  EXPECT_EQ(
      Run("moe_gate", {attributes, {logits}, {of_choices, slots}})[0].Values(),
      (std::vector<double>{0, 0}));
  const HostTensor dweights({1, 1, 2}, DType::kFloat32, {1, -2});
  EXPECT_EQ(Run("moe_gate_dx", {attributes,
                                {dweights, logits},
                                {HostTensor({1, 1, 4}, DType::kFloat32)}})[0]
                .Values(),
            (std::vector<double>{0, 0, 0, 0}));
}

// Nothing is counted in a shard without labels; its loss is 0, not 0 / 0.
TEST_F(CudaKernelCalls, NoLabelIsCounted) {
  HostTensor labels({1, 2}, DType::kInt32, {-1, -1});
  HostTensor states({1, 1, 2, 3}, DType::kFloat32, {1, 2, 0, 3, 4, 0});
  const Tensors loss =
      Run("cross_entropy", {{},
                            {Random({1, 2, 5}, 1), labels, Scalar(0), states},
                            {Scalar(7), HostTensor({1, 2}, DType::kFloat32)}});
  EXPECT_EQ(loss[0].At(0), 0);
}

// A masked vocabulary (padding) is minus infinity; here but for one logit.
TEST_F(CudaKernelCalls, LogitsOfMinusInfinity) {
  HostTensor logits({1, 1, 20}, DType::kFloat32,
                    std::vector<double>(20, -INFINITY));
  logits.Set(13, 1);
  HostTensor labels({1, 1}, DType::kInt32, {13});
  const Tensors state =
      Run("cross_entropy.state", {{},
                                  {logits, labels, Scalar(1)},
                                  {HostTensor({1, 1, 3}, DType::kFloat32)}});
  EXPECT_EQ(state[0].Values(), (std::vector<double>{1, 1, 1}));
}

// Of logits 1, 2, -inf, -inf in shards of two.
TEST_F(CudaKernelCalls, AWholeShardOfLogitsOfMinusInfinity) {
  const HostTensor logits({1, 1, 4}, DType::kFloat32,
                          {1, 2, -INFINITY, -INFINITY});
  const HostTensor labels({1, 1}, DType::kInt32, {0});
  std::vector<double> states;
  for (const int64_t first : {0, 2}) {
    const Tensors state =
        Run("cross_entropy.state",
            {{},
             {logits.Part(2, first, first + 2), labels, Scalar(1)},
             {HostTensor({1, 1, 3}, DType::kFloat32)}});
    const std::vector<double> values = state[0].Values();
    states.insert(states.end(), values.begin(), values.end());
  }
  EXPECT_EQ(states[3], -INFINITY);
  EXPECT_EQ(states[4], 0);
  const HostTensor both({2, 1, 1, 3}, DType::kFloat32, states);
  const Tensors loss =
      Run("cross_entropy", {{},
                            {logits, labels, Scalar(1), both},
                            {Scalar(0), HostTensor({1, 1}, DType::kFloat32)}});
  EXPECT_NEAR(loss[0].At(0), std::log(1 + std::exp(1)), 1e-6);
  EXPECT_NEAR(loss[1].At(0), 1 + std::log(1 + std::exp(1)), 1e-6);
}

TEST_F(CudaKernelCalls, EmptyTensors) {
  const HostTensor nothing({0, 7}, DType::kFloat32);
  const HostTensor scale = Random({7}, 1);
  const HostTensor none({0}, DType::kFloat32);
  (void)Run("gelu", {{}, {nothing}, {nothing}});
  (void)Run("rms_norm",
            {{{"epsilon", 1e-5}}, {nothing, scale}, {nothing, none}});
  EXPECT_EQ(
      Run("rms_norm_dw", {{}, {nothing, nothing, none}, {scale}})[0].Values(),
      std::vector<double>(7));
  EXPECT_EQ(Run("square_sum", {{}, {nothing}, {Scalar(3)}})[0].At(0), 0);
}

TEST_F(CudaKernelCalls, TooLittleWorkspaceIsAnError) {
  CudaQueue& queue = device_->queue();
  queue.workspace_bytes = 16;
  HostTensor x({4, 7}, DType::kFloat32);
  const std::vector<LocalTensor> operands = {x.Local(), x.Local(), x.Local()};
  const std::vector<LocalTensor> results = {x.Local()};
  FindCudaKernel("rms_norm_dw")
      .value()
      ->run({.attributes = {},
             .operands = operands,
             .results = results,
             .queue = &queue});
  EXPECT_THAT(queue.error, ::testing::HasSubstr("bytes of workspace"));
}

// The sums are the same bits in pieces, of some rows, and of some places of one
// row, as at once.
TEST_F(CudaKernelCalls, SumsByIdInPiecesOfTheWorkspace) {
  CudaQueue& queue = device_->queue();
  const int64_t all = queue.workspace_bytes;
  const IndexRule rule = IndexRule::Parse("bth,bt->bvh").value();
  HostTensor ids({2, 30}, DType::kInt32);
  Rng rng(3);
  for (int64_t i = 0; i < ids.elements(); ++i) {
    ids.Set(i, static_cast<double>(rng.Below(9)) - 1);
  }
  const Tensors operands = {Random({2, 30, 5}, 1), ids};
  const std::vector<LocalTensor> in = {operands[0].Local(), ids.Local()};
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const bool accumulate : {false, true}) {
      const auto sum = [&](int64_t workspace_bytes, const RunKernel& run) {
        queue.workspace_bytes = workspace_bytes;
        HostTensor y = Random({2, 7, 5}, 2).As(dtype);
        const std::vector<LocalTensor> out = {y.Local()};
        run("scatter_add", {.rule = &rule,
                            .attributes = {},
                            .operands = in,
                            .results = out,
                            .accumulate = accumulate});
        return y;
      };
      const auto on_device = [&](std::string_view kernel,
                                 const KernelCall& call) {
        RunOnDevice(*device_, kernel, call, /*in_place=*/false);
      };
      const HostTensor at_once = sum(all, on_device);
      EXPECT_LE(Difference({sum(all, RunCpuKernel)}, {at_once}), 1e-6);
      // Rows of 7 places: three rows, one, and a half of one.
      for (const int64_t sums : {23, 7, 4}) {
        EXPECT_TRUE(sum(sums * 4, on_device).SameBits(at_once)) << sums;
      }
    }
  }
  queue.workspace_bytes = all;
}

// What is dropped goes by the place in the sequence's own order, of the whole
// and of a block; of positions of whole vectors and of others.
TEST_F(CudaKernelCalls, DropoutOfAReorderedSequence) {
  constexpr int kRanks = 2;
  constexpr int64_t kLength = 12;
  const IndexRule rule = IndexRule::Parse("bsh->bsh").value();
  const std::vector<Attribute> attributes = {{"probability", 0.3}, {"salt", 5}};
  const auto drop = [&](const HostTensor& x, int zigzag, bool on_cpu) {
    HostTensor y = x;
    const LocalTensor in = x.Local();
    const LocalTensor out = y.Local();
    const KernelCall call = {.rule = &rule,
                             .attributes = attributes,
                             .operands = {&in, 1},
                             .results = {&out, 1},
                             .zigzag = zigzag};
    if (on_cpu) {
      RunCpuKernel("dropout", call);
    } else {
      RunOnDevice(*device_, "dropout", call, /*in_place=*/true);
    }
    return y;
  };
  for (const int64_t width : {16, 9}) {
    const HostTensor x = Random({2, kLength, width}, 1);
    const HostTensor whole = drop(x, kRanks, /*on_cpu=*/false);
    EXPECT_TRUE(whole.SameBits(drop(x, kRanks, /*on_cpu=*/true))) << width;
    const HostTensor part = x.Part(1, 3, 9);
    EXPECT_TRUE(drop(part, kRanks, false).SameBits(drop(part, kRanks, true)))
        << width;
    const HostTensor ordered = drop(x, 0, /*on_cpu=*/false);
    for (int64_t i = 0; i < x.elements(); ++i) {
      const int64_t at = i / width % kLength;
      const int64_t place =
          i + (ZigzagPosition(kLength, kRanks, at) - at) * width;
      EXPECT_EQ(whole.At(i) == 0, ordered.At(place) == 0) << width << " " << i;
    }
  }
}

// The same from the device's memory as by value, for all kernels that depend on
// the step.
TEST_F(CudaKernelCalls, StepNumbersFromMemory) {
  const StepNumbers numbers{6, 0.01};
  struct One {
    std::string_view kernel;
    std::vector<Attribute> attributes;  // without the learning rate
    Tensors operands;
    Tensors results;
    bool has_rate = true;
  };
  const HostTensor g = Random({100}, 1);
  const HostTensor matrix = Random({2, 9, 5}, 1);
  const HostTensor v = Absolute(Random({100}, 4));
  std::vector<Attribute> factored = AdafactorAttributes();
  std::erase_if(factored, [](const Attribute& a) { return a.name == "lr"; });
  const std::vector<One> all = {
      {"adamw",
       {{"beta1", 0.9},
        {"beta2", 0.95},
        {"epsilon", 1e-8},
        {"weight_decay", 0.1}},
       {g, Scalar(0.5)},
       {Random({100}, 2), Random({100}, 3), v}},
      {"momentum",
       {{"beta1", 0.9}, {"weight_decay", 0.1}},
       {g, Scalar(0.5)},
       {g, v}},
      {"sgd", {{"weight_decay", 0.1}}, {g, Scalar(0.5)}, {g}},
      {"dropout",
       {{"probability", 0.3}, {"salt", 5}},
       {g},
       {HostTensor({100}, DType::kFloat32)},
       false},
      {"adafactor_factors",
       factored,
       {Absolute(Random({2, 9}, 6)), Absolute(Random({2, 5}, 7)),
        Absolute(Random({2}, 8)), Scalar(0.5)},
       {Absolute(Random({2, 9}, 2)), Absolute(Random({2, 5}, 3)),
        Absolute(Random({2}, 4)), Absolute(Random({2, 9}, 5))}},
      {"adafactor_step",
       factored,
       {matrix, Absolute(Random({2, 9}, 2)), Absolute(Random({2, 5}, 3)),
        Scalar(30), Scalar(900), Scalar(0.5)},
       {matrix}},
  };
  for (const One& one : all) {
    std::vector<LocalTensor> operands;
    for (const HostTensor& tensor : one.operands) {
      operands.push_back(tensor.Local());
    }
    const auto run = [&](Tensors results, int64_t step, double rate,
                         const StepNumbers* there, bool on_cpu) {
      std::vector<LocalTensor> locals;
      for (const HostTensor& tensor : results) locals.push_back(tensor.Local());
      std::vector<Attribute> attributes = one.attributes;
      if (one.has_rate) attributes.push_back({"lr", rate});
      const IndexRule rule;  // without a sequence
      const KernelCall call = {.rule = &rule,
                               .attributes = attributes,
                               .operands = operands,
                               .results = locals,
                               .step = step,
                               .numbers = there};
      if (on_cpu) {
        RunCpuKernel(one.kernel, call);
      } else {
        RunOnDevice(*device_, one.kernel, call, /*in_place=*/true);
      }
      return results;
    };
    for (const bool on_cpu : {false, true}) {
      const Tensors expected = run(one.results, 6, 0.01, nullptr, on_cpu);
      const Tensors actual = run(one.results, 2, 0.5, &numbers, on_cpu);
      const Tensors other = run(one.results, 2, 0.5, nullptr, on_cpu);
      bool differs = false;
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(actual[i].SameBits(expected[i])) << one.kernel;
        differs = differs || !other[i].SameBits(expected[i]);
      }
      EXPECT_TRUE(differs) << one.kernel << " depends on neither";
    }
  }
}

}  // namespace
}  // namespace tessera
