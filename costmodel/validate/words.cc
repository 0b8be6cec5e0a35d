#include "costmodel/validate/words.h"

#include <algorithm>
#include <cctype>

namespace tessera {

bool Has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

std::string Lower(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) {
    return static_cast<char>(std::tolower(c));
  });
  return text;
}

Error CannotMap(std::string what, std::string_view column) {
  return {ErrorCode::kInfeasible, std::move(what), std::string(column)};
}

}  // namespace tessera
