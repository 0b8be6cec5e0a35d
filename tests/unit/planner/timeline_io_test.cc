#include "planner/io/timeline_io.h"

#include <gtest/gtest.h>

#include "planner/io/file.h"
#include "tests/support/temp_path.h"

namespace tessera {
namespace {

// Two groups; one task on each, a communication with axes, a measured span.
struct Example {
  Graph graph;
  TaskGraph tasks;
  Timeline timeline;
};

Example MakeExample() {
  Example e;
  for (int g = 0; g < 2; ++g) {
    DeviceGroup group;
    group.name = "stage" + std::to_string(g);
    group.devices = {DeviceId(2 * g), DeviceId(2 * g + 1)};
    group.axes = {{"dp0", 2}};
    e.tasks.groups.push_back(group);
  }
  Value value;
  value.what = "gradient";
  value.group = GroupId(0);
  e.tasks.values.push_back(value);
  Task compute;
  compute.kernel = "adamw";
  compute.group = GroupId(0);
  compute.writes = {ValueId(0)};
  e.tasks.tasks.push_back(compute);
  Task reduce;
  reduce.kind = TaskKind::kComm;
  reduce.stream = StreamRole::kComm;
  reduce.group = GroupId(1);
  reduce.axes = 1;
  reduce.reads = {ValueId(0)};
  e.tasks.tasks.push_back(reduce);
  e.timeline.spans = {
      {TaskId(0), GroupId(0), -1, StreamRole::kCompute, 0, {0}, {5}},
      {TaskId(1), GroupId(1), 3, StreamRole::kComm, 1, {5}, {12}}};
  e.timeline.step_time = {12};
  return e;
}

TEST(TimelineIo, RoundTripsInAllEncodings) {
  const Example e = MakeExample();
  for (const char* ending : {"txtpb", "json", "pb"}) {
    const std::string path = TempPath(std::string("timeline.") + ending);
    ASSERT_TRUE(WriteTimeline(path, e.tasks, e.graph, e.timeline).has_value());
    const auto read = ReadTimeline(path);
    ASSERT_TRUE(read.has_value()) << read.error().ToString();
    EXPECT_EQ(read->spans, e.timeline.spans);
    EXPECT_EQ(read->step_time, e.timeline.step_time);
  }
}

TEST(TimelineIo, NamesTasksForPeople) {
  const Example e = MakeExample();
  const std::string path = TempPath("named.txtpb");
  ASSERT_TRUE(WriteTimeline(path, e.tasks, e.graph, e.timeline).has_value());
  const std::string text = *ReadFile(path);
  EXPECT_NE(text.find("adamw gradient"), std::string::npos);
  EXPECT_NE(text.find("stage1"), std::string::npos);
}

TEST(TimelineIo, RefusesSpansThatCannotBe) {
  const auto error_of = [](const std::string& span) {
    const std::string path = TempPath("bad.txtpb");
    EXPECT_TRUE(WriteFileAtomically(path,
                                    "schema_version: 1\n"
                                    "step_picoseconds: 10\n"
                                    "groups: \"all\"\n"
                                    "spans { " +
                                        span + " }\n")
                    .has_value());
    const auto read = ReadTimeline(path);
    return read.has_value() ? "read" : read.error().ToString();
  };
  EXPECT_NE(error_of("group: 1").find("spans[0]: group 1 of 1"),
            std::string::npos);
  EXPECT_NE(error_of("end_picoseconds: 11").find("expected 0 <= start"),
            std::string::npos);
  EXPECT_NE(error_of("stream: 9").find("stream"), std::string::npos);
}

}  // namespace
}  // namespace tessera
