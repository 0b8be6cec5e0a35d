#pragma once
// Lists in text.

#include <string>
#include <string_view>

namespace tessera {

// Adds `item` to `list`, behind `separator` unless it is the first.
inline void AppendTo(std::string& list, std::string_view separator,
                     std::string_view item) {
  if (!list.empty()) list += separator;
  list += item;
}

}  // namespace tessera
