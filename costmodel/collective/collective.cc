#include "costmodel/collective/collective.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_map>

#include "costmodel/collective/algorithms.h"
#include "costmodel/collective/node_rings.h"
#include "planner/base/rng.h"

namespace tessera {
namespace {

// See the header for its source.
constexpr double kStartSeconds = 8e-6;

CollectiveGroup MakeGroup(const Cluster& cluster,
                          std::span<const LinkId> direct_links,
                          std::span<const DeviceId> devices) {
  CollectiveGroup group;
  group.ranks = static_cast<int>(devices.size());
  std::map<int, std::vector<int>> by_node;
  group.shared_memory = true;
  for (size_t rank = 0; rank < devices.size(); ++rank) {
    const Device& device = cluster.devices[devices[rank].index()];
    by_node[device.node].push_back(static_cast<int>(rank));
    group.shared_memory &= cluster.TypeOf(devices[rank]).shared_memory;
  }
  group.shared_memory &= by_node.size() == 1;
  for (auto& [node, ranks] : by_node) {
    std::vector<DeviceId> local;
    for (int rank : ranks) local.push_back(devices[static_cast<size_t>(rank)]);
    auto rings = NodeRings(cluster, direct_links, local);
    for (auto& ring : rings) {
      for (int& position : ring)
        position = ranks[static_cast<size_t>(position)];
    }
    group.node_rings.push_back(std::move(rings));
    group.nodes.push_back(std::move(ranks));
  }
  return group;
}

// The time of the longest chain of sends in `round`: `repeat` of them, each to
// the sender of the next, which has the same base. latency[i] is sends[i]'s.
Duration LongestChain(const Round& round, std::span<const Duration> latency) {
  if (round.repeat == 1) {
    return latency.empty() ? Duration() : std::ranges::max(latency);
  }
  const auto key = [](int rank, int base) {
    return (static_cast<uint64_t>(rank) << 32) | static_cast<uint64_t>(base);
  };
  std::unordered_map<uint64_t, size_t> send_of;
  for (size_t i = 0; i < round.sends.size(); ++i) {
    send_of[key(round.sends[i].from, round.sends[i].base)] = i;
  }
  Duration longest;
  std::vector<bool> seen(round.sends.size(), false);
  for (size_t start = 0; start < round.sends.size(); ++start) {
    if (seen[start]) continue;
    std::vector<Duration> ring;  // the latencies along it
    Duration lap;
    for (size_t i = start; !seen[i];) {
      seen[i] = true;
      ring.push_back(latency[i]);
      lap += latency[i];
      const auto next =
          send_of.find(key(round.sends[i].to, round.sends[i].base));
      TESSERA_CHECK(next != send_of.end()) << round.sends[i].to;
      i = next->second;
    }
    // Whole laps, and the longest stretch of what is left of `repeat`.
    const size_t size = ring.size();
    const size_t steps = static_cast<size_t>(round.repeat);
    Duration stretch;
    for (size_t i = 0; i < steps % size; ++i) stretch += ring[i];
    Duration longest_stretch = stretch;
    for (size_t i = 0; i < size; ++i) {
      stretch = stretch - ring[i] + ring[(i + steps % size) % size];
      longest_stretch = Max(longest_stretch, stretch);
    }
    longest = Max(longest,
                  lap * static_cast<int64_t>(steps / size) + longest_stretch);
  }
  return longest;
}

}  // namespace

size_t CollectiveModel::KeyHash::operator()(
    const std::vector<int32_t>& key) const {
  uint64_t hash = key.size();
  for (int32_t value : key) hash = Mix64(hash ^ static_cast<uint32_t>(value));
  return hash;
}

CollectiveModel::CollectiveModel(const Cluster& cluster)
    : cluster_(cluster),
      router_(cluster),
      direct_links_(DirectLinks(cluster)) {}

CollectiveModel::~CollectiveModel() = default;

const std::vector<CollectiveOption>& CollectiveModel::Options(
    CommKind kind, std::span<const std::vector<DeviceId>> subgroups) const {
  TESSERA_CHECK(!subgroups.empty()) << NameOf(kind);
  size_t key_size = 1 + subgroups.size();
  for (const auto& devices : subgroups) key_size += devices.size();
  std::vector<int32_t> key;
  key.reserve(key_size);
  key.push_back(static_cast<int32_t>(kind));
  for (const auto& devices : subgroups) {
    key.push_back(static_cast<int32_t>(devices.size()));
    for (DeviceId device : devices) key.push_back(device.value);
  }
  {
    std::shared_lock lock(mutex_);
    if (auto found = options_.find(key); found != options_.end()) {
      return *found->second;
    }
  }
  // Computed outside the lock; a second thread's equal result is dropped.
  auto computed = std::make_unique<const std::vector<CollectiveOption>>(
      Compute(kind, subgroups));
  std::unique_lock lock(mutex_);
  return *options_.try_emplace(std::move(key), std::move(computed))
              .first->second;
}

std::vector<CollectiveOption> CollectiveModel::Compute(
    CommKind kind, std::span<const std::vector<DeviceId>> subgroups) const {
  std::vector<CollectiveGroup> groups;
  std::vector<std::span<const DeviceId>> members;
  for (const auto& devices : subgroups) {
    TESSERA_CHECK(!devices.empty()) << NameOf(kind);
    const bool alone = std::ranges::count(devices, devices[0]) ==
                       static_cast<int64_t>(devices.size());
    if (alone) continue;
    groups.push_back(MakeGroup(cluster_, direct_links_, devices));
    members.push_back(devices);
  }
  if (groups.empty()) return {{.algorithm = "none", .loads = {}}};

  std::vector<CollectiveOption> options;
  std::vector<double> load(cluster_.links.size(), 0);
  for (const CollectiveAlgorithm& algorithm : CollectiveAlgorithms()) {
    if (!std::ranges::all_of(groups, [&](const CollectiveGroup& group) {
          return algorithm.applies(kind, group);
        })) {
      continue;
    }
    std::ranges::fill(load, 0);
    Duration latency;
    for (size_t g = 0; g < groups.size(); ++g) {
      const Rounds rounds = algorithm.rounds(kind, groups[g]);
      Duration total;
      for (const Round& round : rounds.rounds) {
        std::vector<Duration> latencies;
        latencies.reserve(round.sends.size());
        for (const Send& send : round.sends) {
          const auto route =
              router_.Route(members[g][static_cast<size_t>(send.from)],
                            members[g][static_cast<size_t>(send.to)]);
          latencies.push_back(router_.Latency(route));
          const double share =
              static_cast<double>(send.count) * round.repeat / rounds.chunks;
          for (LinkId link : route) load[link.index()] += share;
        }
        total += LongestChain(round, latencies);
      }
      latency = Max(latency, total);
    }

    CollectiveOption option;
    option.algorithm = algorithm.name;
    option.latency_s = kStartSeconds + latency.seconds();
    for (size_t l = 0; l < load.size(); ++l) {
      if (load[l] == 0) continue;
      option.loads.push_back({LinkId(static_cast<int64_t>(l)), load[l]});
      const int type = cluster_.links[l].type;
      const double bandwidth =
          cluster_.link_types[static_cast<size_t>(type)].bandwidth.value;
      option.seconds_per_byte =
          std::max(option.seconds_per_byte, load[l] / bandwidth);
    }
    options.push_back(std::move(option));
  }
  TESSERA_CHECK(!options.empty()) << NameOf(kind);
  return options;
}

const CollectiveOption& CollectiveModel::Best(
    std::span<const CollectiveOption> options, Bytes payload) {
  return *std::ranges::min_element(
      options, {},
      [&](const CollectiveOption& option) { return option.Seconds(payload); });
}

}  // namespace tessera
