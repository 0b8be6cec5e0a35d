// Which GPU a rank has, and what a job on GPUs looks like to the planner.

#include "runtime/launch/backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <set>

namespace tessera {
namespace {

using ::testing::HasSubstr;

TEST(GpuOfRankTest, EachRankHasItsOwn) {
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(GpuOfRank({.rank = rank, .size = 4, .gpus = 8}).value(), rank);
  }
  EXPECT_EQ(RanksPerGpu({.rank = 0, .size = 4, .gpus = 8}), 1);
}

TEST(GpuOfRankTest, FewerGpusThanRanksIsBadInput) {
  const auto gpu = GpuOfRank({.rank = 0, .size = 4, .gpus = 2});
  ASSERT_FALSE(gpu);
  EXPECT_EQ(gpu.error().code, ErrorCode::kInvalidInput);
  EXPECT_THAT(gpu.error().message,
              HasSubstr("4 ranks on this host, but a process sees 2 GPUs"));
  EXPECT_THAT(gpu.error().message, HasSubstr("TESSERA_SHARE_GPU=1"));
}

// Three ranks on two GPUs: 0, 1, 0. One of the GPUs has two.
TEST(GpuOfRankTest, SharedGpusAreDealtOutInTurn) {
  for (int rank = 0; rank < 3; ++rank) {
    const HostRanks ranks{.rank = rank, .size = 3, .gpus = 2, .share = true};
    EXPECT_EQ(GpuOfRank(ranks).value(), rank % 2);
    EXPECT_EQ(RanksPerGpu(ranks), 2);
  }
}

TEST(GpuOfRankTest, ARankThatWasGivenOneGpuSeesItAsTheFirst) {
  HostRanks ranks{.rank = 3, .size = 4, .gpus = 1, .may_be_bound = true};
  EXPECT_EQ(GpuOfRank(ranks).value(), 0);
  EXPECT_EQ(RanksPerGpu(ranks), 1);
  ranks.may_be_bound = false;
  EXPECT_FALSE(GpuOfRank(ranks));
}

TEST(HostRanksOfTest, AreThoseOfTheEnvironment) {
  RankEnvironment environment;
  environment.local_rank = 1;
  environment.local_size = 2;
  EXPECT_FALSE(HostRanksOf(environment, 1).may_be_bound);
  environment.may_be_bound = true;
  const HostRanks ranks = HostRanksOf(environment, 1);
  EXPECT_TRUE(ranks.may_be_bound);
  EXPECT_EQ(ranks.rank, 1);
  EXPECT_EQ(ranks.size, 2);
  EXPECT_EQ(ranks.gpus, 1);
}

TEST(ClusterOfGpusTest, HasTheGpusNameAndMemory) {
  std::string warning;
  const Gpu gpu{"NVIDIA H200", {150'000'000'000}};
  const Cluster cluster = ClusterOfGpus(gpu, 4, 4, 1, &warning).value();
  EXPECT_EQ(cluster.name, "4 x NVIDIA H200");
  EXPECT_EQ(cluster.devices.size(), 4u);
  EXPECT_EQ(cluster.num_nodes(), 1);
  EXPECT_EQ(cluster.TypeOf(DeviceId(0)).name, "h200-sxm5-141gb");
  EXPECT_EQ(cluster.TypeOf(DeviceId(0)).memory, Bytes{150'000'000'000});
  EXPECT_EQ(warning, "");
  EXPECT_TRUE(Validate(cluster).empty());
}

TEST(ClusterOfGpusTest, RanksThatShareAGpuHaveAPartOfItsMemory) {
  std::string warning;
  const Gpu gpu{"NVIDIA A100-SXM4-80GB", {80'000}};
  const Cluster cluster = ClusterOfGpus(gpu, 2, 2, 2, &warning).value();
  EXPECT_EQ(cluster.TypeOf(DeviceId(1)).memory, Bytes{40'000});
  EXPECT_EQ(cluster.TypeOf(DeviceId(1)).name, "a100-sxm4-80gb");
}

// Eight GPUs are a node; of 6 ranks on hosts of 4, 3 divide them.
TEST(ClusterOfGpusTest, RanksFillNodes) {
  std::string warning;
  const Gpu gpu{"NVIDIA H100 80GB HBM3", {80'000}};
  for (const auto& [ranks, per_host, nodes] :
       {std::array{16, 8, 2}, {16, 16, 2}, {4, 1, 4}, {6, 4, 2}}) {
    const Cluster cluster =
        ClusterOfGpus(gpu, ranks, per_host, 1, &warning).value();
    EXPECT_EQ(cluster.devices.size(), static_cast<size_t>(ranks));
    EXPECT_EQ(cluster.num_nodes(), nodes) << ranks << " by " << per_host;
  }
}

// Which hosts of four are of one rack is not known here.
TEST(ClusterOfGpusTest, HostsThatNvLinkMayJoinAreToldOf) {
  std::string warning;
  const Gpu gpu{"NVIDIA GB200", {80'000}};
  EXPECT_TRUE(ClusterOfGpus(gpu, 4, 4, 1, &warning));
  EXPECT_EQ(warning, "");
  EXPECT_EQ(ClusterOfGpus(gpu, 8, 4, 1, &warning)->num_nodes(), 2);
  EXPECT_THAT(warning, HasSubstr("hosts of NVIDIA GB200 may be joined"));
}

TEST(ClusterOfGpusTest, AnUnknownGpuIsToldOf) {
  std::string warning;
  const Gpu gpu{"NVIDIA X1", {80'000}};
  const Cluster cluster = ClusterOfGpus(gpu, 2, 2, 1, &warning).value();
  EXPECT_EQ(cluster.name, "2 x NVIDIA X1");
  EXPECT_THAT(warning, HasSubstr("'NVIDIA X1' are not known"));
}

TEST(SharedGpuVariablesTest, EveryRankIsAHostOfItsOwn) {
  std::set<std::string> hosts;
  for (int rank = 0; rank < 4; ++rank) {
    for (const Variable& variable : SharedGpuVariables(rank)) {
      if (variable.name == "NCCL_HOSTID") hosts.insert(variable.value);
    }
  }
  EXPECT_EQ(hosts.size(), 4u);
}

}  // namespace
}  // namespace tessera
