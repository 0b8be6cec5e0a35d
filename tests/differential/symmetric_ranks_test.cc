// Folding symmetric ranks changes nothing: the simulator, whose tasks are those
// of whole device groups, against a simulation of every rank by itself. There a
// kernel is one rank's, a collective one subgroup's, a send one pair's, and
// each loads links of its own; nothing is folded or remembered. Without sharing
// of links all times are equal to the picosecond, with it to 1e-9.

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <tuple>

#include "costmodel/collective/collective.h"
#include "costmodel/link/fair_share.h"
#include "costmodel/simulate/simulator.h"
#include "planner/io/importer.h"
#include "planner/lower/lower.h"
#include "planner/plan/strategy.h"
#include "planner/topology/topologies.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

// A task on the ranks that do it together.
struct Unit {
  Duration duration;
  std::vector<LinkUse> uses;
  std::vector<size_t> follows;  // units that end before it starts
  Duration start;
  Duration end;
};

class RankSimulation {
 public:
  RankSimulation(const Cluster& cluster, const Pricer& pricer,
                 const TaskGraph& tasks)
      : cluster_(cluster),
        pricer_(pricer),
        tasks_(tasks),
        costs_(PriceTasks(pricer, tasks)),
        collectives_(cluster),
        at_(tasks.tasks.size()) {
    for (size_t t = 0; t < tasks.tasks.size(); ++t) AddTask(t);
  }

  // Calls check(task, unit) for every unit, timed.
  template <typename F>
  void Run(bool share_links, const F& check) {
    std::vector<size_t> waits_for(units_.size());
    std::vector<std::vector<size_t>> followers(units_.size());
    std::vector<size_t> ready;
    for (size_t u = 0; u < units_.size(); ++u) {
      waits_for[u] = units_[u].follows.size();
      for (size_t before : units_[u].follows) followers[before].push_back(u);
      if (waits_for[u] == 0) ready.push_back(u);
    }
    struct Active {
      size_t unit = 0;
      double rate = 1;
      double remaining = 0;
      Duration since;
    };
    std::vector<Active> active;
    Duration now;
    while (!ready.empty() || !active.empty()) {
      for (size_t u : ready) {
        units_[u].start = now;
        units_[u].end = now + units_[u].duration;
        active.push_back(
            {u, 1, static_cast<double>(units_[u].duration.picoseconds), now});
      }
      ready.clear();
      if (share_links) {
        std::vector<std::vector<LinkUse>> uses;
        for (const Active& a : active) uses.push_back(units_[a.unit].uses);
        const std::vector<double> rates = MaxMinRates(uses);
        for (size_t i = 0; i < active.size(); ++i) {
          const double rate = rates[i] * (1 + 1e-9) >= 1 ? 1 : rates[i];
          Active& a = active[i];
          if (rate == a.rate) continue;
          a.remaining -=
              a.rate * static_cast<double>((now - a.since).picoseconds);
          a.rate = rate;
          a.since = now;
          units_[a.unit].end = now + Duration{static_cast<int64_t>(std::ceil(
                                         std::max(0.0, a.remaining) / rate))};
        }
      }
      now = units_[active[0].unit].end;
      for (const Active& a : active) {
        if (units_[a.unit].end < now) now = units_[a.unit].end;
      }
      std::erase_if(active, [&](const Active& a) {
        if (units_[a.unit].end != now) return false;
        for (size_t next : followers[a.unit]) {
          if (--waits_for[next] == 0) ready.push_back(next);
        }
        return true;
      });
    }
    for (size_t t = 0; t < at_.size(); ++t) {
      for (const auto& [device, unit] : at_[t]) check(t, units_[unit]);
    }
  }

 private:
  void AddTask(size_t t) {
    const Task& task = tasks_.tasks[t];
    const DeviceGroup& group = tasks_.group(task.group);
    if (task.kind == TaskKind::kComm) {
      for (const std::vector<int>& positions : Subgroups(group, task.axes)) {
        std::vector<DeviceId> devices;
        for (int p : positions) {
          devices.push_back(group.devices[static_cast<size_t>(p)]);
        }
        AddUnit(t, devices, UsesOf(t, task.comm, devices));
      }
      return;
    }
    for (size_t p = 0; p < group.devices.size(); ++p) {
      std::vector<LinkUse> uses;
      if (task.kind == TaskKind::kSend) {
        const DeviceGroup& to = tasks_.group(tasks_.value(task.peer).group);
        TESSERA_CHECK(to.devices.size() == group.devices.size());
        uses =
            UsesOf(t, CommKind::kSendRecv, {group.devices[p], to.devices[p]});
      }
      AddUnit(t, {group.devices[p]}, uses);
    }
  }

  void AddUnit(size_t t, const std::vector<DeviceId>& devices,
               std::vector<LinkUse> uses) {
    const Task& task = tasks_.tasks[t];
    const size_t number = units_.size();
    Unit unit;
    unit.duration = costs_[t].duration;
    unit.uses = std::move(uses);
    for (DeviceId device : devices) {
      at_[t][device] = number;
      const AxisSet axes = task.stream == StreamRole::kComm ? task.axes : 0;
      const auto [last, is_first] = last_.try_emplace(
          std::tuple(device, task.group, task.stream, axes), number);
      if (!is_first) unit.follows.push_back(last->second);
      last->second = number;
      for (TaskId dep : task.deps) AddDependency(t, device, dep, unit);
    }
    units_.push_back(std::move(unit));
  }

  void AddDependency(size_t t, DeviceId device, TaskId dep, Unit& unit) {
    const auto& units = at_[dep.index()];
    if (const auto it = units.find(device); it != units.end()) {
      unit.follows.push_back(it->second);
    } else if (tasks_.tasks[t].kind == TaskKind::kRecv) {
      // What the rank in its place sends.
      const auto& own = tasks_.group(tasks_.tasks[t].group).devices;
      const auto& peers = tasks_.group(tasks_.task(dep).group).devices;
      const auto place =
          std::find(own.begin(), own.end(), device) - own.begin();
      unit.follows.push_back(units.at(peers[static_cast<size_t>(place)]));
    } else {
      for (const auto& [other, number] : units) unit.follows.push_back(number);
    }
  }

  // Of one subgroup or pair, by the algorithm that the whole group's task has.
  std::vector<LinkUse> UsesOf(size_t t, CommKind kind,
                              const std::vector<DeviceId>& devices) {
    const Task& task = tasks_.tasks[t];
    TaskView view;
    view.task = &task;
    view.values = tasks_.values;
    view.group = &tasks_.group(task.group);
    if (task.kind == TaskKind::kSend) {
      view.peer = &tasks_.value(task.peer);
      view.peer_group = &tasks_.group(view.peer->group);
    }
    const Bytes payload = PayloadOf(view);
    const std::vector<std::vector<DeviceId>> subgroups = {devices};
    const CollectiveOption& option =
        CollectiveModel::Best(collectives_.Options(kind, subgroups), payload);
    std::vector<LinkUse> uses;
    for (const LinkLoad& load :
         collectives_.Loads(kind, subgroups, option.algorithm)) {
      const Link& link = cluster_.links[load.link.index()];
      const double share =
          load.bytes_per_payload_byte * static_cast<double>(payload.value) /
          (cluster_.link_types[static_cast<size_t>(link.type)].bandwidth.value *
           costs_[t].duration.seconds());
      if (share > 0) uses.push_back({load.link, std::min(share, 1.0)});
    }
    return uses;
  }

  const Cluster& cluster_;
  const Pricer& pricer_;
  const TaskGraph& tasks_;
  std::vector<TaskCost> costs_;
  CollectiveModel collectives_;
  std::vector<Unit> units_;
  std::vector<std::map<DeviceId, size_t>> at_;  // by task
  std::map<std::tuple<DeviceId, GroupId, StreamRole, AxisSet>, size_t> last_;
};

// How much longer sharing links makes the step.
double Check(std::string_view topology, std::string_view strategy) {
  SCOPED_TRACE(std::string(topology) + " " + std::string(strategy));
  ImportOptions options;
  options.global_batch = 32;
  options.seq_len = 128;
  const Graph graph =
      Differentiate(
          ImportModel(ExamplePath("models/gpt2-tiny/config.json"), options)
              .value())
          .value();
  const Cluster cluster = MakeCluster(topology).value();
  const Plan plan =
      PlanFromStrategy(graph, cluster, ParseStrategy(strategy).value()).value();
  const TaskGraph tasks = Lower(graph, cluster, plan, TrainingOptions());
  const Pricer pricer(graph, cluster, nullptr);
  RankSimulation ranks(cluster, pricer, tasks);

  const Timeline alone = Simulate(pricer, tasks, {.share_links = false});
  ranks.Run(false, [&](size_t t, const Unit& unit) {
    EXPECT_EQ(unit.start, alone.spans[t].start) << t;
    EXPECT_EQ(unit.end, alone.spans[t].end) << t;
  });
  const Timeline shared = Simulate(pricer, tasks);
  const double tolerance =
      1e-9 * static_cast<double>(shared.step_time.picoseconds);
  ranks.Run(true, [&](size_t t, const Unit& unit) {
    EXPECT_NEAR(static_cast<double>(unit.start.picoseconds),
                static_cast<double>(shared.spans[t].start.picoseconds),
                tolerance)
        << t;
    EXPECT_NEAR(static_cast<double>(unit.end.picoseconds),
                static_cast<double>(shared.spans[t].end.picoseconds), tolerance)
        << t;
  });
  return shared.step_time.seconds() / alone.step_time.seconds() - 1;
}

TEST(SymmetricRanks, FoldToTheSameTimes) {
  Check("dgx-a100-80gb:1", "tp=2,mbs=2,zero=1");
  Check("dgx-a100-80gb:2", "pp=2,tp=2,mbs=1,zero=2,sp=1");
  Check("dgx-h100:2", "pp=2,tp=4,mbs=2,schedule=zb-h1");
  // One NIC for all ranks of a host: what crosses hosts at one time shares it.
  EXPECT_GT(Check("g4dn.12xlarge:4", "pp=2,mbs=1,order=tp-cp-ep-dp-pp"), 1e-3);
  EXPECT_GT(Check("g4dn.12xlarge:4", "pp=4,mbs=1,zero=3"), 1e-3);
  EXPECT_GT(Check("g5.48xlarge:2", "pp=2,tp=2,mbs=1,zero=2"), 1e-3);
}

}  // namespace
}  // namespace tessera
