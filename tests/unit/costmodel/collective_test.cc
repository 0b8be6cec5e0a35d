#include "costmodel/collective/collective.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "costmodel/collective/protocols.h"
#include "planner/topology/hardware.h"
#include "planner/topology/topologies.h"

namespace tessera {
namespace {

constexpr Bytes kHalfGiB = {int64_t{1} << 29};

std::vector<DeviceId> Range(int64_t first, int64_t count, int64_t stride = 1) {
  std::vector<DeviceId> devices;
  for (int64_t i = 0; i < count; ++i) {
    devices.emplace_back(first + i * stride);
  }
  return devices;
}

double BestSeconds(const CollectiveModel& model, CommKind kind,
                   const std::vector<std::vector<DeviceId>>& groups,
                   Bytes payload) {
  return CollectiveModel::Best(model.Options(kind, groups), payload)
      .Seconds(payload);
}

// Bus bandwidth as nccl-tests define it: 2 (n - 1) / n of the payload over the
// time, in GB/s.
double AllReduceBusBandwidth(const std::string& spec, int n, Bytes payload) {
  const Cluster cluster = *MakeCluster(spec);
  const CollectiveModel model(cluster);
  const double seconds =
      BestSeconds(model, CommKind::kAllReduce, {Range(0, n)}, payload);
  return 2.0 * (n - 1) / n * static_cast<double>(payload.value) / seconds / 1e9;
}

// The option of an algorithm and protocol; fails where there is none.
const CollectiveOption& Named(const std::vector<CollectiveOption>& options,
                              std::string_view algorithm,
                              std::string_view protocol) {
  const auto found = std::ranges::find_if(options, [&](const auto& option) {
    return option.algorithm == algorithm && option.protocol == protocol;
  });
  TESSERA_CHECK(found != options.end()) << algorithm << " " << protocol;
  return *found;
}

const Protocol& Simple(SendPattern pattern) {
  return *std::ranges::find(ProtocolsOf(pattern), "simple", &Protocol::name);
}

// A ring on a small case, by hand: four H100 on one NVSwitch. 2 * 3 steps, each
// over two links; each GPU's link carries 2 * 3/4 of the buffer, and each GPU
// copies its own quarter.
TEST(CollectiveModel, RingByHand) {
  const Cluster cluster = *MakeCluster("dgx-h100");
  const CollectiveModel model(cluster);
  const std::vector<std::vector<DeviceId>> groups = {Range(0, 4)};
  const auto& options = model.Options(CommKind::kAllReduce, groups);
  ASSERT_EQ(options.size(), 4u);  // the ring by three protocols, and NVLS
  const LinkType& nvlink = LinkTypeNamed("nvlink4");
  for (const Protocol& protocol : ProtocolsOf(SendPattern::kPipeline)) {
    const CollectiveOption& ring = Named(options, "ring", protocol.name);
    const double step = 2 * nvlink.latency.seconds() + protocol.host_step_s;
    EXPECT_NEAR(ring.latency_s,
                nvlink.start.seconds() + protocol.start_s + 6 * step, 1e-11);
    EXPECT_NEAR(ring.seconds_per_byte,
                (1.5 + protocol.own_copy / 4) / nvlink.bandwidth.value /
                    protocol.fraction,
                1e-20);
  }
  const auto& loads = model.Loads(CommKind::kAllReduce, groups, "ring");
  ASSERT_EQ(loads.size(), 8u);  // four links, both directions
  for (const LinkLoad& load : loads) {
    EXPECT_NEAR(load.bytes_per_payload_byte, 1.5, 1e-12);
  }
  EXPECT_EQ(&options, &model.Options(CommKind::kAllReduce, groups));
}

// Of 1,024 ranks every pair is replayed, of 1,032 a sample: between so many
// hosts a byte takes as long, but for the 7 of 1,023 or 1,031 that stay within.
TEST(CollectiveModel, LargeExchangesAreSampledEvenly) {
  for (const char* network : {"", "@fat-tree"}) {
    std::vector<double> seconds;
    for (const int nodes : {128, 129}) {
      const Cluster cluster =
          *MakeCluster("dgx-h100:" + std::to_string(nodes) + network);
      const CollectiveModel model(cluster, {"direct", ""});
      const std::vector<std::vector<DeviceId>> all = {Range(0, 8 * nodes)};
      seconds.push_back(
          model.Options(CommKind::kAllToAll, all)[0].seconds_per_byte);
    }
    EXPECT_NEAR(seconds[1] / seconds[0], 1, 0.02) << network;
  }
}

// By way of the hosts' switches, too: of 300 hosts of four each rank sends to
// 255, of 256 to all.
TEST(CollectiveModel, LargeExchangesAcrossHostsAreSampledEvenly) {
  for (const char* network : {"", "@fat-tree:2"}) {
    std::vector<double> seconds;
    for (const int nodes : {256, 300}) {
      const Cluster cluster =
          *MakeCluster("dgx-h100:" + std::to_string(nodes) + "x4" + network);
      const CollectiveModel model(cluster, {"hierarchical-all-to-all", ""});
      const std::vector<std::vector<DeviceId>> all = {Range(0, 4 * nodes)};
      const CollectiveOption& option =
          model.Options(CommKind::kAllToAll, all)[0];
      EXPECT_EQ(option.algorithm, "hierarchical-all-to-all");
      seconds.push_back(option.seconds_per_byte);
    }
    EXPECT_NEAR(seconds[1] / seconds[0], 1, 0.03) << network;
  }
}

// So an exchange's sends are linear in its ranks.
TEST(CollectiveModel, LargeExchangesHaveFewSends) {
  CollectiveGroup group;
  group.nodes.resize(1000);
  for (auto& node : group.nodes) {
    for (int i = 0; i < 2; ++i) node.push_back(group.ranks++);
  }
  for (const auto rounds : {HierarchicalExchangeRounds, DirectRounds}) {
    size_t sends = 0;
    for (const Round& round : rounds(CommKind::kAllToAll, group).rounds) {
      sends += round.sends.size();
    }
    EXPECT_LE(sends, 256u * 2000);
    EXPECT_GE(sends, 255u * 2000);
  }
}

// Nor have the others where memory is shared: twice as many sends for both
// halves of an all-reduce.
TEST(CollectiveModel, LargeCollectivesInSharedMemoryHaveFewSends) {
  CollectiveGroup group;
  group.ranks = 2000;
  group.nodes.resize(1);
  for (int i = 0; i < group.ranks; ++i) group.nodes[0].push_back(i);
  group.shared_memory = true;
  const std::pair<CommKind, size_t> halves[] = {{CommKind::kReduceScatter, 1},
                                                {CommKind::kAllGather, 1},
                                                {CommKind::kAllReduce, 2}};
  for (const auto& [kind, count] : halves) {
    ASSERT_TRUE(DirectApplies(kind, group));
    const Rounds rounds = DirectRounds(kind, group);
    ASSERT_EQ(rounds.rounds.size(), count);
    for (const Round& round : rounds.rounds) {
      EXPECT_EQ(round.sends.size(), 255u * 2000);
    }
    EXPECT_EQ(rounds.rounds[0].reduce, kind != CommKind::kAllGather);
    EXPECT_FALSE(count == 2 && rounds.rounds[1].reduce);
  }
}

// Of 1,024 ranks every pair is replayed, of 1,025 a sample: a byte takes as
// long but for 1 / 256 that the sample leaves with its rank.
TEST(CollectiveModel, LargeCollectivesInSharedMemoryAreSampledEvenly) {
  std::vector<double> seconds;
  for (const int ranks : {1024, 1025}) {
    const Cluster cluster = *MakeCluster("local-cpu:" + std::to_string(ranks));
    const CollectiveModel model(cluster, {"direct", ""});
    const std::vector<std::vector<DeviceId>> all = {Range(0, ranks)};
    seconds.push_back(
        model.Options(CommKind::kAllReduce, all)[0].seconds_per_byte);
  }
  EXPECT_NEAR(seconds[1] / seconds[0], 1, 0.01);
}

// Whatever the ranks are a multiple of: seven of eight receivers are on other
// rails, behind a spine that carries a quarter of the NICs.
TEST(CollectiveModel, LargeExchangesAreSampledEvenlyOverRails) {
  const double nic = LinkTypeNamed("ib-ndr").bandwidth.value;
  for (const int nodes : {144, 192, 256}) {
    const Cluster cluster =
        *MakeCluster("dgx-h100:" + std::to_string(nodes) + "@rails:4");
    const CollectiveModel model(cluster, {"direct", "plain"});
    const std::vector<std::vector<DeviceId>> all = {Range(0, 8 * nodes)};
    const double seconds =
        model.Options(CommKind::kAllToAll, all)[0].seconds_per_byte;
    EXPECT_NEAR(seconds * nic, 4 * 7.0 / 8, 0.02 * 3.5) << nodes;
  }
}

// What goes to other rails changes rails within the host, so that a spine which
// carries less than the NICs costs an exchange nothing.
TEST(CollectiveModel, ExchangesKeepToTheirRails) {
  const std::vector<std::vector<DeviceId>> all = {Range(0, 64)};
  const auto seconds = [&](const char* spec) {
    const Cluster cluster = *MakeCluster(spec);
    return BestSeconds(CollectiveModel(cluster), CommKind::kAllToAll, all,
                       kHalfGiB);
  };
  const double whole = seconds("dgx-h100:8");
  for (const char* spec : {"dgx-h100:8@rails:2", "dgx-h100:8@rails:64"}) {
    EXPECT_NEAR(seconds(spec) / whole, 1, 0.01) << spec;
  }
}

// Eight rings by four NICs, in both directions of the three cycles of a mesh,
// none of whose links would carry all of them.
TEST(CollectiveModel, RingsAcrossMeshesReachTheirNics) {
  const Cluster cluster = *MakeCluster("dgx1-v100-32gb:2");
  const CollectiveModel model(cluster, {"ring", "plain"});
  const std::vector<std::vector<DeviceId>> all = {Range(0, 16)};
  for (CommKind kind : {CommKind::kAllGather, CommKind::kReduceScatter}) {
    EXPECT_NEAR(model.Options(kind, all)[0].seconds_per_byte *
                    LinkTypeNamed("ib-edr").bandwidth.value,
                15.0 / 16 / 4, 1e-9);
  }
}

// Trees go over hosts of any numbers of ranks: one more or fewer changes
// little.
TEST(CollectiveModel, AllReduceOfARankFewerIsNoSlower) {
  const Cluster cluster = *MakeCluster("dgx-h100:16");
  const CollectiveModel model(cluster);
  for (int ranks : {128, 96, 64}) {
    for (int64_t bytes = 1 << 10; bytes <= int64_t{1} << 32; bytes *= 8) {
      const auto seconds = [&](int n) {
        return BestSeconds(model, CommKind::kAllReduce, {Range(0, n)}, {bytes});
      };
      EXPECT_LE(seconds(ranks - 1), seconds(ranks) * 1.05)
          << ranks << " " << bytes;
    }
  }
  const Cluster unlike = *MakeCluster("dgx-h100:2+dgx-h100:2x4");
  const CollectiveModel of_unlike(unlike);
  const auto& options = of_unlike.Options(
      CommKind::kAllReduce, std::vector<std::vector<DeviceId>>{Range(0, 24)});
  EXPECT_GT(Named(options, "double-tree", "ll").latency_s, 0);
  EXPECT_GT(Named(options, "nvls-tree", "simple").latency_s, 0);
}

// Sums in the switch, by hand: into it goes the whole buffer and out of it a
// quarter, then the other way round: 5/4 of the buffer each way. Two steps.
TEST(CollectiveModel, SumsInTheSwitchByHand) {
  const Cluster cluster = *MakeCluster("dgx-h100");
  const CollectiveModel model(cluster);
  const std::vector<std::vector<DeviceId>> groups = {Range(0, 4)};
  const CollectiveOption& nvls =
      Named(model.Options(CommKind::kAllReduce, groups), "nvls", "simple");
  const LinkType& nvlink = LinkTypeNamed("nvlink4");
  EXPECT_NEAR(nvls.seconds_per_byte, 1.25 / nvlink.in_switch_bandwidth.value,
              1e-20);
  EXPECT_NEAR(nvls.latency_s,
              nvlink.start.seconds() + Simple(SendPattern::kInSwitch).start_s +
                  4 * nvlink.latency.seconds(),
              1e-11);
  // An A100's switch does not sum.
  const Cluster ampere = *MakeCluster("dgx-a100-80gb");
  const CollectiveModel ampere_model(ampere);
  for (const CollectiveOption& option :
       ampere_model.Options(CommKind::kAllReduce, groups)) {
    EXPECT_EQ(option.algorithm, "ring");
  }
}

// Eight Hopper GPUs gain by sums in the switch, four do not (8 GiB on H200, by
// number of GPUs: 363.3 GB/s on 4, 414.2 on 5, 435.6 on 6, 460.0 on 7, 473.1 on
// 8; stas00/ml-engineering).
TEST(CollectiveModel, SwitchSumsPayFromFiveGpusOn) {
  const Cluster cluster = *MakeCluster("dgx-h200");
  const CollectiveModel model(cluster);
  const double published[] = {363.3, 414.2, 435.6, 460.0, 473.1};
  for (int n = 4; n <= 8; ++n) {
    const Bytes payload = {int64_t{1} << 33};
    const std::vector<std::vector<DeviceId>> groups = {Range(0, n)};
    const CollectiveOption& best = CollectiveModel::Best(
        model.Options(CommKind::kAllReduce, groups), payload);
    // On four the two are within a hundredth of each other.
    if (n > 4) {
      EXPECT_EQ(best.algorithm, "nvls") << n;
    }
    const double bus = 2.0 * (n - 1) / n * static_cast<double>(payload.value) /
                       best.Seconds(payload) / 1e9;
    EXPECT_NEAR(bus, published[n - 4], 0.06 * published[n - 4]) << n;
  }
}

// 16 MB over 128 hosts by the flat ring reach 0.0087 of the NICs' bandwidth
// (SimAI's table): 2,046 steps of some 4.7 us take 9.6 ms.
TEST(CollectiveModel, RingOfAThousandReachesAHundredthOfPeak) {
  const Cluster cluster = *MakeCluster("dgx-h100:128");
  const CollectiveModel model(cluster, {"ring", "simple"});
  const std::vector<std::vector<DeviceId>> groups = {Range(0, 1024)};
  const auto& options = model.Options(CommKind::kAllReduce, groups);
  ASSERT_EQ(options.size(), 1u);
  const double bus = 2 * 16.777216e6 / options[0].Seconds({16777216});
  EXPECT_NEAR(bus / (8 * 50e9), 0.0087, 0.25 * 0.0087);
  // What NCCL would do there is another thing.
  EXPECT_LT(BestSeconds(CollectiveModel(cluster), CommKind::kAllReduce, groups,
                        {16777216}),
            0.3 * options[0].Seconds({16777216}));
}

// Published bus bandwidths at 512 MiB (NVIDIA aiconfigurator's NCCL table),
// within 10 %, two A100 within 13.
TEST(CollectiveModel, PublishedAllReduceBandwidth) {
  const struct {
    const char* spec;
    int n;
    double published;
    double tolerance;
  } points[] = {
      {"dgx-a100-80gb", 2, 193, 0.13},
      {"dgx-a100-80gb", 4, 217, 0.10},
      {"dgx-a100-80gb", 8, 222, 0.10},
      {"dgx-h100", 2, 318, 0.10},
      {"dgx-h100", 4, 350, 0.10},
      {"dgx-h100", 8, 445, 0.10},
      {"dgx-h200", 2, 315, 0.10},
      {"dgx-h200", 4, 348, 0.10},
      {"dgx-h200", 8, 460, 0.10},
      {"dgx-b200", 2, 534, 0.10},
      {"dgx-b200", 4, 634, 0.10},
      {"dgx-b200", 8, 704, 0.10},
      // vTrain's table, 8 of 8 V100 of a DGX-1-like mesh: 134; 4: 85; 2: 22.5.
      {"dgx1-v100-32gb", 8, 134, 0.10},
      {"dgx1-v100-32gb", 4, 85, 0.10},
      {"dgx1-v100-32gb", 2, 22.55, 0.10},
  };
  for (const auto& point : points) {
    const double found = AllReduceBusBandwidth(point.spec, point.n, kHalfGiB);
    EXPECT_NEAR(found, point.published, point.tolerance * point.published)
        << point.spec << " on " << point.n;
  }
}

// Five GPUs of that mesh have no ring of NVLinks but a chain, along which sums
// go up and results come down: 37.2 GB/s (vTrain's table).
TEST(CollectiveModel, OpenChain) {
  EXPECT_NEAR(AllReduceBusBandwidth("dgx1-v100-32gb", 5, kHalfGiB), 37.2,
              0.1 * 37.2);
}

// Latency floors of an all-reduce on 8 GPUs: A100 21.3 us, H100 15.6, H200
// 16.0, B200 25.1.
TEST(CollectiveModel, PublishedAllReduceLatency) {
  const struct {
    const char* spec;
    double published;
    double tolerance;
  } points[] = {{"dgx-a100-80gb", 21.3e-6, 0.15},
                {"dgx-h100", 15.6e-6, 0.05},
                {"dgx-h200", 16.0e-6, 0.05},
                {"dgx-b200", 25.1e-6, 0.05}};
  for (const auto& point : points) {
    const Cluster cluster = *MakeCluster(point.spec);
    const CollectiveModel model(cluster);
    const double seconds =
        BestSeconds(model, CommKind::kAllReduce, {Range(0, 8)}, {512});
    EXPECT_NEAR(seconds, point.published, point.tolerance * point.published)
        << point.spec;
  }
}

// Two p4de nodes (aws-samples): 41.8 GB/s by the buffer at 2 GiB, 163 us at
// least. Two p5 nodes: 69 us at least.
TEST(CollectiveModel, PublishedTwoNodeAllReduce) {
  const Cluster p4d = *MakeCluster("p4d.24xlarge:2");
  const CollectiveModel model(p4d);
  const Bytes two_gib = {int64_t{1} << 31};
  const double seconds =
      BestSeconds(model, CommKind::kAllReduce, {Range(0, 16)}, two_gib);
  EXPECT_NEAR(static_cast<double>(two_gib.value) / seconds / 1e9, 41.8, 0.8);
  EXPECT_NEAR(BestSeconds(model, CommKind::kAllReduce, {Range(0, 16)}, {8}),
              163e-6, 0.05 * 163e-6);
  const Cluster p5 = *MakeCluster("p5.48xlarge:2");
  const CollectiveModel p5_model(p5);
  EXPECT_NEAR(BestSeconds(p5_model, CommKind::kAllReduce, {Range(0, 16)}, {8}),
              69e-6, 0.08 * 69e-6);
}

// Across hosts, by hand for two of eight A100 with eight NICs each: rings cross
// the NICs with 2 * 15/16 of the buffer, two trees with all of it, once each
// way; a chain within a host carries 2 * 7/8 of it.
TEST(CollectiveModel, RingAndTreesByHand) {
  const Cluster cluster = *MakeCluster("dgx-a100-80gb:2");
  const CollectiveModel model(cluster);
  const std::vector<std::vector<DeviceId>> groups = {Range(0, 16)};
  const auto& options = model.Options(CommKind::kAllReduce, groups);
  ASSERT_EQ(options.size(), 6u);
  const LinkType& nvlink = LinkTypeNamed("nvlink3");
  const LinkType& nic = LinkTypeNamed("ib-hdr");
  const Protocol& simple = Simple(SendPattern::kPipeline);
  const double start = nvlink.start.seconds() + simple.start_s;
  const double inside = 2 * nvlink.latency.seconds() + simple.host_step_s;
  const double across = 4 * LinkTypeNamed("pcie4-x16").latency.seconds() +
                        2 * nic.latency.seconds() + simple.network_step_s;
  const double own_copy = simple.own_copy / 16 / nvlink.bandwidth.value;

  const CollectiveOption& ring = Named(options, "ring", "simple");
  EXPECT_NEAR(ring.seconds_per_byte,
              2.0 * 15 / 16 / (8 * nic.bandwidth.value) + own_copy, 1e-20);
  // A chunk goes round 15 of 16 links, of which two cross between the hosts.
  EXPECT_NEAR(ring.latency_s, start + 2 * (13 * inside + 2 * across), 1e-10);

  const CollectiveOption& tree = Named(options, "double-tree", "simple");
  EXPECT_NEAR(
      tree.seconds_per_byte,
      std::max(1.75 / nvlink.bandwidth.value, 1 / (8 * nic.bandwidth.value)),
      1e-20);
  // Seven steps down the chain and seven up, two crossings of whole pieces.
  const double piece =
      static_cast<double>(simple.piece.value) / nic.bandwidth.value;
  EXPECT_NEAR(tree.latency_s, start + 14 * inside + 2 * (across + piece),
              1e-10);
}

// Every algorithm can be asked for by name, and a protocol; where it does not
// apply the fastest is taken.
TEST(CollectiveModel, ChoiceIsKept) {
  const Cluster cluster = *MakeCluster("dgx-h100:2");
  const std::vector<std::vector<DeviceId>> groups = {Range(0, 16)};
  for (const CollectiveAlgorithm& algorithm : CollectiveAlgorithms()) {
    const CollectiveModel model(cluster, {std::string(algorithm.name), ""});
    for (CommKind kind : {CommKind::kAllReduce, CommKind::kAllToAll}) {
      const auto& options = model.Options(kind, groups);
      ASSERT_FALSE(options.empty());
      const bool some = std::ranges::any_of(options, [&](const auto& option) {
        return option.algorithm == algorithm.name;
      });
      for (const CollectiveOption& option : options) {
        EXPECT_TRUE(!some || option.algorithm == algorithm.name);
      }
      if (algorithm.name == "hierarchical") {
        EXPECT_EQ(some, kind == CommKind::kAllReduce);
      }
      if (algorithm.name == "hierarchical-all-to-all") {
        EXPECT_EQ(some, kind == CommKind::kAllToAll);
      }
    }
  }
  Cluster simple_cluster = cluster;
  simple_cluster.collective = "/simple";
  const CollectiveModel simple(simple_cluster);
  for (const auto& option : simple.Options(CommKind::kAllReduce, groups)) {
    EXPECT_EQ(option.protocol, "simple");
  }
}

// On 16 hosts of 8 the same share of a rank's bytes crosses the network, 15/16
// or 120/128, over two links of PCIe on either side; and 7/8 of them go up to
// their host's switch and down again besides.
TEST(CollectiveModel, HierarchicalAllToAllCrossesTheHostFirst) {
  const Cluster cluster = *MakeCluster("dgx-h100:16");
  const std::vector<std::vector<DeviceId>> groups = {Range(0, 128)};
  const auto moved = [&](const std::string& algorithm, bool between_hosts) {
    const CollectiveModel model(cluster);
    double bytes = 0;
    for (const LinkLoad& load :
         model.Loads(CommKind::kAllToAll, groups, algorithm)) {
      const Link& link = cluster.links[load.link.index()];
      const bool leaves =
          model.router().NodeOf(link.from) != model.router().NodeOf(link.to);
      if (leaves == between_hosts) bytes += load.bytes_per_payload_byte;
    }
    return bytes;
  };
  const std::string two = "hierarchical-all-to-all";
  EXPECT_NEAR(moved(two, true), moved("direct", true), 1e-6);
  EXPECT_NEAR(moved(two, false), 128 * (4 * 15.0 / 16 + 2 * 7.0 / 8), 1e-6);
}

// Eight gradient all-reduces, one per local index, on nodes that share one NIC:
// each byte of all eight passes it.
TEST(CollectiveModel, SubgroupsShareLinks) {
  const Cluster cluster = *MakeCluster("p3.16xlarge:2");
  const CollectiveModel model(cluster);
  std::vector<std::vector<DeviceId>> eight;
  for (int64_t i = 0; i < 8; ++i) eight.push_back(Range(i, 2, 8));
  const std::vector<std::vector<DeviceId>> one = {eight[0]};
  const double alone =
      model.Options(CommKind::kAllReduce, one)[0].seconds_per_byte;
  const double together =
      model.Options(CommKind::kAllReduce, eight)[0].seconds_per_byte;
  // Both by "ll", the first of the protocols.
  const double fraction = ProtocolsOf(SendPattern::kPipeline)[0].fraction;
  EXPECT_NEAR(alone, 1 / (0.84 * 25e9 / 8) / fraction, 1e-18);
  EXPECT_NEAR(together, 8 * alone, 1e-16);
}

TEST(CollectiveModel, ChoicesAreParsed) {
  EXPECT_EQ(ParseCollectiveChoice("").value().algorithm, "");
  EXPECT_EQ(ParseCollectiveChoice("ring").value().algorithm, "ring");
  EXPECT_EQ(ParseCollectiveChoice("ring/ll").value().protocol, "ll");
  EXPECT_EQ(ParseCollectiveChoice("/ll128").value().protocol, "ll128");
  EXPECT_EQ(ParseCollectiveChoice("/plain").value().protocol, "plain");
  EXPECT_FALSE(ParseCollectiveChoice("rings"));
  EXPECT_FALSE(ParseCollectiveChoice("ring/simpel"));
}

TEST(CollectiveModel, OneRankMovesNothing) {
  const Cluster cluster = *MakeCluster("dgx-h100");
  const CollectiveModel model(cluster);
  const std::vector<std::vector<DeviceId>> groups = {Range(0, 1), Range(3, 1)};
  const auto& options = model.Options(CommKind::kAllReduce, groups);
  ASSERT_EQ(options.size(), 1u);
  EXPECT_EQ(options[0].algorithm, "none");
  EXPECT_EQ(options[0].Seconds(kHalfGiB), 0);
}

TEST(CollectiveModel, SharedMemoryRanksGoDirect) {
  const Cluster cluster = *MakeCluster("local-cpu:4");
  const CollectiveModel model(cluster);
  const std::vector<std::vector<DeviceId>> groups = {Range(0, 4)};
  const auto& options = model.Options(CommKind::kAllReduce, groups);
  EXPECT_EQ(CollectiveModel::Best(options, {1 << 20}).algorithm, "direct");
}

// 512 nodes: nothing is quadratic in the devices.
TEST(CollectiveModel, ThousandsOfDevices) {
  const Cluster cluster = *MakeCluster("dgx-h100:512");
  const CollectiveModel model(cluster);
  const std::vector<std::vector<DeviceId>> all = {Range(0, 4096)};
  const auto& best =
      CollectiveModel::Best(model.Options(CommKind::kAllReduce, all), kHalfGiB);
  EXPECT_NE(best.algorithm, "ring");
  EXPECT_TRUE(std::isfinite(best.Seconds(kHalfGiB)));
}

}  // namespace
}  // namespace tessera
