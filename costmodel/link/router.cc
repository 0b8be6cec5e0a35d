#include "costmodel/link/router.h"

#include <algorithm>
#include <boost/graph/compressed_sparse_row_graph.hpp>
#include <boost/graph/dijkstra_shortest_paths.hpp>
#include <cmath>
#include <compare>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include "planner/base/divide.h"

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

struct EdgeCost {
  PathCost cost;
};
using Graph = boost::compressed_sparse_row_graph<boost::directedS,
                                                 boost::no_property, EdgeCost>;

struct Edge {
  size_t from;
  size_t to;
  PathCost cost;
  LinkId link;
};

// What a device reaches along some links, and the least cost of it.
struct Reached {
  std::vector<VertexId> vertices;  // in the order of ids
  std::vector<Edge> edges;         // between these, as the links are
  std::vector<PathCost> cost;      // by vertex
  size_t source = 0;

  // vertices.size() where it is not among them.
  size_t Find(VertexId vertex) const {
    const auto at = std::ranges::lower_bound(vertices, vertex);
    return at != vertices.end() && *at == vertex
               ? static_cast<size_t>(at - vertices.begin())
               : vertices.size();
  }
};

// `links` are sorted; their latencies may count.
Reached Reach(const Cluster& cluster, DeviceId from,
              std::span<const LinkId> links, bool latencies_count) {
  Reached reached;
  const VertexId start = cluster.devices[from.index()].vertex;
  std::vector<VertexId>& vertices = reached.vertices;
  vertices = {start};
  vertices.reserve(1 + 2 * links.size());
  for (LinkId id : links) {
    vertices.push_back(cluster.links[id.index()].from);
    vertices.push_back(cluster.links[id.index()].to);
  }
  std::ranges::sort(vertices);
  const auto repeated = std::ranges::unique(vertices);
  vertices.erase(repeated.begin(), repeated.end());
  reached.source = reached.Find(start);

  reached.edges.reserve(links.size());
  for (LinkId id : links) {
    const Link& link = cluster.links[id.index()];
    const VertexKind kind = cluster.vertices[link.from.index()].kind;
    const bool forwards = kind == VertexKind::kDevice && link.from != start;
    PathCost cost = {.devices = forwards ? 1 : 0,
                     .bridges = kind == VertexKind::kBridge ? 1 : 0,
                     .nics = kind == VertexKind::kNic ? 1 : 0,
                     .hops = 1};
    if (latencies_count) {
      cost.picoseconds = cluster.link_types[static_cast<size_t>(link.type)]
                             .latency.picoseconds;
    }
    reached.edges.push_back(
        {reached.Find(link.from), reached.Find(link.to), cost, id});
  }
  std::vector<std::pair<size_t, size_t>> ends;
  std::vector<EdgeCost> costs;
  ends.reserve(reached.edges.size());
  costs.reserve(reached.edges.size());
  for (const Edge& edge : reached.edges) {
    ends.emplace_back(edge.from, edge.to);
    costs.push_back({edge.cost});
  }
  const Graph graph(boost::edges_are_unsorted_multi_pass, ends.begin(),
                    ends.end(), costs.begin(), vertices.size());
  reached.cost.assign(vertices.size(), kUnreached);
  boost::dijkstra_shortest_paths(
      graph, reached.source,
      boost::weight_map(boost::get(&EdgeCost::cost, graph))
          .distance_map(boost::make_iterator_property_map(
              reached.cost.begin(), boost::get(boost::vertex_index, graph)))
          .distance_inf(kUnreached)
          .distance_zero(PathCost{})
          .distance_compare(std::less<PathCost>())
          .distance_combine(std::plus<PathCost>()));
  return reached;
}

// By vertex the edges that end a least path to it, by id.
std::vector<std::vector<const Edge*>> LastEdges(const Reached& reached) {
  std::vector<std::vector<const Edge*>> last(reached.vertices.size());
  for (const Edge& edge : reached.edges) {
    if (reached.cost[edge.from] != kUnreached &&
        reached.cost[edge.from] + edge.cost == reached.cost[edge.to]) {
      last[edge.to].push_back(&edge);
    }
  }
  return last;
}

// More than the partners of a device in rings, and few beside all nodes.
constexpr int kSingleSearches = 16;

}  // namespace

struct Router::Paths {
  Reached reached;
  std::vector<std::vector<const Edge*>> last;  // by vertex
  // The vertices of the source's node by which least paths to one of the
  // network come from there, as far as they were asked for.
  std::vector<std::optional<std::vector<size_t>>> ways;
};

Router::Router(const Cluster& cluster) : cluster_(cluster) {
  for (size_t d = 0; d < cluster.devices.size(); ++d) {
    while (static_cast<int>(first_device_.size()) <= cluster.devices[d].node) {
      first_device_.push_back(static_cast<int>(d));
    }
  }
  first_device_.push_back(static_cast<int>(cluster.devices.size()));

  // Spread each node's number from its devices, up to and including NICs. Two
  // numbers that meet make a vertex part of the network.
  constexpr int kUnknown = -2;
  constexpr int kNetwork = -1;
  std::vector<std::vector<size_t>> neighbours(cluster.vertices.size());
  for (const Link& link : cluster.links) {
    neighbours[link.from.index()].push_back(link.to.index());
    neighbours[link.to.index()].push_back(link.from.index());
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
    if (from < 0 && to < 0) {
      links_of_network_.push_back(id);
      continue;
    }
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
  std::ranges::sort(nics);
  const auto repeated = std::ranges::unique(nics);
  nics.erase(repeated.begin(), repeated.end());
  return nics;
}

NearestNics Router::NearestOf(DeviceId device,
                              std::span<const VertexId> nics) const {
  const auto home = static_cast<size_t>(cluster_.devices[device.index()].node);
  const Reached reached = Reach(cluster_, device, links_of_node_[home],
                                /*latencies_count=*/false);
  NearestNics nearest;
  PathCost least = kUnreached;
  for (size_t i = 0; i < nics.size(); ++i) {
    const PathCost& cost = reached.cost[reached.Find(nics[i])];
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
    const double bandwidth =
        cluster_.link_types[static_cast<size_t>(link.type)].bandwidth.value;
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
  const Pattern& pattern = PatternOf(from, static_cast<int>(node));
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

uint64_t Router::AlikeKey(DeviceId from, int node) const {
  const int home = cluster_.devices[from.index()].node;
  const auto class_of = [&](int n) {
    return static_cast<uint64_t>(class_of_node_[static_cast<size_t>(n)]);
  };
  const auto local = static_cast<uint64_t>(
      from.value - first_device_[static_cast<size_t>(home)]);
  return (home == node ? uint64_t{1} << 63 : 0) | local << 48 |
         class_of(home) << 24 | class_of(node);
}

const Router::Pattern& Router::PatternOf(DeviceId from, int node) const {
  const uint64_t alike = AlikeKey(from, node);
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
    many = ++single_searches_[alike >> 24] == kSingleSearches;
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
    const int type = cluster_.links[at.link.index()].type;
    const Duration latency =
        cluster_.link_types[static_cast<size_t>(type)].latency;
    picoseconds += at.share * static_cast<double>(latency.picoseconds);
  }
  return Duration{std::llround(picoseconds)};
}

std::vector<LinkId> Router::LinksTo(int home,
                                    std::span<const int> nodes) const {
  std::vector<LinkId> links = links_of_node_[static_cast<size_t>(home)];
  links.insert(links.end(), links_of_network_.begin(), links_of_network_.end());
  for (int node : nodes) {
    for (LinkId id : links_of_node_[static_cast<size_t>(node)]) {
      const Link& link = cluster_.links[id.index()];
      const int from = NodeOf(link.from);
      const bool by_third = from >= 0 && from != node && from != home;
      if (NodeOf(link.to) == node && !by_third) links.push_back(id);
    }
  }
  // A link from `home` to another node is in both lists.
  std::ranges::sort(links);
  const auto repeated = std::ranges::unique(links);
  links.erase(repeated.begin(), repeated.end());
  return links;
}

std::vector<LinkId> Router::Used(std::span<const LinkId> links) const {
  std::vector<LinkId> used;
  for (LinkId id : links) {
    const Link& link = cluster_.links[id.index()];
    if (left_out_.empty() ||
        !(left_out_[link.from.index()] || left_out_[link.to.index()])) {
      used.push_back(id);
    }
  }
  return used;
}

// `inside` tells whether no third host forwards.
std::shared_ptr<const Router::Pattern> Router::Compute(DeviceId from, int node,
                                                       bool& inside) const {
  const int home = cluster_.devices[from.index()].node;
  RoutesToNode routes;
  const auto search = [&](std::span<const LinkId> links) {
    Paths paths = Search(from, links, /*latencies_count=*/node == home);
    return Walk(from, node, paths, routes);
  };
  if (node == home) {
    inside = search(links_of_node_[static_cast<size_t>(home)]);
  } else {
    const std::vector<LinkId> links = LinksTo(home, std::array{node});
    inside = search(Used(links)) || (!left_out_.empty() && search(links));
  }
  if (!inside) {
    std::vector<LinkId> all;
    for (size_t l = 0; l < cluster_.links.size(); ++l) {
      all.emplace_back(static_cast<int64_t>(l));
    }
    TESSERA_CHECK(search(Used(all)) || search(all))
        << "device " << from << " does not reach node " << node;
  }
  return PatternOf(std::move(routes), home, node, inside);
}

void Router::ComputeAll(DeviceId from) const {
  const int home = cluster_.devices[from.index()].node;
  std::vector<int> nodes;
  std::vector<bool> seen(class_of_node_.size());
  for (int node = 0; node < static_cast<int>(class_of_node_.size()); ++node) {
    const auto number =
        static_cast<size_t>(class_of_node_[static_cast<size_t>(node)]);
    if (node == home || seen[number]) continue;
    seen[number] = true;
    nodes.push_back(node);
  }
  Paths paths =
      Search(from, Used(LinksTo(home, nodes)), /*latencies_count=*/false);
  for (int node : nodes) {
    RoutesToNode routes;
    if (!Walk(from, node, paths, routes)) continue;
    auto pattern = PatternOf(std::move(routes), home, node, /*inside=*/true);
    std::unique_lock lock(mutex_);
    alike_.try_emplace(AlikeKey(from, node), std::move(pattern));
  }
}

std::shared_ptr<const Router::Pattern> Router::PatternOf(RoutesToNode routes,
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

Router::Paths Router::Search(DeviceId from, std::span<const LinkId> links,
                             bool latencies_count) const {
  Paths paths;
  paths.reached = Reach(cluster_, from, links, latencies_count);
  paths.last = LastEdges(paths.reached);
  paths.ways.resize(paths.last.size());
  return paths;
}

bool Router::Walk(DeviceId from, int node, Paths& paths,
                  RoutesToNode& out) const {
  const Reached& reached = paths.reached;
  const auto& last = paths.last;
  auto& ways = paths.ways;
  const int home = cluster_.devices[from.index()].node;
  const auto local_index = static_cast<size_t>(
      from.value - first_device_[static_cast<size_t>(home)]);
  const auto owner = [&](size_t v) {
    return owner_[reached.vertices[v].index()];
  };

  const auto ways_to = [&](const auto& self,
                           size_t v) -> const std::vector<size_t>& {
    if (ways[v].has_value()) return *ways[v];
    std::vector<size_t> found;
    if (owner(v) == home) {
      found = {v};
    } else {
      for (const Edge* edge : last[v]) {
        const std::vector<size_t>& more = self(self, edge->from);
        found.insert(found.end(), more.begin(), more.end());
      }
      std::ranges::sort(found);
      const auto repeated = std::ranges::unique(found);
      found.erase(repeated.begin(), repeated.end());
    }
    return ways[v].emplace(std::move(found));
  };
  // Whether the links at a fork before `v` carry a part each.
  const auto is_cut = [&](size_t v) {
    if (last[v].size() == 1 || node == home) return false;
    return owner(v) == node ||
           std::ranges::any_of(last[v], [&](const Edge* edge) {
             return ways_to(ways_to, edge->from) !=
                    ways_to(ways_to, last[v][0]->from);
           });
  };

  out.begin = {0};
  out.links.clear();
  // What part of a transfer comes by a vertex; the farthest is last.
  std::map<std::pair<PathCost, size_t>, double> parts;
  const auto n = static_cast<size_t>(node);
  for (int d = first_device_[n]; d < first_device_[n + 1]; ++d) {
    const size_t first = out.links.size();
    const size_t target =
        reached.Find(cluster_.devices[static_cast<size_t>(d)].vertex);
    if (target == reached.vertices.size()) return false;
    parts = {{{reached.cost[target], target}, 1}};
    while (!parts.empty()) {
      const auto [at, part] = *std::prev(parts.end());
      parts.erase(std::prev(parts.end()));
      const size_t v = at.second;
      if (v == reached.source) continue;
      const std::vector<const Edge*>& fork = last[v];
      if (fork.empty()) return false;
      const auto take = [&](const Edge& edge, double share) {
        out.links.push_back({edge.link, share});
        parts[{reached.cost[edge.from], edge.from}] += share;
      };
      if (!is_cut(v)) {
        take(*fork[local_index % fork.size()], part);
        continue;
      }
      for (const Edge* edge : fork) {
        take(*edge, part / static_cast<double>(fork.size()));
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
  const auto local = static_cast<uint64_t>(device.value - first_device_[home]);
  const uint64_t key =
      local << 32 | static_cast<uint64_t>(class_of_node_[home]);
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
