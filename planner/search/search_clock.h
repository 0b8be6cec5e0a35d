#pragma once
// SearchClock: how far a search's time has come. Thread-safe.

#include <algorithm>
#include <atomic>
#include <chrono>

namespace tessera {

class SearchClock {
 public:
  // `time_limit` in seconds, 0: none. `stop`, which may be null, outlives it.
  SearchClock(double time_limit, const std::atomic<bool>* stop)
      : time_limit_(time_limit), stop_(stop) {}

  double Seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() -
                                         start_)
        .count();
  }
  bool Stopped() const { return stop_ != nullptr && stop_->load(); }
  // Keeps so many seconds of the time limit for what comes behind the search;
  // the last call counts.
  void Reserve(double seconds) { reserved_ = seconds; }
  // Whether this part of the time limit has passed, less what is reserved, or
  // will have so many seconds from now.
  bool Past(double part, double ahead = 0) const {
    return time_limit_ > 0 &&
           Seconds() + ahead >= part * (time_limit_ - reserved_);
  }
  // Seconds up to there, of what is not past some at least; without a limit 0.
  double SecondsTo(double part) const {
    if (time_limit_ == 0) return 0;
    return std::max(1e-3, part * (time_limit_ - reserved_) - Seconds());
  }
  bool StoppedOrPast(double part) const { return Stopped() || Past(part); }

 private:
  double time_limit_;
  std::atomic<double> reserved_ = 0;
  const std::atomic<bool>* stop_;
  std::chrono::steady_clock::time_point start_ =
      std::chrono::steady_clock::now();
};

}  // namespace tessera
