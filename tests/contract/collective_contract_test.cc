// Every row of the table of collective algorithms, replayed on symbolic chunks
// and priced on real topologies.

#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <set>
#include <string>

#include "costmodel/collective/algorithms.h"
#include "costmodel/collective/collective.h"
#include "costmodel/collective/doors.h"
#include "costmodel/collective/node_rings.h"
#include "costmodel/link/fair_share.h"
#include "costmodel/whatif/degrade.h"
#include "planner/topology/topologies.h"

namespace tessera {
namespace {

constexpr CommKind kKinds[] = {
    CommKind::kAllReduce, CommKind::kAllGather,    CommKind::kReduceScatter,
    CommKind::kAllToAll,  CommKind::kRedistribute, CommKind::kSendRecv,
    CommKind::kScatter,   CommKind::kBroadcast,    CommKind::kGather,
    CommKind::kReduce,    CommKind::kShift};

size_t U(int i) {
  return static_cast<size_t>(i);
}

// Ranks dealt to hosts of the given sizes, one ring in rank order in each.
// Doors are in turn or, with `nics`, dealt where the first so many ranks of
// each host have a NIC and the others none.
CollectiveGroup GroupOf(const std::vector<int>& hosts, bool shared_memory,
                        int nics = 0) {
  CollectiveGroup group;
  std::vector<HostRanks> ends;
  for (int size : hosts) {
    HostRanks& host = ends.emplace_back();
    for (int i = 0; i < size; ++i) {
      NearestNics& own = host.nics.emplace_back();
      own.numbers = {i};
      if (i < nics) continue;
      own.numbers.resize(U(std::min(nics, size)));
      std::iota(own.numbers.begin(), own.numbers.end(), 0);
      own.distance = {1, 0, 0};
    }
    group.meshed.push_back(false);
    std::vector<int> ranks(U(size));
    std::iota(ranks.begin(), ranks.end(), group.ranks);
    group.ranks += size;
    group.nodes.push_back(ranks);
    group.node_rings.push_back({ranks});
  }
  group.doors = nics == 0 ? DoorsInTurn(ends) : DealtDoors(ends);
  group.shared_memory = shared_memory && hosts.size() == 1;
  group.in_switch = true;
  return group;
}

std::vector<CollectiveGroup> Groups() {
  std::vector<CollectiveGroup> groups;
  for (int n = 2; n <= 9; ++n) {
    groups.push_back(GroupOf({n}, false));
    groups.push_back(GroupOf({n}, true));
    groups.push_back(GroupOf(std::vector<int>(U(n), 1), false));
    groups.push_back(GroupOf(std::vector<int>(U(n), 2), false));
  }
  groups.push_back(GroupOf({2, 2}, false));
  groups.push_back(GroupOf({4, 4}, false));
  groups.push_back(GroupOf({3, 3, 3}, false));
  groups.push_back(GroupOf({2, 2, 2, 2}, false));
  groups.push_back(GroupOf({1, 3}, false));
  groups.push_back(GroupOf({4, 2, 3}, false));
  groups.push_back(GroupOf({4, 4}, false, 3));
  groups.push_back(GroupOf({5, 5, 5}, false, 2));
  groups.push_back(GroupOf({4, 2, 3}, false, 2));
  CollectiveGroup chain = GroupOf({5}, false);
  chain.node_rings[0] = {{4, 0, 1, 2, 3}};
  chain.open_chain = true;
  groups.push_back(chain);
  // Two rings of their own within each host.
  CollectiveGroup mesh = GroupOf({4, 4}, false);
  mesh.node_rings[0].push_back({3, 2, 1, 0});
  mesh.node_rings[1].push_back({7, 6, 5, 4});
  mesh.meshed = {true, true};
  groups.push_back(mesh);
  return groups;
}

std::string Describe(const CollectiveAlgorithm& algorithm, CommKind kind,
                     const CollectiveGroup& group) {
  std::string text =
      std::string(algorithm.name) + " " + std::string(NameOf(kind)) + " hosts";
  for (const auto& node : group.nodes) {
    text += " " + std::to_string(node.size());
  }
  return text;
}

// Calls `deliver(round, from, to, chunk)` for every chunk sent, between
// `begin()` and `end()` of each repetition.
template <typename Begin, typename Deliver>
void Replay(const Rounds& rounds, Begin begin, Deliver deliver) {
  for (const Round& round : rounds.rounds) {
    for (int t = 0; t < round.repeat; ++t) {
      begin();
      for (const Send& send : round.sends) {
        int offset = (send.first + t * round.shift) % round.modulus;
        if (offset < 0) offset += round.modulus;
        for (int c = 0; c < send.count; ++c) {
          deliver(round, send.from, send.to, send.base + offset + c);
        }
      }
    }
  }
}

// held[rank][chunk][r]: how often rank r's contribution is in there.
using Contributions = std::vector<std::vector<std::vector<int>>>;

// Who has to end with the whole sum: all, each chunk's owner, or the root.
enum class Ends { kEverywhere, kAtOwners, kAtRoot };

void CheckReduction(const Rounds& rounds, int n, Ends ends) {
  Contributions held(U(n), std::vector<std::vector<int>>(
                               U(rounds.chunks), std::vector<int>(U(n), 0)));
  for (int r = 0; r < n; ++r) {
    for (auto& chunk : held[U(r)]) chunk[U(r)] = 1;
  }
  Contributions before;
  std::set<std::pair<int, int>> summed;  // by a switch: (receiver, chunk)
  Replay(
      rounds,
      [&] {
        before = held;
        summed.clear();
      },
      [&](const Round& round, int from, int to, int chunk) {
        const auto& sent = before[U(from)][U(chunk)];
        auto& kept = held[U(to)][U(chunk)];
        if (!round.reduce) {
          kept = sent;
          return;
        }
        if (round.in_switch && summed.emplace(to, chunk).second) {
          kept.assign(U(n), 0);
        }
        for (int r = 0; r < n; ++r) kept[U(r)] += sent[U(r)];
      });
  const std::vector<int> once(U(n), 1);
  for (int c = 0; c < rounds.chunks; ++c) {
    for (int r = 0; r < n; ++r) {
      if (ends == Ends::kAtOwners && rounds.owner[U(c)] != r) continue;
      if (ends == Ends::kAtRoot && r != 0) continue;
      EXPECT_EQ(held[U(r)][U(c)], once) << "rank " << r << " chunk " << c;
    }
  }
}

void CheckGather(const Rounds& rounds, int n) {
  std::vector<std::set<int>> held(U(n));
  for (int c = 0; c < rounds.chunks; ++c) {
    held[U(rounds.owner[U(c)])].insert(c);
  }
  std::vector<std::set<int>> before;
  Replay(
      rounds, [&] { before = held; },
      [&](const Round& round, int from, int to, int chunk) {
        EXPECT_FALSE(round.reduce);
        EXPECT_TRUE(before[U(from)].contains(chunk))
            << "rank " << from << " sends chunk " << chunk << " too early";
        held[U(to)].insert(chunk);
      });
  for (int r = 0; r < n; ++r) {
    EXPECT_EQ(held[U(r)].size(), U(rounds.chunks)) << "rank " << r;
  }
}

// What the root has reaches each chunk's owner (scatter) or everyone
// (broadcast); a gather brings it all to the root.
void CheckRooted(const Rounds& rounds, int n, CommKind kind) {
  std::vector<std::set<int>> held(U(n));
  for (int c = 0; c < rounds.chunks; ++c) {
    held[kind == CommKind::kGather ? U(rounds.owner[U(c)]) : 0].insert(c);
  }
  std::vector<std::set<int>> before;
  Replay(
      rounds, [&] { before = held; },
      [&](const Round& round, int from, int to, int chunk) {
        EXPECT_FALSE(round.reduce);
        EXPECT_TRUE(before[U(from)].contains(chunk));
        held[U(to)].insert(chunk);
      });
  for (int c = 0; c < rounds.chunks; ++c) {
    for (int r = 0; r < n; ++r) {
      const bool wanted =
          kind == CommKind::kBroadcast ||
          r == (kind == CommKind::kGather ? 0 : rounds.owner[U(c)]);
      EXPECT_TRUE(!wanted || held[U(r)].contains(c))
          << "rank " << r << " chunk " << c;
    }
  }
}

// In an exchange every rank's chunk c goes to owner[c], once. A send takes all
// along that its rank has of a chunk.
void CheckExchange(const Rounds& rounds, int n) {
  // held[rank][chunk]: whose it has.
  std::vector<std::vector<std::multiset<int>>> held(
      U(n), std::vector<std::multiset<int>>(U(rounds.chunks)));
  for (int r = 0; r < n; ++r) {
    for (auto& chunk : held[U(r)]) chunk = {r};
  }
  auto before = held;
  Replay(
      rounds, [&] { before = held; },
      [&](const Round& round, int from, int to, int chunk) {
        const auto& sent = before[U(from)][U(chunk)];
        EXPECT_EQ(sent.size(), U(round.copies));
        for (int whose : sent) {
          held[U(from)][U(chunk)].erase(whose);
          held[U(to)][U(chunk)].insert(whose);
        }
      });
  std::multiset<int> all;
  for (int r = 0; r < n; ++r) all.insert(r);
  for (int c = 0; c < rounds.chunks; ++c) {
    for (int r = 0; r < n; ++r) {
      EXPECT_EQ(held[U(r)][U(c)],
                r == rounds.owner[U(c)] ? all : std::multiset<int>())
          << "rank " << r << " chunk " << c;
    }
  }
}

// Everyone ends with what the next rank had, and the last with the first's.
void CheckShift(const Rounds& rounds, int n) {
  std::vector<std::set<int>> arrived(U(n));  // whose chunks
  Replay(
      rounds, [] {},
      [&](const Round& round, int from, int to, int chunk) {
        EXPECT_FALSE(round.reduce);
        EXPECT_EQ(chunk, 0);
        arrived[U(to)].insert(from);
      });
  EXPECT_EQ(rounds.chunks, 1);
  for (int r = 0; r < n; ++r) {
    EXPECT_EQ(arrived[U(r)], std::set<int>({(r + 1) % n})) << "rank " << r;
  }
}

TEST(CollectiveContract, EveryRankEndsWithTheRightData) {
  int cases = 0;
  for (const CollectiveAlgorithm& algorithm : CollectiveAlgorithms()) {
    for (CommKind kind : kKinds) {
      for (const CollectiveGroup& group : Groups()) {
        if (!algorithm.applies(kind, group)) continue;
        SCOPED_TRACE(Describe(algorithm, kind, group));
        const Rounds rounds = algorithm.rounds(kind, group);
        ASSERT_EQ(rounds.owner.size(), U(rounds.chunks));
        switch (kind) {
          case CommKind::kAllReduce:
            CheckReduction(rounds, group.ranks, Ends::kEverywhere);
            break;
          case CommKind::kReduceScatter:
            CheckReduction(rounds, group.ranks, Ends::kAtOwners);
            EXPECT_EQ(rounds.own_share, 1.0 / group.ranks);
            break;
          case CommKind::kReduce:
            CheckReduction(rounds, group.ranks, Ends::kAtRoot);
            break;
          case CommKind::kScatter:
          case CommKind::kBroadcast:
          case CommKind::kGather:
            CheckRooted(rounds, group.ranks, kind);
            break;
          case CommKind::kAllGather:
            CheckGather(rounds, group.ranks);
            EXPECT_EQ(rounds.own_share, 1.0 / group.ranks);
            break;
          case CommKind::kAllToAll:
          case CommKind::kRedistribute:
            CheckExchange(rounds, group.ranks);
            EXPECT_EQ(rounds.own_share, 1.0 / group.ranks);
            break;
          case CommKind::kSendRecv:
            ASSERT_EQ(rounds.rounds.size(), 1u);
            ASSERT_EQ(rounds.rounds[0].sends.size(), 1u);
            EXPECT_EQ(rounds.rounds[0].sends[0].from, 0);
            EXPECT_EQ(rounds.rounds[0].sends[0].to, 1);
            break;
          case CommKind::kShift:
            CheckShift(rounds, group.ranks);
            break;
        }
        ++cases;
      }
    }
  }
  EXPECT_GT(cases, 100);
}

TEST(CollectiveContract, ABrokenRingIsCaught) {
  // The replay itself must be able to fail: one step too few leaves a
  // contribution out.
  Rounds rounds = RingRounds(CommKind::kAllReduce, GroupOf({4}, false));
  rounds.rounds[0].repeat -= 1;
  bool complete = true;
  std::vector<std::vector<std::set<int>>> held(4,
                                               std::vector<std::set<int>>(4));
  for (int r = 0; r < 4; ++r) {
    for (auto& chunk : held[U(r)]) chunk.insert(r);
  }
  auto before = held;
  Replay(
      rounds, [&] { before = held; },
      [&](const Round& round, int from, int to, int chunk) {
        const auto& sent = before[U(from)][U(chunk)];
        auto& kept = held[U(to)][U(chunk)];
        if (!round.reduce) kept.clear();
        kept.insert(sent.begin(), sent.end());
      });
  for (const auto& rank : held) {
    for (const auto& chunk : rank) complete &= chunk.size() == 4;
  }
  EXPECT_FALSE(complete);
}

// Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms" (2009): a rank
// sends at least 2 (n - 1) / n of the buffer in an all-reduce (on average over
// ranks), half of that in a reduce-scatter, an all-gather or an all-to-all.
TEST(CollectiveContract, BytesPerRankAreAtLeastTheLowerBound) {
  for (const CollectiveAlgorithm& algorithm : CollectiveAlgorithms()) {
    for (CommKind kind : kKinds) {
      for (const CollectiveGroup& group : Groups()) {
        if (!algorithm.applies(kind, group)) continue;
        SCOPED_TRACE(Describe(algorithm, kind, group));
        const Rounds rounds = algorithm.rounds(kind, group);
        double sent = 0;  // by all ranks, in payloads
        for (const Round& round : rounds.rounds) {
          for (const Send& send : round.sends) {
            if (send.from == send.to) continue;  // from the switch, back to it
            sent += static_cast<double>(send.count) * round.copies *
                    round.repeat / rounds.chunks;
          }
        }
        const double n = group.ranks;
        double bound = (n - 1) / n * n;
        if (kind == CommKind::kAllReduce) bound *= 2;
        if (kind == CommKind::kSendRecv) bound = 1;
        if (kind == CommKind::kShift) bound = n;
        // All but the root's own share leaves it, or comes; every other rank
        // gets, or gives, the whole.
        const bool shares =
            kind == CommKind::kScatter || kind == CommKind::kGather;
        const bool wholes =
            kind == CommKind::kBroadcast || kind == CommKind::kReduce;
        if (shares) bound = (n - 1) / n;
        if (wholes) bound = n - 1;
        EXPECT_GE(sent, bound * (1 - 1e-9));
        // No row of the table sends more than it must, but for exchanges by
        // way of others: (g - 1) / g within hosts of g, (m - 1) / m across m.
        if (algorithm.rounds == HierarchicalExchangeRounds) {
          const double m = static_cast<double>(group.nodes.size());
          bound = n * ((n / m - 1) / (n / m) + (m - 1) / m);
        }
        EXPECT_LE(sent, bound * (1 + 1e-9));
      }
    }
  }
}

TEST(CollectiveContract, TimeIsMonotoneInBytesOnEveryTopology) {
  for (const Topology& topology : Topologies()) {
    for (int n = 2; n <= 9; ++n) {
      const std::string spec = std::string(topology.name) +
                               (topology.gpus_per_node == 0 ? ":9" : ":4");
      const Result<Cluster> cluster = MakeCluster(spec);
      ASSERT_TRUE(cluster) << cluster.error().ToString();
      if (static_cast<int>(cluster->devices.size()) < n) continue;
      const CollectiveModel model(*cluster);
      std::vector<std::vector<DeviceId>> group(1);
      for (int d = 0; d < n; ++d) group[0].emplace_back(d);
      for (CommKind kind : kKinds) {
        if (kind == CommKind::kSendRecv) group[0].resize(2);
        for (const CollectiveOption& option : model.Options(kind, group)) {
          SCOPED_TRACE(spec + " " + std::string(option.algorithm) + " " +
                       std::string(NameOf(kind)) + " on " + std::to_string(n));
          EXPECT_GT(option.latency_s, 0);
          EXPECT_GT(option.seconds_per_byte, 0);
          double before = 0;
          for (int64_t bytes = 1; bytes < int64_t{1} << 34; bytes *= 4) {
            const double seconds = option.Seconds({bytes});
            EXPECT_GT(seconds, before);
            before = seconds;
          }
        }
        if (kind == CommKind::kSendRecv) {
          group[0].clear();
          for (int d = 0; d < n; ++d) group[0].emplace_back(d);
        }
      }
    }
  }
}

// What the simulator makes of a collective that runs alone is its closed form:
// the flows' loads fill no link more than to the brim, so that max-min sharing
// leaves it at full speed.
TEST(CollectiveContract, AloneTheClosedFormIsWhatIsSimulated) {
  for (const Topology& topology : Topologies()) {
    const std::string spec =
        std::string(topology.name) +
        (topology.gpus_per_node == 0
             ? ":8"
             : ":2x" + std::to_string(std::min(topology.gpus_per_node, 8)));
    Cluster cluster = *MakeCluster(spec);
    const int n = static_cast<int>(cluster.devices.size());
    for (const CollectiveAlgorithm& algorithm : CollectiveAlgorithms()) {
      const CollectiveModel model(cluster, {std::string(algorithm.name), ""});
      for (CommKind kind : kKinds) {
        std::vector<std::vector<DeviceId>> group(1);
        for (int d = 0; d < n; ++d) group[0].emplace_back(d);
        if (kind == CommKind::kSendRecv) group[0] = {group[0][0], group[0][1]};
        for (const CollectiveOption& option : model.Options(kind, group)) {
          SCOPED_TRACE(spec + " " + std::string(option.algorithm) + " " +
                       std::string(option.protocol) + " " +
                       std::string(NameOf(kind)));
          for (int64_t bytes : {int64_t{1} << 10, int64_t{1} << 40}) {
            std::vector<LinkUse> uses;
            for (const LinkLoad& load :
                 model.Loads(kind, group, option.algorithm)) {
              const int type = cluster.links[load.link.index()].type;
              const double bandwidth =
                  cluster.link_types[U(type)].bandwidth.value;
              uses.push_back({load.link, load.bytes_per_payload_byte *
                                             static_cast<double>(bytes) /
                                             bandwidth /
                                             option.Seconds({bytes})});
              EXPECT_LE(uses.back().utilisation, 1 + 1e-9);
            }
            ASSERT_FALSE(uses.empty());
            const std::vector<std::vector<LinkUse>> flows = {uses};
            EXPECT_NEAR(MaxMinRates(flows)[0], 1, 1e-9);
          }
        }
      }
    }
  }
}

// In a mesh rings go by slow links where that is faster than without them: with
// a link at 1/1.1 of its rate an all-reduce takes at most 1.1 times as long,
// and with one that hardly moves anything not longer than without it.
TEST(CollectiveContract, SlowLinksOfAMeshCostWhatTheyLack) {
  const Cluster mesh = *MakeCluster("dgx1-v100-32gb");
  const auto seconds_per_byte = [](const Cluster& cluster) {
    const CollectiveModel model(cluster);
    std::vector<std::vector<DeviceId>> group(1);
    for (int d = 0; d < 8; ++d) group[0].emplace_back(d);
    const auto& options = model.Options(CommKind::kAllReduce, group);
    return CollectiveModel::Best(options, {int64_t{1} << 40}).seconds_per_byte;
  };
  const double usual = seconds_per_byte(mesh);
  int slower = 0;
  for (int a = 0; a < 8; ++a) {
    for (int b = a + 1; b < 8; ++b) {
      const std::string pair =
          "node0.gpu" + std::to_string(a) + "--node0.gpu" + std::to_string(b);
      Cluster without = mesh;
      std::vector<std::string> notes;
      if (!Fail({pair}, without, notes)) continue;
      Cluster slow = mesh;
      ASSERT_TRUE(SlowDown(pair, 1.1, slow)) << pair;
      EXPECT_GE(seconds_per_byte(slow), usual * 0.999) << pair;
      EXPECT_LE(seconds_per_byte(slow), usual * 1.1001) << pair;
      ASSERT_TRUE(SlowDown(pair, 1e4, slow)) << pair;
      EXPECT_LE(seconds_per_byte(slow), seconds_per_byte(without) * 1.001)
          << pair;
      slower += seconds_per_byte(without) > usual * 1.1;
    }
  }
  EXPECT_GE(slower, 8);
}

// A ring's all-reduce brings the sum to the root and to all others: what does
// one of the two takes no longer, however the ranks are numbered.
TEST(CollectiveContract, ReduceAndBroadcastTakeNoLongerThanARingsAllReduce) {
  for (const Topology& topology : Topologies()) {
    for (const char* hosts : {":1", ":2", ":3"}) {
      const std::string name(topology.name);
      const Cluster cluster = *MakeCluster(
          topology.gpus_per_node == 0 ? name + ":6" : name + hosts);
      if (cluster.devices.size() < 2) continue;
      const CollectiveModel model(cluster, {"ring", ""});
      const auto n = static_cast<int64_t>(cluster.devices.size());
      std::vector<std::vector<DeviceId>> groups(3);
      for (int64_t d = 0; d < n; ++d) {
        groups[0].emplace_back(d);
        groups[1].emplace_back(n - 1 - d);
        // Every other one, then those in between.
        groups[2].emplace_back(2 * d < n ? 2 * d : 2 * (n - 1 - d) + 1);
      }
      for (const auto& group : groups) {
        const std::vector<std::vector<DeviceId>> all = {group};
        for (const int64_t bytes : {int64_t{1000}, int64_t{1} << 30}) {
          const auto seconds = [&](CommKind kind) {
            return CollectiveModel::Best(model.Options(kind, all), {bytes})
                .Seconds({bytes});
          };
          const double both = seconds(CommKind::kAllReduce) * 1.001;
          EXPECT_LE(seconds(CommKind::kBroadcast), both)
              << cluster.name << " " << bytes;
          EXPECT_LE(seconds(CommKind::kReduce), both)
              << cluster.name << " " << bytes;
        }
      }
    }
  }
}

// Of GPUs that direct links join to a ring, to a chain, or not at all.
TEST(CollectiveContract, ReduceAndBroadcastTakeNoLongerOnAnyPartOfAMesh) {
  const Cluster cluster = *MakeCluster("dgx1-v100-32gb");
  const CollectiveModel model(cluster);
  for (unsigned members = 1; members < 256; ++members) {
    std::vector<DeviceId> group;
    for (int d = 0; d < 8; ++d) {
      if (members >> d & 1) group.emplace_back(d);
    }
    if (group.size() < 3) continue;
    for (size_t root = 0; root < group.size(); ++root) {
      std::ranges::rotate(group, group.begin() + 1);
      const std::vector<std::vector<DeviceId>> all = {group};
      const auto seconds = [&](CommKind kind) {
        const Bytes bytes = {int64_t{1} << 30};
        return CollectiveModel::Best(model.Options(kind, all), bytes)
            .Seconds(bytes);
      };
      const double both = seconds(CommKind::kAllReduce) * 1.001;
      EXPECT_LE(seconds(CommKind::kBroadcast), both) << members << " " << root;
      EXPECT_LE(seconds(CommKind::kReduce), both) << members << " " << root;
    }
  }
}

TEST(CollectiveContract, NodeRingsVisitEachDeviceOnceAndShareNoLink) {
  int meshes = 0;
  for (const Topology& topology : Topologies()) {
    const Result<Cluster> cluster = MakeCluster(topology.name);
    ASSERT_TRUE(cluster);
    const int n = std::min<int>(8, static_cast<int>(cluster->devices.size()));
    std::vector<DeviceId> devices;
    for (int d = 0; d < n; ++d) devices.emplace_back(d);
    const DirectLinks direct = DirectLinksOf(*cluster);
    const NodeOrders orders = NodeRings(RatesAmong(direct, devices));
    ASSERT_FALSE(orders.rings.empty());
    for (const auto& ring : orders.rings) {
      EXPECT_EQ(std::set<int>(ring.begin(), ring.end()).size(), U(n))
          << topology.name;
    }
    if (!orders.meshed || orders.open_chain) continue;
    // Rings go at the rate of the slowest link; the three cycles of four GPUs
    // that are all joined share each link, and go at half of it.
    std::map<std::pair<DeviceId, DeviceId>, double> bandwidth;
    double unit = 1e30;
    for (DeviceId from : devices) {
      for (const DirectLink& link : direct[from.index()]) {
        bandwidth[{from, link.to}] += link.bandwidth;
        unit = std::min(unit, link.bandwidth);
      }
    }
    if (topology.name == "p100-edr") unit /= 2;
    std::map<std::pair<DeviceId, DeviceId>, int> rings;
    for (const auto& ring : orders.rings) {
      for (size_t i = 0; i < ring.size(); ++i) {
        const auto device_at = [&](size_t at) {
          return devices[U(ring[at % ring.size()])];
        };
        ++rings[{device_at(i), device_at(i + 1)}];
      }
    }
    for (const auto& [ends, count] : rings) {
      EXPECT_LE(count * unit, bandwidth[ends] * (1 + 1e-9)) << topology.name;
    }
    ++meshes;
  }
  EXPECT_GE(meshes, 1);
}

}  // namespace
}  // namespace tessera
