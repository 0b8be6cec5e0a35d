#include "costmodel/whatif/degrade.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include "planner/base/append.h"
#include "planner/base/table.h"
#include "planner/base/whole_number.h"

namespace tessera {
namespace {

// N of "nodeN", where `prefix` is "node".
std::optional<int> NumberBehind(std::string_view prefix,
                                std::string_view text) {
  if (!text.starts_with(prefix)) return {};
  text.remove_prefix(prefix.size());
  return ParseWhole<int>(text);
}

std::optional<size_t> VertexNamed(const Cluster& cluster,
                                  std::string_view name) {
  for (size_t v = 0; v < cluster.vertices.size(); ++v) {
    if (cluster.vertices[v].name == name) return v;
  }
  return {};
}

// "node0 to node3".
std::string Counted(const std::string& what, std::ptrdiff_t count) {
  if (count == 1) return what + "0";
  return what + "0 to " + what + std::to_string(count - 1);
}

Error NoSuchPart(const Cluster& cluster, std::string_view name) {
  std::vector<std::string_view> known;
  for (const Vertex& vertex : cluster.vertices) known.push_back(vertex.name);
  const std::string nearest = NearestName(name, known);
  std::string message = "the cluster has no part '" + std::string(name) + "'";
  message += nearest.empty() ? ";" : "; did you mean '" + nearest + "'?";
  constexpr size_t kNamed = 6;
  std::string names;
  for (size_t v = 0; v < std::min(kNamed, known.size()); ++v) {
    names += (v == 0 ? "" : ", ") + std::string(known[v]);
  }
  if (known.size() > kNamed) names += ", …";
  message += " parts: " + Counted("node", cluster.num_nodes()) + "; " +
             Counted("device", std::ssize(cluster.devices)) +
             "; vertices by name: " + names;
  return {ErrorCode::kNotFound, message, ""};
}

// By vertex those that it has links from or to.
std::vector<std::vector<size_t>> NeighboursOf(const Cluster& cluster) {
  std::vector<std::vector<size_t>> neighbours(cluster.vertices.size());
  for (const Link& link : cluster.links) {
    neighbours[link.from.index()].push_back(link.to.index());
    neighbours[link.to.index()].push_back(link.from.index());
  }
  return neighbours;
}

// `cluster` without these vertices and what is left of it that is joined to no
// device.
Cluster Without(const Cluster& cluster, std::vector<bool> dropped) {
  const auto neighbours = NeighboursOf(cluster);
  std::vector<bool> joined(cluster.vertices.size(), false);
  std::vector<size_t> open;
  for (const Device& device : cluster.devices) {
    const size_t v = device.vertex.index();
    if (dropped[v]) continue;
    joined[v] = true;
    open.push_back(v);
  }
  while (!open.empty()) {
    const size_t v = open.back();
    open.pop_back();
    for (const size_t next : neighbours[v]) {
      if (joined[next] || dropped[next]) continue;
      joined[next] = true;
      open.push_back(next);
    }
  }
  Cluster rest = cluster;
  rest.vertices.clear();
  rest.devices.clear();
  rest.links.clear();
  std::vector<VertexId> renamed(cluster.vertices.size());
  for (size_t v = 0; v < joined.size(); ++v) {
    if (!joined[v]) continue;
    renamed[v] = VertexId(static_cast<int64_t>(rest.vertices.size()));
    rest.vertices.push_back(cluster.vertices[v]);
  }
  int node = -1;
  int last = -1;
  for (const Device& device : cluster.devices) {
    if (!joined[device.vertex.index()]) continue;
    if (device.node != last) ++node;
    last = device.node;
    rest.devices.push_back({device.type, renamed[device.vertex.index()], node});
  }
  for (const Link& link : cluster.links) {
    if (!joined[link.from.index()] || !joined[link.to.index()]) continue;
    rest.links.push_back(
        {renamed[link.from.index()], renamed[link.to.index()], link.type});
  }
  return rest;
}

// Adds to `dropped` the devices of these nodes and whatever only they need:
// what is nearer to their devices than to those of other nodes, up to the NICs
// (their switches, bridges and NICs). A switch where the ways of nodes meet is
// of the network, and stays.
void DropNodes(const Cluster& cluster, const std::set<int>& nodes,
               std::vector<bool>& dropped) {
  constexpr int kUnknown = -3;
  constexpr int kDropped = -2;
  constexpr int kShared = -1;
  const auto neighbours = NeighboursOf(cluster);
  std::vector<int> side(cluster.vertices.size(), kUnknown);  // or a node
  std::vector<size_t> edge;  // as far from the devices as one another
  for (const Device& device : cluster.devices) {
    const size_t v = device.vertex.index();
    side[v] = nodes.contains(device.node) ? kDropped : device.node;
    edge.push_back(v);
  }
  while (!edge.empty()) {
    std::map<size_t, int> farther;
    for (const size_t v : edge) {
      if (cluster.vertices[v].kind == VertexKind::kNic) continue;
      for (const size_t next : neighbours[v]) {
        if (side[next] != kUnknown) continue;
        const auto [at, is_new] = farther.emplace(next, side[v]);
        if (!is_new && at->second != side[v]) at->second = kShared;
      }
    }
    edge.clear();
    for (const auto& [v, of] : farther) {
      side[v] = of;
      edge.push_back(v);
    }
  }
  // Nearest to a dropped node, but where others meet that are farther from it.
  const auto joins_others = [&](size_t v) {
    int other = kUnknown;
    for (const size_t next : neighbours[v]) {
      if (cluster.vertices[next].kind == VertexKind::kDevice) return false;
      if (side[next] < 0 || side[next] == other) continue;
      if (other != kUnknown) return true;
      other = side[next];
    }
    return false;
  };
  for (size_t v = 0; v < side.size(); ++v) {
    if (side[v] != kDropped) continue;
    const bool is_switch = cluster.vertices[v].kind == VertexKind::kSwitch;
    if (!is_switch || !joins_others(v)) dropped[v] = true;
  }
}

std::string Nodes(const Cluster& cluster) {
  return std::to_string(cluster.num_nodes()) +
         (cluster.num_nodes() == 1 ? " node" : " nodes") + " with " +
         std::to_string(cluster.devices.size()) +
         (cluster.devices.size() == 1 ? " device" : " devices");
}

// What failures take out of a cluster.
struct Losses {
  std::set<int> nodes;
  std::vector<bool> vertices;
  std::vector<bool> links;
};

// The links between two vertices, in both directions: "A--B" with its dashes.
Result<std::vector<size_t>> LinksNamed(const Cluster& cluster,
                                       std::string_view part, size_t dashes) {
  const std::string_view names[] = {part.substr(0, dashes),
                                    part.substr(dashes + 2)};
  size_t ends[2];
  for (int i = 0; i < 2; ++i) {
    const auto vertex = VertexNamed(cluster, names[i]);
    if (!vertex) return NoSuchPart(cluster, names[i]);
    ends[i] = *vertex;
  }
  std::vector<size_t> links;
  for (size_t l = 0; l < cluster.links.size(); ++l) {
    const size_t from = cluster.links[l].from.index();
    const size_t to = cluster.links[l].to.index();
    if ((from == ends[0] && to == ends[1]) ||
        (from == ends[1] && to == ends[0])) {
      links.push_back(l);
    }
  }
  if (links.empty()) {
    return InvalidInput("no link joins them", std::string(part));
  }
  return links;
}

// The devices that `part` names, none where it is no device or node.
std::vector<DeviceId> DevicesNamed(const Cluster& cluster,
                                   std::string_view part) {
  const std::optional<int> node = NumberBehind("node", part);
  const std::optional<int> rank = NumberBehind("device", part);
  std::vector<DeviceId> devices;
  for (size_t d = 0; d < cluster.devices.size(); ++d) {
    const Device& device = cluster.devices[d];
    if ((node && device.node == *node) ||
        (rank && static_cast<int>(d) == *rank) ||
        cluster.vertices[device.vertex.index()].name == part) {
      devices.emplace_back(static_cast<int64_t>(d));
    }
  }
  return devices;
}

}  // namespace

Result<void> Fail(const std::vector<std::string>& parts, Cluster& cluster,
                  std::vector<std::string>& notes, Cluster* whole) {
  if (whole != nullptr) *whole = cluster;
  if (parts.empty()) return {};
  Losses losses;
  losses.vertices.assign(cluster.vertices.size(), false);
  losses.links.assign(cluster.links.size(), false);
  std::vector<bool> drained(cluster.vertices.size(), false);
  std::set<std::string_view> known;
  bool fewer_devices = false;
  for (const std::string& part : parts) {
    if (!known.insert(part).second) return InvalidInput("is given twice", part);
    if (const size_t dashes = part.find("--"); dashes != std::string::npos) {
      TESSERA_TRY(const auto links, LinksNamed(cluster, part, dashes));
      for (size_t link : links) losses.links[link] = true;
      notes.push_back(part + " failed: its traffic goes other ways");
      continue;
    }
    const std::vector<DeviceId> devices = DevicesNamed(cluster, part);
    const auto vertex = VertexNamed(cluster, part);
    if (devices.empty() && !vertex) return NoSuchPart(cluster, part);
    if (devices.empty()) {
      losses.vertices[*vertex] = true;
      notes.push_back(part + " failed: its traffic goes other ways");
      continue;
    }
    fewer_devices = true;
    if (cluster.num_nodes() > 1) {
      const int node = cluster.devices[devices[0].index()].node;
      losses.nodes.insert(node);
      notes.push_back(part + " failed: node " + std::to_string(node) +
                      " is drained");
      continue;
    }
    for (const DeviceId device : devices) {
      const size_t at = cluster.devices[device.index()].vertex.index();
      losses.vertices[at] = true;
      drained[at] = true;
    }
    notes.push_back(part + " failed");
  }
  DropNodes(cluster, losses.nodes, losses.vertices);
  DropNodes(cluster, losses.nodes, drained);
  const bool all = std::ranges::all_of(cluster.devices, [&](const Device& d) {
    return losses.vertices[d.vertex.index()];
  });
  if (all) return InvalidInput("leaves no device of the cluster", parts.back());
  Cluster rest = cluster;
  rest.links.clear();
  for (size_t l = 0; l < cluster.links.size(); ++l) {
    if (!losses.links[l]) rest.links.push_back(cluster.links[l]);
  }
  rest = Without(rest, std::move(losses.vertices));
  // What was valid can have lost only its ways. Vertices keep their names;
  // devices without one are told by their ranks in what is left.
  if (const auto errors = Validate(rest); !errors.empty()) {
    return InvalidInput("without it the devices do not reach each other: " +
                            errors.front().message,
                        parts.back());
  }
  if (whole != nullptr) *whole = Without(cluster, std::move(drained));
  std::string names;
  for (const std::string& part : parts) AppendTo(names, ", ", part);
  rest.name += " without " + names;
  cluster = std::move(rest);
  if (fewer_devices) {
    notes.back() += "; " + Nodes(cluster) + " remain";
  }
  return {};
}

void ScalePeaks(double factor, DeviceType& type) {
  for (FlopsPerSecond* peak :
       {&type.peak_fp64, &type.peak_fp32, &type.peak_bf16, &type.peak_fp16,
        &type.peak_fp8, &type.peak_fp4}) {
    *peak = *peak * factor;
  }
}

namespace {

void SlowDownLinks(const std::vector<size_t>& links, double factor,
                   Cluster& cluster) {
  std::map<int, int> slower;  // by type
  for (const size_t l : links) {
    int& type = cluster.links[l].type;
    auto found = slower.find(type);
    if (found == slower.end()) {
      LinkType slow = cluster.link_types[static_cast<size_t>(type)];
      slow.name += "-slow" + std::to_string(cluster.link_types.size());
      slow.bandwidth = slow.bandwidth / factor;
      slow.in_switch_bandwidth = slow.in_switch_bandwidth / factor;
      slow.slowness *= factor;
      const int number = static_cast<int>(cluster.link_types.size());
      cluster.link_types.push_back(std::move(slow));
      found = slower.emplace(type, number).first;
    }
    type = found->second;
  }
}

}  // namespace

Result<void> SlowDown(std::string_view part, double factor, Cluster& cluster) {
  if (const size_t dashes = part.find("--"); dashes != part.npos) {
    TESSERA_TRY(const auto links, LinksNamed(cluster, part, dashes));
    SlowDownLinks(links, factor, cluster);
    return {};
  }
  const std::vector<DeviceId> devices = DevicesNamed(cluster, part);
  if (!devices.empty()) {
    SlowDown(devices, factor, cluster);
    return {};
  }
  const auto vertex = VertexNamed(cluster, part);
  if (!vertex) return NoSuchPart(cluster, part);
  std::vector<size_t> links;
  for (size_t l = 0; l < cluster.links.size(); ++l) {
    if (cluster.links[l].from.index() == *vertex ||
        cluster.links[l].to.index() == *vertex) {
      links.push_back(l);
    }
  }
  SlowDownLinks(links, factor, cluster);
  return {};
}

void SlowDown(const std::vector<DeviceId>& devices, double factor,
              Cluster& cluster) {
  std::map<int, int> slower;  // by type
  for (const DeviceId id : devices) {
    Device& device = cluster.devices[id.index()];
    auto found = slower.find(device.type);
    if (found == slower.end()) {
      DeviceType type = cluster.device_types[static_cast<size_t>(device.type)];
      type.slowness *= factor;
      const int number = static_cast<int>(cluster.device_types.size());
      cluster.device_types.push_back(std::move(type));
      found = slower.emplace(device.type, number).first;
    }
    device.type = found->second;
  }
}

namespace {

// A node of a cluster as copies of it are made: of `cluster` the vertices that
// only it has, the links that begin or end there, and its devices.
struct NodeParts {
  std::vector<size_t> vertices;
  std::vector<Link> links;
  std::vector<Device> devices;
};

Result<NodeParts> PartsOf(const Cluster& cluster, int node) {
  NodeParts parts;
  std::vector<bool> of_node(cluster.vertices.size(), false);
  DropNodes(cluster, {node}, of_node);
  for (size_t v = 0; v < of_node.size(); ++v) {
    if (of_node[v]) parts.vertices.push_back(v);
  }
  bool joined = false;
  for (const Link& link : cluster.links) {
    const bool from = of_node[link.from.index()];
    const bool both = from && of_node[link.to.index()];
    if (!from && !of_node[link.to.index()]) continue;
    const VertexId outside = from ? link.to : link.from;
    if (!both &&
        cluster.vertices[outside.index()].kind != VertexKind::kSwitch) {
      return InvalidInput("node " + std::to_string(node) + " is joined to '" +
                          cluster.vertices[outside.index()].name +
                          "', which is no switch that more nodes could be "
                          "on");
    }
    joined |= !both;
    parts.links.push_back(link);
  }
  if (!joined) {
    return InvalidInput("node " + std::to_string(node) +
                        " is joined to nothing outside of it, on which more "
                        "nodes could be: expected links of its NICs to a "
                        "switch");
  }
  for (const Device& device : cluster.devices) {
    if (device.node == node) parts.devices.push_back(device);
  }
  return parts;
}

void AddCopy(const Cluster& cluster, const NodeParts& parts, int node, int copy,
             Cluster& larger) {
  std::unordered_map<VertexId, VertexId> copies;
  const std::string prefix = "node" + std::to_string(node) + ".";
  for (const size_t v : parts.vertices) {
    const Vertex& vertex = cluster.vertices[v];
    const std::string name = vertex.name.starts_with(prefix)
                                 ? vertex.name.substr(prefix.size())
                                 : vertex.name;
    copies[VertexId(static_cast<int64_t>(v))] = AddVertex(
        larger, vertex.kind, "node" + std::to_string(copy) + "." + name);
  }
  const auto copied = [&](VertexId vertex) {
    const auto found = copies.find(vertex);
    return found == copies.end() ? vertex : found->second;
  };
  for (const Link& link : parts.links) {
    larger.links.push_back({copied(link.from), copied(link.to), link.type});
  }
  for (Device device : parts.devices) {
    device.node = copy;
    device.vertex = copied(device.vertex);
    larger.devices.push_back(device);
  }
}

}  // namespace

Result<Cluster> WithMoreNodes(const Cluster& cluster, int nodes) {
  Cluster larger = cluster;
  const int own = cluster.num_nodes();
  std::vector<NodeParts> parts;  // by node, of those that are copied
  for (int node = 0; node < std::min(own, nodes - own); ++node) {
    TESSERA_TRY(NodeParts of_node, PartsOf(cluster, node));
    parts.push_back(std::move(of_node));
  }
  for (int copy = own; copy < nodes; ++copy) {
    const int node = copy % own;
    AddCopy(cluster, parts[static_cast<size_t>(node)], node, copy, larger);
  }
  return larger;
}

Cluster OnlyDevices(const Cluster& cluster, const std::vector<bool>& kept) {
  std::set<int> used;
  for (size_t d = 0; d < kept.size(); ++d) {
    if (kept[d]) used.insert(cluster.devices[d].node);
  }
  std::set<int> idle;
  std::vector<bool> dropped(cluster.vertices.size(), false);
  for (size_t d = 0; d < kept.size(); ++d) {
    if (kept[d]) continue;
    const Device& device = cluster.devices[d];
    dropped[device.vertex.index()] = true;
    if (!used.contains(device.node)) idle.insert(device.node);
  }
  DropNodes(cluster, idle, dropped);
  return Without(cluster, std::move(dropped));
}

Cluster FirstDevices(const Cluster& cluster, size_t devices) {
  std::vector<bool> kept(cluster.devices.size(), false);
  std::fill_n(kept.begin(), devices, true);
  return OnlyDevices(cluster, kept);
}

}  // namespace tessera
