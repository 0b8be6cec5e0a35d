#include "planner/lower/message_channels.h"

#include <algorithm>
#include <compare>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "planner/plan/stages.h"

namespace tessera {
namespace {

// By task: the receive of a send and the send of a receive; -1 of the others,
// and of messages that are in no channel.
std::vector<int> OtherSides(const TaskGraph& tasks) {
  const std::vector<std::vector<GroupId>> overlaps = Overlaps(tasks.groups);
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
    const std::vector<GroupId>& near = overlaps[task.group.index()];
    if (std::ranges::count(near, tasks.tasks[send].group) > 0) continue;
    other[t] = static_cast<int>(send);
    other[send] = static_cast<int>(t);
  }
  return other;
}

// The ranks' way through their tasks. Ranks of the same groups do the same, and
// go as one.
class MeetingRanks {
 public:
  explicit MeetingRanks(const TaskGraph& tasks)
      : tasks_(tasks.tasks),
        other_(OtherSides(tasks)),
        queues_of_(tasks_.size()),
        places_(tasks_.size()),
        done_(tasks_.size(), false) {
    const std::vector<DeviceSet> ranks = DeviceSets(tasks.groups);
    issued_.resize(ranks.size());
    std::vector<std::vector<size_t>> ranks_of(tasks.groups.size());
    for (size_t r = 0; r < ranks.size(); ++r) {
      for (GroupId group : ranks[r].groups) {
        ranks_of[group.index()].push_back(r);
      }
    }
    for (size_t t = 0; t < tasks_.size(); ++t) {
      const Task& task = tasks_[t];
      const bool collective = task.stream == StreamRole::kComm;
      const GroupId group = collective ? task.group : GroupId();
      const AxisSet axes = collective ? task.axes : 0;
      for (size_t r : ranks_of[task.group.index()]) {
        places_[t].push_back({&issued_[r], issued_[r].tasks.size()});
        issued_[r].tasks.push_back(t);
        AddTo(queues_[{r, false, task.stream, group, axes}], t);
        if (!IsMessage(t)) AddTo(queues_[{r, true, {}, {}, 0}], t);
      }
    }
  }

  // All that they can do, in order.
  std::vector<TaskId> Run() {
    for (;;) {
      FollowIssueOrder();
      const std::optional<size_t> next = LeastAhead();
      if (!next) return std::move(order_);
      Do(*next);
    }
  }

 private:
  // In issue order.
  struct Queue {
    std::vector<size_t> tasks;
    size_t next = 0;

    bool ended() const { return next == tasks.size(); }
    bool IsNext(size_t t) const { return !ended() && tasks[next] == t; }
  };
  struct Place {
    Queue* queue = nullptr;
    size_t index = 0;
  };

  bool IsMessage(size_t t) const { return other_[t] >= 0; }
  size_t Other(size_t t) const { return static_cast<size_t>(other_[t]); }

  void AddTo(Queue& queue, size_t t) {
    queue.tasks.push_back(t);
    queues_of_[t].push_back(&queue);
  }

  bool IsReady(size_t t) const {
    return std::ranges::all_of(
               queues_of_[t],
               [&](const Queue* queue) { return queue->IsNext(t); }) &&
           std::ranges::all_of(tasks_[t].deps, [&](TaskId dep) {
             // A receive depends on its send, which is done with it.
             return done_[dep.index()] || dep.value == other_[t];
           });
  }
  bool CanBeDone(size_t t) const {
    return IsReady(t) && (!IsMessage(t) || IsReady(Other(t)));
  }

  // How far a task, or one of the two of a message, is ahead of the issue order
  // of a rank.
  size_t Ahead(size_t t) const {
    const auto of_one = [&](size_t task) {
      size_t most = 0;
      for (const Place& place : places_[task]) {
        most = std::max(most, place.index - place.queue->next);
      }
      return most;
    };
    return IsMessage(t) ? std::max(of_one(t), of_one(Other(t))) : of_one(t);
  }

  void FollowIssueOrder() {
    for (bool progress = true; progress;) {
      progress = false;
      for (const Queue& rank : issued_) {
        while (!rank.ended()) {
          const size_t t = rank.tasks[rank.next];
          if (!CanBeDone(t) || Ahead(t) > 0) break;
          Do(t);
          progress = true;
        }
      }
    }
  }

  // Where all ranks stand: a message, or else another task.
  std::optional<size_t> LeastAhead() const {
    std::optional<std::tuple<bool, size_t, size_t>> least;
    for (const auto& [key, queue] : queues_) {
      if (queue.ended()) continue;
      const size_t t = queue.tasks[queue.next];
      if (!CanBeDone(t)) continue;
      const std::tuple candidate(!IsMessage(t), Ahead(t), t);
      if (!least || candidate < *least) least = candidate;
    }
    if (!least) return std::nullopt;
    return std::get<2>(*least);
  }

  void Do(size_t t) {
    if (!IsMessage(t)) return DoOne(t);
    DoOne(std::min(t, Other(t)));
    DoOne(std::max(t, Other(t)));
  }
  void DoOne(size_t t) {
    for (Queue* queue : queues_of_[t]) ++queue->next;
    done_[t] = true;
    order_.push_back(TaskId(t));
    for (const Place& place : places_[t]) {
      Queue& rank = *place.queue;
      while (!rank.ended() && done_[rank.tasks[rank.next]]) ++rank.next;
    }
  }

  const std::vector<Task>& tasks_;
  const std::vector<int> other_;
  std::vector<Queue> issued_;  // by kind of rank
  // Of a kind of rank its streams, and (true) all that is no message.
  std::map<std::tuple<size_t, bool, StreamRole, GroupId, AxisSet>, Queue>
      queues_;
  std::vector<std::vector<Queue*>> queues_of_;  // by task
  std::vector<std::vector<Place>> places_;      // by task, in `issued_`
  std::vector<bool> done_;
  std::vector<TaskId> order_;
};

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
    if (receive < 0) continue;
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

std::optional<std::vector<TaskId>> MeetingOrder(const TaskGraph& tasks) {
  std::vector<TaskId> order = MeetingRanks(tasks).Run();
  if (order.size() < tasks.tasks.size()) return std::nullopt;
  return order;
}

}  // namespace tessera
