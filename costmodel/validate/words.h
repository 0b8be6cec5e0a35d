#pragma once
// What published tables say in words.

#include <string>
#include <string_view>

#include "planner/base/result.h"

namespace tessera {

bool Has(std::string_view text, std::string_view part);

// ASCII letters only.
std::string Lower(std::string text);

// kInfeasible: a column says what has no counterpart here.
Error CannotMap(std::string what, std::string_view column);

}  // namespace tessera
