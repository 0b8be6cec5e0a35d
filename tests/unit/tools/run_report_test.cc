#include "tools/run_report.h"

#include <gmock/gmock.h>

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kMs = 1'000'000'000;  // picoseconds

// Two ranks, one kernel each and an all-reduce behind it.
TaskGraph TwoRanks() {
  TaskGraph tasks;
  DeviceGroup group;
  group.name = "all";
  group.devices = {DeviceId(0), DeviceId(1)};
  group.axes = {{"dp", 2}};
  tasks.groups = {group, group};
  tasks.world = GroupId(1);
  Task compute;
  compute.group = GroupId(0);
  Task reduce;
  reduce.kind = TaskKind::kComm;
  reduce.group = GroupId(0);
  reduce.axes = 1;
  tasks.tasks = {compute, reduce};
  return tasks;
}

Timeline RankTimeline(int rank, int64_t compute_ms, int64_t end_ms) {
  Timeline timeline;
  Span span;
  span.group = GroupId(0);
  span.rank = rank;
  span.task = TaskId(0);
  span.end = {compute_ms * kMs};
  timeline.spans.push_back(span);
  span.task = TaskId(1);
  span.start = span.end;
  span.end = {end_ms * kMs};
  timeline.spans.push_back(span);
  timeline.step_time = {end_ms * kMs};
  return timeline;
}

// Rank 0 computes 6 ms and waits 2 of its 3 ms in the all-reduce for rank 1,
// which computes 8 ms and needs 1 ms for it.
TEST(MeasuredBreakdownTest, CountsWaitingForPeersAsIdle) {
  const Breakdown mean = MeasuredBreakdown(
      TwoRanks(), {RankTimeline(0, 6, 9), RankTimeline(1, 8, 9)});
  EXPECT_EQ(mean.compute.picoseconds, 7 * kMs);     // (6 + 8) / 2
  EXPECT_EQ(mean.all_reduce.picoseconds, 1 * kMs);  // the shortest
  EXPECT_EQ(mean.idle.picoseconds, 1 * kMs);        // (2 + 0) / 2
  EXPECT_EQ(mean.total().picoseconds, 9 * kMs);
}

// The step is that of the slowest rank, whatever the others say.
TEST(MeasuredBreakdownTest, AddsUpToTheSlowestRank) {
  const Breakdown mean = MeasuredBreakdown(
      TwoRanks(), {RankTimeline(0, 6, 8), RankTimeline(1, 8, 10)});
  EXPECT_EQ(mean.idle.picoseconds, 1 * kMs);  // rank 0 ends 2 ms early
  EXPECT_EQ(mean.total().picoseconds, 10 * kMs);
}

TEST(PredictedBreakdownTest, IsTheMeanOverGroupsByTheirRanks) {
  TaskGraph tasks = TwoRanks();
  // Stages of one device: the second idles while the first computes.
  tasks.groups[0].devices = {DeviceId(0)};
  tasks.groups[0].axes = {};
  DeviceGroup second = tasks.groups[0];
  second.devices = {DeviceId(1)};
  tasks.groups = {tasks.groups[0], second, tasks.groups[1]};
  tasks.world = GroupId(2);
  tasks.tasks[1] = tasks.tasks[0];
  tasks.tasks[1].group = GroupId(1);
  Timeline timeline;
  for (int g : {0, 1}) {
    Span span;
    span.task = TaskId(g);
    span.group = GroupId(g);
    span.start = {g * 3 * kMs};
    span.end = {(g * 3 + 3) * kMs};
    timeline.spans.push_back(span);
  }
  timeline.step_time = {6 * kMs};
  const Breakdown mean = PredictedBreakdown(tasks, timeline);
  EXPECT_EQ(mean.compute.picoseconds, 3 * kMs);
  EXPECT_EQ(mean.idle.picoseconds, 3 * kMs);
}

TEST(RunReportTest, SaysWhatGraphsHold) {
  TrainingResult result;
  RunReport report;
  report.result = &result;
  EXPECT_THAT(RunText(report), Not(HasSubstr("graphs")));
  result.graphs = {.graphs = 2,
                   .tasks = 300,
                   .captured = 295,
                   .left = {{"collectives", 1}, {"messages", 4}}};
  EXPECT_THAT(RunText(report),
              HasSubstr("\ngraphs 2, of 295 of 300 tasks; not captured: 1 "
                        "collectives, 4 messages\n"));
  EXPECT_THAT(
      RunJson(report).OneLine(),
      HasSubstr(R"("not_captured": {"collectives": 1, "messages": 4})"));
}

TEST(RunReportTest, SaysWhichStepsWereSkipped) {
  TrainingResult result;
  RunReport report;
  report.result = &result;
  EXPECT_THAT(RunJson(report).OneLine(), Not(HasSubstr("loss_scale")));
  result.loss_scales = {65536, 65536, 32768};
  EXPECT_THAT(RunText(report), Not(HasSubstr("skipped")));
  result.skipped_steps = {1};
  EXPECT_THAT(RunText(report),
              HasSubstr("\n1 of 3 steps was skipped, as gradients times the "
                        "loss scale were not finite; the last one was taken at "
                        "a scale of 32768\n"));
  EXPECT_THAT(RunJson(report).OneLine(),
              HasSubstr(R"("loss_scales": [65536, 65536, 32768], )"
                        R"("skipped_steps": [2])"));
}

}  // namespace
}  // namespace tessera
