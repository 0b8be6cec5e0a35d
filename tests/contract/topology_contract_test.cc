// Every row of the table of topologies.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <queue>
#include <string>

#include "costmodel/link/router.h"
#include "planner/topology/hardware.h"
#include "planner/topology/networks.h"
#include "planner/topology/topologies.h"

namespace tessera {
namespace {

Cluster Make(const Topology& topology, int nodes) {
  const std::string spec =
      std::string(topology.name) + ":" + std::to_string(nodes);
  Result<Cluster> cluster = MakeCluster(spec);
  EXPECT_TRUE(cluster) << spec << ": " << cluster.error().ToString();
  EXPECT_EQ(cluster->name, spec);
  return *cluster;
}

TEST(TopologyContract, IsValidAndHasItsDevices) {
  for (const Topology& topology : Topologies()) {
    EXPECT_FALSE(topology.summary.empty());
    for (int nodes : {1, 2, 4}) {
      const Cluster cluster = Make(topology, nodes);
      const std::vector<Error> errors = Validate(cluster);
      EXPECT_TRUE(errors.empty())
          << cluster.name << ": " << errors.front().ToString();
      const bool one_host = topology.gpus_per_node == 0;
      EXPECT_EQ(static_cast<int>(cluster.devices.size()),
                one_host ? nodes : nodes * topology.gpus_per_node);
      EXPECT_EQ(cluster.num_nodes(), one_host ? 1 : nodes);
      for (const DeviceType& type : cluster.device_types) {
        EXPECT_FALSE(type.source.empty()) << cluster.name;
      }
      for (const LinkType& type : cluster.link_types) {
        EXPECT_FALSE(type.source.empty()) << cluster.name;
      }
      EXPECT_EQ(cluster, Make(topology, nodes)) << "not deterministic";
    }
  }
}

TEST(TopologyContract, TakesFewerDevicesPerNode) {
  for (const Topology& topology : Topologies()) {
    for (int gpus = 1; gpus <= topology.gpus_per_node; ++gpus) {
      const std::string spec =
          std::string(topology.name) + ":2x" + std::to_string(gpus);
      const Result<Cluster> cluster = MakeCluster(spec);
      ASSERT_TRUE(cluster) << spec;
      EXPECT_TRUE(Validate(*cluster).empty()) << spec;
      EXPECT_EQ(static_cast<int>(cluster->devices.size()), 2 * gpus) << spec;
    }
  }
}

// Unlike nodes behind one network: every node as its preset has it, and NICs of
// either speed on the rails.
TEST(TopologyContract, MixesNodesOfSeveralPresets) {
  const Cluster mixture =
      MakeCluster("dgx-h100:2+dgx1-v100-32gb:1x4+p4d.24xlarge:1").value();
  EXPECT_EQ(mixture.name, "dgx-h100:2+dgx1-v100-32gb:1x4+p4d.24xlarge:1");
  EXPECT_THAT(Validate(mixture), ::testing::IsEmpty());
  EXPECT_EQ(mixture.num_nodes(), 4);
  ASSERT_EQ(mixture.devices.size(), 28u);
  const std::pair<int, std::string_view> devices[] = {{0, "h100-sxm5-80gb"},
                                                      {15, "h100-sxm5-80gb"},
                                                      {16, "v100-sxm2-32gb"},
                                                      {19, "v100-sxm2-32gb"},
                                                      {20, "a100-sxm4-40gb"}};
  for (const auto& [device, type] : devices) {
    EXPECT_EQ(mixture.TypeOf(DeviceId(device)).name, type) << device;
  }
  EXPECT_EQ(mixture.vertices[mixture.devices[16].vertex.index()].name,
            "node2.gpu0");
  // 2 nodes of 8 NICs of 400 Gb/s and 4 GPUs with 2 of 100 Gb/s on the first
  // half, and on the second 4 of 100 Gb/s.
  const Router router(mixture);
  const auto slowest = [&](int from, int to) {
    double least = 1e18;
    for (const auto& [link, share] :
         router.Route(DeviceId(from), DeviceId(to))) {
      const int type = mixture.links[link.index()].type;
      least = std::min(
          least, mixture.link_types[static_cast<size_t>(type)].bandwidth.value);
    }
    return least;
  };
  const auto nic = [](std::string_view name) {
    return LinkTypeNamed(name).bandwidth.value;
  };
  EXPECT_EQ(slowest(0, 8), nic("ib-ndr"));
  EXPECT_EQ(slowest(0, 16), nic("ib-edr"));
  EXPECT_EQ(slowest(16, 20), nic("efa-100g"));
  // Within a node as without the others.
  const Cluster alone = MakeCluster("dgx-h100:2").value();
  EXPECT_EQ(router.Route(DeviceId(0), DeviceId(1)).size(),
            Router(alone).Route(DeviceId(0), DeviceId(1)).size());
  // Nodes keep their hosts.
  ASSERT_EQ(mixture.hosts.size(), 3u);
  for (const auto& [device, part] :
       {std::pair(0, "dgx-h100"), std::pair(8, "dgx-h100"),
        std::pair(16, "dgx1-v100-32gb"), std::pair(20, "p4d.24xlarge")}) {
    EXPECT_EQ(mixture.HostOf(DeviceId(device)), MakeCluster(part)->hosts[0])
        << part;
  }
}

TEST(TopologyContract, RefusesMixturesWithoutANetwork) {
  const std::pair<std::string_view, std::string_view> cases[] = {
      {"dgx-h100+local-cpu:4", "no network to join"},
      {"dgx-h100:2+dgx-a100-80gb:2@fat-tree", "joined by rails"},
      {"dgx-h100:2+", "unknown cluster"},
      {"dgx-h100:2+dgx-h10", "dgx-h100"},
      {"dgx-h100:65536+dgx-h100:1", "at most 65536 nodes"}};
  for (const auto& [spec, message] : cases) {
    const auto cluster = MakeCluster(spec);
    ASSERT_FALSE(cluster.has_value()) << spec;
    EXPECT_THAT(cluster.error().ToString(),
                ::testing::HasSubstr(std::string(message)));
  }
}

// The route leads from one device to the other, whole, through no other device
// and no third node, and a second router finds the same.
TEST(TopologyContract, RoutesAreWholeAndDeterministic) {
  for (const Topology& topology : Topologies()) {
    for (int nodes : {1, 2, 4}) {
      const Cluster cluster = Make(topology, nodes);
      const Router router(cluster);
      const Router again(cluster);
      const auto n = static_cast<int64_t>(cluster.devices.size());
      // All pairs would take long on 288 devices; every 5th and 7th cover all
      // local indices.
      const int64_t step_from = n > 64 ? 5 : 1;
      const int64_t step_to = n > 64 ? 7 : 1;
      for (int64_t s = 0; s < n; s += step_from) {
        // Asked for in the other order, so that nothing rests on it.
        for (int64_t t = n - 1; t >= 0; t -= step_to) {
          again.Route(DeviceId(s), DeviceId(t));
        }
        for (int64_t t = 0; t < n; t += step_to) {
          const auto route = router.Route(DeviceId(s), DeviceId(t));
          const auto second = again.Route(DeviceId(s), DeviceId(t));
          ASSERT_TRUE(std::ranges::equal(route, second)) << cluster.name;
          ASSERT_EQ(route.empty(), s == t);
          // What comes to a vertex leaves it.
          std::map<VertexId, double> rest;
          rest[cluster.devices[static_cast<size_t>(s)].vertex] += 1;
          for (const auto& [id, share] : route) {
            const Link& link = cluster.links[id.index()];
            EXPECT_GT(rest[link.from], 0) << cluster.name;
            rest[link.from] -= share;
            rest[link.to] += share;
          }
          rest[cluster.devices[static_cast<size_t>(t)].vertex] -= 1;
          for (const auto& [vertex, left] : rest) {
            EXPECT_NEAR(left, 0, 1e-12) << cluster.name;
            EXPECT_FALSE(
                cluster.vertices[vertex.index()].kind == VertexKind::kDevice &&
                vertex != cluster.devices[static_cast<size_t>(s)].vertex &&
                vertex != cluster.devices[static_cast<size_t>(t)].vertex)
                << cluster.name << " " << s << " to " << t;
          }
        }
      }
    }
  }
}

// Maximum flow from the devices of the first half of the nodes to the others
// (Edmonds and Karp, 1972).
double Bisection(const Cluster& cluster) {
  struct Arc {
    size_t to;
    double room;
    size_t reverse;
  };
  const size_t source = cluster.vertices.size();
  const size_t sink = source + 1;
  std::vector<std::vector<Arc>> arcs(sink + 1);
  const auto add = [&](size_t from, size_t to, double room) {
    arcs[from].push_back({to, room, arcs[to].size()});
    arcs[to].push_back({from, 0, arcs[from].size() - 1});
  };
  for (const Link& link : cluster.links) {
    add(link.from.index(), link.to.index(),
        cluster.link_types[static_cast<size_t>(link.type)].bandwidth.value);
  }
  for (const Device& device : cluster.devices) {
    if (device.node < cluster.num_nodes() / 2) {
      add(source, device.vertex.index(), 1e18);
    } else {
      add(device.vertex.index(), sink, 1e18);
    }
  }
  double flow = 0;
  for (;;) {
    std::vector<std::pair<size_t, size_t>> via(arcs.size(), {sink + 1, 0});
    std::queue<size_t> open({source});
    via[source].first = source;
    while (!open.empty() && via[sink].first > sink) {
      const size_t v = open.front();
      open.pop();
      for (size_t i = 0; i < arcs[v].size(); ++i) {
        const Arc& arc = arcs[v][i];
        if (arc.room <= 1 || via[arc.to].first <= sink) continue;
        via[arc.to] = {v, i};
        open.push(arc.to);
      }
    }
    if (via[sink].first > sink) return flow;
    double push = 1e18;
    for (size_t v = sink; v != source; v = via[v].first) {
      push = std::min(push, arcs[via[v].first][via[v].second].room);
    }
    for (size_t v = sink; v != source; v = via[v].first) {
      Arc& arc = arcs[via[v].first][via[v].second];
      arc.room -= push;
      arcs[v][arc.reverse].room += push;
    }
    flow += push;
  }
}

TEST(TopologyContract, BisectionIsHalfOfTheNodesNics) {
  for (const Topology& topology : Topologies()) {
    if (topology.nics_per_node == 0) continue;
    const auto nic =
        std::ranges::find(LinkTypes(), topology.nic_link, &LinkType::name);
    ASSERT_NE(nic, LinkTypes().end()) << topology.name;
    for (int nodes : {2, 4}) {
      const double expected =
          nodes / 2 * topology.nics_per_node * nic->bandwidth.value;
      const double found = Bisection(Make(topology, nodes));
      EXPECT_NEAR(found, expected, 1e-6 * expected)
          << topology.name << ":" << nodes;
    }
  }
}

// Sixteen nodes with eight NICs each, hence four leaves. NICs of eight nodes
// are 64; through the spine of a fat tree go 2 leaves of 32, over N; between
// the halves of a dragonfly lie 2 * 2 of its links, each a third of a leaf's
// 32, over N; rails join equal NICs of all nodes without a spine; a torus of 4
// x 2 x 2 is cut at 2 * 2 * 2 cables of eight NICs, one of 4 x 4 at 2 * 4 and
// one of 16 at two.
TEST(TopologyContract, NetworksHaveTheirBisection) {
  const double nic =
      std::ranges::find(LinkTypes(), std::string("ib-ndr"), &LinkType::name)
          ->bandwidth.value;
  const struct {
    const char* network;
    double nics;
  } cases[] = {{"rails", 64},
               {"rails:4", 64},
               {"fat-tree", 64},
               {"fat-tree:2", 32},
               {"fat-tree:4", 16},
               {"dragonfly", 4 * 32 / 3.0},
               {"dragonfly:2", 64 / 3.0},
               {"torus", 64},
               {"torus:2", 64},
               {"torus:1", 16}};
  for (const auto& test : cases) {
    const auto cluster =
        MakeCluster("dgx-h100:16@" + std::string(test.network));
    ASSERT_TRUE(cluster) << cluster.error().ToString();
    EXPECT_TRUE(Validate(*cluster).empty()) << test.network;
    EXPECT_NEAR(Bisection(*cluster), test.nics * nic, 1e-6 * test.nics * nic)
        << test.network;
  }
}

// Every network joins every preset, and as "rails" it is the preset's own.
TEST(TopologyContract, EveryNetworkJoinsEveryPreset) {
  for (const Topology& topology : Topologies()) {
    if (topology.nics_per_node == 0) continue;
    const std::string name = std::string(topology.name) + ":6";
    for (const Network& network : Networks()) {
      auto cluster = MakeCluster(name + "@" + std::string(network.name));
      ASSERT_TRUE(cluster) << cluster.error().ToString();
      EXPECT_TRUE(Validate(*cluster).empty()) << cluster->name;
      if (network.name == "rails") {
        cluster->name = name;
        EXPECT_EQ(*cluster, *MakeCluster(name)) << name;
      }
    }
  }
  EXPECT_FALSE(MakeCluster("dgx-h100:4@fat-tre"));
  EXPECT_FALSE(MakeCluster("dgx-h100:4@fat-tree:0"));
  EXPECT_FALSE(MakeCluster("dgx-h100:4@fat-tree:x"));
  // Nodes of one NIC have one rail, and no spine that could carry less.
  EXPECT_TRUE(MakeCluster("pcie-a100:4@rails:1"));
  const auto spineless = MakeCluster("pcie-a100:4@rails:4");
  ASSERT_FALSE(spineless);
  EXPECT_NE(spineless.error().ToString().find("expected 1 where nodes have one "
                                              "NIC"),
            std::string::npos)
      << spineless.error().ToString();
  EXPECT_FALSE(MakeCluster("local-cpu:4@torus"));
}

}  // namespace
}  // namespace tessera
