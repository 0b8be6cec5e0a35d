#pragma once
// Reproducible randomness, the same bits on every machine.
//  - Rng: a sequential stream (PCG-XSH-RR 64/32; O'Neill 2014) for the search.
//  - Counter…: pure functions of a key and a counter (Mix64: a step of
//    SplitMix64; Steele et al. 2014) for weights and dropout, keyed by global
//    index so that no split changes what is drawn.

#include <cmath>
#include <cstdint>

namespace tessera {

class Rng {
 public:
  explicit Rng(uint64_t seed, uint64_t stream = 0)
      : state_(0), increment_((stream << 1) | 1) {
    Next();
    state_ += seed;
    Next();
  }

  uint32_t Next() {
    const uint64_t old = state_;
    state_ = old * 6364136223846793005ULL + increment_;
    const auto shifted = static_cast<uint32_t>(((old >> 18) ^ old) >> 27);
    const auto rotation = static_cast<uint32_t>(old >> 59);
    return (shifted >> rotation) | (shifted << ((32 - rotation) & 31));
  }

  // Uniform in [0, 1), with 53 random bits.
  double Uniform01() {
    const uint64_t high = Next();
    const uint64_t bits = (high << 32) | Next();
    return static_cast<double>(bits >> 11) * 0x1.0p-53;
  }

  // Uniform in {0, ..., n-1}, without modulo bias. REQUIRES: n > 0.
  uint32_t Below(uint32_t n) {
    const uint32_t threshold = (0u - n) % n;
    for (;;) {
      const uint32_t draw = Next();
      if (draw >= threshold) return draw % n;
    }
  }

 private:
  uint64_t state_;
  uint64_t increment_;
};

constexpr uint64_t Mix64(uint64_t z) {
  z += 0x9e3779b97f4a7c15ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

// 53 random bits for (key, counter).
constexpr uint64_t CounterBits53(uint64_t key, uint64_t counter) {
  return Mix64(key ^ Mix64(counter)) >> 11;
}

// Uniform in [0, 1) for (key, counter).
inline double CounterUniform01(uint64_t key, uint64_t counter) {
  return static_cast<double>(CounterBits53(key, counter)) * 0x1.0p-53;
}

// Standard normal for (key, counter), by Box and Muller (1958).
inline double CounterNormal(uint64_t key, uint64_t counter) {
  const double u = 1.0 - CounterUniform01(key, 2 * counter);  // (0, 1]
  const double v = CounterUniform01(key, 2 * counter + 1);
  return std::sqrt(-2.0 * std::log(u)) * std::cos(6.283185307179586 * v);
}

}  // namespace tessera
