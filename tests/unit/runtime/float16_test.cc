// Conversions against the formats' definitions, in double: a format is its set
// of values, and rounding picks the nearest, of two the one that is even.

#include "runtime/float16.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "planner/base/rng.h"

namespace tessera {
namespace {

struct Format {
  DType dtype;
  int exponent_bits;
  int fraction_bits;
};
constexpr Format kFormats[] = {{DType::kBFloat16, 8, 7},
                               {DType::kFloat16, 5, 10}};

float Widened(DType dtype, uint16_t bits) {
  float value = 0;
  Widen(&bits, dtype, 1, &value);
  return value;
}
uint16_t Narrowed(DType dtype, float value) {
  uint16_t bits = 0;
  Narrow(&value, 1, dtype, &bits);
  return bits;
}

// (-1)^sign 2^(e - bias) (1 + f / 2^n), or without the 1 for e = 0.
double Value(const Format& format, int bits) {
  const int sign = bits >> 15;
  const int exponent =
      bits >> format.fraction_bits & ((1 << format.exponent_bits) - 1);
  const int fraction = bits & ((1 << format.fraction_bits) - 1);
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  double value = 0;
  if (exponent == (1 << format.exponent_bits) - 1) {
    value = fraction == 0 ? std::numeric_limits<double>::infinity()
                          : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    value = std::ldexp(fraction, 1 - bias - format.fraction_bits);
  } else {
    value = std::ldexp(fraction + (1 << format.fraction_bits),
                       exponent - bias - format.fraction_bits);
  }
  return sign == 1 ? -value : value;
}

TEST(Float16, AllValuesWiden) {
  for (const Format& format : kFormats) {
    for (int bits = 0; bits < 65536; ++bits) {
      const double expected = Value(format, bits);
      const float actual = Widened(format.dtype, static_cast<uint16_t>(bits));
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(actual)) << bits;
        continue;
      }
      ASSERT_EQ(actual, expected) << NameOf(format.dtype) << " " << bits;
      ASSERT_EQ(std::signbit(actual), std::signbit(expected)) << bits;
      ASSERT_EQ(Narrowed(format.dtype, actual), bits);
    }
  }
}

// The nearest of the finite values and of the one that would follow the
// largest, which stands for infinity; patterns of magnitudes are in order, so
// that a binary search finds the neighbours.
int Nearest(const Format& format, float value) {
  const int infinity = ((1 << format.exponent_bits) - 1)
                       << format.fraction_bits;
  const double magnitude = std::abs(static_cast<double>(value));
  const auto at = [&](int bits) {
    if (bits < infinity) return Value(format, bits);
    return 2 * Value(format, infinity - (1 << format.fraction_bits));
  };
  int low = 0;  // at(low) <= magnitude < at(low + 1), or infinity
  int high = infinity;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (at(middle) <= magnitude ? low : high) = middle;
  }
  const double below = magnitude - at(low);
  const double above = at(high) - magnitude;
  int bits = low;
  if (above < below || (above == below && low % 2 == 1)) bits = high;
  return std::signbit(value) ? bits | 0x8000 : bits;
}

TEST(Float16, RoundsToNearestEven) {
  Rng rng(3);
  for (const Format& format : kFormats) {
    const auto check = [&](float value) {
      if (std::isnan(value)) {
        ASSERT_TRUE(
            std::isnan(Widened(format.dtype, Narrowed(format.dtype, value))));
      } else {
        ASSERT_EQ(Narrowed(format.dtype, value), Nearest(format, value))
            << NameOf(format.dtype) << " of " << value;
      }
    };
    // Bit patterns of every kind; most are out of fp16's range, so half of
    // them get an exponent within it, subnormals and overflow included.
    for (int i = 0; i < 300000; ++i) {
      uint32_t bits = rng.Below(65536) << 16 | rng.Below(65536);
      if (i % 2 == 0) bits = (bits & 0x807fffffu) | (100 + rng.Below(46)) << 23;
      check(std::bit_cast<float>(bits));
    }
    // Every value, every midpoint between two, and their fp32 neighbours.
    for (int bits = 0; bits < 65535; ++bits) {
      const double here = Value(format, bits);
      const double next = Value(format, bits + 1);
      if (!std::isfinite(here) || !std::isfinite(next)) continue;
      for (const double between : {here, (here + next) / 2}) {
        const auto value = static_cast<float>(between);
        check(value);
        check(std::nextafter(value, 1e38f));
        check(std::nextafter(value, -1e38f));
      }
    }
    check(std::numeric_limits<float>::infinity());
    check(-std::numeric_limits<float>::infinity());
    check(std::numeric_limits<float>::quiet_NaN());
    // A NaN whose payload lies in the lost bits does not become infinity.
    check(std::bit_cast<float>(0x7f800001u));
  }
}

// The largest value and half of its last bit's weight: from there on infinity.
// fp16: 65504 + 16 = 65520.
TEST(Float16, OverflowsToInfinity) {
  EXPECT_EQ(Narrowed(DType::kFloat16, 65519.996f), 0x7bff);
  EXPECT_EQ(Narrowed(DType::kFloat16, 65520.0f), 0x7c00);
  EXPECT_EQ(Narrowed(DType::kFloat16, -1e30f), 0xfc00);
  EXPECT_EQ(Narrowed(DType::kBFloat16, 3.4e38f), 0x7f80);
}

}  // namespace
}  // namespace tessera
