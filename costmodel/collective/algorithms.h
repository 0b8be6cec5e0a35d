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
  // For each host whether direct links make these orders.
  std::vector<bool> meshed;
  // For each host and each ring or tree across hosts where in the first of its
  // orders it enters (doors.h); on one host every rank in turn.
  std::vector<std::vector<int>> doors;
  // Whether ranks move their own bytes through memory that all of them see
  // (DeviceType::shared_memory, on one host).
  bool shared_memory = false;
  // Whether this is one host whose ranks direct links join to a chain that does
  // not close (NodeOrders::open_chain).
  bool open_chain = false;
  // Whether the ranks of each host meet at a switch that can sum
  // (LinkType::in_switch_bandwidth).
  bool in_switch = false;
};

// How the sends follow each other, which decides the protocols they may use
// (protocols.h).
enum class SendPattern : uint8_t { kPipeline, kExchange, kInSwitch };

struct CollectiveAlgorithm {
  std::string_view name;
  std::string_view summary;
  SendPattern pattern;
  // Whether NCCL (or, where memory is shared, the runtime) would take it;
  // others are for who asks for them by name.
  bool automatic;
  bool (*applies)(CommKind kind, const CollectiveGroup& group);
  // REQUIRES: applies(kind, group), at least two ranks.
  Rounds (*rounds)(CommKind kind, const CollectiveGroup& group);
};

std::span<const CollectiveAlgorithm> CollectiveAlgorithms();

// ring.cc: every rank sends to the next, n - 1 times for each of reduce-scatter
// and all-gather. Within one host a ring for each of its node rings; across
// hosts as many as there are doors (doors.h): one enters a host by its door and
// leaves by another's, so that all NICs carry the same; a mesh of direct links
// they go through in all of its orders.
bool RingApplies(CommKind kind, const CollectiveGroup& group);
Rounds RingRounds(CommKind kind, const CollectiveGroup& group);

// tree.cc: from each door (doors.h) a chain through all ranks of the host, be
// they as many as on others or not, and, between the doors, binary trees over
// the hosts: sums go up them, results come down. Within one host only for a
// mesh that has no ring.
// Two trees with half of the data each, so that who has children in one is a
// leaf in the other (Sanders, Speck, Traff, "Two-tree algorithms for full
// bandwidth broadcast, reduction and scan", 2009); or one.
bool TreeApplies(CommKind kind, const CollectiveGroup& group);
Rounds DoubleTreeRounds(CommKind kind, const CollectiveGroup& group);
Rounds SingleTreeRounds(CommKind kind, const CollectiveGroup& group);

// nvls.cc: the host's switch sums for each rank its part and hands the result
// to all (NVLink SHARP); across hosts the parts are the doors', and their sums
// go up and down the same two trees in between.
bool NvlsApplies(CommKind kind, const CollectiveGroup& group);
Rounds NvlsRounds(CommKind kind, const CollectiveGroup& group);
bool NvlsTreeApplies(CommKind kind, const CollectiveGroup& group);
Rounds NvlsTreeRounds(CommKind kind, const CollectiveGroup& group);

// halving_doubling.cc: ranks a half, a quarter, ... of the group apart exchange
// halves, quarters, ... of the data (Thakur, Rabenseifner and Gropp, 2005). For
// powers of two.
bool HalvingDoublingApplies(CommKind kind, const CollectiveGroup& group);
Rounds HalvingDoublingRounds(CommKind kind, const CollectiveGroup& group);

// hierarchical.cc: reduce-scatter within each host, then each local index on
// its own ring across the hosts, then all-gather within each host. An exchange:
// each rank hands each of its host what is for that one's index on any host,
// then ranks of one index exchange across hosts, in messages as many times
// larger as a host has ranks (Hwang et al., Tutel, MLSys 2023, section 4.3).
// Between more than 256 hosts of more than 1,024 ranks in all each rank sends
// to a sample of the hosts, as direct.cc's do.
bool HierarchicalApplies(CommKind kind, const CollectiveGroup& group);
Rounds HierarchicalRounds(CommKind kind, const CollectiveGroup& group);
bool HierarchicalExchangeApplies(CommKind kind, const CollectiveGroup& group);
Rounds HierarchicalExchangeRounds(CommKind kind, const CollectiveGroup& group);

// direct.cc: every rank sends to every other at once. All-to-all is this (as
// NCCL's grouped sends are); the others where memory is shared. Of more than
// 1,024 ranks a sample of the sends, each with a larger share, stands for all.
bool DirectApplies(CommKind kind, const CollectiveGroup& group);
Rounds DirectRounds(CommKind kind, const CollectiveGroup& group);

// rooted.cc: scatter and gather send between the root (rank 0) and every other
// rank at once; broadcast and reduce pass pieces along each of the rings, from
// the root or to it, and by no tree, as NCCL's do (its tuning.cc: rings alone).
bool RootedApplies(CommKind kind, const CollectiveGroup& group);
Rounds RootedRounds(CommKind kind, const CollectiveGroup& group);

// point_to_point.cc: rank 0 sends to rank 1.
bool PointToPointApplies(CommKind kind, const CollectiveGroup& group);
Rounds PointToPointRounds(CommKind kind, const CollectiveGroup& group);

// neighbour.cc: rank i sends what it has to rank i - 1, the first to the last.
bool NeighbourApplies(CommKind kind, const CollectiveGroup& group);
Rounds NeighbourRounds(CommKind kind, const CollectiveGroup& group);

}  // namespace tessera
