#include "planner/io/timeline_io.h"

#include "planner/io/proto_file_io.h"
#include "proto/timeline.pb.h"

namespace tessera {
namespace {

proto::Stream ToProto(StreamRole role) {
  switch (role) {
    case StreamRole::kCompute:
      return proto::STREAM_COMPUTE;
    case StreamRole::kComm:
      return proto::STREAM_COMMUNICATION;
    case StreamRole::kSendForward:
      return proto::STREAM_SEND_FORWARD;
    case StreamRole::kSendBackward:
      return proto::STREAM_SEND_BACKWARD;
    case StreamRole::kRecvForward:
      return proto::STREAM_RECEIVE_FORWARD;
    case StreamRole::kRecvBackward:
      return proto::STREAM_RECEIVE_BACKWARD;
    case StreamRole::kHost:
      return proto::STREAM_HOST;
    case StreamRole::kCopyIn:
      return proto::STREAM_COPY_IN;
    case StreamRole::kCopyOut:
      return proto::STREAM_COPY_OUT;
    case StreamRole::kFileRead:
      return proto::STREAM_FILE_READ;
    case StreamRole::kFileWrite:
      return proto::STREAM_FILE_WRITE;
  }
  return proto::STREAM_COMPUTE;
}

}  // namespace

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
    out.set_stream(ToProto(span.stream));
    out.set_axes(span.axes);
    out.set_start_picoseconds(span.start.picoseconds);
    out.set_end_picoseconds(span.end.picoseconds);
  }
  return WriteProtoFile(path, message);
}

}  // namespace tessera
