#include "planner/ir/index_rule.h"

#include <algorithm>
#include <cctype>

namespace tessera {
namespace {

// Appends the factors named by `letters` to `indices`, adding new ones.
Result<void> ReadIndices(std::string_view letters, IndexRule& rule,
                         Indices& indices) {
  for (size_t i = 0; i < letters.size(); ++i) {
    const char letter = letters[i];
    if (!std::isalpha(static_cast<unsigned char>(letter))) {
      return InvalidInput(std::string("expected a factor letter, found '") +
                          letter + "'");
    }
    int f = rule.FactorOf(letter);
    if (f < 0) {
      if (rule.factors.size() == kMaxFactors) {
        return InvalidInput("more than " + std::to_string(kMaxFactors) +
                            " factors");
      }
      f = static_cast<int>(rule.factors.size());
      rule.factors.push_back({letter, Role::kAttribute, true});
    }
    if (Holds(indices, f)) {
      return InvalidInput(std::string("factor '") + letter +
                          "' twice in one tensor");
    }
    indices.push_back(static_cast<uint8_t>(f));
    if (i + 1 < letters.size() && letters[i + 1] == '!') {
      rule.factors[static_cast<size_t>(f)].splittable = false;
      ++i;
    }
  }
  if (indices.size() > kMaxDims) {
    return InvalidInput("more than " + std::to_string(kMaxDims) +
                        " dimensions in '" + std::string(letters) + "'");
  }
  return {};
}

void AssignRoles(IndexRule& rule) {
  for (size_t f = 0; f < rule.factors.size(); ++f) {
    Factor& factor = rule.factors[f];
    const int index = static_cast<int>(f);
    const bool in_result =
        std::any_of(rule.results.begin(), rule.results.end(),
                    [&](const Indices& r) { return Holds(r, index); });
    const bool in_first =
        !rule.operands.empty() && Holds(rule.operands[0], index);
    if (factor.letter == 'b') {
      factor.role = Role::kSample;
    } else if (!in_result) {
      factor.role = Role::kReduction;
    } else {
      factor.role = in_first ? Role::kAttribute : Role::kParameter;
    }
  }
}

}  // namespace

Result<IndexRule> IndexRule::Parse(std::string_view text) {
  const std::string where = "rule '" + std::string(text) + "'";
  const size_t arrow = text.find("->");
  if (arrow == std::string_view::npos) {
    return InvalidInput("expected '->'", where);
  }
  IndexRule rule;
  const std::string_view left = text.substr(0, arrow);
  uint8_t term = 0;
  for (size_t begin = 0; begin <= left.size();) {
    const size_t end = std::min(left.find_first_of(",+", begin), left.size());
    Indices indices;
    auto read = ReadIndices(left.substr(begin, end - begin), rule, indices);
    if (!read) return read.error().At(where);
    rule.operands.push_back(indices);
    rule.terms.push_back(term);
    if (end < left.size() && left[end] == '+') ++term;
    begin = end + 1;
  }
  const std::string_view right = text.substr(arrow + 2);
  for (size_t begin = 0; begin <= right.size();) {
    const size_t end = std::min(right.find(',', begin), right.size());
    Indices indices;
    auto read = ReadIndices(right.substr(begin, end - begin), rule, indices);
    if (!read) return read.error().At(where);
    rule.results.push_back(indices);
    begin = end + 1;
  }
  AssignRoles(rule);
  return rule;
}

std::string IndexRule::ToString() const {
  std::string text;
  uint32_t marked = 0;
  const auto append = [&](const Indices& indices) {
    for (uint8_t f : indices) {
      text += factors[f].letter;
      if (!factors[f].splittable && !(marked >> f & 1)) {
        text += '!';
        marked |= 1u << f;
      }
    }
  };
  for (size_t i = 0; i < operands.size(); ++i) {
    if (i > 0) text += terms[i] == terms[i - 1] ? ',' : '+';
    append(operands[i]);
  }
  text += "->";
  for (size_t i = 0; i < results.size(); ++i) {
    if (i > 0) text += ',';
    append(results[i]);
  }
  return text;
}

int IndexRule::FactorOf(char letter) const {
  for (size_t f = 0; f < factors.size(); ++f) {
    if (factors[f].letter == letter) return static_cast<int>(f);
  }
  return -1;
}

bool Holds(const Indices& indices, int f) {
  return std::find(indices.begin(), indices.end(), f) != indices.end();
}

Result<std::vector<int64_t>> Extents(
    const IndexRule& rule, std::span<const std::vector<int64_t>> operand_shapes,
    std::span<const std::vector<int64_t>> result_shapes) {
  std::vector<int64_t> extents(rule.factors.size(), -1);
  const auto read = [&](const std::vector<Indices>& sides,
                        std::span<const std::vector<int64_t>> shapes,
                        const char* kind) -> Result<void> {
    if (sides.size() != shapes.size()) {
      return InvalidInput("rule '" + rule.ToString() + "' has " +
                          std::to_string(sides.size()) + " " + kind +
                          "s, found " + std::to_string(shapes.size()));
    }
    for (size_t i = 0; i < sides.size(); ++i) {
      const std::string where =
          std::string(kind) + "s[" + std::to_string(i) + "]";
      if (sides[i].size() != shapes[i].size()) {
        return InvalidInput("rule '" + rule.ToString() + "' has " +
                                std::to_string(sides[i].size()) +
                                " dimensions here, found " +
                                std::to_string(shapes[i].size()),
                            where);
      }
      for (size_t d = 0; d < sides[i].size(); ++d) {
        int64_t& extent = extents[sides[i][d]];
        if (extent < 0) extent = shapes[i][d];
        if (extent != shapes[i][d]) {
          return InvalidInput(
              std::string("factor '") + rule.factors[sides[i][d]].letter +
                  "' of rule '" + rule.ToString() + "' is " +
                  std::to_string(extent) + " elsewhere, found " +
                  std::to_string(shapes[i][d]),
              where);
        }
      }
    }
    return {};
  };
  TESSERA_RETURN_IF_ERROR(read(rule.operands, operand_shapes, "operand"));
  TESSERA_RETURN_IF_ERROR(read(rule.results, result_shapes, "result"));
  return extents;
}

}  // namespace tessera
