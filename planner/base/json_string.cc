#include "planner/base/json_string.h"

#include <algorithm>

#include "planner/base/utf8.h"

namespace tessera {

std::string JsonString(std::string_view text) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string out = "\"";
  for (size_t i = 0; i < text.size();) {
    const char c = text[i];
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
      ++i;
    } else if (c == '\n') {
      out += "\\n";
      ++i;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += "\\u00";
      out += kHex[static_cast<size_t>(c) >> 4];
      out += kHex[static_cast<size_t>(c) & 15];
      ++i;
    } else {
      const size_t length = Utf8Length(text.substr(i));
      out += length == 0 ? "\\ufffd" : text.substr(i, length);
      i += std::max<size_t>(1, length);
    }
  }
  return out + "\"";
}

}  // namespace tessera
