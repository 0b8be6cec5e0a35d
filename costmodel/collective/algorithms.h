#pragma once
// The table of collective algorithms: one row and one file each.

#include <span>
#include <string_view>
#include <vector>

#include "costmodel/collective/rounds.h"
#include "planner/lower/comm_kind.h"

namespace tessera {

// A group as the algorithms see it. Ranks are positions in the group.
struct CollectiveGroup {
  int ranks = 0;
  // The ranks on each host, in rank order.
  std::vector<std::vector<int>> nodes;
  // For each host, the orders in which rings may visit its ranks, each using
  // links of its own (node_rings.h). At least one.
  std::vector<std::vector<std::vector<int>>> node_rings;
  // Whether ranks move their own bytes through memory that all of them see
  // (DeviceType::shared_memory, on one host).
  bool shared_memory = false;
};

struct CollectiveAlgorithm {
  std::string_view name;
  std::string_view summary;
  bool (*applies)(CommKind kind, const CollectiveGroup& group);
  // REQUIRES: applies(kind, group), at least two ranks.
  Rounds (*rounds)(CommKind kind, const CollectiveGroup& group);
};

std::span<const CollectiveAlgorithm> CollectiveAlgorithms();

// ring.cc: every rank sends to the next, n - 1 times for each of reduce-scatter
// and all-gather. Within one host a ring for each of its node rings; across
// hosts one for each rank of a host, entering and leaving it by different
// ranks, so that all NICs carry the same (as NCCL's channels do).
bool RingApplies(CommKind kind, const CollectiveGroup& group);
Rounds RingRounds(CommKind kind, const CollectiveGroup& group);

// hierarchical.cc: reduce-scatter within each host, then each local index on
// its own ring across the hosts, then all-gather within each host.
bool HierarchicalApplies(CommKind kind, const CollectiveGroup& group);
Rounds HierarchicalRounds(CommKind kind, const CollectiveGroup& group);

// direct.cc: every rank sends to every other at once. All-to-all is this (as
// NCCL's grouped sends are); the others where memory is shared.
bool DirectApplies(CommKind kind, const CollectiveGroup& group);
Rounds DirectRounds(CommKind kind, const CollectiveGroup& group);

// rooted.cc: scatter and gather send between the root (rank 0) and every other
// rank at once; broadcast and reduce pass pieces along a chain of all ranks
// that begins or ends at the root, as NCCL's do.
bool RootedApplies(CommKind kind, const CollectiveGroup& group);
Rounds RootedRounds(CommKind kind, const CollectiveGroup& group);

// point_to_point.cc: rank 0 sends to rank 1.
bool PointToPointApplies(CommKind kind, const CollectiveGroup& group);
Rounds PointToPointRounds(CommKind kind, const CollectiveGroup& group);

// neighbour.cc: rank i sends what it has to rank i - 1, the first to the last.
bool NeighbourApplies(CommKind kind, const CollectiveGroup& group);
Rounds NeighbourRounds(CommKind kind, const CollectiveGroup& group);

}  // namespace tessera
