#include "costmodel/collective/collective.h"

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include "costmodel/collective/doors.h"
#include "costmodel/collective/node_rings.h"
#include "planner/base/table.h"
#include "planner/ir/cluster_lookup.h"

namespace tessera {
namespace {

// `hosts` are made, too.
CollectiveGroup GroupOf(const Cluster& cluster, const Router& router,
                        const DirectLinks& direct_links,
                        std::span<const DeviceId> devices,
                        std::vector<HostRanks>& hosts) {
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
  std::map<DirectRates, NodeOrders> known;  // of hosts alike
  for (auto& [node, ranks] : by_node) {
    std::vector<DeviceId> local;
    for (int rank : ranks) local.push_back(devices[static_cast<size_t>(rank)]);
    DirectRates rates = RatesAmong(direct_links, local);
    auto orders = known.find(rates);
    if (orders == known.end()) {
      const NodeOrders found = NodeRings(rates);
      orders = known.emplace(std::move(rates), found).first;
    }
    auto [rings, open_chain, meshed] = orders->second;
    group.open_chain = open_chain && by_node.size() == 1;
    group.meshed.push_back(meshed);
    HostRanks& host = hosts.emplace_back();
    host.meshed = meshed;
    host.nics.resize(ranks.size());
    for (size_t i = 0; by_node.size() > 1 && i < ranks.size(); ++i) {
      host.nics[i] = router.NicsOf(local[static_cast<size_t>(rings[0][i])]);
    }
    for (auto& ring : rings) {
      for (int& position : ring)
        position = ranks[static_cast<size_t>(position)];
    }
    group.node_rings.push_back(std::move(rings));
    group.nodes.push_back(std::move(ranks));
  }
  group.doors = DoorsInTurn(hosts);
  return group;
}

// The rings that the sends of a repeated round form, as indices of them: after
// each send comes the receiver's with the same base.
std::vector<std::vector<size_t>> RingsOf(const Round& round) {
  if (round.repeat == 1) return {};
  const auto key = [](int rank, int base) {
    return (static_cast<uint64_t>(rank) << 32) | static_cast<uint64_t>(base);
  };
  std::unordered_map<uint64_t, size_t> send_of;
  for (size_t i = 0; i < round.sends.size(); ++i) {
    send_of[key(round.sends[i].from, round.sends[i].base)] = i;
  }
  std::vector<std::vector<size_t>> rings;
  std::vector<bool> seen(round.sends.size(), false);
  for (size_t start = 0; start < round.sends.size(); ++start) {
    if (seen[start]) continue;
    std::vector<size_t>& ring = rings.emplace_back();
    for (size_t i = start; !seen[i];) {
      seen[i] = true;
      ring.push_back(i);
      const auto next =
          send_of.find(key(round.sends[i].to, round.sends[i].base));
      TESSERA_CHECK(next != send_of.end()) << round.sends[i].to;
      i = next->second;
    }
  }
  return rings;
}

// The time of the longest chain of sends in `round`: `repeat` of them in a row
// along one of `rings`, which are its own and longer. latency[i] is sends[i]'s.
Duration LongestChain(const Round& round,
                      std::span<const std::vector<size_t>> rings,
                      std::span<const Duration> latency) {
  if (round.repeat == 1) {
    return latency.empty() ? Duration() : std::ranges::max(latency);
  }
  Duration longest;
  for (const std::vector<size_t>& ring : rings) {
    const size_t size = ring.size();
    const auto steps = static_cast<size_t>(round.repeat);
    TESSERA_CHECK(steps < size) << steps << " of " << size;
    Duration stretch;
    for (size_t i = 0; i < steps; ++i) stretch += latency[ring[i]];
    longest = Max(longest, stretch);
    for (size_t i = 0; i < size; ++i) {
      stretch = stretch - latency[ring[i]] + latency[ring[(i + steps) % size]];
      longest = Max(longest, stretch);
    }
  }
  return longest;
}

// `head`, and for each subgroup its size and devices.
IntKey KeyOf(std::initializer_list<int64_t> head,
             std::span<const std::vector<DeviceId>> subgroups) {
  size_t size = head.size() + subgroups.size();
  for (const auto& devices : subgroups) size += devices.size();
  IntKey key = head;
  key.reserve(size);
  for (const auto& devices : subgroups) {
    key.push_back(static_cast<int64_t>(devices.size()));
    for (DeviceId device : devices) key.push_back(device.value);
  }
  return key;
}

}  // namespace

Result<CollectiveChoice> ParseCollectiveChoice(std::string_view text) {
  const size_t slash = text.find('/');
  CollectiveChoice choice{std::string(text.substr(0, slash)), ""};
  if (!choice.algorithm.empty()) {
    TESSERA_RETURN_IF_ERROR(
        Find("collective algorithm", CollectiveAlgorithms(), choice.algorithm));
  }
  if (slash == std::string_view::npos) return choice;
  choice.protocol = text.substr(slash + 1);
  if (choice.protocol == PlainProtocol()[0].name) return choice;
  TESSERA_RETURN_IF_ERROR(Find("collective protocol",
                               ProtocolsOf(SendPattern::kPipeline),
                               choice.protocol));
  return choice;
}

CollectiveModel::CollectiveModel(const Cluster& cluster)
    : CollectiveModel(cluster,
                      ParseCollectiveChoice(cluster.collective).value()) {}

CollectiveModel::CollectiveModel(const Cluster& cluster,
                                 CollectiveChoice choice)
    : cluster_(cluster),
      choice_(std::move(choice)),
      router_(cluster),
      direct_links_(DirectLinksOf(cluster)),
      switch_links_(cluster.devices.size()) {
  // Of several switches the one with the most bandwidth. A network's do not
  // count, to which devices may be joined without a NIC.
  const std::vector<DeviceId> device_at = DevicesAtVertices(cluster);
  const auto is_of_host = [&](VertexId vertex, DeviceId device) {
    return cluster.vertices[vertex.index()].kind == VertexKind::kSwitch &&
           router_.NodeOf(vertex) == cluster.devices[device.index()].node;
  };
  for (size_t l = 0; l < cluster.links.size(); ++l) {
    const Link& link = cluster.links[l];
    const DeviceId device = device_at[link.from.index()];
    if (!device.valid() || !is_of_host(link.to, device)) continue;
    SwitchLinks& found = switch_links_[device.index()];
    const double bandwidth = TypeOf(cluster, link).bandwidth.value;
    if (bandwidth <= found.bandwidth) continue;
    found = {link.to, LinkId(static_cast<int64_t>(l)), {}, bandwidth};
  }
  for (size_t l = 0; l < cluster.links.size(); ++l) {
    const Link& link = cluster.links[l];
    const DeviceId device = device_at[link.to.index()];
    if (!device.valid()) continue;
    SwitchLinks& found = switch_links_[device.index()];
    if (found.bandwidth > 0 && link.from == found.at) {
      found.down = LinkId(static_cast<int64_t>(l));
    }
  }
  for (SwitchLinks& found : switch_links_) {
    if (!found.down.valid()) found = {};
  }
}

CollectiveModel::~CollectiveModel() = default;

const std::vector<CollectiveOption>& CollectiveModel::Options(
    CommKind kind, std::span<const std::vector<DeviceId>> subgroups) const {
  TESSERA_CHECK(!subgroups.empty()) << NameOf(kind);
  return options_.Keep(KeyOf({static_cast<int64_t>(kind)}, subgroups),
                       [&] { return Compute(kind, subgroups); });
}

const std::vector<LinkLoad>& CollectiveModel::Loads(
    CommKind kind, std::span<const std::vector<DeviceId>> subgroups,
    std::string_view algorithm) const {
  const auto rows = CollectiveAlgorithms();
  const auto row =
      std::ranges::find(rows, algorithm, &CollectiveAlgorithm::name);
  return loads_.Keep(
      KeyOf({row - rows.begin(), static_cast<int64_t>(kind)}, subgroups), [&] {
        std::vector<LinkLoad> loads;
        if (row == rows.end()) return loads;  // "none"
        const std::vector<double> bytes =
            ReplayByBestDoors(*row, kind, MembersOf(kind, subgroups), {})
                .load.bytes;
        for (size_t l = 0; l < bytes.size(); ++l) {
          if (bytes[l] == 0) continue;
          loads.push_back({LinkId(static_cast<int64_t>(l)), bytes[l]});
        }
        return loads;
      });
}

CollectiveModel::Member CollectiveModel::MemberOf(
    std::span<const DeviceId> devices) const {
  Member member;
  member.devices = devices;
  std::vector<HostRanks> hosts;
  member.group = GroupOf(cluster_, router_, direct_links_, devices, hosts);
  if (hosts.size() > 1) {
    member.dealt_doors = DealtDoors(hosts);
    for (DeviceId device : devices) {
      member.nics_at_once.push_back(router_.NicsOf(device).at_once);
    }
  }
  member.on_switch.reserve(devices.size());
  for (DeviceId device : devices) {
    member.on_switch.push_back(switch_links_[device.index()]);
  }
  const auto slowest =
      std::ranges::min(member.on_switch, {}, &SwitchLinks::bandwidth);
  member.switch_bandwidth = slowest.bandwidth;
  member.group.in_switch =
      member.switch_bandwidth > 0 &&
      std::ranges::all_of(member.group.nodes, [&](const auto& ranks) {
        const VertexId at = member.on_switch[static_cast<size_t>(ranks[0])].at;
        return std::ranges::all_of(ranks, [&](int rank) {
          const SwitchLinks& links =
              member.on_switch[static_cast<size_t>(rank)];
          return links.at == at &&
                 TypeOf(cluster_, links.up).in_switch_bandwidth.value > 0 &&
                 TypeOf(cluster_, links.down).in_switch_bandwidth.value > 0;
        });
      });
  return member;
}

std::vector<CollectiveModel::Member> CollectiveModel::MembersOf(
    CommKind kind, std::span<const std::vector<DeviceId>> subgroups) const {
  std::vector<Member> members;
  for (const auto& devices : subgroups) {
    TESSERA_CHECK(!devices.empty()) << NameOf(kind);
    const bool alone = std::ranges::count(devices, devices[0]) ==
                       static_cast<int64_t>(devices.size());
    if (!alone) members.push_back(MemberOf(devices));
  }
  return members;
}

std::vector<CollectiveOption> CollectiveModel::Compute(
    CommKind kind, std::span<const std::vector<DeviceId>> subgroups) const {
  const std::vector<Member> members = MembersOf(kind, subgroups);
  if (members.empty()) return {{.algorithm = "none", .protocol = ""}};

  const auto applies = [&](const CollectiveAlgorithm& algorithm) {
    return std::ranges::all_of(members, [&](const Member& member) {
      return algorithm.applies(kind, member.group);
    });
  };
  const auto asked_for = [&](const CollectiveAlgorithm& algorithm) {
    return algorithm.name == choice_.algorithm;
  };
  const bool by_name =
      std::ranges::any_of(CollectiveAlgorithms(), [&](const auto& algorithm) {
        return asked_for(algorithm) && applies(algorithm);
      });
  std::vector<CollectiveOption> options;
  for (const CollectiveAlgorithm& algorithm : CollectiveAlgorithms()) {
    if (by_name ? !asked_for(algorithm) : !algorithm.automatic) continue;
    if (applies(algorithm)) AddOptions(algorithm, kind, members, options);
  }
  TESSERA_CHECK(!options.empty()) << NameOf(kind);
  if (std::ranges::any_of(options, [&](const CollectiveOption& option) {
        return option.protocol == choice_.protocol;
      })) {
    std::erase_if(options, [&](const CollectiveOption& option) {
      return option.protocol != choice_.protocol;
    });
  }
  return options;
}

// Whether `link` leads from a NIC of `node` to the network, or the other way.
bool CollectiveModel::IsOutOfNic(LinkId link, int node) const {
  const auto [from, to, type] = cluster_.links[link.index()];
  return cluster_.vertices[from.index()].kind == VertexKind::kNic &&
         router_.NodeOf(from) == node && router_.NodeOf(to) != node;
}
bool CollectiveModel::IsIntoNic(LinkId link, int node) const {
  const auto [from, to, type] = cluster_.links[link.index()];
  return cluster_.vertices[to.index()].kind == VertexKind::kNic &&
         router_.NodeOf(to) == node && router_.NodeOf(from) != node;
}

CollectiveModel::RoundCost CollectiveModel::CostOf(const Member& member,
                                                   const Rounds& rounds,
                                                   const Round& round,
                                                   Load& load) const {
  RoundCost cost;
  cost.hops.reserve(round.sends.size());
  cost.between_hosts.reserve(round.sends.size());
  std::set<std::pair<LinkId, int>> crossed;  // in the switch: by chunk
  std::vector<RouteLink> route;
  for (const Send& send : round.sends) {
    const auto from = static_cast<size_t>(send.from);
    const auto to = static_cast<size_t>(send.to);
    if (round.in_switch) {
      route = {{member.on_switch[from].up}, {member.on_switch[to].down}};
    } else {
      router_.Route(member.devices[from], member.devices[to], route);
    }
    const int source = cluster_.devices[member.devices[from].index()].node;
    const int target = cluster_.devices[member.devices[to].index()].node;
    const bool between_hosts = source != target;
    cost.hops.push_back(router_.Latency(route));
    cost.between_hosts.push_back(between_hosts);
    const double share = static_cast<double>(send.count) * round.copies *
                         round.repeat / rounds.chunks;
    double out_of_nic = 0;  // bytes a second of the fastest
    double into_nic = 0;
    for (const auto& [link, part] : route) {
      const LinkType& type = TypeOf(cluster_, link);
      load.start = Max(load.start, type.start);
      double bytes = share * part;
      if (round.in_switch) {
        if (!crossed.emplace(link, send.base + send.first).second) continue;
        bytes *= type.bandwidth.value / type.in_switch_bandwidth.value;
      }
      load.bytes[link.index()] += bytes;
      if (!between_hosts) continue;
      const double rate = type.bandwidth.value;
      const bool out = IsOutOfNic(link, source);
      const bool into = IsIntoNic(link, target);
      if (out) out_of_nic = std::max(out_of_nic, rate);
      if (into) into_nic = std::max(into_nic, rate);
      if (!out && !into) {
        cost.seconds_per_byte = std::max(cost.seconds_per_byte, 1 / rate);
      }
    }
    for (const double nic : {out_of_nic, into_nic}) {
      if (nic > 0) {
        cost.seconds_per_byte = std::max(cost.seconds_per_byte, 1 / nic);
      }
    }
    const auto add = [&](size_t rank, size_t direction, double rate) {
      if (rate == 0) return;
      load.by_own_nics[member.devices[rank].index()][direction] +=
          share / (rate * member.nics_at_once[rank]);
    };
    add(from, 0, out_of_nic);
    add(to, 1, into_nic);
  }
  return cost;
}

CollectiveModel::Replayed CollectiveModel::Replay(
    const CollectiveAlgorithm& algorithm, CommKind kind,
    std::span<const Member> members,
    std::span<const Protocol> protocols) const {
  Replayed replayed;
  replayed.load.bytes.resize(cluster_.links.size());
  replayed.load.by_own_nics.resize(cluster_.devices.size());
  replayed.latency.resize(protocols.size());
  std::vector<Duration> sends;
  for (const Member& member : members) {
    const Rounds rounds = algorithm.rounds(kind, member.group);
    if (member.switch_bandwidth > 0) {
      replayed.own_copy = std::max(replayed.own_copy,
                                   rounds.own_share / member.switch_bandwidth);
    }
    std::vector<Duration> total(protocols.size());
    std::vector<std::vector<Duration>> ways(  // by base, if apart
        protocols.size(),
        std::vector<Duration>(rounds.apart ? static_cast<size_t>(rounds.chunks)
                                           : 0));
    for (const Round& round : rounds.rounds) {
      const RoundCost cost = CostOf(member, rounds, round, replayed.load);
      if (protocols.empty()) continue;
      const auto rings = RingsOf(round);
      for (size_t p = 0; p < protocols.size(); ++p) {
        const Duration steps[] = {
            Duration::FromSeconds(protocols[p].host_step_s),
            Duration::FromSeconds(protocols[p].network_step_s)};
        sends = cost.hops;
        for (size_t i = 0; i < sends.size(); ++i) {
          sends[i] += steps[cost.between_hosts[i] ? 1 : 0];
        }
        if (rounds.apart) {
          for (size_t i = 0; i < sends.size(); ++i) {
            ways[p][static_cast<size_t>(round.sends[i].base)] += sends[i];
          }
        } else {
          total[p] += LongestChain(round, rings, sends);
        }
        if (rounds.whole_pieces) {
          total[p] += Duration::FromSeconds(
              cost.seconds_per_byte *
              static_cast<double>(protocols[p].piece.value));
        }
      }
    }
    for (size_t p = 0; p < protocols.size(); ++p) {
      for (const Duration way : ways[p]) total[p] = Max(total[p], way);
      replayed.latency[p] = Max(replayed.latency[p], total[p]);
    }
  }
  for (size_t l = 0; l < replayed.load.bytes.size(); ++l) {
    if (replayed.load.bytes[l] == 0) continue;
    const LinkId link(static_cast<int64_t>(l));
    replayed.busiest =
        std::max(replayed.busiest, replayed.load.bytes[l] /
                                       TypeOf(cluster_, link).bandwidth.value);
  }
  for (const auto& seconds : replayed.load.by_own_nics) {
    replayed.busiest = std::max({replayed.busiest, seconds[0], seconds[1]});
  }
  return replayed;
}

CollectiveModel::Replayed CollectiveModel::ReplayByBestDoors(
    const CollectiveAlgorithm& algorithm, CommKind kind,
    std::span<const Member> members,
    std::span<const Protocol> protocols) const {
  Replayed in_turn = Replay(algorithm, kind, members, protocols);
  if (std::ranges::all_of(members, [](const Member& member) {
        return member.dealt_doors.empty() ||
               member.dealt_doors == member.group.doors;
      })) {
    return in_turn;
  }
  std::vector<Member> dealt(members.begin(), members.end());
  for (Member& member : dealt) {
    if (!member.dealt_doors.empty()) member.group.doors = member.dealt_doors;
  }
  Replayed by_dealt = Replay(algorithm, kind, dealt, protocols);
  // What rounding makes of the same decides nothing.
  return by_dealt.busiest < in_turn.busiest * (1 - 1e-9) ? by_dealt : in_turn;
}

void CollectiveModel::AddOptions(const CollectiveAlgorithm& algorithm,
                                 CommKind kind, std::span<const Member> members,
                                 std::vector<CollectiveOption>& options) const {
  const bool shared_memory = std::ranges::all_of(
      members, [](const Member& member) { return member.group.shared_memory; });
  const bool plain =
      shared_memory || choice_.protocol == PlainProtocol()[0].name;
  const auto protocols =
      plain ? PlainProtocol() : ProtocolsOf(algorithm.pattern);
  const Replayed replayed =
      ReplayByBestDoors(algorithm, kind, members, protocols);
  for (size_t p = 0; p < protocols.size(); ++p) {
    CollectiveOption& option = options.emplace_back();
    option.algorithm = algorithm.name;
    option.protocol = protocols[p].name;
    option.latency_s = replayed.load.start.seconds() + protocols[p].start_s +
                       replayed.latency[p].seconds();
    option.seconds_per_byte =
        (replayed.busiest + protocols[p].own_copy * replayed.own_copy) /
        protocols[p].fraction;
  }
}

const CollectiveOption& CollectiveModel::Best(
    std::span<const CollectiveOption> options, Bytes payload) {
  return *std::ranges::min_element(
      options, {},
      [&](const CollectiveOption& option) { return option.Seconds(payload); });
}

}  // namespace tessera
