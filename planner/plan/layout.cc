#include "planner/plan/layout.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "planner/base/append.h"
#include "planner/base/divide.h"

namespace tessera {

int64_t DeviceGroup::Size(AxisSet set) const {
  int64_t size = 1;
  for (; set != 0; set &= set - 1) {
    const auto axis = static_cast<size_t>(std::countr_zero(set));
    if (axis >= axes.size()) break;
    size *= axes[axis].size;
  }
  return size;
}

int DeviceGroup::Coordinate(int index, int axis) const {
  for (size_t a = axes.size(); a-- > static_cast<size_t>(axis) + 1;) {
    index /= axes[a].size;
  }
  return index % axes[static_cast<size_t>(axis)].size;
}

int64_t DeviceGroup::Coordinate(int index, AxisSet set) const {
  int64_t coordinate = 0;
  int64_t scale = 1;
  for (size_t a = axes.size(); a-- > 0;) {
    if (set >> a & 1) {
      coordinate += scale * (index % axes[a].size);
      scale *= axes[a].size;
    }
    index /= axes[a].size;
  }
  return coordinate;
}

bool DeviceGroup::IsUneven(AxisSet set) const {
  for (; set != 0; set &= set - 1) {
    const auto axis = static_cast<size_t>(std::countr_zero(set));
    if (axis >= axes.size()) break;
    if (!axes[axis].shares.empty()) return true;
  }
  return false;
}

bool SameMesh(const DeviceGroup& a, const DeviceGroup& b) {
  return std::equal(a.axes.begin(), a.axes.end(), b.axes.begin(), b.axes.end(),
                    [](const MeshAxis& x, const MeshAxis& y) {
                      return x.size == y.size && x.shares == y.shares;
                    });
}

std::vector<std::vector<int>> Subgroups(const DeviceGroup& group,
                                        AxisSet axes) {
  const AxisSet others = group.all_axes() & ~axes;
  const auto count = static_cast<size_t>(group.Size(others));
  const auto size = static_cast<size_t>(group.Size(axes));
  std::vector<std::vector<int>> subgroups(count, std::vector<int>(size));
  for (int i = 0; i < static_cast<int>(group.devices.size()); ++i) {
    subgroups[static_cast<size_t>(group.Coordinate(i, others))]
             [static_cast<size_t>(group.Coordinate(i, axes))] = i;
  }
  return subgroups;
}

std::vector<int> PrimeFactors(int64_t n) {
  std::vector<int> factors;
  for (int64_t p = 2; p * p <= n; ++p) {
    for (; n % p == 0; n /= p) factors.push_back(static_cast<int>(p));
  }
  if (n > 1) factors.push_back(static_cast<int>(n));
  std::reverse(factors.begin(), factors.end());
  return factors;
}

namespace {

// "tp0*tp1", with the outermost axis first.
std::string AxesText(AxisSet set, const DeviceGroup& group) {
  std::string text;
  for (size_t a = 0; a < group.axes.size(); ++a) {
    if (set >> a & 1) AppendTo(text, "*", group.axes[a].name);
  }
  return text;
}

}  // namespace

std::string ToString(const Layout& layout, const DeviceGroup& group,
                     size_t rank) {
  std::string text = "[";
  for (size_t d = 0; d < rank; ++d) {
    text += (d == 0 ? "" : ", ");
    text += layout.dims[d] == 0 ? "-" : AxesText(layout.dims[d], group);
  }
  text += "]";
  if (layout.partial) text += " partial " + AxesText(layout.partial, group);
  if (layout.flat) text += " flat " + AxesText(layout.flat, group);
  if (layout.rooted) text += " at root of " + AxesText(layout.rooted, group);
  if (layout.tile.count > 1) {
    text += " tile " + std::to_string(layout.tile.index + 1) + "/" +
            std::to_string(layout.tile.count);
  }
  if (layout.ring) text += " turned by " + std::to_string(layout.turn);
  for (const Halo& halo : layout.halos) {
    if (halo.dim < 0) continue;
    text += " with " + std::to_string(halo.before) + " before and " +
            std::to_string(halo.after) + " behind of dimension " +
            std::to_string(halo.dim);
  }
  return text;
}

int64_t PartsOf(const MeshAxis& axis) {
  if (axis.shares.empty()) return axis.size;
  return std::accumulate(axis.shares.begin(), axis.shares.end(), int64_t{0});
}

Range ShardRange(const DeviceGroup& group, AxisSet set, int64_t extent,
                 int64_t coordinate) {
  if (!group.IsUneven(set)) {
    return ShardRange(extent, group.Size(set), coordinate);
  }
  // The shard is [begin, begin + width) of `parts`, axis by axis.
  int64_t begin = 0;
  int64_t width = 1;
  int64_t parts = 1;
  int64_t inner = group.Size(set);
  for (; set != 0; set &= set - 1) {
    const MeshAxis& axis =
        group.axes[static_cast<size_t>(std::countr_zero(set))];
    inner /= axis.size;
    const int64_t at = coordinate / inner % axis.size;
    const int64_t of = PartsOf(axis);
    begin =
        begin * of +
        width * (axis.shares.empty()
                     ? at
                     : std::accumulate(axis.shares.begin(),
                                       axis.shares.begin() + at, int64_t{0}));
    if (!axis.shares.empty()) width *= axis.shares[static_cast<size_t>(at)];
    parts *= of;
  }
  return {begin * extent / parts, (begin + width) * extent / parts};
}

namespace {

// Of shards whose shares are no larger than those that count.
template <typename Better>
int64_t ExtremeShard(const DeviceGroup& group, AxisSet set, int64_t extent,
                     Better better) {
  int64_t found = -1;
  for (int64_t i = 0; i < group.Size(set); ++i) {
    bool counts = true;
    int64_t inner = group.Size(set);
    for (AxisSet left = set; left != 0; left &= left - 1) {
      const MeshAxis& axis =
          group.axes[static_cast<size_t>(std::countr_zero(left))];
      inner /= axis.size;
      const auto at = static_cast<size_t>(i / inner % axis.size);
      counts = counts && (axis.counted == 0 || axis.shares[at] <= axis.counted);
    }
    if (!counts) continue;
    const int64_t size = ShardRange(group, set, extent, i).size();
    if (found < 0 || better(size, found)) found = size;
  }
  return found;
}

// Where all shards are whole numbers, the fraction of the extent that has the
// share of each axis of `set` that `choose` says; -1 elsewhere.
template <typename Choose>
int64_t WholeShard(const DeviceGroup& group, AxisSet set, int64_t extent,
                   Choose choose) {
  int64_t share = 1;
  int64_t parts = 1;
  for (; set != 0; set &= set - 1) {
    const MeshAxis& axis =
        group.axes[static_cast<size_t>(std::countr_zero(set))];
    if (!axis.shares.empty()) share *= choose(axis);
    parts *= PartsOf(axis);
  }
  return extent % parts == 0 ? extent / parts * share : -1;
}

}  // namespace

int64_t LargestShard(const DeviceGroup& group, AxisSet set, int64_t extent) {
  if (!group.IsUneven(set)) {
    const int64_t parts = group.Size(set);
    return DivideUp(extent, parts);
  }
  const int64_t whole =
      WholeShard(group, set, extent, [](const MeshAxis& axis) {
        return axis.counted > 0 ? axis.counted
                                : *std::ranges::max_element(axis.shares);
      });
  return whole >= 0 ? whole
                    : ExtremeShard(group, set, extent, std::greater<int64_t>());
}

int64_t SmallestShard(const DeviceGroup& group, AxisSet set, int64_t extent) {
  if (!group.IsUneven(set)) return extent / group.Size(set);
  const int64_t whole =
      WholeShard(group, set, extent, [](const MeshAxis& axis) {
        return *std::ranges::min_element(axis.shares);
      });
  return whole >= 0 ? whole
                    : ExtremeShard(group, set, extent, std::less<int64_t>());
}

DeviceGroup CountedAt(const DeviceGroup& group,
                      std::span<const int> positions) {
  DeviceGroup counted = group;
  for (size_t a = 0; a < counted.axes.size(); ++a) {
    MeshAxis& axis = counted.axes[a];
    if (axis.shares.empty()) continue;
    axis.counted = 0;
    for (int position : positions) {
      const int at = group.Coordinate(position, static_cast<int>(a));
      axis.counted =
          std::max(axis.counted, axis.shares[static_cast<size_t>(at)]);
    }
  }
  return counted;
}

namespace {

Range Widened(Range range, const Halo& halo, int64_t extent) {
  return {std::max<int64_t>(0, range.begin - halo.before),
          std::min(extent, range.end + halo.after)};
}

}  // namespace

namespace {

bool IsUneven(const Layout& layout, const DeviceGroup& group, size_t dim) {
  return (layout.dims[dim] & layout.even) == 0 &&
         group.IsUneven(layout.dims[dim]);
}

}  // namespace

std::vector<Range> BlockAt(const Layout& layout, const DeviceGroup& group,
                           const Shape& shape, int index) {
  std::vector<Range> block(shape.size());
  for (size_t d = 0; d < shape.size(); ++d) {
    const int64_t parts = group.Size(layout.dims[d]);
    int64_t part = group.Coordinate(index, layout.dims[d]);
    if (layout.ring != 0 && layout.dims[d] == layout.ring) {
      part = (part + layout.turn) % parts;
    }
    block[d] = IsUneven(layout, group, d)
                   ? ShardRange(group, layout.dims[d], shape[d], part)
                   : ShardRange(shape[d], parts, part);
  }
  if (layout.tile.count > 1) {
    Range& tiled = block[static_cast<size_t>(layout.tile.dim)];
    const Range tile =
        ShardRange(tiled.size(), layout.tile.count, layout.tile.index);
    tiled = {tiled.begin + tile.begin, tiled.begin + tile.end};
  }
  for (const Halo& halo : layout.halos) {
    const auto d = static_cast<size_t>(halo.dim);
    if (halo.dim >= 0) block[d] = Widened(block[d], halo, shape[d]);
  }
  return block;
}

Range FlatRunAt(const Layout& layout, const DeviceGroup& group,
                const Shape& shape, int index) {
  if (IsAbsentAt(layout, group, index)) return {0, 0};
  int64_t elements = 1;
  for (const Range& range : BlockAt(layout, group, shape, index)) {
    elements *= range.size();
  }
  return ShardRange(elements, group.Size(layout.flat),
                    group.Coordinate(index, layout.flat));
}

int64_t ElementsAt(const Layout& layout, const DeviceGroup& group,
                   const Shape& shape, int index) {
  return FlatRunAt(layout, group, shape, index).size();
}

bool IsAbsentAt(const Layout& layout, const DeviceGroup& group, int index) {
  return layout.rooted != 0 && group.Coordinate(index, layout.rooted) != 0;
}

int64_t LargestExtent(const Layout& layout, const DeviceGroup& group,
                      const Shape& shape, size_t dim) {
  const Tile& tile = layout.tile;
  const bool tiled = tile.count > 1 && static_cast<size_t>(tile.dim) == dim;
  if (layout.dims[dim] == 0 && !tiled) return shape[dim];
  const int64_t parts = group.Size(layout.dims[dim]);
  for (const Halo& halo : layout.halos) {
    if (halo.dim != static_cast<int>(dim)) continue;
    int64_t most = 0;
    for (int64_t i = 0; i < parts; ++i) {
      const Range shard = ShardRange(shape[dim], parts, i);
      most = std::max(most, Widened(shard, halo, shape[dim]).size());
    }
    return most;
  }
  const bool uneven = IsUneven(layout, group, dim);
  const int64_t largest =
      uneven ? LargestShard(group, layout.dims[dim], shape[dim])
             : DivideUp(shape[dim], parts);
  if (!tiled) return largest;
  // A middle tile of a smaller shard may be the larger one.
  const int64_t smallest =
      uneven ? SmallestShard(group, layout.dims[dim], shape[dim])
             : shape[dim] / parts;
  return std::max(ShardRange(largest, tile.count, tile.index).size(),
                  ShardRange(smallest, tile.count, tile.index).size());
}

Shape LargestBlock(const Layout& layout, const DeviceGroup& group,
                   const Shape& shape) {
  Shape largest = shape;
  for (size_t d = 0; d < shape.size(); ++d) {
    largest[d] = LargestExtent(layout, group, shape, d);
  }
  return largest;
}

int64_t LargestElements(const Layout& layout, const DeviceGroup& group,
                        const Shape& shape) {
  int64_t elements = 1;
  for (size_t d = 0; d < shape.size(); ++d) {
    elements *= LargestExtent(layout, group, shape, d);
  }
  if (layout.flat == 0) return elements;
  const int64_t parts = group.Size(layout.flat);
  return DivideUp(elements, parts);
}

namespace {

// True when `axes` are the innermost of `dim`: every axis of `dim` outside
// `axes` is outer to (lower than) all of them.
bool Innermost(AxisSet dim, AxisSet axes) {
  const AxisSet rest = dim & ~axes;
  return rest == 0 || axes == 0 ||
         (AxisSet{1} << std::countr_zero(axes)) > rest;
}

int DimOf(const Layout& layout, AxisSet axis) {
  for (int d = 0; d < kMaxDims; ++d) {
    if (layout.dims[static_cast<size_t>(d)] & axis) return d;
  }
  return -1;
}

// The dims of `layout` with `axes` removed, or put where `to` has them.
Layout Moved(Layout layout, const Layout& to, AxisSet axes) {
  for (size_t d = 0; d < kMaxDims; ++d) {
    layout.dims[d] = (layout.dims[d] & ~axes) | (to.dims[d] & axes);
  }
  layout.partial = (layout.partial & ~axes) | (to.partial & axes);
  layout.flat = (layout.flat & ~axes) | (to.flat & axes);
  layout.rooted = (layout.rooted & ~axes) | (to.rooted & axes);
  return layout;
}

// Whether `axes` are innermost on every dimension of `layout` that holds them.
bool InnermostIn(const Layout& layout, AxisSet axes) {
  for (AxisSet dim : layout.dims) {
    if (!Innermost(dim, dim & axes)) return false;
  }
  return Innermost(layout.flat, layout.flat & axes);
}

// Innermost on the dimensions once the move is made, too.
bool Applies(const Layout& from, const Layout& to, AxisSet axes) {
  return axes != 0 && InnermostIn(from, axes) &&
         InnermostIn(Moved(from, to, axes), axes);
}

}  // namespace

namespace {

// The steps between layouts without halos.
std::vector<ReshardStep> PlanShards(const Layout& from, const Layout& to,
                                    const DeviceGroup& group) {
  std::vector<ReshardStep> steps;
  Layout now = from;
  const auto take = [&](ReshardKind kind, AxisSet axes, AxisSet exchanged) {
    now = Moved(now, to, axes);
    steps.push_back({kind, exchanged, now});
  };
  const AxisSet all = group.all_axes();
  // A flat cut changes the meaning of all dims below it: gather it first when
  // the dims change too.
  if (now.flat != 0 && now.flat != to.flat) {
    take(ReshardKind::kAllGather, now.flat, now.flat);
  }
  const auto sharded = [](const Layout& l) { return l.sharded(); };

  // What leaves a root is scattered where a dimension can take it, else
  // broadcast.
  const AxisSet leaving = now.rooted & ~to.rooted;
  for (size_t d = 0; d < kMaxDims; ++d) {
    const AxisSet axes = leaving & to.dims[d];
    if (Applies(now, to, axes)) take(ReshardKind::kScatter, axes, axes);
  }
  if (const AxisSet axes = now.rooted & ~to.rooted; axes != 0) {
    now.rooted &= ~axes;
    steps.push_back({ReshardKind::kBroadcast, axes, now});
  }
  // What goes to a root: partial sums are reduced, innermost shards gathered
  // (others all-gathered below) and replicas dropped.
  if (const AxisSet axes = now.partial & to.rooted; axes != 0) {
    take(ReshardKind::kReduce, axes, axes);
  }
  for (size_t d = 0; d < kMaxDims; ++d) {
    const AxisSet axes = now.dims[d] & to.rooted;
    if (Applies(now, to, axes)) take(ReshardKind::kGather, axes, axes);
  }
  if (const AxisSet axes =
          to.rooted & ~(now.rooted | sharded(now) | now.partial);
      axes != 0) {
    take(ReshardKind::kSlice, axes, 0);
  }

  // Partial sums become shards, or nothing; shards never wait for them.
  const AxisSet scatter = now.partial & sharded(to);
  const AxisSet slice = all & ~(sharded(now) | now.partial | now.rooted) &
                        (sharded(to) | to.partial);
  const AxisSet slice_dims = slice & ~to.flat;
  if (Applies(now, to, slice_dims)) {
    take(ReshardKind::kSlice, slice_dims, 0);
  }
  for (size_t d = 0; d < kMaxDims; ++d) {
    const AxisSet axes = scatter & to.dims[d];
    if (Applies(now, to, axes)) take(ReshardKind::kReduceScatter, axes, axes);
  }
  // Flat cuts lie on the block that the dims leave, so only when these are in
  // place; an axis on which the data is whole is cut before or behind the
  // reduce-scatter, whichever keeps inner runs inside outer ones.
  if (const AxisSet axes = scatter & to.flat;
      axes != 0 && now.dims == to.dims) {
    const AxisSet whole = to.flat & ~axes & ~now.flat;
    if (Innermost(to.flat, axes)) {
      if (whole != 0) take(ReshardKind::kSlice, whole, 0);
      take(ReshardKind::kReduceScatter, axes, axes);
    } else if (Innermost(to.flat, whole)) {
      take(ReshardKind::kReduceScatter, axes, axes);
    }
  }
  if (const AxisSet axes = now.partial & ~to.partial; axes != 0) {
    // Those that should have been scattered but could not be are summed whole
    // and sliced by the redistribution below.
    Layout summed = now;
    summed.partial &= ~axes;
    now = summed;
    steps.push_back({ReshardKind::kAllReduce, axes, now});
    const AxisSet again = all & ~(sharded(now) | now.partial | now.rooted) &
                          sharded(to) & ~to.flat;
    if (Applies(now, to, again)) take(ReshardKind::kSlice, again, 0);
  }
  if (now == to) return steps;

  // Axes that move from one dimension to another.
  AxisSet moving = 0;
  for (size_t i = 0; i < group.axes.size(); ++i) {
    const AxisSet axis = AxisSet{1} << i;
    const int a = DimOf(now, axis);
    const int b = DimOf(to, axis);
    if (a >= 0 && b >= 0 && a != b) moving |= axis;
  }
  for (int a = 0; a < kMaxDims; ++a) {
    for (int b = 0; b < kMaxDims; ++b) {
      const AxisSet axes = moving & now.dims[static_cast<size_t>(a)] &
                           to.dims[static_cast<size_t>(b)];
      if (a != b && Applies(now, to, axes)) {
        take(ReshardKind::kAllToAll, axes, axes);
      }
    }
  }
  for (size_t d = 0; d < kMaxDims; ++d) {
    const AxisSet axes = now.dims[d] & ~sharded(to) & ~to.partial;
    if (Applies(now, to, axes)) take(ReshardKind::kAllGather, axes, axes);
  }
  if (now.dims != to.dims) {
    Layout target = now;
    target.dims = to.dims;
    AxisSet exchanged = 0;
    for (size_t d = 0; d < kMaxDims; ++d) exchanged |= now.dims[d] ^ to.dims[d];
    // Ranks along an axis that moves or appears exchange with one another, and
    // so do those along axes inside it, whose ranges shift.
    for (size_t d = 0; d < kMaxDims; ++d) {
      if (now.dims[d] != to.dims[d]) exchanged |= now.dims[d] | to.dims[d];
    }
    now = target;
    steps.push_back({ReshardKind::kRedistribute, exchanged, now});
  }
  if (now.flat != to.flat) {
    take(ReshardKind::kSlice, to.flat & ~now.flat, 0);
  }
  if (now.partial != to.partial) {
    take(ReshardKind::kSlice, to.partial & ~now.partial, 0);
  }
  if (now.rooted != to.rooted) {
    take(ReshardKind::kSlice, to.rooted & ~now.rooted, 0);
  }
  TESSERA_CHECK(now == to) << ToString(from, group, kMaxDims) << " -> "
                           << ToString(to, group, kMaxDims) << " stopped at "
                           << ToString(now, group, kMaxDims);
  return steps;
}

}  // namespace

std::vector<ReshardStep> PlanReshard(const Layout& from, const Layout& to,
                                     const DeviceGroup& group) {
  if (from == to) return {};
  std::vector<ReshardStep> steps;
  const Layout shards = from.WithoutHalo();
  if (from.has_halo()) steps.push_back({ReshardKind::kSlice, 0, shards});
  for (ReshardStep& step : PlanShards(shards, to.WithoutHalo(), group)) {
    steps.push_back(std::move(step));
  }
  if (!to.has_halo()) return steps;
  AxisSet axes = 0;
  for (const Halo& halo : to.halos) {
    if (halo.dim >= 0) axes |= to.dims[static_cast<size_t>(halo.dim)];
  }
  // A slice of what is whole along these dimensions cuts the halo with them.
  const Layout& before = steps.size() > 1 ? steps[steps.size() - 2].to : shards;
  const bool sliced =
      !steps.empty() && steps.back().kind == ReshardKind::kSlice &&
      !from.has_halo() && std::ranges::all_of(to.halos, [&](const Halo& halo) {
        return halo.dim < 0 || before.dims[static_cast<size_t>(halo.dim)] == 0;
      });
  if (sliced) {
    steps.back().to = to;
  } else {
    steps.push_back({ReshardKind::kRedistribute, axes, to});
  }
  return steps;
}

}  // namespace tessera
