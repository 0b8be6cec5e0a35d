#pragma once
// Timelines in files (proto/timeline.proto). Thread-safe: functions without
// state.

#include <string>

#include "planner/base/result.h"
#include "planner/ir/graph.h"
#include "planner/lower/timeline.h"

namespace tessera {

// The encoding follows the ending: .txtpb, .json or .pb. Names of tasks and
// groups are written for people.
Result<void> WriteTimeline(const std::string& path, const TaskGraph& tasks,
                           const Graph& graph, const Timeline& timeline);

}  // namespace tessera
