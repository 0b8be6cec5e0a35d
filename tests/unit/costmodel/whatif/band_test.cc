#include "costmodel/whatif/band.h"

#include <gtest/gtest.h>

#include "planner/topology/stacks.h"
#include "planner/topology/topologies.h"

namespace tessera {
namespace {

// A stack that has no row would be given, in silence, what all have together.
TEST(StepTimeBand, KnowsEveryStack) {
  for (const Stack& stack : Stacks()) {
    const ErrorBand band = StepTimeBand(stack.name);
    EXPECT_NE(band.source.find(stack.name), std::string::npos) << stack.name;
    EXPECT_GT(band.median, 0) << stack.name;
    EXPECT_GE(band.mean, band.median) << stack.name;
  }
  EXPECT_NE(StepTimeBand("tessera").source.find("their own"),
            std::string::npos);
}

TEST(StepTimeBand, IsOfWhatTimesAreFrom) {
  const Cluster gpus = MakeCluster("dgx-h100:1").value();
  const Cluster cores = MakeCluster("local-cpu:2").value();
  const SourceShares analytical = {0.1, 0.2, 0.7};
  EXPECT_EQ(StepTimeBand(gpus, analytical).source,
            StepTimeBand("tessera").source);
  const SourceShares measured = {0.6, 0.3, 0.1};
  // No run on GPUs says how far off assumed cores are.
  EXPECT_EQ(StepTimeBand(cores, analytical).source,
            "tessera run without a profile, on a host of two cores");
  EXPECT_GT(StepTimeBand(cores, analytical).median,
            StepTimeBand(cores, measured).median);
  EXPECT_NE(StepTimeBand(gpus, measured).source.find("H200"),
            std::string::npos);
  EXPECT_LT(StepTimeBand(gpus, measured).median,
            StepTimeBand(cores, measured).median);
}

}  // namespace
}  // namespace tessera
