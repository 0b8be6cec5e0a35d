#pragma once
// Device groups with a logical mesh over them, and layouts of tensors on it.

#include <array>
#include <bit>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "planner/base/ids.h"
#include "planner/ir/graph.h"

namespace tessera {

struct MeshAxis {
  std::string name;
  int size = 1;
  // Of a dimension that the axis splits coordinate c has shares[c] parts of as
  // many as there are together; empty: all have as much. (Runs of flattened
  // blocks are equal all the same.)
  std::vector<int> shares = {};
  // The share that LargestExtent counts; 0: the largest.
  int counted = 0;
  bool operator==(const MeshAxis&) const = default;
};

// A set of mesh axes, bit i for axis i. Several axes on one dimension are
// ordered as the mesh is: a lower axis is outer. A plan that wants another
// order orders its mesh so.
using AxisSet = uint32_t;
inline constexpr int kMaxAxes = 24;

// An ordered list of devices with a logical mesh over it, row-major: the last
// axis is innermost. Axes are small (prime by default), so that a factor can
// take any subset and degrees need not be powers of two.
struct DeviceGroup {
  std::string name;
  std::vector<DeviceId> devices;
  std::vector<MeshAxis> axes;

  AxisSet all_axes() const { return (AxisSet{1} << axes.size()) - 1; }
  // Product of the sizes of `set`.
  int64_t Size(AxisSet set) const;
  // Coordinate of position `index` (into `devices`) along axis `axis`.
  int Coordinate(int index, int axis) const;
  // The mixed-radix coordinate along the axes of `set`, outer first.
  int64_t Coordinate(int index, AxisSet set) const;
  // Whether an axis of `set` has shares.
  bool IsUneven(AxisSet set) const;
  bool operator==(const DeviceGroup&) const = default;
};

// Whether two groups have axes of the same sizes and shares in the same order.
bool SameMesh(const DeviceGroup& a, const DeviceGroup& b);

// The positions (into `devices`) of the subgroups that span `axes`: ranks that
// differ in coordinates of `axes` only, in the order of these coordinates.
std::vector<std::vector<int>> Subgroups(const DeviceGroup& group, AxisSet axes);

// Prime factors of n, descending: the default axis sizes.
std::vector<int> PrimeFactors(int64_t n);

// The piece `index` of the `count` that each rank's block is cut into along
// `dim`, by the bounds of ShardRange. A count of 1 is the whole block.
struct Tile {
  int dim = 0;
  int index = 0;
  int count = 1;
  bool operator==(const Tile&) const = default;
  auto operator<=>(const Tile&) const = default;
};

// Of a sharded dimension, what a rank holds besides its shard: indices of the
// shards before it and behind it, as far as the tensor goes. Windows reach into
// these (planner/ops/window.h).
struct Halo {
  int8_t dim = -1;  // -1: none
  int32_t before = 0;
  int32_t after = 0;
  bool operator==(const Halo&) const = default;
  auto operator<=>(const Halo&) const = default;
};

// Where the elements of a tensor are on a group: the axes that shard each
// dimension, the axes over which ranks hold partial sums, the axes over which
// each rank's block is flattened and cut into runs (`flat`: ZeRO), and the axes
// along which only the ranks at coordinate 0 hold anything (`rooted`). On all
// other axes the tensor is replicated. An axis appears at most once. Of a tile
// only so much of each rank's block is there (and is flattened); shapes remain
// those of the whole tensor. The blocks of a dimension that is sharded over
// exactly `ring` may have travelled: rank i of n along it holds block
// (i + turn) mod n.
struct Layout {
  std::array<AxisSet, kMaxDims> dims = {};
  AxisSet partial = 0;
  AxisSet flat = 0;
  AxisSet rooted = 0;
  Tile tile = {};
  AxisSet ring = 0;
  int turn = 0;
  // Axes that cut their dimension equally, whatever their shares: of what has
  // an entry for each rank.
  AxisSet even = 0;
  // Of what an operator reads for itself: without partial sums, roots, flat
  // cuts, tiles and rings. The dimensions of both differ.
  std::array<Halo, 2> halos = {};

  AxisSet sharded() const {
    AxisSet set = flat;
    for (AxisSet dim : dims) set |= dim;
    return set;
  }
  bool has_halo() const { return halos != std::array<Halo, 2>(); }
  Layout WithoutHalo() const {
    Layout layout = *this;
    layout.halos = {};
    return layout;
  }
  // The axes on which the tensor is replicated.
  AxisSet replicated(const DeviceGroup& group) const {
    return group.all_axes() & ~(sharded() | partial | rooted);
  }
  bool operator==(const Layout&) const = default;
  auto operator<=>(const Layout&) const = default;
};

// "[dp0, -, tp0*tp1] partial tp2", for people and errors.
std::string ToString(const Layout& layout, const DeviceGroup& group,
                     size_t rank);

// A block of a tensor: [begin, end) along each dimension.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

// Shard i of P over extent n: [i*n/P, (i+1)*n/P), always on the global extent,
// so that dropping inner axes yields the coarser split.
inline Range ShardRange(int64_t extent, int64_t parts, int64_t i) {
  return {i * extent / parts, (i + 1) * extent / parts};
}

// The parts that an axis makes: all its shares together.
int64_t PartsOf(const MeshAxis& axis);

// Shard `coordinate` of an extent that the axes of `set` split, by their
// shares: a part of the part that the outer axes leave, its bounds rounded
// down. Without shares that is ShardRange.
Range ShardRange(const DeviceGroup& group, AxisSet set, int64_t extent,
                 int64_t coordinate);
// The extents of the largest (LargestExtent) and the smallest of these.
int64_t LargestShard(const DeviceGroup& group, AxisSet set, int64_t extent);
int64_t SmallestShard(const DeviceGroup& group, AxisSet set, int64_t extent);

// The group as the ranks at `positions` see it: LargestExtent counts the
// largest shares that one of them has.
DeviceGroup CountedAt(const DeviceGroup& group, std::span<const int> positions);

// The block (dimensions and tile, before `flat`) at position `index` of
// `group`.
std::vector<Range> BlockAt(const Layout& layout, const DeviceGroup& group,
                           const Shape& shape, int index);
// The run of the flattened block that `flat` and `rooted` leave at position
// `index`; empty away from the root.
Range FlatRunAt(const Layout& layout, const DeviceGroup& group,
                const Shape& shape, int index);
// Elements stored at position `index`.
int64_t ElementsAt(const Layout& layout, const DeviceGroup& group,
                   const Shape& shape, int index);

// Whether position `index` is away from the root, and holds nothing.
bool IsAbsentAt(const Layout& layout, const DeviceGroup& group, int index);

// The extent of the largest shard of dimension `dim`.
int64_t LargestExtent(const Layout& layout, const DeviceGroup& group,
                      const Shape& shape, size_t dim);
// The extents of the largest shard on the group.
Shape LargestBlock(const Layout& layout, const DeviceGroup& group,
                   const Shape& shape);
// Elements of the largest shard, `flat` included.
int64_t LargestElements(const Layout& layout, const DeviceGroup& group,
                        const Shape& shape);

// How a layout becomes another on the same group.
enum class ReshardKind : uint8_t {
  kSlice,          // replicate -> shard, and mask to coordinate 0: local
  kAllReduce,      // partial -> replicate
  kReduceScatter,  // partial -> shard
  kAllGather,      // shard -> replicate
  kAllToAll,       // shard(a) -> shard(b)
  kRedistribute,   // anything without partials, by index ranges
  kScatter,        // rooted -> shard
  kBroadcast,      // rooted -> replicate
  kGather,         // shard -> rooted
  kReduce,         // partial -> rooted
};

struct ReshardStep {
  ReshardKind kind = ReshardKind::kSlice;
  AxisSet axes = 0;  // over which ranks exchange; 0 for a slice
  Layout to;         // after this step
  bool operator==(const ReshardStep&) const = default;
};

// The steps from `from` to `to`, which have the same tile; empty when they are
// equal. Conversions of one
// kind over several axes are one step. Steps that shrink the data come first:
// slices, reduces, reduce-scatters, all-reduces, all-to-alls, all-gathers (what
// leaves a root before all others, what goes to one first among its kin; where
// a replica is wanted at the root only, a slice drops the rest); where that
// chain does not apply, because an axis that moves is not innermost on its
// dimension, one redistribution by index ranges takes its place. A step may
// turn a replicated axis into a partial one by masking (a free slice). A halo
// is dropped first, by a slice, and made last, by a redistribution among the
// ranks that share its dimension, or by the slice that cuts the dimension.
std::vector<ReshardStep> PlanReshard(const Layout& from, const Layout& to,
                                     const DeviceGroup& group);

}  // namespace tessera
