#include "costmodel/simulate/simulator.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <queue>
#include <tuple>

#include "planner/plan/stages.h"

namespace tessera {
namespace {

// Rounding of sums of utilisations that are meant to fill a link exactly.
constexpr double kFull = 1 + 1e-9;

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
};

Flows FindFlows(const Pricer& pricer, const TaskGraph& tasks,
                std::span<const TaskCost> costs) {
  const std::vector<int> classes = ClassesOf(pricer, tasks);
  Flows flows;
  flows.of_task.assign(tasks.tasks.size(), -1);
  std::map<std::tuple<TaskKind, CommKind, GroupId, GroupId, AxisSet, Bytes>,
           int>
      known;
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    const Task& task = tasks.tasks[t];
    if (task.kind != TaskKind::kComm && task.kind != TaskKind::kSend) continue;
    const TaskView view = ViewOf(tasks, task, classes);
    const GroupId peer =
        task.kind == TaskKind::kSend ? view.peer->group : GroupId();
    const auto [it, is_new] =
        known.try_emplace({task.kind, task.comm, task.group, peer, task.axes,
                           pricer.Payload(view)},
                          static_cast<int>(flows.uses.size()));
    if (is_new) {
      flows.uses.push_back(pricer.LinkUses(view, costs[t].duration));
    }
    if (!flows.uses[static_cast<size_t>(it->second)].empty()) {
      flows.of_task[t] = it->second;
    }
  }
  return flows;
}

// Whether some link is asked for more than it has at some time.
bool AnyLinkIsShort(const Timeline& timeline, const Flows& flows) {
  struct Edge {
    Duration at;
    bool starts = false;  // ends come first
    int flow = 0;
    auto operator<=>(const Edge&) const = default;
  };
  std::vector<Edge> edges;
  size_t links = 0;
  for (size_t t = 0; t < timeline.spans.size(); ++t) {
    const int flow = flows.of_task[t];
    if (flow < 0) continue;
    edges.push_back({timeline.spans[t].start, true, flow});
    edges.push_back({timeline.spans[t].end, false, flow});
  }
  for (const auto& uses : flows.uses) {
    for (const LinkUse& use : uses) {
      links = std::max(links, use.link.index() + 1);
    }
  }
  std::sort(edges.begin(), edges.end());
  // Loads are kept as counts of flows, so that what is added is taken away
  // again exactly. Sets of flows that were found to fit are remembered.
  std::map<std::vector<int>, bool> checked;
  std::vector<int> active;  // sorted
  std::vector<double> load(links, 0);
  for (const Edge& edge : edges) {
    const auto at = std::lower_bound(active.begin(), active.end(), edge.flow);
    if (!edge.starts) {
      active.erase(at);
      continue;
    }
    active.insert(at, edge.flow);
    if (active.size() == 1) continue;
    const auto [it, is_new] = checked.try_emplace(active, false);
    if (is_new) {
      std::fill(load.begin(), load.end(), 0);
      for (int flow : active) {
        for (const LinkUse& use : flows.uses[static_cast<size_t>(flow)]) {
          double& sum = load[use.link.index()];
          sum += use.utilisation;
          if (sum > kFull) it->second = true;
        }
      }
    }
    if (it->second) return true;
  }
  return false;
}

// The fluid model, event by event.
class FluidRun {
 public:
  FluidRun(const TaskGraph& tasks, std::span<const TaskCost> costs,
           const Flows& flows)
      : tasks_(tasks), costs_(costs), flows_(flows) {}

  Timeline Run(Timeline timeline) {
    const size_t n = tasks_.tasks.size();
    FindSuccessors();
    for (size_t t = 0; t < n; ++t) {
      if (waiting_[t] == 0) ready_.push_back(t);
    }
    spans_ = &timeline.spans;
    size_t done = 0;
    while (done < n) {
      StartReady();
      const Duration next = NextEvent();
      now_ = next;
      std::vector<size_t> ended;
      while (!ends_.empty() && ends_.top().first == now_) {
        ended.push_back(ends_.top().second);
        ends_.pop();
      }
      const size_t flows_before = active_.size();
      std::erase_if(active_, [&](const Active& flow) {
        if (flow.end != now_) return false;
        ended.push_back(flow.task);
        return true;
      });
      changed_ = changed_ || active_.size() != flows_before;
      std::sort(ended.begin(), ended.end());
      for (size_t t : ended) Finish(t);
      done += ended.size();
    }
    timeline.step_time = now_;
    return timeline;
  }

 private:
  struct Active {
    size_t task = 0;
    int flow = 0;
    double rate = 1;
    double remaining = 0;  // picoseconds at rate 1, at time `since`
    Duration since;
    Duration end;
  };

  // Successors by dependency and by stream, as one list for each task.
  void FindSuccessors() {
    const size_t n = tasks_.tasks.size();
    const std::vector<int> streams = StreamsOf(tasks_);
    std::vector<int64_t> last;  // by stream
    const auto overlaps = Overlaps(tasks_.plan_groups());
    std::vector<int64_t> last_compute(tasks_.groups.size(), -1);
    std::vector<std::pair<size_t, size_t>> edges;
    waiting_.assign(n, 0);
    first_.assign(n + 1, 0);
    for (size_t t = 0; t < n; ++t) {
      const auto stream = static_cast<size_t>(streams[t]);
      if (stream >= last.size()) last.resize(stream + 1, -1);
      if (last[stream] >= 0) {
        edges.emplace_back(static_cast<size_t>(last[stream]), t);
      }
      last[stream] = static_cast<int64_t>(t);
      const Task& task = tasks_.tasks[t];
      for (TaskId dep : task.deps) edges.emplace_back(dep.index(), t);
      if (task.stream != StreamRole::kCompute || task.group == tasks_.world) {
        continue;
      }
      for (GroupId other : overlaps[task.group.index()]) {
        const int64_t before = last_compute[other.index()];
        if (before >= 0) edges.emplace_back(static_cast<size_t>(before), t);
      }
      last_compute[task.group.index()] = static_cast<int64_t>(t);
    }
    for (const auto& [from, to] : edges) {
      ++first_[from + 1];
      ++waiting_[to];
    }
    for (size_t t = 0; t < n; ++t) first_[t + 1] += first_[t];
    successors_.resize(edges.size());
    std::vector<size_t> filled(first_.begin(), first_.end() - 1);
    for (const auto& [from, to] : edges) successors_[filled[from]++] = to;
  }

  void StartReady() {
    for (size_t t : ready_) {
      (*spans_)[t].start = now_;
      const Duration duration = costs_[t].duration;
      const int flow = flows_.of_task[t];
      if (flow < 0) {
        ends_.emplace(now_ + duration, t);
        continue;
      }
      active_.push_back({t, flow, 1, static_cast<double>(duration.picoseconds),
                         now_, now_ + duration});
      changed_ = true;
    }
    ready_.clear();
    if (changed_) ShareLinks();
    changed_ = false;
  }

  // Gives every active flow its fair rate. A flow whose rate stays keeps its
  // end.
  void ShareLinks() {
    std::sort(active_.begin(), active_.end(),
              [](const Active& a, const Active& b) {
                return std::pair(a.flow, a.task) < std::pair(b.flow, b.task);
              });
    std::vector<int> key;
    for (const Active& flow : active_) key.push_back(flow.flow);
    const auto [it, is_new] = rates_.try_emplace(key);
    if (is_new) {
      std::vector<std::vector<LinkUse>> uses;
      for (int flow : key) {
        uses.push_back(flows_.uses[static_cast<size_t>(flow)]);
      }
      it->second = MaxMinRates(uses);
      for (double& rate : it->second) {
        if (rate * kFull >= 1) rate = 1;
      }
    }
    for (size_t i = 0; i < active_.size(); ++i) {
      Active& flow = active_[i];
      const double rate = it->second[i];
      if (rate == flow.rate) continue;
      const auto passed = static_cast<double>((now_ - flow.since).picoseconds);
      flow.remaining = std::max(0.0, flow.remaining - flow.rate * passed);
      flow.rate = rate;
      flow.since = now_;
      flow.end =
          now_ +
          Duration{static_cast<int64_t>(std::ceil(flow.remaining / rate))};
    }
  }

  Duration NextEvent() const {
    TESSERA_CHECK(!ends_.empty() || !active_.empty()) << "nothing runs";
    Duration next = ends_.empty() ? active_[0].end : ends_.top().first;
    for (const Active& flow : active_) next = std::min(next, flow.end);
    return next;
  }

  void Finish(size_t t) {
    (*spans_)[t].end = now_;
    for (size_t i = first_[t]; i < first_[t + 1]; ++i) {
      if (--waiting_[successors_[i]] == 0) ready_.push_back(successors_[i]);
    }
  }

  const TaskGraph& tasks_;
  std::span<const TaskCost> costs_;
  const Flows& flows_;
  std::vector<Span>* spans_ = nullptr;
  std::vector<int> waiting_;
  std::vector<size_t> first_;
  std::vector<size_t> successors_;
  std::vector<size_t> ready_;
  std::vector<Active> active_;
  bool changed_ = false;
  Duration now_;
  std::priority_queue<std::pair<Duration, size_t>,
                      std::vector<std::pair<Duration, size_t>>, std::greater<>>
      ends_;
  std::map<std::vector<int>, std::vector<double>> rates_;
};

}  // namespace

std::vector<TaskCost> PriceTasks(const Pricer& pricer, const TaskGraph& tasks) {
  std::vector<TaskCost> costs;
  costs.reserve(tasks.tasks.size());
  ForEachTask(pricer, tasks, [&](const TaskView& view) {
    costs.push_back(pricer.Price(view));
  });
  return costs;
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
  Timeline timeline;
  timeline.spans.resize(tasks.tasks.size());
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    const Task& task = tasks.tasks[t];
    const auto stream = static_cast<size_t>(streams[t]);
    if (stream >= free_at.size()) free_at.resize(stream + 1);
    Duration start = free_at[stream];
    for (TaskId dep : task.deps) {
      start = Max(start, timeline.spans[dep.index()].end);
    }
    const bool takes_turns =
        task.stream == StreamRole::kCompute && task.group != tasks.world;
    if (takes_turns) {
      for (GroupId other : overlaps[task.group.index()]) {
        start = Max(start, compute_free_at[other.index()]);
      }
    }
    const Duration end = start + costs[t].duration;
    free_at[stream] = end;
    if (takes_turns) compute_free_at[task.group.index()] = end;
    Span& span = timeline.spans[t];
    span.task = TaskId(static_cast<int64_t>(t));
    span.group = task.group;
    span.stream = task.stream;
    span.axes = task.stream == StreamRole::kComm ? task.axes : 0;
    span.start = start;
    span.end = end;
    timeline.step_time = Max(timeline.step_time, end);
  }
  return timeline;
}

Result<Timeline> Simulator::Run(const TaskGraph& tasks) {
  const std::vector<TaskCost> costs = PriceTasks(pricer_, tasks);
  Timeline timeline = LongestPath(tasks, costs);
  if (!options_.share_links) return timeline;
  const Flows flows = FindFlows(pricer_, tasks, costs);
  if (!AnyLinkIsShort(timeline, flows)) return timeline;
  return FluidRun(tasks, costs, flows).Run(std::move(timeline));
}

}  // namespace tessera
