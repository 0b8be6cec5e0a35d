#include "costmodel/whatif/degrade.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/whatif/fabric.h"
#include "planner/io/importer.h"
#include "planner/plan/strategy.h"
#include "planner/topology/topologies.h"
#include "tests/support/cluster_edits.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

bool HasVertex(const Cluster& cluster, std::string_view name) {
  return std::ranges::any_of(cluster.vertices,
                             [&](const Vertex& v) { return v.name == name; });
}

TEST(Degrade, ANicGoesAlone) {
  Cluster cluster = *MakeCluster("dgx-a100-80gb:2");
  const size_t links = cluster.links.size();
  std::vector<std::string> notes;
  ASSERT_TRUE(Fail({"node1.nic0"}, cluster, notes));
  EXPECT_FALSE(HasVertex(cluster, "node1.nic0"));
  EXPECT_TRUE(HasVertex(cluster, "node0.nic0"));
  EXPECT_EQ(cluster.devices.size(), 16U);
  // To its PCIe switch and to its leaf, both ways.
  EXPECT_EQ(cluster.links.size(), links - 4);
  EXPECT_TRUE(Validate(cluster).empty());
  EXPECT_THAT(notes, ::testing::ElementsAre(HasSubstr("node1.nic0 failed")));
  EXPECT_EQ(cluster.name, "dgx-a100-80gb:2 without node1.nic0");
}

TEST(Degrade, ANodeThatLosesADeviceIsDrained) {
  for (const char* part : {"node1.gpu3", "device11", "node1"}) {
    Cluster cluster = *MakeCluster("dgx-a100-80gb:3");
    std::vector<std::string> notes;
    ASSERT_TRUE(Fail({part}, cluster, notes)) << part;
    EXPECT_EQ(cluster.num_nodes(), 2) << part;
    EXPECT_EQ(cluster.devices.size(), 16U) << part;
    EXPECT_FALSE(HasVertex(cluster, "node1.nvswitch")) << part;
    EXPECT_FALSE(HasVertex(cluster, "node1.nic0")) << part;
    EXPECT_TRUE(HasVertex(cluster, "node2.gpu0")) << part;
    EXPECT_TRUE(Validate(cluster).empty()) << part;
  }
}

TEST(Degrade, TheOnlyNodeLosesADeviceAlone) {
  Cluster cluster = *MakeCluster("dgx-a100-80gb:1");
  std::vector<std::string> notes;
  ASSERT_TRUE(Fail({"device2"}, cluster, notes));
  EXPECT_EQ(cluster.devices.size(), 7U);
  EXPECT_FALSE(HasVertex(cluster, "node0.gpu2"));
  EXPECT_FALSE(Fail({"node0"}, cluster, notes));
}

TEST(Degrade, ALinkBetweenTwo) {
  Cluster cluster = *MakeCluster("dgx1-v100-32gb:1");
  const size_t links = cluster.links.size();
  std::vector<std::string> notes;
  ASSERT_TRUE(Fail({"node0.gpu0--node0.gpu1"}, cluster, notes));
  EXPECT_EQ(cluster.links.size(), links - 2);
  EXPECT_FALSE(Fail({"node0.gpu0--node0.gpu1"}, cluster, notes));
}

TEST(Degrade, WrongPartsNameTheNearOnes) {
  Cluster cluster = *MakeCluster("dgx-a100-80gb:2");
  std::vector<std::string> notes;
  const auto error = Fail({"node1.nik0"}, cluster, notes);
  ASSERT_FALSE(error);
  EXPECT_THAT(error.error().message, HasSubstr("did you mean 'node1.nic0'?"));
  EXPECT_FALSE(Fail({"device16"}, cluster, notes));
  // Whatever vertices are called, nodes and devices are counted.
  for (Vertex& vertex : cluster.vertices) {
    vertex.name = "v" + std::to_string(&vertex - cluster.vertices.data());
  }
  EXPECT_EQ(
      Fail({"node2"}, cluster, notes).error().message,
      "the cluster has no part 'node2'; parts: node0 to node1; device0 to "
      "device15; vertices by name: v0, v1, v2, v3, v4, v5, …");
  EXPECT_FALSE(Fail({"node2"}, cluster, notes));
  // A switch without which devices are cut off.
  Cluster cpus = *MakeCluster("local-cpu:2");
  EXPECT_THAT(Fail({"node0.memory.in"}, cpus, notes).error().message,
              HasSubstr("do not reach each other"));
  // By the names of the whole cluster.
  Cluster lone = *MakeCluster("g5.48xlarge:3");
  EXPECT_THAT(Fail({"node0", "node2.nic"}, lone, notes).error().message,
              HasSubstr("'node2.gpu0' cannot be reached from 'node1.gpu0'"));
}

// node3 is still node3 when node1 has gone before it.
TEST(Degrade, SeveralPartsByTheNamesOfTheWholeCluster) {
  Cluster cluster = *MakeCluster("dgx-a100-80gb:4");
  std::vector<std::string> notes;
  ASSERT_TRUE(
      Fail({"node1", "node3.gpu2", "device31", "node2.nic0"}, cluster, notes));
  EXPECT_EQ(cluster.num_nodes(), 2);
  EXPECT_TRUE(HasVertex(cluster, "node0.gpu0"));
  EXPECT_TRUE(HasVertex(cluster, "node2.gpu0"));
  EXPECT_FALSE(HasVertex(cluster, "node2.nic0"));
  EXPECT_FALSE(HasVertex(cluster, "node3.nvswitch"));
  EXPECT_THAT(notes.back(), HasSubstr("2 nodes with 16 devices remain"));
  Cluster whole = *MakeCluster("dgx-a100-80gb:2");
  const Cluster before = whole;
  EXPECT_THAT(Fail({"node1", "node1"}, whole, notes).error().message,
              HasSubstr("given twice"));
  EXPECT_THAT(Fail({"node1", "node0"}, whole, notes).error().message,
              HasSubstr("no device"));
  EXPECT_EQ(whole, before);
}

TEST(Degrade, SlowDevicesHaveATypeOfTheirOwn) {
  Cluster cluster = *MakeCluster("dgx-a100-80gb:2");
  ASSERT_TRUE(SlowDown("device9", 2, cluster));
  ASSERT_EQ(cluster.device_types.size(), 2U);
  const DeviceType usual = cluster.device_types[0];
  // But for its slowness the same: a profile's times are of its name.
  DeviceType slow = usual;
  slow.slowness = 2;
  EXPECT_EQ(cluster.TypeOf(DeviceId(9)), slow);
  EXPECT_EQ(cluster.TypeOf(DeviceId(8)), usual);
  ASSERT_TRUE(SlowDown("node0", 1.5, cluster));
  EXPECT_EQ(cluster.TypeOf(DeviceId(0)).slowness, 1.5);
  ASSERT_TRUE(SlowDown("node1", 1.5, cluster));
  EXPECT_EQ(cluster.TypeOf(DeviceId(8)).slowness, 1.5);
  EXPECT_EQ(cluster.TypeOf(DeviceId(9)).slowness, 3);
}

// A NIC at half its rate: its links to the host and to the network.
TEST(Degrade, SlowLinksHaveATypeOfTheirOwn) {
  Cluster cluster = *MakeCluster("dgx-a100-80gb:2");
  const Cluster before = cluster;
  ASSERT_TRUE(SlowDown("node1.nic0", 2, cluster));
  int slower = 0;
  for (size_t l = 0; l < cluster.links.size(); ++l) {
    const Link& link = cluster.links[l];
    const auto bandwidth = [](const Cluster& c, const Link& of) {
      return c.link_types[static_cast<size_t>(of.type)].bandwidth.value;
    };
    const bool at_nic =
        cluster.vertices[link.from.index()].name == "node1.nic0" ||
        cluster.vertices[link.to.index()].name == "node1.nic0";
    EXPECT_DOUBLE_EQ(bandwidth(cluster, link) * (at_nic ? 2 : 1),
                     bandwidth(before, before.links[l]));
    EXPECT_EQ(cluster.link_types[static_cast<size_t>(link.type)].slowness,
              at_nic ? 2 : 1);
    slower += at_nic;
  }
  EXPECT_GE(slower, 4);
  const auto types = cluster.link_types.size();
  ASSERT_TRUE(SlowDown("node0.gpu1--node0.nvswitch", 4, cluster));
  EXPECT_EQ(cluster.link_types.size(), types + 1);
  EXPECT_FALSE(SlowDown("node0.gpu1--node1.nvswitch", 4, cluster));
  EXPECT_FALSE(SlowDown("node7.nic0", 4, cluster));
}

// Nodes on the same switches: what a preset of so many is, up to the order of
// its vertices, so that a step takes as long.
TEST(Degrade, MoreNodesAreThoseOfThePreset) {
  const Cluster two = *MakeCluster("dgx-a100-80gb:2");
  const Cluster preset = *MakeCluster("dgx-a100-80gb:5");
  const auto grown = WithMoreNodes(two, 5);
  ASSERT_TRUE(grown) << grown.error().ToString();
  EXPECT_TRUE(Validate(*grown).empty());
  EXPECT_EQ(grown->vertices.size(), preset.vertices.size());
  EXPECT_EQ(grown->links.size(), preset.links.size());
  EXPECT_TRUE(HasVertex(*grown, "node4.nvswitch"));
  ImportOptions import;
  import.global_batch = 40;
  import.seq_len = 64;
  const Graph graph =
      Differentiate(
          ImportModel(ExamplePath("models/gpt2/config.json"), import).value())
          .value();
  const auto step = [&](const Cluster& cluster) {
    const Strategy strategy = ParseStrategy("tp=4,zero=1").value();
    const Plan plan = PlanFromStrategy(graph, cluster, strategy).value();
    return Evaluator(graph, cluster, nullptr, {}).Explain(plan).step_time;
  };
  EXPECT_EQ(step(*grown), step(preset));
  EXPECT_GT(step(*grown), Duration{});
  EXPECT_EQ(WithMoreNodes(two, 2).value(), two);
  const auto alone = WithMoreNodes(*MakeCluster("local-cpu:2"), 3);
  ASSERT_FALSE(alone);
  EXPECT_THAT(alone.error().ToString(), HasSubstr("joined to nothing"));
}

TEST(Degrade, TheFirstDevicesKeepTheirNodes) {
  const Cluster cluster = *MakeCluster("dgx-a100-80gb:4");
  EXPECT_EQ(FirstDevices(cluster, 16).num_nodes(), 2);
  const Cluster part = FirstDevices(cluster, 12);
  EXPECT_EQ(part.devices.size(), 12U);
  EXPECT_EQ(part.num_nodes(), 2);
  EXPECT_TRUE(Validate(part).empty());
  EXPECT_FALSE(HasVertex(part, "node2.nvswitch"));
}

// Nodes of a GPU each whose own switches hang on the network's, without NICs.
Cluster OnSwitches(int nodes) {
  Cluster cluster = *MakeCluster("dgx-h100:" + std::to_string(nodes) + "x1");
  const VertexId leaf = testing::VertexNamed(cluster, "leaf0");
  const int type = testing::EraseLinksOf(leaf, cluster);
  for (int node = 0; node < nodes; ++node) {
    const std::string own = "node" + std::to_string(node) + ".nvswitch";
    testing::Join(testing::VertexNamed(cluster, own), leaf, type, cluster);
  }
  return cluster;
}

// The switch on which no device is itself is of no node, so that it neither
// fails with one nor has copies. What nodes are on is as if written by hand: 4
// vertices of each and the leaf; to and fro the links of a GPU to its switch
// and bridge, of the bridge to the NIC, and of the switch to the leaf.
TEST(Degrade, NodesWithoutNicsLeaveTheNetwork) {
  const Cluster three = OnSwitches(3);
  ASSERT_TRUE(Validate(three).empty());
  for (const Cluster& four : {OnSwitches(4), *WithMoreNodes(three, 4)}) {
    EXPECT_TRUE(Validate(four).empty());
    EXPECT_EQ(four.vertices.size(), 4U * 4 + 1);
    EXPECT_EQ(four.links.size(), 4U * 8);
  }
  const Cluster two = FirstDevices(three, 2);
  EXPECT_TRUE(Validate(two).empty());
  EXPECT_TRUE(HasVertex(two, "leaf0"));
  EXPECT_FALSE(HasVertex(two, "node2.nvswitch"));
  Cluster cluster = three;
  std::vector<std::string> notes;
  ASSERT_TRUE(Fail({"node0"}, cluster, notes));
  EXPECT_EQ(cluster.num_nodes(), 2);
  EXPECT_TRUE(HasVertex(cluster, "leaf0"));
}

TEST(Fabric, ClassesOfPresets) {
  const auto has = [](const char* name, LinkClass link_class) {
    return ReferenceLink(*MakeCluster(name), link_class).has_value();
  };
  EXPECT_TRUE(has("dgx-a100-80gb:2", LinkClass::kIntra));
  EXPECT_TRUE(has("dgx-a100-80gb:2", LinkClass::kPcie));
  EXPECT_TRUE(has("dgx-a100-80gb:2", LinkClass::kInter));
  EXPECT_FALSE(has("dgx-a100-80gb:1", LinkClass::kInter));
  // No NVLink: PCIe joins the devices.
  EXPECT_TRUE(has("g5.48xlarge:2", LinkClass::kIntra));
  EXPECT_FALSE(has("g5.48xlarge:2", LinkClass::kPcie));
  EXPECT_EQ(
      ReferenceLink(*MakeCluster("dgx-a100-80gb:2"), LinkClass::kIntra)->name,
      "nvlink3");
  // The NIC stands for the network, not the trunk that carries many.
  EXPECT_EQ(
      ReferenceLink(*MakeCluster("dgx-a100-80gb:2"), LinkClass::kInter)->name,
      "ib-hdr");
}

TEST(Fabric, TrunksScaleWithNics) {
  Cluster cluster = *MakeCluster("dgx-a100-80gb:2");
  const Cluster before = cluster;
  ASSERT_TRUE(ScaleLinks(LinkClass::kInter, 3, 0.5, cluster));
  const std::vector<LinkClass> classes = ClassesOfLinks(before);
  for (size_t l = 0; l < classes.size(); ++l) {
    const bool inter = classes[l] == LinkClass::kInter;
    const LinkType& was =
        before.link_types[static_cast<size_t>(before.links[l].type)];
    const LinkType& is =
        cluster.link_types[static_cast<size_t>(cluster.links[l].type)];
    EXPECT_DOUBLE_EQ(is.bandwidth.value, was.bandwidth.value * (inter ? 3 : 1));
    EXPECT_NEAR(is.latency.seconds(), was.latency.seconds() * (inter ? 0.5 : 1),
                1e-12);
  }
  Cluster one = *MakeCluster("dgx-a100-80gb:1");
  EXPECT_FALSE(ScaleLinks(LinkClass::kInter, 3, 1, one));
}

}  // namespace
}  // namespace tessera
