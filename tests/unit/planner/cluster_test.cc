#include "planner/ir/cluster.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "planner/topology/topologies.h"

namespace tessera {
namespace {

Cluster TwoNodes() {
  return *MakeCluster("dgx-a100-80gb:2x2");
}

std::vector<std::string> Places(const Cluster& cluster) {
  std::vector<std::string> places;
  for (const Error& error : Validate(cluster)) places.push_back(error.where);
  return places;
}

TEST(Cluster, PeakIsPerDType) {
  const Cluster cluster = TwoNodes();
  const DeviceType& type = cluster.TypeOf(DeviceId(3));
  EXPECT_EQ(type.name, "a100-sxm4-80gb");
  EXPECT_EQ(type.Peak(DType::kBFloat16).value, 312e12);
  EXPECT_EQ(type.Peak(DType::kFloat32).value, 19.5e12);
  EXPECT_EQ(type.Peak(DType::kInt32).value, 0);
  EXPECT_EQ(cluster.num_nodes(), 2);
}

TEST(ClusterValidate, NamesEachMistake) {
  const struct {
    std::function<void(Cluster&)> break_it;
    std::string where;
  } cases[] = {
      {[](Cluster& c) { c.link_types[1].bandwidth = {0}; },
       "link_types[1].bandwidth"},
      {[](Cluster& c) { c.link_types[0].bandwidth = {NAN}; },
       "link_types[0].bandwidth"},
      {[](Cluster& c) { c.link_types[0].latency = {-1}; },
       "link_types[0].latency"},
      {[](Cluster& c) { c.link_types[0].start = {-1}; }, "link_types[0].start"},
      {[](Cluster& c) { c.link_types[0].in_switch_bandwidth = {-1}; },
       "link_types[0].in_switch_bandwidth"},
      {[](Cluster& c) { c.device_types[0].name = ""; }, "device_types[0].name"},
      {[](Cluster& c) { c.device_types[0].memory = {0}; },
       "device_types[0].memory"},
      {[](Cluster& c) { c.device_types[0].peak_bf16 = {-1}; },
       "device_types[0].peak_bf16"},
      {[](Cluster& c) { c.device_types[0].compute_efficiency = 1.5; },
       "device_types[0].compute_efficiency"},
      {[](Cluster& c) { c.device_types[0].memory_efficiency = 0; },
       "device_types[0].memory_efficiency"},
      {[](Cluster& c) { c.device_types[0].peak_fp8 = {1}; },
       "device_types[0].peak_fp8"},
      {[](Cluster& c) { c.device_types[0].host = 1; }, "device_types[0].host"},
      {[](Cluster& c) {
         c.hosts.push_back(c.hosts[0]);
         c.device_types.push_back(c.device_types[0]);
         c.device_types.back().host = 1;
         c.devices[3].type = static_cast<int>(c.device_types.size()) - 1;
       },
       "devices[3].type"},
      {[](Cluster& c) { c.device_types[0].slowness = 0; },
       "device_types[0].slowness"},
      {[](Cluster& c) { c.link_types[1].slowness = NAN; },
       "link_types[1].slowness"},
      {[](Cluster& c) { c.stack.tensor_exposed = 1.5; },
       "stack.tensor_exposed"},
      {[](Cluster& c) { c.stack.tensor_exposed = -0.5; },
       "stack.tensor_exposed"},
      {[](Cluster& c) { c.stack.experts_exposed = 1.5; },
       "stack.experts_exposed"},
      {[](Cluster& c) { c.device_types[0].multiprocessors = -1; },
       "device_types[0].multiprocessors"},
      {[](Cluster& c) { c.device_types[0].multiprocessors = 0; },
       "device_types[0].multiprocessors"},
      {[](Cluster& c) { c.device_types[0].generation = GpuGeneration::kNone; },
       "device_types[0].multiprocessors"},
      {[](Cluster& c) { c.devices[2].type = 7; }, "devices[2].type"},
      {[](Cluster& c) { c.devices[2].vertex = VertexId(-1); },
       "devices[2].vertex"},
      {[](Cluster& c) { c.devices[1].vertex = c.devices[0].vertex; },
       "devices[1].vertex"},
      {[](Cluster& c) { c.devices[2].node = 2; }, "devices[2].node"},
      {[](Cluster& c) { c.vertices[2].name = c.vertices[1].name; },
       "vertices[2].name"},
      {[](Cluster& c) { c.links[0].to = VertexId(99); }, "links[0].to"},
      {[](Cluster& c) { c.links[0].type = -1; }, "links[0].type"},
      {[](Cluster& c) { c.links[4].to = c.links[4].from; }, "links[4]"},
  };
  for (const auto& broken : cases) {
    Cluster cluster = TwoNodes();
    broken.break_it(cluster);
    EXPECT_THAT(Places(cluster), ::testing::Contains(broken.where));
  }
}

TEST(ClusterValidate, WithoutHostsNoneIsNumbered) {
  Cluster cluster = TwoNodes();
  cluster.hosts.clear();
  cluster.device_types[0].host = 1;
  ASSERT_THAT(Places(cluster), ::testing::ElementsAre("device_types[0].host"));
  EXPECT_EQ(Validate(cluster)[0].message,
            "is 1, but there are no figures of hosts");
}

// The bound is in the message, and the bound itself is valid.
TEST(ClusterValidate, BoundsFigures) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const struct {
    std::function<void(Cluster&, double)> set;
    double most;
    std::string message;
  } cases[] = {
      {[](Cluster& c, double v) { c.device_types[0].peak_bf16 = {v}; }, 1e21,
       "must be 0 or in [1e+09, 1e+21], is "},
      {[](Cluster& c, double v) { c.device_types[0].peak_fp4 = {v}; }, 1e21,
       "must be 0 or in [1e+09, 1e+21], is "},
      {[](Cluster& c, double v) { c.device_types[0].memory_bandwidth = {v}; },
       1e18, "must be at most 1e+18, is "},
      {[](Cluster& c, double v) {
         c.device_types[0].launch_overhead =
             Duration::FromSeconds(std::min(v, 1e6));
       },
       0.01, "must be at most 0.01, is "},
      {[](Cluster& c, double v) { c.device_types[0].slowness = v; }, 1e6,
       "must be in [0.001, 1e+06], is "},
      {[](Cluster& c, double v) { c.link_types[0].bandwidth = {v}; }, 1e18,
       "must be at most 1e+18, is "},
      {[](Cluster& c, double v) { c.link_types[0].in_switch_bandwidth = {v}; },
       1e18, "must be at most 1e+18, is "},
      {[](Cluster& c, double v) { c.hosts[0].device_link = {v}; }, 1e18,
       "must be at most 1e+18, is "},
      {[](Cluster& c, double v) { c.stack.sharded_bandwidth = {v}; }, 1e18,
       "must be at most 1e+18, is "},
      {[](Cluster& c, double v) { c.stack.kernel_traffic = v; }, 100,
       "must be at most 100, is "},
      {[](Cluster& c, double v) { c.stack.memory.fragmentation = v; }, 10,
       "must be at most 10, is "},
      {[](Cluster& c, double v) {
         c.device_types[0].memory = {static_cast<int64_t>(std::min(v, 9e18))};
       },
       1e18, "must be at most 1e+18, is "},
      {[](Cluster& c, double v) {
         c.hosts[0].storage = {static_cast<int64_t>(std::min(v, 9e18))};
       },
       1e18, "must be at most 1e+18, is "},
  };
  for (const auto& bound : cases) {
    Cluster cluster = TwoNodes();
    bound.set(cluster, bound.most);
    EXPECT_TRUE(Validate(cluster).empty()) << bound.message;
    for (const double more : {1.01 * bound.most, 1e300, kInfinity}) {
      bound.set(cluster, more);
      const std::vector<Error> errors = Validate(cluster);
      ASSERT_EQ(errors.size(), 1U) << more;
      EXPECT_THAT(errors[0].message, ::testing::StartsWith(bound.message));
    }
  }
  Cluster cluster = TwoNodes();
  cluster.device_types[0].upkeep.price = kInfinity;
  EXPECT_EQ(Validate(cluster)[0].message, "must be finite");
}

TEST(ClusterValidate, FindsDevicesThatCannotReachEachOther) {
  Cluster cluster = TwoNodes();
  std::erase_if(cluster.links, [&](const Link& link) {
    return cluster.vertices[link.to.index()].name == "leaf0" ||
           cluster.vertices[link.to.index()].name == "leaf1";
  });
  EXPECT_THAT(Places(cluster),
              ::testing::UnorderedElementsAre("devices[2]", "devices[2]",
                                              "devices[3]", "devices[3]"));
  EXPECT_EQ(Validate(cluster)[0].message,
            "'node1.gpu0' cannot be reached from 'node0.gpu0'");
  for (Vertex& vertex : cluster.vertices) vertex.name.clear();
  EXPECT_EQ(Validate(cluster)[0].message,
            "device 2 cannot be reached from device 0");
  cluster.devices.clear();
  EXPECT_THAT(Places(cluster), ::testing::Contains("devices"));
}

TEST(ClusterValidate, ReturnsAllProblems) {
  Cluster cluster = TwoNodes();
  cluster.link_types[0].bandwidth = {0};
  cluster.device_types[0].memory = {-5};
  EXPECT_THAT(Places(cluster),
              ::testing::ElementsAre("device_types[0].memory",
                                     "link_types[0].bandwidth"));
}

}  // namespace
}  // namespace tessera
