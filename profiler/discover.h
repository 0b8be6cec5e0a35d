#pragma once
// From what hosts say of themselves (machine.h) to a cluster: devices, NVLink,
// the PCIe tree, network cards, and the network that joins hosts.
//
// Figures are those of the presets (planner/topology/hardware.h) for the GPU,
// the link and its width that were found; what was measured replaces them.

#include <optional>
#include <span>

#include "planner/base/result.h"
#include "planner/ir/cluster.h"
#include "profiler/host_speed.h"
#include "profiler/machine.h"

namespace tessera {

// What was measured on the hosts, the same for each of them.
struct HostSpeed {
  BytesPerSecond one_core;              // copies of one thread
  BytesPerSecond all_cores;             // copies of all
  std::optional<StorageSpeed> storage;  // where files may be kept
};

// The GPUs of `machines`, a node for each; ranks in the order of the nodes and,
// in a node, of its GPUs. Hosts that stand one behind the other and whose GPUs
// are all of one NVLink domain (GB200 NVL72) are one node, as in the presets,
// with what its hosts have together (storage on a network is one); no more of
// them than have the GPUs of the system that such GPUs are in
// (Topology::gpus_per_node).
//
// Within a node: NVLinks to NVSwitches, which are one switch here, and between
// GPUs; GPUs and network cards at their PCIe switches, these at the bridge of
// their NUMA node, all bridges of a host joined. Between hosts: the fastest
// cards of the best kind (RDMA before Ethernet), card r of every host on leaf
// switch r, without oversubscription: what the hosts cannot see. Latencies are
// the presets'.
//
// Errors: kNotFound for a GPU that the tables do not know, naming those they
// do; kInvalidInput for hosts without GPUs, and for several hosts whose cards
// differ in number or that have none.
Result<Cluster> ClusterOfMachines(std::span<const Machine> machines,
                                  const HostSpeed& speed);

// A sentence for each NVLink domain of whose hosts ClusterOfMachines makes
// several nodes.
std::vector<std::string> SplitDomains(std::span<const Machine> machines);

// `ranks` ranks on the cores of one host, as the preset local-cpu but with its
// memory and what was measured.
Cluster ClusterOfCores(const Machine& machine, int ranks,
                       const HostSpeed& speed);

// The machine's warnings, and what the cluster leaves to assumption though a
// machine would be expected to say it, a sentence each: PCIe without a width
// and, where there are several hosts, a card without a speed.
std::vector<std::string> Assumptions(const Machine& machine, size_t hosts);

}  // namespace tessera
