// Fields of clusters by their paths.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "planner/io/cluster_io.h"
#include "planner/topology/topologies.h"

namespace tessera {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

Result<Cluster> With(const std::string& path, const std::string& value) {
  const Cluster cluster = *MakeCluster("dgx-a100-80gb:2");
  const FieldValue field = {path, *ParseAmount(value)};
  return WithFields(cluster, {&field, 1});
}

std::string ErrorOf(const std::string& path, const std::string& value) {
  const auto changed = With(path, value);
  return changed ? "" : changed.error().ToString();
}

TEST(ClusterFields, ByIndexByNameAndAll) {
  for (const char* path :
       {"device_types[0].memory_bytes", "device_types[*].memory_bytes",
        "device_types.memory", "device_types[a100-sxm4-80gb].memory"}) {
    const auto changed = With(path, "141GB");
    ASSERT_TRUE(changed) << path << changed.error().ToString();
    EXPECT_EQ(changed->device_types[0].memory.value, 141'000'000'000) << path;
  }
  const Cluster before = *MakeCluster("dgx-a100-80gb:2");
  // Only the named type.
  const auto nic = With("link_types[ib-hdr].latency", "7us");
  ASSERT_TRUE(nic);
  for (size_t l = 0; l < before.link_types.size(); ++l) {
    const bool named = before.link_types[l].name == "ib-hdr";
    EXPECT_EQ(nic->link_types[l].latency.picoseconds,
              named ? 7'000'000 : before.link_types[l].latency.picoseconds);
  }
}

// A slow device's type has the name of its kind.
TEST(ClusterFields, ANameIsOfAllTypesThatHaveIt) {
  Cluster cluster = *MakeCluster("dgx-a100-80gb:1");
  cluster.device_types.push_back(cluster.device_types[0]);
  cluster.device_types[1].slowness = 2;
  const FieldValue field = {"device_types[a100-sxm4-80gb].memory",
                            *ParseAmount("10GB")};
  const auto changed = WithFields(cluster, {&field, 1});
  ASSERT_TRUE(changed);
  for (const DeviceType& type : changed->device_types) {
    EXPECT_EQ(type.memory.value, 10'000'000'000);
  }
}

TEST(ClusterFields, AFactorMultiplies) {
  const Cluster before = *MakeCluster("dgx-a100-80gb:2");
  const auto changed = With("device_types[0].memory_bandwidth", "1.5x");
  ASSERT_TRUE(changed);
  EXPECT_DOUBLE_EQ(changed->device_types[0].memory_bandwidth.value,
                   1.5 * before.device_types[0].memory_bandwidth.value);
}

TEST(ClusterFields, TextsAndFlags) {
  EXPECT_EQ(With("name", "mine")->name, "mine");
  EXPECT_FALSE(With("device_types.concurrent_streams", "false")
                   ->device_types[0]
                   .concurrent_streams);
  EXPECT_THAT(ErrorOf("device_types.concurrent_streams", "2"),
              HasSubstr("not true or false"));
}

TEST(ClusterFields, WrongPathsNameTheNearOnes) {
  EXPECT_THAT(ErrorOf("device_types.memroy", "1GB"),
              HasSubstr("did you mean 'memory'?"));
  EXPECT_THAT(ErrorOf("devise_types.memory", "1GB"),
              HasSubstr("did you mean 'device_types'?"));
  EXPECT_THAT(ErrorOf("device_types[1].memory", "1GB"),
              HasSubstr("there are 1 of 'device_types'"));
  EXPECT_THAT(ErrorOf("link_types[ib-hdx].latency", "1us"),
              HasSubstr("did you mean 'ib-hdr'?"));
  EXPECT_THAT(ErrorOf("device_types", "1GB"), HasSubstr("needs a field"));
  EXPECT_THAT(ErrorOf("name.memory", "1GB"), HasSubstr("has no fields"));
  EXPECT_THAT(ErrorOf("device_types[0.memory", "1GB"),
              HasSubstr("'[' without ']'"));
  EXPECT_THAT(ErrorOf("name[0]", "x"), HasSubstr("is no list"));
}

TEST(ClusterFields, WrongUnitsAndValues) {
  EXPECT_THAT(ErrorOf("device_types.memory", "80"),
              HasSubstr("not a size such as"));
  EXPECT_THAT(ErrorOf("device_types.memory", "80GB/s"),
              HasSubstr("not a size such as"));
  EXPECT_THAT(ErrorOf("link_types.bandwidth", "80GB"),
              HasSubstr("not a bandwidth such as"));
  // 0 needs no unit, an index has no multiples.
  EXPECT_EQ(With("host[0].storage", "0")->hosts[0].storage, Bytes{});
  EXPECT_THAT(ErrorOf("device_types.host", "1.1x"),
              HasSubstr("'1.1x' is not a number without a unit"));
  EXPECT_EQ(ErrorOf("device_types[0].host", "1"),
            "device_types[0].host: is 1, must be in [0, 1)");
  // What is counted is whole, bytes are rounded, and so is what a factor gives:
  // 1.001 times 108 multiprocessors.
  EXPECT_EQ(ErrorOf("device_types[0].multiprocessors", "54.4"),
            "device_types[0].multiprocessors: '54.4' is not a whole number");
  EXPECT_EQ(With("device_types.multiprocessors", "54")
                ->device_types[0]
                .multiprocessors,
            54);
  EXPECT_EQ(With("device_types.multiprocessors", "1.001x")
                ->device_types[0]
                .multiprocessors,
            108);
  EXPECT_EQ(With("device_types.memory", "1.0000000005GB")
                ->device_types[0]
                .memory.value,
            1'000'000'001);
  // The cluster as a whole is validated.
  EXPECT_THAT(ErrorOf("device_types.memory", "0B"),
              HasSubstr("must be positive"));
}

TEST(ClusterFields, AllPathsAreListed) {
  const std::vector<std::string> paths = ClusterFieldPaths();
  for (const char* path :
       {"name", "device_types[*].memory", "device_types[*].upkeep.price",
        "link_types[*].latency", "host[*].storage_write"}) {
    EXPECT_THAT(paths, Contains(path));
  }
}

TEST(ClusterFields, PresetsKnowTheirUpkeep) {
  const Cluster p5 = *MakeCluster("p5.48xlarge:1");
  const Upkeep& upkeep = p5.device_types[0].upkeep;
  EXPECT_DOUBLE_EQ(upkeep.power, 700);
  EXPECT_DOUBLE_EQ(upkeep.price, 98.32 / 8);
  // 54 days of 16,384 devices over 419 failures are about 5.8 years of one.
  EXPECT_NEAR(upkeep.mtbf / (365 * 86400), 5.78, 0.01);
  EXPECT_FALSE(upkeep.source.empty());
  EXPECT_EQ(MakeCluster("local-cpu:2")->device_types[0].upkeep, Upkeep{});
}

}  // namespace
}  // namespace tessera
