#pragma once
// By which ranks the rings and trees of a group enter its hosts.

#include <vector>

#include "costmodel/link/router.h"

namespace tessera {

// A host's ranks in the order in which rings visit them.
struct HostRanks {
  std::vector<NearestNics> nics;  // by position
  // Whether direct links make the order, so that a ring leaves by the rank
  // before its door. Elsewhere it leaves by another ring's door.
  bool meshed = false;
};

// By host and ring the position of its door: ring r enters every host at
// position r, or r mod its size, and there are as many as the widest host has
// ranks. Where GPUs and NICs are paired alike on all hosts this loads NICs
// alike.
std::vector<std::vector<int>> DoorsInTurn(const std::vector<HostRanks>& hosts);

// The same, such that the doors of each host load its NICs and its ranks alike
// as far as can be. A host has as many ways in as it has NICs, or ranks where
// these are fewer; there are only as many rings as are a multiple of those of
// the host with the fewest. (NCCL searches as many channels as the NICs of a
// host carry, and takes as many on all hosts as on the one with the fewest: its
// graph/search.cc and init.cc.)
//
// A door is a rank that for one of its NICs is the first by how few NICs it
// goes by, then by how near these are, and as few rings as possible have one
// door: so of two GPUs that have one NIC left between them one is none. Where
// it changes nothing of this ring r enters every host at the same position,
// hence on the same rail: at that of the host with the fewest ways in, and
// there at position r. In turn where direct links make the order, since a
// ring's two ends go together there.
std::vector<std::vector<int>> DealtDoors(const std::vector<HostRanks>& hosts);

}  // namespace tessera
