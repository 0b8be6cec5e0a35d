#pragma once
// Timeline: who did what when, predicted and measured alike. The error of a
// prediction is the difference of two timelines, task by task.

#include <string>
#include <vector>

#include "planner/base/units.h"
#include "planner/lower/task_graph.h"
#include "planner/plan/evaluation.h"

namespace tessera {

struct Span {
  TaskId task;
  GroupId group;  // whose ranks ran it
  int rank = -1;  // global device index, or -1: every rank of the group
  StreamRole stream = StreamRole::kCompute;
  AxisSet axes = 0;  // tells the streams of a group's communicators apart
  Duration start;    // since the step began
  Duration end;
  bool operator==(const Span&) const = default;
};

struct Timeline {
  std::vector<Span> spans;  // in issue order
  Duration step_time;       // the end of the last span
};

// The breakdown of the group that computes longest (the bottleneck), or of one
// rank of a measured timeline.
Breakdown BreakdownOf(const TaskGraph& tasks, const Timeline& timeline);

}  // namespace tessera
