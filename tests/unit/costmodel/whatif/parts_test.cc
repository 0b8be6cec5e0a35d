// Plans that leave devices out.

#include "costmodel/whatif/parts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/whatif/degrade.h"
#include "planner/io/importer.h"
#include "planner/plan/stages.h"
#include "planner/plan/strategy.h"
#include "planner/plan/validate.h"
#include "planner/search/mcmc.h"
#include "planner/search/uniform_strategies.h"
#include "planner/topology/topologies.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

Graph Gpt2(int64_t batch) {
  ImportOptions options;
  options.global_batch = batch;
  options.seq_len = 64;
  options.dtype = DType::kFloat32;
  return Differentiate(
             ImportModel(ExamplePath("models/gpt2-tiny/config.json"), options)
                 .value())
      .value();
}

std::string Text(const ClusterSubset& part) {
  std::string text;
  for (const bool in : part) text += in ? '1' : '0';
  return text;
}

TEST(LikelyParts, AreDevicesOfATypeAndWhatDividesTheBatch) {
  const auto texts = [](const char* cluster, int64_t batch,
                        const std::vector<int>& degrees = {}) {
    std::string all;
    for (const ClusterSubset& part : LikelyParts(
             MakeCluster(cluster).value(), batch, DType::kFloat32, degrees)) {
      all += Text(part) + " ";
    }
    return all;
  };
  EXPECT_EQ(texts("dgx-h100:1x4", 8), "");
  EXPECT_EQ(texts("dgx-h100:1x4", 6), "1110 ");
  EXPECT_EQ(texts("dgx-h100:1x4", 1), "1000 ");
  // Pairs may share a sample: two pairs of six devices.
  EXPECT_EQ(texts("dgx-h100:1x6", 2), "110000 111100 ");
  // Of eight devices six are a multiple of three, and five one of five.
  EXPECT_EQ(texts("dgx-h100:1", 8, {2, 3, 5}), "11111100 11111000 ");
  EXPECT_EQ(texts("dgx-h100:1", 8, {3, 7}), "11111100 11111110 ");
  EXPECT_EQ(texts("dgx-h100:2x8", 16, {3, 4}),
            "1111111111110000 1111111111111110 ");
  EXPECT_EQ(texts("dgx-h100:1x2+titan-rtx-pair:1", 8), "1100 0011 ");
  EXPECT_EQ(texts("titan-rtx-pair:1+dgx-h100:1x2", 6), "1100 0011 1011 ");
  EXPECT_EQ(texts("dgx-h100:1x1+titan-rtx-pair:1x1+k80-fdr:1x1", 6),
            "100 010 001 011 101 110 ");
}

TEST(EverSmallerParts, AreHostsAndThenDevicesOfOne) {
  const auto texts = [](const Cluster& cluster) {
    std::string all;
    for (const ClusterSubset& part :
         EverSmallerParts(cluster, DType::kFloat32)) {
      all += Text(part) + " ";
    }
    return all;
  };
  EXPECT_EQ(texts(MakeCluster("dgx-h100:1x8").value()),
            "11110000 11000000 10000000 ");
  EXPECT_EQ(texts(MakeCluster("dgx-h100:5x3").value()),
            "111111000000000 111000000000000 100000000000000 ");
  EXPECT_EQ(texts(MakeCluster("dgx-h100:1x1").value()), "");
  // The fastest, wherever they are.
  EXPECT_EQ(texts(MakeCluster("k80-fdr:1+dgx-h100:1x2").value()),
            "000011 000010 ");
  EXPECT_EQ(texts(MakeCluster("k80-fdr:2+dgx-h100:2x1").value()),
            "0000000011 0000000010 ");
  // Hosts of two, two and one.
  EXPECT_EQ(texts(FirstDevices(MakeCluster("dgx-h100:3x2").value(), 5)),
            "11000 10000 ");
}

// Best with and without plans on parts; and, by itself, of the first devices.
struct Found {
  Evaluation all;
  Evaluation with_parts;
  Evaluation part;
};

Found Search(const Graph& graph, const Cluster& cluster, size_t first) {
  const auto search = [&](const Cluster& on, bool parts) {
    const SearchSpace space(graph, on);
    const Evaluator evaluator(graph, on, nullptr, {});
    SearchOptions options;
    options.proposals = 0;
    options.time_limit = 0;
    options.threads = 1;
    if (parts) {
      options.more_starts = [&](std::optional<Duration> best, double seconds) {
        const auto plans = PlansOnParts(graph, on, best, seconds, {});
        for (const Plan& plan : plans) {
          EXPECT_TRUE(Validate(graph, on, plan).empty());
          const Duration time = evaluator.Evaluate(plan).step_time;
          EXPECT_TRUE(!best || time < *best);
          best = time;
        }
        return plans;
      };
    }
    return tessera::Search(space, evaluator, options).value().evaluation;
  };
  return {search(cluster, false), search(cluster, true),
          search(FirstDevices(cluster, first), false)};
}

// Of a network that takes longer than the work, one host is best; the plan
// costs as much on its devices among others as alone.
TEST(PlansOnParts, AreAsFastAsOnThePartAlone) {
  const struct {
    const char* cluster;
    int64_t batch;
    size_t first;
  } kCases[] = {{"dgx-h100:1x2+titan-rtx-pair:1", 8, 2},
                {"dgx-h100:1x8", 7, 7},
                {"k80-fdr:4", 16, 4}};
  int improved = 0;
  for (const auto& [name, batch, first] : kCases) {
    const Found found = Search(Gpt2(batch), MakeCluster(name).value(), first);
    EXPECT_LE(found.with_parts.step_time, found.all.step_time) << name;
    EXPECT_LE(found.with_parts.step_time, found.part.step_time) << name;
    improved += found.with_parts.step_time < found.all.step_time ? 1 : 0;
  }
  EXPECT_GE(improved, 2);
}

// A pair's devices hold the model with the optimizer's state on their host
// alone, and to reach the other pair takes far longer than to move it.
TEST(PlansOnParts, MayOffload) {
  const Graph graph = Gpt2(16);
  Cluster cluster = MakeCluster("titan-rtx-pair:2").value();
  cluster.device_types[0].memory = Bytes{6'000'000};
  const SearchSpace space(graph, cluster);
  const Evaluator evaluator(graph, cluster, nullptr, {});
  for (const Strategy& strategy :
       UniformStrategies({graph, FirstDevices(cluster, 2)})) {
    const auto score = evaluator.EvaluateUniform(
        space.index, FirstDevices(cluster, 2), strategy);
    EXPECT_FALSE(score && score->feasible) << ToString(strategy);
  }
  const auto plans =
      PlansOnParts(graph, cluster, Duration::FromSeconds(10), 0, {});
  EXPECT_TRUE(std::ranges::any_of(plans, [](const Plan& plan) {
    return Offloads(plan) && World(plan).devices.size() == 2;
  }));
}

// The same where no plan of all fits, as the host of one pair has no room.
TEST(PlansOnParts, FitWhereNothingElseDoes) {
  const Graph graph = Gpt2(16);
  Cluster cluster = MakeCluster("dgx-h100:1x2+titan-rtx-pair:1").value();
  for (DeviceType& type : cluster.device_types) type.memory = {6'000'000};
  ASSERT_EQ(cluster.hosts.size(), 2u);
  cluster.hosts[1].memory = {1'000};
  cluster.hosts[1].storage = {};
  const auto plans = PlansOnParts(graph, cluster, std::nullopt, 0, {});
  ASSERT_FALSE(plans.empty());
  for (const Plan& plan : plans) {
    EXPECT_TRUE(Offloads(plan));
    EXPECT_TRUE(Validate(graph, cluster, plan).empty());
    for (DeviceId device : World(plan).devices) {
      EXPECT_EQ(cluster.devices[device.index()].node, 0);
    }
  }
  const SearchSpace space(graph, cluster);
  const Evaluator evaluator(graph, cluster, nullptr, {});
  SearchOptions options;
  options.proposals = 0;
  options.time_limit = 0;
  EXPECT_FALSE(
      tessera::Search(space, evaluator, options)->evaluation.feasible());
  options.more_starts = StartsOnParts(graph, cluster, {});
  EXPECT_TRUE(
      tessera::Search(space, evaluator, options)->evaluation.feasible());
}

// A batch that the fast devices do not divide is shared among them as far as
// it goes.
TEST(PlansOnParts, AreDataParallelWhereThePartDoesNotDivideTheBatch) {
  const Graph graph = Gpt2(101);
  const Cluster cluster =
      MakeCluster("titan-rtx-pair:1x1+dgx-h100:1x3").value();
  const Evaluator evaluator(graph, cluster, nullptr, {});
  const auto slow = evaluator.EvaluateUniform(
      GraphIndex(graph), cluster, ParseStrategy("pp=4,mbs=1").value());
  const auto plans = PlansOnParts(graph, cluster, slow->step_time, 0, {});
  EXPECT_TRUE(std::ranges::any_of(plans, [](const Plan& plan) {
    return plan.groups.size() == 1 && World(plan).devices.size() == 3;
  }));
}

// A batch of 4 on 8 devices: half of them are what divides the batch, and half
// of that is looked at as well. Of so small a model one device is best.
TEST(PlansOnParts, GoOnBehindAHalfThatDividesTheBatch) {
  const Graph graph = Gpt2(4);
  const Cluster cluster = MakeCluster("titan-rtx-pair:4").value();
  const Evaluator evaluator(graph, cluster, nullptr, {});
  const auto score = evaluator.EvaluateUniform(
      GraphIndex(graph), cluster, ParseStrategy("tp=4,dp=2,mbs=2").value());
  const auto plans = PlansOnParts(graph, cluster, score->step_time, 0, {});
  size_t fewest = 8;
  for (const Plan& plan : plans) {
    fewest = std::min(fewest, World(plan).devices.size());
  }
  EXPECT_LT(fewest, 4u);
}

// On eight devices and on four a step takes as long, and on a pair two thirds
// of that.
TEST(PlansOnParts, GoOnBehindAPartThatIsNoBetter) {
  ImportOptions options;
  options.global_batch = 16;
  options.seq_len = 256;
  options.dtype = DType::kFloat16;
  const Graph graph =
      Differentiate(
          ImportModel(ExamplePath("models/gpt2/config.json"), options).value())
          .value();
  const Found found = Search(graph, MakeCluster("titan-rtx-pair:4").value(), 2);
  EXPECT_LT(found.with_parts.step_time.seconds(),
            0.7 * found.all.step_time.seconds());
  EXPECT_LE(found.with_parts.step_time, found.part.step_time);
}

// Two devices that reach each other only by one of another type.
TEST(PlansOnParts, PassOverDevicesThatDoNotReachEachOther) {
  const Cluster cluster = MakeCluster("pcie-a100:1x4").value();
  Cluster chain = cluster;
  chain.device_types.push_back(cluster.device_types[0]);
  chain.device_types[1].name = "other";
  chain.vertices.clear();
  chain.devices.clear();
  chain.links.clear();
  for (int number = 0; number < 3; ++number) {
    const VertexId vertex = cluster.devices[static_cast<size_t>(number)].vertex;
    chain.vertices.push_back(cluster.vertices[vertex.index()]);
    chain.devices.push_back({number == 1 ? 1 : 0, VertexId(number), 0});
  }
  for (const auto& [from, to] :
       {std::pair(0, 1), std::pair(1, 0), std::pair(1, 2), std::pair(2, 1)}) {
    chain.links.push_back({VertexId(from), VertexId(to), 0});
  }
  ASSERT_TRUE(Validate(chain).empty()) << Validate(chain)[0].ToString();
  const Graph graph = Gpt2(6);
  for (const Plan& plan :
       PlansOnParts(graph, chain, Duration::FromSeconds(1), 0, {})) {
    EXPECT_TRUE(Validate(graph, chain, plan).empty());
  }
}

// On each part the best of the plans that the whole's constraints allow; on a
// single device nothing can be split in two.
TEST(PlansOnParts, KeepToConstraints) {
  const Graph graph = Gpt2(7);
  const Cluster cluster = MakeCluster("dgx-h100:1x8").value();
  const SearchSpace space(graph, cluster);
  PartOptions options;
  options.constraints =
      Constraints::Make(space.index, cluster, {.fix = {{"h.*.attn=tp:2"}}})
          .value();
  const auto broken_of = [&](const PartOptions& by) {
    int broken = 0;
    const auto plans =
        PlansOnParts(graph, cluster, Duration::FromSeconds(1), 0, by);
    EXPECT_FALSE(plans.empty());
    for (const Plan& plan : plans) {
      broken += options.constraints.Violations(space.index, cluster, plan);
    }
    return broken;
  };
  EXPECT_EQ(broken_of(options), 0);
  EXPECT_GT(broken_of({}), 0);
}

// Three ways divide no eight devices, nor any fewer that the batch asks for,
// but six of them. A stage of ZeRO is no number of ways.
TEST(PlansOnParts, HaveAsManyDevicesAsFixedWaysDivide) {
  const Graph graph = Gpt2(8);
  const Cluster cluster = MakeCluster("dgx-h100:1x8").value();
  const SearchSpace space(graph, cluster);
  PartOptions options;
  options.constraints =
      Constraints::Make(space.index, cluster,
                        {.fix = {{"h.*.attn=tp:3"}, {"*=zero:2"}}})
          .value();
  EXPECT_EQ(options.constraints.FixedDegrees(), std::vector<int>{3});
  const auto plans = PlansOnParts(graph, cluster, std::nullopt, 0, options);
  ASSERT_FALSE(plans.empty());
  EXPECT_EQ(options.constraints.Violations(space.index, cluster, plans[0]), 0);
  size_t devices = 0;
  for (const DeviceGroup& group : plans[0].groups) {
    devices += group.devices.size();
  }
  EXPECT_EQ(devices, 6u);
}

// What takes all devices' time on half of them takes twice as long at least.
TEST(PlansOnParts, AreNoneWhereAllDevicesAreBusy) {
  const Graph graph = Gpt2(4096);
  const Cluster cluster = MakeCluster("dgx-h100:1").value();
  const Evaluator evaluator(graph, cluster, nullptr, {});
  const auto score = evaluator.EvaluateUniform(
      GraphIndex(graph), cluster, ParseStrategy("dp=8,mbs=512").value());
  EXPECT_TRUE(PlansOnParts(graph, cluster, score->step_time, 0, {}).empty());
}

}  // namespace
}  // namespace tessera
