// Groups on hosts that are not alike, or that several hosts share unequally.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/price.h"
#include "costmodel/whatif/degrade.h"
#include "planner/io/importer.h"
#include "planner/plan/strategy.h"
#include "planner/topology/hardware.h"
#include "planner/topology/topologies.h"
#include "tests/support/small_models.h"

namespace tessera {
namespace {

// Four hosts of one device, joined directly in a row.
Cluster Chain() {
  Cluster cluster = *MakeCluster("dgx-a100-80gb:4x1");
  cluster.links.clear();
  for (size_t d = 0; d + 1 < cluster.devices.size(); ++d) {
    Connect(cluster, cluster.devices[d].vertex, cluster.devices[d + 1].vertex,
            0);
  }
  return cluster;
}

DeviceGroup Pair(int first) {
  DeviceGroup group;
  group.devices = {DeviceId(first), DeviceId(first + 1)};
  group.axes = {{"dp", 2}};
  return group;
}

// A link between two hosts tells them from others: were hosts taken for alike,
// a pair over a slow link would have the price of one over a fast link.
TEST(UnlikeHosts, DirectLinksBetweenThemAreTheirOwn) {
  const Graph graph = testing::MlpGraph(1, 8, 4, 8, 16, 32);
  Cluster cluster = Chain();
  LinkType slow = cluster.link_types[0];
  slow.name = "slow";
  slow.bandwidth = slow.bandwidth * 0.001;
  cluster.link_types.push_back(slow);
  const int type = static_cast<int>(cluster.link_types.size()) - 1;
  for (Link& link : cluster.links) {
    const VertexId last = cluster.devices[3].vertex;
    if (link.from == last || link.to == last) link.type = type;
  }
  const Pricer pricer(graph, cluster, nullptr);
  EXPECT_FALSE(pricer.hosts_are_alike());
  EXPECT_NE(pricer.ClassOf(Pair(0)), pricer.ClassOf(Pair(2)));
  // Joined by switches they are.
  EXPECT_TRUE(Pricer(graph, *MakeCluster("dgx-a100-80gb:4x1"), nullptr)
                  .hosts_are_alike());
}

// Of tensor parallelism over 4 on hosts of 6 the second group crosses hosts,
// and counts: rows of groups within a host say nothing of it.
TEST(UnlikeHosts, MeasuredExchangesAreOfTheGroupOverMostHosts) {
  ImportOptions options;
  options.global_batch = 24;
  options.seq_len = 32;
  options.dtype = DType::kBFloat16;
  const Graph graph =
      Differentiate(ImportModel("zoo:gpt2-tiny", options).value()).value();
  const auto step = [&](const std::string& name, const std::string& strategy,
                        int nodes) {
    const Cluster cluster = *MakeCluster(name);
    ProfileDb profile;
    for (const int64_t bytes : {1, 1 << 30}) {
      profile.rows[CollectiveKey(CommKind::kAllReduce,
                                 cluster.device_types[0].name, 4, nodes,
                                 {bytes})] = {.median_s = 1, .samples = 1};
    }
    const Plan plan =
        PlanFromStrategy(graph, cluster, ParseStrategy(strategy).value())
            .value();
    return Evaluator(graph, cluster, &profile, {})
        .Evaluate(plan)
        .step_time.seconds();
  };
  EXPECT_LT(step("dgx-a100-80gb:2x6", "tp=4,dp=3", 1), 0.5);
  EXPECT_GT(step("dgx-a100-80gb:2x6", "tp=4,dp=3", 2), 1);
  // Where all lie within a host these are the rows.
  EXPECT_GT(step("dgx-a100-80gb:1x4", "tp=4", 1), 1);
}

// A plan on one of two unlike nodes is as fast and needs as much as on that
// node alone, whatever the other's host has; over both the slower host counts,
// and the room of each.
TEST(UnlikeHosts, OffloadByTheirOwnFigures) {
  const Graph graph = testing::MlpGraph(1, 8, 4, 8, 16, 32);
  Cluster both = *MakeCluster("dgx-h100:1x2+dgx1-v100-32gb:1x2");
  ASSERT_EQ(both.hosts.size(), 2u);
  const Cluster first = FirstDevices(both, 2);
  const auto evaluated = [&](const Cluster& planned, const Cluster& on) {
    const Plan plan =
        PlanFromStrategy(graph, planned,
                         *ParseStrategy("mbs=1,zero=1,offload=optimizer:host"))
            .value();
    return Evaluator(graph, on, nullptr, {}).Evaluate(plan);
  };
  const Evaluation alone = evaluated(first, first);
  EXPECT_TRUE(alone.feasible());
  EXPECT_EQ(evaluated(first, both).step_time, alone.step_time);
  const Duration usual = evaluated(both, both).step_time;

  for (const size_t slow : {0, 1}) {
    Cluster slower = both;
    slower.hosts[slow].device_link = {1e6};
    EXPECT_EQ(evaluated(first, slower).step_time > alone.step_time, slow == 0);
    EXPECT_GT(evaluated(both, slower).step_time, usual);
    Cluster small = both;
    small.hosts[slow].memory = {1};
    EXPECT_EQ(evaluated(first, small).feasible(), slow == 1);
    const Evaluation lacks = evaluated(both, small);
    ASSERT_FALSE(lacks.violations.empty());
    EXPECT_THAT(lacks.violations[0],
                ::testing::StartsWith("host of node" + std::to_string(slow) +
                                      ".gpu0:"));
  }
}

// What is left of a cluster is called by the names of the whole.
TEST(UnlikeHosts, AreCalledAsInTheWholeCluster) {
  const Graph graph = testing::MlpGraph(1, 8, 4, 8, 16, 32);
  Cluster cluster = *MakeCluster("dgx-h100:3x2");
  cluster.hosts[0].memory = {1};
  std::vector<std::string> notes;
  ASSERT_TRUE(Fail({"node0"}, cluster, notes));
  const Plan plan =
      PlanFromStrategy(graph, cluster,
                       *ParseStrategy("mbs=1,zero=1,offload=optimizer:host"))
          .value();
  const Evaluation lacks =
      Evaluator(graph, cluster, nullptr, {}).Evaluate(plan);
  ASSERT_FALSE(lacks.violations.empty());
  EXPECT_THAT(lacks.violations[0],
              ::testing::StartsWith("host of node1.gpu0:"));
  // Names may count from 1, or be none.
  Vertex& first = cluster.vertices[cluster.devices[0].vertex.index()];
  for (const auto& [name, text] : {std::pair("a1.gpu0", "host of a1.gpu0:"),
                                   std::pair("", "host of node 0:")}) {
    first.name = name;
    EXPECT_THAT(
        Evaluator(graph, cluster, nullptr, {}).Evaluate(plan).violations[0],
        ::testing::StartsWith(text));
  }
}

// What lies on the host that lacks room is told, not what lies on another's.
TEST(UnlikeHosts, SayWhatLiesOnTheOneThatLacks) {
  const Graph graph = testing::MlpGraph(1, 8, 4, 8, 16, 32);
  const Cluster both = *MakeCluster("dgx-h100:1x2+dgx1-v100-32gb:1x2");
  for (const auto& [tier, room, where] :
       {std::tuple("host", &Host::memory, "on the host"),
        std::tuple("file", &Host::storage, "in files")}) {
    const Plan plan =
        PlanFromStrategy(graph, both,
                         *ParseStrategy(std::string("pp=2,mbs=1,zero=1,") +
                                        "offload=optimizer:" + tier))
            .value();
    for (const size_t lacking : {0, 1}) {
      Cluster cluster = both;
      cluster.hosts[lacking].*room = {1};
      const Evaluation result =
          Evaluator(graph, cluster, nullptr, {}).Explain(plan);
      ASSERT_EQ(result.violations.size(), 2u);
      EXPECT_THAT(result.violations[0],
                  ::testing::StartsWith("host of node" +
                                        std::to_string(lacking) + ".gpu0:"));
      EXPECT_THAT(
          result.violations[1],
          ::testing::StartsWith("group stage" + std::to_string(lacking) +
                                " holds " + where + " at its peak"));
    }
  }
}

// Files need storage on the nodes of those that keep them.
TEST(UnlikeHosts, KeepFilesWhereTheyHaveStorage) {
  const Graph graph = testing::MlpGraph(1, 8, 4, 8, 16, 32);
  Cluster both = *MakeCluster("dgx-h100:1x2+dgx1-v100-32gb:1x2");
  both.hosts[1].storage = {};
  const auto strategy = *ParseStrategy("mbs=1,zero=1,offload=optimizer:file");
  EXPECT_TRUE(PlanFromStrategy(graph, FirstDevices(both, 2), strategy));
  const auto plan = PlanFromStrategy(graph, both, strategy);
  ASSERT_FALSE(plan);
  EXPECT_THAT(plan.error().ToString(),
              ::testing::HasSubstr("has no storage on all nodes of group"));
}

}  // namespace
}  // namespace tessera
