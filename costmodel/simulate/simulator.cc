#include "costmodel/simulate/simulator.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <queue>
#include <tuple>

#include "costmodel/simulate/contention.h"
#include "planner/plan/stages.h"

namespace tessera {
namespace {

TaskView ViewOf(const TaskGraph& tasks, const Task& task,
                const std::vector<int>& classes) {
  TaskView view;
  view.task = &task;
  view.values = tasks.values;
  view.group = &tasks.group(task.group);
  view.group_class = classes[task.group.index()];
  view.zigzag = tasks.zigzag;
  if (task.kind == TaskKind::kSend) {
    view.peer = &tasks.value(task.peer);
    view.peer_group = &tasks.group(view.peer->group);
  }
  return view;
}

std::vector<int> ClassesOf(const Pricer& pricer, const TaskGraph& tasks) {
  std::vector<int> classes;
  for (const DeviceGroup& group : tasks.groups) {
    classes.push_back(pricer.ClassOf(group));
  }
  return classes;
}

// Calls f(view) for each task in order, as the pricer wants it.
template <typename F>
void ForEachTask(const Pricer& pricer, const TaskGraph& tasks, const F& f) {
  const std::vector<int> classes = ClassesOf(pricer, tasks);
  std::map<std::pair<GroupId, GroupId>, int> pairs;
  for (const Task& task : tasks.tasks) {
    TaskView view = ViewOf(tasks, task, classes);
    if (view.peer_group != nullptr) {
      const auto [it, is_new] =
          pairs.try_emplace({task.group, view.peer->group}, -1);
      if (is_new) it->second = pricer.ClassOf(*view.group, view.peer_group);
      view.pair_class = it->second;
    }
    f(view);
  }
}

// The distinct ways in which a step's communication loads the links.
struct Flows {
  std::vector<int> of_task;  // index into `uses`, or -1: loads nothing
  std::vector<std::vector<LinkUse>> uses;
  std::vector<std::vector<int>> streams;  // by flow, those with tasks of it
};

Flows FindFlows(const Pricer& pricer, const TaskGraph& tasks,
                std::span<const TaskCost> costs, std::span<const int> streams) {
  const std::vector<int> classes = ClassesOf(pricer, tasks);
  Flows flows;
  flows.of_task.assign(tasks.tasks.size(), -1);
  std::map<std::tuple<TaskKind, CommKind, GroupId, GroupId, AxisSet, Bytes,
                      Duration>,
           int>
      known;
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    const Task& task = tasks.tasks[t];
    if (task.kind != TaskKind::kComm && task.kind != TaskKind::kSend) continue;
    if (task.like.valid()) {
      // It is on the same stream, too.
      flows.of_task[t] = flows.of_task[task.like.index()];
      continue;
    }
    const TaskView view = ViewOf(tasks, task, classes);
    const GroupId peer =
        task.kind == TaskKind::kSend ? view.peer->group : GroupId();
    const auto [it, is_new] =
        known.try_emplace({task.kind, task.comm, task.group, peer, task.axes,
                           PayloadOf(view), costs[t].duration},
                          static_cast<int>(flows.uses.size()));
    if (is_new) {
      flows.uses.push_back(pricer.LinkUses(view, costs[t].duration));
      flows.streams.emplace_back();
    }
    const auto flow = static_cast<size_t>(it->second);
    if (flows.uses[flow].empty()) continue;
    flows.of_task[t] = it->second;
    auto& of_flow = flows.streams[flow];
    if (std::find(of_flow.begin(), of_flow.end(), streams[t]) ==
        of_flow.end()) {
      of_flow.push_back(streams[t]);
    }
  }
  return flows;
}

// Spans without times.
Timeline Unstarted(const TaskGraph& tasks) {
  Timeline timeline;
  timeline.spans.resize(tasks.tasks.size());
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    const Task& task = tasks.tasks[t];
    Span& span = timeline.spans[t];
    span.task = TaskId(static_cast<int64_t>(t));
    span.group = task.group;
    span.stream = task.stream;
    span.axes = task.stream == StreamRole::kComm ? task.axes : 0;
  }
  return timeline;
}

// Whether the task waits for compute of groups that share devices with its own.
bool TakesTurns(const TaskGraph& tasks, const Task& task) {
  return task.stream == StreamRole::kCompute && task.group != tasks.world;
}

// What must end before a task starts, and so the other way round: by stream,
// by dependency, and by devices that compute for one group at a time.
struct Precedence {
  std::vector<int> waits_for;  // by task, how many
  // Those that wait for task t are followers[first[t]] to [first[t + 1] - 1].
  std::vector<size_t> first;
  std::vector<int> followers;
};

// Calls f(from, to) for each.
template <typename F>
void ForEachPrecedence(const TaskGraph& tasks, std::span<const int> streams,
                       const F& f) {
  const auto overlaps = Overlaps(tasks.plan_groups());
  std::vector<int> last;  // by stream
  std::vector<int> last_compute(tasks.groups.size(), -1);
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    const int to = static_cast<int>(t);
    const auto stream = static_cast<size_t>(streams[t]);
    if (stream >= last.size()) last.resize(stream + 1, -1);
    if (last[stream] >= 0) f(last[stream], to);
    last[stream] = to;
    const Task& task = tasks.tasks[t];
    for (TaskId dep : task.deps) f(dep.value, to);
    if (!TakesTurns(tasks, task)) continue;
    for (GroupId other : overlaps[task.group.index()]) {
      const int before = last_compute[other.index()];
      if (before >= 0) f(before, to);
    }
    last_compute[task.group.index()] = to;
  }
}

Precedence PrecedenceOf(const TaskGraph& tasks, std::span<const int> streams) {
  const size_t n = tasks.tasks.size();
  Precedence precedence;
  precedence.waits_for.assign(n, 0);
  precedence.first.assign(n + 1, 0);
  ForEachPrecedence(tasks, streams, [&](int from, int to) {
    ++precedence.first[static_cast<size_t>(from) + 1];
    ++precedence.waits_for[static_cast<size_t>(to)];
  });
  for (size_t t = 0; t < n; ++t) {
    precedence.first[t + 1] += precedence.first[t];
  }
  precedence.followers.resize(precedence.first[n]);
  std::vector<size_t> filled(precedence.first.begin(),
                             precedence.first.end() - 1);
  ForEachPrecedence(tasks, streams, [&](int from, int to) {
    precedence.followers[filled[static_cast<size_t>(from)]++] = to;
  });
  return precedence;
}

// The fluid model. Tasks that share no link take what they take: they end as
// soon as it is known when they start. Only those that may have to share are
// events in time.
class FluidRun {
 public:
  FluidRun(const TaskGraph& tasks, std::span<const TaskCost> costs,
           std::span<const int> streams, std::span<const int> flow_of_task,
           const Contention& contention)
      : costs_(costs),
        flow_of_task_(flow_of_task),
        contention_(contention),
        rates_(contention),
        precedence_(PrecedenceOf(tasks, streams)),
        timeline_(Unstarted(tasks)),
        running_of_flow_(contention.uses.size()),
        running_on_link_(contention.links),
        seen_(contention.uses.size(), 0) {}

  Timeline Run() {
    const size_t n = costs_.size();
    for (size_t t = 0; t < n; ++t) {
      if (precedence_.waits_for[t] == 0) ready_.push_back(t);
    }
    EndReady();
    while (!events_.empty()) {
      now_ = events_.top().at;
      while (!events_.empty() && events_.top().at == now_) {
        const Event event = events_.top();
        events_.pop();
        const auto task = static_cast<size_t>(event.task);
        if (event.running < 0) {
          Start(event.task, flow_of_task_[task], costs_[task].duration);
        } else if (Ends(event)) {
          Finish(task, now_);
          EndReady();
        }
      }
      ShareLinks();
    }
    TESSERA_CHECK(done_ == n) << "tasks wait for each other";
    return std::move(timeline_);
  }

 private:
  // A task that may have to share links.
  struct Running {
    int task = -1;  // -1: none
    int flow = 0;
    double rate = 1;
    double remaining = 0;  // picoseconds at rate 1, at time `since`
    Duration since;
    Duration end;
  };
  // The start or the end of such a task.
  struct Event {
    Duration at;
    int task = 0;
    int running = -1;  // into running_; -1: it starts
    auto operator<=>(const Event&) const = default;
  };

  bool Shares(size_t t) const {
    const int flow = flow_of_task_[t];
    return flow >= 0 && costs_[t].duration != Duration{} &&
           !contention_.uses[static_cast<size_t>(flow)].empty();
  }

  // Of the tasks that nothing holds up any more, ends those that share no link,
  // and what only waited for them.
  void EndReady() {
    while (!ready_.empty()) {
      const size_t t = ready_.back();
      ready_.pop_back();
      const Duration start = timeline_.spans[t].start;
      if (Shares(t)) {
        events_.push({start, static_cast<int>(t), -1});
      } else {
        Finish(t, start + costs_[t].duration);
      }
    }
  }

  void Start(int task, int flow, Duration duration) {
    int at = 0;
    if (free_.empty()) {
      at = static_cast<int>(running_.size());
      running_.emplace_back();
    } else {
      at = free_.back();
      free_.pop_back();
    }
    running_[static_cast<size_t>(at)] = {
        task, flow,           1, static_cast<double>(duration.picoseconds),
        now_, now_ + duration};
    events_.push({now_ + duration, task, at});
    auto& of_flow = running_of_flow_[static_cast<size_t>(flow)];
    if (of_flow.empty()) {
      ForLinks(flow, [&](std::vector<int>& flows) { flows.push_back(flow); });
    }
    of_flow.push_back(at);
    changed_.push_back(flow);
  }

  // Whether this is the end of its task, and not what was its end before its
  // rate changed.
  bool Ends(const Event& end) {
    Running& running = running_[static_cast<size_t>(end.running)];
    if (running.task != end.task || running.end != end.at) return false;
    auto& of_flow = running_of_flow_[static_cast<size_t>(running.flow)];
    std::erase(of_flow, end.running);
    if (of_flow.empty()) {
      ForLinks(running.flow, [&](std::vector<int>& flows) {
        std::erase(flows, running.flow);
      });
    }
    changed_.push_back(running.flow);
    running.task = -1;
    free_.push_back(end.running);
    return true;
  }

  // Gives every flow that a change reaches its fair rate.
  void ShareLinks() {
    ++round_;
    for (int flow : changed_) {
      ShareComponent(flow);
      // Where the flow has ended, those beside it may be apart.
      ForLinks(flow, [&](const std::vector<int>& flows) {
        for (int other : flows) ShareComponent(other);
      });
    }
    changed_.clear();
  }

  void ShareComponent(int start) {
    if (!Visit(start)) return;
    component_ = {start};
    for (size_t i = 0; i < component_.size(); ++i) {
      ForLinks(component_[i], [&](const std::vector<int>& flows) {
        for (int other : flows) {
          if (Visit(other)) component_.push_back(other);
        }
      });
    }
    std::sort(component_.begin(), component_.end());
    key_.clear();
    for (int flow : component_) {
      key_.insert(key_.end(),
                  running_of_flow_[static_cast<size_t>(flow)].size(), flow);
    }
    const std::vector<double>& rates = rates_.Of(key_);
    size_t i = 0;
    for (int flow : component_) {
      for (int running : running_of_flow_[static_cast<size_t>(flow)]) {
        SetRate(running, rates[i++]);
      }
    }
  }

  // Calls f with the flows that run on each link of a flow.
  template <typename F>
  void ForLinks(int flow, const F& f) {
    for (const LinkUse& use : contention_.uses[static_cast<size_t>(flow)]) {
      f(running_on_link_[use.link.index()]);
    }
  }

  // Whether the flow runs and was not visited in this round.
  bool Visit(int flow) {
    const auto f = static_cast<size_t>(flow);
    if (seen_[f] == round_ || running_of_flow_[f].empty()) return false;
    seen_[f] = round_;
    return true;
  }

  // A flow whose rate stays keeps its end.
  void SetRate(int number, double rate) {
    Running& running = running_[static_cast<size_t>(number)];
    if (rate == running.rate) return;
    const auto passed = static_cast<double>((now_ - running.since).picoseconds);
    running.remaining =
        std::max(0.0, running.remaining - running.rate * passed);
    running.rate = rate;
    running.since = now_;
    running.end =
        now_ +
        Duration{static_cast<int64_t>(std::ceil(running.remaining / rate))};
    events_.push({running.end, running.task, number});
  }

  void Finish(size_t t, Duration end) {
    timeline_.spans[t].end = end;
    timeline_.step_time = Max(timeline_.step_time, end);
    ++done_;
    for (size_t i = precedence_.first[t]; i < precedence_.first[t + 1]; ++i) {
      const auto follower = static_cast<size_t>(precedence_.followers[i]);
      Duration& start = timeline_.spans[follower].start;
      start = Max(start, end);
      if (--precedence_.waits_for[follower] == 0) ready_.push_back(follower);
    }
  }

  std::span<const TaskCost> costs_;
  std::span<const int> flow_of_task_;
  const Contention& contention_;
  FairRates rates_;
  Precedence precedence_;  // of what still waits
  Timeline timeline_;
  size_t done_ = 0;
  Duration now_;
  std::vector<size_t> ready_;  // of which the start is known
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::vector<Running> running_;
  std::vector<int> free_;  // of these
  std::vector<std::vector<int>> running_of_flow_;
  std::vector<std::vector<int>> running_on_link_;  // flows
  std::vector<int> changed_;  // flows that began or ended at this time
  int64_t round_ = 0;
  std::vector<int64_t> seen_;  // by flow
  std::vector<int> component_;
  IntKey key_;
};

}  // namespace

std::vector<TaskCost> PriceTasks(const Pricer& pricer, const TaskGraph& tasks) {
  std::vector<TaskCost> costs;
  costs.reserve(tasks.tasks.size());
  ForEachTask(pricer, tasks, [&](const TaskView& view) {
    const TaskId like = view.task->like;
    costs.push_back(like.valid() ? costs[like.index()] : pricer.Price(view));
  });
  return costs;
}

Bytes MovedBytes(const Pricer& pricer, const TaskGraph& tasks) {
  __int128 moved = 0;
  ForEachTask(pricer, tasks, [&](const TaskView& view) {
    const Task& task = *view.task;
    if (task.kind != TaskKind::kComm && task.kind != TaskKind::kSend) return;
    const __int128 payload = PayloadOf(view).value;
    if (task.kind == TaskKind::kSend) {
      moved += payload * std::ssize(view.peer_group->devices);
      return;
    }
    const int64_t ranks = view.group->Size(task.axes);
    const int64_t subgroups = std::ssize(view.group->devices) / ranks;
    switch (task.comm) {
      case CommKind::kAllReduce:
        moved += 2 * (ranks - 1) * payload * subgroups;
        break;
      case CommKind::kAllGather:
      case CommKind::kReduceScatter:
      case CommKind::kAllToAll:
      case CommKind::kRedistribute:
      case CommKind::kBroadcast:
      case CommKind::kReduce:
        moved += (ranks - 1) * payload * subgroups;
        break;
      case CommKind::kScatter:
      case CommKind::kGather:
        moved += (ranks - 1) * payload / ranks * subgroups;
        break;
      case CommKind::kSendRecv:
      case CommKind::kShift:
        moved += ranks * payload * subgroups;
        break;
    }
  });
  constexpr __int128 kMost = std::numeric_limits<int64_t>::max();
  return {static_cast<int64_t>(std::min(moved, kMost))};
}

std::vector<ProfileKey> ProfileKeysOf(const Pricer& pricer,
                                      const TaskGraph& tasks) {
  std::vector<ProfileKey> keys;
  keys.reserve(tasks.tasks.size());
  ForEachTask(pricer, tasks, [&](const TaskView& view) {
    keys.push_back(pricer.ProfileKeyOf(view));
  });
  return keys;
}

std::vector<int> StreamsOf(const TaskGraph& tasks) {
  struct Known {
    StreamRole role;
    AxisSet axes;
    int number;
  };
  std::vector<std::vector<Known>> known(tasks.groups.size());
  std::vector<int> streams;
  streams.reserve(tasks.tasks.size());
  int count = 0;
  for (const Task& task : tasks.tasks) {
    const AxisSet axes = task.stream == StreamRole::kComm ? task.axes : 0;
    auto& here = known[task.group.index()];
    const auto it = std::find_if(here.begin(), here.end(), [&](const Known& k) {
      return k.role == task.stream && k.axes == axes;
    });
    if (it != here.end()) {
      streams.push_back(it->number);
    } else {
      here.push_back({task.stream, axes, count});
      streams.push_back(count++);
    }
  }
  return streams;
}

Timeline LongestPath(const TaskGraph& tasks, std::span<const TaskCost> costs) {
  TESSERA_CHECK(costs.size() == tasks.tasks.size()) << costs.size();
  const std::vector<int> streams = StreamsOf(tasks);
  const auto overlaps = Overlaps(tasks.plan_groups());
  std::vector<Duration> free_at;  // by stream
  std::vector<Duration> compute_free_at(tasks.groups.size());
  Timeline timeline = Unstarted(tasks);
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    const Task& task = tasks.tasks[t];
    const auto stream = static_cast<size_t>(streams[t]);
    if (stream >= free_at.size()) free_at.resize(stream + 1);
    Duration start = free_at[stream];
    for (TaskId dep : task.deps) {
      start = Max(start, timeline.spans[dep.index()].end);
    }
    const bool takes_turns = TakesTurns(tasks, task);
    if (takes_turns) {
      for (GroupId other : overlaps[task.group.index()]) {
        start = Max(start, compute_free_at[other.index()]);
      }
    }
    const Duration end = start + costs[t].duration;
    free_at[stream] = end;
    if (takes_turns) compute_free_at[task.group.index()] = end;
    timeline.spans[t].start = start;
    timeline.spans[t].end = end;
    timeline.step_time = Max(timeline.step_time, end);
  }
  return timeline;
}

Timeline Simulate(const Pricer& pricer, const TaskGraph& tasks,
                  SimulationOptions options) {
  const std::vector<TaskCost> costs = PriceTasks(pricer, tasks);
  if (!options.share_links) return LongestPath(tasks, costs);
  const std::vector<int> streams = StreamsOf(tasks);
  const Flows flows = FindFlows(pricer, tasks, costs, streams);
  const Contention contention = FindContention(flows.uses, flows.streams);
  if (!contention.possible()) return LongestPath(tasks, costs);
  return FluidRun(tasks, costs, streams, flows.of_task, contention).Run();
}

}  // namespace tessera
