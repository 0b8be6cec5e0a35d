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

namespace tessera {
namespace {

// What a path costs, compared from the first member on.
struct PathCost {
  int32_t devices = 0;
  int32_t bridges = 0;
  int64_t picoseconds = 0;
  int32_t hops = 0;
  auto operator<=>(const PathCost&) const = default;
  PathCost operator+(const PathCost& o) const {
    return {devices + o.devices, bridges + o.bridges,
            picoseconds + o.picoseconds, hops + o.hops};
  }
};

constexpr PathCost kUnreached = {std::numeric_limits<int32_t>::max(), 0, 0, 0};

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

// `links` are sorted.
Reached Reach(const Cluster& cluster, DeviceId from,
              std::span<const LinkId> links) {
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
    const Duration latency =
        cluster.link_types[static_cast<size_t>(link.type)].latency;
    reached.edges.push_back(
        {reached.Find(link.from),
         reached.Find(link.to),
         {forwards ? 1 : 0, kind == VertexKind::kBridge ? 1 : 0,
          latency.picoseconds, 1},
         id});
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

}  // namespace

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

const Router::Pattern& Router::PatternOf(DeviceId from, int node) const {
  const int home = cluster_.devices[from.index()].node;
  const auto class_of = [&](int n) {
    return static_cast<uint64_t>(class_of_node_[static_cast<size_t>(n)]);
  };
  const auto local = static_cast<uint64_t>(
      from.value - first_device_[static_cast<size_t>(home)]);
  const uint64_t alike = (home == node ? uint64_t{1} << 63 : 0) | local << 48 |
                         class_of(home) << 24 | class_of(node);
  const uint64_t single =
      static_cast<uint64_t>(from.index()) << 32 | static_cast<uint64_t>(node);
  {
    std::shared_lock lock(mutex_);
    if (auto found = alike_.find(alike); found != alike_.end()) {
      if (found->second != nullptr) return *found->second;
      if (auto own = single_.find(single); own != single_.end()) {
        return *own->second;
      }
    }
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

// `inside` tells whether no third host forwards.
std::shared_ptr<const Router::Pattern> Router::Compute(DeviceId from, int node,
                                                       bool& inside) const {
  RoutesToNode routes;
  const int home = cluster_.devices[from.index()].node;
  const std::vector<LinkId>& of_home =
      links_of_node_[static_cast<size_t>(home)];
  const std::vector<LinkId>& of_node =
      links_of_node_[static_cast<size_t>(node)];
  std::vector<LinkId> links = of_home;
  if (node != home) {
    links.insert(links.end(), of_node.begin(), of_node.end());
    links.insert(links.end(), links_of_network_.begin(),
                 links_of_network_.end());
    // A link between the two nodes is in both lists.
    std::ranges::sort(links);
    const auto repeated = std::ranges::unique(links);
    links.erase(repeated.begin(), repeated.end());
  }
  inside = Search(from, node, links, routes);
  if (!inside) {
    std::vector<LinkId> all;
    for (size_t l = 0; l < cluster_.links.size(); ++l) {
      all.emplace_back(static_cast<int64_t>(l));
    }
    TESSERA_CHECK(Search(from, node, all, routes))
        << "device " << from << " does not reach node " << node;
  }

  auto pattern = std::make_shared<Pattern>();
  pattern->begin = std::move(routes.begin);
  for (const auto& [link, share] : routes.links) {
    Step step{Step::kAll, link.index(), share};
    for (const auto& [among, list] : {std::pair(Step::kSource, &of_home),
                                      std::pair(Step::kTarget, &of_node)}) {
      const auto at = std::ranges::lower_bound(*list, link);
      if (!inside || at == list->end() || *at != link) continue;
      step = {among, static_cast<size_t>(at - list->begin()), share};
      break;
    }
    pattern->steps.push_back(step);
  }
  return pattern;
}

bool Router::Search(DeviceId from, int node, std::span<const LinkId> links,
                    RoutesToNode& out) const {
  const Reached reached = Reach(cluster_, from, links);
  const std::vector<std::vector<const Edge*>> last = LastEdges(reached);
  const int home = cluster_.devices[from.index()].node;
  const auto local_index = static_cast<size_t>(
      from.value - first_device_[static_cast<size_t>(home)]);
  const auto owner = [&](size_t v) {
    return owner_[reached.vertices[v].index()];
  };

  // The vertices of `home` by which least paths to one of the network come from
  // there, as far as they were asked for.
  std::vector<std::optional<std::vector<size_t>>> ways(last.size());
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
  const int node = static_cast<int>(home);
  std::vector<VertexId> nics;  // that join the node to others
  for (LinkId id : links_of_node_[home]) {
    const Link& link = cluster_.links[id.index()];
    if (cluster_.vertices[link.from.index()].kind == VertexKind::kNic &&
        NodeOf(link.from) == node && NodeOf(link.to) != node) {
      nics.push_back(link.from);
    }
  }
  std::ranges::sort(nics);
  const auto repeated = std::ranges::unique(nics);
  nics.erase(repeated.begin(), repeated.end());

  const Reached reached = Reach(cluster_, device, links_of_node_[home]);
  auto nearest = std::make_shared<NearestNics>();
  PathCost least = kUnreached;
  for (size_t i = 0; i < nics.size(); ++i) {
    const PathCost& cost = reached.cost[reached.Find(nics[i])];
    if (cost == kUnreached || least < cost) continue;
    if (cost < least) nearest->numbers.clear();
    least = cost;
    nearest->numbers.push_back(static_cast<int>(i));
  }
  nearest->distance = {least.devices, least.bridges, least.picoseconds,
                       least.hops};
  std::unique_lock lock(mutex_);
  return *nics_.try_emplace(key, std::move(nearest)).first->second;
}

}  // namespace tessera
