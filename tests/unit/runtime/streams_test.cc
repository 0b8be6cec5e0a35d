#include "runtime/streams.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>

#include "planner/base/rng.h"

namespace tessera {
namespace {

// Jobs at random on up to four streams, each with some of the earlier ones as
// dependencies; memory that a job takes is given back by a later one.
struct RandomJobs {
  std::vector<StreamJob> jobs;
  std::vector<HeldBytes> gives;

  explicit RandomJobs(Rng& rng) {
    const int count = 1 + static_cast<int>(rng.Below(40));
    const uint32_t streams = 1 + rng.Below(4);
    gives.resize(static_cast<size_t>(count));
    for (int i = 0; i < count; ++i) {
      StreamJob job;
      job.stream = static_cast<int>(rng.Below(streams));
      job.takes = {{static_cast<int64_t>(rng.Below(10))},
                   {static_cast<int64_t>(rng.Below(10))}};
      for (int dep = 0; dep < i; ++dep) {
        if (rng.Below(8) == 0) job.deps.push_back(dep);
      }
      const auto giver =
          static_cast<size_t>(i) + rng.Below(static_cast<uint32_t>(count - i));
      gives[giver] += job.takes;
      jobs.push_back(std::move(job));
    }
  }
};

// Whatever the threads do: streams in order, dependencies kept, memory taken in
// index order and never more than index order needs.
TEST(StreamsTest, OrderDependenciesAndBudgetHold) {
  Rng rng(7);
  for (int trial = 0; trial < 300; ++trial) {
    const RandomJobs random(rng);
    const auto& jobs = random.jobs;
    const HeldBytes budget = SequentialPeak(jobs, random.gives);
    std::mutex mutex;
    std::vector<bool> ended(jobs.size());
    int admitted = 0;
    HeldBytes held;
    bool wrong = false;
    StreamHooks hooks;
    hooks.admit = [&](int job) -> Result<void> {
      const std::lock_guard lock(mutex);
      wrong |= job != admitted++;
      held += jobs[static_cast<size_t>(job)].takes;
      wrong |= !held.FitsInto(budget);
      return {};
    };
    hooks.run = [&](int job) -> Result<void> {
      const std::lock_guard lock(mutex);
      wrong |= job >= admitted;
      for (int other = 0; other < job; ++other) {
        const auto o = static_cast<size_t>(other);
        if (jobs[o].stream == jobs[static_cast<size_t>(job)].stream) {
          wrong |= !ended[o];
        }
      }
      for (int dep : jobs[static_cast<size_t>(job)].deps) {
        wrong |= !ended[static_cast<size_t>(dep)];
      }
      return {};
    };
    hooks.finish = [&](int job) {
      const std::lock_guard lock(mutex);
      ended[static_cast<size_t>(job)] = true;
      held = held - random.gives[static_cast<size_t>(job)];
      return random.gives[static_cast<size_t>(job)];
    };
    hooks.fail = [&](const Error&) { wrong = true; };
    ASSERT_TRUE(RunStreams(jobs, budget, hooks).has_value());
    EXPECT_FALSE(wrong) << "trial " << trial;
    EXPECT_EQ(std::count(ended.begin(), ended.end(), true), std::ssize(jobs));
    EXPECT_EQ(held.device.value, 0);
    EXPECT_EQ(held.host.value, 0);
  }
}

// Every job waits until the others run too.
TEST(StreamsTest, StreamsRunBesideEachOther) {
  constexpr int kStreams = 3;
  std::vector<StreamJob> jobs(kStreams);
  for (int i = 0; i < kStreams; ++i) jobs[static_cast<size_t>(i)].stream = i;
  std::mutex mutex;
  std::condition_variable all_here;
  int here = 0;
  StreamHooks hooks;
  hooks.admit = [](int) -> Result<void> { return {}; };
  hooks.run = [&](int) -> Result<void> {
    std::unique_lock lock(mutex);
    if (++here == kStreams) all_here.notify_all();
    if (all_here.wait_for(lock, std::chrono::seconds(30),
                          [&] { return here == kStreams; })) {
      return {};
    }
    return Error{ErrorCode::kUnavailable, "alone", ""};
  };
  hooks.finish = [](int) { return HeldBytes{}; };
  hooks.fail = [](const Error&) {};
  const auto result = RunStreams(jobs, {}, hooks);
  EXPECT_TRUE(result.has_value()) << result.error().ToString();
}

// Two independent jobs that do not fit beside each other: the second waits for
// the first one's memory. The first one leaves it the time to begin, if it may.
TEST(StreamsTest, ATightBudgetOrders) {
  std::vector<StreamJob> jobs(2);
  jobs[1].stream = 1;
  jobs[0].takes = jobs[1].takes = {{8}, {}};
  std::mutex mutex;
  std::condition_variable second_began;
  bool began = false;
  bool together = false;
  StreamHooks hooks;
  hooks.admit = [](int) -> Result<void> { return {}; };
  hooks.run = [&](int job) -> Result<void> {
    std::unique_lock lock(mutex);
    if (job == 0) {
      together = second_began.wait_for(lock, std::chrono::milliseconds(50),
                                       [&] { return began; });
    } else {
      began = true;
      second_began.notify_all();
    }
    return {};
  };
  hooks.finish = [](int) { return HeldBytes{{8}, {}}; };
  hooks.fail = [](const Error&) {};
  EXPECT_TRUE(RunStreams(jobs, {{8}, {}}, hooks).has_value());
  EXPECT_TRUE(began);
  EXPECT_FALSE(together);
}

// The failing job is told of at once, so that one that waits for others can
// give up.
TEST(StreamsTest, TheFirstErrorEndsAll) {
  std::vector<StreamJob> jobs(3);
  jobs[1].stream = 1;
  jobs[2].stream = 1;
  std::mutex mutex;
  std::condition_variable failed;
  bool has_failed = false;
  int later = 0;
  StreamHooks hooks;
  hooks.admit = [](int) -> Result<void> { return {}; };
  hooks.run = [&](int job) -> Result<void> {
    if (job == 1) return Error{ErrorCode::kUnavailable, "disk full", ""};
    if (job == 2) ++later;
    std::unique_lock lock(mutex);
    failed.wait(lock, [&] { return has_failed; });
    return Error{ErrorCode::kUnavailable, "gave up", ""};
  };
  hooks.finish = [](int) { return HeldBytes{}; };
  hooks.fail = [&](const Error& error) {
    EXPECT_EQ(error.message, "disk full");
    const std::lock_guard lock(mutex);
    has_failed = true;
    failed.notify_all();
  };
  const auto result = RunStreams(jobs, {}, hooks);
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().message, "disk full");
  EXPECT_EQ(later, 0);
}

}  // namespace
}  // namespace tessera
