// The books of the GPU's arenas; needs no GPU.

#include "runtime/device/cuda_arena.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <vector>

#include "planner/base/rng.h"

namespace tessera {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// Pretends to have `bytes` of memory, at made-up addresses with gaps between
// the chunks or, `adjacent`, without.
class FakeMemory {
 public:
  explicit FakeMemory(int64_t bytes, bool adjacent = false)
      : left_(bytes), adjacent_(adjacent) {}

  CudaArena::Reserve reserve() {
    return [this](int64_t bytes) -> Result<void*> {
      if (bytes > left_) return Error{ErrorCode::kUnavailable, "full", ""};
      left_ -= bytes;
      ++chunks_;
      void* const chunk = reinterpret_cast<void*>(next_);
      next_ += static_cast<uintptr_t>(bytes + (adjacent_ ? 0 : 4096));
      return chunk;
    };
  }
  int chunks() const { return chunks_; }

 private:
  int64_t left_;
  const bool adjacent_;
  int chunks_ = 0;
  uintptr_t next_ = uintptr_t{1} << 40;
};

TEST(CudaArenaTest, BlocksAreAlignedAndReused) {
  FakeMemory memory(1024 * kMiB);
  CudaArena arena(64 * kMiB, memory.reserve());
  void* const a = arena.Allocate(1).value();
  void* const b = arena.Allocate(1000).value();
  // One byte takes a block of 256.
  EXPECT_EQ(static_cast<std::byte*>(b) - static_cast<std::byte*>(a), 256);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a) % CudaArena::kAlignment, 0u);
  arena.Free(a, 1);
  EXPECT_EQ(arena.Allocate(256).value(), a);
  EXPECT_EQ(arena.reserved_bytes(), 64 * kMiB);
}

// Blocks of 40 MiB leave 24 MiB of a chunk of 64 unused; where they are
// expected, they leave nothing.
TEST(CudaArenaTest, WhatIsExpectedWastesNothing) {
  constexpr int kBlocks = 25;
  constexpr int64_t kBytes = 40 * kMiB;
  FakeMemory memory(kBlocks * kBytes);
  CudaArena arena(64 * kMiB, memory.reserve());
  ASSERT_TRUE(arena.Expect(kBlocks * kBytes).has_value());
  for (int i = 0; i < kBlocks; ++i) {
    ASSERT_TRUE(arena.Allocate(kBytes).has_value()) << i;
  }
  EXPECT_EQ(memory.chunks(), 1);
  EXPECT_FALSE(arena.Allocate(1).has_value());
  FakeMemory chunks(kBlocks * kBytes);
  CudaArena unaware(64 * kMiB, chunks.reserve());
  int fit = 0;
  while (unaware.Allocate(kBytes)) ++fit;
  EXPECT_LT(fit, kBlocks);
  // More than there is: an error, and all is as before.
  EXPECT_FALSE(unaware.Expect(kBytes).has_value());
}

TEST(CudaArenaTest, FreeNeighboursMerge) {
  FakeMemory memory(1024 * kMiB);
  CudaArena arena(4 * kMiB, memory.reserve());
  std::vector<void*> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(arena.Allocate(kMiB).value());
  for (const size_t i : {1, 3, 2, 0}) arena.Free(blocks[i], kMiB);
  EXPECT_EQ(arena.Allocate(4 * kMiB).value(), blocks[0]);
  EXPECT_EQ(memory.chunks(), 1);
}

TEST(CudaArenaTest, ChunksDoNotMergeEvenSideBySide) {
  FakeMemory memory(1024 * kMiB, /*adjacent=*/true);
  CudaArena arena(2 * kMiB, memory.reserve());
  void* const a = arena.Allocate(2 * kMiB).value();
  void* const b = arena.Allocate(2 * kMiB).value();
  arena.Free(a, 2 * kMiB);
  arena.Free(b, 2 * kMiB);
  EXPECT_EQ(memory.chunks(), 2);
  EXPECT_TRUE(arena.Allocate(4 * kMiB));
  EXPECT_EQ(memory.chunks(), 3);
}

TEST(CudaArenaTest, TakesLessThanAChunkWhereNoMoreIsLeft) {
  FakeMemory memory(10 * kMiB);
  CudaArena arena(8 * kMiB, memory.reserve());
  EXPECT_TRUE(arena.Allocate(8 * kMiB));
  // 2 MiB are left; a block of 100 bytes takes one page of 2 MiB.
  EXPECT_TRUE(arena.Allocate(100));
  EXPECT_EQ(arena.reserved_bytes(), 10 * kMiB);
  const auto full = arena.Allocate(4 * kMiB);
  ASSERT_FALSE(full);
  EXPECT_EQ(full.error().message, "full");
}

// Random allocations never overlap, and a step that repeats itself asks for
// no more memory.
TEST(CudaArenaTest, ARepeatedStepReservesNothing) {
  FakeMemory memory(int64_t{1} << 40);
  CudaArena arena(16 * kMiB, memory.reserve());
  int64_t reserved = 0;
  for (int step = 0; step < 4; ++step) {
    std::map<std::byte*, int64_t> in_use;
    for (uint64_t i = 0; i < 2000; ++i) {
      const double draw = CounterNormal(7, i);
      if (draw > 0 && !in_use.empty()) {
        auto victim = in_use.begin();
        std::advance(victim, static_cast<int64_t>(i % in_use.size()));
        arena.Free(victim->first, victim->second);
        in_use.erase(victim);
        continue;
      }
      const auto bytes = static_cast<int64_t>(draw * draw * 1e6) + 1;
      auto* const data = static_cast<std::byte*>(arena.Allocate(bytes).value());
      const auto next = in_use.lower_bound(data);
      EXPECT_TRUE(next == in_use.end() || data + bytes <= next->first);
      EXPECT_TRUE(next == in_use.begin() ||
                  std::prev(next)->first + std::prev(next)->second <= data);
      in_use[data] = bytes;
    }
    for (const auto& [data, bytes] : in_use) arena.Free(data, bytes);
    if (step == 0) reserved = arena.reserved_bytes();
    EXPECT_EQ(arena.reserved_bytes(), reserved) << "step " << step;
  }
}

}  // namespace
}  // namespace tessera
