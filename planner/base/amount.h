#pragma once
// Amount: a number with its unit, as people write it on a command line. Units
// are strict: GB is 10^9 bytes and GiB 2^30; Gb/s is 10^9 bits a second and
// GB/s 10^9 bytes a second.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"

namespace tessera {

enum class Dimension : uint8_t {
  kNumber,     // without a unit; "80%" is 0.8
  kBytes,      // B, kB, MB, GB, TB, KiB, MiB, GiB, TiB
  kBandwidth,  // bytes/s: any of these /s; bits/s: b/s, kb/s, Mb/s, Gb/s, Tb/s
  kFlops,      // FLOP/s, GFLOP/s, TFLOP/s, PFLOP/s
  kTime,       // ps, ns, us, ms, s, min, h, d
  kPrice,      // USD/h
  kPower,      // W, kW
  kFactor,     // "1.3x": that many times what there is
  kText,       // what is no number
};

struct Amount {
  Dimension dimension = Dimension::kNumber;
  double value = 0;  // in SI units: bytes, bytes/s, FLOP/s, s, USD/h, W
  std::string text;  // as it was written, with its unit
  bool operator==(const Amount&) const = default;
};

// Reads one. What starts as a number and does not end in a unit is an error,
// with the units; what does not start as a number is a text.
Result<Amount> ParseAmount(std::string_view text);

// "100,200,400,800Gb/s": a number without a unit has that of the next one that
// has one. A list in brackets is one text.
Result<std::vector<Amount>> ParseAmounts(std::string_view text);

// Of a count of tokens or parameters: "300B", "1.5T", "7e9".
Result<double> ParseCount(std::string_view text);

// Whether it is one of a dimension that has a unit, or 0, which needs none.
inline bool IsOf(const Amount& amount, Dimension dimension) {
  return amount.dimension == dimension ||
         (amount.dimension == Dimension::kNumber && amount.value == 0);
}

// "a bandwidth such as 25GB/s or 200Gb/s", for errors.
std::string_view Expected(Dimension dimension);

}  // namespace tessera
