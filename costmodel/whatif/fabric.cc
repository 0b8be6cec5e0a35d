#include "costmodel/whatif/fabric.h"

#include <algorithm>
#include <array>
#include <map>

#include "planner/ir/cluster_lookup.h"

namespace tessera {
namespace {

constexpr int kNone = -2;
constexpr int kNetwork = -1;

// Of every switch the node whose devices it joins, or kNetwork; kNone for what
// is no switch.
std::vector<int> NodesOfSwitches(const Cluster& cluster,
                                 const std::vector<int>& node_of_device) {
  std::vector<int> node(cluster.vertices.size(), kNone);
  for (const Link& link : cluster.links) {
    const size_t to = link.to.index();
    const int from_node = node_of_device[link.from.index()];
    if (cluster.vertices[to].kind != VertexKind::kSwitch) continue;
    if (from_node < 0) continue;
    node[to] =
        node[to] == kNone || node[to] == from_node ? from_node : kNetwork;
  }
  for (size_t v = 0; v < node.size(); ++v) {
    if (cluster.vertices[v].kind == VertexKind::kSwitch && node[v] == kNone) {
      node[v] = kNetwork;
    }
  }
  return node;
}

bool IsIn(std::span<const LinkClass> classes, LinkClass link_class) {
  return std::ranges::find(classes, link_class) != classes.end();
}

// "inter" of "fabric.inter".
std::string_view ShortName(LinkClass link_class) {
  const auto row =
      std::ranges::find(LinkClasses(), link_class, &LinkClassRow::link_class);
  return row->name.substr(row->name.find('.') + 1);
}

}  // namespace

std::span<const LinkClassRow> LinkClasses() {
  static constexpr std::array kTable = {
      LinkClassRow{"fabric.intra", LinkClass::kIntra,
                   "links between the devices of a node (NVLink, or PCIe where "
                   "there is none)"},
      LinkClassRow{"fabric.pcie", LinkClass::kPcie,
                   "links of a node to bridges, hosts and NICs"},
      LinkClassRow{"fabric.inter", LinkClass::kInter,
                   "links between nodes; trunks change with them"},
  };
  return kTable;
}

std::vector<LinkClass> ClassesOfLinks(const Cluster& cluster) {
  std::vector<int> device(cluster.vertices.size(), kNone);
  for (const Device& d : cluster.devices) device[d.vertex.index()] = d.node;
  const std::vector<int> switches = NodesOfSwitches(cluster, device);
  std::vector<LinkClass> classes;
  bool direct = false;
  for (const Link& link : cluster.links) {
    const size_t from = link.from.index();
    const size_t to = link.to.index();
    const auto is_nic = [&](size_t v) {
      return cluster.vertices[v].kind == VertexKind::kNic;
    };
    const bool across =
        device[from] >= 0 && device[to] >= 0 && device[from] != device[to];
    const bool network = switches[from] == kNetwork ||
                         switches[to] == kNetwork ||
                         (is_nic(from) && is_nic(to));
    const auto fast = [&](size_t v) {
      return device[v] >= 0 || switches[v] >= 0;
    };
    if (across || network) {
      classes.push_back(LinkClass::kInter);
    } else if (fast(from) && fast(to)) {
      classes.push_back(LinkClass::kIntra);
      direct = true;
    } else {
      classes.push_back(LinkClass::kPcie);
    }
  }
  if (!direct) {
    std::ranges::replace(classes, LinkClass::kPcie, LinkClass::kIntra);
  }
  return classes;
}

std::optional<LinkType> ReferenceLink(const Cluster& cluster,
                                      LinkClass link_class) {
  const std::vector<LinkClass> classes = ClassesOfLinks(cluster);
  const LinkType* reference = nullptr;
  bool at_nic = false;
  for (size_t l = 0; l < classes.size(); ++l) {
    if (classes[l] != link_class) continue;
    const Link& link = cluster.links[l];
    const LinkType& type = TypeOf(cluster, link);
    const bool nic =
        link_class == LinkClass::kInter &&
        (cluster.vertices[link.from.index()].kind == VertexKind::kNic ||
         cluster.vertices[link.to.index()].kind == VertexKind::kNic);
    if (reference != nullptr && at_nic && !nic) continue;
    const bool first_nic = nic && !at_nic;
    if (reference == nullptr || first_nic ||
        type.bandwidth > reference->bandwidth) {
      reference = &type;
    }
    at_nic |= nic;
  }
  if (reference == nullptr) return {};
  return *reference;
}

bool ScaleLinks(LinkClass link_class, double bandwidth, double latency,
                Cluster& cluster) {
  const std::vector<LinkClass> classes = ClassesOfLinks(cluster);
  if (!IsIn(classes, link_class)) return false;
  std::vector<bool> of_others(cluster.link_types.size(), false);
  for (size_t l = 0; l < classes.size(); ++l) {
    const auto type = static_cast<size_t>(cluster.links[l].type);
    if (classes[l] != link_class) of_others[type] = true;
  }
  std::map<int, int> scaled;  // old type -> the one with other figures
  for (size_t l = 0; l < classes.size(); ++l) {
    if (classes[l] != link_class) continue;
    Link& link = cluster.links[l];
    auto found = scaled.find(link.type);
    if (found == scaled.end()) {
      const auto old = static_cast<size_t>(link.type);
      LinkType type = cluster.link_types[old];
      type.bandwidth = type.bandwidth * bandwidth;
      type.in_switch_bandwidth = type.in_switch_bandwidth * bandwidth;
      type.latency = Duration::FromSeconds(type.latency.seconds() * latency);
      type.start = Duration::FromSeconds(type.start.seconds() * latency);
      int number = link.type;
      if (of_others[old]) {
        type.name += "-" + std::string(ShortName(link_class));
        number = static_cast<int>(cluster.link_types.size());
        cluster.link_types.push_back(type);
      } else {
        cluster.link_types[old] = type;
      }
      found = scaled.emplace(link.type, number).first;
    }
    link.type = found->second;
  }
  return true;
}

}  // namespace tessera
