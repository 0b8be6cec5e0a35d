#pragma once
// Work on a thread that may run on one core alone.

#include <gtest/gtest.h>
#include <sched.h>

#include <functional>
#include <thread>

namespace tessera::testing {

// Does `work` on such a thread and waits for it.
inline void OnOneCore(const std::function<void()>& work) {
  std::thread bound([&] {
    cpu_set_t one;
    ASSERT_EQ(sched_getaffinity(0, sizeof(one), &one), 0);
    int cpu = 0;
    while (!CPU_ISSET(cpu, &one)) ++cpu;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    work();
  });
  bound.join();
}

}  // namespace tessera::testing
