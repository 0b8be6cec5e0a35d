#pragma once
// Cluster presets: one row per machine, each a function from a number of nodes
// to a Cluster. Figures and their sources: hardware.cc. Networks between nodes
// are non-blocking unless another is asked for: half of the nodes can send to
// the other half at the full rate of their NICs.

#include <optional>
#include <span>
#include <string_view>

#include "planner/base/result.h"
#include "planner/ir/cluster.h"

namespace tessera {

struct Topology {
  std::string_view name;
  std::string_view summary;
  int gpus_per_node;  // at most; 0 where NODES counts ranks of one host
  // The network side of one node, from which its share of the bisection
  // follows: so many NICs with links of this type (hardware.h). 0 and "" where
  // there is only one node.
  int nics_per_node;
  std::string_view nic_link;
  // REQUIRES: nodes >= 1, gpus_per_node (default: all) in
  // [1, Topology::gpus_per_node]. Leaves Cluster::name empty.
  Result<Cluster> (*make)(int nodes, std::optional<int> gpus_per_node);
};

std::span<const Topology> Topologies();

// Of a cluster; more would be a slip of the keyboard.
inline constexpr int kMostNodes = 65536;

// The cluster called NAME[:NODES[xGPUS]][@NETWORK[:NUMBER]]: "dgx-a100-80gb:4"
// is four nodes, "dgx-h200:1x1" one GPU of a node, "local-cpu:4" four ranks on
// this host. NODES is 1 where absent; GPUS limits the devices of every node;
// NETWORK (networks.h) takes the place of the preset's non-blocking rails.
// "dgx-h100:2+dgx-a100-80gb:4" has the nodes of both (mixture.h), in this
// order. kNotFound with the nearest name for an unknown NAME, kInvalidInput for
// bad numbers.
Result<Cluster> MakeCluster(std::string_view spec);

}  // namespace tessera
