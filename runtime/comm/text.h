#pragma once
// Text for error messages.

#include <sstream>
#include <string>

namespace tessera {

// Text("rank ", 3) is "rank 3".
template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace tessera
