#include "tools/interrupt.h"

#include <csignal>

namespace tessera {
namespace {

// A signal handler reaches nothing but globals.
// NOLINTNEXTLINE(cppcoreguidelines-avoid-non-const-global-variables)
std::atomic<bool> interrupted = false;
static_assert(std::atomic<bool>::is_always_lock_free);

// NOLINTNEXTLINE(cppcoreguidelines-avoid-non-const-global-variables)
std::atomic<bool> unread = false;

void OnSignal(int signal) {
  if (signal == SIGPIPE) unread = true;
  interrupted = true;
}

}  // namespace

const std::atomic<bool>& CatchInterrupts() {
  struct sigaction action = {};
  action.sa_handler = OnSignal;
  sigemptyset(&action.sa_mask);
  // SA_RESETHAND: the second signal has its default effect.
  action.sa_flags = static_cast<int>(SA_RESTART | SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  // Under nohup a terminal that goes away is to be ignored.
  struct sigaction before = {};
  sigaction(SIGHUP, nullptr, &before);
  if (before.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, nullptr);
  return interrupted;
}

const std::atomic<bool>& Interrupted() {
  return interrupted;
}

void InterruptWhenUnread() {
  struct sigaction action = {};
  action.sa_handler = OnSignal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = static_cast<int>(SA_RESTART);  // at every line
  sigaction(SIGPIPE, &action, nullptr);
}

bool OutputIsUnread() {
  return unread;
}

}  // namespace tessera
