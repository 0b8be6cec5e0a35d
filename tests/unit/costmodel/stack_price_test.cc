// Prices of what a stack's software sends and gathers.

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "costmodel/price.h"
#include "costmodel/whatif/degrade.h"
#include "planner/ir/cluster_lookup.h"
#include "planner/topology/topologies.h"
#include "tests/support/small_models.h"

namespace tessera {
namespace {

// Two stages of four ranks, alike but for the host.
class StackPriceTest : public ::testing::Test {
 protected:
  StackPriceTest()
      : graph_(testing::MlpGraph(1, 8, 4, 8, 16, 32)),
        cluster_(*MakeCluster("dgx-a100-80gb:2")) {
    for (int d = 0; d < 4; ++d) {
      here_.devices.push_back(DeviceId(d));
      there_.devices.push_back(DeviceId(8 + d));
    }
    here_.axes = there_.axes = {{"tp", 4}};
  }

  static Value WholeOf(int64_t elements, MemoryCategory category) {
    Value value;
    value.shape = {elements};
    value.category = category;
    return value;
  }

  TaskView ViewOf(const Pricer& pricer, const Task& task,
                  std::span<const Value> values, const DeviceGroup& group,
                  const Value* peer) {
    TaskView view;
    view.task = &task;
    view.values = values;
    view.group = &group;
    view.group_class = pricer.ClassOf(group);
    if (peer != nullptr) {
      view.peer = peer;
      view.peer_group = &there_;
      view.pair_class = pricer.ClassOf(group, &there_);
    }
    return view;
  }

  double Price(const Task& task, std::span<const Value> values,
               const DeviceGroup& group, const Value* peer = nullptr) {
    const Pricer pricer(graph_, cluster_, profile_ ? &*profile_ : nullptr, {},
                        whole_ ? &*whole_ : nullptr);
    return pricer.Price(ViewOf(pricer, task, values, group, peer))
        .duration.seconds();
  }

  static Task SendTask(Pass pass) {
    Task task;
    task.kind = TaskKind::kSend;
    task.comm = CommKind::kSendRecv;
    task.pass = pass;
    task.reads = {ValueId(0)};
    return task;
  }

  double Send(int64_t elements, Pass pass) {
    const Value value = WholeOf(elements, MemoryCategory::kActivation);
    return Price(SendTask(pass), {&value, 1}, here_, &value);
  }

  // The most bytes that a forward send brings over a link between vertices of
  // which names begin so.
  double MostBytes(int64_t elements, std::string_view from,
                   std::string_view to) {
    const Value value = WholeOf(elements, MemoryCategory::kActivation);
    const Task task = SendTask(Pass::kForward);
    const Pricer pricer(graph_, cluster_, nullptr, {}, nullptr);
    const TaskView view = ViewOf(pricer, task, {&value, 1}, here_, &value);
    const Duration duration = pricer.Price(view).duration;
    double most = 0;
    for (const LinkUse& use : pricer.LinkUses(view, duration)) {
      const Link& link = cluster_.links[use.link.index()];
      if (!cluster_.vertices[link.from.index()].name.starts_with(from) ||
          !cluster_.vertices[link.to.index()].name.starts_with(to)) {
        continue;
      }
      most = std::max(most, use.utilisation * duration.seconds() *
                                TypeOf(cluster_, link).bandwidth.value);
    }
    return most;
  }

  // Of so many parameters with as many elements each, cut over the ranks.
  double Collective(CommKind kind, MemoryCategory category, int parameters,
                    int64_t elements) {
    std::vector<Value> values;
    Task task;
    task.kind = TaskKind::kComm;
    task.comm = kind;
    task.axes = 1;
    const bool gathers = kind == CommKind::kAllGather;
    for (int p = 0; p < parameters; ++p) {
      Value cut = WholeOf(elements, category);
      cut.layout.flat = 1;
      Value whole = WholeOf(elements, category);
      if (!gathers) whole.layout.partial = 1;
      task.reads.push_back(ValueId(2 * p));
      task.writes.push_back(ValueId(2 * p + 1));
      values.push_back(gathers ? cut : whole);
      values.push_back(gathers ? whole : cut);
    }
    return Price(task, values, there_);
  }

  // Of one kind, which takes a nanosecond a byte.
  void Measure(CommKind kind, int ranks, int nodes) {
    if (!profile_) profile_.emplace();
    for (const int64_t bytes : {1'000'000, 1'000'000'000}) {
      profile_->rows[CollectiveKey(kind, cluster_.device_types[0].name, ranks,
                                   nodes, {bytes})] = {
          1e-9 * static_cast<double>(bytes), 0, 5};
    }
  }

  std::optional<ProfileDb> profile_;
  Graph graph_;
  Cluster cluster_;
  std::optional<Cluster> whole_;
  DeviceGroup here_;
  DeviceGroup there_;
};

// Each of the four ranks that have an activation alike sends a quarter of it,
// and the receivers gather the quarters.
TEST_F(StackPriceTest, SendsCrossInParts) {
  constexpr int64_t kElements = int64_t{1} << 22;
  constexpr auto kActivation = MemoryCategory::kActivation;
  const double whole = Send(kElements, Pass::kForward);
  const double quarter = Send(kElements / 4, Pass::kForward);
  const double gather =
      Collective(CommKind::kAllGather, kActivation, 1, kElements);
  ASSERT_GT(whole, quarter + gather);
  cluster_.stack.split_sends = SplitSends::kForward;
  EXPECT_NEAR(Send(kElements, Pass::kForward), quarter + gather, 2e-12);
  EXPECT_EQ(Send(kElements, Pass::kBackward), whole);
  cluster_.stack.split_sends = SplitSends::kAlways;
  EXPECT_NEAR(Send(kElements, Pass::kBackward), quarter + gather, 2e-12);
}

// Of four ranks' four times 16 MiB two NICs of a PCIe switch carry half each;
// in parts a quarter of that, and then each receiver sends three quarters of
// the 16 MiB on to others through its switch.
TEST_F(StackPriceTest, SendsInPartsLoadTheLinksOfTheGather) {
  constexpr int64_t kElements = int64_t{1} << 22;
  constexpr double kBytes = 4.0 * kElements;
  EXPECT_NEAR(MostBytes(kElements, "node0.nic", "leaf"), kBytes, 1);
  EXPECT_EQ(MostBytes(kElements, "node1.gpu", "node1.nvswitch"), 0);
  cluster_.stack.split_sends = SplitSends::kForward;
  EXPECT_NEAR(MostBytes(kElements, "node0.nic", "leaf"), kBytes / 4, 1);
  EXPECT_NEAR(MostBytes(kElements, "node1.gpu", "node1.nvswitch"),
              0.75 * kBytes, 1);
}

// Lists of four tensors for each of two parameters: 2 * 4 * 10 us. Small
// parameters are not cut in truth, nor are activations parameters.
TEST_F(StackPriceTest, TheHostMakesListsOfShards) {
  constexpr auto kGather = CommKind::kAllGather;
  constexpr auto kScatter = CommKind::kReduceScatter;
  constexpr auto kParameter = MemoryCategory::kParameter;
  constexpr auto kGradient = MemoryCategory::kGradient;
  constexpr auto kActivation = MemoryCategory::kActivation;
  constexpr int64_t kElements = 1'000'000;
  const double gather = Collective(kGather, kParameter, 2, kElements);
  const double scatter = Collective(kScatter, kGradient, 2, kElements);
  const double small = Collective(kGather, kParameter, 2, 99'996);
  const double others = Collective(kGather, kActivation, 2, kElements);
  cluster_.stack.host_per_shard = Duration::FromSeconds(1e-5);
  EXPECT_NEAR(Collective(kGather, kParameter, 2, kElements), gather + 8e-5,
              2e-12);
  EXPECT_NEAR(Collective(kScatter, kGradient, 2, kElements), scatter + 8e-5,
              2e-12);
  EXPECT_EQ(Collective(kGather, kParameter, 2, 99'996), small);
  EXPECT_EQ(Collective(kGather, kActivation, 2, kElements), others);
}

// What the stack makes of collectives it makes of measured ones, too. 16 MiB
// at a nanosecond a byte, or at most at 0.5 GB/s.
TEST_F(StackPriceTest, MeasuredCollectivesAreTheStacks) {
  constexpr int64_t kElements = int64_t{1} << 22;
  constexpr double kMeasured = 4e-9 * kElements;
  constexpr auto kGather = CommKind::kAllGather;
  constexpr auto kActivation = MemoryCategory::kActivation;
  constexpr auto kParameter = MemoryCategory::kParameter;
  Measure(kGather, 4, 1);
  EXPECT_NEAR(Collective(kGather, kActivation, 1, kElements), kMeasured, 2e-12);
  cluster_.stack.tensor_exposed = 0.25;
  EXPECT_NEAR(Collective(kGather, kActivation, 1, kElements), kMeasured / 4,
              2e-12);
  EXPECT_NEAR(Collective(kGather, kParameter, 1, kElements), kMeasured, 2e-12);
  cluster_.stack.sharded_bandwidth = {0.5e9};
  cluster_.stack.host_per_shard = Duration::FromSeconds(1e-5);
  EXPECT_NEAR(Collective(kGather, kParameter, 1, kElements),
              2 * kMeasured + 4e-5, 2e-12);
}

// A quarter is sent, and the whole gathered.
TEST_F(StackPriceTest, MeasuredSendsCrossInParts) {
  constexpr int64_t kElements = int64_t{1} << 22;
  constexpr double kMeasured = 4e-9 * kElements;
  Measure(CommKind::kSendRecv, 2, 2);
  Measure(CommKind::kAllGather, 4, 1);
  EXPECT_NEAR(Send(kElements, Pass::kForward), kMeasured, 2e-12);
  cluster_.stack.split_sends = SplitSends::kForward;
  EXPECT_NEAR(Send(kElements, Pass::kForward), 1.25 * kMeasured, 2e-12);
}

// As many times as long as by the model, whatever it was that failed: seven of
// the eight NICs of the host, or a host beside.
TEST_F(StackPriceTest, MeasuredSendsWaitForWhatFailed) {
  constexpr int64_t kElements = int64_t{1} << 22;
  const Cluster sound = *MakeCluster("dgx-a100-80gb:3");
  cluster_ = sound;
  const double usual = Send(kElements, Pass::kForward);
  std::vector<std::string> failed = {"node2"};
  for (int nic = 1; nic < 8; ++nic) {
    failed.push_back("node0.nic" + std::to_string(nic));
  }
  std::vector<std::string> notes;
  Cluster whole;
  ASSERT_TRUE(Fail(failed, cluster_, notes, &whole));
  const auto name_of = [](const Cluster& cluster, size_t device) {
    return cluster.vertices[cluster.devices[device].vertex.index()].name;
  };
  ASSERT_EQ(whole.devices.size(), cluster_.devices.size());
  for (size_t d = 0; d < whole.devices.size(); ++d) {
    EXPECT_EQ(name_of(whole, d), name_of(cluster_, d));
  }
  EXPECT_GT(whole.vertices.size(), cluster_.vertices.size());
  const double slower = Send(kElements, Pass::kForward) / usual;
  ASSERT_GT(slower, 1.5);
  Measure(CommKind::kSendRecv, 2, 2);
  const double measured = Send(kElements, Pass::kForward);
  whole_ = whole;
  EXPECT_NEAR(Send(kElements, Pass::kForward) / measured, slower, 1e-6);
  cluster_ = sound;
  whole_.reset();
  ASSERT_TRUE(Fail({"node2"}, cluster_, notes, &whole));
  whole_ = whole;
  EXPECT_EQ(Send(kElements, Pass::kForward), measured);
}

}  // namespace
}  // namespace tessera
