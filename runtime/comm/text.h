#pragma once
// Errors of communication, and their text.

#include <span>
#include <sstream>
#include <string>
#include <utility>

#include "planner/base/append.h"
#include "planner/base/result.h"

namespace tessera {

// Text("rank ", 3) is "rank 3".
template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// "{0,3}".
inline std::string GroupText(std::span<const int> ranks) {
  std::string text;
  for (int rank : ranks) AppendTo(text, ",", Text(rank));
  return Text("{", text, "}");
}

inline Error Unavailable(std::string message) {
  return {ErrorCode::kUnavailable, std::move(message), ""};
}

}  // namespace tessera
