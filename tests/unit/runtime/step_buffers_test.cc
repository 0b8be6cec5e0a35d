#include "runtime/step_buffers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <span>
#include <vector>

#include "runtime/device/cpu_device.h"

namespace tessera {
namespace {

constexpr Bytes kValue{256};

// Values of 64 numbers on one rank.
class StepBuffersTest : public ::testing::Test {
 protected:
  StepBuffersTest() {
    DeviceGroup group;
    group.devices = {DeviceId(0)};
    tasks_.groups = {group};
  }

  ValueId AddValue(bool persistent, MemoryTier tier = MemoryTier::kDevice) {
    Value value;
    value.group = GroupId(0);
    value.shape = {64};
    value.tier = tier;
    value.persistent = persistent;
    tasks_.values.push_back(value);
    return ValueId(tasks_.values.size() - 1);
  }
  int64_t InUse() const { return device_.account().current().total.value; }

  static ptrdiff_t Between(const void* first, const void* second) {
    return static_cast<const std::byte*>(second) -
           static_cast<const std::byte*>(first);
  }

  TaskGraph tasks_;
  Graph graph_;
  CpuDevice device_;
};

TEST_F(StepBuffersTest, AnAliasHasTheBufferOfItsRoot) {
  const ValueId root = AddValue(false);
  const ValueId alias = AddValue(false);
  tasks_.values[alias.index()].alias_of = root;
  tasks_.values[alias.index()].shape = {100};
  const RankView view(tasks_, graph_, 0);
  StepBuffers buffers(view, device_);
  EXPECT_EQ(buffers.root(alias), root);
  EXPECT_EQ(buffers.size(root), Bytes{400});  // the larger one's
  EXPECT_FALSE(buffers.Holds(alias));
  ASSERT_TRUE(buffers.Allocate(root).has_value());
  EXPECT_TRUE(buffers.Holds(alias));
  EXPECT_EQ(buffers.data(alias), buffers.data(root));
  buffers.Free(root);
  EXPECT_EQ(buffers.data(alias), nullptr);
  EXPECT_EQ(InUse(), 0);
}

TEST_F(StepBuffersTest, APartLiesInTheWhole) {
  const ValueId whole = AddValue(false);
  const ValueId part = AddValue(false);
  const RankView view(tasks_, graph_, 0);
  StepBuffers buffers(view, device_);
  buffers.Join(part, whole, kValue);
  buffers.Resize(whole, kValue + kValue);
  EXPECT_EQ(buffers.root(part), whole);
  EXPECT_EQ(buffers.size(part), Bytes{});
  ASSERT_TRUE(buffers.Allocate(whole).has_value());
  EXPECT_EQ(InUse(), 512);
  EXPECT_EQ(Between(buffers.data(whole), buffers.data(part)), 256);
}

TEST_F(StepBuffersTest, WhatLiesTogetherIsOneBehindTheOther) {
  const ValueId a = AddValue(true);
  const ValueId b = AddValue(true);
  const ValueId c = AddValue(true);
  const ValueId ragged = AddValue(true);
  tasks_.values[ragged.index()].shape = {63};
  const ValueId fleeting = AddValue(false);
  const ValueId other = AddValue(true);
  tasks_.values[other.index()].category = MemoryCategory::kOptimizer;
  const RankView view(tasks_, graph_, 0);
  {
    StepBuffers buffers(view, device_);
    EXPECT_FALSE(buffers.LayTogether({a, ragged}));
    EXPECT_FALSE(buffers.LayTogether({a, fleeting}));
    EXPECT_FALSE(buffers.LayTogether({a, other}));
    EXPECT_FALSE(buffers.LayTogether({a, a}));
    EXPECT_TRUE(buffers.LayTogether({c, a}));
    EXPECT_TRUE(buffers.LayTogether({c, a}));   // they do
    EXPECT_FALSE(buffers.LayTogether({a, b}));  // beside c
    ASSERT_TRUE(buffers.AllocatePersistent().has_value());
    EXPECT_EQ(Between(buffers.data(c), buffers.data(a)), 256);
    EXPECT_EQ(InUse(), 4 * 256 + 252);
  }
  EXPECT_EQ(InUse(), 0);
}

TEST_F(StepBuffersTest, WhatIsLentStaysTheLenders) {
  const ValueId weight = AddValue(true);
  const ValueId other = AddValue(true);
  const ValueId fleeting = AddValue(false);
  const RankView view(tasks_, graph_, 0);
  StepBuffers lender(view, device_);
  ASSERT_TRUE(lender.OpenTiers({}).has_value());
  ASSERT_TRUE(lender.AllocatePersistent().has_value());
  std::byte* const arena = *lender.MakeArena(MemoryTier::kDevice, kValue);
  {
    StepBuffers buffers(view, device_, &lender);
    EXPECT_FALSE(buffers.LayTogether({weight, other}));
    ASSERT_TRUE(buffers.OpenTiers({}).has_value());
    ASSERT_TRUE(buffers.AllocatePersistent().has_value());
    EXPECT_EQ(buffers.data(weight), lender.data(weight));
    EXPECT_EQ(*buffers.MakeArena(MemoryTier::kDevice, kValue), arena);
    ASSERT_TRUE(buffers.Allocate(fleeting).has_value());
    EXPECT_EQ(InUse(), 4 * 256);
  }
  EXPECT_EQ(InUse(), 3 * 256);
  {
    StepBuffers buffers(view, device_, &lender);
    EXPECT_NE(*buffers.MakeArena(MemoryTier::kDevice, Bytes{257}), arena);
    EXPECT_EQ(InUse(), 3 * 256 + 257);
  }
  EXPECT_EQ(InUse(), 3 * 256);
}

TEST_F(StepBuffersTest, EveryTierKeepsWhatWasWritten) {
  for (const MemoryTier tier :
       {MemoryTier::kDevice, MemoryTier::kHost, MemoryTier::kFile}) {
    tasks_.values.clear();
    const ValueId first = AddValue(true, tier);
    const ValueId second = AddValue(true, tier);
    tasks_.values[second.index()].shape = {2048};  // two blocks of a file
    const RankView view(tasks_, graph_, 0);
    StepBuffers buffers(view, device_);
    ASSERT_TRUE(
        buffers.OpenTiers({.directory = ::testing::TempDir()}).has_value());
    ASSERT_TRUE(buffers.AllocatePersistent().has_value());
    EXPECT_TRUE(buffers.Holds(first));
    EXPECT_EQ(buffers.InFile(first), tier == MemoryTier::kFile);
    EXPECT_EQ(buffers.data(first) == nullptr, tier == MemoryTier::kFile);
    std::vector<float> numbers(2048);
    std::iota(numbers.begin(), numbers.end(), 1.0F);
    const std::vector<float> ones(64, 1.0F);
    ASSERT_TRUE(buffers.Write(first, ones.data(), {}, kValue).has_value());
    for (const int64_t begin : {0, 1024}) {
      ASSERT_TRUE(buffers.Write(second, &numbers[begin], {4 * begin}, {4096})
                      .has_value());
    }
    std::vector<float> found(2048);
    ASSERT_TRUE(buffers.Read(second, found.data(), {}, {8192}).has_value());
    EXPECT_EQ(found, numbers);
    // Numbers 1000 to 1063, across the blocks.
    found.resize(64);
    ASSERT_TRUE(
        buffers.Read(second, found.data(), {4 * 1000}, kValue).has_value());
    EXPECT_TRUE(
        std::ranges::equal(found, std::span(numbers).subspan(1000, 64)));
    ASSERT_TRUE(buffers.Read(first, found.data(), {}, kValue).has_value());
    EXPECT_EQ(found, ones);
  }
}

TEST_F(StepBuffersTest, OneIsMadeOnceForADevice) {
  const RankView view(tasks_, graph_, 0);
  {
    StepBuffers buffers(view, device_);
    void* const one = *buffers.One(device_, DType::kFloat64);
    EXPECT_EQ(*static_cast<double*>(one), 1);
    EXPECT_EQ(*buffers.One(device_, DType::kFloat64), one);
    EXPECT_EQ(InUse(), 8);
  }
  EXPECT_EQ(InUse(), 0);
}

}  // namespace
}  // namespace tessera
