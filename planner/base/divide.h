#pragma once
// Division that rounds up. Of `a` that are not negative and `b` above zero;
// neither overflows where a + b does not.

#include <type_traits>

namespace tessera {

// The least whole number that is not below a / b.
template <typename T>
constexpr T DivideUp(T a, std::type_identity_t<T> b) {
  return (a + b - 1) / b;
}

// The least multiple of b that is not below a.
template <typename T>
constexpr T RoundUp(T a, std::type_identity_t<T> b) {
  return DivideUp(a, b) * b;
}

}  // namespace tessera
