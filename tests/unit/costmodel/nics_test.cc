// What the NICs of hosts carry, however many there are and whichever failed.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "costmodel/collective/collective.h"
#include "costmodel/collective/doors.h"
#include "costmodel/whatif/degrade.h"
#include "planner/base/rng.h"
#include "planner/topology/topologies.h"

namespace tessera {
namespace {

constexpr double kNic = 46e9;  // bytes a second

// Hosts of so many GPUs, each at a switch and at a bridge to which `nics` NICs
// are equally near; all NICs at one switch. NICs are what is slow.
Cluster Shared(const std::vector<int>& hosts, int nics) {
  Cluster cluster;
  cluster.device_types = MakeCluster("dgx-h100:1")->device_types;
  const Duration latency = Duration::FromSeconds(1e-6);
  cluster.link_types = {{"fast", "", {4e12}, latency},
                        {"nic", "", {kNic}, latency}};
  const VertexId leaf = AddVertex(cluster, VertexKind::kSwitch, "leaf");
  for (int n = 0; n < static_cast<int>(hosts.size()); ++n) {
    const std::string of_node = "node" + std::to_string(n) + ".";
    const VertexId nvswitch =
        AddVertex(cluster, VertexKind::kSwitch, of_node + "nvswitch");
    const VertexId bridge =
        AddVertex(cluster, VertexKind::kBridge, of_node + "cpu");
    for (int g = 0; g < hosts[static_cast<size_t>(n)]; ++g) {
      const DeviceId gpu =
          AddDevice(cluster, 0, n, of_node + "gpu" + std::to_string(g));
      Connect(cluster, cluster.devices[gpu.index()].vertex, nvswitch, 0);
      Connect(cluster, cluster.devices[gpu.index()].vertex, bridge, 0);
    }
    for (int i = 0; i < nics; ++i) {
      const VertexId nic = AddVertex(cluster, VertexKind::kNic,
                                     of_node + "nic" + std::to_string(i));
      Connect(cluster, bridge, nic, 0);
      Connect(cluster, nic, leaf, 1);
    }
  }
  return cluster;
}

// `cluster` without these NICs ("node3.nic0").
Cluster WithoutNics(Cluster cluster, const std::vector<std::string>& nics) {
  std::vector<std::string> notes;
  EXPECT_TRUE(Fail(nics, cluster, notes));
  return cluster;
}

std::vector<std::vector<DeviceId>> All(const Cluster& cluster) {
  std::vector<std::vector<DeviceId>> group(1);
  for (size_t d = 0; d < cluster.devices.size(); ++d) {
    group[0].emplace_back(static_cast<int64_t>(d));
  }
  return group;
}

// The i-th GPUs of all hosts of `size` with each other, for all i.
std::vector<std::vector<DeviceId>> Rails(const Cluster& cluster, size_t size) {
  std::vector<std::vector<DeviceId>> groups(size);
  for (size_t d = 0; d < cluster.devices.size(); ++d) {
    groups[d % size].emplace_back(static_cast<int64_t>(d));
  }
  return groups;
}

// By the fastest algorithm for large payloads, or the one of that name.
double SecondsPerByte(const Cluster& cluster, CommKind kind,
                      const std::vector<std::vector<DeviceId>>& groups,
                      std::string_view algorithm = "") {
  const CollectiveModel model(cluster, {std::string(algorithm), "plain"});
  const auto& options = model.Options(kind, groups);
  return CollectiveModel::Best(options, {int64_t{1} << 40}).seconds_per_byte;
}

constexpr CommKind kKinds[] = {CommKind::kAllReduce, CommKind::kAllGather,
                               CommKind::kReduceScatter, CommKind::kAllToAll};

// N NICs carry N times as much as one, whether N divides the number of GPUs or
// not, in one group as in eight.
TEST(Nics, TimeIsInverselyProportionalToTheirNumber) {
  const std::vector<int> hosts(4, 8);
  const Cluster one = Shared(hosts, 1);
  for (int nics = 1; nics <= 8; ++nics) {
    const Cluster cluster = Shared(hosts, nics);
    for (CommKind kind : kKinds) {
      for (const auto& groups : {All(cluster), Rails(cluster, 8)}) {
        EXPECT_NEAR(SecondsPerByte(cluster, kind, groups) * nics /
                        SecondsPerByte(one, kind, groups),
                    1, 1e-9)
            << nics << " " << NameOf(kind) << " " << groups.size();
      }
    }
    for (const char* tree : {"double-tree", "tree", "hierarchical"}) {
      EXPECT_NEAR(
          SecondsPerByte(cluster, CommKind::kAllReduce, All(cluster), tree) *
              nics /
              SecondsPerByte(one, CommKind::kAllReduce, All(cluster), tree),
          1, 1e-9)
          << nics << " " << tree;
    }
  }
}

// As many as there are or more than GPUs.
TEST(Nics, MoreAreNeverSlower) {
  for (const std::vector<int>& hosts :
       {std::vector<int>{3, 3, 3}, {1, 1}, {2, 2, 2, 2}, {8, 8}, {5, 5, 5}}) {
    for (CommKind kind : kKinds) {
      double before = 1;
      for (int nics = 1; nics <= 8; ++nics) {
        const Cluster cluster = Shared(hosts, nics);
        const double now = SecondsPerByte(cluster, kind, All(cluster));
        EXPECT_LE(now, before * (1 + 1e-9))
            << hosts[0] << " GPUs, " << nics << " NICs, " << NameOf(kind);
        before = now;
      }
    }
  }
}

// Where there are more NICs than GPUs each GPU uses several at once.
TEST(Nics, AllCarryTheirShareWhereThereAreMoreThanGpus) {
  for (const std::vector<int>& hosts :
       {std::vector<int>{1, 1}, {2, 2}, {3, 3, 3}}) {
    const Cluster one = Shared(hosts, 1);
    for (int nics = 2; nics <= 12; ++nics) {
      const Cluster cluster = Shared(hosts, nics);
      for (CommKind kind : kKinds) {
        EXPECT_NEAR(SecondsPerByte(cluster, kind, All(cluster)) * nics /
                        SecondsPerByte(one, kind, All(one)),
                    1, 1e-9)
            << hosts[0] << " GPUs, " << nics << " NICs, " << NameOf(kind);
      }
    }
  }
}

// `cluster` with the cables of NICs whose name ends in one of `ends` changed.
template <typename Change>
Cluster WithCables(Cluster cluster, std::string_view ends, Change change) {
  std::map<int, int> changed;
  const auto is_one = [&](VertexId end) {
    const Vertex& vertex = cluster.vertices[end.index()];
    return vertex.kind == VertexKind::kNic &&
           ends.find(vertex.name.back()) != std::string_view::npos;
  };
  const auto is_switch = [&](VertexId end) {
    return cluster.vertices[end.index()].kind == VertexKind::kSwitch;
  };
  for (Link& link : cluster.links) {
    if (!(is_one(link.from) && is_switch(link.to)) &&
        !(is_one(link.to) && is_switch(link.from))) {
      continue;
    }
    const auto [it, is_new] = changed.try_emplace(
        link.type, static_cast<int>(cluster.link_types.size()));
    if (is_new) {
      LinkType type = cluster.link_types[static_cast<size_t>(link.type)];
      change(type);
      cluster.link_types.push_back(type);
    }
    link.type = it->second;
  }
  return cluster;
}

// However little: those with longer cables are as near.
TEST(Nics, ShorterCablesMoveNoTraffic) {
  const Cluster whole = *MakeCluster("dgx-a100-80gb:2");
  for (double times : {1 - 1e-6, 0.5, 0.0}) {
    const Cluster shorter = WithCables(whole, "0246", [&](LinkType& type) {
      type.latency = type.latency * times;
    });
    ASSERT_NE(shorter, whole);
    const CollectiveModel before(whole);
    const CollectiveModel after(shorter);
    for (CommKind kind : kKinds) {
      for (const auto& groups : {All(whole), Rails(whole, 8)}) {
        const auto& of_whole = before.Options(kind, groups);
        const auto& of_shorter = after.Options(kind, groups);
        ASSERT_EQ(of_whole.size(), of_shorter.size());
        for (size_t i = 0; i < of_whole.size(); ++i) {
          EXPECT_EQ(of_shorter[i].seconds_per_byte,
                    of_whole[i].seconds_per_byte);
          EXPECT_LE(of_shorter[i].latency_s, of_whole[i].latency_s);
        }
      }
    }
  }
}

// A second NIC of any rate: none is slower than without it, and a faster one is
// not slower.
TEST(Nics, SlowOnesCostNothing) {
  for (const std::vector<int>& hosts :
       {std::vector<int>{4, 4}, {1, 1}, {2, 3, 1}}) {
    const Cluster one = Shared(hosts, 1);
    const Cluster two = Shared(hosts, 2);
    for (CommKind kind : kKinds) {
      const double alone = SecondsPerByte(one, kind, All(one));
      double before = alone;
      for (double rate : {0.01, 0.2, 0.5, 0.6, 0.99, 1.0, 2.0, 3.0, 10.0}) {
        const Cluster cluster = WithCables(two, "1", [&](LinkType& type) {
          type.bandwidth = type.bandwidth * rate;
        });
        const double now = SecondsPerByte(cluster, kind, All(cluster));
        EXPECT_LE(now, before * (1 + 1e-9)) << rate << " " << NameOf(kind);
        if (rate <= 0.5) {
          EXPECT_NEAR(now / alone, 1, 1e-9) << rate;
        }
        before = now;
      }
      EXPECT_LT(before, alone * 0.6);
    }
  }
}

// Whatever the rates of a host's NICs: one that becomes faster on all hosts
// makes nothing slower, although it may leave others unused.
TEST(Nics, FasterOnesAreNeverSlower) {
  Rng rng(3);
  for (int draw = 0; draw < 100; ++draw) {
    const std::vector<int> hosts(2 + rng.Below(2),
                                 1 + static_cast<int>(rng.Below(5)));
    const int nics = 2 + static_cast<int>(rng.Below(4));
    Cluster cluster = Shared(hosts, nics);
    for (int i = 0; i < nics; ++i) {
      const double times = 1 + static_cast<double>(rng.Below(8));
      cluster = WithCables(
          std::move(cluster), std::to_string(i),
          [&](LinkType& type) { type.bandwidth = type.bandwidth * times; });
    }
    LinkType& one = cluster.link_types[cluster.link_types.size() - 1 -
                                       rng.Below(static_cast<uint32_t>(nics))];
    const BytesPerSecond rate = one.bandwidth;
    for (CommKind kind : {CommKind::kAllReduce, CommKind::kAllGather,
                          CommKind::kAllToAll, CommKind::kShift}) {
      double before = 1;
      for (double times : {1.0, 1.1, 1.3, 1.7, 2.0, 3.0, 5.0}) {
        one.bandwidth = rate * times;
        const CollectiveModel model(cluster);
        const Bytes payload = {1 << 30};
        const double now =
            CollectiveModel::Best(model.Options(kind, All(cluster)), payload)
                .Seconds(payload);
        EXPECT_LE(now, before * (1 + 1e-9))
            << draw << " " << NameOf(kind) << " " << times;
        before = now;
      }
    }
  }
}

// A host of eight GPUs and one of fewer, where pairs share two NICs: the fewer
// ranks' NICs set the pace, whatever their number.
TEST(Nics, ARankMoreIsNotSlower) {
  const Cluster cluster = *MakeCluster("dgx-a100-80gb:2");
  double one = 0;
  for (int count = 1; count <= 8; ++count) {
    std::vector<std::vector<DeviceId>> group(1);
    for (int d = 0; d < 8 + count; ++d) group[0].emplace_back(d);
    const double ranks = 8 + count;
    // Of a ring's payload each crossing takes all but one part.
    const double pace =
        SecondsPerByte(cluster, CommKind::kAllGather, group, "ring") * ranks /
        (ranks - 1);
    if (count == 1) one = pace;
    EXPECT_NEAR(pace * count / one, 1, 1e-9) << count;
  }
}

// GPUs q, q + 1, ... of all hosts of 8 alone, however NICs are shared.
TEST(Nics, MoreAreNeverSlowerForPartsOfHosts) {
  for (int first = 0; first < 8; ++first) {
    for (int count = 1; first + count <= 8; ++count) {
      for (CommKind kind : kKinds) {
        double before = 1;
        double one = 0;
        for (int nics = 1; nics <= 8; ++nics) {
          const Cluster cluster = Shared({8, 8, 8}, nics);
          std::vector<std::vector<DeviceId>> group(1);
          for (int host = 0; host < 3; ++host) {
            for (int g = first; g < first + count; ++g) {
              group[0].emplace_back(host * 8 + g);
            }
          }
          const double now = SecondsPerByte(cluster, kind, group, "ring");
          EXPECT_LE(now, before * (1 + 1e-9))
              << first << " " << count << " " << nics << " " << NameOf(kind);
          before = now;
          // A GPU is no faster than one NIC.
          if (nics == 1) one = now;
          EXPECT_NEAR(now * std::min(nics, count) / one, 1, 1e-9)
              << first << " " << count << " " << nics << " " << NameOf(kind);
        }
      }
    }
  }
}

// What leaves the host that all others need most from, over its NICs: no time
// is shorter. Rings reach it where hosts have other numbers of GPUs.
TEST(Nics, UnlikeHostsUseTheirs) {
  for (const std::vector<int>& hosts :
       {std::vector<int>{3, 2, 2, 2}, {4, 3, 2}, {8, 2}, {2, 8, 6}}) {
    const Cluster cluster = Shared(hosts, 2);
    const auto n = static_cast<double>(cluster.devices.size());
    const double gather =
        SecondsPerByte(cluster, CommKind::kAllGather, All(cluster), "ring");
    // Every ring brings all but one chunk over each crossing.
    EXPECT_NEAR(gather, (n - 1) / n / (2 * kNic), 1e-9 / kNic) << hosts[0];
  }
}

// Rings and exchanges take 8 / (8 - f) of the time where f of the 8 NICs of a
// host failed, whichever these are.
TEST(Nics, FailedOnesCostTheirShare) {
  for (const char* name : {"dgx-h100:4", "dgx-h100:4@fat-tree"}) {
    const Cluster whole = *MakeCluster(name);
    Rng rng(7);
    std::vector<int> order = {0, 1, 2, 3, 4, 5, 6, 7};
    for (int failed = 1; failed < 8; ++failed) {
      for (int draw = 0; draw < 3; ++draw) {
        std::vector<std::string> names;
        for (size_t i = 0; i < static_cast<size_t>(failed); ++i) {
          std::swap(order[i], order[i + rng.Below(order.size() - i)]);
          names.push_back("node3.nic" + std::to_string(order[i]));
        }
        const Cluster cluster = WithoutNics(whole, names);
        for (CommKind kind : kKinds) {
          EXPECT_NEAR(SecondsPerByte(cluster, kind, All(cluster), "ring") /
                          SecondsPerByte(whole, kind, All(whole), "ring"),
                      8.0 / (8 - failed), 1e-9)
              << name << " " << NameOf(kind) << " " << failed << " failed";
        }
        for (CommKind kind : {CommKind::kAllGather, CommKind::kAllToAll}) {
          EXPECT_NEAR(SecondsPerByte(cluster, kind, Rails(cluster, 8)) /
                          SecondsPerByte(whole, kind, Rails(whole, 8)),
                      8.0 / (8 - failed), 1e-9)
              << name << " rails " << NameOf(kind) << " " << failed;
        }
      }
    }
  }
}

// Where two GPUs share a PCIe switch with two NICs and one of these failed,
// rings leave one of the two out.
TEST(Nics, RingsLeaveOutAGpuOfAPairWhoseNicFailed) {
  const Cluster whole = *MakeCluster("dgx-a100-80gb:4");
  for (int failed = 1; failed <= 4; ++failed) {
    std::vector<std::string> names;
    for (int i = 0; i < failed; ++i) {
      names.push_back("node1.nic" + std::to_string(2 * i));
    }
    const Cluster cluster = WithoutNics(whole, names);
    EXPECT_NEAR(
        SecondsPerByte(cluster, CommKind::kAllGather, All(cluster), "ring") /
            SecondsPerByte(whole, CommKind::kAllGather, All(whole), "ring"),
        8.0 / (8 - failed), 1e-9)
        << failed;
  }
}

// Failures on several hosts cost no more than on the one with the most.
TEST(Nics, FailuresOfOtherHostsAddNothing) {
  const Cluster whole = *MakeCluster("dgx-h100:4");
  const Cluster one = WithoutNics(whole, {"node3.nic0"});
  const Cluster two = WithoutNics(whole, {"node3.nic0", "node1.nic5"});
  for (CommKind kind : {CommKind::kAllGather, CommKind::kAllReduce}) {
    EXPECT_NEAR(SecondsPerByte(two, kind, All(two), "ring"),
                SecondsPerByte(one, kind, All(one), "ring"), 1e-9 / kNic);
  }
}

// Hosts with random NICs: whatever a group does, each host takes in over its
// NICs what the others have for it.
TEST(Nics, NoTimeIsBelowTheirBound) {
  Rng rng(11);
  const Cluster whole = *MakeCluster("dgx-h100:3");
  const double nic = 50e9 * 1.2;  // more than any NIC of it
  for (int draw = 0; draw < 30; ++draw) {
    std::vector<std::string> names;
    std::vector<int> left(3, 8);
    for (int node = 0; node < 3; ++node) {
      for (int i = 0; i < 8; ++i) {
        if (rng.Below(3) != 0 || left[static_cast<size_t>(node)] == 1) continue;
        --left[static_cast<size_t>(node)];
        names.push_back("node" + std::to_string(node) + ".nic" +
                        std::to_string(i));
      }
    }
    if (names.empty()) continue;
    const Cluster cluster = WithoutNics(whole, names);
    const int fewest = *std::ranges::min_element(left);
    const double bound = 16.0 / 24 / (fewest * nic);
    for (CommKind kind : {CommKind::kAllGather, CommKind::kReduceScatter}) {
      EXPECT_GE(SecondsPerByte(cluster, kind, All(cluster)), bound);
    }
    EXPECT_GE(SecondsPerByte(cluster, CommKind::kAllReduce, All(cluster)),
              bound);
    EXPECT_GE(SecondsPerByte(cluster, CommKind::kAllToAll, All(cluster)),
              8 * bound);
  }
}

// Rings by NIC of a host by which they enter it: as many by each, up to what is
// not whole.
void ExpectEven(const HostRanks& host, const std::vector<int>& doors) {
  std::map<int, double> loads;
  for (const NearestNics& nics : host.nics) {
    for (int nic : nics.numbers) loads[nic] = 0;
  }
  for (int door : doors) {
    const NearestNics& nics = host.nics[static_cast<size_t>(door)];
    for (int nic : nics.numbers) {
      loads[nic] += 1 / static_cast<double>(nics.numbers.size());
    }
  }
  const auto most =
      static_cast<double>((doors.size() + loads.size() - 1) / loads.size());
  for (const auto& [nic, load] : loads) EXPECT_LE(load, most + 1e-9) << nic;
}

// Ranks with one NIC each, of `nics`.
HostRanks Paired(int ranks, int nics) {
  HostRanks host;
  for (int rank = 0; rank < ranks; ++rank) {
    host.nics.push_back({.numbers = {rank * nics / ranks}});
  }
  return host;
}

TEST(Doors, AreAllRanksInTurnWhereThatIsEven) {
  const std::vector<int> eight = {0, 1, 2, 3, 4, 5, 6, 7};
  const std::vector<int> four = {0, 1, 2, 3, 0, 1, 2, 3};
  for (int nics : {1, 2, 4, 8}) {
    EXPECT_EQ(DealtDoors({Paired(8, nics), Paired(8, nics)})[1], eight) << nics;
  }
  EXPECT_EQ(DealtDoors({Paired(8, 8), Paired(4, 4)}),
            (std::vector<std::vector<int>>{eight, four}));
  HostRanks none;
  none.nics.resize(3);
  EXPECT_EQ(DealtDoors({none, none})[0], (std::vector<int>{0, 1, 2}));
}

TEST(Doors, AreAsManyAsLoadTheFewestNicsAlike) {
  for (const auto& [widest, fewest, rings] :
       {std::array{8, 7, 7}, std::array{8, 3, 6}, std::array{8, 5, 5},
        std::array{3, 2, 2}, std::array{8, 4, 8}}) {
    const std::vector<HostRanks> hosts = {Paired(widest, widest),
                                          Paired(fewest, fewest)};
    const auto doors = DealtDoors(hosts);
    ASSERT_EQ(doors[0].size(), static_cast<size_t>(rings));
    for (size_t n = 0; n < 2; ++n) ExpectEven(hosts[n], doors[n]);
  }
}

// A GPU whose NIC failed, farther from the others' than these are.
TEST(Doors, AreNotGpusWithoutANicOfTheirOwn) {
  HostRanks host = Paired(8, 8);
  host.nics[0] = {.numbers = {1, 2, 3, 4, 5, 6, 7}, .distance = {1, 1, 0}};
  const auto doors = DealtDoors({Paired(8, 8), host});
  ASSERT_EQ(doors[1].size(), 7u);
  EXPECT_EQ(std::ranges::count(doors[1], 0), 0);
  ExpectEven(host, doors[1]);
  EXPECT_EQ(doors[0], doors[1]);  // on the same rails
}

}  // namespace
}  // namespace tessera
