#pragma once
// Constraints as a command line or a file gives them. Functions without state;
// thread-safe.

#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"

namespace tessera {

// One constraint as it was given.
struct ConstraintText {
  std::string text;
  std::string line = {};  // of a file, "FILE:3"; empty: of the command line
};

struct ConstraintTexts {
  // "PATTERN=KEY:VALUE", such as "h.*.attn=tp:8": the operators whose names
  // match have it so, each of them that has something to be split so. The
  // components of a pattern, between dots, match neighbouring components of a
  // name; '*' stands for any characters of one. Keys: FixKeys().
  std::vector<ConstraintText> fix = {};
  std::vector<ConstraintText> forbid = {};  // of Forbidden(), or a schedule
  int max_microbatch = 0;  // samples of a microbatch on a replica; 0: any
  std::string max_microbatch_line = {};  // ConstraintText::line of that
  ConstraintText space = {};             // a row of Subspaces(); empty: full
};

// Adds the lines of a file's text: "fix PATTERN=KEY:VALUE", "forbid NAME",
// "max-microbatch N", "space NAME", the last two once at most; '#' begins a
// comment. Of two limits to the microbatch the smaller one holds; a space
// besides another one is an error. Errors name `path` and the line.
Result<void> ParseConstraints(std::string_view text, const std::string& path,
                              ConstraintTexts& texts);

// Where a constraint of the key was given, and what: "--forbid zero3",
// "c.txt:3: forbid zero3".
std::string WhereOf(std::string_view key, const ConstraintText& given);

// A whole number from `least` on.
Result<int> ReadWholeFrom(int least, std::string_view text);

}  // namespace tessera
