#include "profiler/discover.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <map>
#include <string_view>

#include "planner/base/append.h"
#include "planner/topology/fabric.h"
#include "planner/topology/gpus.h"
#include "planner/topology/hardware.h"
#include "planner/topology/topologies.h"
#include "planner/topology/upkeep.h"

namespace tessera {
namespace {

// The row called `name`; where there is none, `share` of another row's
// bandwidth under that name.
LinkType RowOrScaled(std::string name, std::string_view row, double share,
                     std::string_view what) {
  const auto own = std::ranges::find(LinkTypes(), name, &LinkType::name);
  if (own != LinkTypes().end()) return *own;
  LinkType type = LinkTypeNamed(row);
  type.source = std::string(what) + " " + type.name + ": " + type.source;
  type.name = std::move(name);
  type.bandwidth = type.bandwidth * share;
  type.in_switch_bandwidth = type.in_switch_bandwidth * share;
  return type;
}

Result<const KnownGpu*> KnownGpuNamed(const std::string& name) {
  if (const KnownGpu* const gpu = FindGpu(name)) return gpu;
  std::string known;
  for (const KnownGpu& gpu : KnownGpus()) {
    AppendTo(known, ", ", gpu.name);
  }
  return Error{ErrorCode::kNotFound,
               "no figures of this GPU; known: " + known +
                   ". A cluster of others is written by hand "
                   "(proto/cluster.proto)",
               "'" + name + "'"};
}

// PCIe links of the presets have 16 lanes.
constexpr int kPresetLanes = 16;

LinkType PcieLink(const PciNode& node) {
  // Older and newer generations are scaled from the nearest preset: each
  // doubles the rate of the one before.
  const int generation = node.generation == 0 ? 3 : node.generation;
  const int lanes = node.lanes == 0 ? kPresetLanes : node.lanes;
  const int preset = std::clamp(generation, 3, 6);
  const auto name = [](int g, int n) {
    return "pcie" + std::to_string(g) + "-x" + std::to_string(n);
  };
  return RowOrScaled(
      name(generation, lanes), name(preset, kPresetLanes),
      std::exp2(generation - preset) * lanes / double{kPresetLanes},
      "scaled by generation and lanes from");
}

// `links` NVLinks side by side. Rows that count several links are of a GPU
// joined to a switch: a step of a collective crosses two such, and one that is
// direct, whose latency is that of both. Rows of one link are direct.
LinkType NvLink(const KnownGpu& gpu, int links, bool direct) {
  const bool row_is_direct = gpu.nvlinks == 1;
  if (links == gpu.nvlinks && direct == row_is_direct) {
    return LinkTypeNamed(gpu.nvlink);
  }
  LinkType type =
      RowOrScaled(std::string(gpu.nvlink) +
                      (direct == row_is_direct ? ""
                       : direct                ? "-direct"
                                               : "-switch") +
                      "-x" + std::to_string(links),
                  gpu.nvlink, static_cast<double>(links) / gpu.nvlinks,
                  std::to_string(links) + " of its links, as");
  if (direct) type.in_switch_bandwidth = {};
  if (direct && !row_is_direct) type.latency = type.latency * 2;
  if (!direct && row_is_direct) type.latency.picoseconds /= 2;
  return type;
}

bool IsEfa(const FoundNic& nic) {
  return nic.rdma &&
         (nic.name.starts_with("rdmap") || nic.name.starts_with("efa"));
}

// What a card does whose speed is not said.
constexpr double kAssumedGigabits = 10;

LinkType NicLink(const FoundNic& nic) {
  struct Preset {
    std::string_view row;
    double gigabits;
  };
  constexpr std::array kInfiniBand = {
      Preset{"ib-fdr", 56}, Preset{"ib-edr", 100}, Preset{"ib-hdr", 200},
      Preset{"ib-ndr", 400}, Preset{"ib-xdr", 800}};
  const double gigabits = nic.gigabits > 0 ? nic.gigabits : kAssumedGigabits;
  const auto speed = [&](std::string_view kind) {
    char number[32];
    std::snprintf(number, sizeof(number), "%g", gigabits);
    return std::string(kind) + "-" + number + "g";
  };
  if (nic.infiniband) {
    for (const Preset& preset : kInfiniBand) {
      if (preset.gigabits == gigabits) return LinkTypeNamed(preset.row);
    }
  }
  if (nic.rdma && !IsEfa(nic)) {
    return RowOrScaled(speed(nic.infiniband ? "ib" : "roce"), "ib-ndr",
                       gigabits / 400, "scaled by its rate from");
  }
  const Preset base =
      nic.rdma ? Preset{"efa-100g", 100} : Preset{"ethernet-10g", 10};
  return RowOrScaled(speed(nic.rdma ? "efa" : "ethernet"), base.row,
                     gigabits / base.gigabits, "scaled by its rate from");
}

// The cards that carry the traffic of training: the fastest of the best kind.
std::vector<const FoundNic*> TrainingNics(const Machine& machine) {
  std::vector<const FoundNic*> best;
  const auto rank = [](const FoundNic& nic) {
    return std::pair(nic.rdma, nic.gigabits);
  };
  for (const FoundNic& nic : machine.nics) {
    if (!best.empty() && rank(nic) > rank(*best.front())) best.clear();
    if (best.empty() || rank(nic) == rank(*best.front())) best.push_back(&nic);
  }
  return best;
}

// The PCIe tree above the devices of interest.
struct Branch {
  PciNode node;
  std::map<std::string, Branch> below;
  std::vector<VertexId> here;  // devices of this address
};

void Insert(Branch& root, const PciPlace& place, VertexId vertex) {
  Branch* at = &root;
  for (const PciNode& node : place.path) {
    at = &at->below[node.address];
    at->node = node;
  }
  at->here.push_back(vertex);
}

// The NVLink domain that all GPUs of a host are in; empty: none.
std::string DomainOf(const Machine& machine) {
  if (machine.gpus.empty()) return "";
  const std::string& domain = machine.gpus.front().nvlink_domain;
  const bool together =
      std::ranges::all_of(machine.gpus, [&](const FoundGpu& gpu) {
        return gpu.switch_links > 0 && gpu.nvlink_domain == domain;
      });
  return together ? domain : "";
}

// How many hosts, from the first on, are one node: those of its NVLink domain,
// with no more GPUs than the system has that they are usually in (a host that
// is described once for many has one domain).
size_t HostsOfNode(std::span<const Machine> machines) {
  const std::string domain = DomainOf(machines[0]);
  if (domain.empty()) return 1;
  const KnownGpu* const known = FindGpu(machines[0].gpus.front().name);
  if (known == nullptr) return 1;
  const auto system =
      std::ranges::find(Topologies(), known->topology, &Topology::name);
  const auto most = static_cast<size_t>(system->gpus_per_node);
  size_t gpus = 0;
  size_t hosts = 0;
  for (const Machine& machine : machines) {
    gpus += machine.gpus.size();
    if (hosts > 0 && (DomainOf(machine) != domain || gpus > most)) break;
    ++hosts;
  }
  return hosts;
}

// Builds one node of the cluster, host by host.
class NodeBuilder {
 public:
  // `host` is the index of Cluster::hosts.
  NodeBuilder(Cluster& cluster, int node, int host)
      : cluster_(cluster), node_(node), host_(host) {}

  Result<void> AddGpus(const Machine& machine) {
    std::vector<const KnownGpu*> known;
    std::vector<VertexId> vertices;
    for (size_t g = 0; g < machine.gpus.size(); ++g) {
      const FoundGpu& gpu = machine.gpus[g];
      TESSERA_TRY(known.emplace_back(), KnownGpuNamed(gpu.name));
      DeviceType type = DeviceTypeNamed(known.back()->device);
      type.memory = UsableMemory(gpu.memory);
      type.host = host_;
      const DeviceId id = AddDevice(cluster_, UseDeviceType(cluster_, type),
                                    node_, InNode(node_, "gpu", gpus_++));
      vertices.push_back(cluster_.devices[id.index()].vertex);
      Hang(gpu.place, vertices.back());
    }
    AddNvLinks(machine, known, vertices);
    return {};
  }

  // The vertices of the cards, in their order.
  std::vector<VertexId> AddNics(const std::vector<const FoundNic*>& nics) {
    std::vector<VertexId> vertices;
    for (const FoundNic* nic : nics) {
      vertices.push_back(
          AddVertex(cluster_, VertexKind::kNic, InNode(node_, "nic", nics_++)));
      Hang(nic->place, vertices.back());
    }
    return vertices;
  }

  // The bridges of the PCIe tree that join several devices of a host, and those
  // of its NUMA nodes. Behind it comes the next host.
  void AddBridges() {
    std::vector<VertexId> sockets;
    for (auto& [numa, roots] : roots_) {
      sockets.push_back(AddVertex(cluster_, VertexKind::kBridge,
                                  InNode(node_, "cpu", cpus_ + numa)));
      for (auto& [name, root] : roots) {
        for (const auto& [address, branch] : root.below) {
          Join(branch, sockets.back());
        }
        // Devices whose place is not known.
        for (const VertexId vertex : root.here) {
          Link(vertex, sockets.back(), PciNode{});
        }
      }
    }
    for (size_t i = 1; i < sockets.size(); ++i) {
      Connect(cluster_, sockets[0], sockets[i],
              UseLinkType(cluster_, "socket"));
    }
    cpus_ += roots_.rbegin()->first + 1;
    roots_.clear();
  }

 private:
  void Hang(const PciPlace& place, VertexId vertex) {
    Insert(roots_[std::max(0, place.numa_node)][place.root], place, vertex);
  }

  void Link(VertexId below, VertexId above, const PciNode& node) {
    Connect(cluster_, below, above, UseLinkType(cluster_, PcieLink(node)));
  }

  // Hangs what is below `branch` on `above`: a bridge of its own only where
  // several ways meet.
  void Join(const Branch& branch, VertexId above) {
    const size_t ways = branch.below.size() + branch.here.size();
    if (ways == 1 && branch.here.empty()) {
      Join(branch.below.begin()->second, above);
      return;
    }
    for (const VertexId vertex : branch.here) Link(vertex, above, branch.node);
    if (branch.below.empty()) return;
    const VertexId bridge = AddVertex(cluster_, VertexKind::kBridge,
                                      InNode(node_, "pcie", bridges_++));
    Link(bridge, above, branch.node);
    for (const auto& [address, below] : branch.below) Join(below, bridge);
  }

  void AddNvLinks(const Machine& machine,
                  const std::vector<const KnownGpu*>& known,
                  const std::vector<VertexId>& vertices) {
    for (size_t g = 0; g < vertices.size(); ++g) {
      const FoundGpu& gpu = machine.gpus[g];
      if (known[g]->nvlinks == 0) continue;
      if (gpu.switch_links > 0) {
        if (!nvswitch_) {
          nvswitch_ = AddVertex(cluster_, VertexKind::kSwitch,
                                InNode(node_, "nvswitch"));
        }
        Connect(
            cluster_, vertices[g], *nvswitch_,
            UseLinkType(cluster_, NvLink(*known[g], gpu.switch_links, false)));
      }
      for (size_t peer = g + 1; peer < gpu.peer_links.size(); ++peer) {
        if (gpu.peer_links[peer] == 0) continue;
        Connect(cluster_, vertices[g], vertices[peer],
                UseLinkType(cluster_,
                            NvLink(*known[g], gpu.peer_links[peer], true)));
      }
    }
  }

  Cluster& cluster_;
  const int node_;
  const int host_;
  std::optional<VertexId> nvswitch_;
  // Of the host that is added, by NUMA node and the root's name.
  std::map<int, std::map<std::string, Branch>> roots_;
  // Of all hosts so far.
  int gpus_ = 0;
  int nics_ = 0;
  int cpus_ = 0;
  int bridges_ = 0;
};

// What each GPU of a node gets of its way to the host's memory while all copy.
BytesPerSecond HostLink(const Machine& machine) {
  // By address of a device or bridge: how many GPUs copy through its link.
  std::map<std::string, int> users;
  for (const FoundGpu& gpu : machine.gpus) {
    for (const PciNode& node : gpu.place.path) ++users[node.address];
  }
  BytesPerSecond least = {INFINITY};
  for (const FoundGpu& gpu : machine.gpus) {
    if (gpu.place.path.empty()) {
      least = std::min(least, PcieLink(PciNode{}).bandwidth);
    }
    for (const PciNode& node : gpu.place.path) {
      // A bridge that does not say its width is not what limits.
      if (node.lanes == 0 && node.address != gpu.place.path.back().address) {
        continue;
      }
      least = std::min(least, PcieLink(node).bandwidth / users[node.address]);
    }
  }
  return least;
}

// What `machine` has, and others like it, `hosts` together.
Host HostOfMachine(const Machine& machine, const HostSpeed& speed,
                   size_t hosts = 1) {
  const auto times = static_cast<double>(hosts);
  Host host;
  host.source = machine.host + ": memory of " + machine.cpu +
                ", measured by copies of all cores";
  if (hosts > 1) host.source = std::to_string(hosts) + " like " + host.source;
  host.memory = {machine.memory.value * static_cast<int64_t>(hosts)};
  // A copied byte is read and written.
  host.memory_bandwidth = speed.all_cores * (2 * times);
  if (speed.storage) {
    host.source += std::string("; storage measured by ") +
                   (speed.storage->direct ? "direct" : "buffered") +
                   " reads and writes";
    const size_t storages = speed.storage->shared ? 1 : hosts;
    const auto as_fast = static_cast<double>(storages);
    host.storage = {speed.storage->free.value * static_cast<int64_t>(storages)};
    host.storage_read = speed.storage->read * as_fast;
    host.storage_write = speed.storage->write * as_fast;
  }
  return host;
}

}  // namespace

Result<Cluster> ClusterOfMachines(std::span<const Machine> machines,
                                  const HostSpeed& speed) {
  Cluster cluster;
  std::vector<std::vector<VertexId>> nics;
  std::map<std::string, int> counts;  // of GPUs, by name
  const std::vector<const FoundNic*> first = TrainingNics(machines[0]);
  std::vector<size_t> sizes;  // of nodes in hosts, by index of Cluster::hosts
  std::optional<NodeBuilder> node;
  size_t next_node = 0;  // the host with which it begins
  for (size_t n = 0; n < machines.size(); ++n) {
    const Machine& machine = machines[n];
    if (machine.gpus.empty()) {
      return InvalidInput("no GPU is visible to NVIDIA's driver", machine.host);
    }
    for (const FoundGpu& gpu : machine.gpus) ++counts[gpu.name];
    const std::vector<const FoundNic*> cards = TrainingNics(machine);
    if (machines.size() > 1 && cards.empty()) {
      return InvalidInput("no network card has a link", machine.host);
    }
    if (cards.size() != first.size()) {
      return InvalidInput(
          std::to_string(cards.size()) + " network cards, but " +
              std::to_string(first.size()) + " on " + machines[0].host,
          machine.host);
    }
    if (n == next_node) {
      const size_t hosts = HostsOfNode(machines.subspan(n));
      next_node += hosts;
      const auto alike = std::ranges::find(sizes, hosts);
      const auto host = static_cast<int>(alike - sizes.begin());
      if (alike == sizes.end()) sizes.push_back(hosts);
      node.emplace(cluster, cluster.num_nodes(), host);
    }
    TESSERA_RETURN_IF_ERROR(node->AddGpus(machine));
    nics.push_back(node->AddNics(cards));
    node->AddBridges();
  }
  if (machines.size() > 1) {
    ConnectRails(cluster, nics, UseLinkType(cluster, NicLink(*first.front())));
  }
  for (const size_t hosts : sizes) {
    cluster.hosts.push_back(HostOfMachine(machines[0], speed, hosts));
    cluster.hosts.back().device_link = HostLink(machines[0]);
  }
  SetUpkeep("", cluster);  // no price: that depends on whose machine it is
  for (const auto& [name, count] : counts) {
    if (!cluster.name.empty()) cluster.name += ", ";
    cluster.name += std::to_string(count) + " x " + name;
  }
  cluster.name += " on " + std::to_string(machines.size()) +
                  (machines.size() == 1 ? " host" : " hosts");
  return cluster;
}

Cluster ClusterOfCores(const Machine& machine, int ranks,
                       const HostSpeed& speed) {
  Cluster cluster = MakeCluster("local-cpu:" + std::to_string(ranks)).value();
  for (DeviceType& type : cluster.device_types) {
    type.memory = {machine.memory.value / ranks};
    type.source =
        "memory: of " + machine.host + ", shared by all ranks; " + type.source;
  }
  for (LinkType& type : cluster.link_types) {
    const bool alone = type.name == "shm-copy";
    type.bandwidth = alone ? speed.one_core : speed.all_cores;
    type.source = std::string("measured: copies of ") +
                  (alone ? "one core" : "all cores") + " of " + machine.host +
                  "; latency " + type.source;
  }
  cluster.hosts = {HostOfMachine(machine, speed)};
  cluster.hosts[0].device_link = speed.one_core;
  return cluster;
}

std::vector<std::string> SplitDomains(std::span<const Machine> machines) {
  std::map<std::string, size_t> nodes;  // by domain
  for (size_t n = 0; n < machines.size();
       n += HostsOfNode(machines.subspan(n))) {
    ++nodes[DomainOf(machines[n])];
  }
  nodes.erase("");
  std::vector<std::string> all;
  for (const auto& [domain, count] : nodes) {
    if (count == 1) continue;
    all.push_back(
        "NVLink joins hosts that are " + std::to_string(count) +
        " nodes here, with a network between: they do not stand one "
        "behind the other, or have more GPUs than one system (domain " +
        domain + ")");
  }
  return all;
}

std::vector<std::string> Assumptions(const Machine& machine, size_t hosts) {
  std::vector<std::string> all = machine.warnings;
  for (size_t g = 0; g < machine.gpus.size(); ++g) {
    const auto& path = machine.gpus[g].place.path;
    if (path.empty() || path.back().lanes == 0 || path.back().generation == 0) {
      all.push_back("GPU " + std::to_string(g) +
                    " does not say its PCIe link: generation 3 with 16 lanes "
                    "is assumed");
    }
  }
  for (const FoundNic* nic : TrainingNics(machine)) {
    if (hosts > 1 && nic->gigabits == 0) {
      all.push_back(nic->name + " does not say its speed: 10 Gb/s is assumed");
    }
  }
  return all;
}

}  // namespace tessera
