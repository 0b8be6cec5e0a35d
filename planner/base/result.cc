#include "planner/base/result.h"

#include <cstdio>

namespace tessera {

Error Error::At(std::string_view outer) const {
  Error result = *this;
  if (where.empty()) {
    result.where = outer;
  } else if (where.front() == '[') {
    result.where = std::string(outer) + where;
  } else {
    result.where = std::string(outer) + ": " + where;
  }
  return result;
}

std::string Error::ToString() const {
  std::string line;
  for (const char c : where.empty() ? message : where + ": " + message) {
    // Names come from files: what would move a terminal's cursor is shown.
    const auto code = static_cast<unsigned char>(c);
    if (code >= 0x20 && code != 0x7f) {
      line += c;
    } else {
      char hex[5];
      std::snprintf(hex, sizeof(hex), "\\x%02x", code);
      line += hex;
    }
  }
  return line;
}

}  // namespace tessera
