// Layers of which a user has nothing but times, bytes and parameters
// (examples/graphs/measured-layers.txtpb): plans take what was measured.

#include <gtest/gtest.h>

#include <string>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/profile/profile_io.h"
#include "planner/io/importer.h"
#include "planner/topology/topologies.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

class MeasuredLayers : public testing::Test {
 protected:
  MeasuredLayers()
      : graph_(Differentiate(
                   ImportModel(ExamplePath("graphs/measured-layers.txtpb"), {})
                       .value())
                   .value()),
        profile_(
            ReadProfile(ExamplePath("graphs/measured-layers.profile.txtpb"))
                .value()),
        cluster_(MakeCluster("dgx-a100-80gb:1").value()),
        index_(graph_) {}

  Plan Of(const std::string& strategy) const {
    return PlanFromStrategy(index_, cluster_, ParseStrategy(strategy).value())
        .value();
  }
  Evaluation Price(const std::string& strategy) const {
    return Evaluator(graph_, cluster_, &profile_, {})
        .Explain(Of(strategy), /*share_links=*/false);
  }
  // Of an operator at so many samples and shards; both passes.
  double Measured(const std::string& name, int64_t samples, int64_t shards,
                  bool backward) const {
    double seconds = -1;
    for (const auto& [key, row] : profile_.rows) {
      if (key.name != name + (backward ? "_d" : "")) continue;
      const auto rule = IndexRule::Parse(key.rule).value();
      const int b = rule.FactorOf('b');
      const int t = rule.FactorOf('t');
      if (key.extents[static_cast<size_t>(b)] == samples &&
          (t < 0 || key.extents[static_cast<size_t>(t)] == shards)) {
        seconds = row.median_s;
      }
    }
    return seconds;
  }
  double StepOf(int64_t samples, int64_t shards, bool again) const {
    double seconds = 0;
    for (const bool backward : {false, true}) {
      seconds += Measured("lookup", samples, shards, backward) +
                 6 * Measured("layer", samples, shards, backward) +
                 Measured("head", samples, shards, backward);
    }
    // Each layer once more before its backward.
    return seconds +
           (again ? 6 * Measured("layer", samples, shards, false) : 0);
  }

  Graph graph_;
  ProfileDb profile_;
  Cluster cluster_;
  GraphIndex index_;
};

// 64 samples are 4 microbatches of 16 over 8 ranks, 2 each. To load a
// microbatch takes less than 10 us.
TEST_F(MeasuredLayers, TakeWhatWasMeasured) {
  EXPECT_NEAR(Price("dp=8,mbs=2").breakdown.compute.seconds(),
              4 * StepOf(2, 8, false), 4 * 10e-6);
  EXPECT_NEAR(Price("dp=8,mbs=2,recompute=full").breakdown.compute.seconds(),
              4 * StepOf(2, 8, true), 4 * 10e-6);
  // Tensor parallelism of 4: each rank has 2 of 8 shards; the two replicas of
  // them take 8 microbatches of 4 samples each.
  EXPECT_NEAR(Price("dp=2,tp=4,mbs=4").breakdown.compute.seconds(),
              8 * StepOf(4, 2, false), 8 * 10e-6);
}

// What their tensor parallelism exchanges is in the times: with one replica
// nothing is exchanged but the scalars of the update.
TEST_F(MeasuredLayers, ExchangeWithinTheirTimes) {
  const Evaluation step = Price("dp=1,tp=8,mbs=4");
  EXPECT_LT((step.breakdown.all_reduce + step.breakdown.all_gather +
             step.breakdown.reduce_scatter)
                .seconds(),
            1e-3);
  const Plan plan = Of("dp=1,tp=8,mbs=4");
  for (size_t i = 0; i < index_.forward_nodes; ++i) {
    const int t = graph_.nodes[i].rule.FactorOf('t');
    if (t < 0) continue;
    EXPECT_EQ(plan.groups[0].Size(plan.ops[i].axes[static_cast<size_t>(t)]), 8)
        << graph_.nodes[i].name;
  }
}

// A sample of a layer keeps 4 bytes of 8 x 2,000,000 elements, cut by its
// shards, and of 1024 x 2048 more; it does not need what it read. The head
// keeps 4 bytes of 8 x 4,096,000.
TEST_F(MeasuredLayers, KeepWhatTheySay) {
  const auto activations = [&](const std::string& strategy) {
    const Evaluation step = Price(strategy);
    return step.memory[0]
        .parts[static_cast<size_t>(MemoryCategory::kActivation)]
        .value;
  };
  const int64_t stream = 1024 * 2048;
  const int64_t kept = 4 * (8 * 2'000'000 + stream);
  const int64_t logits = 4 * 8 * 4'096'000;
  // Two samples more, at the peak in the head's backward: the head's operand
  // and its gradient in bf16, besides.
  EXPECT_EQ(activations("dp=8,mbs=4") - activations("dp=8,mbs=2"),
            2 * (6 * kept + logits + 2 * 2 * stream));
  // Without tensor parallelism a rank has 7 of 8 shards more.
  EXPECT_EQ(activations("dp=8,mbs=1") - activations("dp=1,tp=8,mbs=1"),
            7 * (6 * 4 * 2'000'000 + logits / 8));
  // A layer that runs again keeps what it read, and nothing else, but for the
  // one that runs.
  EXPECT_LT(activations("dp=8,mbs=4,recompute=full"),
            activations("dp=8,mbs=4") - 5 * 4 * (kept - 2 * stream));
}

}  // namespace
}  // namespace tessera
