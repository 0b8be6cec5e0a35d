#include "planner/base/start_thread.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>

namespace tessera {
namespace {

TEST(StartThreadTest, Runs) {
  bool ran = false;
  auto thread = StartThread([&] { ran = true; });
  ASSERT_TRUE(thread.has_value());
  thread->join();
  EXPECT_TRUE(ran);
}

// The sanitizers' own maps exceed any limit.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST(StartThreadTest, NoneLeftIsAnError) {
  const auto start = [] {
    // No memory for more stacks than the C library keeps.
    const rlimit limit = {1 << 20, 1 << 20};
    setrlimit(RLIMIT_AS, &limit);
    for (int i = 0; i < 100; ++i) {
      auto thread = StartThread([] { pause(); });
      if (thread) {
        thread->detach();
        continue;
      }
      std::fputs(thread.error().message.c_str(), stderr);
      _exit(1);
    }
    _exit(0);
  };
  EXPECT_EXIT(start(), ::testing::ExitedWithCode(1),
              "cannot start a thread: Resource temporarily unavailable");
}
#endif

}  // namespace
}  // namespace tessera
