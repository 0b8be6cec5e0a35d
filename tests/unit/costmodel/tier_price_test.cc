// Prices of what goes between memory tiers, and of steps on the host.

#include <gtest/gtest.h>

#include "costmodel/price.h"
#include "planner/topology/topologies.h"
#include "tests/support/small_models.h"

namespace tessera {
namespace {

// Eight devices that share a host: each copies 12.6 GB/s to and from the host
// (half of a PCIe 4 switch's 25.2); its eighth of the storage reads 56 / 8 = 7
// GB/s and writes 30.4 / 8 = 3.8, and of the memory, 80 % of 409.6 GB/s, moves
// 327.68 / 8 = 40.96.
class TierPriceTest : public ::testing::Test {
 protected:
  TierPriceTest()
      : graph_(testing::MlpGraph(1, 8, 4, 8, 16, 32)),
        cluster_(*MakeCluster("dgx-a100-80gb:1")),
        pricer_(graph_, cluster_, nullptr) {
    for (int d = 0; d < 8; ++d) group_.devices.push_back(DeviceId(d));
    group_.axes = {{"dp", 8}};
  }

  // A value of so many fp32 elements on each device.
  ValueId Add(int64_t elements, MemoryTier tier) {
    Value value;
    value.shape = {elements};
    value.tier = tier;
    values_.push_back(value);
    return ValueId(values_.size() - 1);
  }

  TaskCost Price(TaskKind kind, std::string_view kernel,
                 std::vector<ValueId> reads, std::vector<ValueId> writes) {
    Task task;
    task.kind = kind;
    task.kernel = kernel;
    task.reads = std::move(reads);
    task.writes = std::move(writes);
    TaskView view;
    view.task = &task;
    view.values = values_;
    view.group = &group_;
    view.group_class = pricer_.ClassOf(group_);
    return pricer_.Price(view);
  }

  TaskCost PriceCopy(int64_t elements, MemoryTier from, MemoryTier to) {
    return Price(TaskKind::kCopy, "", {Add(elements, from)},
                 {Add(elements, to)});
  }

  static constexpr auto kDevice = MemoryTier::kDevice;
  static constexpr auto kHost = MemoryTier::kHost;
  static constexpr auto kFile = MemoryTier::kFile;

  Graph graph_;
  Cluster cluster_;
  Pricer pricer_;
  DeviceGroup group_;
  std::vector<Value> values_;
};

TEST_F(TierPriceTest, CopiesTakeTheirLink) {
  const auto ms = [](double n) { return Duration::FromSeconds(n * 1e-3); };
  // 12.6e6 * 4 bytes / 12.6 GB/s = 4 ms, either way.
  EXPECT_EQ(PriceCopy(12'600'000, kDevice, kHost).duration, ms(4));
  EXPECT_EQ(PriceCopy(12'600'000, kHost, kDevice).duration, ms(4));
  // 9.5e6 * 4 / 3.8 GB/s = 10 ms; 8.75e6 * 4 / 7 GB/s = 5 ms.
  EXPECT_EQ(PriceCopy(9'500'000, kHost, kFile).duration, ms(10));
  EXPECT_EQ(PriceCopy(8'750'000, kFile, kHost).duration, ms(5));
  EXPECT_EQ(PriceCopy(8'750'000, kFile, kHost).source, CostSource::kAnalytical);
}

// Of 10.24e6 elements a cast reads 4 bytes each and writes 4: 81.92e6 bytes at
// 40.96 GB/s. AdamW reads the gradient, and reads and writes parameter and both
// moments: (4 + 2 * 12) * 10.24e6 / 40.96e9 = 7 ms.
TEST_F(TierPriceTest, StepsOnTheHostMoveItsMemory) {
  const int64_t n = 10'240'000;
  EXPECT_EQ(Price(TaskKind::kCompute, "cast", {Add(n, kHost)}, {Add(n, kHost)})
                .duration,
            Duration::FromSeconds(2e-3));
  EXPECT_EQ(Price(TaskKind::kCompute, "adamw", {Add(n, kHost)},
                  {Add(n, kHost), Add(n, kHost), Add(n, kHost)})
                .duration,
            Duration::FromSeconds(7e-3));
}

// What is added to is read, too: 3 * 4 bytes of each element, at 40.96 GB/s.
TEST_F(TierPriceTest, SumsOnTheHostMoveItsMemory) {
  const int64_t n = 10'240'000;
  EXPECT_EQ(Price(TaskKind::kCompute, "sum", {Add(n, kHost)}, {Add(n, kHost)})
                .duration,
            Duration::FromSeconds(3e-3));
}

// Where the devices are the host's cores both memories are one: read and
// written by the core, at 80 % of 10 GB/s, behind 1 us to start. 4e6 elements:
// 2 * 16e6 / 8e9 = 4 ms.
TEST_F(TierPriceTest, CoresCopyWithinOneMemory) {
  const Cluster cpu = *MakeCluster("local-cpu:1");
  const Pricer pricer(graph_, cpu, nullptr);
  group_ = {"one", {DeviceId(0)}, {}};
  Task task;
  task.kind = TaskKind::kCopy;
  task.reads = {Add(4'000'000, kDevice)};
  task.writes = {Add(4'000'000, kHost)};
  TaskView view;
  view.task = &task;
  view.values = values_;
  view.group = &group_;
  view.group_class = pricer.ClassOf(group_);
  EXPECT_EQ(pricer.Price(view).duration, Duration::FromSeconds(4e-3 + 1e-6));
}

}  // namespace
}  // namespace tessera
