#pragma once
// Names in messages.

#include <string>
#include <string_view>

namespace tessera {

inline std::string Quoted(std::string_view name) {
  return "'" + std::string(name) + "'";
}

}  // namespace tessera
