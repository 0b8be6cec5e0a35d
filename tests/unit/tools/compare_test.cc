#include "tools/compare.h"

#include <gmock/gmock.h>

#include <map>

#include "costmodel/simulate/simulator.h"
#include "planner/base/rng.h"
#include "planner/io/importer.h"
#include "planner/lower/lower.h"
#include "planner/plan/strategy.h"
#include "planner/topology/topologies.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

constexpr int64_t kUs = 1'000'000;  // picoseconds

struct Case {
  explicit Case(std::string_view strategy) {
    ImportOptions options;
    options.global_batch = 8;
    options.seq_len = 16;
    options.dtype = DType::kFloat32;
    graph = Differentiate(
                ImportModel(ExamplePath("models/gpt2-tiny"), options).value())
                .value();
    plan = PlanFromStrategy(graph, cluster, ParseStrategy(strategy).value())
               .value();
    tasks = Lower(graph, cluster, plan, {});
  }

  // Every rank's timeline where the tasks of one key take as long as each
  // other, but for a collective's first rank, which waits `waits` in it.
  std::vector<Timeline> Measured(const Pricer& pricer, Duration waits) {
    Rng rng(7);
    std::map<ProfileKey, Duration> times;
    const std::vector<ProfileKey> keys = ProfileKeysOf(pricer, tasks);
    std::vector<Timeline> ranks(cluster.devices.size());
    for (size_t t = 0; t < tasks.tasks.size(); ++t) {
      const Task& task = tasks.tasks[t];
      const auto [time, is_new] = times.try_emplace(keys[t], Duration{});
      if (is_new) time->second = {(1 + rng.Below(1000)) * kUs};
      const DeviceGroup& group = tasks.group(task.group);
      for (const DeviceId device : group.devices) {
        Timeline& timeline = ranks[device.index()];
        Span span;
        span.task = TaskId(t);
        span.group = task.group;
        span.rank = static_cast<int>(device.value);
        span.axes = task.axes;
        span.start = timeline.step_time;
        span.end = span.start + time->second;
        if (task.kind == TaskKind::kComm && device == group.devices[0]) {
          span.end += waits;
        }
        timeline.step_time = span.end;
        timeline.spans.push_back(span);
      }
    }
    expected = times;
    return ranks;
  }

  const Cluster cluster = MakeCluster("local-cpu:4").value();
  Graph graph;
  Plan plan;
  TaskGraph tasks;
  std::map<ProfileKey, Duration> expected;
};

// What is learned gives every task the time that was measured, and the
// comparison shows just that time, whatever a rank waited for others.
TEST(CompareTest, WhatIsLearnedPredictsWhatWasMeasured) {
  for (const char* strategy : {"dp=4,mbs=2", "dp=2,tp=2,mbs=2,sp=1",
                               "dp=1,tp=2,pp=2,mbs=2", "dp=4,zero=3,mbs=1"}) {
    SCOPED_TRACE(strategy);
    Case test(strategy);
    const Pricer pricer(test.graph, test.cluster, nullptr);
    const auto measured = test.Measured(pricer, Duration{500 * kUs});
    const auto rows = CompareTasks(pricer, test.tasks, test.graph, measured);
    ASSERT_GT(rows.size(), 10u);
    for (const TaskComparison& row : rows) {
      EXPECT_EQ(Duration::FromSeconds(row.measured.median_s),
                test.expected.at(row.key))
          << row.example;
      EXPECT_GT(row.tasks, 0);
    }
    const ProfileDb learned = Learn(pricer, test.tasks, rows, {});
    EXPECT_THAT(Validate(learned), ::testing::IsEmpty());
    // All but copies of shapes that nothing else tells apart.
    EXPECT_GT(learned.rows.size(), rows.size() * 8 / 10);
    const Pricer after(test.graph, test.cluster, &learned);
    const std::vector<TaskCost> costs = PriceTasks(after, test.tasks);
    const std::vector<ProfileKey> keys = ProfileKeysOf(pricer, test.tasks);
    for (size_t t = 0; t < keys.size(); ++t) {
      if (test.tasks.tasks[t].kind == TaskKind::kRecv) continue;
      const Measurement* const row = learned.Find(keys[t]);
      if (row == nullptr) continue;
      EXPECT_EQ(costs[t].duration, Duration::FromSeconds(row->median_s))
          << NameOf(test.tasks, test.graph, TaskId(t));
    }
  }
}

TEST(CompareTest, LargestErrorComesFirst) {
  Case test("dp=4,mbs=2");
  const Pricer pricer(test.graph, test.cluster, nullptr);
  const auto rows = CompareTasks(pricer, test.tasks, test.graph,
                                 test.Measured(pricer, Duration{}));
  for (size_t i = 1; i < rows.size(); ++i) {
    EXPECT_GE(std::abs(rows[i - 1].ErrorSeconds()),
              std::abs(rows[i].ErrorSeconds()));
  }
  // Predicted less measured, times the tasks of a step.
  const TaskComparison& first = rows[0];
  EXPECT_DOUBLE_EQ(
      first.ErrorSeconds(),
      (first.predicted.seconds() - first.measured.median_s) * first.tasks);
  const std::string text = CompareText(rows, 1);
  EXPECT_THAT(text, ::testing::HasSubstr(first.example));
  EXPECT_EQ(std::ranges::count(text, '\n'), 3);
}

}  // namespace
}  // namespace tessera
