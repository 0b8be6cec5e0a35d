#include "planner/lower/staging.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

namespace tessera {
namespace {

int64_t BytesOf(const Value& value, const DeviceGroup& group) {
  return LargestElements(value.layout, group, value.shape) *
         SizeOf(value.dtype);
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
                 const DeviceGroup& group, const Shape& shape) {
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
  const Shape block = LargestBlock(whole, group, shape);
  return dims <= 1 &&
         std::all_of(block.begin(), block.begin() + static_cast<int64_t>(dim),
                     [](int64_t extent) { return extent == 1; });
}

// One message of a collective: a large tensor, or all small ones of one type.
struct Message {
  int64_t from = 0;
  int64_t to = 0;
  int64_t exchanged = 0;  // sent and received, where neither is all of it
  int tensors = 0;
  bool in_order = true;  // of the only one
  bool gathers = false;  // everyone gets everything
};

int64_t StagedBytes(CommKind kind, const Message& message) {
  const bool several = message.tensors > 1;
  switch (kind) {
    case CommKind::kAllReduce:
      return several ? message.from : 0;
    case CommKind::kReduce:
    case CommKind::kReduceScatter:
      return (several || !message.in_order ? message.from : 0) +
             (several ? message.to : 0);
    default:
      if (!message.gathers) return message.exchanged;
      return (several ? message.from : 0) +
             (several || !message.in_order ? message.to : 0);
  }
}

// In the mean ranks send as much as they receive; one with a larger shard than
// the mean sends more.
int64_t ExchangedBytes(const Value& from, const Value& to,
                       const DeviceGroup& group) {
  int64_t elements = 1;
  for (int64_t extent : from.shape) elements *= extent;
  const double mean = static_cast<double>(elements * SizeOf(from.dtype)) /
                      static_cast<double>(group.Size(from.layout.sharded()) *
                                          from.layout.tile.count);
  const int64_t received = BytesOf(to, group);
  const double sent = static_cast<double>(received) *
                      static_cast<double>(BytesOf(from, group)) / mean;
  return received + static_cast<int64_t>(std::ceil(sent));
}

Bytes CollectiveBytes(const Task& task, std::span<const Value> values,
                      const DeviceGroup& group) {
  int64_t most = 0;
  std::vector<std::pair<std::pair<DType, bool>, Message>> shared;
  for (size_t i = 0; i < task.reads.size(); ++i) {
    const Value& from = values[task.reads[i].index()];
    const Value& to = values[task.writes[i].index()];
    Message message;
    message.from = BytesOf(from, group);
    message.to = BytesOf(to, group);
    message.exchanged = ExchangedBytes(from, to, group);
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
        message.exchanged = message.from + message.to;
        break;
      case CommKind::kReduceScatter:
        message.in_order =
            InRankOrder(from.layout, to.layout, group, from.shape);
        break;
      default:
        message.gathers =
            cut == task.axes && (to.layout.sharded() & task.axes) == 0;
        message.in_order =
            InRankOrder(to.layout, from.layout, group, from.shape);
        break;
    }
    if (std::max(message.from, message.to) >= kShareBelowBytes) {
      most = std::max(most, StagedBytes(task.comm, message));
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
    it->second.exchanged += message.exchanged;
    ++it->second.tensors;
  }
  for (const auto& [key, message] : shared) {
    most = std::max(most, StagedBytes(task.comm, message));
  }
  return {most};
}

// What goes of a shard of `own` parts of a dimension to one of `other` parts:
// the extents of the piece and of the shard, each pair once.
std::vector<std::pair<int64_t, int64_t>> PiecesOf(int64_t extent, int64_t own,
                                                  int64_t other) {
  const int64_t finest = std::max(own, other);
  if (extent % finest == 0 && finest % std::min(own, other) == 0) {
    return {{extent / finest, extent / own}};
  }
  std::vector<std::pair<int64_t, int64_t>> pieces;
  for (int64_t i = 0; i < own; ++i) {
    const Range mine = ShardRange(extent, own, i);
    for (int64_t j = 0; j < other; ++j) {
      const Range theirs = ShardRange(extent, other, j);
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
                    const Value& there, const DeviceGroup& peer_group) {
  if (here.layout == there.layout && SameMesh(group, peer_group)) return {};
  std::vector<std::pair<Shape, Shape>> boxes = {{}};  // piece, shard
  for (size_t d = 0; d < here.shape.size(); ++d) {
    std::vector<std::pair<Shape, Shape>> longer;
    for (const auto& [piece, shard] :
         PiecesOf(here.shape[d], group.Size(here.layout.dims[d]),
                  peer_group.Size(there.layout.dims[d]))) {
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
    int64_t elements = 1;
    for (int64_t extent : piece) elements *= extent;
    if (!InOnePiece(piece, shard)) most = std::max(most, elements);
  }
  return {most * SizeOf(here.dtype)};
}

}  // namespace

Bytes StagingBytes(const Task& task, std::span<const Value> values,
                   const DeviceGroup& group, const Value* peer,
                   const DeviceGroup* peer_group) {
  switch (task.kind) {
    case TaskKind::kComm:
      // Whole buffers travel as they are.
      if (task.comm == CommKind::kShift) return {};
      return CollectiveBytes(task, values, group);
    case TaskKind::kSend:
      return TransferBytes(values[task.reads[0].index()], group, *peer,
                           *peer_group);
    case TaskKind::kRecv:
      return TransferBytes(values[task.writes[0].index()], group, *peer,
                           *peer_group);
    default:
      return {};
  }
}

}  // namespace tessera
