#include "tools/interrupt.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>

namespace tessera {
namespace {

// In a process of its own, which a signal may end.
void CatchThree(useconds_t between) {
  const std::atomic<bool>& interrupted = CatchInterrupts();
  if (interrupted) _exit(1);
  raise(SIGTERM);
  raise(SIGTERM);
  raise(SIGINT);
  if (!interrupted) _exit(2);
  usleep(between);
  raise(SIGTERM);
  _exit(0);
}

// As when a whole group is signalled, and a launcher passes the signal on.
TEST(CatchInterrupts, WhatComesAtOnceIsOneWishToEnd) {
  EXPECT_EXIT(CatchThree(0), ::testing::ExitedWithCode(0), "");
}

void CatchOneThatWaits() {
  sigset_t term;
  sigemptyset(&term);
  sigaddset(&term, SIGTERM);
  sigprocmask(SIG_BLOCK, &term, nullptr);
  raise(SIGTERM);
  _exit(CatchInterrupts() ? 0 : 1);
}

// As a rank that was told when it had just been started.
TEST(CatchInterrupts, WhatWasBlockedIsCaught) {
  EXPECT_EXIT(CatchOneThatWaits(), ::testing::ExitedWithCode(0), "");
}

TEST(CatchInterrupts, ALaterOneEndsTheProcess) {
  EXPECT_EXIT(CatchThree(1'100'000), ::testing::KilledBySignal(SIGTERM), "");
}

}  // namespace
}  // namespace tessera
