#pragma once
// TESSERA_CHECK(condition) << values: aborts with the condition and the values
// when an invariant of ours is broken, in every build type. Never for input:
// what a user can cause is an Error (result.h).

#include <cstdlib>
#include <iostream>
#include <sstream>

namespace tessera::internal {

class CheckFailure {
 public:
  CheckFailure(const char* file, int line, const char* condition) {
    text_ << file << ":" << line << ": check failed: " << condition << " ";
  }
  [[noreturn]] ~CheckFailure() {
    std::cerr << text_.str() << std::endl;
    std::abort();
  }
  template <typename T>
  CheckFailure& operator<<(const T& value) {
    text_ << value;
    return *this;
  }

 private:
  std::ostringstream text_;
};

}  // namespace tessera::internal

#define TESSERA_CHECK(condition) \
  if (condition) {               \
  } else                         \
    ::tessera::internal::CheckFailure(__FILE__, __LINE__, #condition)
