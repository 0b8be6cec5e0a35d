#include "costmodel/group_classes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "costmodel/collective/collective.h"
#include "planner/base/rng.h"
#include "planner/topology/topologies.h"

namespace tessera {
namespace {

DeviceGroup GroupOf(const std::vector<DeviceId>& devices) {
  DeviceGroup group;
  group.devices = devices;
  group.axes = {{"x", static_cast<int>(devices.size())}};
  return group;
}

// The first device of each of these hosts of 8.
DeviceGroup OnHosts(const std::vector<int>& hosts) {
  std::vector<DeviceId> devices;
  for (int host : hosts) devices.push_back(DeviceId(8 * host));
  return GroupOf(devices);
}

struct Numbers {
  Cluster cluster;
  Router router{cluster};
  GroupClasses classes{cluster, router};
  int operator()(const std::vector<int>& hosts) const {
    return classes.NumberOf(OnHosts(hosts), nullptr);
  }
};

TEST(GroupClasses, AnyHostsOfOneSwitchAreAlike) {
  const Numbers number{MakeCluster("dgx-a100-80gb:6").value()};
  EXPECT_TRUE(number.classes.hosts_are_alike());
  EXPECT_EQ(number({0, 1}), number({2, 5}));
  EXPECT_NE(number({0, 1}), number({0, 1, 2}));
}

// Leaves of 32 NICs: 4 hosts each, on the last leaf 2.
TEST(GroupClasses, LeavesOfAFatTreeAreAlike) {
  const Numbers number{MakeCluster("dgx-a100-80gb:10@fat-tree").value()};
  EXPECT_FALSE(number.classes.hosts_are_alike());
  EXPECT_EQ(number({0, 1}), number({2, 3}));
  EXPECT_EQ(number({0, 1}), number({5, 6}));
  EXPECT_EQ(number({0, 4}), number({3, 5}));
  EXPECT_NE(number({0, 1}), number({0, 4}));
  EXPECT_NE(number({0, 1, 2}), number({0, 1, 4}));
  // The last leaf is another: fewer hosts share its way up.
  EXPECT_NE(number({0, 1}), number({8, 9}));
  EXPECT_NE(number({0, 4}), number({0, 8}));
  EXPECT_EQ(number({0, 8}), number({7, 9}));
}

TEST(GroupClasses, HostsOfOneKindAreAlikeBesideOthers) {
  const Numbers number{MakeCluster("dgx-a100-80gb:2+dgx-h100:2").value()};
  EXPECT_FALSE(number.classes.hosts_are_alike());
  EXPECT_EQ(number({0}), number({1}));
  EXPECT_EQ(number({2}), number({3}));
  EXPECT_NE(number({0}), number({2}));
  EXPECT_EQ(number({0, 2}), number({1, 3}));
  EXPECT_NE(number({0, 2}), number({0, 1}));
}

// A class's group stands for all of it: every way to run a collective takes the
// same time.
TEST(GroupClasses, MembersCostTheSame) {
  for (const char* name :
       {"dgx-a100-80gb:10@fat-tree:4", "p4d.24xlarge:11@fat-tree",
        "dgx-h100:9@rails:4", "dgx-a100-80gb:6@dragonfly",
        "dgx-a100-80gb:8@torus", "pcie-a100:2+dgx-h100:3"}) {
    const Cluster cluster = MakeCluster(name).value();
    const CollectiveModel model(cluster);
    const GroupClasses classes(cluster, model.router());
    Rng rng(7);
    std::vector<DeviceId> all(cluster.devices.size());
    for (size_t d = 0; d < all.size(); ++d) {
      all[d] = DeviceId(static_cast<int>(d));
    }
    for (int i = 0; i < 60; ++i) {
      for (size_t d = all.size(); d > 1; --d) {
        std::swap(all[d - 1], all[rng.Below(static_cast<uint32_t>(d))]);
      }
      const std::vector<DeviceId> devices(all.begin(),
                                          all.begin() + 2 + rng.Below(7));
      const GroupClass& same =
          classes[classes.NumberOf(GroupOf(devices), nullptr)];
      for (CommKind kind : {CommKind::kAllReduce, CommKind::kAllToAll}) {
        const std::array<std::vector<DeviceId>, 1> own = {devices};
        const std::array<std::vector<DeviceId>, 1> its = {same.group.devices};
        const auto& a = model.Options(kind, own);
        const auto& b = model.Options(kind, its);
        ASSERT_EQ(a.size(), b.size()) << name;
        for (size_t k = 0; k < a.size(); ++k) {
          EXPECT_EQ(a[k].algorithm, b[k].algorithm);
          EXPECT_DOUBLE_EQ(a[k].latency_s, b[k].latency_s) << name;
          EXPECT_DOUBLE_EQ(a[k].seconds_per_byte, b[k].seconds_per_byte)
              << name << " " << a[k].algorithm;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera
