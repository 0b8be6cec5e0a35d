// Recommendation models: every way of splitting and placing their tables trains
// as one rank does.

#include <gtest/gtest.h>

#include "planner/plan/axis_roles.h"
#include "planner/plan/validate.h"
#include "tests/support/tiny_training.h"
#include "tests/support/train_in_memory.h"

namespace tessera {
namespace {

constexpr int64_t kBatch = 8;

Graph TinyDlrm(const std::string& mode = "sum") {
  return ImportTiny(R"({"model_type": "dlrm", "num_dense_features": 5,
                        "bottom_mlp": [12, 8], "top_mlp": [12, 6, 1],
                        "table_rows": [5, 9, 6, 17], "bag_size": 3,
                        "bag_mode": ")" +
                        mode + R"("})",
                    kBatch, 1);
}

Trained Train(const Graph& graph, const Cluster& cluster, const Plan& plan) {
  const TrainInMemoryOptions options;
  const auto problems = Validate(graph, cluster, plan);
  EXPECT_TRUE(problems.empty()) << problems[0].ToString();
  auto trained = TrainInMemory(
      graph, Lower(graph, cluster, plan, options.training), options);
  EXPECT_TRUE(trained.has_value()) << trained.error().ToString();
  return std::move(trained).value();
}

Cluster RanksOf(int count) {
  return MakeCluster("local-cpu:" + std::to_string(count)).value();
}

Plan PlanOf(const Graph& graph, int ranks, const std::string& strategy) {
  const auto plan =
      PlanFromStrategy(graph, RanksOf(ranks), ParseStrategy(strategy).value());
  EXPECT_TRUE(plan.has_value()) << strategy << plan.error().ToString();
  return *plan;
}

Trained Serial(const Graph& graph) {
  return Train(graph, RanksOf(1), PlanOf(graph, 1, "dp=1"));
}

TEST(ClicksEqualSerial, Strategies) {
  for (const char* mode : {"sum", "mean"}) {
    const Graph graph = TinyDlrm(mode);
    const Trained serial = Serial(graph);
    EXPECT_GT(serial.losses.front() - serial.losses.back(), 1e-3);
    for (const auto& [strategy, ranks] :
         {std::pair("dp=2", 2), std::pair("dp=4,zero=1", 4),
          std::pair("dp=4,zero=3", 4), std::pair("tp=2", 2),
          std::pair("tp=4", 4), std::pair("dp=2,tp=2,zero=2", 4),
          std::pair("pp=2,mbs=2", 2), std::pair("pp=2,dp=2,mbs=2", 4),
          std::pair("pp=2,tp=2,mbs=4,recompute=full", 4)}) {
      EXPECT_EQ(Difference(Train(graph, RanksOf(ranks),
                                 PlanOf(graph, ranks, strategy)),
                           serial),
                "")
          << mode << " " << strategy;
    }
  }
}

// The MLPs on shards of the batch, the tables by rows, by columns, or both, on
// the same ranks: what the ranks exchange is the rows that were looked up.
TEST(ClicksEqualSerial, TablesBesideDataParallelism) {
  const Graph graph = TinyDlrm();
  const GraphIndex index(graph);
  const Trained serial = Serial(graph);
  for (const std::string by : {"v", "h", "vh"}) {
    Plan plan = PlanOf(graph, 4, "dp=4");
    int moved = 0;
    for (size_t i = 0; i < plan.ops.size(); ++i) {
      const Node& node = graph.nodes[i];
      if (node.op->name != "embedding_bag") continue;
      auto& axes = plan.ops[i].axes;
      const auto b = static_cast<size_t>(index.SampleFactor(NodeId(i)));
      const AxisSet all = axes[b];
      axes[b] = 0;
      const AxisSet last = all & (~all + 1);
      axes[static_cast<size_t>(node.rule.FactorOf(by[0]))] =
          by.size() == 1 ? all : all & ~last;
      if (by.size() == 2) {
        axes[static_cast<size_t>(node.rule.FactorOf(by[1]))] = last;
      }
      ++moved;
    }
    EXPECT_EQ(moved, 4);
    SetZeroAxes(index, plan);
    EXPECT_EQ(Difference(Train(graph, RanksOf(4), plan), serial), "") << by;
  }
}

// A table on each rank, which looks up the whole batch in it; the MLPs on all.
TEST(ClicksEqualSerial, TablesOnRanksOfTheirOwn) {
  const Graph graph = TinyDlrm("mean");
  const Trained serial = Serial(graph);
  for (const int ranks : {2, 4}) {
    Plan plan = PlanOf(graph, ranks, "dp=" + std::to_string(ranks));
    for (int rank = 0; rank < ranks; ++rank) {
      plan.groups.push_back(
          {"table" + std::to_string(rank), {DeviceId(rank)}, {}});
    }
    int table = 0;
    for (size_t i = 0; i < plan.ops.size(); ++i) {
      if (graph.nodes[i].op->name != "embedding_bag") continue;
      plan.ops[i].axes = {};
      plan.ops[i].group = GroupId(1 + table++ % ranks);
    }
    SetZeroAxes(GraphIndex(graph), plan);
    EXPECT_EQ(Difference(Train(graph, RanksOf(ranks), plan), serial), "")
        << ranks << " ranks";
  }
}

}  // namespace
}  // namespace tessera
