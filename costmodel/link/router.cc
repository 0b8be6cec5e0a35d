#include "costmodel/link/router.h"

#include <algorithm>
#include <boost/graph/compressed_sparse_row_graph.hpp>
#include <boost/graph/dijkstra_shortest_paths.hpp>
#include <compare>
#include <limits>
#include <map>
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

std::vector<LinkId> Router::Route(DeviceId from, DeviceId to) const {
  std::vector<LinkId> links;
  Route(from, to, links);
  return links;
}

void Router::Route(DeviceId from, DeviceId to,
                   std::vector<LinkId>& links) const {
  const auto home = static_cast<size_t>(cluster_.devices[from.index()].node);
  const auto node = static_cast<size_t>(cluster_.devices[to.index()].node);
  const Pattern& pattern = PatternOf(from, static_cast<int>(node));
  const auto i = static_cast<size_t>(to.value - first_device_[node]);
  links.clear();
  for (size_t s = pattern.begin[i]; s < pattern.begin[i + 1]; ++s) {
    const Step& step = pattern.steps[s];
    switch (step.among) {
      case Step::kSource:
        links.push_back(links_of_node_[home][step.number]);
        break;
      case Step::kTarget:
        links.push_back(links_of_node_[node][step.number]);
        break;
      case Step::kAll:
        links.emplace_back(static_cast<int64_t>(step.number));
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

Duration Router::Latency(std::span<const LinkId> route) const {
  Duration total;
  for (LinkId id : route) {
    const int type = cluster_.links[id.index()].type;
    total += cluster_.link_types[static_cast<size_t>(type)].latency;
  }
  return total;
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
  for (LinkId link : routes.links) {
    Step step{Step::kAll, link.index()};
    for (const auto& [among, list] : {std::pair(Step::kSource, &of_home),
                                      std::pair(Step::kTarget, &of_node)}) {
      const auto at = std::ranges::lower_bound(*list, link);
      if (!inside || at == list->end() || *at != link) continue;
      step = {among, static_cast<size_t>(at - list->begin())};
      break;
    }
    pattern->steps.push_back(step);
  }
  return pattern;
}

bool Router::Search(DeviceId from, int node, std::span<const LinkId> links,
                    RoutesToNode& out) const {
  // The vertices of `links`, numbered in the order of their ids.
  const VertexId start = cluster_.devices[from.index()].vertex;
  std::vector<VertexId> vertices = {start};
  vertices.reserve(1 + 2 * links.size());
  for (LinkId id : links) {
    vertices.push_back(cluster_.links[id.index()].from);
    vertices.push_back(cluster_.links[id.index()].to);
  }
  std::ranges::sort(vertices);
  const auto repeated = std::ranges::unique(vertices);
  vertices.erase(repeated.begin(), repeated.end());
  const auto local = [&](VertexId vertex) {
    return static_cast<size_t>(std::ranges::lower_bound(vertices, vertex) -
                               vertices.begin());
  };
  const size_t source = local(start);

  struct Edge {
    size_t from;
    size_t to;
    PathCost cost;
    LinkId link;
  };
  std::vector<Edge> edges;  // by id, as `links` are
  edges.reserve(links.size());
  for (LinkId id : links) {
    const Link& link = cluster_.links[id.index()];
    const VertexKind kind = cluster_.vertices[link.from.index()].kind;
    const bool forwards = kind == VertexKind::kDevice && link.from != start;
    const Duration latency =
        cluster_.link_types[static_cast<size_t>(link.type)].latency;
    edges.push_back({local(link.from),
                     local(link.to),
                     {forwards ? 1 : 0, kind == VertexKind::kBridge ? 1 : 0,
                      latency.picoseconds, 1},
                     id});
  }
  std::vector<std::pair<size_t, size_t>> ends;
  std::vector<EdgeCost> costs;
  ends.reserve(edges.size());
  costs.reserve(edges.size());
  for (const Edge& edge : edges) {
    ends.emplace_back(edge.from, edge.to);
    costs.push_back({edge.cost});
  }
  const Graph graph(boost::edges_are_unsorted_multi_pass, ends.begin(),
                    ends.end(), costs.begin(), vertices.size());
  std::vector<PathCost> cost(vertices.size(), kUnreached);
  boost::dijkstra_shortest_paths(
      graph, source,
      boost::weight_map(boost::get(&EdgeCost::cost, graph))
          .distance_map(boost::make_iterator_property_map(
              cost.begin(), boost::get(boost::vertex_index, graph)))
          .distance_inf(kUnreached)
          .distance_zero(PathCost{})
          .distance_compare(std::less<PathCost>())
          .distance_combine(std::plus<PathCost>()));

  // The edges that enter each vertex, by id.
  std::vector<size_t> begin(vertices.size() + 1, 0);
  for (const Edge& edge : edges) ++begin[edge.to + 1];
  for (size_t v = 0; v < vertices.size(); ++v) begin[v + 1] += begin[v];
  std::vector<const Edge*> entering(edges.size());
  std::vector<size_t> filled(begin.begin(), begin.end() - 1);
  for (const Edge& edge : edges) entering[filled[edge.to]++] = &edge;

  const int home = cluster_.devices[from.index()].node;
  const auto local_index = static_cast<size_t>(
      from.value - first_device_[static_cast<size_t>(home)]);
  out.begin = {0};
  out.links.clear();
  std::vector<const Edge*> last;  // the edges that end a least path to a vertex
  const auto n = static_cast<size_t>(node);
  for (int d = first_device_[n]; d < first_device_[n + 1]; ++d) {
    const VertexId vertex = cluster_.devices[static_cast<size_t>(d)].vertex;
    const size_t first = out.links.size();
    const size_t target = local(vertex);
    if (target == vertices.size() || vertices[target] != vertex) return false;
    for (size_t v = target; v != source;) {
      last.clear();
      for (size_t e = begin[v]; e < begin[v + 1]; ++e) {
        const Edge& edge = *entering[e];
        if (cost[edge.from] == kUnreached) continue;
        if (cost[edge.from] + edge.cost == cost[v]) last.push_back(&edge);
      }
      if (last.empty()) return false;
      const Edge& edge = *last[local_index % last.size()];
      out.links.push_back(edge.link);
      v = edge.from;
    }
    std::reverse(out.links.begin() + static_cast<int64_t>(first),
                 out.links.end());
    out.begin.push_back(out.links.size());
  }
  return true;
}

}  // namespace tessera
