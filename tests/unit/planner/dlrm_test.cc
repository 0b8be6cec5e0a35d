// Recommendation models: sizes as published, and what is wrong with a config.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "planner/io/graph_io.h"
#include "planner/io/importer.h"
#include "planner/plan/strategy.h"
#include "planner/plan/validate.h"
#include "planner/topology/topologies.h"
#include "tests/support/temp_path.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

Result<Graph> Import(const std::string& model) {
  ImportOptions options;
  options.global_batch = 4;
  return ImportModel(model, options);
}

std::string ErrorOf(const std::string& keys) {
  const std::string folder = TempPath("folder");
  std::filesystem::create_directories(folder);
  std::ofstream(folder + "/config.json")
      << R"({"model_type": "dlrm", )" << keys << "}";
  const auto graph = Import(folder);
  std::filesystem::remove_all(folder);
  return graph ? "" : graph.error().ToString();
}

// 26 tables of 187,767,399 rows in all (the sum of the sizes that
// facebookresearch/dlrm's inference benchmark lists for 40M rows at most), 128
// wide, are 24,034,227,072. The bottom has 14*512 + 513*256 + 257*128 =
// 171,392 parameters with biases. The top reads 128 + 27*26/2 = 479 numbers:
// 480*1024 + 1025*1024 + 1025*512 + 513*256 + 257 = 2,197,505.
TEST(Dlrm, ParametersAreThoseOfMlperf) {
  const auto graph = Import("zoo:dlrm");
  ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
  EXPECT_EQ(ParameterCount(*graph), 24034227072 + 171392 + 2197505);
  EXPECT_EQ(graph->blocks.size(), 28u);
  // Without biases, three times 2 operations for each: backward does twice the
  // forward's products.
  EXPECT_DOUBLE_EQ(ModelFlops(*graph).value, 6.0 * 4 * (170496 + 2194688));
}

TEST(Dlrm, GraphFilesKeepIt) {
  const Graph graph = Import("zoo:dlrm-tiny").value();
  const std::string path = TempPath("graph.pb");
  ASSERT_TRUE(WriteGraph(path, graph).has_value());
  const auto read = ReadGraph(path);
  std::filesystem::remove(path);
  ASSERT_TRUE(read.has_value()) << read.error().ToString();
  EXPECT_EQ(*read, graph);
}

// Tensor parallelism splits tables by rows, as many ways as they have rows.
TEST(Dlrm, TensorParallelismSplitsTables) {
  const Graph graph = Differentiate(Import("zoo:dlrm-tiny").value()).value();
  const Cluster cluster = MakeCluster("local-cpu:4").value();
  const auto plan =
      PlanFromStrategy(graph, cluster, ParseStrategy("tp=4").value());
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  std::vector<int64_t> ways;
  for (size_t i = 0; i < plan->ops.size(); ++i) {
    const Node& node = graph.nodes[i];
    if (node.op->name != "embedding_bag") continue;
    const auto v = static_cast<size_t>(node.rule.FactorOf('v'));
    ways.push_back(plan->groups[0].Size(plan->ops[i].axes[v]));
  }
  EXPECT_THAT(ways, ::testing::ElementsAre(4, 2, 4, 4, 4, 4));
}

TEST(Dlrm, ErrorsNameTheKey) {
  const std::string mlps = R"("bottom_mlp": [8, 4], "top_mlp": [8, 1])";
  EXPECT_EQ(ErrorOf(mlps + R"(, "table_rows": [5, 6])"), "");
  EXPECT_THAT(ErrorOf(mlps), HasSubstr("table_rows: missing"));
  EXPECT_THAT(ErrorOf(mlps + R"(, "table_rows": [])"),
              HasSubstr("table_rows: is []: expected a list of 1 to 255 whole "
                        "numbers from 1 to 2147483647"));
  EXPECT_THAT(ErrorOf(mlps + R"(, "table_rows": [0.5])"),
              HasSubstr("table_rows: is [0.5]: expected a list"));
  EXPECT_THAT(ErrorOf(mlps + R"(, "table_rows": 5)"),
              HasSubstr("table_rows: is 5: expected a list"));
  EXPECT_THAT(
      ErrorOf(mlps + R"(, "table_rows": [5], "embedding_dim": 8)"),
      HasSubstr("bottom_mlp: ends in 4: expected the embedding_dim, 8"));
  EXPECT_THAT(
      ErrorOf(R"("bottom_mlp": [8, 4], "top_mlp": [8, 2], "table_rows": [5])"),
      HasSubstr("top_mlp: ends in 2: expected 1"));
  EXPECT_THAT(ErrorOf(mlps + R"(, "table_rows": [5], "bag_mode": "max")"),
              HasSubstr("bag_mode: is \"max\": expected \"sum\" or \"mean\""));
}

}  // namespace
}  // namespace tessera
