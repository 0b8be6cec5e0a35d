#pragma once
// Quantities with one dimension each, in SI units. Conversions to and from
// other units happen at the file boundary only.

#include <algorithm>
#include <cmath>
#include <compare>
#include <cstdint>
#include <limits>

namespace tessera {

// A span of time in whole picoseconds (+-106 days). Integer, so that sums,
// maxima and multiples are exact in any order: a folded simulation equals an
// unfolded one, a delta evaluation equals a full one. Every task cost is
// rounded once, by FromSeconds.
struct Duration {
  int64_t picoseconds = 0;

  // Rounds to the nearest picosecond; what would not fit is the longest span.
  // REQUIRES: not NaN.
  static Duration FromSeconds(double seconds) {
    return {static_cast<int64_t>(
        std::llround(std::clamp(seconds, -9e6, 9e6) * 1e12))};
  }
  double seconds() const { return static_cast<double>(picoseconds) * 1e-12; }
  double milliseconds() const { return seconds() * 1e3; }

  auto operator<=>(const Duration&) const = default;
  Duration operator+(Duration o) const { return {picoseconds + o.picoseconds}; }
  Duration operator-(Duration o) const { return {picoseconds - o.picoseconds}; }
  Duration operator*(int64_t n) const { return {picoseconds * n}; }
  Duration& operator+=(Duration o) {
    picoseconds += o.picoseconds;
    return *this;
  }
};

inline Duration Max(Duration a, Duration b) {
  return a < b ? b : a;
}

// Strongly typed doubles: never added to one another across dimensions.
template <typename Tag>
struct Quantity {
  double value = 0;
  auto operator<=>(const Quantity&) const = default;
  Quantity operator+(Quantity o) const { return {value + o.value}; }
  Quantity operator-(Quantity o) const { return {value - o.value}; }
  Quantity operator*(double f) const { return {value * f}; }
  Quantity operator/(double f) const { return {value / f}; }
  double operator/(Quantity o) const { return value / o.value; }
  Quantity& operator+=(Quantity o) {
    value += o.value;
    return *this;
  }
};

using Flops = Quantity<struct FlopsTag>;                    // operations
using FlopsPerSecond = Quantity<struct FlopsPerSecondTag>;  // operations/s
using BytesPerSecond = Quantity<struct BytesPerSecondTag>;  // bytes/s

// A count of bytes; integer, since memory accounts must be exact.
struct Bytes {
  int64_t value = 0;
  auto operator<=>(const Bytes&) const = default;
  Bytes operator+(Bytes o) const { return {value + o.value}; }
  Bytes operator-(Bytes o) const { return {value - o.value}; }
  Bytes operator*(int64_t n) const { return {value * n}; }
  Bytes& operator+=(Bytes o) {
    value += o.value;
    return *this;
  }
};

inline Bytes Max(Bytes a, Bytes b) {
  return a < b ? b : a;
}

// Time to do `work` at `rate`, in seconds (not yet rounded to a Duration).
inline double SecondsFor(Flops work, FlopsPerSecond rate) {
  return work.value / rate.value;
}
inline double SecondsFor(Bytes size, BytesPerSecond rate) {
  return static_cast<double>(size.value) / rate.value;
}

}  // namespace tessera
