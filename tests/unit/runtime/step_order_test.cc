#include "runtime/step_order.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "planner/base/rng.h"

namespace tessera {
namespace {

// after[i][j]: job i starts after job j has ended, by streams and `follows`.
std::vector<std::vector<bool>> Closure(
    const std::vector<EnqueuedJob>& jobs,
    const std::vector<std::vector<int>>& follows) {
  std::vector<std::vector<bool>> after(jobs.size(),
                                       std::vector<bool>(jobs.size()));
  for (size_t i = 0; i < jobs.size(); ++i) {
    const auto add = [&](size_t j) {
      after[i][j] = true;
      for (size_t k = 0; k < j; ++k) {
        if (after[j][k]) after[i][k] = true;
      }
    };
    for (size_t j = 0; j < i; ++j) {
      if (jobs[j].stream == jobs[i].stream) add(j);
    }
    for (int j : follows[i]) add(static_cast<size_t>(j));
  }
  return after;
}

std::vector<EnqueuedJob> RandomJobs(Rng& rng, int count, int streams) {
  std::vector<EnqueuedJob> jobs(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    EnqueuedJob& job = jobs[static_cast<size_t>(i)];
    job.stream = static_cast<int>(rng.Below(static_cast<uint32_t>(streams)));
    for (uint32_t n = i > 0 ? rng.Below(4) : 0; n > 0; --n) {
      job.deps.push_back(static_cast<int>(rng.Below(static_cast<uint32_t>(i))));
    }
  }
  return jobs;
}

// Compute 0 and 2, a reduction 1 between them: one wait each way.
TEST(WaitsOf, WaitsAcrossStreamsOnly) {
  const auto waits = WaitsOf({{0, {}}, {1, {0}}, {0, {0, 1}}, {0, {0, 1}}});
  EXPECT_EQ(waits[1], std::vector<int>{0});
  EXPECT_EQ(waits[2], std::vector<int>{1});
  EXPECT_TRUE(waits[3].empty());  // stream 0 has waited
}

TEST(WaitsOf, ImpliesAllDependenciesAndNeedsEachWait) {
  Rng rng(1);
  for (int round = 0; round < 200; ++round) {
    const auto jobs = RandomJobs(rng, 40, 1 + round % 5);
    const auto waits = WaitsOf(jobs);
    const auto after = Closure(jobs, waits);
    for (size_t i = 0; i < jobs.size(); ++i) {
      for (int dep : jobs[i].deps) {
        EXPECT_TRUE(after[i][static_cast<size_t>(dep)]) << i << " " << dep;
      }
      for (int wait : waits[i]) {
        auto fewer = waits;
        std::erase(fewer[i], wait);
        EXPECT_FALSE(Closure(jobs, fewer)[i][static_cast<size_t>(wait)])
            << i << " need not wait for " << wait;
      }
    }
  }
}

// ---- Launches

constexpr Kernel kListed = {"listed", nullptr, false,
                            [](std::span<const KernelCall>) {}};
constexpr Kernel kAlone = {"alone", nullptr};

ListedCall CallOf(const Kernel& kernel, DType gradient, int clip) {
  return {&kernel,
          {gradient, DType::kFloat32, DType::kFloat32},
          {ValueId(static_cast<size_t>(clip))}};
}

TEST(LaunchSizes, LikeCallsBesideEachOther) {
  const auto fp32 = CallOf(kListed, DType::kFloat32, 1);
  const auto bf16 = CallOf(kListed, DType::kBFloat16, 1);
  const auto clipped = CallOf(kListed, DType::kFloat32, 2);
  const auto alone = CallOf(kAlone, DType::kFloat32, 1);
  const auto sizes = [](const std::vector<ListedCall>& calls) {
    return LaunchSizes(calls);
  };
  EXPECT_EQ(sizes({fp32, fp32, fp32}), std::vector<int>{3});
  EXPECT_EQ(sizes({fp32, fp32, bf16, fp32}), (std::vector<int>{2, 1, 1}));
  EXPECT_EQ(sizes({fp32, clipped, clipped}), (std::vector<int>{1, 2}));
  EXPECT_EQ(sizes({alone, alone}), (std::vector<int>{1, 1}));
  EXPECT_EQ(sizes({}), std::vector<int>{});
}

// ---- Graphs

TEST(IsCapturable, WorkOfTheDeviceAlone) {
  std::vector<Value> values(3);
  values[1].tier = MemoryTier::kHost;
  values[2].tier = MemoryTier::kFile;
  const auto is = [&](TaskKind kind, size_t from, size_t to) {
    Task task;
    task.kind = kind;
    task.reads = {ValueId(from)};
    task.writes = {ValueId(to)};
    return IsCapturable(task, values);
  };
  EXPECT_TRUE(is(TaskKind::kCompute, 0, 0));
  EXPECT_FALSE(is(TaskKind::kCompute, 1, 1));
  EXPECT_TRUE(is(TaskKind::kLoad, 0, 0));
  EXPECT_TRUE(is(TaskKind::kSlice, 0, 0));
  EXPECT_TRUE(is(TaskKind::kCopy, 0, 1));
  EXPECT_TRUE(is(TaskKind::kCopy, 1, 0));
  EXPECT_FALSE(is(TaskKind::kCopy, 1, 2));
  EXPECT_FALSE(is(TaskKind::kCopy, 2, 1));
  for (const TaskKind kind :
       {TaskKind::kComm, TaskKind::kSend, TaskKind::kRecv}) {
    EXPECT_FALSE(is(kind, 0, 0));
  }
}

// A file (0), computation (1, 2, 4) beside a copy (3), a collective (5) of what
// 2 made, and computation behind it (6, 7), which waits for it.
TEST(PartsOf, GraphsBetweenWhatIsNotCaptured) {
  const std::vector<EnqueuedJob> jobs = {{0, {}},  {0, {0}}, {0, {1}},
                                         {1, {1}}, {0, {3}}, {2, {2}},
                                         {0, {4}}, {0, {5}}};
  const StepParts step =
      PartsOf(jobs, {false, true, true, true, true, false, true, true});
  ASSERT_EQ(step.parts.size(), 4u);
  const auto is = [&](size_t p, int begin, int end, bool captured, int stream,
                      const std::vector<int>& waits) {
    const StepPart& part = step.parts[p];
    return part.begin == begin && part.end == end &&
           part.captured == captured && part.stream == stream &&
           part.waits == waits;
  };
  EXPECT_TRUE(is(0, 0, 1, false, 0, {}));
  EXPECT_TRUE(is(1, 1, 5, true, 0, {}));  // in the stream of 0
  EXPECT_TRUE(is(2, 5, 6, false, 2, {1}));
  EXPECT_TRUE(is(3, 6, 8, true, 0, {2}));
  EXPECT_EQ(step.waits_inside[3], std::vector<int>{1});
  EXPECT_EQ(step.waits_inside[4], std::vector<int>{3});
  EXPECT_TRUE(step.waits_inside[7].empty());
}

// The copy (1) is in a graph of another stream's: the next one (3) of its own
// stream follows the graph, since it would have followed the copy.
TEST(PartsOf, AStreamFollowsItsJobsInGraphs) {
  const StepParts step =
      PartsOf({{0, {}}, {1, {}}, {2, {}}, {1, {}}}, {true, true, false, false});
  ASSERT_EQ(step.parts.size(), 3u);
  EXPECT_TRUE(step.parts[1].waits.empty());
  EXPECT_EQ(step.parts[2].waits, std::vector<int>{0});
}

TEST(PartsOf, OneJobIsNoGraph) {
  const StepParts step = PartsOf({{0, {}}, {0, {0}}}, {true, false});
  EXPECT_EQ(step.parts.size(), 2u);
  EXPECT_FALSE(step.parts[0].captured);
}

// Whatever is ordered job by job is in parts; and where nothing is captured
// each job waits as by WaitsOf.
TEST(PartsOf, KeepsEveryOrder) {
  Rng rng(3);
  for (int round = 0; round < 200; ++round) {
    const auto jobs = RandomJobs(rng, 40, 1 + round % 5);
    const auto before = Closure(jobs, WaitsOf(jobs));
    std::vector<bool> capturable(jobs.size());
    for (size_t i = 0; i < jobs.size(); ++i) capturable[i] = rng.Below(4) > 0;
    if (round % 10 == 0) capturable.assign(jobs.size(), false);
    const StepParts step = PartsOf(jobs, capturable);
    std::vector<EnqueuedJob> parts;
    std::vector<std::vector<int>> waits;
    std::vector<size_t> part_of;
    for (const StepPart& part : step.parts) {
      parts.push_back({part.stream, {}});
      waits.push_back(part.waits);
      for (int j = part.begin; j < part.end; ++j) {
        part_of.push_back(parts.size() - 1);
        EXPECT_EQ(part.captured, part.end - part.begin > 1);
        EXPECT_TRUE(!part.captured || capturable[static_cast<size_t>(j)]);
      }
    }
    ASSERT_EQ(part_of.size(), jobs.size());
    const auto outside = Closure(parts, waits);
    const auto inside = Closure(jobs, step.waits_inside);
    for (size_t i = 0; i < jobs.size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        if (!before[i][j]) continue;
        EXPECT_TRUE(part_of[i] == part_of[j] ? inside[i][j]
                                             : outside[part_of[i]][part_of[j]])
            << "job " << i << " is not behind " << j;
      }
    }
    if (round % 10 != 0) continue;
    const auto plain = WaitsOf(jobs);
    for (size_t i = 0; i < jobs.size(); ++i) {
      EXPECT_EQ(step.parts[i].waits, plain[i]);
    }
  }
}

// ---- Places

// a: jobs 0-1, b: jobs 1-2, c: job 3 takes the room of a, the smaller of the
// gaps that a (100 -> 128 bytes) and b (200 -> 256) leave.
TEST(PlaceBuffers, BestFit) {
  std::vector<EnqueuedJob> jobs(4);
  const BufferPlaces places =
      PlaceBuffers({{{100}, {0, 1}}, {{200}, {1, 2}}, {{90}, {3}}}, 64, jobs);
  EXPECT_EQ(places.offsets, (std::vector<int64_t>{0, 128, 0}));
  EXPECT_EQ(places.arena.value, 128 + 256);
}

// One stream frees what another writes next: it has to wait.
TEST(PlaceBuffers, RoomOfAnotherStreamIsWaitedFor) {
  std::vector<EnqueuedJob> jobs = {{0, {}}, {1, {0}}, {2, {}}, {0, {2}}};
  // Each is used by two streams, so they share a room.
  const BufferPlaces places =
      PlaceBuffers({{{64}, {0, 1}}, {{64}, {2, 3}}}, 64, jobs);
  EXPECT_EQ(places.arena.value, 64);
  EXPECT_EQ(jobs[2].deps, (std::vector<int>{0, 1}));
}

TEST(PlaceBuffers, SharedRoomIsNeverInUseTwice) {
  Rng rng(2);
  for (int round = 0; round < 200; ++round) {
    auto jobs = RandomJobs(rng, 40, 1 + round % 4);
    std::vector<BufferUse> buffers(30);
    for (BufferUse& buffer : buffers) {
      buffer.bytes = {static_cast<int64_t>(rng.Below(1000))};
      for (uint32_t n = 1 + rng.Below(3); n > 0; --n) {
        buffer.jobs.push_back(
            static_cast<int>(rng.Below(static_cast<uint32_t>(jobs.size()))));
      }
      std::sort(buffer.jobs.begin(), buffer.jobs.end());
      buffer.jobs.erase(std::unique(buffer.jobs.begin(), buffer.jobs.end()),
                        buffer.jobs.end());
    }
    const BufferPlaces places = PlaceBuffers(buffers, 64, jobs);
    const auto after = Closure(jobs, WaitsOf(jobs));
    int64_t sum = 0;
    for (size_t a = 0; a < buffers.size(); ++a) {
      const int64_t begin = places.offsets[a];
      const int64_t end = begin + buffers[a].bytes.value;
      EXPECT_EQ(begin % 64, 0);
      EXPECT_LE(end, places.arena.value);
      sum += (buffers[a].bytes.value + 63) / 64 * 64;
      for (size_t b = 0; b < buffers.size(); ++b) {
        if (a == b || places.offsets[b] >= end ||
            places.offsets[b] + buffers[b].bytes.value <= begin ||
            buffers[a].jobs.front() > buffers[b].jobs.front()) {
          continue;
        }
        for (int user : buffers[a].jobs) {
          EXPECT_TRUE(after[static_cast<size_t>(buffers[b].jobs.front())]
                           [static_cast<size_t>(user)])
              << "buffers " << a << " and " << b;
        }
      }
    }
    EXPECT_LE(places.arena.value, sum + 64 * 30);
  }
}

}  // namespace
}  // namespace tessera
