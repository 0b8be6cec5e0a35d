#pragma once
// The links of a cluster by what they join: what "fabric.inter.bandwidth"
// means on any topology.
//
//   intra  between devices, and between devices and the switch of their node
//          (NVLink); where a node has none such, all links within nodes
//   pcie   the others within nodes: to bridges, hosts and NICs
//   inter  between nodes: those to a network's switches, NIC to NIC, and
//          between devices of different nodes
//
// A switch is a network's unless all its neighbours among the devices are of
// one node. Functions without state.

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "planner/ir/cluster.h"

namespace tessera {

enum class LinkClass : uint8_t { kIntra, kPcie, kInter };
struct LinkClassRow {
  std::string_view name;  // "fabric.inter"
  LinkClass link_class;
  std::string_view summary;
};
std::span<const LinkClassRow> LinkClasses();

// The class of every link.
std::vector<LinkClass> ClassesOfLinks(const Cluster& cluster);

// The link that stands for its class: of "inter" the fastest that ends at a NIC
// (trunks between switches are multiples of it), else the fastest. Nothing
// where there are none.
std::optional<LinkType> ReferenceLink(const Cluster& cluster,
                                      LinkClass link_class);

// Multiplies bandwidth and latency of all links of the class. A type that links
// of other classes have too is parted: these have one named after the class,
// "pcie4-inter". False where there are none.
bool ScaleLinks(LinkClass link_class, double bandwidth, double latency,
                Cluster& cluster);

}  // namespace tessera
