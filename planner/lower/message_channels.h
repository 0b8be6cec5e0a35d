#pragma once
// How the messages of a step can travel without saying which they are: both
// sides know sizes and order, so the n-th that goes into a channel is the n-th
// that comes out of it.

#include <compare>
#include <optional>
#include <vector>

#include "planner/lower/task_graph.h"

namespace tessera {

struct MessageChannels {
  // By task: the channel of a send or a receive; -1 of the others. Of one
  // channel all sends are in one stream of one group, all receives in one
  // stream of another, and both are in the same order. Messages between groups
  // that share a device are in none: a rank of both would wait for itself.
  std::vector<int> of_task;
  int count = 0;
};

// The fewest channels, first come first served: where messages overtake each
// other, they are in different channels.
// REQUIRES: CheckOrder finds nothing.
MessageChannels FindMessageChannels(const TaskGraph& tasks);

// An order of all tasks for ranks whose sends in channels wait for their
// receives (CheckOrder's hand their messages over and go on), or nothing where
// there is none. Streams and dependencies follow it, and a send in a channel
// stands directly before its receive. So ranks that each take their tasks in
// this order never wait for each other in a circle, whatever else of theirs
// they wait for before a task: memory, or all that one graph replays. Of the
// tasks that are not done, the first and, if it is a send in a channel, its
// receive wait for nothing.
//
// What a rank computes and exchanges in groups stays in issue order. Messages
// do, too, until all ranks stand still, as where two send to each other before
// they receive (1F1B); then the one that is least ahead of it goes first: it is
// sent later, or received earlier, and takes memory for longer.
// REQUIRES: CheckOrder finds nothing.
std::optional<std::vector<TaskId>> MeetingOrder(const TaskGraph& tasks);

// One rank's end of a channel, from rank to rank. Ranks that connect their ends
// one after another in this order, each when both sides are at it, never wait
// for each other in a circle: the first end of all that is not connected is the
// next of both its ranks.
struct ChannelEnd {
  int channel = 0;
  int from = 0;
  int to = 0;
  auto operator<=>(const ChannelEnd&) const = default;
};

}  // namespace tessera
