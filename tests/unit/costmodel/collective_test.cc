#include "costmodel/collective/collective.h"

#include <gtest/gtest.h>

#include <cmath>

#include "planner/topology/topologies.h"

namespace tessera {
namespace {

constexpr Bytes kHalfGiB = {int64_t{1} << 29};

std::vector<DeviceId> Range(int64_t first, int64_t count, int64_t stride = 1) {
  std::vector<DeviceId> devices;
  for (int64_t i = 0; i < count; ++i) {
    devices.emplace_back(first + i * stride);
  }
  return devices;
}

double BestSeconds(const CollectiveModel& model, CommKind kind,
                   const std::vector<std::vector<DeviceId>>& groups,
                   Bytes payload) {
  return CollectiveModel::Best(model.Options(kind, groups), payload)
      .Seconds(payload);
}

// Bus bandwidth as nccl-tests define it: 2 (n - 1) / n of the payload over the
// time, in GB/s.
double AllReduceBusBandwidth(const std::string& spec, int n, Bytes payload) {
  const Cluster cluster = *MakeCluster(spec);
  const CollectiveModel model(cluster);
  const double seconds =
      BestSeconds(model, CommKind::kAllReduce, {Range(0, n)}, payload);
  return 2.0 * (n - 1) / n * static_cast<double>(payload.value) / seconds / 1e9;
}

// The affine form on a small case, by hand: four H100 on one NVSwitch. A ring
// of 2 * 3 steps of 0.82 us; each GPU's link carries 2 * 3/4 of the buffer.
TEST(CollectiveModel, RingByHand) {
  const Cluster cluster = *MakeCluster("dgx-h100");
  const CollectiveModel model(cluster);
  const std::vector<std::vector<DeviceId>> groups = {Range(0, 4)};
  const auto& options = model.Options(CommKind::kAllReduce, groups);
  ASSERT_EQ(options.size(), 1u);  // one host: no hierarchy
  EXPECT_EQ(options[0].algorithm, "ring");
  EXPECT_NEAR(options[0].latency_s, 8e-6 + 6 * 0.82e-6, 1e-15);
  EXPECT_NEAR(options[0].seconds_per_byte, 1.5 / 350e9, 1e-24);
  ASSERT_EQ(options[0].loads.size(), 8u);  // four links, both directions
  for (const LinkLoad& load : options[0].loads) {
    EXPECT_NEAR(load.bytes_per_payload_byte, 1.5, 1e-12);
  }
  EXPECT_EQ(&options, &model.Options(CommKind::kAllReduce, groups));
}

// Published bus bandwidths at 512 MiB (NVIDIA aiconfigurator's NCCL table),
// within 16 %; more where the ring is not what NCCL runs.
TEST(CollectiveModel, PublishedAllReduceBandwidth) {
  const struct {
    const char* spec;
    int n;
    double published;
    double tolerance;
  } points[] = {
      {"dgx-a100-80gb", 2, 193, 0.16},
      {"dgx-a100-80gb", 4, 217, 0.04},
      {"dgx-a100-80gb", 8, 222, 0.01},
      {"dgx-h100", 2, 318, 0.11},
      {"dgx-h100", 4, 350, 0.01},
      {"dgx-h100", 8, 445, 0.23},  // NVLS
      {"dgx-h200", 2, 315, 0.12},
      {"dgx-h200", 4, 348, 0.02},
      {"dgx-h200", 8, 460, 0.25},  // NVLS
      {"dgx-b200", 2, 534, 0.19},
      {"dgx-b200", 4, 634, 0.02},
      {"dgx-b200", 8, 704, 0.12},  // NVLS
      // vTrain's table, 8 of 8 V100 of a DGX-1-like mesh: 134; 4: 85; 2: 22.5.
      {"dgx1-v100-32gb", 8, 134, 0.02},
      {"dgx1-v100-32gb", 4, 85, 0.07},
      {"dgx1-v100-32gb", 2, 22.55, 0.02},
  };
  for (const auto& point : points) {
    const double found = AllReduceBusBandwidth(point.spec, point.n, kHalfGiB);
    EXPECT_NEAR(found, point.published, point.tolerance * point.published)
        << point.spec << " on " << point.n;
  }
}

// Latency floors of an all-reduce on 8 GPUs: A100 21.3 us, H100 15.6, H200
// 16.0, B200 25.1.
TEST(CollectiveModel, PublishedAllReduceLatency) {
  const struct {
    const char* spec;
    double published;
    double tolerance;
  } points[] = {{"dgx-a100-80gb", 21.3e-6, 0.01},
                {"dgx-h100", 15.6e-6, 0.26},
                {"dgx-h200", 16.0e-6, 0.23},
                {"dgx-b200", 25.1e-6, 0.02}};
  for (const auto& point : points) {
    const Cluster cluster = *MakeCluster(point.spec);
    const CollectiveModel model(cluster);
    const double seconds =
        BestSeconds(model, CommKind::kAllReduce, {Range(0, 8)}, {512});
    EXPECT_NEAR(seconds, point.published, point.tolerance * point.published)
        << point.spec;
  }
}

// Two p4de nodes (aws-samples): 41.8 GB/s by the buffer at 2 GiB, 163 us at
// least. Two p5 nodes: 69 us at least.
TEST(CollectiveModel, PublishedTwoNodeAllReduce) {
  const Cluster p4d = *MakeCluster("p4d.24xlarge:2");
  const CollectiveModel model(p4d);
  const Bytes two_gib = {int64_t{1} << 31};
  const double seconds =
      BestSeconds(model, CommKind::kAllReduce, {Range(0, 16)}, two_gib);
  EXPECT_NEAR(static_cast<double>(two_gib.value) / seconds / 1e9, 41.8, 0.8);
  EXPECT_NEAR(BestSeconds(model, CommKind::kAllReduce, {Range(0, 16)}, {8}),
              163e-6, 0.05 * 163e-6);
  const Cluster p5 = *MakeCluster("p5.48xlarge:2");
  const CollectiveModel p5_model(p5);
  EXPECT_NEAR(BestSeconds(p5_model, CommKind::kAllReduce, {Range(0, 16)}, {8}),
              69e-6, 0.05 * 69e-6);
}

// Across hosts the hierarchy crosses NICs with 2 (m - 1) / m of the buffer, the
// flat rings with 2 (n - 1) / n: by hand for two hosts of eight A100, eight
// NICs of 21 GB/s each.
TEST(CollectiveModel, RingAndHierarchyByHand) {
  const Cluster cluster = *MakeCluster("dgx-a100-80gb:2");
  const CollectiveModel model(cluster);
  const std::vector<std::vector<DeviceId>> groups = {Range(0, 16)};
  const auto& options = model.Options(CommKind::kAllReduce, groups);
  ASSERT_EQ(options.size(), 2u);
  EXPECT_EQ(options[0].algorithm, "ring");
  EXPECT_NEAR(options[0].seconds_per_byte, 2.0 * 15 / 16 / (8 * 21e9), 1e-22);
  // A chunk goes round 15 of 16 links, of which two cross between the hosts:
  // 13 steps of 0.94 us and two of 5 us, twice.
  EXPECT_NEAR(options[0].latency_s, 8e-6 + 2 * (13 * 0.94e-6 + 2 * 5e-6),
              1e-12);
  EXPECT_EQ(options[1].algorithm, "hierarchical");
  // NVLink: 2 * 7/8 / 223e9 = 7.8e-12; NICs: 1 / (8 * 21e9) = 6.0e-12.
  EXPECT_NEAR(options[1].seconds_per_byte, 1.75 / 223e9, 1e-22);
  // 14 steps of 0.94 us, two crossings of 5 us.
  EXPECT_NEAR(options[1].latency_s, 8e-6 + 14 * 0.94e-6 + 2 * 5e-6, 1e-15);
}

// Eight gradient all-reduces, one per local index, on nodes that share one NIC:
// each byte of all eight passes it.
TEST(CollectiveModel, SubgroupsShareLinks) {
  const Cluster cluster = *MakeCluster("p3.16xlarge:2");
  const CollectiveModel model(cluster);
  std::vector<std::vector<DeviceId>> eight;
  for (int64_t i = 0; i < 8; ++i) eight.push_back(Range(i, 2, 8));
  const std::vector<std::vector<DeviceId>> one = {eight[0]};
  const double alone =
      model.Options(CommKind::kAllReduce, one)[0].seconds_per_byte;
  const double together =
      model.Options(CommKind::kAllReduce, eight)[0].seconds_per_byte;
  EXPECT_NEAR(alone, 1 / (0.84 * 25e9 / 8), 1e-20);
  EXPECT_NEAR(together, 8 * alone, 1e-18);
}

TEST(CollectiveModel, OneRankMovesNothing) {
  const Cluster cluster = *MakeCluster("dgx-h100");
  const CollectiveModel model(cluster);
  const std::vector<std::vector<DeviceId>> groups = {Range(0, 1), Range(3, 1)};
  const auto& options = model.Options(CommKind::kAllReduce, groups);
  ASSERT_EQ(options.size(), 1u);
  EXPECT_EQ(options[0].algorithm, "none");
  EXPECT_EQ(options[0].Seconds(kHalfGiB), 0);
}

TEST(CollectiveModel, SharedMemoryRanksGoDirect) {
  const Cluster cluster = *MakeCluster("local-cpu:4");
  const CollectiveModel model(cluster);
  const std::vector<std::vector<DeviceId>> groups = {Range(0, 4)};
  const auto& options = model.Options(CommKind::kAllReduce, groups);
  EXPECT_EQ(CollectiveModel::Best(options, {1 << 20}).algorithm, "direct");
}

// 512 nodes: nothing is quadratic in the devices.
TEST(CollectiveModel, ThousandsOfDevices) {
  const Cluster cluster = *MakeCluster("dgx-h100:512");
  const CollectiveModel model(cluster);
  const std::vector<std::vector<DeviceId>> all = {Range(0, 4096)};
  const auto& best =
      CollectiveModel::Best(model.Options(CommKind::kAllReduce, all), kHalfGiB);
  EXPECT_EQ(best.algorithm, "hierarchical");
  EXPECT_TRUE(std::isfinite(best.Seconds(kHalfGiB)));
}

}  // namespace
}  // namespace tessera
