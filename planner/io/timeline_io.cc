#include "planner/io/timeline_io.h"

#include "planner/io/proto_file_io.h"
#include "proto/timeline.pb.h"

namespace tessera {

Result<void> WriteTimeline(const std::string& path, const TaskGraph& tasks,
                           const Graph& graph, const Timeline& timeline) {
  proto::Timeline message;
  message.set_schema_version(kSchemaVersion);
  message.set_step_picoseconds(timeline.step_time.picoseconds);
  for (const DeviceGroup& group : tasks.groups) {
    message.add_groups(group.name);
  }
  for (const Span& span : timeline.spans) {
    proto::Span& out = *message.add_spans();
    out.set_task(span.task.value);
    out.set_name(NameOf(tasks, graph, span.task));
    out.set_group(span.group.value);
    if (span.rank >= 0) out.set_rank(span.rank);
    out.set_stream(static_cast<proto::Stream>(span.stream));
    out.set_axes(span.axes);
    out.set_start_picoseconds(span.start.picoseconds);
    out.set_end_picoseconds(span.end.picoseconds);
  }
  return WriteProtoFile(path, message);
}

Result<Timeline> ReadTimeline(const std::string& path) {
  proto::Timeline message;
  TESSERA_RETURN_IF_ERROR(ReadProtoFile(path, message));
  Timeline timeline;
  timeline.step_time = {message.step_picoseconds()};
  for (int i = 0; i < message.spans_size(); ++i) {
    const proto::Span& in = message.spans(i);
    const auto fail = [&](const std::string& text) {
      return InvalidInput(text, "spans[" + std::to_string(i) + "]").At(path);
    };
    if (in.task() < 0) return fail("task is negative");
    if (in.group() < 0 || in.group() >= message.groups_size()) {
      return fail("group " + std::to_string(in.group()) + " of " +
                  std::to_string(message.groups_size()));
    }
    if (!proto::Stream_IsValid(in.stream())) {
      return fail("unknown stream " + std::to_string(in.stream()));
    }
    if (in.start_picoseconds() < 0 ||
        in.end_picoseconds() < in.start_picoseconds() ||
        in.end_picoseconds() > message.step_picoseconds()) {
      return fail("expected 0 <= start <= end <= step");
    }
    timeline.spans.push_back(
        {TaskId(in.task()), GroupId(in.group()), in.has_rank() ? in.rank() : -1,
         static_cast<StreamRole>(in.stream()), in.axes(),
         Duration{in.start_picoseconds()}, Duration{in.end_picoseconds()}});
  }
  return timeline;
}

}  // namespace tessera
