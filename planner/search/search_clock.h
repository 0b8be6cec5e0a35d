#pragma once
// SearchClock: how far a search's time has come. Thread-safe.

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
  // Whether this part of the time limit has passed.
  bool Past(double part) const {
    return time_limit_ > 0 && Seconds() >= part * time_limit_;
  }
  bool StoppedOrPast(double part) const { return Stopped() || Past(part); }

 private:
  double time_limit_;
  const std::atomic<bool>* stop_;
  std::chrono::steady_clock::time_point start_ =
      std::chrono::steady_clock::now();
};

}  // namespace tessera
