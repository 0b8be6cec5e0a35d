#pragma once
// The one idiom for everything that can be added: an explicit table, an array
// of rows with a `name`. Lookup, listing and the error for an unknown name
// read the table; so do the contract tests.

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"

namespace tessera {

// How many letters are to be put in, taken out or changed (Levenshtein).
size_t EditDistance(std::string_view a, std::string_view b);

// The candidate nearest to `name` by edit distance, or "" when none is near;
// one that begins with it is near, one that differs in small and large letters
// alone is the nearest.
std::string NearestName(std::string_view name,
                        std::span<const std::string_view> candidates);

// "unknown KIND 'x'; did you mean 'y'? known: a, b, c".
Error UnknownName(std::string_view kind, std::string_view name,
                  std::span<const std::string_view> known);

template <typename Row>
std::vector<std::string_view> Names(std::span<const Row> table) {
  std::vector<std::string_view> names;
  for (const Row& row : table) names.push_back(row.name);
  return names;
}

// The row called `name`, owned by the table, or an error listing the names.
template <typename Row>
Result<const Row*> Find(std::string_view kind, std::span<const Row> table,
                        std::string_view name) {
  for (const Row& row : table) {
    if (row.name == name) return &row;
  }
  return UnknownName(kind, name, Names(table));
}

}  // namespace tessera
