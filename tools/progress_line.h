#pragma once
// A line on standard error each few seconds of long work: how far it is.

#include <chrono>
#include <iostream>
#include <mutex>
#include <string>

namespace tessera {

// Thread-safe.
class ProgressLine {
 public:
  // Silent until the work has taken that long.
  explicit ProgressLine(std::chrono::seconds between)
      : between_(between), next_(Clock::now() + between) {}

  // Says so, unless the last line was a moment ago.
  void Show(const std::string& text) {
    const std::lock_guard lock(mutex_);
    const Clock::time_point now = Clock::now();
    if (now < next_) return;
    next_ = now + between_;
    std::cerr << "tessera: " << text << std::endl;
  }

 private:
  using Clock = std::chrono::steady_clock;

  const std::chrono::seconds between_;
  std::mutex mutex_;
  Clock::time_point next_;
};

}  // namespace tessera
