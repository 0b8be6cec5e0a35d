#include "planner/lower/timeline.h"

#include <algorithm>
#include <array>
#include <map>

#include "planner/plan/stages.h"

namespace tessera {
namespace {

// What a span is to the ranks that it runs on; of overlapping spans the lowest
// counts.
enum Activity : uint8_t {
  kComputing,
  kOptimizing,
  kCommunicating,  // plus CommKind
  kCopying = kCommunicating + kCommKinds,
};
constexpr int kActivities = kCopying + 1;

int ActivityOf(const Task& task) {
  switch (task.kind) {
    case TaskKind::kLoad:
    case TaskKind::kCompute:
    case TaskKind::kSlice:
      return task.optimizer ? kOptimizing : kComputing;
    case TaskKind::kCopy:
      return kCopying;
    case TaskKind::kComm:
      return kCommunicating + static_cast<int>(task.comm);
    case TaskKind::kSend:
    case TaskKind::kRecv:
      break;
  }
  return kCommunicating + static_cast<int>(CommKind::kSendRecv);
}

}  // namespace

Breakdown BreakdownOf(const TaskGraph& tasks, const Timeline& timeline) {
  // A place is a rank of a measured timeline or a device set of a simulated
  // one. In the latter every set takes part in the world's tasks.
  const std::vector<DeviceSet> sets = DeviceSets(tasks.plan_groups());
  const auto is_world = [&](const Span& span) {
    return span.rank < 0 && span.group == tasks.world;
  };
  const auto is_at = [&](const Span& span, int place) {
    return span.rank >= 0 ? span.rank == place
                          : Holds(sets[static_cast<size_t>(place)], span.group);
  };
  std::map<int, Duration> computing;
  for (const Span& span : timeline.spans) {
    if (is_world(span)) continue;
    const bool computes = ActivityOf(tasks.task(span.task)) < kCommunicating;
    const Duration time = computes ? span.end - span.start : Duration();
    if (span.rank >= 0) {
      computing[span.rank] += time;
      continue;
    }
    for (int place = 0; place < static_cast<int>(sets.size()); ++place) {
      if (is_at(span, place)) computing[place] += time;
    }
  }
  Breakdown breakdown;
  if (computing.empty()) {
    breakdown.idle = timeline.step_time;
    return breakdown;
  }
  int place = computing.begin()->first;
  for (const auto& [candidate, sum] : computing) {
    if (sum > computing[place]) place = candidate;
  }

  struct Edge {
    Duration at;
    int activity = 0;
    int change = 0;
  };
  std::vector<Edge> edges;
  for (const Span& span : timeline.spans) {
    if (span.start == span.end) continue;
    if (!is_world(span) && !is_at(span, place)) continue;
    const int activity = ActivityOf(tasks.task(span.task));
    edges.push_back({span.start, activity, 1});
    edges.push_back({span.end, activity, -1});
  }
  std::sort(edges.begin(), edges.end(),
            [](const Edge& a, const Edge& b) { return a.at < b.at; });
  std::array<Duration, kActivities> spent = {};
  std::array<int, kActivities> running = {};
  Duration now;
  for (const Edge& edge : edges) {
    const auto busy = std::find_if(running.begin(), running.end(),
                                   [](int count) { return count > 0; });
    if (busy == running.end()) {
      breakdown.idle += edge.at - now;
    } else {
      spent[static_cast<size_t>(busy - running.begin())] += edge.at - now;
    }
    now = edge.at;
    running[static_cast<size_t>(edge.activity)] += edge.change;
  }
  breakdown.idle += timeline.step_time - now;
  const auto communicating = [&](CommKind kind) {
    return spent[kCommunicating + static_cast<size_t>(kind)];
  };
  breakdown.compute = spent[kComputing];
  breakdown.optimizer = spent[kOptimizing];
  breakdown.all_reduce = communicating(CommKind::kAllReduce);
  breakdown.all_gather = communicating(CommKind::kAllGather);
  breakdown.reduce_scatter = communicating(CommKind::kReduceScatter);
  breakdown.all_to_all = communicating(CommKind::kAllToAll) +
                         communicating(CommKind::kRedistribute);
  breakdown.send_recv =
      communicating(CommKind::kSendRecv) + communicating(CommKind::kShift) +
      communicating(CommKind::kScatter) + communicating(CommKind::kBroadcast) +
      communicating(CommKind::kGather) + communicating(CommKind::kReduce);
  breakdown.copies = spent[kCopying];
  return breakdown;
}

}  // namespace tessera
