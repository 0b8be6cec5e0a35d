#include "costmodel/link/router.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <queue>
#include <utility>

#include "planner/base/divide.h"
#include "planner/base/flat_map.h"
#include "planner/base/rng.h"
#include "planner/base/sort_unique.h"
#include "planner/ir/cluster_lookup.h"

namespace tessera {
namespace {

// What a path costs, compared from the first member on.
struct PathCost {
  int32_t devices = 0;
  int32_t bridges = 0;
  int32_t nics = 0;
  int32_t hops = 0;
  int64_t picoseconds = 0;  // between nodes none
  auto operator<=>(const PathCost&) const = default;
  PathCost operator+(const PathCost& o) const {
    return {devices + o.devices, bridges + o.bridges, nics + o.nics,
            hops + o.hops, picoseconds + o.picoseconds};
  }
};

constexpr PathCost kUnreached = {std::numeric_limits<int32_t>::max()};

struct HashOfVertex {
  uint64_t operator()(VertexId vertex) const {
    return Mix64(static_cast<uint64_t>(vertex.value));
  }
};

// What `link` adds to a path from `source`.
PathCost CostOf(const Cluster& cluster, const Link& link, VertexId source,
                bool latencies_count) {
  const VertexKind kind = cluster.vertices[link.from.index()].kind;
  const bool forwards = kind == VertexKind::kDevice && link.from != source;
  PathCost cost = {.devices = forwards ? 1 : 0,
                   .bridges = kind == VertexKind::kBridge ? 1 : 0,
                   .nics = kind == VertexKind::kNic ? 1 : 0,
                   .hops = 1};
  if (latencies_count) {
    cost.picoseconds = TypeOf(cluster, link).latency.picoseconds;
  }
  return cost;
}

using Entry = std::pair<PathCost, VertexId>;
using Queue = std::priority_queue<Entry, std::vector<Entry>, std::greater<>>;

// More than the partners of a device in rings, and few beside all nodes.
constexpr int kSingleSearches = 16;

}  // namespace

// What is left, at least, to the nearest of the ends of a search: within their
// node, and from outside of it by the best way in, as which none counts more,
// so that no link lessens it by more than its cost. Nothing where it is not
// known.
struct Router::Tails {
  FlatMap<VertexId, PathCost, HashOfVertex> of_vertex;
  PathCost outside;

  PathCost From(VertexId vertex) const {
    const auto found = of_vertex.find(vertex);
    return found == of_vertex.end() ? outside
                                    : std::min(found->second, outside);
  }
};

struct Router::Paths {
  SearchArea area;
  VertexId source;
  // The least cost of what is reached; of what is farther than the targets
  // perhaps more than that.
  FlatMap<VertexId, PathCost, HashOfVertex> cost;
  // By the number in `cost`, as far as they were asked for: the links that end
  // a least path there, by id; and of a vertex of the network the vertices of
  // the source's node by which least paths come from there.
  std::vector<std::optional<std::vector<LinkId>>> last;
  std::vector<std::optional<std::vector<VertexId>>> ways;

  PathCost CostTo(VertexId vertex) const {
    const auto found = cost.find(vertex);
    return found == cost.end() ? kUnreached : found->second;
  }
  size_t NumberOf(VertexId vertex) const {
    return cost.size() - static_cast<size_t>(cost.end() - cost.find(vertex));
  }
};

Router::Router(const Cluster& cluster)
    : cluster_(cluster),
      first_device_(FirstDevicesOfNodes(cluster)),
      links_from_(cluster.vertices.size()),
      links_to_(cluster.vertices.size()) {
  // Spread each node's number from its devices, up to and including NICs. Two
  // numbers that meet make a vertex part of the network.
  constexpr int kUnknown = -2;
  constexpr int kNetwork = -1;
  std::vector<std::vector<size_t>> neighbours(cluster.vertices.size());
  for (size_t l = 0; l < cluster.links.size(); ++l) {
    const Link& link = cluster.links[l];
    neighbours[link.from.index()].push_back(link.to.index());
    neighbours[link.to.index()].push_back(link.from.index());
    links_from_[link.from.index()].emplace_back(static_cast<int64_t>(l));
    links_to_[link.to.index()].emplace_back(static_cast<int64_t>(l));
  }
  owner_.assign(cluster.vertices.size(), kUnknown);
  std::vector<size_t> open;
  for (const Device& device : cluster.devices) {
    owner_[device.vertex.index()] = device.node;
    open.push_back(device.vertex.index());
  }
  while (!open.empty()) {
    const size_t vertex = open.back();
    open.pop_back();
    const int owner = owner_[vertex];
    if (cluster.vertices[vertex].kind == VertexKind::kNic &&
        owner != kNetwork) {
      continue;
    }
    for (size_t next : neighbours[vertex]) {
      if (cluster.vertices[next].kind == VertexKind::kDevice) continue;
      if (owner_[next] == owner || owner_[next] == kNetwork) continue;
      // The network ends at the NICs of the nodes.
      if (owner == kNetwork &&
          cluster.vertices[next].kind == VertexKind::kNic) {
        continue;
      }
      owner_[next] = owner_[next] == kUnknown ? owner : kNetwork;
      open.push_back(next);
    }
  }
  std::ranges::replace(owner_, kUnknown, kNetwork);

  links_of_node_.resize(static_cast<size_t>(cluster.num_nodes()));
  for (size_t l = 0; l < cluster.links.size(); ++l) {
    const int from = owner_[cluster.links[l].from.index()];
    const int to = owner_[cluster.links[l].to.index()];
    const LinkId id(static_cast<int64_t>(l));
    if (from >= 0) links_of_node_[static_cast<size_t>(from)].push_back(id);
    if (to >= 0 && to != from) {
      links_of_node_[static_cast<size_t>(to)].push_back(id);
    }
  }
  NumberClasses();
  LeaveOutSlowNics();
}

void Router::NumberClasses() {
  // A vertex among those of its kind in its node, in the order of ids.
  std::vector<int64_t> number(cluster_.vertices.size());
  std::map<std::pair<int, VertexKind>, int64_t> count;
  for (size_t v = 0; v < number.size(); ++v) {
    number[v] = count[{owner_[v], cluster_.vertices[v].kind}]++;
  }
  for (size_t d = 0; d < cluster_.devices.size(); ++d) {
    const Device& device = cluster_.devices[d];
    number[device.vertex.index()] =
        static_cast<int64_t>(d) -
        first_device_[static_cast<size_t>(device.node)];
  }
  std::map<std::vector<int64_t>, int> classes;
  for (size_t node = 0; node < links_of_node_.size(); ++node) {
    std::vector<int64_t> key = {first_device_[node + 1] - first_device_[node]};
    for (LinkId id : links_of_node_[node]) {
      const Link& link = cluster_.links[id.index()];
      key.push_back(link.type);
      for (VertexId end : {link.from, link.to}) {
        const int owner = owner_[end.index()];
        if (owner == static_cast<int>(node)) {
          key.push_back(
              static_cast<int64_t>(cluster_.vertices[end.index()].kind));
          key.push_back(number[end.index()]);
        } else {
          // Who is linked to another node is like none.
          key.push_back(owner < 0 ? -1 : -2 - static_cast<int64_t>(node));
          key.push_back(end.value);
        }
      }
    }
    const auto [it, is_new] =
        classes.try_emplace(std::move(key), static_cast<int>(classes.size()));
    class_of_node_.push_back(it->second);
  }
}

std::vector<VertexId> Router::NicsOfNode(size_t node) const {
  std::vector<VertexId> nics;
  for (LinkId id : links_of_node_[node]) {
    const Link& link = cluster_.links[id.index()];
    if (cluster_.vertices[link.from.index()].kind == VertexKind::kNic &&
        NodeOf(link.from) == static_cast<int>(node) &&
        NodeOf(link.to) != static_cast<int>(node)) {
      nics.push_back(link.from);
    }
  }
  SortUnique(nics);
  return nics;
}

NearestNics Router::NearestOf(DeviceId device,
                              std::span<const VertexId> nics) const {
  const auto home = static_cast<size_t>(cluster_.devices[device.index()].node);
  const Paths paths =
      Search(device, {.home = static_cast<int>(home), .network = false}, {});
  NearestNics nearest;
  PathCost least = kUnreached;
  for (size_t i = 0; i < nics.size(); ++i) {
    const PathCost cost = paths.CostTo(nics[i]);
    if (cost == kUnreached || least < cost) continue;
    if (cost < least) nearest.numbers.clear();
    least = cost;
    nearest.numbers.push_back(static_cast<int>(i));
  }
  nearest.distance = {least.devices, least.bridges, least.hops};
  return nearest;
}

void Router::LeaveOutSlowNics() {
  std::vector<double> rate(cluster_.vertices.size(),
                           std::numeric_limits<double>::infinity());
  for (const Link& link : cluster_.links) {
    const double bandwidth = TypeOf(cluster_, link).bandwidth.value;
    for (VertexId end : {link.from, link.to}) {
      rate[end.index()] = std::min(rate[end.index()], bandwidth);
    }
  }
  std::map<int, std::vector<bool>> used_of_class;  // by number of the NIC
  std::vector<VertexId> unused;
  for (size_t node = 0; node < links_of_node_.size(); ++node) {
    const std::vector<VertexId> nics = NicsOfNode(node);
    const auto rate_of = [&](size_t number) {
      return rate[nics[number].index()];
    };
    if (std::ranges::all_of(nics, [&](VertexId nic) {
          return rate[nic.index()] == rate[nics[0].index()];
        })) {
      continue;
    }
    auto& used = used_of_class[class_of_node_[node]];
    if (used.empty()) {
      used.resize(nics.size());
      for (int d = first_device_[node]; d < first_device_[node + 1]; ++d) {
        std::vector<int> nearest = NearestOf(DeviceId(d), nics).numbers;
        std::ranges::stable_sort(nearest, std::greater<double>(), [&](int i) {
          return rate_of(static_cast<size_t>(i));
        });
        double most = 0;
        size_t count = 0;
        for (size_t k = 0; k < nearest.size(); ++k) {
          const double together = static_cast<double>(k + 1) *
                                  rate_of(static_cast<size_t>(nearest[k]));
          if (together <= most * (1 + 1e-9)) continue;
          most = together;
          count = k + 1;
        }
        for (size_t k = 0; k < count; ++k) {
          used[static_cast<size_t>(nearest[k])] = true;
        }
      }
    }
    for (size_t i = 0; i < nics.size(); ++i) {
      if (!used[i]) unused.push_back(nics[i]);
    }
  }
  if (unused.empty()) return;
  left_out_.resize(cluster_.vertices.size());
  for (VertexId nic : unused) left_out_[nic.index()] = true;
}

std::vector<RouteLink> Router::Route(DeviceId from, DeviceId to) const {
  std::vector<RouteLink> links;
  Route(from, to, links);
  return links;
}

void Router::Route(DeviceId from, DeviceId to,
                   std::vector<RouteLink>& links) const {
  const auto home = static_cast<size_t>(cluster_.devices[from.index()].node);
  const auto node = static_cast<size_t>(cluster_.devices[to.index()].node);
  const Pattern& pattern = PatternTo(from, static_cast<int>(node));
  const auto i = static_cast<size_t>(to.value - first_device_[node]);
  links.clear();
  for (size_t s = pattern.begin[i]; s < pattern.begin[i + 1]; ++s) {
    const Step& step = pattern.steps[s];
    switch (step.among) {
      case Step::kSource:
        links.push_back({links_of_node_[home][step.number], step.share});
        break;
      case Step::kTarget:
        links.push_back({links_of_node_[node][step.number], step.share});
        break;
      case Step::kAll:
        links.push_back(
            {LinkId(static_cast<int64_t>(step.number)), step.share});
        break;
    }
  }
}

size_t Router::HashOfAlike::operator()(const AlikeKey& key) const {
  return Mix64(key.source ^ Mix64(static_cast<uint64_t>(key.node)));
}

uint64_t Router::KeyOf(DeviceId device) const {
  const auto home = static_cast<size_t>(cluster_.devices[device.index()].node);
  const auto local = static_cast<uint64_t>(device.value - first_device_[home]);
  return local << 32 | static_cast<uint64_t>(class_of_node_[home]);
}

Router::AlikeKey Router::AlikeKeyOf(DeviceId from, int node) const {
  const bool is_own = cluster_.devices[from.index()].node == node;
  return {KeyOf(from), is_own ? -1 : class_of_node_[static_cast<size_t>(node)]};
}

const Router::Pattern& Router::PatternTo(DeviceId from, int node) const {
  const AlikeKey alike = AlikeKeyOf(from, node);
  const uint64_t single =
      static_cast<uint64_t>(from.index()) << 32 | static_cast<uint64_t>(node);
  const auto known = [&]() -> const Pattern* {
    std::shared_lock lock(mutex_);
    const auto found = alike_.find(alike);
    if (found == alike_.end()) return nullptr;
    if (found->second != nullptr) return found->second.get();
    const auto own = single_.find(single);
    return own == single_.end() ? nullptr : own->second.get();
  };
  if (const Pattern* pattern = known()) return *pattern;
  bool many = false;
  {
    std::unique_lock lock(mutex_);
    many = ++single_searches_[alike.source] == kSingleSearches;
  }
  if (many) {
    ComputeAll(from);
    if (const Pattern* pattern = known()) return *pattern;
  }
  // Computed outside the lock; a second thread's equal result is dropped.
  bool inside = true;
  auto computed = Compute(from, node, inside);
  std::unique_lock lock(mutex_);
  if (inside) {
    return *alike_.try_emplace(alike, std::move(computed)).first->second;
  }
  alike_.try_emplace(alike, nullptr);
  return *single_.try_emplace(single, std::move(computed)).first->second;
}

Duration Router::Latency(std::span<const RouteLink> route) const {
  double picoseconds = 0;
  for (const RouteLink& at : route) {
    const Duration latency = TypeOf(cluster_, at.link).latency;
    picoseconds += at.share * static_cast<double>(latency.picoseconds);
  }
  return Duration{std::llround(picoseconds)};
}

bool Router::IsIn(const SearchArea& area, LinkId id) const {
  const Link& link = cluster_.links[id.index()];
  if (area.without_left_out && !left_out_.empty() &&
      (left_out_[link.from.index()] || left_out_[link.to.index()])) {
    return false;
  }
  if (area.all) return true;
  const int from = NodeOf(link.from);
  const int to = NodeOf(link.to);
  if (from == area.home || to == area.home) return true;
  if (!area.network) return false;
  if (to < 0) return from < 0;
  // Routes end at a target.
  const bool is_target = area.targets.empty()
                             ? area.target == to
                             : area.targets[static_cast<size_t>(to)];
  return is_target && (from < 0 || from == to);
}

// `inside` tells whether no third host forwards.
std::shared_ptr<const Router::Pattern> Router::Compute(DeviceId from, int node,
                                                       bool& inside) const {
  const int home = cluster_.devices[from.index()].node;
  const auto n = static_cast<size_t>(node);
  std::vector<VertexId> ends;
  for (int d = first_device_[n]; d < first_device_[n + 1]; ++d) {
    ends.push_back(cluster_.devices[static_cast<size_t>(d)].vertex);
  }
  RoutesToNode routes;
  const auto search = [&](SearchArea area, bool without_left_out) {
    area.home = home;
    area.target = node;
    area.without_left_out = without_left_out;
    area.latencies_count = node == home;
    Paths paths = Search(from, area, ends);
    return Walk(from, node, paths, routes);
  };
  // By NICs that are left out only where there is no other way.
  const auto search_both = [&](const SearchArea& area) {
    return search(area, true) || (!left_out_.empty() && search(area, false));
  };
  inside = node == home ? search({.network = false}, false) : search_both({});
  if (!inside) {
    TESSERA_CHECK(search_both({.all = true}))
        << "device " << from << " does not reach node " << node;
  }
  return MakePattern(std::move(routes), home, node, inside);
}

void Router::ComputeAll(DeviceId from) const {
  const int home = cluster_.devices[from.index()].node;
  std::vector<int> nodes;
  std::vector<bool> seen(class_of_node_.size());
  SearchArea area = {.home = home, .without_left_out = true};
  area.targets.resize(class_of_node_.size());
  for (int node = 0; node < static_cast<int>(class_of_node_.size()); ++node) {
    const auto number =
        static_cast<size_t>(class_of_node_[static_cast<size_t>(node)]);
    if (node == home || seen[number]) continue;
    seen[number] = true;
    nodes.push_back(node);
    area.targets[static_cast<size_t>(node)] = true;
  }
  Paths paths = Search(from, area, {});
  for (int node : nodes) {
    RoutesToNode routes;
    if (!Walk(from, node, paths, routes)) continue;
    auto pattern = MakePattern(std::move(routes), home, node, /*inside=*/true);
    std::unique_lock lock(mutex_);
    alike_.try_emplace(AlikeKeyOf(from, node), std::move(pattern));
  }
}

std::shared_ptr<const Router::Pattern> Router::MakePattern(RoutesToNode routes,
                                                           int home, int node,
                                                           bool inside) const {
  auto pattern = std::make_shared<Pattern>();
  pattern->begin = std::move(routes.begin);
  for (const auto& [link, share] : routes.links) {
    Step step{Step::kAll, link.index(), share};
    for (const auto& [among, owner] :
         {std::pair(Step::kSource, home), std::pair(Step::kTarget, node)}) {
      const auto& list = links_of_node_[static_cast<size_t>(owner)];
      const auto at = std::ranges::lower_bound(list, link);
      if (!inside || at == list.end() || *at != link) continue;
      step = {among, static_cast<size_t>(at - list.begin()), share};
      break;
    }
    pattern->steps.push_back(step);
  }
  return pattern;
}

bool Router::AddTails(const SearchArea& area, VertexId source,
                      std::span<const VertexId> ends, Tails& tails) const {
  Queue open;
  for (VertexId end : ends) {
    tails.of_vertex[end] = {};
    open.push({{}, end});
  }
  tails.outside = kUnreached;
  while (!open.empty()) {
    const auto [cost, vertex] = open.top();
    open.pop();
    if (tails.of_vertex.at(vertex) < cost) continue;
    for (LinkId id : links_to_[vertex.index()]) {
      if (!IsIn(area, id)) continue;
      const Link& link = cluster_.links[id.index()];
      const PathCost sum =
          cost + CostOf(cluster_, link, source, area.latencies_count);
      if (NodeOf(link.from) != area.target) {
        tails.outside = std::min(tails.outside, sum);
        continue;
      }
      const auto [known, is_new] = tails.of_vertex.try_emplace(link.from, sum);
      if (!is_new && known->second <= sum) continue;
      known->second = sum;
      open.push({sum, link.from});
    }
  }
  return tails.outside != kUnreached;
}

// A* (Hart, Nilsson and Raphael, 1968): what passes fewest bridges comes first,
// so that without the tails all of a network is nearer than the bridges of the
// next node.
Router::Paths Router::Search(DeviceId from, const SearchArea& area,
                             std::span<const VertexId> ends) const {
  Paths paths;
  paths.area = area;
  paths.source = cluster_.devices[from.index()].vertex;
  Tails tails;
  if (!ends.empty() && !area.all && area.target != area.home &&
      !AddTails(area, paths.source, ends, tails)) {
    return paths;
  }
  Queue open;  // by the cost with that of the tail
  paths.cost[paths.source] = {};
  open.push({tails.From(paths.source), paths.source});
  size_t left = ends.size();
  PathCost most = kUnreached;
  while (!open.empty()) {
    const auto [sum, vertex] = open.top();
    open.pop();
    // Whatever is on a least path to an end comes no later than that.
    if (most < sum) break;
    const PathCost cost = paths.CostTo(vertex);
    if (cost + tails.From(vertex) < sum) continue;  // it was reached for less
    const bool is_end =
        left > 0 && NodeOf(vertex) == area.target &&
        cluster_.vertices[vertex.index()].kind == VertexKind::kDevice;
    if (is_end && --left == 0) most = sum;
    for (LinkId id : links_from_[vertex.index()]) {
      if (!IsIn(area, id)) continue;
      const Link& link = cluster_.links[id.index()];
      const PathCost next =
          cost + CostOf(cluster_, link, paths.source, area.latencies_count);
      const auto [known, is_new] = paths.cost.try_emplace(link.to, next);
      if (!is_new && known->second <= next) continue;
      known->second = next;
      open.push({next + tails.From(link.to), link.to});
    }
  }
  paths.last.resize(paths.cost.size());
  paths.ways.resize(paths.cost.size());
  return paths;
}

const std::vector<LinkId>& Router::LastLinks(VertexId vertex,
                                             Paths& paths) const {
  std::optional<std::vector<LinkId>>& last = paths.last[paths.NumberOf(vertex)];
  if (last.has_value()) return *last;
  const PathCost cost = paths.CostTo(vertex);
  last.emplace();
  for (LinkId id : links_to_[vertex.index()]) {
    if (!IsIn(paths.area, id)) continue;
    const Link& link = cluster_.links[id.index()];
    const PathCost before = paths.CostTo(link.from);
    if (before != kUnreached && before + CostOf(cluster_, link, paths.source,
                                                paths.area.latencies_count) ==
                                    cost) {
      last->push_back(id);
    }
  }
  return *last;
}

const std::vector<VertexId>& Router::WaysTo(VertexId vertex,
                                            Paths& paths) const {
  std::optional<std::vector<VertexId>>& ways =
      paths.ways[paths.NumberOf(vertex)];
  if (ways.has_value()) return *ways;
  std::vector<VertexId> found;
  if (NodeOf(vertex) == paths.area.home) {
    found = {vertex};
  } else {
    for (LinkId id : LastLinks(vertex, paths)) {
      const auto& more = WaysTo(cluster_.links[id.index()].from, paths);
      found.insert(found.end(), more.begin(), more.end());
    }
    SortUnique(found);
  }
  return ways.emplace(std::move(found));
}

bool Router::Walk(DeviceId from, int node, Paths& paths,
                  RoutesToNode& out) const {
  const int home = cluster_.devices[from.index()].node;
  const auto local_index = static_cast<size_t>(
      from.value - first_device_[static_cast<size_t>(home)]);
  const auto before = [&](LinkId id) {
    return cluster_.links[id.index()].from;
  };
  // Whether the links of a fork before `vertex` carry a part each.
  const auto is_cut = [&](VertexId vertex, std::span<const LinkId> fork) {
    if (fork.size() == 1 || node == home) return false;
    return NodeOf(vertex) == node || std::ranges::any_of(fork, [&](LinkId id) {
             return WaysTo(before(id), paths) != WaysTo(before(fork[0]), paths);
           });
  };

  out.begin = {0};
  out.links.clear();
  // What part of a transfer comes by a vertex; the farthest is last.
  std::map<std::pair<PathCost, VertexId>, double> parts;
  const auto n = static_cast<size_t>(node);
  for (int d = first_device_[n]; d < first_device_[n + 1]; ++d) {
    const size_t first = out.links.size();
    const VertexId target = cluster_.devices[static_cast<size_t>(d)].vertex;
    if (paths.CostTo(target) == kUnreached) return false;
    parts = {{{paths.CostTo(target), target}, 1}};
    while (!parts.empty()) {
      const auto [at, part] = *std::prev(parts.end());
      parts.erase(std::prev(parts.end()));
      const VertexId vertex = at.second;
      if (vertex == paths.source) continue;
      const std::vector<LinkId>& fork = LastLinks(vertex, paths);
      const auto take = [&](LinkId link, double share) {
        out.links.push_back({link, share});
        parts[{paths.CostTo(before(link)), before(link)}] += share;
      };
      if (!is_cut(vertex, fork)) {
        take(fork[local_index % fork.size()], part);
        continue;
      }
      for (LinkId link : fork) {
        take(link, part / static_cast<double>(fork.size()));
      }
    }
    std::reverse(out.links.begin() + static_cast<int64_t>(first),
                 out.links.end());
    out.begin.push_back(out.links.size());
  }
  return true;
}

const NearestNics& Router::NicsOf(DeviceId device) const {
  const auto home = static_cast<size_t>(cluster_.devices[device.index()].node);
  const uint64_t key = KeyOf(device);
  {
    std::shared_lock lock(mutex_);
    if (auto found = nics_.find(key); found != nics_.end()) {
      return *found->second;
    }
  }
  // Computed outside the lock; a second thread's equal result is dropped.
  const std::vector<VertexId> nics = NicsOfNode(home);
  auto nearest = std::make_shared<NearestNics>(NearestOf(device, nics));
  if (nearest->numbers.size() > 1) {
    size_t devices = 0;
    for (int d = first_device_[home]; d < first_device_[home + 1]; ++d) {
      devices += std::ranges::count(NearestOf(DeviceId(d), nics).numbers,
                                    nearest->numbers[0]);
    }
    nearest->at_once =
        static_cast<int>(DivideUp(nearest->numbers.size(), devices));
  }
  if (!left_out_.empty()) {
    std::erase_if(nearest->numbers, [&](int number) {
      return left_out_[nics[static_cast<size_t>(number)].index()];
    });
  }
  std::unique_lock lock(mutex_);
  return *nics_.try_emplace(key, std::move(nearest)).first->second;
}

}  // namespace tessera
