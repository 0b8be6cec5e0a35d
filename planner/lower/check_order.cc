#include "planner/lower/check_order.h"

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <tuple>

namespace tessera {
namespace {

// More problems of one kind tell nothing more.
constexpr int kMost = 4;

class Checker {
 public:
  Checker(const TaskGraph& tasks, const Graph& graph)
      : tasks_(tasks), graph_(graph) {}

  std::vector<Error> Run() {
    FindStreams();
    CheckTransfers();
    CheckLifetimes();
    CheckRaces();
    const size_t before = errors_.size();
    CheckDeadlock(false);
    if (errors_.size() == before) CheckDeadlock(true);
    return std::move(errors_);
  }

 private:
  std::string Name(size_t task) const {
    return "task " + std::to_string(task) + " '" +
           NameOf(tasks_, graph_, TaskId(task)) + "' of group '" +
           tasks_.group(tasks_.tasks[task].group).name + "'";
  }

  void Fail(int& count, size_t task, std::string message) {
    if (count++ < kMost) {
      errors_.push_back(InvalidInput(std::move(message), Name(task)));
    }
  }

  // Numbers the streams: (group, role), of collectives (group, role, axes).
  void FindStreams() {
    std::map<std::tuple<GroupId, StreamRole, AxisSet>, int> numbers;
    for (const Task& task : tasks_.tasks) {
      const AxisSet axes = task.stream == StreamRole::kComm ? task.axes : 0;
      const auto [it, is_new] =
          numbers.try_emplace({task.group, task.stream, axes}, streams_);
      if (is_new) ++streams_;
      stream_of_.push_back(it->second);
    }
  }

  // ---- transfers

  void CheckTransfers() {
    int count = 0;
    message_of_.assign(tasks_.tasks.size(), -1);
    std::map<std::pair<ValueId, ValueId>, size_t> sends;  // from, to
    for (size_t t = 0; t < tasks_.tasks.size(); ++t) {
      const Task& task = tasks_.tasks[t];
      if (task.kind != TaskKind::kSend) continue;
      if (!task.peer.valid()) {
        Fail(count, t, "nobody receives it");
      } else if (!sends.emplace(std::pair(task.reads[0], task.peer), t)
                      .second) {
        Fail(count, t, "the same is sent twice");
      }
    }
    for (size_t t = 0; t < tasks_.tasks.size(); ++t) {
      const Task& task = tasks_.tasks[t];
      if (task.kind != TaskKind::kRecv) continue;
      const auto send = task.peer.valid()
                            ? sends.find({task.peer, task.writes[0]})
                            : sends.end();
      if (send == sends.end()) {
        Fail(count, t, "nobody sends it");
        continue;
      }
      message_of_[t] = static_cast<int64_t>(send->second);
      const Task& sender = tasks_.tasks[send->second];
      const Value& from = tasks_.value(task.peer);
      const Value& to = tasks_.value(task.writes[0]);
      if (from.tensor != to.tensor || from.shape != to.shape ||
          from.dtype != to.dtype || from.sample_offset != to.sample_offset) {
        Fail(count, t, "is not what " + Name(send->second) + " sends");
      }
      if (sender.group != from.group || task.group != to.group ||
          sender.group == task.group) {
        Fail(count, t, "is not between the groups of its values");
      }
      sends.erase(send);
    }
    for (const auto& [values, t] : sends) Fail(count, t, "nobody receives it");
  }

  // ---- lifetimes

  void CheckLifetimes() {
    int count = 0;
    // The name under which a root was written last, by (root, group): the
    // world's values have a copy on every group.
    std::map<std::pair<ValueId, GroupId>, ValueId> name_of;
    for (size_t t = 0; t < tasks_.tasks.size(); ++t) {
      const Task& task = tasks_.tasks[t];
      for (ValueId read : task.reads) {
        const ValueId root = tasks_.Root(read);
        const auto written = name_of.find({root, task.group});
        if (written == name_of.end()) {
          // The world's sums are written group by group.
          if (!tasks_.value(root).persistent && task.group != tasks_.world) {
            Fail(count, t, "reads what was never written");
          }
        } else if (written->second != read &&
                   // (Another name of the value that was written is that.)
                   tasks_.value(read).alias_of != written->second) {
          Fail(count, t, "reads a buffer that has become another value");
        }
      }
      for (ValueId write : task.writes) {
        name_of[{tasks_.Root(write), task.group}] = write;
      }
    }
  }

  // ---- races

  // Whether task `a` has ended before `b` starts, by streams, dependencies and
  // messages; clocks_ has `b`.
  bool Before(size_t a, size_t b) const {
    return clocks_[b * static_cast<size_t>(streams_) +
                   static_cast<size_t>(stream_of_[a])] >=
           static_cast<int64_t>(a);
  }

  // A clock for each task: by stream the last task that ends before it starts.
  void CheckRaces() {
    int count = 0;
    const auto n = static_cast<size_t>(streams_);
    clocks_.assign(tasks_.tasks.size() * n, -1);
    std::vector<int64_t> last(n, -1);  // by stream
    struct Uses {
      int64_t writer = -1;
      std::vector<size_t> readers;
    };
    std::map<std::pair<ValueId, GroupId>, Uses> uses;
    for (size_t t = 0; t < tasks_.tasks.size(); ++t) {
      const Task& task = tasks_.tasks[t];
      int64_t* const clock = clocks_.data() + t * n;
      const auto follow = [&](int64_t before) {
        if (before < 0) return;
        const int64_t* const other =
            clocks_.data() + static_cast<size_t>(before) * n;
        for (size_t s = 0; s < n; ++s) clock[s] = std::max(clock[s], other[s]);
        int64_t& own =
            clock[static_cast<size_t>(stream_of_[static_cast<size_t>(before)])];
        own = std::max(own, before);
      };
      int64_t& previous = last[static_cast<size_t>(stream_of_[t])];
      follow(previous);
      for (TaskId dep : task.deps) follow(dep.value);
      if (message_of_[t] >= 0) follow(message_of_[t]);
      previous = static_cast<int64_t>(t);
      const auto check = [&](int64_t other) {
        if (other >= 0 && !Before(static_cast<size_t>(other), t)) {
          Fail(count, t,
               "races with " + Name(static_cast<size_t>(other)) +
                   ": nothing orders their use of a buffer");
        }
      };
      // What every group has a copy of is followed by group.
      for (ValueId read : task.reads) {
        Uses& use = uses[{tasks_.Root(read), task.group}];
        check(use.writer);
        use.readers.push_back(t);
      }
      for (ValueId write : task.writes) {
        Uses& use = uses[{tasks_.Root(write), task.group}];
        check(use.writer);
        for (size_t reader : use.readers) {
          if (reader != t) check(static_cast<int64_t>(reader));
        }
        use.readers.clear();
        use.writer = static_cast<int64_t>(t);
      }
    }
  }

  // ---- deadlock

  // Ranks of the same groups run the same tasks in the same order. Numbers
  // these kinds of ranks and lists them by group.
  std::vector<std::vector<size_t>> RankKindsByGroup(size_t& kinds) const {
    std::map<DeviceId, std::vector<size_t>> groups_of;
    for (size_t g = 0; g < tasks_.groups.size(); ++g) {
      for (DeviceId device : tasks_.groups[g].devices) {
        groups_of[device].push_back(g);
      }
    }
    std::map<std::vector<size_t>, size_t> numbers;
    std::vector<std::vector<size_t>> by_group(tasks_.groups.size());
    for (const auto& [device, groups] : groups_of) {
      const auto [it, is_new] = numbers.try_emplace(groups, numbers.size());
      if (!is_new) continue;
      for (size_t g : groups) by_group[g].push_back(it->second);
    }
    kinds = numbers.size();
    return by_group;
  }

  // Every rank has a queue for each stream, or `one_queue` for all of them. A
  // task runs when it is at the head of its queue on all ranks of its group.
  void CheckDeadlock(bool one_queue) {
    size_t kinds = 0;
    const auto kinds_of_group = RankKindsByGroup(kinds);
    const size_t streams = one_queue ? 1 : static_cast<size_t>(streams_);
    std::vector<std::deque<size_t>> queues(kinds * streams);
    const auto for_each_queue = [&](size_t t, const auto& visit) {
      const auto stream = one_queue ? 0 : static_cast<size_t>(stream_of_[t]);
      for (size_t kind : kinds_of_group[tasks_.tasks[t].group.index()]) {
        visit(queues[kind * streams + stream]);
      }
    };
    for (size_t t = 0; t < tasks_.tasks.size(); ++t) {
      for_each_queue(t, [&](auto& queue) { queue.push_back(t); });
    }
    std::vector<bool> done(tasks_.tasks.size(), false);
    const auto ready = [&](size_t t) {
      bool at_head = true;
      for_each_queue(t, [&](const auto& queue) {
        at_head = at_head && queue.front() == t;
      });
      const auto& deps = tasks_.tasks[t].deps;
      return at_head &&
             (message_of_[t] < 0 ||
              done[static_cast<size_t>(message_of_[t])]) &&
             std::all_of(deps.begin(), deps.end(),
                         [&](TaskId dep) { return done[dep.index()]; });
    };
    for (bool progress = true; progress;) {
      progress = false;
      for (auto& queue : queues) {
        while (!queue.empty() && ready(queue.front())) {
          const size_t t = queue.front();
          for_each_queue(t, [](auto& other) { other.pop_front(); });
          done[t] = true;
          progress = true;
        }
      }
    }
    int count = 0;
    std::set<size_t> blocked;
    for (const auto& queue : queues) {
      if (!queue.empty()) blocked.insert(queue.front());
    }
    for (size_t t : blocked) {
      Fail(count, t, "deadlock: its ranks wait here forever");
    }
  }

  const TaskGraph& tasks_;
  const Graph& graph_;
  std::vector<Error> errors_;
  int streams_ = 0;
  std::vector<int> stream_of_;
  std::vector<int64_t> message_of_;  // kRecv: the send
  std::vector<int64_t> clocks_;      // by task and stream
};

}  // namespace

std::vector<Error> CheckOrder(const TaskGraph& tasks, const Graph& graph) {
  return Checker(tasks, graph).Run();
}

}  // namespace tessera
