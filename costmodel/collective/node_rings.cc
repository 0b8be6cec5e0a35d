#include "costmodel/collective/node_rings.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "planner/ir/cluster_lookup.h"

namespace tessera {
namespace {

using Cycle = std::vector<int>;
using Matrix = std::vector<std::vector<int>>;

// Bounds both searches: far more than an 8-GPU mesh takes (some thousands),
// and milliseconds. Beyond it the best found so far stands.
constexpr int kMaxSteps = 200'000;
// Between two devices; of V100 two.
constexpr double kMostLanes = 16;

// What a ring may take of links, the slowest link's rate first: the rates of
// all links, and halves of them. Where one of several links between two devices
// is slow, or failed, rings that are as fast as their whole may be fewer, or
// slower than half of it.
std::vector<double> RingRates(const DirectRates& rates) {
  std::set<double> found;
  for (const auto& row : rates) found.insert(row.begin(), row.end());
  found.erase(0);
  std::vector<double> out(found.begin(), found.end());
  for (double rate : found) {
    if (!found.contains(rate / 2)) out.push_back(rate / 2);
  }
  return out;
}

// How many rings of `unit` fit a direct link.
Matrix LanesOf(const DirectRates& rates, double unit) {
  Matrix lanes(rates.size(), std::vector<int>(rates.size(), 0));
  for (size_t i = 0; i < rates.size(); ++i) {
    for (size_t j = 0; j < rates.size(); ++j) {
      // Half a percent forgives rates that are rounded multiples.
      lanes[i][j] = static_cast<int>(
          std::min(std::floor(rates[i][j] / unit + 0.005), kMostLanes));
    }
  }
  return lanes;
}

// All Hamiltonian cycles from position 0, each in one of its directions, in
// lexicographic order.
class CycleSearch {
 public:
  explicit CycleSearch(const Matrix& lanes)
      : lanes_(lanes), visited_(lanes.size(), false) {}

  std::vector<Cycle> Run() {
    visited_[0] = true;
    path_ = {0};
    Extend();
    return std::move(cycles_);
  }

  // A Hamiltonian path, the first from the device with the fewest lanes; empty
  // where none is found.
  Cycle Chain() {
    std::vector<int> lanes;
    for (const auto& row : lanes_) {
      lanes.push_back(std::accumulate(row.begin(), row.end(), 0));
    }
    const auto start =
        static_cast<size_t>(std::ranges::min_element(lanes) - lanes.begin());
    visited_.assign(lanes_.size(), false);
    visited_[start] = true;
    path_ = {static_cast<int>(start)};
    steps_ = 0;
    return ExtendChain() ? path_ : Cycle();
  }

 private:
  void Extend() {
    if (++steps_ > kMaxSteps) return;
    const auto last = static_cast<size_t>(path_.back());
    if (path_.size() == lanes_.size()) {
      if (lanes_[last][0] > 0 && path_[1] < path_.back()) {
        cycles_.push_back(path_);
      }
      return;
    }
    for (size_t next = 1; next < lanes_.size(); ++next) {
      if (visited_[next] || lanes_[last][next] == 0) continue;
      visited_[next] = true;
      path_.push_back(static_cast<int>(next));
      Extend();
      path_.pop_back();
      visited_[next] = false;
    }
  }

  bool ExtendChain() {
    if (path_.size() == lanes_.size()) return true;
    if (++steps_ > kMaxSteps) return false;
    const auto last = static_cast<size_t>(path_.back());
    for (size_t next = 0; next < lanes_.size(); ++next) {
      if (visited_[next] || lanes_[last][next] == 0) continue;
      visited_[next] = true;
      path_.push_back(static_cast<int>(next));
      if (ExtendChain()) return true;
      path_.pop_back();
      visited_[next] = false;
    }
    return false;
  }

  const Matrix& lanes_;
  std::vector<bool> visited_;
  Cycle path_;
  std::vector<Cycle> cycles_;
  int steps_ = 0;
};

// The largest set of cycles (with repetition) that the lanes allow.
class Packing {
 public:
  Packing(Matrix lanes, const std::vector<Cycle>& cycles)
      : lanes_(std::move(lanes)), cycles_(cycles) {
    // Each cycle takes two lanes of every device.
    bound_ = kMaxSteps;
    for (const auto& row : lanes_) {
      bound_ = std::min(bound_, std::accumulate(row.begin(), row.end(), 0) / 2);
    }
  }

  std::vector<Cycle> Run() {
    Add(0);
    return std::move(best_);
  }

 private:
  void Add(size_t first) {
    if (chosen_.size() > best_.size()) best_ = chosen_;
    for (size_t c = first; c < cycles_.size(); ++c) {
      if (++steps_ > kMaxSteps || static_cast<int>(best_.size()) >= bound_) {
        return;
      }
      if (!Fits(cycles_[c])) continue;
      Take(cycles_[c], 1);
      chosen_.push_back(cycles_[c]);
      Add(c);
      chosen_.pop_back();
      Take(cycles_[c], -1);
    }
  }

  bool Fits(const Cycle& cycle) const {
    for (size_t i = 0; i < cycle.size(); ++i) {
      const auto a = static_cast<size_t>(cycle[i]);
      const auto b = static_cast<size_t>(cycle[(i + 1) % cycle.size()]);
      if (lanes_[a][b] < 1) return false;
    }
    return true;
  }

  void Take(const Cycle& cycle, int count) {
    for (size_t i = 0; i < cycle.size(); ++i) {
      const auto a = static_cast<size_t>(cycle[i]);
      const auto b = static_cast<size_t>(cycle[(i + 1) % cycle.size()]);
      lanes_[a][b] -= count;
      lanes_[b][a] -= count;
    }
  }

  Matrix lanes_;
  const std::vector<Cycle>& cycles_;
  std::vector<Cycle> chosen_;
  std::vector<Cycle> best_;
  int bound_ = 0;
  int steps_ = 0;
};

}  // namespace

DirectLinks DirectLinksOf(const Cluster& cluster) {
  const std::vector<DeviceId> device_at = DevicesAtVertices(cluster);
  DirectLinks links(cluster.devices.size());
  for (const Link& link : cluster.links) {
    const DeviceId from = device_at[link.from.index()];
    const DeviceId to = device_at[link.to.index()];
    if (!from.valid() || !to.valid()) continue;
    links[from.index()].push_back({to, TypeOf(cluster, link).bandwidth.value});
  }
  return links;
}

DirectRates RatesAmong(const DirectLinks& links,
                       std::span<const DeviceId> devices) {
  const size_t n = devices.size();
  DirectRates rate(n, std::vector<double>(n, 0));
  for (size_t i = 0; i < n; ++i) {
    for (const auto& [to, bandwidth] : links[devices[i].index()]) {
      const auto peer = std::ranges::find(devices, to);
      if (peer == devices.end()) continue;
      rate[i][static_cast<size_t>(peer - devices.begin())] += bandwidth;
    }
  }
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < i; ++j) {
      rate[i][j] = rate[j][i] = std::min(rate[i][j], rate[j][i]);
    }
  }
  return rate;
}

NodeOrders NodeRings(const DirectRates& rates) {
  Cycle in_order(rates.size());
  std::iota(in_order.begin(), in_order.end(), 0);
  if (rates.size() < 3) return {{in_order}, false};
  const std::vector<double> units = RingRates(rates);
  if (units.empty()) return {{in_order}, false};
  const Matrix joined = LanesOf(rates, units.front());  // all that are
  CycleSearch search(joined);
  const std::vector<Cycle> cycles = search.Run();
  std::vector<Cycle> most;
  double fastest = 0;  // of all rings together
  for (double unit : units) {
    std::vector<Cycle> packed = Packing(LanesOf(rates, unit), cycles).Run();
    const double together = unit * static_cast<double>(packed.size());
    if (together <= fastest * 1.005) continue;
    fastest = together;
    most = std::move(packed);
  }
  std::vector<Cycle> rings;
  for (const Cycle& cycle : most) {
    rings.push_back(cycle);
    rings.emplace_back(cycle.rbegin(), cycle.rend());
  }
  if (!rings.empty()) return {std::move(rings), false, true};
  const Cycle chain = search.Chain();
  if (!chain.empty()) return {{chain}, true, true};
  return {{in_order}, false};
}

}  // namespace tessera
