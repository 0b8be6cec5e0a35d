#include "planner/base/table.h"

#include <cctype>
#include <numeric>
#include <optional>

namespace tessera {

// By two rows of the table.
size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row[b.size()];
}

namespace {

// How many letters are small in one and large in the other; nothing where
// there is another difference.
std::optional<size_t> CaseDistance(std::string_view a, std::string_view b) {
  const auto same = [](char x, char y) {
    return std::tolower(static_cast<unsigned char>(x)) ==
           std::tolower(static_cast<unsigned char>(y));
  };
  if (!std::ranges::equal(a, b, same)) return std::nullopt;
  return EditDistance(a, b);
}

}  // namespace

std::string NearestName(std::string_view name,
                        std::span<const std::string_view> candidates) {
  std::optional<size_t> of_case;
  std::string in_case;
  for (std::string_view candidate : candidates) {
    const auto distance = CaseDistance(name, candidate);
    if (!distance || (of_case && *of_case <= *distance)) continue;
    of_case = distance;
    in_case = candidate;
  }
  if (of_case) return in_case;
  std::string nearest;
  // A name that shares no letter with another one is not near.
  size_t best = std::min(std::max<size_t>(3, name.size() / 3 + 1), name.size());
  for (std::string_view candidate : candidates) {
    // What was left out behind the name is one mistake.
    const bool begins = name.size() >= 3 && candidate.starts_with(name);
    const size_t distance = begins ? 1 : EditDistance(name, candidate);
    if (distance < best) {
      best = distance;
      nearest = candidate;
    }
  }
  return nearest;
}

Error UnknownName(std::string_view kind, std::string_view name,
                  std::span<const std::string_view> known) {
  std::string message =
      "unknown " + std::string(kind) + " '" + std::string(name) + "'";
  const std::string nearest = NearestName(name, known);
  if (!nearest.empty()) message += "; did you mean '" + nearest + "'?";
  message += nearest.empty() ? "; known:" : " known:";
  for (size_t i = 0; i < known.size(); ++i) {
    message += (i == 0 ? " " : ", ") + std::string(known[i]);
  }
  return {ErrorCode::kNotFound, message, ""};
}

}  // namespace tessera
