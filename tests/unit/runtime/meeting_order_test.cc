// Ranks whose sends wait for their receives, on random pipelines, without
// running them: what a rank waits for besides, for the memory of its buffers
// and within graphs, must not close a circle.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "planner/base/rng.h"
#include "planner/lower/lower.h"
#include "planner/lower/message_channels.h"
#include "planner/plan/validate.h"
#include "planner/topology/topologies.h"
#include "runtime/step_order.h"
#include "tests/support/random_plan.h"

namespace tessera {
namespace {

// What one rank enqueues, with places for its buffers.
struct RankStep {
  std::vector<TaskId> tasks;  // by job
  std::vector<bool> capturable;
  std::vector<EnqueuedJob> jobs;
};

void PlaceTier(const TaskGraph& tasks, MemoryTier tier, RankStep& step) {
  std::vector<BufferUse> buffers;
  std::map<ValueId, size_t> buffer_of;  // by root
  for (size_t j = 0; j < step.tasks.size(); ++j) {
    const Task& task = tasks.task(step.tasks[j]);
    for (const auto* list : {&task.reads, &task.writes}) {
      for (ValueId value : *list) {
        const ValueId root = tasks.Root(value);
        const Value& owner = tasks.value(root);
        if (owner.persistent || owner.tier != tier) continue;
        const auto [it, is_new] = buffer_of.try_emplace(root, buffers.size());
        if (is_new) buffers.push_back({LargestBytes(tasks, root), {}});
        std::vector<int>& uses = buffers[it->second].jobs;
        const auto job = static_cast<int>(j);
        if (uses.empty() || uses.back() != job) uses.push_back(job);
      }
    }
  }
  PlaceBuffers(buffers, /*alignment=*/64, step.jobs);
}

RankStep StepOf(const TaskGraph& tasks, const std::vector<TaskId>& order,
                DeviceId rank) {
  RankStep step;
  std::map<std::tuple<StreamRole, GroupId, AxisSet>, int> streams;
  std::map<TaskId, int> job_of;
  for (TaskId id : order) {
    const Task& task = tasks.task(id);
    if (!std::ranges::count(tasks.group(task.group).devices, rank)) continue;
    const bool collective = task.stream == StreamRole::kComm;
    EnqueuedJob job;
    job.stream =
        streams
            .try_emplace({task.stream, collective ? task.group : GroupId(),
                          collective ? task.axes : AxisSet{0}},
                         streams.size())
            .first->second;
    for (TaskId dep : task.deps) {
      if (job_of.contains(dep)) job.deps.push_back(job_of[dep]);
    }
    job_of[id] = static_cast<int>(step.jobs.size());
    step.tasks.push_back(id);
    step.capturable.push_back(IsCapturable(task, tasks.values));
    step.jobs.push_back(std::move(job));
  }
  PlaceTier(tasks, MemoryTier::kDevice, step);
  PlaceTier(tasks, MemoryTier::kHost, step);
  return step;
}

// By side of each message in a channel its other side.
std::map<TaskId, TaskId> OtherSides(const TaskGraph& tasks) {
  const MessageChannels channels = FindMessageChannels(tasks);
  std::map<std::pair<ValueId, ValueId>, TaskId> sends;
  std::map<TaskId, TaskId> other;
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    const Task& task = tasks.tasks[t];
    if (channels.of_task[t] < 0) continue;
    if (task.kind == TaskKind::kSend) {
      sends[{task.reads[0], task.peer}] = TaskId(t);
    } else {
      const TaskId send = sends.at({task.peer, task.writes[0]});
      other[send] = TaskId(t);
      other[TaskId(t)] = send;
    }
  }
  return other;
}

// Whether there is an order: no circle of tasks that follow each other by their
// dependencies, in a stream of a rank, or on a rank as what is no message,
// where both sides of a message are one.
bool HasOrder(const TaskGraph& tasks) {
  const std::map<TaskId, TaskId> other = OtherSides(tasks);
  const auto meeting = [&](TaskId t) {
    const auto found = other.find(t);
    return found == other.end() ? t : std::min(t, found->second);
  };
  std::map<TaskId, std::set<TaskId>> before;  // by meeting
  const auto follow = [&](TaskId first, TaskId second) {
    if (meeting(first) != meeting(second)) {
      before[meeting(second)].insert(meeting(first));
    }
  };
  using Queue = std::tuple<DeviceId, bool, StreamRole, GroupId, AxisSet>;
  std::map<Queue, TaskId> last;
  for (size_t i = 0; i < tasks.tasks.size(); ++i) {
    const TaskId t(i);
    const Task& task = tasks.task(t);
    before.try_emplace(meeting(t));
    for (TaskId dep : task.deps) follow(dep, t);
    const bool collective = task.stream == StreamRole::kComm;
    for (DeviceId rank : tasks.group(task.group).devices) {
      const auto add = [&](const Queue& queue) {
        const auto [at, is_first] = last.try_emplace(queue, t);
        if (!is_first) follow(std::exchange(at->second, t), t);
      };
      add({rank, false, task.stream, collective ? task.group : GroupId(),
           collective ? task.axes : AxisSet{0}});
      if (!other.contains(t)) add({rank, true, {}, {}, 0});
    }
  }
  for (bool progress = true; progress;) {
    progress = false;
    for (auto it = before.begin(); it != before.end();) {
      const bool waits = std::ranges::any_of(
          it->second, [&](TaskId t) { return before.contains(t); });
      progress |= !waits;
      it = waits ? std::next(it) : before.erase(it);
    }
  }
  return before.empty();
}

// Runs the parts of all ranks' steps. A collective runs when it is next on all
// ranks of its group, a message that has a channel when both its sides are.
class Steps {
 public:
  Steps(const TaskGraph& tasks, const std::vector<TaskId>& order, bool graphs)
      : tasks_(tasks), other_(OtherSides(tasks)) {
    for (DeviceId rank : tasks.group(tasks.world).devices) {
      const RankStep step = StepOf(tasks, order, rank);
      const auto none = std::vector<bool>(step.jobs.size(), false);
      Rank& own = ranks_.emplace_back();
      own.parts = PartsOf(step.jobs, graphs ? step.capturable : none).parts;
      own.done.resize(own.parts.size(), false);
      for (size_t p = 0; p < own.parts.size(); ++p) {
        const StepPart& part = own.parts[p];
        const TaskId id = step.tasks[static_cast<size_t>(part.begin)];
        own.tasks.push_back(id);
        own.streams[part.stream].push_back(p);
        if (!part.captured) sides_[id].push_back({ranks_.size() - 1, p});
      }
    }
  }

  bool End() {
    for (bool progress = true; progress;) {
      progress = false;
      for (size_t r = 0; r < ranks_.size(); ++r) {
        for (const auto& [stream, parts] : ranks_[r].streams) {
          for (size_t p : parts) {
            if (ranks_[r].done[p]) continue;
            const std::vector<Side> together = Together({r, p});
            if (!std::ranges::all_of(
                    together, [&](const Side& side) { return IsNext(side); })) {
              break;
            }
            for (const Side& side : together) {
              ranks_[side.rank].done[side.part] = true;
            }
            progress = true;
          }
        }
      }
    }
    return std::ranges::all_of(ranks_, [](const Rank& rank) {
      return std::ranges::count(rank.done, false) == 0;
    });
  }

 private:
  struct Rank {
    std::vector<StepPart> parts;
    std::vector<TaskId> tasks;  // by part: its first
    std::vector<bool> done;     // by part
    std::map<int, std::vector<size_t>> streams;
  };
  struct Side {
    size_t rank = 0;
    size_t part = 0;
  };

  std::vector<Side> Together(const Side& side) const {
    const Rank& rank = ranks_[side.rank];
    const TaskId id = rank.tasks[side.part];
    const bool meets =
        tasks_.task(id).kind == TaskKind::kComm || other_.contains(id);
    if (rank.parts[side.part].captured || !meets) return {side};
    std::vector<Side> together = sides_.at(id);
    if (const auto other = other_.find(id); other != other_.end()) {
      const std::vector<Side>& theirs = sides_.at(other->second);
      together.insert(together.end(), theirs.begin(), theirs.end());
    }
    return together;
  }

  bool IsNext(const Side& side) const {
    const Rank& rank = ranks_[side.rank];
    const StepPart& part = rank.parts[side.part];
    for (size_t p : rank.streams.at(part.stream)) {
      if (p == side.part) break;
      if (!rank.done[p]) return false;
    }
    return std::ranges::all_of(part.waits, [&](int wait) {
      return rank.done[static_cast<size_t>(wait)];
    });
  }

  const TaskGraph& tasks_;
  const std::map<TaskId, TaskId> other_;  // of messages that meet
  std::vector<Rank> ranks_;
  std::map<TaskId, std::vector<Side>> sides_;  // of tasks outside of graphs
};

std::vector<TaskId> IssueOrder(const TaskGraph& tasks) {
  std::vector<TaskId> order;
  for (size_t t = 0; t < tasks.tasks.size(); ++t) order.emplace_back(t);
  return order;
}

std::optional<TaskGraph> RandomPipeline(Case& c, Rng& rng) {
  c.graph = RandomGraphSpec(rng);
  c.plan = RandomPlanSpec(c.graph, rng);
  if (c.plan.mesh[1] == 0) return std::nullopt;
  const Graph graph = MakeGraph(c.graph);
  const GraphIndex index(graph);
  const Cluster cluster =
      MakeCluster("local-cpu:" + std::to_string(RanksOf(c.plan))).value();
  const std::optional<Plan> plan = MakePlan(index, c.plan);
  if (!plan || !IsValid(index, cluster, *plan)) return std::nullopt;
  return Lower(graph, cluster, *plan, {});
}

TEST(MeetingOrder, NoRandomPipelineStandsStill) {
  Rng rng(3);
  int pipelines = 0;
  int met = 0;
  int stand_still_in_issue_order = 0;
  while (pipelines < 200) {
    Case c;
    const std::optional<TaskGraph> tasks = RandomPipeline(c, rng);
    if (!tasks) continue;
    ++pipelines;
    const auto order = MeetingOrder(*tasks);
    EXPECT_EQ(order.has_value(), HasOrder(*tasks)) << ToText(c);
    if (!order) continue;
    ++met;
    for (bool graphs : {false, true}) {
      EXPECT_TRUE(Steps(*tasks, *order, graphs).End())
          << ToText(c) << (graphs ? ", graphs" : "");
    }
    if (!Steps(*tasks, IssueOrder(*tasks), /*graphs=*/false).End()) {
      ++stand_still_in_issue_order;
    }
  }
  EXPECT_GT(met, pipelines / 3);
  // Memory that is taken over in issue order closes circles.
  EXPECT_GT(stand_still_in_issue_order, met / 10);
}

}  // namespace
}  // namespace tessera
