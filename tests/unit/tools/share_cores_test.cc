#include "tools/share_cores.h"

#include <gtest/gtest.h>

#include "planner/topology/topologies.h"

namespace tessera {
namespace {

struct Rates {
  double fp32 = 0;
  double memory = 0;
};

// Of a rank, over those of one core.
Rates RatesOf(int ranks, int cores, int threads) {
  Cluster cluster = MakeCluster("local-cpu:" + std::to_string(ranks)).value();
  const DeviceType core = cluster.device_types[0];
  ShareCores(cluster, cores, threads);
  EXPECT_TRUE(Validate(cluster).empty());
  const DeviceType& rank = cluster.device_types[0];
  return {rank.peak_fp32.value / core.peak_fp32.value,
          rank.memory_bandwidth.value / core.memory_bandwidth.value};
}

TEST(ShareCoresTest, RanksTakeTurnsWhereThreadsAreMoreThanCores) {
  // 8 threads on 2 cores, and 8 threads of 4 ranks on 6.
  EXPECT_DOUBLE_EQ(RatesOf(8, 2, 1).fp32, 0.25);
  EXPECT_DOUBLE_EQ(RatesOf(8, 2, 1).memory, 0.25);
  EXPECT_DOUBLE_EQ(RatesOf(4, 6, 2).fp32, 1.5);
}

TEST(ShareCoresTest, ARankUsesNoMoreCoresThanThreads) {
  EXPECT_DOUBLE_EQ(RatesOf(2, 2, 1).fp32, 1);
  EXPECT_DOUBLE_EQ(RatesOf(2, 64, 1).fp32, 1);
  EXPECT_DOUBLE_EQ(RatesOf(1, 4, 3).memory, 3);
}

}  // namespace
}  // namespace tessera
