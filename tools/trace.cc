#include "tools/trace.h"

#include <map>
#include <tuple>
#include <vector>

#include "tools/json.h"

namespace tessera {
namespace {

// A row of the trace. Processes are devices, or groups where ranks are folded.
struct Stream {
  int process = 0;
  GroupId group;
  StreamRole role = StreamRole::kCompute;
  AxisSet axes = 0;
  // Streams of a device in order of their roles.
  auto operator<=>(const Stream& other) const {
    return std::tie(process, role, group, axes) <=>
           std::tie(other.process, other.role, other.group, other.axes);
  }
  bool operator==(const Stream&) const = default;
};

std::string NameOfStream(const Stream& stream, const DeviceGroup& group) {
  switch (stream.role) {
    case StreamRole::kCompute:
      return "compute";
    case StreamRole::kSendForward:
      return "send forward";
    case StreamRole::kSendBackward:
      return "send backward";
    case StreamRole::kRecvForward:
      return "receive forward";
    case StreamRole::kRecvBackward:
      return "receive backward";
    case StreamRole::kHost:
      return "host";
    case StreamRole::kCopyIn:
      return "copy in";
    case StreamRole::kCopyOut:
      return "copy out";
    case StreamRole::kFileRead:
      return "file read";
    case StreamRole::kFileWrite:
      return "file write";
    case StreamRole::kComm:
      break;
  }
  std::string name = "comm " + group.name + " over";
  for (size_t axis = 0; axis < group.axes.size(); ++axis) {
    if (stream.axes >> axis & 1) name += " " + group.axes[axis].name;
  }
  return name;
}

std::string Category(const Task& task) {
  switch (task.kind) {
    case TaskKind::kComm:
      return std::string(NameOf(task.comm));
    case TaskKind::kSend:
    case TaskKind::kRecv:
      return "send_recv";
    case TaskKind::kCopy:
      return "copy";
    default:
      break;
  }
  if (task.optimizer) return "optimizer";
  return task.pass == Pass::kForward ? "forward" : "backward";
}

// "stage1: devices 8-15" or "stage1: devices 0, 4, 8".
std::string NameOfGroup(const DeviceGroup& group) {
  const auto& devices = group.devices;
  std::string name = group.name + ": devices ";
  const int64_t first = devices.front().value;
  const int64_t last = devices.back().value;
  if (last - first + 1 == static_cast<int64_t>(devices.size())) {
    name += std::to_string(first);
    if (last != first) name += "-" + std::to_string(last);
    return name;
  }
  for (size_t i = 0; i < devices.size(); ++i) {
    name += (i == 0 ? "" : ", ") + std::to_string(devices[i].value);
  }
  return name;
}

double Microseconds(Duration time) {
  return static_cast<double>(time.picoseconds) * 1e-6;
}

}  // namespace

std::string ChromeTrace(const TaskGraph& tasks, const Graph& graph,
                        const Cluster& cluster, const Timeline& timeline,
                        size_t most_events) {
  size_t events = 0;
  for (const Span& span : timeline.spans) {
    events += span.rank >= 0 ? 1 : tasks.group(span.group).devices.size();
  }
  const bool fold = events > most_events;

  std::vector<std::string> lines;
  std::map<Stream, int> threads;
  std::map<int, std::string> processes;
  const auto add = [&](const Span& span, int process, const std::string& name) {
    const Task& task = tasks.task(span.task);
    const Stream stream = {process, span.group, span.stream, span.axes};
    const auto [thread, is_new] =
        threads.try_emplace(stream, static_cast<int>(threads.size()));
    processes.try_emplace(process, name);
    Json args = Json::Object({{"task", span.task.value}});
    if (task.microbatch >= 0) args.Set("microbatch", task.microbatch);
    lines.push_back(Json::Object({{"name", NameOf(tasks, graph, span.task)},
                                  {"cat", Category(task)},
                                  {"ph", "X"},
                                  {"pid", process},
                                  {"tid", thread->second},
                                  {"ts", Microseconds(span.start)},
                                  {"dur", Microseconds(span.end - span.start)},
                                  {"args", std::move(args)}})
                        .OneLine());
  };
  for (const Span& span : timeline.spans) {
    const DeviceGroup& group = tasks.group(span.group);
    if (fold && span.rank < 0) {
      add(span, span.group.value, NameOfGroup(group));
      continue;
    }
    for (const DeviceId device : group.devices) {
      if (span.rank >= 0 && span.rank != device.value) continue;
      const VertexId vertex = cluster.devices[device.index()].vertex;
      add(span, device.value,
          "device " + std::to_string(device.value) + ": " +
              cluster.vertices[vertex.index()].name);
    }
  }

  const auto describe = [&](const char* what, int process, int thread,
                            Json::Field argument) {
    lines.push_back(
        Json::Object({{"name", what},
                      {"ph", "M"},
                      {"pid", process},
                      {"tid", thread},
                      {"args", Json::Object({std::move(argument)})}})
            .OneLine());
  };
  for (const auto& [process, name] : processes) {
    describe("process_name", process, 0, {"name", name});
    describe("process_sort_index", process, 0, {"sort_index", process});
  }
  int order = 0;
  for (const auto& [stream, thread] : threads) {
    describe("thread_name", stream.process, thread,
             {"name", NameOfStream(stream, tasks.group(stream.group))});
    describe("thread_sort_index", stream.process, thread,
             {"sort_index", order++});
  }

  std::string out = "{\"displayTimeUnit\": \"ms\",\n\"traceEvents\": [\n";
  for (size_t i = 0; i < lines.size(); ++i) {
    out += lines[i] + (i + 1 < lines.size() ? ",\n" : "\n");
  }
  return out + "]}\n";
}

}  // namespace tessera
