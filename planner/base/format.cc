#include "planner/base/format.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace tessera {
namespace {

struct Unit {
  double size;
  std::string_view name;
};

// Units in descending order of size; the last one takes what is smaller.
template <size_t n>
std::string Scaled(double value, const std::array<Unit, n>& units) {
  const Unit* unit = &units.back();
  for (const Unit& candidate : units) {
    // 0.9995 prints as 1.00 of the next unit.
    if (std::abs(value) >= 0.9995 * candidate.size) {
      unit = &candidate;
      break;
    }
  }
  const double scaled = value / unit->size;
  const double size = std::abs(scaled);
  const bool whole = scaled == std::floor(scaled) && unit == &units.back();
  const int decimals = whole ? 0 : size < 9.995 ? 2 : size < 99.95 ? 1 : 0;
  std::string text = FormatFixed(scaled, decimals);
  if (!unit->name.empty()) text += " " + std::string(unit->name);
  return text;
}

}  // namespace

std::string FormatNumber(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g", value);
  // 999.5 is 1000 in three digits.
  const double rounded = std::strtod(text, nullptr);
  if (!(std::abs(rounded) >= 1000 && std::abs(rounded) < 1e15)) return text;
  std::string digits = FormatFixed(rounded, 0);
  for (size_t end = digits.size(); end > 3 + (value < 0 ? 1 : 0);) {
    end -= 3;
    digits.insert(end, ",");
  }
  return digits;
}

std::string FormatFixed(double value, int decimals) {
  char buffer[352];  // the largest double has 309 digits before the point
  // Not "-nan".
  if (std::isnan(value)) return "nan";
  std::snprintf(buffer, sizeof(buffer), "%.*f", decimals, value);
  return buffer;
}

std::string FormatTime(double seconds) {
  static constexpr std::array<Unit, 4> kUnits = {
      {{1, "s"}, {1e-3, "ms"}, {1e-6, "us"}, {1e-9, "ns"}}};
  return seconds == 0 ? "0 s" : Scaled(seconds, kUnits);
}

std::string FormatTime(Duration time) {
  return FormatTime(time.seconds());
}

std::string FormatBytes(Bytes bytes) {
  static constexpr std::array<Unit, 5> kUnits = {
      {{1e12, "TB"}, {1e9, "GB"}, {1e6, "MB"}, {1e3, "kB"}, {1, "B"}}};
  return Scaled(static_cast<double>(bytes.value), kUnits);
}

std::string FormatExactBytes(Bytes bytes, std::string_view space) {
  int64_t count = bytes.value;
  std::string_view unit = "B";
  for (const std::string_view larger : {"kB", "MB", "GB", "TB"}) {
    if (count == 0 || count % 1000 != 0) break;
    count /= 1000;
    unit = larger;
  }
  return std::to_string(count) + std::string(space) + std::string(unit);
}

std::string FormatCount(double count) {
  static constexpr std::array<Unit, 5> kUnits = {{{1e12, "trillion"},
                                                  {1e9, "billion"},
                                                  {1e6, "million"},
                                                  {1e3, "thousand"},
                                                  {1, ""}}};
  return Scaled(count, kUnits);
}

std::string FormatRate(FlopsPerSecond rate) {
  static constexpr std::array<Unit, 4> kUnits = {{{1e15, "PFLOP/s"},
                                                  {1e12, "TFLOP/s"},
                                                  {1e9, "GFLOP/s"},
                                                  {1e6, "MFLOP/s"}}};
  return Scaled(rate.value, kUnits);
}

std::string FormatPercent(double share) {
  return FormatFixed(100 * share, 1) + " %";
}

std::string FormatEnds(const std::string& text, size_t half) {
  if (text.size() <= 2 * half) return text;
  return text.substr(0, half) + "..." + text.substr(text.size() - half);
}

}  // namespace tessera
