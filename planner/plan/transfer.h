#pragma once
// Which elements of a tensor each rank holds, and who sends what to whom when a
// tensor takes another layout. Every exchange of data between ranks is an
// intersection of placements: the runtime copies by it, and the cost model
// counts by it what ranks stage. Plain values and pure functions.

#include <cstdint>
#include <optional>
#include <vector>

#include "planner/plan/layout.h"

namespace tessera {

// A block of index space: one range for each dimension. A scalar's has none.
using Box = std::vector<Range>;
int64_t ElementsOf(const Box& box);

// A rank's elements of a tensor: the run [begin, end) of a block, flattened in
// row-major order. The buffer holds just the run. Most runs are whole blocks;
// those of flat layouts are not.
struct Placement {
  Box block;
  Range run;

  int64_t elements() const { return run.size(); }
  bool operator==(const Placement&) const = default;
};

// The placement of a whole block.
Placement WholeBlock(Box block);
// That of position `index` of `group`.
Placement PlacementAt(const Layout& layout, const DeviceGroup& group,
                      const Shape& shape, int index);

// Disjoint boxes that together are the placement, in the order of its buffer.
// A whole block is one box; a run is up to 2n - 1 boxes in n dimensions.
std::vector<Box> BoxesOf(const Placement& placement);

// Empty when the boxes share nothing.
std::optional<Box> Intersection(const Box& a, const Box& b);

// Who sends what, so that each target gets all of its elements exactly once.
struct Piece {
  int from = 0;  // index into the sources
  int to = 0;    // index into the targets
  std::vector<Box> boxes;
};

// The pieces, by target and then in order of preference: where several sources
// hold an element, target t takes it from the first that has it, counted from
// source t * sources / targets on. (So equal groups pair position by position,
// and replicas share the work.) The same on every rank.
// REQUIRES: the sources together hold every element of each target.
std::vector<Piece> TransferPieces(const std::vector<Placement>& sources,
                                  const std::vector<Placement>& targets);

}  // namespace tessera
