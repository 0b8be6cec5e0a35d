#include "planner/lower/file_layout.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "planner/base/rng.h"

namespace tessera {
namespace {

constexpr int64_t kBlock = kFileBlockBytes;

// A graph of values in a file and the tasks that touch them.
class Files {
 public:
  int Add(int64_t bytes, bool persistent = false) {
    Value value;
    value.tier = MemoryTier::kFile;
    value.persistent = persistent;
    tasks_.values.push_back(value);
    bytes_.push_back({bytes});
    return static_cast<int>(bytes_.size()) - 1;
  }
  void Touch(std::vector<int> values) {
    Task task;
    for (int value : values) task.writes.push_back(ValueId(value));
    tasks_.tasks.push_back(task);
  }
  FileLayout Layout() const { return LayOutFile(tasks_, bytes_); }
  TaskGraph& tasks() { return tasks_; }

 private:
  TaskGraph tasks_;
  std::vector<Bytes> bytes_;
};

TEST(FileLayout, WhatPersistsComesFirst) {
  Files files;
  const int moving = files.Add(100);
  const int a = files.Add(1, true);
  const int nowhere = files.Add(0, true);
  const int b = files.Add(kBlock + 1, true);
  const int memory = files.Add(500);
  files.tasks().values.back().tier = MemoryTier::kHost;
  files.Touch({moving, a, b, memory});
  const FileLayout layout = files.Layout();
  EXPECT_EQ(layout.offsets[static_cast<size_t>(a)], 0);
  EXPECT_EQ(layout.offsets[static_cast<size_t>(b)], kBlock);
  EXPECT_EQ(layout.offsets[static_cast<size_t>(moving)], 3 * kBlock);
  EXPECT_EQ(layout.offsets[static_cast<size_t>(nowhere)], -1);
  EXPECT_EQ(layout.offsets[static_cast<size_t>(memory)], -1);
  EXPECT_EQ(layout.persistent.value, 3 * kBlock);
  EXPECT_EQ(layout.length.value, 4 * kBlock);
}

// Blocks:  0  1  2  3  4
//          a  b  b  c         a, then b, c
//          a  .  .  c         b ends
//          .  .  .  c         a ends: one gap of three
//          d  d  d  c         which d fills
//          d  d  d  e  e      c ends; the last gap grows with the file
TEST(FileLayout, GapsAreUsedAgainAndJoin) {
  Files files;
  const int a = files.Add(kBlock);
  const int b = files.Add(2 * kBlock);
  const int c = files.Add(kBlock);
  const int d = files.Add(3 * kBlock);
  const int e = files.Add(2 * kBlock);
  files.Touch({a});
  files.Touch({b});
  files.Touch({c});
  files.Touch({b});
  files.Touch({a});
  files.Touch({d});
  files.Touch({c});
  files.Touch({e, d});
  const FileLayout layout = files.Layout();
  EXPECT_EQ(layout.offsets,
            (std::vector<int64_t>{0, kBlock, 3 * kBlock, 0, 3 * kBlock}));
  EXPECT_EQ(layout.length.value, 5 * kBlock);
}

// Random sizes and lifetimes: no two values share a block while both live, and
// values of one size take no more than the most that live at once.
TEST(FileLayout, NothingOverlaps) {
  Rng rng(3);
  for (int round = 0; round < 50; ++round) {
    const uint32_t sizes = round % 2 == 0 ? 1 : 5;
    Files files;
    constexpr int kValues = 60;
    constexpr uint32_t kTasks = 40;
    std::vector<std::pair<size_t, size_t>> lives;
    std::vector<int64_t> bytes;
    for (int v = 0; v < kValues; ++v) {
      bytes.push_back(kBlock * (1 + rng.Below(sizes)));
      files.Add(bytes.back());
      const size_t first = rng.Below(kTasks);
      lives.emplace_back(
          first, first + rng.Below(static_cast<uint32_t>(kTasks - first)));
    }
    int64_t most = 0;
    for (size_t t = 0; t < kTasks; ++t) {
      std::vector<int> touched;
      int64_t live = 0;
      for (int v = 0; v < kValues; ++v) {
        const auto [first, last] = lives[static_cast<size_t>(v)];
        if (t == first || t == last) touched.push_back(v);
        if (first <= t && t <= last) live += bytes[static_cast<size_t>(v)];
      }
      files.Touch(touched);
      most = std::max(most, live);
    }
    const FileLayout layout = files.Layout();
    for (size_t a = 0; a < kValues; ++a) {
      EXPECT_LE(layout.offsets[a] + bytes[a], layout.length.value);
      for (size_t b = 0; b < a; ++b) {
        if (lives[a].second < lives[b].first ||
            lives[b].second < lives[a].first) {
          continue;
        }
        EXPECT_TRUE(layout.offsets[a] + bytes[a] <= layout.offsets[b] ||
                    layout.offsets[b] + bytes[b] <= layout.offsets[a])
            << a << " and " << b << " in round " << round;
      }
    }
    EXPECT_GE(layout.length.value, most);
    if (sizes == 1) {
      EXPECT_EQ(layout.length.value, most);
    }
  }
}

}  // namespace
}  // namespace tessera
