#pragma once
// Quantities as people read them. SI units: 1 GB is 10^9 bytes.

#include <string>
#include <string_view>

#include "planner/base/units.h"

namespace tessera {

// Three digits or more and a unit: "12.3 ms", "1.20 s", "80.0 us".
std::string FormatTime(double seconds);
std::string FormatTime(Duration time);
// "38.2 GB", "512 B".
std::string FormatBytes(Bytes bytes);
// "25 MB", "1234 B": exactly, in the largest unit that is whole, behind a
// `space`.
std::string FormatExactBytes(Bytes bytes, std::string_view space = " ");
// "1.56 billion", "124 million", "999": for counts.
std::string FormatCount(double count);
// "218 TFLOP/s".
std::string FormatRate(FlopsPerSecond rate);
// Three significant digits: "0.125", "66,100".
std::string FormatNumber(double value);
// printf's "%.Nf".
std::string FormatFixed(double value, int decimals);
// "41.7 %" of 0.417.
std::string FormatPercent(double share);
// A long text as its first and last `half` bytes.
std::string FormatEnds(const std::string& text, size_t half);

}  // namespace tessera
