// How weights and gradients are stored and when they travel changes no bit, as
// long as gradients accumulate locally in microbatch order: the same sums in
// the same order. What reduces each microbatch, or reduces in two steps,
// re-associates sums: equal to the last bit it must not be, within 1e-9 in fp64
// it must.

#include <cmath>

#include "tests/support/tiny_outcome.h"

namespace tessera {
namespace {

constexpr int64_t kBatch = 8;
constexpr int64_t kSeqLen = 8;
constexpr int64_t kSteps = 5;

Outcome Train(const Graph& graph, int ranks, const std::string& strategy) {
  TinyRun run;
  run.steps = kSteps;
  // The norm sums shards, in an order that depends on how they are cut.
  run.options.clip = 0;
  return OutcomeOf(graph, ranks, strategy, run);
}

// The largest difference of a loss, or of a weight relative to its norm (but
// absolute for tensors whose gradient is mathematically zero).
double Distance(const Outcome& a, const Outcome& b) {
  double distance = 0;
  for (size_t i = 0; i < b.losses.size(); ++i) {
    distance = std::max(distance, std::abs(a.losses[i] - b.losses[i]));
  }
  for (const auto& [name, expected] : b.weights) {
    const Apart apart = ApartOf(a.weights.at(name), expected);
    distance = std::max(distance, apart.difference / std::max(apart.norm, 0.1));
  }
  return distance;
}

class StorageEqualsDdp : public ::testing::TestWithParam<DType> {
 protected:
  StorageEqualsDdp()
      : graph_(ImportTiny(TinyGpt2(2), kBatch, kSeqLen, GetParam())) {}
  Graph graph_;
};

TEST_P(StorageEqualsDdp, BitForBit) {
  // Two microbatches.
  const Outcome ddp = Train(graph_, 4, "dp=4,mbs=1");
  ASSERT_EQ(ddp.losses.size(), static_cast<size_t>(kSteps));
  for (const char* strategy :
       {"dp=4,mbs=1,zero=1", "dp=4,mbs=1,bucket=1B", "dp=4,mbs=1,bucket=2kB",
        "dp=4,mbs=1,zero=1,bucket=2kB"}) {
    EXPECT_TRUE(Train(graph_, 4, strategy) == ddp) << strategy;
  }
  // One microbatch and no tied weights.
  const Graph llama = ImportTiny(TinyLlama(2), kBatch, kSeqLen, GetParam());
  const Outcome one = Train(llama, 4, "dp=4,mbs=2");
  for (const char* strategy :
       {"dp=4,mbs=2,zero=1", "dp=4,mbs=2,zero=2", "dp=4,mbs=2,zero=3",
        "dp=4,mbs=2,zero=2,bucket=2kB", "dp=4,mbs=2,zero=3,bucket=1B"}) {
    EXPECT_TRUE(Train(llama, 4, strategy) == one) << strategy;
  }
}

TEST_P(StorageEqualsDdp, PrefetchDepthBitForBit) {
  const Outcome one = Train(graph_, 2, "dp=2,mbs=1,zero=3");
  for (const char* depth : {"0", "2", "3", "9"}) {
    EXPECT_TRUE(
        Train(graph_, 2, std::string("dp=2,mbs=1,zero=3,prefetch=") + depth) ==
        one)
        << depth;
  }
  // Over stage boundaries, where a pass begins anew.
  const Graph llama = ImportTiny(TinyLlama(4), kBatch, kSeqLen, GetParam());
  const Outcome staged = Train(llama, 4, "dp=2,pp=2,mbs=1,zero=3");
  for (const char* depth : {"0", "2"}) {
    EXPECT_TRUE(Train(llama, 4,
                      std::string("dp=2,pp=2,mbs=1,zero=3,prefetch=") +
                          depth) == staged)
        << depth;
  }
}

INSTANTIATE_TEST_SUITE_P(Types, StorageEqualsDdp,
                         ::testing::Values(DType::kFloat64, DType::kFloat32));

// A reduce sums in rank order, as an all-reduce does, and the root's loss sums
// the samples of all ranks.
TEST(RootedDataParallelism, EqualsDdp) {
  for (bool gpt2 : {true, false}) {
    const Graph graph =
        ImportTiny(gpt2 ? TinyGpt2(2) : TinyLlama(2), kBatch, kSeqLen);
    const Outcome ddp = Train(graph, 4, "dp=4,mbs=1");
    for (const char* strategy :
         {"dp=4,mbs=1,dp-kind=rooted", "dp=4,mbs=2,dp-kind=rooted,bucket=1B"}) {
      EXPECT_LT(Distance(Train(graph, 4, strategy), ddp), 1e-9) << strategy;
    }
    for (const char* strategy :
         {"dp=2,tp=2,mbs=1,dp-kind=rooted", "dp=2,pp=2,mbs=1,dp-kind=rooted",
          "dp=2,cp=2,mbs=2,dp-kind=rooted",
          "dp=2,tp=2,sp=1,mbs=2,dp-kind=rooted"}) {
      EXPECT_LT(Distance(Train(graph, 4, strategy), ddp), 1e-9) << strategy;
    }
  }
}

TEST(StorageReassociates, ReducingEachMicrobatchOrInTwoSteps) {
  const Graph graph = ImportTiny(TinyGpt2(2), kBatch, kSeqLen);
  const Outcome ddp = Train(graph, 4, "dp=4,mbs=1");
  for (const char* strategy :
       {"dp=4,mbs=1,zero=2", "dp=4,mbs=1,zero=3",
        "dp=4,mbs=1,zero=1,zero-group=2", "dp=4,mbs=1,zero=3,zero-group=2"}) {
    const Outcome outcome = Train(graph, 4, strategy);
    EXPECT_FALSE(outcome == ddp) << strategy;
    EXPECT_LT(Distance(outcome, ddp), 1e-9) << strategy;
  }
  // What the bound must see.
  Outcome wrong = ddp;
  wrong.weights.begin()->second[0] += 1e-6;
  EXPECT_GT(Distance(wrong, ddp), 1e-9);
}

}  // namespace
}  // namespace tessera
