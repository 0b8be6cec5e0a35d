// CPU kernels against numbers worked by hand.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

#include "planner/plan/transfer.h"
#include "runtime/kernels/fill.h"
#include "runtime/kernels/kernel.h"
#include "runtime/kernels/relative_bias.h"
#include "tests/support/host_tensor.h"

namespace tessera {
namespace {

using ::testing::DoubleNear;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Pointwise;

constexpr DType kF64 = DType::kFloat64;
constexpr DType kF32 = DType::kFloat32;
constexpr DType kI32 = DType::kInt32;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

HostTensor F64(Shape shape, const std::vector<double>& values) {
  return HostTensor(std::move(shape), kF64, values);
}
HostTensor I32(Shape shape, const std::vector<double>& values) {
  return HostTensor(std::move(shape), kI32, values);
}
HostTensor Scalar(double value) {
  return F64({}, {value});
}

struct Options {
  std::vector<Attribute> attributes = {};
  std::string_view rule = "->";
  bool accumulate = false;
  uint64_t seed = 1;
  int64_t step = 0;
  std::optional<Range> run = {};
};

void RunKernel(std::string_view kernel,
               const std::vector<LocalTensor>& operands,
               const std::vector<LocalTensor>& results,
               const Options& options = {}) {
  const IndexRule rule = IndexRule::Parse(options.rule).value();
  FindCpuKernel(kernel).value()->run({.rule = &rule,
                                      .attributes = options.attributes,
                                      .operands = operands,
                                      .results = results,
                                      .accumulate = options.accumulate,
                                      .run = options.run,
                                      .seed = options.seed,
                                      .step = options.step});
}

// The single result, of the given shape, of a call in fp64.
std::vector<double> Compute(std::string_view kernel,
                            const std::vector<HostTensor>& operands,
                            Shape shape, const Options& options = {}) {
  std::vector<LocalTensor> locals;
  for (const HostTensor& operand : operands) locals.push_back(operand.Local());
  const HostTensor result(std::move(shape), kF64);
  RunKernel(kernel, locals, {result.Local()}, options);
  return result.Values();
}

auto Near(std::vector<double> values, double tolerance = 1e-14) {
  return Pointwise(::testing::DoubleNear(tolerance), std::move(values));
}

TEST(Linear, ByHand) {
  const HostTensor x = F64({1, 1, 2}, {1, 2});
  const HostTensor w = F64({2, 2}, {3, 4, 5, 6});
  const HostTensor bias = F64({2}, {10, 20});
  // 1*3 + 2*4 + 10 = 21, 1*5 + 2*6 + 20 = 37.
  const Options options = {.rule = "bsi,oi+o->bso"};
  EXPECT_THAT(Compute("linear", {x, w, bias}, {1, 1, 2}, options),
              ElementsAre(21, 37));

  // A bias that is masked to zero.
  LocalTensor masked = bias.Local();
  masked.data = nullptr;
  const HostTensor y({1, 1, 2}, kF64);
  RunKernel("linear", {x.Local(), w.Local(), masked}, {y.Local()}, options);
  EXPECT_THAT(y.Values(), ElementsAre(11, 17));
}

TEST(Embedding, RowsOutOfTheShardAreZero) {
  const HostTensor table = F64({4, 2}, {0, 1, 10, 11, 20, 21, 30, 31});
  const HostTensor shard = table.Part(0, 1, 3);  // rows 1 and 2
  const HostTensor ids = I32({1, 4}, {2, 0, 3, 1});
  EXPECT_THAT(Compute("embedding", {ids, shard}, {1, 4, 2}),
              ElementsAre(20, 21, 0, 0, 0, 0, 10, 11));
}

TEST(Embedding, GradientAddsTokensOfOneId) {
  const HostTensor dy = F64({1, 3, 2}, {1, 2, 3, 4, 5, 6});
  const HostTensor ids = I32({1, 3}, {1, 0, 1});
  // Row 1: (1, 2) + (5, 6).
  EXPECT_THAT(Compute("embedding_dw", {dy, ids}, {2, 2}),
              ElementsAre(3, 4, 6, 8));
}

TEST(LayerNorm, OneToFour) {
  const HostTensor x = F64({1, 1, 4}, {1, 2, 3, 4});
  const HostTensor scale = F64({4}, {1, 1, 2, 2});
  const HostTensor shift = F64({4}, {0, 0, 0, 1});
  const HostTensor y({1, 1, 4}, kF64), mean({1, 1}, kF64), rstd({1, 1}, kF64);
  RunKernel("layer_norm", {x.Local(), scale.Local(), shift.Local()},
            {y.Local(), mean.Local(), rstd.Local()},
            {.attributes = {{"epsilon", 0}}});
  // mean 2.5, variance (2.25 + 0.25 + 0.25 + 2.25) / 4 = 1.25.
  const double r = 1 / std::sqrt(1.25);
  EXPECT_DOUBLE_EQ(mean.At(0), 2.5);
  EXPECT_DOUBLE_EQ(rstd.At(0), r);
  EXPECT_THAT(y.Values(),
              Near({-1.5 * r, -0.5 * r, 2 * 0.5 * r, 2 * 1.5 * r + 1}));
}

TEST(LayerNorm, EpsilonIsAddedToTheVariance) {
  const HostTensor x = F64({1, 1, 2}, {3, 3});
  const HostTensor ones = F64({2}, {1, 1});
  const HostTensor y({1, 1, 2}, kF64), mean({1, 1}, kF64), rstd({1, 1}, kF64);
  RunKernel("layer_norm", {x.Local(), ones.Local(), ones.Local()},
            {y.Local(), mean.Local(), rstd.Local()},
            {.attributes = {{"epsilon", 0.25}}});
  EXPECT_DOUBLE_EQ(rstd.At(0), 2);  // 1 / sqrt(0 + 0.25)
}

TEST(RmsNorm, ByHand) {
  const HostTensor x = F64({1, 1, 4}, {1, 2, 2, 4});
  const HostTensor scale = F64({4}, {1, 1, 1, 10});
  const HostTensor y({1, 1, 4}, kF64), rrms({1, 1}, kF64);
  RunKernel("rms_norm", {x.Local(), scale.Local()}, {y.Local(), rrms.Local()},
            {.attributes = {{"epsilon", 0}}});
  // (1 + 4 + 4 + 16) / 4 = 6.25 = 2.5^2.
  EXPECT_DOUBLE_EQ(rrms.At(0), 0.4);
  EXPECT_THAT(y.Values(), Near({0.4, 0.8, 0.8, 16}));
}

TEST(Rotary, PositionOne) {
  const HostTensor x = F64({1, 1, 1, 4}, {1, 0, 0, 1});
  const HostTensor position = I32({1, 1}, {1});
  // x[0], x[2] turn by 100^0 = 1; x[1], x[3] by 100^(-2/4) = 0.1.
  EXPECT_THAT(Compute("rotary", {x, position}, {1, 1, 1, 4},
                      {.attributes = {{"fraction", 1}, {"theta", 100}}}),
              Near({std::cos(1), -std::sin(0.1), std::sin(1), std::cos(0.1)}));
  // Half of the features: x[0], x[1] turn by 1, the others pass.
  EXPECT_THAT(Compute("rotary", {x, position}, {1, 1, 1, 4},
                      {.attributes = {{"fraction", 0.5}, {"theta", 100}}}),
              Near({std::cos(1), std::sin(1), 0, 1}));
}

TEST(Rotary, PositionZeroTurnsNothing) {
  const HostTensor x = F64({1, 1, 1, 4}, {1, 2, 3, 4});
  EXPECT_THAT(Compute("rotary", {x, I32({1, 1}, {0})}, {1, 1, 1, 4},
                      {.attributes = {{"fraction", 1}, {"theta", 100}}}),
              ElementsAre(1, 2, 3, 4));
}

// Two tokens, one head of width 1: q = (1, 1), k = (0, ln 3), v = (1, 5).
struct TwoTokens {
  HostTensor q = F64({1, 2, 1, 1, 1}, {1, 1});
  HostTensor k = F64({1, 2, 1, 1}, {0, std::log(3)});
  HostTensor v = F64({1, 2, 1, 1}, {1, 5});
  HostTensor o = HostTensor({1, 2, 1, 1, 1}, kF64);
  HostTensor lse = HostTensor({1, 2, 1, 1}, kF64);

  void Attend(const std::vector<double>& query_positions, double window) {
    const HostTensor queries = I32({1, 2}, query_positions);
    const HostTensor keys = I32({1, 2}, {0, 1});
    RunKernel("attention",
              {q.Local(), k.Local(), v.Local(), queries.Local(), keys.Local()},
              {o.Local(), lse.Local()},
              {.attributes = {{"scale", 1}, {"window", window}}});
  }

  void AttendBothWays(const std::vector<double>& key_positions, double window) {
    const HostTensor queries = I32({1, 2}, {0, 1});
    const HostTensor keys = I32({1, 2}, key_positions);
    RunKernel(
        "attention_bidirectional",
        {q.Local(), k.Local(), v.Local(), queries.Local(), keys.Local()},
        {o.Local(), lse.Local()},
        {.attributes = {{"causal", 0}, {"scale", 1}, {"window", window}}});
  }
};

TEST(Attention, Causal) {
  TwoTokens t;
  t.Attend({0, 1}, 0);
  // Token 0 sees key 0. Token 1 weighs e^0 : e^ln3 = 1 : 3, and
  // 1/4 * 1 + 3/4 * 5 = 4.
  EXPECT_THAT(t.o.Values(), Near({1, 4}));
  EXPECT_THAT(t.lse.Values(), Near({0, std::log(4)}));
}

TEST(Attention, PositionsMaskNotIndices) {
  TwoTokens t;
  t.Attend({1, 0}, 0);
  EXPECT_THAT(t.o.Values(), Near({4, 1}));
}

TEST(Attention, Window) {
  TwoTokens t;
  t.Attend({0, 1}, 1);  // each token sees itself only
  EXPECT_THAT(t.o.Values(), Near({1, 5}));
  EXPECT_THAT(t.lse.Values(), Near({0, std::log(3)}));
}

// Both tokens weigh the keys 1 : 3, but for keys at negative positions and,
// with a window, those that are as far away.
TEST(Attention, Bidirectional) {
  TwoTokens t;
  t.AttendBothWays({0, 1}, 0);
  EXPECT_THAT(t.o.Values(), Near({4, 4}));
  t.AttendBothWays({0, -1}, 0);
  EXPECT_THAT(t.o.Values(), Near({1, 1}));
  t.AttendBothWays({0, 1}, 2);
  EXPECT_THAT(t.o.Values(), Near({4, 4}));
  t.AttendBothWays({0, 2}, 2);
  EXPECT_THAT(t.o.Values(), Near({1, 4}));
  t.AttendBothWays({-1, -1}, 0);
  EXPECT_THAT(t.o.Values(), Near({0, 0}));
}

// Of T5's 32 buckets 16 are of each side, 8 of them of one distance each; from
// 8 on there are 8 for the powers of 2 up to 128, two for each: distance d has
// 8 + 2 log2(d / 8), rounded down, and at most 15.
TEST(Attention, BucketsOfDistances) {
  const std::vector<Attribute> attributes = {{"causal", 0},
                                             {"max_distance", 128}};
  KernelCall call;
  call.attributes = attributes;
  const RelativeBuckets both = RelativeBucketsOf(call, 32);
  const std::pair<int32_t, int32_t> expected[] = {
      {0, 0},   {1, 1},   {7, 7},   {8, 8},    {11, 8},   {12, 9},   {16, 10},
      {23, 11}, {32, 12}, {64, 14}, {127, 15}, {128, 15}, {5000, 15}};
  for (const auto& [distance, bucket] : expected) {
    EXPECT_EQ(both.Of(distance, 0), bucket) << distance;
    if (distance == 0) continue;
    EXPECT_EQ(both.Of(0, distance), 16 + bucket) << distance;
  }
  // Causal: 16 of one distance each, 16 for 16 to 128, a third of 16 for each
  // power of 2; keys behind the query, which it does not see, are as near ones.
  const std::vector<Attribute> causal = {{"causal", 1}, {"max_distance", 128}};
  call.attributes = causal;
  const RelativeBuckets before = RelativeBucketsOf(call, 32);
  EXPECT_EQ(before.Of(15, 0), 15);
  EXPECT_EQ(before.Of(16, 0), 16);
  EXPECT_EQ(before.Of(33, 0), 21);  // 16 + 16 log(33/16) / log(8) = 21.57
  EXPECT_EQ(before.Of(127, 0), 31);
  EXPECT_EQ(before.Of(0, 5), 0);
}

TEST(Attention, QueryThatSeesNoKey) {
  TwoTokens t;
  t.Attend({-1, 0}, 0);
  EXPECT_THAT(t.o.Values(), Near({0, 1}));
  EXPECT_EQ(t.lse.At(0), -kInfinity);

  // It moves nothing: token 1 sees key 0 alone, with weight 1, so that dv[0]
  // is its dy and the rest is zero.
  const HostTensor dy = F64({1, 2, 1, 1, 1}, {7, 2});
  const HostTensor queries = I32({1, 2}, {-1, 0}), keys = I32({1, 2}, {0, 1});
  const HostTensor dq({1, 2, 1, 1, 1}, kF64), dk({1, 2, 1, 1}, kF64),
      dv({1, 2, 1, 1}, kF64);
  RunKernel("attention_dqkv",
            {dy.Local(), t.q.Local(), t.k.Local(), t.v.Local(), queries.Local(),
             keys.Local(), t.o.Local(), t.lse.Local()},
            {dq.Local(), dk.Local(), dv.Local()},
            {.attributes = {{"scale", 1}, {"window", 0}}});
  EXPECT_THAT(dq.Values(), Near({0, 0}));
  EXPECT_THAT(dk.Values(), Near({0, 0}));
  EXPECT_THAT(dv.Values(), Near({2, 0}));
}

// Blocks of keys in any order, merged, are one attention over all of them: with
// blocks that some query does not see at all, first, between and last.
TEST(Attention, MergesBlocksOfKeys) {
  constexpr int64_t kQueries = 4, kKeys = 7;
  HostTensor q({1, kQueries, 1, 2, 2}, kF64), k({1, kKeys, 1, 2}, kF64),
      v({1, kKeys, 1, 2}, kF64);
  for (const HostTensor* tensor : {&q, &k, &v}) {
    for (int64_t i = 0; i < tensor->elements(); ++i) {
      const_cast<HostTensor*>(tensor)->Set(
          i, std::sin(static_cast<double>(3 * i + tensor->elements())));
    }
  }
  const HostTensor queries = I32({1, kQueries}, {6, 0, 3, 1});
  const HostTensor keys = I32({1, kKeys}, {5, 6, 0, 4, 1, 3, 2});
  const std::vector<std::pair<int64_t, int64_t>> blocks = {
      {0, 2}, {4, 7}, {2, 3}, {3, 4}};
  for (double window : {0, 2}) {
    const Options options = {.attributes = {{"scale", 2}, {"window", window}}};
    const HostTensor o({1, kQueries, 1, 2, 2}, kF64),
        lse({1, kQueries, 1, 2}, kF64);
    RunKernel("attention",
              {q.Local(), k.Local(), v.Local(), queries.Local(), keys.Local()},
              {o.Local(), lse.Local()}, options);
    const HostTensor merged({1, kQueries, 1, 2, 2}, kF64),
        merged_lse({1, kQueries, 1, 2}, kF64);
    for (const auto& [begin, end] : blocks) {
      Options step = options;
      step.accumulate = begin != blocks[0].first;
      const HostTensor key = k.Part(1, begin, end);
      const HostTensor value = v.Part(1, begin, end);
      const HostTensor position = keys.Part(1, begin, end);
      RunKernel("attention",
                {q.Local(), key.Local(), value.Local(), queries.Local(),
                 position.Local()},
                {merged.Local(), merged_lse.Local()}, step);
    }
    EXPECT_THAT(merged.Values(), Near(o.Values(), 1e-14)) << window;
    EXPECT_THAT(merged_lse.Values(), Near(lse.Values(), 1e-14)) << window;
  }
}

TEST(Elementwise, ValuesAtOne) {
  const HostTensor one = F64({1}, {1});
  // 0.5 (1 + tanh(0.7978845608 * 1.044715)) = 0.8411919906.
  EXPECT_THAT(Compute("gelu", {one}, {1}), Near({0.8411919906082768}));
  // The normal distribution at 1, and 1 / (1 + 1/e).
  EXPECT_THAT(Compute("gelu_erf", {one}, {1}), Near({0.8413447460685429}));
  EXPECT_THAT(Compute("silu", {one}, {1}), Near({0.7310585786300049}));
}

// -1 (-1/6 + 1/2) = -1/3; the slope there is -1/3 + 1/2. PyTorch's at the
// bends.
TEST(Elementwise, HardFunctions) {
  const HostTensor x = F64({5}, {-4, -3, -1, 3, 4});
  const HostTensor dy = F64({5}, {1, 1, 1, 1, 1});
  EXPECT_THAT(Compute("hard_sigmoid", {x}, {5}), Near({0, 0, 1.0 / 3, 1, 1}));
  EXPECT_THAT(Compute("hard_sigmoid_dx", {dy, x}, {5}),
              Near({0, 0, 1.0 / 6, 0, 0}));
  EXPECT_THAT(Compute("hard_swish", {x}, {5}), Near({0, 0, -1.0 / 3, 3, 4}));
  EXPECT_THAT(Compute("hard_swish_dx", {dy, x}, {5}),
              Near({0, 0, 1.0 / 6, 1, 1}));
}

TEST(Elementwise, FarFromZero) {
  const HostTensor x = F64({2}, {-1000, 1000});
  const HostTensor dy = F64({2}, {1, 1});
  for (DType dtype : {kF32, kF64}) {
    for (std::string op : {"gelu", "gelu_erf", "silu"}) {
      const HostTensor a = x.As(dtype), one = dy.As(dtype), y({2}, dtype);
      RunKernel(op, {a.Local()}, {y.Local()});
      EXPECT_THAT(y.Values(), Near({0, 1000})) << op;
      RunKernel(op + "_dx", {one.Local(), a.Local()}, {y.Local()});
      EXPECT_THAT(y.Values(), Near({0, 1})) << op;
    }
  }
}

TEST(Elementwise, Sums) {
  const HostTensor a = F64({2}, {1, 2}), b = F64({2}, {10, 20});
  EXPECT_THAT(Compute("add", {a, b}, {2}), ElementsAre(11, 22));
  EXPECT_THAT(Compute("sum", {a, b, b}, {2}), ElementsAre(21, 42));
  EXPECT_THAT(Compute("multiply", {a, b}, {2}, {.rule = "b,b->b"}),
              ElementsAre(10, 40));
}

TEST(Broadcast, ByHand) {
  const HostTensor a = F64({2, 2}, {1, 2, 3, 4});
  const HostTensor b = F64({2}, {10, 20});
  EXPECT_THAT(Compute("broadcast_add", {a, b}, {2, 2}, {.rule = "sb,b->sb"}),
              ElementsAre(11, 22, 13, 24));
  EXPECT_THAT(Compute("subtract", {b, a}, {2, 2}, {.rule = "s,sb->sb"}),
              ElementsAre(9, 8, 17, 16));
  // The gradient of b by dy = a: sums over s.
  EXPECT_THAT(Compute("multiply", {a, a}, {2}, {.rule = "sb,sb->b"}),
              ElementsAre(1 + 9, 4 + 16));
}

// Rows (1, 2), (3, 4) turned, and their mean.
TEST(Reduction, ByHand) {
  const HostTensor x = F64({2, 2}, {1, 2, 3, 4});
  EXPECT_THAT(Compute("transpose", {x}, {2, 2}, {.rule = "sb->bs"}),
              ElementsAre(1, 3, 2, 4));
  EXPECT_THAT(Compute("reduce_mean", {x}, {2}, {.rule = "sb->s"}),
              ElementsAre(1.5, 3.5));
  EXPECT_THAT(Compute("reduce_max", {x}, {2}, {.rule = "s!b->b"}),
              ElementsAre(3, 4));
}

TEST(Dropout, KeepsItsShareAndScalesIt) {
  constexpr int64_t kCount = 10000;
  HostTensor x({kCount}, kF64);
  for (int64_t i = 0; i < kCount; ++i) x.Set(i, 3);
  const auto dropped = [&](double probability, double salt, int64_t step) {
    return Compute(
        "dropout", {x}, {kCount},
        {.attributes = {{"probability", probability}, {"salt", salt}},
         .step = step});
  };
  const std::vector<double> y = dropped(0.25, 0, 0);
  int64_t kept = 0;
  for (double value : y) {
    if (value == 0) continue;
    EXPECT_DOUBLE_EQ(value, 4);  // 3 / 0.75
    ++kept;
  }
  // 7500 expected, deviation sqrt(10000 * 0.25 * 0.75) = 43; five of them.
  EXPECT_NEAR(kept, 7500, 217);
  EXPECT_EQ(y, dropped(0.25, 0, 0));
  EXPECT_NE(y, dropped(0.25, 0, 1));
  EXPECT_NE(y, dropped(0.25, 1, 0));
  EXPECT_THAT(dropped(0, 0, 0), Each(3));
  EXPECT_THAT(dropped(1, 0, 0), Each(0));
}

// bf16 numbers from 1 to 2 are 2^-7 apart; 1 + 2^-9 is a quarter of that above
// 1, so that a quarter of its copies go up.
TEST(StochasticCast, IsTheMasterInTheMean) {
  constexpr int64_t kCount = 10000;
  constexpr double kUp = 1 + 0x1p-7;
  HostTensor x({kCount}, kF32);
  for (int64_t i = 0; i < kCount; ++i) x.Set(i, i % 2 == 0 ? -1.5 : 1 + 0x1p-9);
  const auto rounded = [&](double salt, int64_t step) {
    const HostTensor y({kCount}, DType::kBFloat16);
    RunKernel("stochastic_cast", {x.Local()}, {y.Local()},
              {.attributes = {{"salt", salt}}, .step = step});
    return y.Values();
  };
  const std::vector<double> y = rounded(1, 0);
  int64_t up = 0;
  for (int64_t i = 0; i < kCount; ++i) {
    if (i % 2 == 0) {
      EXPECT_EQ(y[i], -1.5);  // is a bf16 number
      continue;
    }
    EXPECT_TRUE(y[i] == 1 || y[i] == kUp) << y[i];
    up += y[i] == kUp;
  }
  // 1250 expected, deviation sqrt(5000 * 0.25 * 0.75) = 31; five of them.
  EXPECT_NEAR(up, 1250, 155);
  EXPECT_EQ(y, rounded(1, 0));
  EXPECT_NE(y, rounded(1, 1));
  EXPECT_NE(y, rounded(2, 0));
}

TEST(StochasticCast, LeavesWhatIsNotFinite) {
  const HostTensor x({3}, kF32, {kInfinity, -kInfinity, std::nan("")});
  const HostTensor y({3}, DType::kBFloat16);
  RunKernel("stochastic_cast", {x.Local()}, {y.Local()},
            {.attributes = {{"salt", 1}}});
  EXPECT_EQ(y.At(0), kInfinity);
  EXPECT_EQ(y.At(1), -kInfinity);
  EXPECT_TRUE(std::isnan(y.At(2)));
}

// A block of a tensor, cut along three dimensions, and a run of the block are
// rounded as the whole is there.
TEST(StochasticCast, PartsAreRoundedAsTheWhole) {
  const Shape whole = {4, 3, 6, 2, 5};
  HostTensor x(whole, kF32);
  for (int64_t i = 0; i < x.elements(); ++i) x.Set(i, 1 + 0x1p-8);
  const HostTensor y(whole, DType::kBFloat16);
  const Options options = {.attributes = {{"salt", 7}}, .step = 3};
  RunKernel("stochastic_cast", {x.Local()}, {y.Local()}, options);
  // [1, 3) x all x [2, 5) x all x [1, 4).
  const Shape shape = {2, 3, 3, 2, 3};
  const HostTensor part_x({108}, kF32, std::vector<double>(108, 1 + 0x1p-8));
  HostTensor part({108}, DType::kBFloat16);
  LocalTensor block = part.Local();
  block.shape = shape;
  block.offset = {1, 0, 2, 0, 1};
  block.global_shape = whole;
  RunKernel("stochastic_cast", {part_x.Local()}, {block}, options);
  std::vector<double> expected;
  for (int64_t a = 1; a < 3; ++a) {
    for (int64_t b = 0; b < 3; ++b) {
      for (int64_t c = 2; c < 5; ++c) {
        for (int64_t d = 0; d < 2; ++d) {
          for (int64_t e = 1; e < 4; ++e) {
            expected.push_back(y.At((((a * 3 + b) * 6 + c) * 2 + d) * 5 + e));
          }
        }
      }
    }
  }
  EXPECT_EQ(part.Values(), expected);
  // Elements [31, 47) of the block.
  const HostTensor run_x({16}, kF32, std::vector<double>(16, 1 + 0x1p-8));
  const HostTensor run({16}, DType::kBFloat16);
  block.data = run.Local().data;
  Options of_run = options;
  of_run.run = Range{31, 47};
  RunKernel("stochastic_cast", {run_x.Local()}, {block}, of_run);
  EXPECT_EQ(run.Values(),
            std::vector<double>(expected.begin() + 31, expected.begin() + 47));
}

TEST(Comparisons, OfEqualLessAndGreater) {
  const HostTensor a = F64({3}, {1, 2, 3});
  const HostTensor b = F64({3}, {2, 2, 2});
  const Options options = {.rule = "b,b->b"};
  const std::pair<const char*, std::vector<double>> expected[] = {
      {"equal", {0, 1, 0}},   {"not_equal", {1, 0, 1}},
      {"less", {1, 0, 0}},    {"less_equal", {1, 1, 0}},
      {"greater", {0, 0, 1}}, {"greater_equal", {0, 1, 1}},
  };
  for (const auto& [name, values] : expected) {
    EXPECT_EQ(Compute(name, {a, b}, {3}, options), values) << name;
  }
}

// What is not chosen may be infinite.
TEST(Where, ChoosesWithoutArithmetic) {
  EXPECT_THAT(Compute("where",
                      {F64({2, 1}, {1, 0}), F64({2, 2}, {1, 2, kInfinity, 4}),
                       F64({2}, {kInfinity, 6})},
                      {2, 2}, {.rule = "bo!,bf,f->bf"}),
              ElementsAre(1, 2, kInfinity, 6));
}

// Rows 2, 0, 2 of a table; an id beyond it has no row.
TEST(Gather, ByHand) {
  const HostTensor table = F64({3, 2}, {1, 2, 3, 4, 5, 6});
  const HostTensor ids = I32({4}, {2, 0, 2, 3});
  EXPECT_THAT(Compute("gather", {table, ids}, {4, 2}, {.rule = "vh,t->th"}),
              ElementsAre(5, 6, 1, 2, 5, 6, 0, 0));
  const HostTensor x = F64({4, 2}, {1, 10, 2, 20, 3, 30, 4, 40});
  EXPECT_THAT(Compute("scatter_add", {x, ids}, {3, 2}, {.rule = "th,t->vh"}),
              ElementsAre(2, 20, 0, 0, 4, 40));
}

// Of equal elements the first one, or the last; what is no number is behind
// the others.
TEST(TopK, ByHand) {
  const double none = std::numeric_limits<double>::quiet_NaN();
  const HostTensor x = F64({2, 4}, {3, 7, 7, 1, none, 2, 5, none});
  const auto best = [&](double largest, double last) {
    const HostTensor y({2, 2}, kF64);
    const HostTensor ids({2, 2}, kI32);
    RunKernel("top_k", {x.Local()}, {y.Local(), ids.Local()},
              {.attributes = {{"k", 2}, {"largest", largest}, {"last", last}},
               .rule = "bv!->bk!,bk!"});
    return std::pair(y.Values(), ids.Values());
  };
  EXPECT_THAT(best(1, 0).first, ElementsAre(7, 7, 5, 2));
  EXPECT_THAT(best(1, 0).second, ElementsAre(1, 2, 2, 1));
  EXPECT_THAT(best(1, 1).second, ElementsAre(2, 1, 2, 1));
  EXPECT_THAT(best(0, 0).first, ElementsAre(1, 3, 2, 5));
  EXPECT_THAT(best(0, 0).second, ElementsAre(3, 0, 1, 2));
}

// Ids 0 and 3 have no place among 1 and 2.
TEST(OneHot, ByHand) {
  EXPECT_THAT(
      Compute("one_hot", {I32({4}, {0, 1, 2, 3})}, {4, 2},
              {.attributes = {{"first", 1}, {"places", 2}}, .rule = "s->sv"}),
      ElementsAre(0, 0, 1, 0, 0, 1, 0, 0));
}

// A bag of rows 1 and 2, one of row 0 alone, one of padding.
TEST(EmbeddingBag, PaddingDoesNotCount) {
  const HostTensor ids = I32({3, 2}, {1, 2, -1, 0, -1, -1});
  const HostTensor table = F64({3, 2}, {1, 2, 3, 4, 5, 6});
  Options options = {.attributes = {{"mean", 1}}, .rule = "bn!,vh->bh"};
  EXPECT_THAT(Compute("embedding_bag", {ids, table}, {3, 2}, options),
              ElementsAre(4, 5, 1, 2, 0, 0));
  options.attributes = {{"mean", 0}};
  EXPECT_THAT(Compute("embedding_bag", {ids, table}, {3, 2}, options),
              ElementsAre(8, 10, 1, 2, 0, 0));
}

// Row by row below the diagonal: x1 x0, x2 x0, x2 x1.
TEST(PairwiseDot, ByHand) {
  const HostTensor x = F64({1, 3, 2}, {1, 2, 3, 4, 5, 6});
  EXPECT_THAT(Compute("pairwise_dot", {x}, {1, 3}, {.rule = "bn!h->bp!"}),
              ElementsAre(11, 17, 39));
}

// Differences 1, -2, 0, 3: squares 1 + 4 + 0 + 9 = 14 over 4, by 0.5.
TEST(MeanSquaredError, ByHand) {
  const HostTensor x = F64({2, 2}, {1, 2, 3, 5});
  const HostTensor t = F64({2, 2}, {0, 4, 3, 2});
  Options options = {.attributes = {{"weight", 0.5}}, .rule = "bf,bf->"};
  EXPECT_THAT(Compute("mean_squared_error", {x, t}, {}, options),
              ElementsAre(1.75));
  options.rule = "bf,bf->bf";
  EXPECT_THAT(Compute("mean_squared_error_dx", {x, t}, {2, 2}, options),
              ElementsAre(0.25, -0.5, 0, 0.75));
  // A loss scale of 8 stands behind them.
  options.rule = "bf,bf,->bf";
  EXPECT_THAT(
      Compute("mean_squared_error_dx", {x, t, Scalar(8)}, {2, 2}, options),
      ElementsAre(2, -4, 0, 6));
}

// Of a logit of 0 log 2 whatever the target; of log 3, whose sigmoid is 3/4,
// with target 1 log(4/3); of 1000 with target 0 the logit itself.
TEST(BinaryCrossEntropy, ByHand) {
  const HostTensor x = F64({4}, {0, std::log(3), 1000, -1000});
  const HostTensor t = F64({4}, {0.25, 1, 0, 1});
  Options options = {.attributes = {{"weight", 1}}, .rule = "b,b->"};
  EXPECT_THAT(
      Compute("binary_cross_entropy", {x, t}, {}, options),
      Near({(std::log(2) + std::log(4.0 / 3) + 1000 + 1000) / 4}, 1e-12));
  options.rule = "b,b->b";
  EXPECT_THAT(Compute("binary_cross_entropy_dx", {x, t}, {4}, options),
              Near({0.25 / 4, -0.25 / 4, 0.25, -0.25}));
}

TEST(CrossEntropy, UniformLogitsGiveTheLogarithmOfTheVocabulary) {
  const HostTensor logits = F64({1, 3, 4}, std::vector<double>(12, 2.5));
  const HostTensor labels = I32({1, 3}, {0, -1, 3});
  const HostTensor count = Scalar(0), loss = Scalar(0);
  const HostTensor state({1, 3, 3}, kF64), lse({1, 3}, kF64),
      dx({1, 3, 4}, kF64);
  RunKernel("count_labels", {labels.Local()}, {count.Local()});
  EXPECT_EQ(count.At(0), 2);  // -1 is not counted
  RunKernel("cross_entropy.state",
            {logits.Local(), labels.Local(), count.Local()}, {state.Local()});
  // Maximum 2.5, 4 e^0, and the target's logit where there is one.
  EXPECT_THAT(state.Values(), ElementsAre(2.5, 4, 2.5, 2.5, 4, 0, 2.5, 4, 2.5));
  RunKernel("cross_entropy",
            {logits.Local(), labels.Local(), count.Local(), state.Local()},
            {loss.Local(), lse.Local()});
  EXPECT_DOUBLE_EQ(loss.At(0), std::log(4));  // (ln 4 + ln 4) / 2
  EXPECT_THAT(lse.Values(), Each(DoubleNear(2.5 + std::log(4), 1e-15)));
  RunKernel("cross_entropy_dx",
            {logits.Local(), labels.Local(), count.Local(), lse.Local()},
            {dx.Local()});
  // (1/4 - onehot) / 2, and nothing for the token that is not counted.
  EXPECT_THAT(dx.Values(), Near({-0.375, 0.125, 0.125, 0.125, 0, 0, 0, 0, 0.125,
                                 0.125, 0.125, -0.375}));
}

TEST(CrossEntropy, LargeLogitsDoNotOverflow) {
  const HostTensor logits = F64({1, 1, 2}, {1e4, 1e4}).As(kF32);
  const HostTensor labels = I32({1, 1}, {0});
  const HostTensor count({}, kF32, {1}), loss({}, kF32), lse({1, 1}, kF32),
      state({1, 1, 3}, kF32);
  const std::vector<LocalTensor> operands = {logits.Local(), labels.Local(),
                                             count.Local()};
  RunKernel("cross_entropy.state", operands, {state.Local()});
  RunKernel("cross_entropy",
            {operands[0], operands[1], operands[2], state.Local()},
            {loss.Local(), lse.Local()});
  EXPECT_FLOAT_EQ(static_cast<float>(loss.At(0)), std::log(2.0f));
}

TEST(CrossEntropy, NoCountedToken) {
  const HostTensor logits = F64({1, 1, 2}, {1, 2});
  const HostTensor labels = I32({1, 1}, {-1});
  const HostTensor state = F64({1, 1, 3}, {2, 1, 0}), lse({1, 1}, kF64);
  const HostTensor count = Scalar(0), loss = Scalar(9);
  RunKernel("cross_entropy",
            {logits.Local(), labels.Local(), count.Local(), state.Local()},
            {loss.Local(), lse.Local()});
  EXPECT_EQ(loss.At(0), 0);
}

// Shards of two columns of a vocabulary of three in six: the second has one
// column of padding, the third nothing else. Padding's logits are no matter.
TEST(CrossEntropy, PaddingHasNoProbability) {
  const Options options = {.attributes = {{"vocabulary", 3}}};
  const HostTensor labels = I32({1, 1}, {2});
  const HostTensor count = Scalar(1), loss = Scalar(0);
  const HostTensor lse({1, 1}, kF64);
  HostTensor states({3, 1, 1, 3}, kF64);
  const std::vector<std::vector<double>> logits = {
      {std::log(1), std::log(2)}, {std::log(5), 100}, {kInfinity, 7}};
  const auto shard = [&](size_t i, const HostTensor& of) {
    LocalTensor local = of.Local();
    local.offset[2] = 2 * static_cast<int64_t>(i);
    local.global_shape[2] = 6;
    return local;
  };
  for (size_t i = 0; i < 3; ++i) {
    const HostTensor x = F64({1, 1, 2}, logits[i]), state({1, 1, 3}, kF64);
    RunKernel("cross_entropy.state",
              {shard(i, x), labels.Local(), count.Local()}, {state.Local()},
              options);
    for (int64_t j = 0; j < 3; ++j) {
      states.Set(3 * static_cast<int64_t>(i) + j, state.At(j));
    }
  }
  // 1/2 + 2/2; 5/5; nothing.
  EXPECT_THAT(states.Values(), Near({std::log(2), 1.5, 0, std::log(5), 1,
                                     std::log(5), -kInfinity, 0, 0}));
  const HostTensor any({1, 1, 2}, kF64);
  RunKernel("cross_entropy",
            {any.Local(), labels.Local(), count.Local(), states.Local()},
            {loss.Local(), lse.Local()}, options);
  EXPECT_NEAR(loss.At(0), std::log(8.0 / 5), 1e-14);  // of 1 + 2 + 5
  const std::vector<std::vector<double>> gradients = {
      {1.0 / 8, 2.0 / 8}, {5.0 / 8 - 1, 0}, {0, 0}};
  for (size_t i = 0; i < 3; ++i) {
    const HostTensor x = F64({1, 1, 2}, logits[i]);
    const HostTensor dx = F64({1, 1, 2}, {9, 9});
    RunKernel("cross_entropy_dx",
              {shard(i, x), labels.Local(), count.Local(), lse.Local()},
              {shard(i, dx)}, options);
    EXPECT_THAT(dx.Values(), Near(gradients[i])) << i;
  }
}

Options AdamWOptions(int64_t step) {
  return {.attributes = {{"beta1", 0.9},
                         {"beta2", 0.99},
                         {"epsilon", 0},
                         {"lr", 0.1},
                         {"weight_decay", 0.5}},
          .step = step};
}

TEST(AdamW, TwoStepsByHand) {
  const HostTensor gradient = F64({1}, {2}), clip = Scalar(0.5);  // g = 1
  const HostTensor p = F64({1}, {1}), m({1}, kF64), v({1}, kF64);
  const std::vector<LocalTensor> operands = {gradient.Local(), clip.Local()};
  const std::vector<LocalTensor> results = {p.Local(), m.Local(), v.Local()};
  RunKernel("adamw", operands, results, AdamWOptions(0));
  // m = 0.1, v = 0.01; corrected by 1 - 0.9 and 1 - 0.99 both are 1.
  // p = 1 * (1 - 0.1 * 0.5) - 0.1 * 1 / sqrt(1) = 0.85.
  EXPECT_NEAR(m.At(0), 0.1, 1e-15);
  EXPECT_NEAR(v.At(0), 0.01, 1e-15);
  EXPECT_NEAR(p.At(0), 0.85, 1e-15);
  RunKernel("adamw", operands, results, AdamWOptions(1));
  // m = 0.9 * 0.1 + 0.1 = 0.19 = 1 - 0.9^2, v = 0.0199 = 1 - 0.99^2.
  // p = 0.85 * 0.95 - 0.1 = 0.7075.
  EXPECT_NEAR(p.At(0), 0.7075, 1e-14);
}

TEST(AdamW, EpsilonIsAddedToTheCorrectedRoot) {
  const HostTensor gradient = F64({1}, {1}), clip = Scalar(1);
  const HostTensor p = F64({1}, {0}), m({1}, kF64), v({1}, kF64);
  Options options = AdamWOptions(0);
  options.attributes[2].value = 1;
  RunKernel("adamw", {gradient.Local(), clip.Local()},
            {p.Local(), m.Local(), v.Local()}, options);
  EXPECT_NEAR(p.At(0), -0.05, 1e-15);  // -0.1 * 1 / (1 + 1)
}

TEST(AdamW, ShardsHaveTheBitsOfTheWhole) {
  constexpr int64_t kCount = 301;
  HostTensor gradient({kCount}, kF32), p({kCount}, kF32);
  for (int64_t i = 0; i < kCount; ++i) {
    gradient.Set(i, std::sin(i));
    p.Set(i, std::cos(i));
  }
  const HostTensor clip = Scalar(0.7);
  const auto step = [&](const HostTensor& g, HostTensor& x) {
    HostTensor m(g.shape(), kF32), v(g.shape(), kF32);
    RunKernel("adamw", {g.Local(), clip.Local()},
              {x.Local(), m.Local(), v.Local()}, AdamWOptions(0));
  };
  HostTensor joined({kCount}, kF32);
  const int64_t bounds[] = {0, 77, 200, kCount};
  for (int i = 0; i < 3; ++i) {
    HostTensor part = p.Part(0, bounds[i], bounds[i + 1]);
    step(gradient.Part(0, bounds[i], bounds[i + 1]), part);
    joined.Add(part);
  }
  step(gradient, p);
  EXPECT_TRUE(joined.SameBits(p));
}

TEST(Sgd, ByHand) {
  const HostTensor gradient = F64({1}, {2}), p = F64({1}, {1});
  const HostTensor clip = Scalar(0.5);
  RunKernel("sgd", {gradient.Local(), clip.Local()}, {p.Local()},
            {.attributes = {{"lr", 0.1}, {"weight_decay", 0}}});
  EXPECT_DOUBLE_EQ(p.At(0), 0.9);  // 1 - 0.1 * 0.5 * 2
  RunKernel("sgd", {gradient.Local(), clip.Local()}, {p.Local()},
            {.attributes = {{"lr", 0.1}, {"weight_decay", 0.2}}});
  EXPECT_DOUBLE_EQ(p.At(0), 0.782);  // 0.9 - 0.1 * (0.5 * 2 + 0.2 * 0.9)
}

// As torch.optim.SGD(lr=0.1, momentum=0.9), from m = 0 on gradients of 2 and
// then 4, clipped by 0.5: m = 1, then 0.9 + 2 = 2.9; p = 1 - 0.1, then
// 0.9 - 0.29.
TEST(Momentum, ByHand) {
  const HostTensor p = F64({1}, {1}), m = F64({1}, {0});
  const HostTensor clip = Scalar(0.5);
  for (const double gradient : {2.0, 4.0}) {
    const HostTensor g = F64({1}, {gradient});
    RunKernel(
        "momentum", {g.Local(), clip.Local()}, {p.Local(), m.Local()},
        {.attributes = {{"beta1", 0.9}, {"lr", 0.1}, {"weight_decay", 0}}});
  }
  EXPECT_DOUBLE_EQ(m.At(0), 2.9);
  EXPECT_DOUBLE_EQ(p.At(0), 0.61);
}

// As torch.optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.2), which adds to the
// gradient: m = 1 + 0.2, p = 1 - 0.12; m = 1.08 + 2 + 0.176, p = 0.88 - 0.3256.
TEST(Momentum, DecaysWeightsInTheGradient) {
  const HostTensor p = F64({1}, {1}), m = F64({1}, {0});
  const HostTensor clip = Scalar(0.5);
  for (const double gradient : {2.0, 4.0}) {
    const HostTensor g = F64({1}, {gradient});
    RunKernel(
        "momentum", {g.Local(), clip.Local()}, {p.Local(), m.Local()},
        {.attributes = {{"beta1", 0.9}, {"lr", 0.1}, {"weight_decay", 0.2}}});
  }
  EXPECT_DOUBLE_EQ(m.At(0), 3.256);
  EXPECT_DOUBLE_EQ(p.At(0), 0.5544);
}

// Adafactor on b matrices of r rows and c columns (or, without shape, on a
// vector), step by step as its kernels are called: for each piece on its own
// buffers, with sums added between them as ranks do.
class AdafactorRun {
 public:
  // A piece is a block (its shape is c alone for a vector) and a run of it.
  struct Piece {
    Box block;
    Range run;
  };

  AdafactorRun(const HostTensor& parameter, std::vector<Piece> pieces)
      : pieces_(std::move(pieces)) {
    const Shape& shape = parameter.shape();
    if (shape.size() == 3) {
      rows_ = HostTensor({shape[0], shape[1]}, kF64);
      columns_ = HostTensor({shape[0], shape[2]}, kF64);
      mean_ = HostTensor({shape[0]}, kF64);
    }
    parameter_ = parameter;
    v_ = HostTensor(shape, kF64);
  }

  void Step(const HostTensor& gradient, double clip, Options options) {
    const bool is_matrix = gradient.shape().size() == 3;
    const HostTensor coefficient = Scalar(clip);
    HostTensor factor(rows_.shape(), kF64);
    double squares = 0;
    for (double p : parameter_.Values()) squares += p * p;
    if (is_matrix) {
      HostTensor rows(rows_.shape(), kF64), columns(columns_.shape(), kF64),
          totals(mean_.shape(), kF64);
      for (const Piece& piece : pieces_) {
        const HostTensor g = Cut(gradient, piece);
        const HostTensor of_rows(rows.shape(), kF64, Sevens(rows)),
            of_columns(columns.shape(), kF64, Sevens(columns)),
            of_totals(totals.shape(), kF64, Sevens(totals));
        RunKernel("adafactor_sums",
                  {Placed(g, piece, gradient), coefficient.Local()},
                  {of_rows.Local(), of_columns.Local(), of_totals.Local()},
                  With(options, piece));
        rows.Add(of_rows);
        columns.Add(of_columns);
        totals.Add(of_totals);
      }
      RunKernel(
          "adafactor_factors",
          {rows.Local(), columns.Local(), totals.Local(), coefficient.Local()},
          {rows_.Local(), columns_.Local(), mean_.Local(), factor.Local()},
          options);
    }
    double updates = 0;
    std::vector<HostTensor> v;
    for (const Piece& piece : pieces_) {
      const HostTensor g = Cut(gradient, piece), sum = Scalar(7);
      const LocalTensor placed = Placed(g, piece, gradient);
      if (is_matrix) {
        RunKernel(
            "adafactor_norm",
            {placed, factor.Local(), columns_.Local(), coefficient.Local()},
            {sum.Local()}, With(options, piece));
      } else {
        v.push_back(Cut(v_, piece));
        RunKernel("adafactor_vector_norm", {placed, coefficient.Local()},
                  {Placed(v.back(), piece, gradient), sum.Local()},
                  With(options, piece));
      }
      updates += sum.At(0);
    }
    update_squares = updates;
    const HostTensor of_parameter = Scalar(squares),
                     of_update = Scalar(updates);
    for (size_t i = 0; i < pieces_.size(); ++i) {
      const Piece& piece = pieces_[i];
      const HostTensor g = Cut(gradient, piece), p = Cut(parameter_, piece);
      std::vector<LocalTensor> operands = {Placed(g, piece, gradient)};
      if (is_matrix) {
        operands.push_back(factor.Local());
        operands.push_back(columns_.Local());
      } else {
        operands.push_back(Placed(v[i], piece, gradient));
      }
      operands.insert(operands.end(), {of_parameter.Local(), of_update.Local(),
                                       coefficient.Local()});
      RunKernel(is_matrix ? "adafactor_step" : "adafactor_vector_step",
                operands, {Placed(p, piece, gradient)}, With(options, piece));
      PutBack(p, piece, parameter_);
      if (!is_matrix) PutBack(v[i], piece, v_);
    }
  }

  const HostTensor& parameter() const { return parameter_; }
  const HostTensor& rows() const { return rows_; }
  const HostTensor& columns() const { return columns_; }
  const HostTensor& mean() const { return mean_; }
  const HostTensor& v() const { return v_; }
  double update_squares = 0;

 private:
  // What is overwritten may have been anything.
  static std::vector<double> Sevens(const HostTensor& like) {
    return std::vector<double>(static_cast<size_t>(like.elements()), 7);
  }
  static Options With(Options options, const Piece& piece) {
    options.run = piece.run;
    return options;
  }
  // The number in the whole of element `i` of a block.
  static int64_t PlaceOf(int64_t i, const Box& block, const Shape& shape) {
    int64_t place = 0;
    int64_t stride = 1;
    for (size_t d = shape.size(); d-- > 0;) {
      place += stride * (block[d].begin + i % block[d].size());
      i /= block[d].size();
      stride *= shape[d];
    }
    return place;
  }
  static HostTensor Cut(const HostTensor& whole, const Piece& piece) {
    HostTensor cut({piece.run.size()}, kF64);
    for (int64_t i = 0; i < piece.run.size(); ++i) {
      cut.Set(i, whole.At(
                     PlaceOf(piece.run.begin + i, piece.block, whole.shape())));
    }
    return cut;
  }
  static void PutBack(const HostTensor& cut, const Piece& piece,
                      HostTensor& whole) {
    for (int64_t i = 0; i < piece.run.size(); ++i) {
      whole.Set(PlaceOf(piece.run.begin + i, piece.block, whole.shape()),
                cut.At(i));
    }
  }
  static LocalTensor Placed(const HostTensor& cut, const Piece& piece,
                            const HostTensor& whole) {
    LocalTensor tensor = cut.Local();
    tensor.shape.clear();
    tensor.offset.clear();
    for (const Range& range : piece.block) {
      tensor.shape.push_back(range.size());
      tensor.offset.push_back(range.begin);
    }
    tensor.global_shape = whole.shape();
    return tensor;
  }

  std::vector<Piece> pieces_;
  HostTensor parameter_, rows_, columns_, mean_, v_;
};

Options AdafactorOptions(int64_t step, double decay = 0) {
  return {.attributes = {{"beta2_decay", -0.8},
                         {"d", 1},
                         {"epsilon1", 1e-12},
                         {"epsilon2", 1e-3},
                         {"lr", 0.1},
                         {"weight_decay", decay}},
          .step = step};
}

// The first step, where beta2 is 1 - 1 = 0, of the gradient (1 2; 3 4) clipped
// from twice that. R = (5 25) / 2, C = (10 20) / 2, and both have the mean 7.5.
// V = R C / 7.5 = (5/3 10/3; 25/3 50/3), and U^2 = G^2 / V = (0.6 1.2; 1.08
// 0.96), whose mean 0.96 is below 1: nothing is clipped. The parameter's root
// mean square is 2, so that the step is min(0.1, 1) * 2 = 0.2; the decay takes
// 0.1 * 0.5 of it.
TEST(Adafactor, FirstStepByHand) {
  AdafactorRun run(F64({1, 2, 2}, {2, -2, 2, 2}),
                   {{{{0, 1}, {0, 2}, {0, 2}}, {0, 4}}});
  run.Step(F64({1, 2, 2}, {2, 4, 6, 8}), 0.5, AdafactorOptions(0, 0.5));
  EXPECT_THAT(run.rows().Values(), Near({2.5, 12.5}));
  EXPECT_THAT(run.columns().Values(), Near({5, 10}));
  EXPECT_THAT(run.mean().Values(), Near({7.5}));
  EXPECT_NEAR(run.update_squares, 3.84, 1e-13);
  EXPECT_THAT(run.parameter().Values(),
              Near({1.9 - 0.2 * std::sqrt(0.6), -1.9 - 0.2 * std::sqrt(1.2),
                    1.9 - 0.2 * std::sqrt(1.08), 1.9 - 0.2 * std::sqrt(0.96)}));
}

// Of a vector V = G^2 in the first step, so that U is the sign of G. In the
// second 1 - beta2 = 2^-0.8 = b: V = (1 - b) 1 + b 9 for the first element, and
// U = 3 / sqrt(1 + 8 b), above 1 and so clipped. Steps are 0.1 times the root
// mean square, which is first 1 and then that of (0.9 -0.9).
TEST(Adafactor, VectorByHand) {
  AdafactorRun run(F64({2}, {1, -1}), {{{{0, 2}}, {0, 2}}});
  run.Step(F64({2}, {1, -1}), 1, AdafactorOptions(0));
  EXPECT_THAT(run.parameter().Values(), Near({0.9, -0.9}));
  run.Step(F64({2}, {3, -3}), 1, AdafactorOptions(1));
  const double b = std::pow(2, -0.8);
  EXPECT_THAT(run.v().Values(), Near({1 + 8 * b, 1 + 8 * b}));
  EXPECT_NEAR(run.update_squares, 2 * 9 / (1 + 8 * b), 1e-13);
  EXPECT_THAT(run.parameter().Values(), Near({0.81, -0.81}));
}

// Five steps, of which the fourth is skipped (fp16 says so): then the fifth is
// the fourth, with 1 - beta2 = 4^-0.8.
TEST(Adafactor, SkippedStepsDoNotCount) {
  const HostTensor v = F64({1}, {1}), g = F64({1}, {2}), clip = Scalar(1),
                   scale = F64({3}, {1, 0, 1}), sum = Scalar(0);
  RunKernel("adafactor_vector_norm", {g.Local(), clip.Local(), scale.Local()},
            {v.Local(), sum.Local()}, AdafactorOptions(4));
  const double b = std::pow(4, -0.8);
  EXPECT_NEAR(v.At(0), (1 - b) + 4 * b, 1e-15);
}

// Flat runs that begin and end amid rows, blocks of rows and of columns, an
// empty run: together they do what the whole does.
TEST(Adafactor, PiecesDoWhatTheWholeDoes) {
  const Shape shape = {2, 5, 7};
  const auto wave = [&](const Shape& of, double phase) {
    HostTensor tensor(of, kF64);
    for (int64_t i = 0; i < tensor.elements(); ++i) {
      tensor.Set(i, std::sin(1.7 * static_cast<double>(i) + phase));
    }
    return tensor;
  };
  const Box all = {{0, 2}, {0, 5}, {0, 7}};
  const std::vector<std::vector<AdafactorRun::Piece>> cuts = {
      {{all, {0, 11}}, {all, {11, 11}}, {all, {11, 12}}, {all, {12, 70}}},
      {{{{0, 2}, {0, 2}, {0, 7}}, {0, 28}},
       {{{0, 2}, {2, 5}, {0, 7}}, {0, 42}}},
      {{{{0, 2}, {0, 5}, {0, 3}}, {0, 30}},
       {{{0, 2}, {0, 5}, {3, 7}}, {0, 17}},
       {{{0, 2}, {0, 5}, {3, 7}}, {17, 40}}},
      {{{{0, 1}, {0, 5}, {0, 7}}, {0, 35}},
       {{{1, 2}, {0, 5}, {0, 7}}, {0, 35}}},
  };
  AdafactorRun whole(wave(shape, 1), {{all, {0, 70}}});
  for (int64_t step = 0; step < 3; ++step) {
    whole.Step(wave(shape, static_cast<double>(step)), 0.7,
               AdafactorOptions(step, 0.1));
  }
  for (const auto& pieces : cuts) {
    AdafactorRun run(wave(shape, 1), pieces);
    for (int64_t step = 0; step < 3; ++step) {
      run.Step(wave(shape, static_cast<double>(step)), 0.7,
               AdafactorOptions(step, 0.1));
    }
    EXPECT_THAT(run.parameter().Values(), Near(whole.parameter().Values()));
    EXPECT_THAT(run.rows().Values(), Near(whole.rows().Values()));
    EXPECT_THAT(run.columns().Values(), Near(whole.columns().Values()));
  }
  AdafactorRun vector(wave({9}, 1), {{{{0, 9}}, {0, 9}}});
  AdafactorRun shards(wave({9}, 1), {{{{0, 9}}, {0, 4}}, {{{0, 9}}, {4, 9}}});
  for (int64_t step = 0; step < 3; ++step) {
    for (AdafactorRun* run : {&vector, &shards}) {
      run->Step(wave({9}, static_cast<double>(step)), 1,
                AdafactorOptions(step));
    }
  }
  EXPECT_THAT(shards.parameter().Values(), Near(vector.parameter().Values()));
}

TEST(Clipping, ByHand) {
  const HostTensor gradient = F64({3}, {1, 2, 3}), square = Scalar(2);
  RunKernel("square_sum", {gradient.Local()}, {square.Local()},
            {.accumulate = true});
  EXPECT_EQ(square.At(0), 16);  // 2 + 1 + 4 + 9
  const auto coefficient = [](double square_norm, double clip) {
    return Compute("clip_coefficient", {Scalar(square_norm)}, {},
                   {.attributes = {{"clip", clip}}})[0];
  };
  EXPECT_DOUBLE_EQ(coefficient(16, 1), 1 / (4 + 1e-6));
  EXPECT_EQ(coefficient(0.25, 1), 1);  // shorter than the limit
  EXPECT_EQ(coefficient(16, 0), 1);    // no clipping
  EXPECT_TRUE(std::isnan(coefficient(NAN, 1)));
}

// The last of the good steps that double it, where the format has the double.
TEST(Clipping, TheLossScaleStaysFinite) {
  const auto behind = [](double scale) {
    const HostTensor state({3}, kF32, {scale, 1999, 7});
    const HostTensor square = Scalar(4), coefficient = Scalar(0);
    RunKernel("clip_coefficient", {square.Local(), state.Local()},
              {coefficient.Local(), state.Local()},
              {.attributes = {{"clip", 0}}});
    EXPECT_EQ(coefficient.At(0), 1 / scale);
    return state.Values();
  };
  EXPECT_THAT(behind(0x1p126), ElementsAre(0x1p127, 0, 7));
  EXPECT_THAT(behind(0x1p127), ElementsAre(0x1p127, 0, 7));
}

// Sigmoids that fp64 has as zero are divided by a sum that is none.
TEST(MoeGate, ScoresOfNothingMayBeRenormalised) {
  const HostTensor logits = F64({1, 1, 3}, {-1000, -2000, -1000});
  const Options options = {.attributes = {{"capacity", 4},
                                          {"group_best", 1},
                                          {"groups", 1},
                                          {"renormalise", 1},
                                          {"scale", 2.5},
                                          {"sigmoid", 1},
                                          {"top_groups", 1},
                                          {"top_k", 2}}};
  const HostTensor weights({1, 1, 2}, kF64), slots({1, 1, 2}, kI32);
  RunKernel("moe_gate", {logits.Local()}, {weights.Local(), slots.Local()},
            options);
  EXPECT_THAT(weights.Values(), ElementsAre(0, 0));
  EXPECT_THAT(Compute("moe_gate_dx", {F64({1, 1, 2}, {1, -2}), logits},
                      {1, 1, 3}, options),
              ElementsAre(0, 0, 0));
}

TEST(FillWeight, ShardsHaveTheValuesOfTheWhole) {
  for (DType dtype : {kF32, kF64}) {
    const HostTensor whole({7, 5}, dtype);
    FillWeight(whole.Local(), {.stddev = 0.02}, "w", 3);
    for (size_t dim : {size_t{0}, size_t{1}}) {
      HostTensor joined({7, 5}, dtype);
      const HostTensor zeros({7, 5}, dtype);
      for (const auto& [begin, end] :
           {std::pair{0, 2}, {2, 3}, {3, 5}, {5, 7}}) {
        if (end > whole.shape()[dim]) continue;
        HostTensor part = zeros.Part(dim, begin, end);
        FillWeight(part.Local(), {.stddev = 0.02}, "w", 3);
        joined.Add(part);
      }
      EXPECT_TRUE(joined.SameBits(whole));
    }
  }
}

// A block of 150 x 301 within 200 x 400, in pieces that end within rows and
// are longer than what a thread draws at once.
TEST(FillWeight, PiecesHaveTheValuesOfTheWhole) {
  ThreadPool threads(3);
  std::vector<float> values(150 * 301);
  LocalTensor block;
  block.dtype = kF32;
  block.shape = {150, 301};
  block.offset = {20, 99};
  block.global_shape = {200, 400};
  block.data = values.data();
  FillWeight(block, {.stddev = 0.02}, "w", 3);
  const std::vector<float> whole = values;
  std::ranges::fill(values, 0.0f);
  for (const Range piece : {Range{0, 1000}, {1000, 1001}, {1001, 45150}}) {
    block.data = values.data() + piece.begin;
    FillWeight(block, piece, {.stddev = 0.02}, "w", 3, &threads);
  }
  EXPECT_EQ(values, whole);
}

TEST(FillWeight, NormalOrConstant) {
  constexpr int64_t kCount = 10000;
  const HostTensor w({kCount}, kF64);
  FillWeight(w.Local(), {.stddev = 0.02}, "w", 3);
  double sum = 0;
  double squares = 0;
  for (double value : w.Values()) {
    sum += value;
    squares += value * value;
  }
  // Five deviations: of the mean 0.02 / 100, of the variance sqrt(2) percent.
  EXPECT_NEAR(sum / kCount, 0, 0.001);
  EXPECT_NEAR(squares / kCount, 0.0004, 0.0004 * 0.071);

  const auto first = [&](std::string_view name, uint64_t seed) {
    FillWeight(w.Local(), {.stddev = 1}, name, seed);
    return w.At(0);
  };
  EXPECT_NE(first("w", 3), first("v", 3));
  EXPECT_NE(first("w", 3), first("w", 4));
  FillWeight(w.Local(), {.constant = 1.5}, "w", 3);
  EXPECT_THAT(w.Values(), Each(1.5));
}

}  // namespace
}  // namespace tessera
