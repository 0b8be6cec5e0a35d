#include "planner/lower/fingerprint.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "planner/lower/lower.h"
#include "planner/plan/strategy.h"
#include "planner/topology/topologies.h"
#include "tests/support/small_models.h"

namespace tessera {
namespace {

// Two groups, two values and a task in which every list has an entry.
TaskGraph SmallGraph() {
  TaskGraph tasks;
  for (int g : {0, 1}) {
    DeviceGroup group;
    group.name = "g";
    group.devices = {DeviceId(2 * g), DeviceId(2 * g + 1)};
    group.axes = {{.name = "dp", .size = 2, .shares = {1, 2}}};
    tasks.groups.push_back(group);
    Value value;
    value.what = "parameter";
    value.group = GroupId(g);
    value.shape = {4, 6};
    tasks.values.push_back(value);
  }
  Task task;
  task.kernel = "linear";
  task.group = GroupId(0);
  task.reads = {ValueId(0)};
  task.writes = {ValueId(1)};
  task.masks = {1};
  task.deps = {TaskId(0)};
  tasks.tasks = {task, task};
  return tasks;
}

using Change = std::function<void(TaskGraph&)>;

Change OfGroup(const std::function<void(DeviceGroup&)>& change) {
  return [change](TaskGraph& tasks) { change(tasks.groups[0]); };
}
Change OfAxis(const std::function<void(MeshAxis&)>& change) {
  return [change](TaskGraph& tasks) { change(tasks.groups[0].axes[0]); };
}
Change OfValue(const std::function<void(Value&)>& change) {
  return [change](TaskGraph& tasks) { change(tasks.values[1]); };
}
Change OfLayout(const std::function<void(Layout&)>& change) {
  return [change](TaskGraph& tasks) { change(tasks.values[1].layout); };
}
Change OfTask(const std::function<void(Task&)>& change) {
  return [change](TaskGraph& tasks) { change(tasks.tasks[1]); };
}

TEST(FingerprintTest, EveryFieldThatRanksFollowCounts) {
  std::map<std::string, Change> changes = {
      {"a group", [](auto& t) { t.groups.pop_back(); }},
      {"a value", [](auto& t) { t.values.pop_back(); }},
      {"a task", [](auto& t) { t.tasks.pop_back(); }},
      {"world", [](auto& t) { t.world = GroupId(1); }},
      {"loss", [](auto& t) { t.loss = ValueId(1); }},
      {"microbatches", [](auto& t) { t.microbatches = 2; }},
      {"zigzag", [](auto& t) { t.zigzag = 2; }},

      {"devices", OfGroup([](auto& g) { g.devices[0] = DeviceId(7); })},
      {"order",
       OfGroup([](auto& g) { std::swap(g.devices[0], g.devices[1]); })},
      {"axes", OfGroup([](auto& g) { g.axes.pop_back(); })},
      {"axis size", OfAxis([](auto& a) { a.size = 3; })},
      {"axis shares", OfAxis([](auto& a) {
         a.shares = {2, 1};
       })},

      {"what", OfValue([](auto& v) { v.what = "m"; })},
      {"tensor", OfValue([](auto& v) { v.tensor = TensorId(3); })},
      {"value's group", OfValue([](auto& v) { v.group = GroupId(0); })},
      {"shape", OfValue([](auto& v) {
         v.shape = {6, 4};
       })},
      {"sample_offset", OfValue([](auto& v) { v.sample_offset = 1; })},
      {"sample_dim", OfValue([](auto& v) { v.sample_dim = 0; })},
      {"dtype", OfValue([](auto& v) { v.dtype = DType::kFloat16; })},
      {"category",
       OfValue([](auto& v) { v.category = MemoryCategory::kParameter; })},
      {"tier", OfValue([](auto& v) { v.tier = MemoryTier::kHost; })},
      {"persistent", OfValue([](auto& v) { v.persistent = true; })},
      {"alias_of", OfValue([](auto& v) { v.alias_of = ValueId(0); })},

      {"partial", OfLayout([](auto& l) { l.partial = 1; })},
      {"flat", OfLayout([](auto& l) { l.flat = 1; })},
      {"rooted", OfLayout([](auto& l) { l.rooted = 1; })},
      {"even", OfLayout([](auto& l) { l.even = 1; })},
      {"ring", OfLayout([](auto& l) { l.ring = 1; })},
      {"turn", OfLayout([](auto& l) { l.turn = 1; })},
      {"tile's dim", OfLayout([](auto& l) { l.tile.dim = 1; })},
      {"tile's index", OfLayout([](auto& l) { l.tile.index = 1; })},
      {"tile's count", OfLayout([](auto& l) { l.tile.count = 2; })},

      {"kind", OfTask([](auto& t) { t.kind = TaskKind::kSlice; })},
      {"stream", OfTask([](auto& t) { t.stream = StreamRole::kComm; })},
      {"comm", OfTask([](auto& t) { t.comm = CommKind::kAllGather; })},
      {"pass", OfTask([](auto& t) { t.pass = Pass::kBackward; })},
      {"accumulate", OfTask([](auto& t) { t.accumulate = true; })},
      {"adds_microbatches",
       OfTask([](auto& t) { t.adds_microbatches = true; })},
      {"optimizer", OfTask([](auto& t) { t.optimizer = true; })},
      {"after_compute", OfTask([](auto& t) { t.after_compute = true; })},
      {"task's group", OfTask([](auto& t) { t.group = GroupId(1); })},
      {"task's axes", OfTask([](auto& t) { t.axes = 1; })},
      {"microbatch", OfTask([](auto& t) { t.microbatch = 0; })},
      {"node", OfTask([](auto& t) { t.node = NodeId(0); })},
      {"kernel", OfTask([](auto& t) { t.kernel = "gelu"; })},
      {"reads", OfTask([](auto& t) { t.reads[0] = ValueId(1); })},
      {"writes", OfTask([](auto& t) { t.writes[0] = ValueId(0); })},
      {"a read as a write", OfTask([](auto& t) {
         t.reads = {};
         t.writes = {ValueId(0), ValueId(1)};
       })},
      {"masks", OfTask([](auto& t) { t.masks = {0}; })},
      {"peer", OfTask([](auto& t) { t.peer = ValueId(0); })},
      {"deps", OfTask([](auto& t) { t.deps = {}; })},
  };
  for (size_t d = 0; d < kMaxDims; ++d) {
    changes["dimension " + std::to_string(d)] =
        OfLayout([d](auto& l) { l.dims[d] = 1; });
  }
  for (size_t h : {0, 1}) {
    const std::string name = "halo " + std::to_string(h);
    changes[name + " dim"] = OfLayout([h](auto& l) { l.halos[h].dim = 0; });
    changes[name + " before"] =
        OfLayout([h](auto& l) { l.halos[h].before = 1; });
    changes[name + " after"] = OfLayout([h](auto& l) { l.halos[h].after = 1; });
  }
  std::map<uint64_t, std::string> seen = {
      {Fingerprint(SmallGraph()), "no change"}};
  for (const auto& [name, change] : changes) {
    TaskGraph tasks = SmallGraph();
    change(tasks);
    const auto [it, is_new] = seen.try_emplace(Fingerprint(tasks), name);
    EXPECT_TRUE(is_new) << name << " is like " << it->second;
  }
}

TEST(FingerprintTest, NamesAndWhatOnlyPricesDoNot) {
  const std::vector<Change> changes = {
      OfGroup([](auto& g) { g.name = "other"; }),
      OfAxis([](auto& a) { a.name = "tp"; }),
      OfAxis([](auto& a) { a.counted = 1; }),
      OfValue([](auto& v) { v.element_bytes = 8; }),
      OfTask([](auto& t) { t.scratch_of = ValueId(0); }),
      OfTask([](auto& t) { t.scratch_bytes = 4; }),
      OfTask([](auto& t) { t.like = TaskId(0); }),
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    TaskGraph tasks = SmallGraph();
    changes[i](tasks);
    EXPECT_EQ(Fingerprint(tasks), Fingerprint(SmallGraph())) << i;
  }
}

// The same tasks, on other devices.
TEST(FingerprintTest, PlansThatDifferInPlacesAlone) {
  const Graph graph = testing::TwoLayerGraph(8, 4, 6);
  const Cluster cluster = MakeCluster("local-cpu:4").value();
  const auto fingerprint = [&](const std::string& strategy) {
    const Plan plan =
        PlanFromStrategy(graph, cluster, ParseStrategy(strategy).value())
            .value();
    return Fingerprint(Lower(graph, cluster, plan, {}));
  };
  EXPECT_EQ(fingerprint("dp=2,pp=2"), fingerprint("dp=2,pp=2"));
  EXPECT_NE(fingerprint("dp=2,pp=2"),
            fingerprint("dp=2,pp=2,order=tp-cp-ep-pp-dp"));
}

}  // namespace
}  // namespace tessera
