#include "planner/lower/staging.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "planner/base/element_count.h"
#include "planner/plan/transfer.h"

namespace tessera {
namespace {

// Above this many pairs of ranks, pieces are not counted one by one.
constexpr int64_t kMostPairs = int64_t{1} << 20;

// At a position, or of the largest shard.
int64_t ElementsOf(const Value& value, const DeviceGroup& group,
                   std::optional<int> position) {
  return position ? ElementsAt(value.layout, group, value.shape, *position)
                  : LargestElements(value.layout, group, value.shape);
}

int64_t BytesOf(const Value& value, const DeviceGroup& group,
                std::optional<int> position) {
  return ElementsOf(value, group, position) * SizeOf(value.dtype);
}

int64_t WholeBytes(const Value& value) {
  return ElementCount(value.shape) * SizeOf(value.dtype);
}

bool EqualShards(const Value& value, const DeviceGroup& group) {
  return BytesOf(value, group, {}) * group.Size(value.layout.sharded()) *
             value.layout.tile.count ==
         WholeBytes(value);
}

// Whether a box of extents `inner` lies in one piece within one of `outer`.
bool InOnePiece(const Shape& inner, const Shape& outer) {
  size_t d = 0;
  while (d < inner.size() && inner[d] == 1) ++d;
  for (++d; d < inner.size(); ++d) {
    if (inner[d] != outer[d]) return false;
  }
  return true;
}

// Whether the shards that `cut` makes of a block of `whole` follow one another
// in it, in the order of the ranks.
bool InRankOrder(const Layout& whole, const Layout& cut,
                 const DeviceGroup& group, const Shape& shape,
                 std::optional<int> position) {
  const AxisSet flat = cut.flat & ~whole.flat;
  size_t dims = 0;
  size_t dim = 0;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (cut.dims[d] == whole.dims[d]) continue;
    dim = d;
    ++dims;
  }
  if (flat != 0) {
    // Runs of runs follow one another where the new cuts are inner ones.
    return dims == 0 && (whole.flat == 0 ||
                         whole.flat < (AxisSet{1} << std::countr_zero(flat)));
  }
  Shape block = LargestBlock(whole, group, shape);
  if (position) {
    const Box own = BlockAt(whole, group, shape, *position);
    for (size_t d = 0; d < own.size(); ++d) block[d] = own[d].size();
  }
  return dims <= 1 &&
         std::all_of(block.begin(), block.begin() + static_cast<int64_t>(dim),
                     [](int64_t extent) { return extent == 1; });
}

// One message of a collective: a large tensor, or all small ones of one type.
struct Message {
  int64_t from = 0;
  int64_t to = 0;
  // Sent and received, where neither is all of it: by position in the group, or
  // once for all.
  std::vector<int64_t> exchanged = {0};
  int tensors = 0;
  bool in_order = true;  // of the only one
  bool gathers = false;  // everyone gets everything
};

int64_t StagedBytes(CommKind kind, const Message& message,
                    std::optional<int> position) {
  const bool several = message.tensors > 1;
  switch (kind) {
    case CommKind::kAllReduce:
      return several ? message.from : 0;
    case CommKind::kReduce:
    case CommKind::kReduceScatter:
      return (several || !message.in_order ? message.from : 0) +
             (several ? message.to : 0);
    default:
      if (!message.gathers) {
        const std::vector<int64_t>& exchanged = message.exchanged;
        return position && exchanged.size() > 1
                   ? exchanged[static_cast<size_t>(*position)]
                   : *std::max_element(exchanged.begin(), exchanged.end());
      }
      return (several ? message.from : 0) +
             (several || !message.in_order ? message.to : 0);
  }
}

// What the ranks send and receive in an exchange within the task's subgroups,
// as Message::exchanged.
std::vector<int64_t> ExchangedBytes(const Task& task, const Value& from,
                                    const Value& to, const DeviceGroup& group,
                                    std::optional<int> position) {
  const int64_t received = BytesOf(to, group, position);
  const auto ranks = static_cast<int64_t>(group.devices.size());
  if (ranks * group.Size(task.axes) > kMostPairs) {
    const double mean = static_cast<double>(WholeBytes(from)) /
                        static_cast<double>(group.Size(from.layout.sharded()) *
                                            from.layout.tile.count);
    const double sent = static_cast<double>(received) *
                        static_cast<double>(BytesOf(from, group, position)) /
                        mean;
    return {received + static_cast<int64_t>(std::ceil(sent))};
  }
  // Of equal shards that no other rank has each sends what it receives.
  if ((task.axes & ~from.layout.sharded()) == 0 && EqualShards(from, group) &&
      EqualShards(to, group)) {
    return {2 * received};
  }
  std::vector<int64_t> bytes(group.devices.size(), 0);
  for (const std::vector<int>& members : Subgroups(group, task.axes)) {
    std::vector<Placement> sources;
    std::vector<Placement> targets;
    for (int member : members) {
      sources.push_back(PlacementAt(from.layout, group, from.shape, member));
      targets.push_back(PlacementAt(to.layout, group, to.shape, member));
    }
    for (const Piece& piece : TransferPieces(sources, targets)) {
      for (const Box& box : piece.boxes) {
        for (int member : {piece.from, piece.to}) {
          bytes[static_cast<size_t>(members[static_cast<size_t>(member)])] +=
              ElementsOf(box) * SizeOf(from.dtype);
        }
      }
    }
  }
  return bytes;
}

void Add(std::vector<int64_t>& sum, const std::vector<int64_t>& bytes) {
  if (sum.size() < bytes.size()) sum.resize(bytes.size(), sum[0]);
  for (size_t i = 0; i < sum.size(); ++i) {
    sum[i] += bytes[bytes.size() == 1 ? 0 : i];
  }
}

Bytes CollectiveBytes(const Task& task, std::span<const Value> values,
                      const DeviceGroup& group, std::optional<int> position) {
  int64_t most = 0;
  std::vector<std::pair<std::pair<DType, bool>, Message>> shared;
  for (size_t i = 0; i < task.reads.size(); ++i) {
    const Value& from = values[task.reads[i].index()];
    const Value& to = values[task.writes[i].index()];
    Message message;
    message.from = BytesOf(from, group, position);
    message.to = BytesOf(to, group, position);
    message.tensors = 1;
    const AxisSet cut = from.layout.sharded() & task.axes;
    switch (task.comm) {
      case CommKind::kAllReduce:
      case CommKind::kReduce:  // scatters everything to the root
        break;
      case CommKind::kBroadcast:  // gathers from the root alone
        message.gathers = true;
        break;
      case CommKind::kScatter:
      case CommKind::kGather:  // the root sends, or receives, its own part too
        message.exchanged = {message.from + message.to};
        break;
      case CommKind::kReduceScatter:
        message.in_order =
            InRankOrder(from.layout, to.layout, group, from.shape, position);
        break;
      default:
        message.gathers =
            cut == task.axes && (to.layout.sharded() & task.axes) == 0;
        message.in_order =
            InRankOrder(to.layout, from.layout, group, from.shape, position);
        if (!message.gathers) {
          message.exchanged = ExchangedBytes(task, from, to, group, position);
        }
        break;
    }
    if (std::max(BytesOf(from, group, {}), BytesOf(to, group, {})) >=
        kShareBelowBytes) {
      most = std::max(most, StagedBytes(task.comm, message, position));
      continue;
    }
    const auto key = std::pair(from.dtype, message.gathers);
    auto it = std::find_if(shared.begin(), shared.end(),
                           [&](const auto& s) { return s.first == key; });
    if (it == shared.end()) {
      shared.push_back({key, message});
      continue;
    }
    it->second.from += message.from;
    it->second.to += message.to;
    Add(it->second.exchanged, message.exchanged);
    ++it->second.tensors;
  }
  for (const auto& [key, message] : shared) {
    most = std::max(most, StagedBytes(task.comm, message, position));
  }
  return {most};
}

// Axes that split a dimension.
struct Split {
  const DeviceGroup* group = nullptr;
  AxisSet axes = 0;
};

// What goes of a shard of `own` parts of a dimension to one of `other` parts:
// the extents of the piece and of the shard, each pair once. Of the shard that
// begins at `begin`, or of any.
std::vector<std::pair<int64_t, int64_t>> PiecesOf(
    int64_t extent, const Split& mine_by, const Split& theirs_by,
    std::optional<int64_t> begin) {
  const int64_t own = mine_by.group->Size(mine_by.axes);
  const int64_t other = theirs_by.group->Size(theirs_by.axes);
  const int64_t finest = std::max(own, other);
  if (extent % finest == 0 && finest % std::min(own, other) == 0 &&
      !mine_by.group->IsUneven(mine_by.axes) &&
      !theirs_by.group->IsUneven(theirs_by.axes)) {
    return {{extent / finest, extent / own}};
  }
  std::vector<std::pair<int64_t, int64_t>> pieces;
  for (int64_t i = 0; i < own; ++i) {
    const Range mine = ShardRange(*mine_by.group, mine_by.axes, extent, i);
    if (begin && mine.begin != *begin) continue;
    for (int64_t j = 0; j < other; ++j) {
      const Range theirs =
          ShardRange(*theirs_by.group, theirs_by.axes, extent, j);
      const std::pair piece(
          std::min(mine.end, theirs.end) - std::max(mine.begin, theirs.begin),
          mine.end - mine.begin);
      if (piece.first > 0 &&
          std::find(pieces.begin(), pieces.end(), piece) == pieces.end()) {
        pieces.push_back(piece);
      }
    }
  }
  return pieces;
}

// Messages are staged one at a time, where they do not lie in one piece: the
// largest over all combinations of the dimensions' pieces.
Bytes TransferBytes(const Value& here, const DeviceGroup& group,
                    const Value& there, const DeviceGroup& peer_group,
                    std::optional<int> position) {
  if (here.layout == there.layout && SameMesh(group, peer_group)) return {};
  Box block;
  if (position) block = BlockAt(here.layout, group, here.shape, *position);
  std::vector<std::pair<Shape, Shape>> boxes = {{}};  // piece, shard
  for (size_t d = 0; d < here.shape.size(); ++d) {
    std::vector<std::pair<Shape, Shape>> longer;
    for (const auto& [piece, shard] :
         PiecesOf(here.shape[d], {&group, here.layout.dims[d]},
                  {&peer_group, there.layout.dims[d]},
                  position ? std::optional(block[d].begin) : std::nullopt)) {
      for (auto box : boxes) {
        box.first.push_back(piece);
        box.second.push_back(shard);
        longer.push_back(std::move(box));
      }
    }
    boxes = std::move(longer);
  }
  int64_t most = 0;
  for (const auto& [piece, shard] : boxes) {
    if (!InOnePiece(piece, shard)) most = std::max(most, ElementCount(piece));
  }
  return {most * SizeOf(here.dtype)};
}

}  // namespace

void AppendStagingKey(const Task& task, std::span<const Value> values,
                      const Value* peer, std::vector<int64_t>& key) {
  key.insert(key.end(),
             {static_cast<int64_t>(task.kind), static_cast<int64_t>(task.comm),
              task.axes, std::ssize(task.reads), std::ssize(task.writes)});
  const auto add = [&](const Value& value) {
    const Layout& layout = value.layout;
    key.push_back(static_cast<int64_t>(value.dtype) |
                  static_cast<int64_t>(value.shape.size()) << 8);
    key.insert(key.end(), value.shape.begin(), value.shape.end());
    // Two axis sets to a number.
    const auto pair = [](AxisSet a, AxisSet b) {
      return static_cast<int64_t>(a) << 32 | b;
    };
    for (size_t d = 0; d < value.shape.size(); d += 2) {
      key.push_back(pair(layout.dims[d],
                         d + 1 < kMaxDims ? layout.dims[d + 1] : AxisSet{0}));
    }
    const bool plain = layout.rooted == 0 && layout.tile == Tile() &&
                       layout.ring == 0 && layout.turn == 0 &&
                       layout.even == 0 && !layout.has_halo();
    key.push_back(pair(layout.partial, layout.flat));
    key.push_back(plain);
    if (plain) return;
    key.insert(key.end(),
               {layout.rooted, layout.tile.dim, layout.tile.index,
                layout.tile.count, layout.ring, layout.turn, layout.even});
    for (const Halo& halo : layout.halos) {
      key.insert(key.end(), {halo.dim, halo.before, halo.after});
    }
  };
  for (ValueId id : task.reads) add(values[id.index()]);
  for (ValueId id : task.writes) add(values[id.index()]);
  if (peer != nullptr) add(*peer);
}

Bytes StagingBytes(const Task& task, std::span<const Value> values,
                   const DeviceGroup& group, const Value* peer,
                   const DeviceGroup* peer_group, std::optional<int> position) {
  switch (task.kind) {
    case TaskKind::kComm:
      // Whole buffers travel as they are.
      if (task.comm == CommKind::kShift) return {};
      return CollectiveBytes(task, values, group, position);
    case TaskKind::kSend:
      return TransferBytes(values[task.reads[0].index()], group, *peer,
                           *peer_group, position);
    case TaskKind::kRecv:
      return TransferBytes(values[task.writes[0].index()], group, *peer,
                           *peer_group, position);
    default:
      return {};
  }
}

Bytes ScratchBytes(const Task& task, std::span<const Value> values,
                   const DeviceGroup& group, std::optional<int> position) {
  if (!task.scratch_of.valid()) return {};
  const Value& value = values[task.scratch_of.index()];
  return {ElementsOf(value, group, position) * task.scratch_bytes};
}

}  // namespace tessera
