#include "costmodel/simulate/contention.h"

#include <algorithm>
#include <map>
#include <utility>

namespace tessera {
namespace {

// Rounding of sums of utilisations that are meant to fill a link exactly.
constexpr double kFull = 1 + 1e-9;

// A flow on a link.
struct Load {
  int flow = 0;
  double utilisation = 0;
};

// The loads of all links, by link and then by flow: those of link l are
// loads[begin[l]] to loads[begin[l + 1] - 1].
struct LoadsByLink {
  std::vector<size_t> begin = {0};
  std::vector<Load> loads;

  size_t links() const { return begin.size() - 1; }
  std::span<const Load> of(size_t link) const {
    return std::span(loads).subspan(begin[link], begin[link + 1] - begin[link]);
  }
};

LoadsByLink SortByLink(std::span<const std::vector<LinkUse>> uses) {
  LoadsByLink sorted;
  for (const auto& flow : uses) {
    for (const LinkUse& use : flow) {
      const size_t end = use.link.index() + 1;
      if (end >= sorted.begin.size()) sorted.begin.resize(end + 1, 0);
      ++sorted.begin[end];
    }
  }
  for (size_t l = 0; l < sorted.links(); ++l) {
    sorted.begin[l + 1] += sorted.begin[l];
  }
  sorted.loads.resize(sorted.begin.back());
  std::vector<size_t> filled(sorted.begin.begin(), sorted.begin.end() - 1);
  for (size_t f = 0; f < uses.size(); ++f) {
    for (const LinkUse& use : uses[f]) {
      sorted.loads[filled[use.link.index()]++] = {static_cast<int>(f),
                                                  use.utilisation};
    }
  }
  return sorted;
}

// Whether the flows of a link can ask for more than it has. `most` is scratch.
bool CanBeShort(std::span<const Load> loads,
                std::span<const std::vector<int>> streams_of_flow,
                std::vector<std::pair<int, double>>& most) {
  most.clear();  // by stream
  for (const Load& load : loads) {
    for (int stream : streams_of_flow[static_cast<size_t>(load.flow)]) {
      const auto at =
          std::find_if(most.begin(), most.end(),
                       [&](const auto& m) { return m.first == stream; });
      if (at == most.end()) {
        most.emplace_back(stream, load.utilisation);
      } else {
        at->second = std::max(at->second, load.utilisation);
      }
    }
  }
  double sum = 0;
  for (const auto& [stream, utilisation] : most) sum += utilisation;
  return sum > kFull;
}

bool Covers(const std::vector<double>& a, const std::vector<double>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), std::greater_equal<>());
}

}  // namespace

bool Contention::possible() const {
  return std::any_of(uses.begin(), uses.end(),
                     [](const auto& flow) { return !flow.empty(); });
}

Contention FindContention(std::span<const std::vector<LinkUse>> uses,
                          std::span<const std::vector<int>> streams_of_flow) {
  // Of the links that the same flows load, those that no other one covers.
  std::map<std::vector<int>, std::vector<std::vector<double>>> kept;
  const LoadsByLink by_link = SortByLink(uses);
  std::vector<std::pair<int, double>> scratch;
  std::vector<int> flows;
  std::vector<double> loads;
  for (size_t l = 0; l < by_link.links(); ++l) {
    if (!CanBeShort(by_link.of(l), streams_of_flow, scratch)) continue;
    flows.clear();
    loads.clear();
    for (const Load& load : by_link.of(l)) {
      flows.push_back(load.flow);
      loads.push_back(load.utilisation);
    }
    auto& links = kept[flows];
    if (std::any_of(links.begin(), links.end(),
                    [&](const auto& other) { return Covers(other, loads); })) {
      continue;
    }
    std::erase_if(links,
                  [&](const auto& other) { return Covers(loads, other); });
    links.push_back(loads);
  }

  Contention contention;
  contention.uses.resize(uses.size());
  for (const auto& [sharing, links] : kept) {
    for (const std::vector<double>& link : links) {
      for (size_t i = 0; i < sharing.size(); ++i) {
        contention.uses[static_cast<size_t>(sharing[i])].push_back(
            {LinkId(static_cast<int64_t>(contention.links)), link[i]});
      }
      ++contention.links;
    }
  }
  return contention;
}

const std::vector<double>& FairRates::Of(const IntKey& flows) {
  const auto it = known_.find(flows);
  if (it != known_.end()) return it->second;
  std::vector<std::vector<LinkUse>> uses;
  for (int64_t flow : flows) {
    uses.push_back(contention_.uses[static_cast<size_t>(flow)]);
  }
  std::vector<double> rates = MaxMinRates(uses);
  for (double& rate : rates) {
    if (rate * kFull >= 1) rate = 1;
  }
  return known_.emplace(flows, std::move(rates)).first->second;
}

}  // namespace tessera
