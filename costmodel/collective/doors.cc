#include "costmodel/collective/doors.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "planner/base/divide.h"

namespace tessera {
namespace {

int NumNics(const HostRanks& host) {
  std::set<int> all;
  for (const NearestNics& nics : host.nics) {
    all.insert(nics.numbers.begin(), nics.numbers.end());
  }
  return static_cast<int>(all.size());
}

// By position, whether at one of its NICs no other rank is nearer, and none
// goes by fewer others; true where there are no NICs.
std::vector<bool> CanBeDoors(const HostRanks& host) {
  const auto measure = [](const NearestNics& nics) {
    return std::pair(nics.numbers.size(), nics.distance);
  };
  std::map<int, std::pair<size_t, std::array<int64_t, 3>>> least;  // by NIC
  for (const NearestNics& nics : host.nics) {
    for (int nic : nics.numbers) {
      const auto [it, is_new] = least.try_emplace(nic, measure(nics));
      if (!is_new) it->second = std::min(it->second, measure(nics));
    }
  }
  std::vector<bool> can;
  for (const NearestNics& nics : host.nics) {
    can.push_back(nics.numbers.empty() ||
                  std::ranges::any_of(nics.numbers, [&](int nic) {
                    return least[nic] == measure(nics);
                  }));
  }
  return can;
}

// What rings put on the NICs of a host, a ring being 1.
class NicLoads {
 public:
  void Add(const NearestNics& nics) {
    for (int nic : nics.numbers) loads_[nic] += Share(nics);
  }

  // The most on one of these, were they another ring's.
  double With(const NearestNics& nics) const {
    double most = 0;
    for (int nic : nics.numbers) {
      const auto found = loads_.find(nic);
      most = std::max(
          most, (found == loads_.end() ? 0 : found->second) + Share(nics));
    }
    return most;
  }

 private:
  static double Share(const NearestNics& nics) {
    return 1 / static_cast<double>(nics.numbers.size());
  }

  std::map<int, double> loads_;
};

// The door of each ring, at its `wanted` position where that loads no NIC and
// no rank more than another.
std::vector<int> Deal(const HostRanks& host, const std::vector<int>& wanted) {
  const size_t size = host.nics.size();
  std::vector<int> doors(wanted.size(), -1);
  const int nics = NumNics(host);
  // Of so many rings a NIC carries at least these; a thousandth forgives sums
  // of shares.
  const double even =
      nics == 0 ? std::numeric_limits<double>::infinity()
                : std::ceil(static_cast<double>(wanted.size()) / nics) + 1e-3;
  const std::vector<bool> can_be_door = CanBeDoors(host);
  const auto doors_of_all = std::ranges::count(can_be_door, true);
  const auto even_uses =
      static_cast<int>(DivideUp(std::ssize(wanted), doors_of_all));
  NicLoads loads;
  std::vector<int> uses(size, 0);
  const auto take = [&](size_t ring, size_t position) {
    doors[ring] = static_cast<int>(position);
    loads.Add(host.nics[position]);
    ++uses[position];
  };
  for (size_t ring = 0; ring < wanted.size(); ++ring) {
    const size_t position = static_cast<size_t>(wanted[ring]) % size;
    if (can_be_door[position] && uses[position] < even_uses &&
        loads.With(host.nics[position]) <= even) {
      take(ring, position);
    }
  }
  for (size_t ring = 0; ring < wanted.size(); ++ring) {
    if (doors[ring] >= 0) continue;
    size_t best = size;
    std::pair<double, int> least;
    for (size_t i = 0; i < size; ++i) {
      const size_t position = (static_cast<size_t>(wanted[ring]) + i) % size;
      if (!can_be_door[position]) continue;
      const std::pair cost(std::max(even, loads.With(host.nics[position])),
                           uses[position]);
      if (best < size && cost >= least) continue;
      best = position;
      least = cost;
    }
    take(ring, best);
  }
  return doors;
}

}  // namespace

std::vector<std::vector<int>> DoorsInTurn(const std::vector<HostRanks>& hosts) {
  size_t widest = 0;
  for (const HostRanks& host : hosts) {
    widest = std::max(widest, host.nics.size());
  }
  std::vector<std::vector<int>> doors(hosts.size());
  for (size_t n = 0; n < hosts.size(); ++n) {
    for (size_t ring = 0; ring < widest; ++ring) {
      doors[n].push_back(static_cast<int>(ring % hosts[n].nics.size()));
    }
  }
  return doors;
}

std::vector<std::vector<int>> DealtDoors(const std::vector<HostRanks>& hosts) {
  size_t widest = 0;
  std::vector<size_t> ways_in;
  for (const HostRanks& host : hosts) {
    widest = std::max(widest, host.nics.size());
    ways_in.push_back(
        std::min(static_cast<size_t>(NumNics(host)), host.nics.size()));
  }
  const auto scarce =
      static_cast<size_t>(std::ranges::min_element(ways_in) - ways_in.begin());
  const size_t fewest = ways_in[scarce];
  if (fewest == 0 || std::ranges::any_of(hosts, &HostRanks::meshed)) {
    return DoorsInTurn(hosts);
  }
  const size_t rings = widest / fewest * fewest;
  std::vector<int> wanted;
  for (size_t ring = 0; ring < rings; ++ring) {
    wanted.push_back(static_cast<int>(ring % hosts[scarce].nics.size()));
  }
  wanted = Deal(hosts[scarce], wanted);
  std::vector<std::vector<int>> doors;
  for (const HostRanks& host : hosts) doors.push_back(Deal(host, wanted));
  return doors;
}

}  // namespace tessera
