#pragma once
// Texts that are whole numbers.

#include <charconv>
#include <concepts>
#include <optional>
#include <string_view>
#include <system_error>

namespace tessera {

// The number that the whole of `text` is in decimal digits, behind a '-' where
// an Integer may be negative; nothing where it is anything else (a space, a
// '+', a fraction) or more than an Integer holds.
template <std::integral Integer>
std::optional<Integer> ParseWhole(std::string_view text) {
  Integer value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end) return std::nullopt;
  return value;
}

}  // namespace tessera
