// What a rank copies of its own beside what it sends: where GPUs meet on a
// switch of their host, and nowhere else.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "costmodel/collective/collective.h"
#include "planner/topology/topologies.h"

namespace tessera {
namespace {

constexpr double kRate = 10e9;  // bytes a second

// Devices on one switch without NICs, `per_node` of each node.
Cluster OnOneSwitch(int devices, int per_node) {
  Cluster cluster;
  cluster.device_types = MakeCluster("dgx-h100:1")->device_types;
  cluster.link_types = {{"link", "", {kRate}, Duration::FromSeconds(1e-6)}};
  const VertexId hub = AddVertex(cluster, VertexKind::kSwitch, "hub");
  for (int d = 0; d < devices; ++d) {
    const DeviceId device =
        AddDevice(cluster, 0, d / per_node, "gpu" + std::to_string(d));
    Connect(cluster, cluster.devices[device.index()].vertex, hub, 0);
  }
  EXPECT_TRUE(Validate(cluster).empty());
  return cluster;
}

// Seconds per byte of an all-reduce among all by a ring.
double Slope(const Cluster& cluster) {
  std::vector<DeviceId> all;
  for (size_t d = 0; d < cluster.devices.size(); ++d) {
    all.emplace_back(static_cast<int64_t>(d));
  }
  const CollectiveModel model(cluster, {"ring", "simple"});
  return model.Options(CommKind::kAllReduce, {{all}})[0].seconds_per_byte;
}

// Each link carries 2 (n - 1) / n of the buffer.
TEST(OwnCopy, IsNoneOnASwitchOfTheNetwork) {
  for (const int n : {2, 3, 4, 8}) {
    EXPECT_NEAR(Slope(OnOneSwitch(n, 1)) * kRate, 2.0 * (n - 1) / n, 1e-9) << n;
  }
  EXPECT_NEAR(Slope(OnOneSwitch(4, 2)) * kRate, 1.5, 1e-9);
}

// Of an NVSwitch 1 / n more, at a rate that is fitted.
TEST(OwnCopy, IsOfASwitchOfTheHost) {
  const double two = Slope(OnOneSwitch(2, 2)) * kRate - 1;
  EXPECT_GT(two, 0.1);
  EXPECT_NEAR(Slope(OnOneSwitch(8, 8)) * kRate - 1.75, two / 4, 1e-9);
}

}  // namespace
}  // namespace tessera
