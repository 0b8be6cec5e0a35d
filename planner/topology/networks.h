#pragma once
// Networks between nodes: one row each. A preset's own is "rails"; a cluster's
// name takes another after '@': "dgx-h100:64@fat-tree:2".

#include <span>
#include <string_view>
#include <vector>

#include "planner/base/result.h"
#include "planner/ir/cluster.h"

namespace tessera {

struct Network {
  std::string_view name;
  std::string_view summary;
  // What the number after the name means, and where it is absent.
  std::string_view parameter;
  int default_parameter;
  int most;
  // Joins `nics[node][rail]` of at least two nodes, which have equally many, by
  // links of type `nic_link` of the cluster. `parameter` is in [1, most].
  void (*connect)(Cluster& cluster,
                  const std::vector<std::vector<VertexId>>& nics, int nic_link,
                  int parameter);
};

std::span<const Network> Networks();

// Where a preset's nodes end and its network begins.
struct NetworkSide {
  std::vector<std::vector<VertexId>> nics;  // by node
  size_t first = 0;                         // vertex of the network
};
// REQUIRES: the preset's own network is what was added to `cluster` last.
NetworkSide NetworkSideOf(const Cluster& cluster);

// `cluster` with another network: NAME or NAME:NUMBER. REQUIRES: the preset's
// own network is what was added to `cluster` last.
Result<Cluster> WithNetwork(Cluster cluster, std::string_view network);

// rails.cc: NIC r of every node on leaf r, the leaves on one spine, through
// which other rails are reached; its links carry 1/N of a rail's NICs.
void ConnectRailNetwork(Cluster& cluster,
                        const std::vector<std::vector<VertexId>>& nics,
                        int nic_link, int oversubscription);
// fat_tree.cc: all NICs of a few nodes on one leaf, the leaves on one spine;
// its links carry 1/N of a leaf's NICs.
void ConnectFatTree(Cluster& cluster,
                    const std::vector<std::vector<VertexId>>& nics,
                    int nic_link, int oversubscription);
// dragonfly.cc: the same leaves, each joined to each other; a leaf's links
// together carry 1/N of its NICs (Kim et al. 2008), by the shortest route.
void ConnectDragonfly(Cluster& cluster,
                      const std::vector<std::vector<VertexId>>& nics,
                      int nic_link, int oversubscription);
// torus.cc: a router for each node, joined to the next ones in N dimensions by
// links that carry all its NICs.
void ConnectTorus(Cluster& cluster,
                  const std::vector<std::vector<VertexId>>& nics, int nic_link,
                  int dimensions);

}  // namespace tessera
