// Plans that leave devices out.

#include "costmodel/whatif/parts.h"

#include <gtest/gtest.h>

#include <string>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/whatif/degrade.h"
#include "planner/io/importer.h"
#include "planner/plan/validate.h"
#include "planner/search/mcmc.h"
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
  const auto texts = [](const char* cluster, int64_t batch) {
    std::string all;
    for (const ClusterSubset& part :
         LikelyParts(MakeCluster(cluster).value(), batch)) {
      all += Text(part) + " ";
    }
    return all;
  };
  EXPECT_EQ(texts("dgx-h100:1x4", 8), "");
  EXPECT_EQ(texts("dgx-h100:1x4", 6), "1110 ");
  EXPECT_EQ(texts("dgx-h100:1x4", 1), "1000 ");
  EXPECT_EQ(texts("dgx-h100:1x2+titan-rtx-pair:1", 8), "1100 0011 ");
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
      options.more_starts = [&](Duration best, double seconds) {
        PartOptions on_parts;
        on_parts.seconds = seconds;
        const auto plans = PlansOnParts(graph, on, best, on_parts);
        for (const Plan& plan : plans) {
          EXPECT_TRUE(Validate(graph, on, plan).empty());
          const Duration time = evaluator.Evaluate(plan).step_time;
          EXPECT_LT(time, best);
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

// What takes all devices' time on half of them takes twice as long at least.
TEST(PlansOnParts, AreNoneWhereAllDevicesAreBusy) {
  const Graph graph = Gpt2(4096);
  const Cluster cluster = MakeCluster("dgx-h100:1").value();
  const Evaluator evaluator(graph, cluster, nullptr, {});
  const auto score = evaluator.EvaluateUniform(
      GraphIndex(graph), cluster, ParseStrategy("dp=8,mbs=512").value());
  EXPECT_TRUE(PlansOnParts(graph, cluster, score->step_time, {}).empty());
}

}  // namespace
}  // namespace tessera
