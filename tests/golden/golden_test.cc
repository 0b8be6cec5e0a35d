// Whole outputs, compared with files under tests/testdata/golden. To accept a
// change, run this test with TESSERA_UPDATE_GOLDEN=1 and review the diff.

#include <gtest/gtest.h>

#include <cstdlib>

#include "planner/base/file.h"
#include "planner/io/cluster_io.h"
#include "planner/io/importer.h"
#include "planner/lower/lower.h"
#include "planner/plan/describe.h"
#include "planner/plan/strategy.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

void ExpectGolden(const std::string& name, const std::string& text) {
  const std::string path = TestdataPath(std::string("golden/") + name + ".txt");
  if (std::getenv("TESSERA_UPDATE_GOLDEN") != nullptr) {
    ASSERT_TRUE(WriteFileAtomically(path, text).has_value()) << path;
    return;
  }
  const auto expected = ReadFile(path);
  ASSERT_TRUE(expected.has_value()) << expected.error().ToString();
  EXPECT_EQ(text, *expected);
}

struct Case {
  Graph graph;
  Cluster cluster;
  Plan plan;
};

Case Load(const std::string& model, const std::string& cluster,
          const std::string& strategy, int64_t batch, int64_t seq_len,
          DType dtype) {
  ImportOptions options;
  options.global_batch = batch;
  options.seq_len = seq_len;
  options.dtype = dtype;
  auto forward =
      ImportModel(ExamplePath(std::string("models/") + model), options);
  EXPECT_TRUE(forward.has_value()) << forward.error().ToString();
  Case c{*Differentiate(*forward), *LoadCluster(cluster), {}};
  const auto parsed = ParseStrategy(strategy);
  EXPECT_TRUE(parsed.has_value()) << parsed.error().ToString();
  auto plan = PlanFromStrategy(c.graph, c.cluster, *parsed);
  EXPECT_TRUE(plan.has_value()) << plan.error().ToString();
  c.plan = *plan;
  return c;
}

TEST(Golden, PlansInWords) {
  std::string text;
  const auto add = [&](const std::string& model, const std::string& cluster,
                       const std::string& strategy) {
    const Case c = Load(model, cluster, strategy, 512, 1024, DType::kBFloat16);
    text += "# " + model + " on " + cluster + ": " + strategy + "\n" +
            Describe(c.graph, c.cluster, c.plan) + "\n";
  };
  add("gpt2-xl", "dgx-a100-80gb:4", "");
  add("gpt2-xl", "dgx-a100-80gb:4", "tp=8,pp=2,mbs=4,zero=1,sp=1");
  add("llama-3-70b", "dgx-h100:8", "tp=8,pp=8,mbs=2,schedule=gpipe");
  add("llama-3-8b", "dgx-h100:2", "cp=2,zero=3,mbs=1");
  ExpectGolden("plans_in_words", text);
}

// Every task of a step, in issue order: what a plan becomes.
std::string TaskText(const Case& c) {
  const TaskGraph tasks = Lower(c.graph, c.cluster, c.plan, TrainingOptions());
  std::string text;
  for (size_t i = 0; i < tasks.tasks.size(); ++i) {
    const Task& task = tasks.tasks[i];
    text +=
        tasks.group(task.group).name + ": " + NameOf(tasks, c.graph, TaskId(i));
    if (task.accumulate) text += " +=";
    for (ValueId id : task.writes) {
      const Value& value = tasks.value(id);
      text += " " + ToString(value.layout, tasks.group(value.group),
                             value.shape.size());
    }
    text += "\n";
  }
  return text;
}

TEST(Golden, TasksOfAStep) {
  ExpectGolden(
      "tasks_tp2_pp2_zero1",
      TaskText(Load("gpt2-tiny", "local-cpu:8", "tp=2,pp=2,dp=2,mbs=4,zero=1",
                    8, 64, DType::kFloat32)));
}

}  // namespace
}  // namespace tessera
