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
