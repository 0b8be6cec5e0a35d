#pragma once
// The place of one item of a list, for messages.

#include <concepts>
#include <string>
#include <string_view>

namespace tessera {

// "links[3]", or of its field "links[3].bandwidth".
std::string Indexed(std::string_view list, std::integral auto index,
                    std::string_view field = "") {
  std::string where = std::string(list) + "[" + std::to_string(index) + "]";
  if (!field.empty()) where += "." + std::string(field);
  return where;
}

}  // namespace tessera
