#pragma once
// FNV-1a, 64 bits (Fowler, Noll and Vo, "The FNV Non-Cryptographic Hash
// Algorithm", IETF draft, 2012): unlike std::hash the same on every platform.
// For fingerprints, seeds and checks that peers mean the same; not against
// those who want a collision.

#include <cstdint>
#include <string_view>

namespace tessera {

class Fnv1a {
 public:
  constexpr Fnv1a& Add(std::string_view bytes) {
    for (char c : bytes) AddByte(static_cast<unsigned char>(c));
    return *this;
  }
  // Its eight bytes, the lowest first.
  constexpr Fnv1a& Add(uint64_t word) {
    for (int shift = 0; shift < 64; shift += 8) AddByte(word >> shift & 0xff);
    return *this;
  }
  // Of integers, one after the other.
  template <typename Range>
  constexpr Fnv1a& AddAll(const Range& words) {
    for (const auto word : words) Add(static_cast<uint64_t>(word));
    return *this;
  }
  constexpr uint64_t value() const { return value_; }

 private:
  constexpr void AddByte(uint64_t byte) {
    value_ = (value_ ^ byte) * 0x100000001b3ULL;
  }

  uint64_t value_ = 0xcbf29ce484222325ULL;
};

}  // namespace tessera
