#pragma once
// A line on standard error each few seconds of long work: how far it is.

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <iostream>
#include <mutex>
#include <string>

namespace tessera {

// Thread-safe.
class ProgressLine {
 public:
  // Silent until the work has taken that long. One that `rewrites` is one line
  // of a terminal instead, if standard error is one, and gone in the end;
  // nothing else is written there meanwhile.
  explicit ProgressLine(std::chrono::seconds between, bool rewrites = false)
      : between_(between),
        rewrites_(rewrites && isatty(STDERR_FILENO) != 0),
        next_(Clock::now() + between) {}
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;
  ~ProgressLine() {
    if (rewrites_) Rewrite("", "\r");
  }

  // Says so, unless the last line was a moment ago.
  void Show(const std::string& text) {
    const std::lock_guard lock(mutex_);
    if (rewrites_) return Rewrite(text, "");
    const Clock::time_point now = Clock::now();
    if (now < next_) return;
    next_ = now + between_;
    std::cerr << "tessera: " << text << std::endl;
  }

 private:
  using Clock = std::chrono::steady_clock;

  static void Rewrite(const std::string& text, const char* end) {
    std::fprintf(stderr, "\r%-78s%s", text.c_str(), end);
    std::fflush(stderr);
  }

  const std::chrono::seconds between_;
  const bool rewrites_;
  std::mutex mutex_;
  Clock::time_point next_;
};

}  // namespace tessera
