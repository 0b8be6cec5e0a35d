#include "planner/search/constraint_text.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <sstream>
#include <utility>

#include "planner/base/split.h"
#include "planner/base/table.h"
#include "planner/base/whole_number.h"

namespace tessera {
namespace {

// What a line of a file begins with.
struct LineKey {
  std::string_view name;
  std::string_view example;  // of a value
};

constexpr std::array kLineKeys = {
    LineKey{"fix", "h.*.attn=tp:8"},
    LineKey{"forbid", "zero3"},
    LineKey{"max-microbatch", "4"},
    LineKey{"space", "megatron"},
};

// The words of a line, apart from its comment.
std::vector<std::string> WordsOf(std::string_view line) {
  std::istringstream words(std::string(line.substr(0, line.find('#'))));
  return {std::istream_iterator<std::string>(words), {}};
}

// Whether the words of a line are a key and its value.
Result<void> CheckWords(const std::vector<std::string>& words) {
  TESSERA_TRY(
      const LineKey* key,
      Find("constraint", std::span<const LineKey>(kLineKeys), words[0]));
  if (words.size() == 2) return {};
  const std::string expected =
      "such as '" + words[0] + " " + std::string(key->example) + "'";
  if (words.size() == 1) {
    return InvalidInput("expected a value behind the key, " + expected);
  }
  return InvalidInput("'" + words[2] + "' is too much: expected a key and " +
                      "one value in a line, " + expected);
}

}  // namespace

Result<void> ParseConstraints(std::string_view text, const std::string& path,
                              ConstraintTexts& texts) {
  // What editors put before a text.
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
  bool has_limit = false;
  bool has_space = false;
  int number = 0;
  for (const std::string_view line : Split(text, '\n')) {
    ++number;
    const std::vector<std::string> words = WordsOf(line);
    if (words.empty()) continue;
    const std::string where = path + ":" + std::to_string(number);
    if (auto checked = CheckWords(words); !checked) {
      return checked.error().At(where);
    }
    const std::string& key = words[0];
    const ConstraintText given = {words[1], where};
    if ((key == "max-microbatch" && std::exchange(has_limit, true)) ||
        (key == "space" && std::exchange(has_space, true))) {
      return InvalidInput("'" + key + "' is given twice", where);
    }
    if (key == "fix") {
      texts.fix.push_back(given);
    } else if (key == "forbid") {
      texts.forbid.push_back(given);
    } else if (key == "space") {
      if (!texts.space.text.empty() && texts.space.text != given.text) {
        return InvalidInput("contradicts " + WhereOf("space", texts.space),
                            WhereOf("space", given));
      }
      texts.space = given;
    } else {
      const auto value = ReadWholeFrom(1, given.text);
      if (!value) return value.error().At(WhereOf(key, given));
      if (texts.max_microbatch == 0 || *value < texts.max_microbatch) {
        texts.max_microbatch = *value;
        texts.max_microbatch_line = where;
      }
    }
  }
  return {};
}

std::string WhereOf(std::string_view key, const ConstraintText& given) {
  if (given.line.empty()) return "--" + std::string(key) + " " + given.text;
  return given.line + ": " + std::string(key) + " " + given.text;
}

Result<int> ReadWholeFrom(int least, std::string_view text) {
  const auto value = ParseWhole<int>(text);
  if (!value || *value < least) {
    return InvalidInput("'" + std::string(text) +
                        "' is not a whole number from " +
                        std::to_string(least));
  }
  return *value;
}

}  // namespace tessera
