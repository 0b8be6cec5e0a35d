#pragma once
// The network between nodes, shared by all presets.

#include <string_view>
#include <vector>

#include "planner/ir/cluster.h"

namespace tessera {

// Joins the nodes by a non-blocking two-level network: NIC r of every node to
// leaf switch r (a rail), all leaves to one spine whose links carry all NICs of
// a rail at once. `nics[node][rail]`; nothing to do for one node.
void ConnectRails(Cluster& cluster,
                  const std::vector<std::vector<VertexId>>& nics,
                  std::string_view nic_link);
// The same with links of type `nic_link` of the cluster.
void ConnectRails(Cluster& cluster,
                  const std::vector<std::vector<VertexId>>& nics, int nic_link);

// Link type `nic_link` of the cluster `times` over, through a switch: its
// index.
int AddTrunk(Cluster& cluster, int nic_link, double times);

// Leaf switches of 32 NICs, or of one node where it has more, each with all
// NICs of consecutive nodes.
std::vector<VertexId> AddLeaves(Cluster& cluster,
                                const std::vector<std::vector<VertexId>>& nics,
                                int nic_link);
double NicsPerLeaf(const std::vector<std::vector<VertexId>>& nics);

// "node3." + part.
std::string InNode(int node, std::string_view part);
// "node3." + part + "5".
std::string InNode(int node, std::string_view part, int index);

}  // namespace tessera
