#include "planner/topology/topologies.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>

#include "planner/topology/gpus.h"
#include "planner/topology/hardware.h"

namespace tessera {
namespace {

TEST(MakeCluster, ReadsNameNodesAndGpus) {
  EXPECT_EQ(MakeCluster("dgx-h200")->devices.size(), 8u);
  EXPECT_EQ(MakeCluster("dgx-h200:3")->devices.size(), 24u);
  EXPECT_EQ(MakeCluster("dgx-h200:1x1")->devices.size(), 1u);
  EXPECT_EQ(MakeCluster("dgx-h200:2x4")->devices.size(), 8u);
  EXPECT_EQ(MakeCluster("local-cpu:4")->devices.size(), 4u);
  EXPECT_EQ(MakeCluster("local-cpu:4")->num_nodes(), 1);
  EXPECT_EQ(MakeCluster("gb200-nvl72:2")->devices.size(), 144u);
  EXPECT_EQ(MakeCluster("g4dn.12xlarge:2")->devices.size(), 8u);
  EXPECT_EQ(MakeCluster("g5.48xlarge")->devices.size(), 8u);
  EXPECT_EQ(MakeCluster("g6.48xlarge:1x2")->devices.size(), 2u);
  EXPECT_EQ(MakeCluster("dgx-h200")->name, "dgx-h200:1");
  EXPECT_EQ(MakeCluster("dgx-h200:2x4")->name, "dgx-h200:2x4");
}

TEST(MakeCluster, RefusesBadSpecs) {
  for (const char* spec :
       {"dgx-h200:", "dgx-h200:0", "dgx-h200:-1", "dgx-h200:x2", "dgx-h200:1x9",
        "dgx-h200:1x0", "dgx-h200:1x", "dgx-h200:1.5", "dgx-h200:2 ",
        "dgx-h200:99999999999", "local-cpu:2x2", "titan-rtx-pair:1x3"}) {
    const Result<Cluster> cluster = MakeCluster(spec);
    ASSERT_FALSE(cluster) << spec;
    EXPECT_EQ(cluster.error().code, ErrorCode::kInvalidInput) << spec;
    EXPECT_THAT(cluster.error().where, ::testing::HasSubstr(spec));
  }
  const Result<Cluster> unknown = MakeCluster("dgx-h201:2");
  ASSERT_FALSE(unknown);
  EXPECT_EQ(unknown.error().code, ErrorCode::kNotFound);
  EXPECT_THAT(unknown.error().message,
              ::testing::HasSubstr("did you mean 'dgx-h200'?"));
  EXPECT_FALSE(MakeCluster(""));
}

// Each V100 of the cube mesh has six NVLinks; three PCIe levels join the rest.
TEST(Topologies, CubeMeshHasSixNvLinksPerGpu) {
  const Cluster cluster = *MakeCluster("dgx1-v100-32gb");
  std::map<int32_t, int> nvlinks;
  for (const Link& link : cluster.links) {
    const std::string& name =
        cluster.link_types[static_cast<size_t>(link.type)].name;
    if (name == "nvlink2") nvlinks[link.from.value] += 1;
    if (name == "nvlink2-x2") nvlinks[link.from.value] += 2;
  }
  EXPECT_EQ(nvlinks.size(), 8u);
  for (const auto& [vertex, count] : nvlinks) EXPECT_EQ(count, 6) << vertex;
}

// Nodes of which the last side's neighbours are next to each other, by sides as
// near to each other as divisors allow: of all the largest is the smallest,
// then the second. 42 are 7 x 3 x 2, joined by 42 + 42 + 21 cables.
TEST(Topologies, ToriAreAsCubicAsTheirCounts) {
  for (int nodes = 2; nodes <= 150; ++nodes) {
    std::array<int, 3> sides = {nodes, 1, 1};
    for (int a = 1; a <= nodes; ++a) {
      for (int b = 1; b <= a && a * b <= nodes; ++b) {
        const int c = nodes / (a * b);
        if (a * b * c == nodes && c <= b) {
          sides = std::min(sides, std::array{a, b, c});
        }
      }
    }
    std::set<int> expected;  // whom the first node is joined to
    int cables = 0;
    int stride = nodes;
    for (const int side : sides) {
      stride /= side;
      if (side == 1) continue;
      expected.insert({stride, (side - 1) * stride});
      cables += side == 2 ? nodes / 2 : nodes;
    }
    const Cluster cluster =
        *MakeCluster("p3.16xlarge:" + std::to_string(nodes) + "x1@torus");
    std::set<int> joined;
    int trunks = 0;
    for (const Link& link : cluster.links) {
      const std::string& from = cluster.vertices[link.from.index()].name;
      const std::string& to = cluster.vertices[link.to.index()].name;
      if (!from.starts_with("router") || !to.starts_with("router")) continue;
      ++trunks;
      if (from == "router0") joined.insert(std::stoi(to.substr(6)));
    }
    EXPECT_EQ(joined, expected) << nodes;
    EXPECT_EQ(trunks, 2 * cables) << nodes;
  }
}

TEST(Topologies, LocalCpuRanksShareOneHost) {
  const Cluster cluster = *MakeCluster("local-cpu:4");
  EXPECT_TRUE(cluster.device_types[0].concurrent_streams);
  EXPECT_TRUE(cluster.device_types[0].shared_memory);
  EXPECT_EQ(cluster.device_types[0].memory.value, 4'000'000'000);
  EXPECT_GT(cluster.device_types[0].Peak(DType::kBFloat16).value, 0);
  EXPECT_GT(cluster.device_types[0].Peak(DType::kFloat64).value, 0);
}

// Every GPU's figures, links and system are there.
TEST(KnownGpusTest, NameRowsThatExist) {
  for (const KnownGpu& gpu : KnownGpus()) {
    SCOPED_TRACE(gpu.name);
    EXPECT_EQ(FindGpu(gpu.name), &gpu);
    EXPECT_NE(std::ranges::find(DeviceTypes(), gpu.device, &DeviceType::name),
              DeviceTypes().end());
    EXPECT_EQ(gpu.nvlink.empty(), gpu.nvlinks == 0);
    if (!gpu.nvlink.empty()) {
      EXPECT_NE(std::ranges::find(LinkTypes(), gpu.nvlink, &LinkType::name),
                LinkTypes().end());
    }
    const auto cluster = MakeCluster(gpu.topology);
    ASSERT_TRUE(cluster);
    EXPECT_EQ(cluster->device_types[0].name, gpu.device);
  }
  EXPECT_EQ(FindGpu("NVIDIA L40"), nullptr);
  EXPECT_EQ(FindGpu("NVIDIA H200 NVL"), nullptr);  // on PCIe
  EXPECT_EQ(FindGpu(""), nullptr);
}

}  // namespace
}  // namespace tessera
