#pragma once
// The 16-bit floating-point formats, as storage: values are widened to fp32,
// computed with there, and rounded once on the way back. Conversions are exact
// on every machine: widening loses nothing, rounding is to the nearest value,
// ties to even, overflow to infinity (IEEE 754-2019, sections 4.3.1 and 7.4);
// subnormals are kept, a NaN stays a (quiet) NaN.
//   bf16: 8 bits of exponent, 7 of fraction: the upper half of fp32.
//   fp16: 5 bits of exponent, 10 of fraction: IEEE binary16, at most 65504,
//         smallest subnormal 2^-24.

#include <bit>
#include <cstdint>

#include "planner/ir/dtype.h"

namespace tessera {

struct BFloat16 {
  uint16_t bits = 0;
};
struct Float16 {
  uint16_t bits = 0;
};

inline bool Is16Bit(DType dtype) {
  return dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

inline float ToFloat(BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

inline float ToFloat(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  uint32_t bits = (magnitude << 13) + (112u << 23);  // bias 15 becomes 127
  if (magnitude >= 0x7c00u) {
    bits += 112u << 23;  // infinity or NaN
  } else if (magnitude < 0x0400u) {
    bits = std::bit_cast<uint32_t>(static_cast<float>(magnitude) * 0x1p-24f);
  }
  return std::bit_cast<float>(sign | bits);
}

inline BFloat16 ToBFloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return {static_cast<uint16_t>(bits >> 16 | 0x0040u)};
  }
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

// Up or down at random, as the lower 16 of `random` bits have it: up as often
// as the value is near there, so that in the mean it is the value.
inline BFloat16 ToBFloat16AtRandom(float value, uint32_t random) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7f800000u) == 0x7f800000u) return ToBFloat16(value);
  return {static_cast<uint16_t>((bits + (random & 0xffffu)) >> 16)};
}

inline Float16 ToFloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t rounded = 0;
  if (magnitude > 0x7f800000u) {
    rounded = 0x7e00u | (magnitude >> 13 & 0x3ffu);
  } else if (magnitude >= 0x47800000u) {  // 65536
    rounded = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // 2^-14
    // 2^-24 is the last bit of numbers from 0.5 to 1, so that the sum rounds.
    const float sum = std::bit_cast<float>(magnitude) + 0.5f;
    rounded = std::bit_cast<uint32_t>(sum) - 0x3f000000u;
  } else {
    // The carry may reach the exponent, and make infinity.
    const uint32_t nearest = magnitude + 0xfffu + (magnitude >> 13 & 1u);
    rounded = (nearest - (112u << 23)) >> 13;
  }
  return {static_cast<uint16_t>(sign | rounded)};
}

// n elements of a 16-bit `dtype` to and from fp32.
void Widen(const void* from, DType dtype, int64_t n, float* to);
void Narrow(const float* from, int64_t n, DType dtype, void* to);

// Element i of numbers of any `dtype`; a whole number where that is int32.
void StoreNumber(void* to, DType dtype, int64_t i, double value);

}  // namespace tessera
