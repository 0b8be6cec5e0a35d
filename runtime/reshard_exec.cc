#include "runtime/reshard_exec.h"

#include <algorithm>
#include <utility>

#include "planner/base/fnv1a.h"
#include "planner/lower/staging.h"

namespace tessera {
namespace {

std::byte* At(void* data, int64_t offset) {
  return static_cast<std::byte*>(data) + offset;
}
const std::byte* At(const void* data, int64_t offset) {
  return static_cast<const std::byte*>(data) + offset;
}

void RunCopy(RankDevice& device, const BoxCopy& copy, const void* from,
             void* to) {
  device.Copy(At(to, copy.to_offset), At(from, copy.from_offset), copy.strided);
}

int64_t SumOfElements(const std::vector<Placement>& placements) {
  int64_t elements = 0;
  for (const Placement& placement : placements) {
    elements += placement.elements();
  }
  return elements;
}

// Whether the members' placements follow one another within `whole`, in order
// and without gaps: a buffer of the whole is then what a collective wants.
bool InMemberOrder(const std::vector<Placement>& members,
                   const Placement& whole) {
  int64_t next = 0;
  for (const Placement& member : members) {
    if (member.elements() == 0) continue;
    if (ContiguousIn(member, whole) != next) return false;
    next += member.elements();
  }
  return next == whole.elements();
}

// The largest buffer of a part on any member.
int64_t LargestBytes(const CollectivePart& part) {
  int64_t elements = 0;
  for (const auto* side : {&part.from, &part.to}) {
    for (const Placement& placement : *side) {
      elements = std::max(elements, placement.elements());
    }
  }
  return elements * SizeOf(part.dtype);
}

uint64_t HashOf(CommKind kind, std::span<const CollectivePart> parts) {
  Fnv1a hash;
  const auto add = [&hash](auto number) {
    hash.Add(static_cast<uint64_t>(number));
  };
  add(kind);
  for (const CollectivePart& part : parts) {
    add(part.dtype);
    for (const auto* side : {&part.from, &part.to}) {
      for (const Placement& placement : *side) {
        for (const Range& range : placement.block) {
          add(range.begin);
          add(range.end);
        }
        add(placement.run.begin);
        add(placement.run.end);
      }
    }
  }
  return hash.value();
}

}  // namespace

Collective::Collective(CommKind kind, Communicator& group,
                       std::span<const CollectivePart> parts)
    : kind_(kind), group_(group) {
  std::vector<std::pair<std::pair<Route, DType>, std::vector<size_t>>> shared;
  for (size_t i = 0; i < parts.size(); ++i) {
    const CollectivePart& part = parts[i];
    TESSERA_CHECK(static_cast<int>(part.from.size()) == group.size() &&
                  part.from.size() == part.to.size());
    const Route route = RouteOf(part);
    if (LargestBytes(part) >= kShareBelowBytes || route == Route::kShift) {
      AddBatch(parts, route, {i});
      continue;
    }
    const auto key = std::pair(route, part.dtype);
    auto it = std::find_if(shared.begin(), shared.end(),
                           [&](const auto& s) { return s.first == key; });
    if (it == shared.end()) {
      shared.push_back({key, {}});
      it = std::prev(shared.end());
    }
    it->second.push_back(i);
  }
  for (auto& [key, members] : shared) {
    AddBatch(parts, key.first, std::move(members));
  }
}

Collective::Route Collective::RouteOf(const CollectivePart& part) const {
  if (kind_ == CommKind::kAllReduce) {
    for (const Placement& placement : part.to) {
      TESSERA_CHECK(placement == part.from[0]) << "all-reduce moves elements";
    }
    return Route::kAllReduce;
  }
  if (kind_ == CommKind::kShift) {
    for (size_t member = 0; member < part.from.size(); ++member) {
      const size_t next = (member + 1) % part.from.size();
      TESSERA_CHECK(part.to[member] == part.from[next]) << "not a shift";
    }
    return Route::kShift;
  }
  // A reduce scatters everything to the root.
  if (kind_ == CommKind::kReduceScatter || kind_ == CommKind::kReduce) {
    TESSERA_CHECK(SumOfElements(part.to) == part.from[0].elements())
        << SumOfElements(part.to) << " of " << part.from[0].elements();
    return Route::kReduceScatter;
  }
  const bool alike =
      std::all_of(part.to.begin(), part.to.end(),
                  [&](const Placement& p) { return p == part.to[0]; });
  return alike && SumOfElements(part.from) == part.to[0].elements()
             ? Route::kGather
             : Route::kExchange;
}

void Collective::AddBatch(Parts parts, Route route,
                          std::vector<size_t> of_batch) {
  Batch batch;
  batch.route = route;
  batch.dtype = parts[of_batch[0]].dtype;
  batch.parts = std::move(of_batch);
  switch (route) {
    case Route::kAllReduce:
      PlanAllReduce(parts, batch);
      break;
    case Route::kReduceScatter:
      PlanReduceScatter(parts, batch);
      break;
    case Route::kGather:
      PlanGather(parts, batch);
      break;
    case Route::kExchange:
      PlanExchange(parts, batch);
      break;
    case Route::kShift:
      PlanShift(parts, batch);
      break;
  }
  batches_.push_back(std::move(batch));
}

void Collective::PlanAllReduce(Parts parts, Batch& batch) const {
  const int64_t size = SizeOf(batch.dtype);
  batch.stage_send = batch.parts.size() > 1;
  int64_t bytes = 0;
  for (size_t i : batch.parts) {
    const int64_t part_bytes = parts[i].to[0].elements() * size;
    BoxCopy copy;
    copy.strided.run_bytes = part_bytes;
    copy.to_offset = bytes;
    batch.pack.push_back({i, copy});
    std::swap(copy.from_offset, copy.to_offset);
    if (batch.stage_send) batch.unpack.push_back({i, copy});
    bytes += part_bytes;
  }
  batch.sent = bytes;
}

void Collective::PlanReduceScatter(Parts parts, Batch& batch) const {
  const int64_t size = SizeOf(batch.dtype);
  const auto self = static_cast<size_t>(group_.rank());
  const CollectivePart& first = parts[batch.parts[0]];
  const bool several = batch.parts.size() > 1;
  batch.stage_receive = several;
  batch.stage_send = several || !InMemberOrder(first.to, first.from[0]);
  int64_t sent = 0;
  for (size_t member = 0; member < first.to.size(); ++member) {
    const int64_t start = sent;
    for (size_t i : batch.parts) {
      const Placement& piece = parts[i].to[member];
      if (batch.stage_send) {
        for (const Box& box : BoxesOf(piece)) {
          BoxCopy copy = CopyOf(box, parts[i].from[self], piece, size);
          copy.to_offset += sent;
          batch.pack.push_back({i, copy});
        }
      }
      if (batch.stage_receive && member == self) {
        BoxCopy copy;
        copy.strided.run_bytes = piece.elements() * size;
        copy.from_offset = sent - start;
        batch.unpack.push_back({i, copy});
      }
      sent += piece.elements() * size;
    }
    batch.counts.push_back((sent - start) / size);
  }
  batch.sent = sent;
  batch.received = batch.counts[self] * size;
}

void Collective::PlanGather(Parts parts, Batch& batch) const {
  const int64_t size = SizeOf(batch.dtype);
  const auto self = static_cast<size_t>(group_.rank());
  const CollectivePart& first = parts[batch.parts[0]];
  const bool several = batch.parts.size() > 1;
  batch.stage_send = several;
  batch.stage_receive = several || !InMemberOrder(first.from, first.to[self]);
  int64_t received = 0;
  for (size_t member = 0; member < first.from.size(); ++member) {
    const int64_t start = received;
    for (size_t i : batch.parts) {
      const Placement& piece = parts[i].from[member];
      if (batch.stage_send && member == self) {
        BoxCopy copy;
        copy.strided.run_bytes = piece.elements() * size;
        copy.to_offset = received - start;
        batch.pack.push_back({i, copy});
      }
      if (batch.stage_receive) {
        for (const Box& box : BoxesOf(piece)) {
          BoxCopy copy = CopyOf(box, piece, parts[i].to[self], size);
          copy.from_offset += received;
          batch.unpack.push_back({i, copy});
        }
      }
      received += piece.elements() * size;
    }
    batch.receive_bytes.push_back(received - start);
  }
  batch.sent = batch.receive_bytes[self];
  batch.received = received;
}

void Collective::PlanExchange(Parts parts, Batch& batch) const {
  const int64_t size = SizeOf(batch.dtype);
  const int self = group_.rank();
  const auto members = static_cast<size_t>(group_.size());
  batch.stage_send = true;
  batch.stage_receive = true;
  batch.send_bytes.assign(members, 0);
  batch.receive_bytes.assign(members, 0);
  // Its own pieces by peer, each in the order of the parts: what goes there,
  // and what comes from there.
  struct OfPart {
    size_t part = 0;
    std::vector<Box> boxes;
  };
  std::vector<std::vector<OfPart>> sends(members);
  std::vector<std::vector<OfPart>> receives(members);
  for (size_t i : batch.parts) {
    for (const Piece& piece : TransferPieces(parts[i].from, parts[i].to)) {
      if (piece.from == self) {
        sends[static_cast<size_t>(piece.to)].push_back({i, piece.boxes});
      }
      if (piece.to == self) {
        receives[static_cast<size_t>(piece.from)].push_back({i, piece.boxes});
      }
    }
  }
  const auto me = static_cast<size_t>(self);
  int64_t sent = 0;
  int64_t received = 0;
  for (size_t peer = 0; peer < members; ++peer) {
    const int64_t sent_before = sent;
    for (const auto& [i, boxes] : sends[peer]) {
      for (const Box& box : boxes) {
        const Placement packed = WholeBlock(box);
        BoxCopy copy = CopyOf(box, parts[i].from[me], packed, size);
        copy.to_offset += sent;
        batch.pack.push_back({i, copy});
        sent += packed.elements() * size;
      }
    }
    batch.send_bytes[peer] = sent - sent_before;
    const int64_t received_before = received;
    for (const auto& [i, boxes] : receives[peer]) {
      for (const Box& box : boxes) {
        const Placement packed = WholeBlock(box);
        BoxCopy copy = CopyOf(box, packed, parts[i].to[me], size);
        copy.from_offset += received;
        batch.unpack.push_back({i, copy});
        received += packed.elements() * size;
      }
    }
    batch.receive_bytes[peer] = received - received_before;
  }
  batch.sent = sent;
  batch.received = received;
}

// Whole buffers, so that nothing is staged.
void Collective::PlanShift(Parts parts, Batch& batch) const {
  const CollectivePart& part = parts[batch.parts[0]];
  const int64_t size = SizeOf(batch.dtype);
  const size_t members = part.from.size();
  const auto self = static_cast<size_t>(group_.rank());
  batch.sent = part.from[self].elements() * size;
  batch.received = part.to[self].elements() * size;
  batch.send_bytes.assign(members, 0);
  batch.receive_bytes.assign(members, 0);
  batch.send_bytes[(self + members - 1) % members] = batch.sent;
  batch.receive_bytes[(self + 1) % members] = batch.received;
}

Bytes Collective::staging() const {
  Bytes most;
  for (const Batch& batch : batches_) {
    Bytes bytes;
    if (batch.stage_send) bytes += {batch.sent};
    if (batch.stage_receive) bytes += {batch.received};
    most = Max(most, bytes);
  }
  return most;
}

bool Collective::sends() const {
  return std::ranges::any_of(batches_,
                             [](const Batch& batch) { return batch.sent > 0; });
}

Result<void> Collective::Run(RankDevice& device,
                             std::span<const PartBuffers> buffers,
                             void* staging) const {
  for (const Batch& batch : batches_) {
    TESSERA_RETURN_IF_ERROR(
        RunBatch(batch, device, buffers, static_cast<std::byte*>(staging)));
  }
  return {};
}

Result<void> Collective::RunBatch(const Batch& batch, RankDevice& device,
                                  std::span<const PartBuffers> buffers,
                                  std::byte* staging) const {
  const PartBuffers& first = buffers[batch.parts[0]];
  const void* send = first.from;
  void* receive = first.to;
  if (batch.stage_send) {
    for (const PartCopy& pack : batch.pack) {
      RunCopy(device, pack.copy, buffers[pack.part].from, staging);
    }
    send = staging;
  }
  if (batch.route == Route::kAllReduce) {
    if (batch.stage_send) {
      receive = staging;
    } else if (first.from != first.to) {
      RunCopy(device, batch.pack[0].copy, first.from, first.to);
    }
  } else if (batch.stage_receive) {
    receive = staging + (batch.stage_send ? batch.sent : 0);
  }
  TESSERA_RETURN_IF_ERROR(Call(batch, send, receive));
  if (receive != first.to) {
    for (const PartCopy& unpack : batch.unpack) {
      RunCopy(device, unpack.copy, receive, buffers[unpack.part].to);
    }
  }
  return {};
}

Result<void> Collective::Call(const Batch& batch, const void* send,
                              void* receive) const {
  const int64_t size = SizeOf(batch.dtype);
  switch (batch.route) {
    case Route::kAllReduce:
      return group_.AllReduce(receive, batch.sent / size, batch.dtype);
    case Route::kReduceScatter:
      return group_.ReduceScatter(send, receive, batch.counts, batch.dtype);
    case Route::kGather:
      return group_.AllGather(send, batch.sent, receive, batch.receive_bytes);
    case Route::kExchange:
    case Route::kShift:
      return group_.AllToAll(send, batch.send_bytes, receive,
                             batch.receive_bytes);
  }
  return {};
}

std::shared_ptr<const Collective> CollectiveMaker::Make(
    CommKind kind, Communicator& group, std::vector<CollectivePart> parts) {
  const uint64_t hash = HashOf(kind, parts);
  const auto [first, last] = made_.equal_range(hash);
  const auto found = std::find_if(first, last, [&](const auto& entry) {
    const Made& made = entry.second;
    return made.kind == kind && made.group == &group && made.parts == parts;
  });
  if (found != last) return found->second.collective;
  auto collective = std::make_shared<const Collective>(kind, group, parts);
  made_.emplace(hash, Made{kind, &group, std::move(parts), collective});
  return collective;
}

GroupTransfer::GroupTransfer(Communicator& world, DType dtype,
                             std::span<const int> senders,
                             const std::vector<Placement>& from,
                             std::span<const int> receivers,
                             const std::vector<Placement>& to,
                             bool positionwise)
    : world_(world) {
  std::vector<Piece> pieces;
  if (positionwise) {
    TESSERA_CHECK(from == to) << "positions of unlike groups";
    for (size_t i = 0; i < from.size(); ++i) {
      const int position = static_cast<int>(i);
      pieces.push_back({position, position, BoxesOf(from[i])});
    }
  } else {
    pieces = TransferPieces(from, to);
  }
  const int64_t size = SizeOf(dtype);
  const auto message = [&](const Piece& piece, int peer, const Placement& here,
                           bool sending) {
    Message result;
    result.peer = peer;
    for (const Box& box : piece.boxes) {
      const Placement packed = WholeBlock(box);
      BoxCopy copy = sending ? CopyOf(box, here, packed, size)
                             : CopyOf(box, packed, here, size);
      const int64_t in_buffer = sending ? copy.from_offset : copy.to_offset;
      if (result.bytes == 0) {
        result.offset = in_buffer;
      }
      if (copy.strided.dims != 0 ||
          (result.offset >= 0 && in_buffer != result.offset + result.bytes)) {
        result.offset = -1;
      }
      (sending ? copy.to_offset : copy.from_offset) += result.bytes;
      result.bytes += packed.elements() * size;
      result.copies.push_back(copy);
    }
    return result;
  };
  for (const Piece& piece : pieces) {
    const auto source = static_cast<size_t>(piece.from);
    const auto target = static_cast<size_t>(piece.to);
    if (senders[source] == world.rank()) {
      sends_.push_back(
          message(piece, receivers[target], from[source], /*sending=*/true));
    }
    if (receivers[target] == world.rank()) {
      receives_.push_back(
          message(piece, senders[source], to[target], /*sending=*/false));
    }
  }
}

Bytes GroupTransfer::LargestStaged(const std::vector<Message>& messages) {
  Bytes most;
  for (const Message& message : messages) {
    if (message.offset < 0) most = Max(most, {message.bytes});
  }
  return most;
}

void GroupTransfer::AddTo(SizesByEnd& sizes, int channel) const {
  for (const Message& message : sends_) {
    sizes[{channel, world_.rank(), message.peer}].push_back(message.bytes);
  }
  for (const Message& message : receives_) {
    sizes[{channel, message.peer, world_.rank()}].push_back(message.bytes);
  }
}

Result<void> GroupTransfer::Send(RankDevice& device, const void* data, Way way,
                                 void* staging) const {
  for (const Message& message : sends_) {
    const void* from = At(data, message.offset);
    if (message.offset < 0) {
      for (const BoxCopy& copy : message.copies) {
        RunCopy(device, copy, data, staging);
      }
      from = staging;
    }
    TESSERA_RETURN_IF_ERROR(
        way.channel < 0
            ? world_.Send(from, message.bytes, message.peer, way.tag)
            : world_.SendInTurn(from, message.bytes,
                                {way.channel, world_.rank(), message.peer}));
  }
  return {};
}

Result<void> GroupTransfer::Receive(RankDevice& device, void* data, Way way,
                                    void* staging) const {
  for (const Message& message : receives_) {
    const bool staged = message.offset < 0;
    void* const to = staged ? staging : At(data, message.offset);
    TESSERA_RETURN_IF_ERROR(
        way.channel < 0
            ? world_.Recv(to, message.bytes, message.peer, way.tag)
            : world_.RecvInTurn(to, message.bytes,
                                {way.channel, message.peer, world_.rank()}));
    if (!staged) continue;
    for (const BoxCopy& copy : message.copies) {
      RunCopy(device, copy, staging, data);
    }
  }
  return {};
}

}  // namespace tessera
