#include "tools/interrupt.h"

#include <chrono>
#include <csignal>
#include <cstdint>
#include <ctime>

#include "runtime/launch/launch.h"

namespace tessera {
namespace {

// A signal handler reaches nothing but globals.
// NOLINTNEXTLINE(cppcoreguidelines-avoid-non-const-global-variables)
std::atomic<bool> interrupted = false;
static_assert(std::atomic<bool>::is_always_lock_free);

// NOLINTNEXTLINE(cppcoreguidelines-avoid-non-const-global-variables)
std::atomic<bool> unread = false;

// When the first signal came, of CLOCK_MONOTONIC; 0: none has.
// NOLINTNEXTLINE(cppcoreguidelines-avoid-non-const-global-variables)
std::atomic<int64_t> first_ns = 0;
static_assert(std::atomic<int64_t>::is_always_lock_free);

int64_t NowNs() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

void OnSignal(int number) {
  interrupted = true;
  const int64_t now = NowNs();
  int64_t first = 0;
  if (first_ns.compare_exchange_strong(first, now)) return;
  if (std::chrono::nanoseconds(now - first) < kOneInterrupt) return;
  // It is blocked until this returns.
  signal(number, SIG_DFL);
  raise(number);
}

void OnUnread(int /*number*/) {
  unread = true;
  interrupted = true;
}

}  // namespace

const std::atomic<bool>& CatchInterrupts() {
  struct sigaction action = {};
  action.sa_handler = OnSignal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = static_cast<int>(SA_RESTART);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  // Under nohup a terminal that goes away is to be ignored.
  struct sigaction before = {};
  sigaction(SIGHUP, nullptr, &before);
  if (before.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, nullptr);
  // A rank may have been told before (LaunchRanks).
  sigset_t caught;
  sigemptyset(&caught);
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    sigaddset(&caught, number);
  }
  pthread_sigmask(SIG_UNBLOCK, &caught, nullptr);
  return interrupted;
}

const std::atomic<bool>& Interrupted() {
  return interrupted;
}

void InterruptWhenUnread() {
  struct sigaction action = {};
  action.sa_handler = OnUnread;
  sigemptyset(&action.sa_mask);
  action.sa_flags = static_cast<int>(SA_RESTART);  // at every line
  sigaction(SIGPIPE, &action, nullptr);
}

bool OutputIsUnread() {
  return unread;
}

}  // namespace tessera
