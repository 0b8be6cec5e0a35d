#pragma once
// The command-line flags, one row each, and the one parser that reads them.

#include <span>
#include <string>
#include <string_view>

#include "planner/base/result.h"
#include "tools/options.h"

namespace tessera {

struct Flag {
  std::string_view name;  // "--time-limit"
  // Placeholder, "SECONDS"; empty for a switch; "[N]" for a number that may be
  // left out, of which `set` then gets "".
  std::string_view value;
  std::string_view help;
  // Reads the value. The error's `where` is filled in by the parser.
  Result<void> (*set)(Options& options, const std::string& value);
  bool repeatable = false;
};

// Every flag of every verb.
std::span<const Flag> Flags();
// REQUIRES: there is such a flag.
const Flag& FlagNamed(std::string_view name);

// Reads `arguments`: flags of `accepted` as "--flag value" or "--flag=value",
// and up to `max_positional` other words. Errors name the flag: unknown (with
// the nearest name), twice, without its value, or with a value that is none.
Result<Options> ParseFlags(std::span<const std::string_view> accepted,
                           size_t max_positional,
                           std::span<const std::string> arguments);

}  // namespace tessera
