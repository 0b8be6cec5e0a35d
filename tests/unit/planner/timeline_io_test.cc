#include "planner/io/timeline_io.h"

#include <gtest/gtest.h>

#include "planner/base/file.h"
#include "planner/io/proto_file_io.h"
#include "proto/timeline.pb.h"
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

TEST(TimelineIo, WritesSpansInAllEncodings) {
  const Example e = MakeExample();
  for (const char* ending : {"txtpb", "json", "pb"}) {
    const std::string path = TempPath(std::string("timeline.") + ending);
    ASSERT_TRUE(WriteTimeline(path, e.tasks, e.graph, e.timeline).has_value());
    proto::Timeline message;
    const auto read = ReadProtoFile(path, message);
    ASSERT_TRUE(read.has_value()) << read.error().ToString();
    EXPECT_EQ(message.step_picoseconds(), 12);
    ASSERT_EQ(message.groups_size(), 2);
    EXPECT_EQ(message.groups(1), "stage1");
    ASSERT_EQ(message.spans_size(), 2);
    const proto::Span& compute = message.spans(0);
    EXPECT_EQ(compute.task(), 0);
    EXPECT_EQ(compute.name(), "adamw gradient");
    EXPECT_EQ(compute.group(), 0);
    EXPECT_FALSE(compute.has_rank());
    EXPECT_EQ(compute.stream(), proto::STREAM_COMPUTE);
    EXPECT_EQ(compute.axes(), 0u);
    EXPECT_EQ(compute.start_picoseconds(), 0);
    EXPECT_EQ(compute.end_picoseconds(), 5);
    const proto::Span& reduce = message.spans(1);
    EXPECT_EQ(reduce.task(), 1);
    EXPECT_EQ(reduce.group(), 1);
    EXPECT_EQ(reduce.rank(), 3);
    EXPECT_EQ(reduce.stream(), proto::STREAM_COMMUNICATION);
    EXPECT_EQ(reduce.axes(), 1u);
    EXPECT_EQ(reduce.start_picoseconds(), 5);
    EXPECT_EQ(reduce.end_picoseconds(), 12);
  }
}

// Those of offloading, too.
TEST(TimelineIo, NamesStreams) {
  Example e = MakeExample();
  const std::pair<StreamRole, const char*> rows[] = {
      {StreamRole::kSendForward, "STREAM_SEND_FORWARD"},
      {StreamRole::kRecvBackward, "STREAM_RECEIVE_BACKWARD"},
      {StreamRole::kHost, "STREAM_HOST"},
      {StreamRole::kCopyIn, "STREAM_COPY_IN"},
      {StreamRole::kCopyOut, "STREAM_COPY_OUT"},
      {StreamRole::kFileRead, "STREAM_FILE_READ"},
      {StreamRole::kFileWrite, "STREAM_FILE_WRITE"}};
  for (const auto& [role, name] : rows) {
    e.timeline.spans[0].stream = role;
    const std::string path = TempPath("streams.txtpb");
    ASSERT_TRUE(WriteTimeline(path, e.tasks, e.graph, e.timeline).has_value());
    EXPECT_NE(ReadFile(path)->find(name), std::string::npos) << name;
  }
}

}  // namespace
}  // namespace tessera
