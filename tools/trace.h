#pragma once
// Timelines as Chrome traces, which ui.perfetto.dev and chrome://tracing show:
// https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

#include <string>

#include "planner/ir/cluster.h"
#include "planner/lower/task_graph.h"
#include "planner/lower/timeline.h"

namespace tessera {

// JSON with one process for each device and one thread for each of its
// streams. Where that would be more than `most_events` (a browser shows some
// hundred thousand well), ranks that do the same at the same time are one
// process, named by their devices. Spans are named by NameOf(task).
std::string ChromeTrace(const TaskGraph& tasks, const Graph& graph,
                        const Cluster& cluster, const Timeline& timeline,
                        size_t most_events = 200'000);

}  // namespace tessera
