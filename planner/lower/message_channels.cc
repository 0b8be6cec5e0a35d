#include "planner/lower/message_channels.h"

#include <algorithm>
#include <compare>
#include <deque>
#include <map>
#include <tuple>
#include <utility>

#include "planner/plan/layout.h"

namespace tessera {
namespace {

// By task: the receive of a send and the send of a receive; -1 of the others.
std::vector<int> OtherSides(const TaskGraph& tasks) {
  std::vector<int> other(tasks.tasks.size(), -1);
  std::map<std::pair<ValueId, ValueId>, size_t> sends;  // from, to
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    const Task& task = tasks.tasks[t];
    if (task.kind == TaskKind::kSend) sends[{task.reads[0], task.peer}] = t;
  }
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    const Task& task = tasks.tasks[t];
    if (task.kind != TaskKind::kRecv) continue;
    const size_t send = sends.at({task.peer, task.writes[0]});
    other[t] = static_cast<int>(send);
    other[send] = static_cast<int>(t);
  }
  return other;
}

// Runs the tasks with sends and receives that meet.
bool EndsWithMeetings(const TaskGraph& tasks, const std::vector<int>& other) {
  // Of a device; of collectives, with the devices that they are between.
  using Stream = std::tuple<DeviceId, StreamRole, std::vector<DeviceId>>;
  std::map<Stream, std::deque<size_t>> queues;
  std::map<std::tuple<GroupId, StreamRole, AxisSet>,
           std::vector<std::deque<size_t>*>>
      queues_of;
  const auto queues_for = [&](const Task& task) -> auto& {
    const bool comm = task.stream == StreamRole::kComm;
    auto& found = queues_of[{task.group, task.stream, comm ? task.axes : 0}];
    if (!found.empty()) return found;
    const DeviceGroup& group = tasks.group(task.group);
    for (const auto& positions : Subgroups(group, comm ? task.axes : 0)) {
      std::vector<DeviceId> members;
      for (int position : positions) {
        members.push_back(group.devices[static_cast<size_t>(position)]);
      }
      for (DeviceId device : members) {
        found.push_back(&queues[{device, task.stream,
                                 comm ? members : std::vector<DeviceId>()}]);
      }
    }
    return found;
  };
  const auto for_each_queue = [&](size_t t, const auto& visit) {
    for (std::deque<size_t>* queue : queues_for(tasks.tasks[t])) visit(*queue);
  };
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    for_each_queue(t, [&](auto& queue) { queue.push_back(t); });
  }
  std::vector<bool> done(tasks.tasks.size(), false);
  const auto ready = [&](size_t t) {
    bool at_head = true;
    for_each_queue(t, [&](const auto& queue) {
      at_head = at_head && !queue.empty() && queue.front() == t;
    });
    // A receive depends on its send, which runs with it.
    return at_head && std::ranges::all_of(tasks.tasks[t].deps, [&](TaskId dep) {
             return done[dep.index()] || dep.value == other[t];
           });
  };
  const auto run = [&](size_t t) {
    for_each_queue(t, [](auto& queue) { queue.pop_front(); });
    done[t] = true;
  };
  size_t left = tasks.tasks.size();
  for (bool progress = true; progress;) {
    progress = false;
    for (auto& [stream, queue] : queues) {
      while (!queue.empty() && ready(queue.front())) {
        const size_t t = queue.front();
        if (other[t] >= 0) {
          const auto peer = static_cast<size_t>(other[t]);
          if (!ready(peer)) break;
          run(peer);
          --left;
        }
        run(t);
        --left;
        progress = true;
      }
    }
  }
  return left == 0;
}

}  // namespace

MessageChannels FindMessageChannels(const TaskGraph& tasks) {
  MessageChannels channels;
  channels.of_task.assign(tasks.tasks.size(), -1);
  const std::vector<int> other = OtherSides(tasks);
  struct Channel {
    int number = 0;
    int last = 0;  // receive
  };
  using Ends = std::tuple<GroupId, GroupId, StreamRole, StreamRole>;
  std::map<Ends, std::vector<Channel>> between;
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    const Task& send = tasks.tasks[t];
    if (send.kind != TaskKind::kSend) continue;
    const int receive = other[t];
    const Task& received = tasks.tasks[static_cast<size_t>(receive)];
    auto& list =
        between[{send.group, received.group, send.stream, received.stream}];
    auto channel = std::ranges::find_if(
        list, [&](const Channel& one) { return one.last < receive; });
    if (channel == list.end()) {
      channel = list.insert(list.end(), Channel{channels.count++, 0});
    }
    channel->last = receive;
    channels.of_task[t] = channel->number;
    channels.of_task[static_cast<size_t>(receive)] = channel->number;
  }
  return channels;
}

bool SendsMayWait(const TaskGraph& tasks) {
  const bool sends = std::ranges::any_of(tasks.tasks, [](const Task& task) {
    return task.kind == TaskKind::kSend;
  });
  return !sends || EndsWithMeetings(tasks, OtherSides(tasks));
}

}  // namespace tessera
