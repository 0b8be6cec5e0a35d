#include "tools/which_strategy.h"

#include <gtest/gtest.h>

#include "planner/topology/topologies.h"

namespace tessera {
namespace {

Cluster Preset(const char* name) {
  auto cluster = MakeCluster(name);
  TESSERA_CHECK(cluster.has_value()) << cluster.error().ToString();
  return *std::move(cluster);
}

// Eight NICs of 200 Gb/s, of which 92 % are data, for eight GPUs; one of 100.
TEST(NetworkOfDevice, CountsWhatEntersANode) {
  EXPECT_DOUBLE_EQ(NetworkOfDevice(Preset("dgx-a100-80gb:2")), 23e9);
  EXPECT_DOUBLE_EQ(NetworkOfDevice(Preset("pcie-a100:2")), 11.5e9 / 8);
  EXPECT_DOUBLE_EQ(NetworkOfDevice(Preset("dgx-a100-80gb:1")), 0);
}

TEST(NetworkOfDevice, DoesNotGoByNames) {
  Cluster cluster = Preset("dgx-a100-80gb:2");
  for (Vertex& vertex : cluster.vertices) vertex.name = "host-" + vertex.name;
  EXPECT_DOUBLE_EQ(NetworkOfDevice(cluster), 23e9);
  // Node 0 may have no device.
  for (Device& device : cluster.devices) device.node += 3;
  EXPECT_DOUBLE_EQ(NetworkOfDevice(cluster), 23e9);
}

}  // namespace
}  // namespace tessera
