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

}  // namespace
}  // namespace tessera
