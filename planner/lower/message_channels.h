#pragma once
// How the messages of a step can travel without saying which they are: both
// sides know sizes and order, so the n-th that goes into a channel is the n-th
// that comes out of it.

#include <cstdint>
#include <vector>

#include "planner/lower/task_graph.h"

namespace tessera {

struct MessageChannels {
  // By task: the channel of a send or a receive; -1 of the others. Of one
  // channel all sends are in one stream of one group, all receives in one
  // stream of another, and both are in the same order.
  std::vector<int> of_task;
  int count = 0;
};

// The fewest channels, first come first served: where messages overtake each
// other, they are in different channels.
// REQUIRES: CheckOrder finds nothing.
MessageChannels FindMessageChannels(const TaskGraph& tasks);

// Whether a step ends on devices where a send holds its stream until its
// receive is at the head of its own, too. (CheckOrder's sends hand their
// messages over and go on.) Every rank then has a stream for each role, and one
// for the collectives between the same ranks; a task runs when it is at the
// head on all ranks of its group.
// REQUIRES: CheckOrder finds nothing.
bool SendsMayWait(const TaskGraph& tasks);

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
