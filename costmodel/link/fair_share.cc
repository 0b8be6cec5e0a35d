#include "costmodel/link/fair_share.h"

#include <algorithm>

#include "planner/base/check.h"
#include "planner/base/sort_unique.h"

namespace tessera {
namespace {

// Links this close to the first full one are full too: their difference is
// rounding.
constexpr double kTie = 1e-12;

}  // namespace

std::vector<double> MaxMinRates(std::span<const std::vector<LinkUse>> flows) {
  std::vector<LinkId> links;
  for (const auto& flow : flows) {
    for (const LinkUse& use : flow) {
      TESSERA_CHECK(use.utilisation > 0) << use.link << " " << use.utilisation;
      links.push_back(use.link);
    }
  }
  SortUnique(links);

  struct Entry {
    size_t link;  // index into `links`
    double utilisation;
  };
  std::vector<std::vector<Entry>> uses(flows.size());
  for (size_t i = 0; i < flows.size(); ++i) {
    for (const LinkUse& use : flows[i]) {
      const auto at = std::ranges::lower_bound(links, use.link);
      uses[i].push_back(
          {static_cast<size_t>(at - links.begin()), use.utilisation});
    }
  }

  std::vector<double> rates(flows.size(), 1.0);
  std::vector<bool> growing(flows.size(), true);
  size_t left = flows.size();
  while (left > 0) {
    // At a common rate x of those that still grow, link l carries
    // stopped[l] + x * growth[l].
    std::vector<double> stopped(links.size(), 0);
    std::vector<double> growth(links.size(), 0);
    for (size_t i = 0; i < flows.size(); ++i) {
      for (const Entry& use : uses[i]) {
        if (growing[i]) {
          growth[use.link] += use.utilisation;
        } else {
          stopped[use.link] += rates[i] * use.utilisation;
        }
      }
    }
    double rate = 1.0;
    std::vector<double> full_at(links.size(), 2.0);
    for (size_t l = 0; l < links.size(); ++l) {
      if (growth[l] == 0) continue;
      full_at[l] = std::max(0.0, 1.0 - stopped[l]) / growth[l];
      rate = std::min(rate, full_at[l]);
    }
    for (size_t i = 0; i < flows.size(); ++i) {
      if (!growing[i]) continue;
      const bool stops =
          rate == 1.0 || std::ranges::any_of(uses[i], [&](const Entry& use) {
            return full_at[use.link] <= rate * (1 + kTie);
          });
      if (!stops) continue;
      rates[i] = rate;
      growing[i] = false;
      --left;
    }
  }
  return rates;
}

}  // namespace tessera
