#pragma once
// Durations of ours, and the clock by which waits end.

#include <chrono>

#include "planner/base/units.h"

namespace tessera {

inline std::chrono::milliseconds Milliseconds(Duration duration) {
  return std::chrono::milliseconds(duration.picoseconds / 1'000'000'000);
}

// None where the deadline is over.
inline Duration Left(std::chrono::steady_clock::time_point deadline) {
  const std::chrono::duration<double> left =
      deadline - std::chrono::steady_clock::now();
  return Max(Duration{}, Duration::FromSeconds(left.count()));
}

}  // namespace tessera
