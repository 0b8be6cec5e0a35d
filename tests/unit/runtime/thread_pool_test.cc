#include "runtime/thread_pool.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

namespace tessera {
namespace {

TEST(ThreadPool, EveryIterationOnce) {
  for (int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (int64_t n : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> calls(static_cast<size_t>(n));
      pool.For(n, [&](int64_t i) { ++calls[static_cast<size_t>(i)]; });
      for (const auto& count : calls) EXPECT_EQ(count, 1);
    }
  }
}

// The sanitizers' own maps exceed any limit.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST(ThreadPool, WorksWithFewerThreadsThanAsked) {
  const auto run = [] {
    // No memory for more stacks than the C library keeps.
    const rlimit limit = {1 << 20, 1 << 20};
    setrlimit(RLIMIT_AS, &limit);
    ThreadPool pool(100);
    int sum = 0;
    pool.For(5, [&](int64_t i) { sum += static_cast<int>(i); });
    _exit(sum);
  };
  EXPECT_EXIT(run(), ::testing::ExitedWithCode(0 + 1 + 2 + 3 + 4), "");
}
#endif

// Two iterations that wait for each other run at the same time.
TEST(ThreadPool, IterationsOverlap) {
  ThreadPool pool(2);
  std::atomic<int> arrived = 0;
  pool.For(2, [&](int64_t) {
    ++arrived;
    while (arrived < 2) std::this_thread::yield();
  });
  EXPECT_EQ(arrived, 2);
}

// Streams of a rank call at the same time.
TEST(ThreadPool, SeveralCallers) {
  ThreadPool pool(3);
  std::atomic<int64_t> sums[2] = {0, 0};
  const auto call = [&](size_t caller) {
    for (int loop = 0; loop < 2000; ++loop) {
      pool.For(8, [&](int64_t i) { sums[caller] += i; });
    }
  };
  std::thread other(call, 1);
  call(0);
  other.join();
  for (const auto& sum : sums) EXPECT_EQ(sum, 2000 * 28);
}

TEST(ThreadPool, CoresAreThoseThatTheProcessMayRunOn) {
  std::thread bound([] {
    cpu_set_t one;
    ASSERT_EQ(sched_getaffinity(0, sizeof(one), &one), 0);
    int cpu = 0;
    while (!CPU_ISSET(cpu, &one)) ++cpu;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    EXPECT_EQ(HostCores(), 1);
    EXPECT_EQ(OnlineCores(), sysconf(_SC_NPROCESSORS_ONLN));
  });
  bound.join();
}

TEST(ThreadPool, AContainerMayHaveTheTimeOfSomeCores) {
  EXPECT_EQ(QuotaOf("800000 100000"), 8);
  EXPECT_EQ(QuotaOf("250000 100000"), 3);  // 2.5
  EXPECT_EQ(QuotaOf("10000 100000"), 1);
  for (const char* none : {"max 100000", "", "100000", "0 0", "-1 100000"}) {
    EXPECT_EQ(QuotaOf(none), 0) << none;
  }
}

TEST(ThreadPool, RanksShareTheCores) {
  EXPECT_GE(ThreadsPerRank(1), 1);
  EXPECT_EQ(ThreadsPerRank(1 << 20), 1);
}

}  // namespace
}  // namespace tessera
