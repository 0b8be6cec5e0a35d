#include "costmodel/evaluate/one_switch.h"

#include <gtest/gtest.h>

#include "costmodel/link/router.h"
#include "planner/topology/topologies.h"

namespace tessera {
namespace {

TEST(OnOneSwitch, RoutesBetweenHostsHaveTheirFirstAndLastLink) {
  const Cluster tree = MakeCluster("dgx-a100-80gb:6@fat-tree").value();
  const auto one = OnOneSwitch(tree);
  ASSERT_TRUE(one.has_value());
  const Router in_tree(tree);
  const Router direct(*one);
  // The first host hangs on another leaf than the last.
  const auto links = [](const Router& router) {
    return router.Route(DeviceId(0), DeviceId(40)).size();
  };
  EXPECT_EQ(links(direct) + 2, links(in_tree));
  // The first two hang on one.
  EXPECT_EQ(direct.Route(DeviceId(0), DeviceId(8)).size(),
            in_tree.Route(DeviceId(0), DeviceId(8)).size());
}

TEST(OnOneSwitch, IsNoneWhereItWouldBeTheSameOrMightBeSlower) {
  EXPECT_FALSE(OnOneSwitch(MakeCluster("dgx-a100-80gb:3").value()));
  EXPECT_FALSE(OnOneSwitch(MakeCluster("dgx-a100-80gb:3@rails").value()));
  Cluster joined = MakeCluster("dgx-a100-80gb:6@fat-tree").value();
  Connect(joined, joined.devices[0].vertex, joined.devices[47].vertex, 0);
  EXPECT_FALSE(OnOneSwitch(joined));
  // A NIC on two leaves.
  Cluster twice = MakeCluster("dgx-a100-80gb:6@fat-tree").value();
  const Router router(twice);
  for (size_t i = 0; i < twice.links.size(); ++i) {
    const Link link = twice.links[i];
    if (router.NodeOf(link.from) != 0 || router.NodeOf(link.to) >= 0) continue;
    Connect(twice, link.from, twice.links.back().to, link.type);
    break;
  }
  EXPECT_FALSE(OnOneSwitch(twice));
}

}  // namespace
}  // namespace tessera
