#include "costmodel/link/router.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <thread>

#include "planner/topology/hardware.h"
#include "planner/topology/topologies.h"

namespace tessera {
namespace {

// "gpu0 nvswitch gpu1" without "nodeN." where the node does not matter.
std::string Walk(const Cluster& cluster, const Router& router, int64_t from,
                 int64_t to) {
  const DeviceId source(from);
  std::string text =
      cluster.vertices[cluster.devices[source.index()].vertex.index()].name;
  for (const auto& [id, share] : router.Route(source, DeviceId(to))) {
    text += " " + cluster.vertices[cluster.links[id.index()].to.index()].name;
  }
  return text;
}

TEST(Router, TakesTheNvSwitchInsideANodeAndTheRailBetween) {
  const Cluster cluster = *MakeCluster("dgx-a100-80gb:2");
  const Router router(cluster);
  EXPECT_EQ(Walk(cluster, router, 0, 1),
            "node0.gpu0 node0.nvswitch node0.gpu1");
  // GPU 0 and 1 share a PCIe switch with NICs 0 and 1, which are equally near:
  // each carries half.
  EXPECT_EQ(Walk(cluster, router, 0, 9),
            "node0.gpu0 node0.pcie0 node0.nic0 node0.nic1 leaf0 leaf1 "
            "node1.nic0 node1.nic1 node1.pcie0 node1.pcie0 node1.gpu1");
  EXPECT_EQ(Walk(cluster, router, 1, 9),
            "node0.gpu1 node0.pcie0 node0.nic0 node0.nic1 leaf0 leaf1 "
            "node1.nic0 node1.nic1 node1.pcie0 node1.pcie0 node1.gpu1");
  // GPU 7 is on another PCIe switch: the spine joins the rails.
  EXPECT_EQ(Walk(cluster, router, 0, 15),
            "node0.gpu0 node0.pcie0 node0.nic0 node0.nic1 leaf0 leaf1 spine "
            "spine leaf6 leaf7 node1.nic6 node1.nic7 node1.pcie3 node1.pcie3 "
            "node1.gpu7");
  EXPECT_TRUE(router.Route(DeviceId(3), DeviceId(3)).empty());
  // Four PCIe links and two of InfiniBand.
  EXPECT_EQ(router.Latency(router.Route(DeviceId(0), DeviceId(8))),
            LinkTypeNamed("pcie4-x16").latency * 4 +
                LinkTypeNamed("ib-hdr").latency * 2);
}

// However the latencies are: the other way passes a bridge of PCIe.
TEST(Router, TakesNvLinkWhateverItsLatency) {
  Cluster cluster = *MakeCluster("dgx-a100-80gb:1");
  for (LinkType& type : cluster.link_types) {
    type.latency =
        type.name.starts_with("pcie") ? Duration() : type.latency * 2;
  }
  EXPECT_EQ(Walk(cluster, Router(cluster), 0, 1),
            "node0.gpu0 node0.nvswitch node0.gpu1");
}

TEST(Router, CubeMeshPairsWithoutNvLinkMeetOverPcie) {
  const Cluster cluster = *MakeCluster("dgx1-v100-32gb");
  const Router router(cluster);
  EXPECT_EQ(Walk(cluster, router, 0, 3), "node0.gpu0 node0.gpu3");
  EXPECT_EQ(Walk(cluster, router, 0, 5),
            "node0.gpu0 node0.pcie0 node0.cpu0 node0.cpu1 node0.pcie2 "
            "node0.gpu5");
}

// A chain of three devices: the middle one has to forward.
TEST(Router, DevicesForwardWhereNothingElseDoes) {
  Cluster cluster = *MakeCluster("local-cpu:3");
  cluster.links.clear();
  Connect(cluster, cluster.devices[0].vertex, cluster.devices[1].vertex, 0);
  Connect(cluster, cluster.devices[1].vertex, cluster.devices[2].vertex, 0);
  const Router router(cluster);
  EXPECT_EQ(router.Route(DeviceId(0), DeviceId(2)).size(), 2u);
  EXPECT_EQ(router.Route(DeviceId(2), DeviceId(0)).size(), 2u);
}

// Two nodes that only a third node's NIC joins: the search widens.
TEST(Router, ThirdNodesForwardWhereNothingElseDoes) {
  Cluster cluster;
  cluster.device_types = MakeCluster("local-cpu:1")->device_types;
  cluster.link_types = {{"cable", "", {1e9}, Duration::FromSeconds(1e-6)}};
  std::vector<VertexId> nics;
  for (int n = 0; n < 3; ++n) {
    const std::string of_node = std::to_string(n);
    const DeviceId device = AddDevice(cluster, 0, n, "d" + of_node);
    nics.push_back(AddVertex(cluster, VertexKind::kNic, "nic" + of_node));
    Connect(cluster, cluster.devices[device.index()].vertex, nics.back(), 0);
  }
  Connect(cluster, nics[0], nics[1], 0);
  Connect(cluster, nics[1], nics[2], 0);
  ASSERT_TRUE(Validate(cluster).empty());
  const Router router(cluster);
  EXPECT_EQ(router.Route(DeviceId(0), DeviceId(2)).size(), 4u);
}

// Two links side by side: device 0 takes the first, device 1 the second.
TEST(Router, TiesAreSharedOut) {
  Cluster cluster = *MakeCluster("local-cpu:2");
  cluster.links.clear();
  Connect(cluster, cluster.devices[0].vertex, cluster.devices[1].vertex, 0);
  Connect(cluster, cluster.devices[0].vertex, cluster.devices[1].vertex, 0);
  const Router router(cluster);
  // Links 0 and 2 lead from 0 to 1, links 1 and 3 back.
  const auto there = router.Route(DeviceId(0), DeviceId(1));
  const auto back = router.Route(DeviceId(1), DeviceId(0));
  ASSERT_EQ(there.size(), 1u);
  EXPECT_EQ(there[0], RouteLink{LinkId(0)});
  ASSERT_EQ(back.size(), 1u);
  EXPECT_EQ(back[0], RouteLink{LinkId(3)});
}

// Of two NICs that are equally near each carries half; what comes to a vertex
// leaves it.
TEST(Router, EquallyNearNicsCarryEqualParts) {
  Cluster cluster = *MakeCluster("pcie-a100:2x3");
  const std::vector<Link> links = cluster.links;
  for (int node = 0; node < 2; ++node) {
    const std::string of_node = "node" + std::to_string(node) + ".";
    const VertexId second =
        AddVertex(cluster, VertexKind::kNic, of_node + "second");
    for (const Link& link : links) {
      if (cluster.vertices[link.from.index()].name != of_node + "nic") continue;
      Connect(cluster, second, link.to, link.type);
    }
  }
  ASSERT_TRUE(Validate(cluster).empty());
  const Router router(cluster);
  for (int s = 0; s < 3; ++s) {
    for (int t = 3; t < 6; ++t) {
      const auto route = router.Route(DeviceId(s), DeviceId(t));
      std::map<VertexId, double> left;  // of what came
      double nics = 0;
      for (const auto& [id, share] : route) {
        const Link& link = cluster.links[id.index()];
        left[link.from] -= share;
        left[link.to] += share;
        if (cluster.vertices[link.from.index()].kind == VertexKind::kNic &&
            router.NodeOf(link.to) != 0) {
          nics += share * share;
        }
      }
      left[cluster.devices[static_cast<size_t>(s)].vertex] += 1;
      left[cluster.devices[static_cast<size_t>(t)].vertex] -= 1;
      for (const auto& [vertex, rest] : left) {
        EXPECT_NEAR(rest, 0, 1e-12) << cluster.vertices[vertex.index()].name;
      }
      EXPECT_NEAR(nics, 0.5 + 0.5, 1e-12) << s << " to " << t;  // of each node
      EXPECT_EQ(router.Latency(route),
                router.Latency(router.Route(DeviceId(0), DeviceId(3))));
    }
  }
}

// Routes that are known for other nodes are those that would be found anew:
// with a degraded NIC, on fat trees with several leaves, and on a torus, where
// third nodes forward.
TEST(Router, RoutesOfNodesAlikeAreTheirOwn) {
  std::vector<Cluster> clusters;
  for (const char* name :
       {"dgx-a100-80gb:4", "dgx1-v100-32gb:3", "pcie-a100:3@fat-tree",
        "dgx-h100:4@torus", "dgx-h100:4@dragonfly"}) {
    auto made = MakeCluster(name);
    ASSERT_TRUE(made.has_value()) << made.error().ToString();
    clusters.push_back(*std::move(made));
  }
  // The first link of the second node becomes slower than the others'.
  Cluster degraded = clusters[0];
  for (Link& link : degraded.links) {
    const std::string& name = degraded.vertices[link.to.index()].name;
    if (name != "node1.nic0") continue;
    LinkType slow = degraded.link_types[static_cast<size_t>(link.type)];
    slow.latency = slow.latency * 7;
    link.type = static_cast<int>(degraded.link_types.size());
    degraded.link_types.push_back(slow);
  }
  clusters.push_back(degraded);
  for (const Cluster& cluster : clusters) {
    const Router shared(cluster);
    const auto n = static_cast<int64_t>(cluster.devices.size());
    for (int64_t s = 0; s < n; s += 3) {
      for (int64_t t = 0; t < n; ++t) {
        const Router alone(cluster);
        EXPECT_EQ(shared.Route(DeviceId(s), DeviceId(t)),
                  alone.Route(DeviceId(s), DeviceId(t)))
            << cluster.name << ": " << s << " to " << t;
      }
    }
  }
}

// However many devices the node has.
TEST(Router, RoutesOfLargeNodesBeginAtTheirSource) {
  const Cluster cluster = *MakeCluster("local-cpu:32769");
  const Router router(cluster);
  for (const int64_t source : {0, 32768}) {
    const std::vector<RouteLink> route =
        router.Route(DeviceId(source), DeviceId(1));
    ASSERT_FALSE(route.empty());
    EXPECT_EQ(cluster.links[route[0].link.index()].from,
              cluster.devices[static_cast<size_t>(source)].vertex)
        << source;
  }
}

// Of a device that is asked for many unlike nodes one search finds those to all
// others: the same as one for each.
TEST(Router, RoutesToManyNodesAreThoseToEach) {
  const Cluster cluster = *MakeCluster("dgx-a100-80gb:20x2@torus");
  const Router shared(cluster);
  const auto n = static_cast<int64_t>(cluster.devices.size());
  for (int64_t s = 0; s < n; s += 5) {
    for (int64_t t = 0; t < n; ++t) {
      const Router alone(cluster);
      EXPECT_EQ(shared.Route(DeviceId(s), DeviceId(t)),
                alone.Route(DeviceId(s), DeviceId(t)))
          << s << " to " << t;
    }
  }
}

// Of two ways between nodes the one by fewer links, however long these are, and
// within a node the one of less latency.
TEST(Router, LatenciesDecideWithinANodeOnly) {
  Cluster cluster;
  cluster.device_types = MakeCluster("local-cpu:1")->device_types;
  cluster.link_types = {{"short", "", {1e9}, Duration::FromSeconds(1e-6)},
                        {"long", "", {1e9}, Duration::FromSeconds(1e-3)}};
  const auto add = [&](VertexKind kind, const char* name) {
    return AddVertex(cluster, kind, name);
  };
  const auto device = [&](int node, const char* name) {
    const DeviceId id = AddDevice(cluster, 0, node, name);
    return cluster.devices[id.index()].vertex;
  };
  const VertexId a = device(0, "a");
  const VertexId b = device(0, "b");
  const VertexId c = device(1, "c");
  Connect(cluster, a, b, 1);
  Connect(cluster, a, b, 0);
  const VertexId near = add(VertexKind::kSwitch, "near");
  const VertexId far = add(VertexKind::kSwitch, "far");
  const VertexId farther = add(VertexKind::kSwitch, "farther");
  for (const auto& [end, name] :
       {std::pair{a, "nic a"}, {b, "nic b"}, {c, "nic c"}}) {
    const VertexId nic = add(VertexKind::kNic, name);
    Connect(cluster, end, nic, 0);
    Connect(cluster, nic, near, 1);
    Connect(cluster, nic, end == c ? farther : far, 0);
  }
  Connect(cluster, far, farther, 0);
  ASSERT_TRUE(Validate(cluster).empty());
  const Router router(cluster);
  EXPECT_EQ(Walk(cluster, router, 0, 2), "a nic a near nic c c");
  const auto within = router.Route(DeviceId(0), DeviceId(1));
  ASSERT_EQ(within.size(), 1u);
  EXPECT_EQ(router.Latency(within), cluster.link_types[0].latency);
}

TEST(Router, IsSafeFromSeveralThreads) {
  const Cluster cluster = *MakeCluster("dgx-h100:4");
  const Router shared(cluster);
  const Router alone(cluster);
  std::vector<std::thread> threads;
  std::vector<int> mistakes(4, 0);
  for (size_t t = 0; t < mistakes.size(); ++t) {
    threads.emplace_back([&, t] {
      for (int64_t s = 0; s < 32; ++s) {
        for (int64_t d = 0; d < 32; ++d) {
          const auto route = shared.Route(DeviceId(s), DeviceId(d));
          const auto expected = alone.Route(DeviceId(s), DeviceId(d));
          mistakes[t] += !std::ranges::equal(route, expected);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(mistakes, std::vector<int>(4, 0));
}

}  // namespace
}  // namespace tessera
