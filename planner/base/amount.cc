#include "planner/base/amount.h"

#include <array>
#include <charconv>
#include <cmath>
#include <optional>

#include "planner/base/table.h"

namespace tessera {
namespace {

struct Unit {
  std::string_view name;
  Dimension dimension;
  double scale;
};

constexpr double kKi = 1024;

constexpr std::array kUnits = {
    Unit{"%", Dimension::kNumber, 0.01},
    Unit{"x", Dimension::kFactor, 1},
    Unit{"B", Dimension::kBytes, 1},
    Unit{"kB", Dimension::kBytes, 1e3},
    Unit{"MB", Dimension::kBytes, 1e6},
    Unit{"GB", Dimension::kBytes, 1e9},
    Unit{"TB", Dimension::kBytes, 1e12},
    Unit{"KiB", Dimension::kBytes, kKi},
    Unit{"MiB", Dimension::kBytes, kKi* kKi},
    Unit{"GiB", Dimension::kBytes, kKi* kKi* kKi},
    Unit{"TiB", Dimension::kBytes, kKi* kKi* kKi* kKi},
    Unit{"B/s", Dimension::kBandwidth, 1},
    Unit{"kB/s", Dimension::kBandwidth, 1e3},
    Unit{"MB/s", Dimension::kBandwidth, 1e6},
    Unit{"GB/s", Dimension::kBandwidth, 1e9},
    Unit{"TB/s", Dimension::kBandwidth, 1e12},
    Unit{"KiB/s", Dimension::kBandwidth, kKi},
    Unit{"MiB/s", Dimension::kBandwidth, kKi* kKi},
    Unit{"GiB/s", Dimension::kBandwidth, kKi* kKi* kKi},
    Unit{"TiB/s", Dimension::kBandwidth, kKi* kKi* kKi* kKi},
    Unit{"b/s", Dimension::kBandwidth, 1.0 / 8},
    Unit{"kb/s", Dimension::kBandwidth, 1e3 / 8},
    Unit{"Mb/s", Dimension::kBandwidth, 1e6 / 8},
    Unit{"Gb/s", Dimension::kBandwidth, 1e9 / 8},
    Unit{"Tb/s", Dimension::kBandwidth, 1e12 / 8},
    Unit{"FLOP/s", Dimension::kFlops, 1},
    Unit{"GFLOP/s", Dimension::kFlops, 1e9},
    Unit{"TFLOP/s", Dimension::kFlops, 1e12},
    Unit{"PFLOP/s", Dimension::kFlops, 1e15},
    Unit{"ps", Dimension::kTime, 1e-12},
    Unit{"ns", Dimension::kTime, 1e-9},
    Unit{"us", Dimension::kTime, 1e-6},
    Unit{"ms", Dimension::kTime, 1e-3},
    Unit{"s", Dimension::kTime, 1},
    Unit{"min", Dimension::kTime, 60},
    Unit{"h", Dimension::kTime, 3600},
    Unit{"d", Dimension::kTime, 86400},
    Unit{"USD/h", Dimension::kPrice, 1},
    Unit{"W", Dimension::kPower, 1},
    Unit{"kW", Dimension::kPower, 1e3},
};

constexpr std::array kCounts = {
    Unit{"k", Dimension::kNumber, 1e3},
    Unit{"M", Dimension::kNumber, 1e6},
    Unit{"B", Dimension::kNumber, 1e9},
    Unit{"T", Dimension::kNumber, 1e12},
};

// A number, and what is behind it.
struct Split {
  double number = 0;
  std::string_view unit;
};

std::optional<Split> SplitNumber(std::string_view text) {
  Split split;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, split.number);
  if (error != std::errc() || !std::isfinite(split.number)) return {};
  split.unit = text.substr(static_cast<size_t>(stop - text.data()));
  while (split.unit.starts_with(' ')) split.unit.remove_prefix(1);
  return split;
}

Result<Amount> ParseWithUnits(std::string_view text,
                              std::span<const Unit> units) {
  const std::optional<Split> split = SplitNumber(text);
  if (!split) {
    return Amount{Dimension::kText, 0, std::string(text)};
  }
  if (split->unit.empty()) {
    return Amount{Dimension::kNumber, split->number, std::string(text)};
  }
  // "1-4" and "1..4".
  if (split->unit[0] == '-' || split->unit[0] == '.') {
    return InvalidInput("'" + std::string(text) +
                        "' is no number: a list is written 1,2,3,4");
  }
  const auto unit = Find("unit", units, split->unit);
  if (!unit) {
    return InvalidInput("'" + std::string(text) + "': " + unit.error().message);
  }
  return Amount{(*unit)->dimension, split->number * (*unit)->scale,
                std::string(text)};
}

}  // namespace

Result<Amount> ParseAmount(std::string_view text) {
  if (text.empty()) return InvalidInput("the value is empty");
  return ParseWithUnits(text, kUnits);
}

Result<std::vector<Amount>> ParseAmounts(std::string_view text) {
  std::vector<std::string> words(1);
  int within = 0;  // brackets of lists, whose commas are their own
  for (const char c : text) {
    within += (c == '[') - (c == ']');
    if (c == ',' && within <= 0) {
      words.emplace_back();
    } else {
      words.back() += c;
    }
  }
  std::string unit;
  for (size_t i = words.size(); i-- > 0;) {
    const auto split = SplitNumber(words[i]);
    if (!split) {
      unit.clear();
    } else if (split->unit.empty()) {
      words[i] += unit;
    } else {
      unit = split->unit;
    }
  }
  std::vector<Amount> amounts;
  for (const std::string& word : words) {
    TESSERA_TRY(Amount amount, ParseAmount(word));
    amounts.push_back(std::move(amount));
  }
  return amounts;
}

Result<double> ParseCount(std::string_view text) {
  TESSERA_TRY(const Amount amount, ParseWithUnits(text, kCounts));
  if (amount.dimension != Dimension::kNumber || !(amount.value > 0)) {
    return InvalidInput("'" + std::string(text) +
                        "' is not a positive count such as 300B or 1.5T");
  }
  return amount.value;
}

std::string_view Expected(Dimension dimension) {
  switch (dimension) {
    case Dimension::kNumber:
      return "a number without a unit";
    case Dimension::kBytes:
      return "a size such as 80GB or 80GiB";
    case Dimension::kBandwidth:
      return "a bandwidth such as 25GB/s or 200Gb/s";
    case Dimension::kFlops:
      return "a rate such as 312TFLOP/s";
    case Dimension::kTime:
      return "a time such as 5us, 2.5s or 3h";
    case Dimension::kPrice:
      return "a price such as 2.5USD/h";
    case Dimension::kPower:
      return "a power such as 700W";
    case Dimension::kFactor:
      return "a factor such as 1.3x";
    case Dimension::kText:
      return "a text";
  }
  return "";
}

}  // namespace tessera
