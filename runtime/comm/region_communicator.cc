#include <algorithm>
#include <cstddef>
#include <type_traits>
#include <utility>

#include "planner/base/check.h"
#include "planner/base/divide.h"
#include "planner/base/fnv1a.h"
#include "runtime/comm/arguments.h"
#include "runtime/comm/copy.h"
#include "runtime/comm/parts.h"
#include "runtime/comm/peer_errors.h"
#include "runtime/comm/reduce.h"
#include "runtime/comm/region_world.h"
#include "runtime/comm/text.h"

namespace tessera {
namespace {

// Sums of at most this many bytes are formed by every rank for itself, in one
// round: below, a wait costs more than the repeated additions.
constexpr int64_t kAtOnceBytes = 16 << 10;

const char* NameOf(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::kAllReduce:
      return "all-reduce";
    case CollectiveKind::kAllGather:
      return "all-gather";
    case CollectiveKind::kReduceScatter:
      return "reduce-scatter";
    case CollectiveKind::kAllToAll:
      return "all-to-all";
    case CollectiveKind::kBroadcast:
      return "broadcast";
    case CollectiveKind::kBarrier:
      return "barrier";
  }
  return "unknown operation";
}

// Whether results of `bytes` in all should go past the cache. What a core's
// second-level cache (256 KiB at least on current CPUs) holds, the user may
// find there.
bool IsLarge(int64_t bytes) {
  return bytes > (256 << 10);
}

// Into the user's memory, by an operation that writes `total` bytes there.
void CopyOut(void* to, const void* from, int64_t bytes, int64_t total) {
  if (IsLarge(total)) {
    CopyPastCache(to, from, bytes);
  } else {
    CopyToCache(to, from, bytes);
  }
}

int64_t Rounds(int64_t bytes, int64_t bytes_per_round) {
  return std::max<int64_t>(1, DivideUp(bytes, bytes_per_round));
}

// [0, extent) cut into pieces of `step`: where piece i begins, and its length.
struct Piece {
  int64_t begin;
  int64_t length;
};
Piece PieceOf(int64_t extent, int64_t step, int64_t i) {
  const int64_t begin = std::min(i * step, extent);
  return {begin, std::min(step, extent - begin)};
}

int64_t Largest(std::span<const int64_t> lengths) {
  return *std::max_element(lengths.begin(), lengths.end());
}

}  // namespace

RegionCommunicator::RegionCommunicator(RegionWorld& world,
                                       std::vector<int> ranks, int channel)
    : world_(world), ranks_(std::move(ranks)), channels_(ranks_.size(), -1) {
  group_ = Fnv1a().AddAll(ranks_).value() | 1;  // 0 is an unused channel
  rank_ = static_cast<int>(
      std::find(ranks_.begin(), ranks_.end(), world_.rank_) - ranks_.begin());
  channels_[static_cast<size_t>(rank_)] = channel;
  // Published, and then those told who joined before: of two members at least
  // one finds the other, and tells it.
  this->channel(rank_).group.store(group_);
  for (int r = 0; r < size(); ++r) {
    if (FindChannel(r)) Ring(this->channel(r).bell);
  }
}

Channel& RegionCommunicator::channel(int rank) const {
  const int number = channels_[static_cast<size_t>(rank)];
  TESSERA_CHECK(number >= 0) << rank;
  return world_.region_->inbox(Global(rank)).channels[number];
}

std::byte* RegionCommunicator::send_half(int rank, int64_t round) const {
  return world_.region_->send_half(Global(rank),
                                   channels_[static_cast<size_t>(rank)], round);
}

std::byte* RegionCommunicator::result_half(int rank, int64_t round) const {
  return world_.region_->result_half(
      Global(rank), channels_[static_cast<size_t>(rank)], round);
}

bool RegionCommunicator::FindChannel(int rank) {
  int& number = channels_[static_cast<size_t>(rank)];
  if (number >= 0) return true;
  Inbox& inbox = world_.region_->inbox(Global(rank));
  for (int c = 0; c < kMaxChannels; ++c) {
    const uint64_t group = inbox.channels[c].group.load();
    if (group == 0) return false;
    if (group != group_) continue;
    number = c;
    return true;
  }
  return false;
}

bool RegionCommunicator::HasSignalled(int rank) {
  return rank == rank_ ||
         (FindChannel(rank) && channel(rank_).signals[Global(rank)].load(
                                   std::memory_order_acquire) >= signals_);
}

// Until all have joined and have signalled as often as this rank.
Result<void> RegionCommunicator::WaitForPeers() {
  return world_.Wait(
      channel(rank_).bell,
      [&] {
        for (int r = 0; r < size(); ++r) {
          if (!HasSignalled(r)) return false;
        }
        return true;
      },
      [&](int world_rank) {
        const auto at = std::find(ranks_.begin(), ranks_.end(), world_rank);
        return at != ranks_.end() &&
               !HasSignalled(static_cast<int>(at - ranks_.begin()));
      });
}

// REQUIRES: all peers have joined.
void RegionCommunicator::SignalPeers() {
  ++signals_;
  for (int r = 0; r < size(); ++r) {
    if (r == rank_) continue;
    channel(r).signals[world_.rank_].store(signals_, std::memory_order_release);
    Ring(channel(r).bell);
  }
}

Error RegionCommunicator::Here(Error error, std::string_view operation) const {
  return error.At(Text("rank ", world_.rank_, ", ", operation, " of group ",
                       GroupText(ranks_)));
}

// The part of a half that is staged for one rank of the group. Multiples of a
// cache line, so that ranks do not share lines and elements stay aligned.
int64_t RegionCommunicator::SlotBytes() const {
  constexpr auto kLine = static_cast<int64_t>(kCacheLine);
  return world_.region_->half_bytes() / std::max(2, size()) / kLine * kLine;
}

CollectiveHeader RegionCommunicator::Header(CollectiveKind kind, int64_t bytes,
                                            int64_t bytes_per_round) const {
  CollectiveHeader header;
  header.kind = kind;
  header.detail = static_cast<uint64_t>(bytes);
  header.bytes = bytes;
  header.rounds = Rounds(bytes, bytes_per_round);
  return header;
}

Result<void> RegionCommunicator::CheckHeaders(const CollectiveHeader& mine,
                                              int64_t& rounds) {
  for (int r = 0; r < size(); ++r) {
    const CollectiveHeader& theirs = channel(r).collective;
    rounds = std::max(rounds, theirs.rounds);
    if (theirs.kind == mine.kind && theirs.detail == mine.detail) continue;
    return world_.Fail(
        CallsDiffer(world_.rank_, {NameOf(mine.kind), mine.bytes}, Global(r),
                    {NameOf(theirs.kind), theirs.bytes}, ranks_));
  }
  return {};
}

template <typename Stage, typename Consume>
Result<void> RegionCommunicator::RunRounds(CollectiveHeader header, Stage stage,
                                           Consume consume) {
  const auto run = [&]() -> Result<void> {
    TESSERA_RETURN_IF_ERROR(world_.CheckUsable());
    // A peer may still be reading what the last collective staged.
    TESSERA_RETURN_IF_ERROR(WaitForPeers());
    channel(rank_).collective = header;
    int64_t rounds = header.rounds;
    for (int64_t i = 0; i < rounds; ++i) {
      stage(i);
      SignalPeers();
      TESSERA_RETURN_IF_ERROR(WaitForPeers());
      if (i == 0) {
        TESSERA_RETURN_IF_ERROR(CheckHeaders(header, rounds));
      }
      if constexpr (std::is_same_v<decltype(consume(i)), Result<void>>) {
        TESSERA_RETURN_IF_ERROR(consume(i));
      } else {
        consume(i);
      }
    }
    SignalPeers();
    return {};
  };
  if (Result<void> result = run(); !result) {
    return Here(result.error(), NameOf(header.kind));
  }
  return {};
}

Result<void> RegionCommunicator::AllReduce(void* data, int64_t count,
                                           DType dtype) {
  if (auto valid = CheckCount(count); !valid) {
    return Here(valid.error(), "all-reduce");
  }
  if (size() == 1) return world_.CheckUsable();
  auto* bytes = static_cast<std::byte*>(data);
  const int64_t limit = std::min(kAtOnceBytes, world_.region_->half_bytes());
  return count * SizeOf(dtype) <= limit
             ? AllReduceAtOnce(bytes, count, dtype)
             : AllReduceInSlices(bytes, count, dtype);
}

Result<void> RegionCommunicator::AllReduceAtOnce(std::byte* data, int64_t count,
                                                 DType dtype) {
  const int64_t bytes = count * SizeOf(dtype);
  CollectiveHeader header =
      Header(CollectiveKind::kAllReduce, bytes, bytes + 1);
  header.detail = Fnv1a().Add(header.detail).Add(uint64_t(dtype)).value();
  return RunRounds(
      header, [&](int64_t) { CopyToCache(send_half(rank_, 0), data, bytes); },
      [&](int64_t) {
        std::vector<const std::byte*> sources;
        for (int r = 0; r < size(); ++r) {
          sources.push_back(send_half(r, 0));
        }
        SumInOrder(sources, data, nullptr, count, dtype, IsLarge(bytes));
      });
}

// Every round sums up to a slot per rank: each rank sums one slice of the
// round and publishes it. Round i stages its slices and, with them, the sums
// of the slices of round i - 1; hence one round more than slices.
Result<void> RegionCommunicator::AllReduceInSlices(std::byte* data,
                                                   int64_t count, DType dtype) {
  const int64_t element = SizeOf(dtype);
  const int64_t per_round = SlotBytes() / element * size();
  CollectiveHeader header =
      Header(CollectiveKind::kAllReduce, count * element, per_round * element);
  header.detail = Fnv1a().Add(header.detail).Add(uint64_t(dtype)).value();
  header.rounds += 1;
  // The elements of rank r's slice of round i.
  const auto slice = [&](int64_t i, int r) -> Piece {
    const Piece round = PieceOf(count, per_round, i);
    const int64_t begin = round.length * r / size();
    const int64_t end = round.length * (r + 1) / size();
    return {round.begin + begin, end - begin};
  };
  const int64_t slot = SlotBytes();
  return RunRounds(
      header,
      [&](int64_t i) {
        for (int r = 0; r < size() && i + 1 < header.rounds; ++r) {
          if (r == rank_) continue;
          const Piece piece = slice(i, r);
          CopyToCache(send_half(rank_, i) + r * slot,
                      data + piece.begin * element, piece.length * element);
        }
        if (i == 0) return;
        const Piece mine = slice(i - 1, rank_);
        std::byte* const place = data + mine.begin * element;
        std::vector<const std::byte*> sources;
        for (int r = 0; r < size(); ++r) {
          sources.push_back(r == rank_ ? place
                                       : send_half(r, i - 1) + rank_ * slot);
        }
        SumInOrder(sources, place, result_half(rank_, i - 1), mine.length,
                   dtype, IsLarge(count * element));
      },
      [&](int64_t i) {
        if (i == 0) return;
        for (int r = 0; r < size(); ++r) {
          if (r == rank_) continue;
          const Piece piece = slice(i - 1, r);
          CopyOut(data + piece.begin * element, result_half(r, i - 1),
                  piece.length * element, count * element);
        }
      });
}

Result<void> RegionCommunicator::AllGather(
    const void* send, int64_t send_bytes, void* recv,
    std::span<const int64_t> bytes_per_rank) {
  if (auto valid = CheckGather(send_bytes, bytes_per_rank, rank_, size());
      !valid) {
    return Here(valid.error(), "all-gather");
  }
  const std::vector<int64_t> offsets = Offsets(bytes_per_rank);
  const int64_t per_round = world_.region_->half_bytes();
  CollectiveHeader header =
      Header(CollectiveKind::kAllGather, offsets.back(), per_round);
  header.detail = Fnv1a().AddAll(bytes_per_rank).value();
  header.rounds = Rounds(Largest(bytes_per_rank), per_round);
  const auto* const from = static_cast<const std::byte*>(send);
  auto* const to = static_cast<std::byte*>(recv);
  CopyOut(to + offsets[static_cast<size_t>(rank_)], from, send_bytes,
          header.bytes);
  return RunRounds(
      header,
      [&](int64_t i) {
        if (size() == 1) return;
        const Piece piece = PieceOf(send_bytes, per_round, i);
        CopyToCache(send_half(rank_, i), from + piece.begin, piece.length);
      },
      [&](int64_t i) {
        for (int r = 0; r < size(); ++r) {
          if (r == rank_) continue;
          const auto index = static_cast<size_t>(r);
          const Piece piece = PieceOf(bytes_per_rank[index], per_round, i);
          CopyOut(to + offsets[index] + piece.begin, send_half(r, i),
                  piece.length, header.bytes);
        }
      });
}

Result<void> RegionCommunicator::ReduceScatter(
    const void* send, void* recv, std::span<const int64_t> counts_per_rank,
    DType dtype) {
  if (auto valid = CheckLengths(counts_per_rank, size()); !valid) {
    return Here(valid.error(), "reduce-scatter");
  }
  const std::vector<int64_t> offsets = Offsets(counts_per_rank);
  const int64_t element = SizeOf(dtype);
  const int64_t slot = SlotBytes();
  const int64_t per_round = slot / element;
  CollectiveHeader header =
      Header(CollectiveKind::kReduceScatter, offsets.back() * element, slot);
  header.detail =
      Fnv1a().AddAll(counts_per_rank).Add(static_cast<uint64_t>(dtype)).value();
  header.rounds = Rounds(Largest(counts_per_rank), per_round);
  const auto* const from = static_cast<const std::byte*>(send);
  auto* const to = static_cast<std::byte*>(recv);
  // The piece of rank r's part that is summed in round i, in elements of send.
  const auto piece_of = [&](int64_t i, int r) -> Piece {
    const auto index = static_cast<size_t>(r);
    const Piece piece = PieceOf(counts_per_rank[index], per_round, i);
    return {offsets[index] + piece.begin, piece.length};
  };
  return RunRounds(
      header,
      [&](int64_t i) {
        for (int r = 0; r < size(); ++r) {
          if (r == rank_) continue;
          const Piece piece = piece_of(i, r);
          CopyToCache(send_half(rank_, i) + r * slot,
                      from + piece.begin * element, piece.length * element);
        }
      },
      [&](int64_t i) {
        const Piece mine = piece_of(i, rank_);
        std::vector<const std::byte*> sources;
        for (int r = 0; r < size(); ++r) {
          sources.push_back(r == rank_ ? from + mine.begin * element
                                       : send_half(r, i) + rank_ * slot);
        }
        SumInOrder(sources, to + i * per_round * element, nullptr, mine.length,
                   dtype, IsLarge(offsets.back() * element));
      });
}

RegionCommunicator::Slot RegionCommunicator::StagedFor(const int64_t* sizes,
                                                       int from, int to) const {
  int receivers = 0;
  int before = 0;
  for (int r = 0; r < size(); ++r) {
    if (r == from || sizes[r] == 0) continue;
    ++receivers;
    before += r < to ? 1 : 0;
  }
  constexpr auto kLine = static_cast<int64_t>(kCacheLine);
  const int64_t slot =
      world_.region_->half_bytes() / std::max(1, receivers) / kLine * kLine;
  return {before * slot, slot};
}

Result<void> RegionCommunicator::AllToAll(const void* send,
                                          std::span<const int64_t> send_bytes,
                                          void* recv,
                                          std::span<const int64_t> recv_bytes) {
  if (auto valid = CheckExchange(send_bytes, recv_bytes, rank_, size());
      !valid) {
    return Here(valid.error(), "all-to-all");
  }
  const auto me = static_cast<size_t>(rank_);
  const std::vector<int64_t> send_offsets = Offsets(send_bytes);
  const std::vector<int64_t> recv_offsets = Offsets(recv_bytes);
  // Of what it keeps itself nothing is staged.
  std::vector<int64_t> staged(send_bytes.begin(), send_bytes.end());
  staged[me] = 0;
  const int64_t slot = StagedFor(send_bytes.data(), rank_, 0).bytes;
  CollectiveHeader header =
      Header(CollectiveKind::kAllToAll, send_offsets.back(), slot);
  header.detail = 0;  // ranks may differ; sizes are compared pair by pair
  header.rounds = Rounds(Largest(staged), slot);
  const auto* const from = static_cast<const std::byte*>(send);
  auto* const to = static_cast<std::byte*>(recv);
  CopyOut(to + recv_offsets[me], from + send_offsets[me], send_bytes[me],
          recv_offsets.back());
  return RunRounds(
      header,
      [&](int64_t i) {
        if (i == 0) {
          std::copy(send_bytes.begin(), send_bytes.end(), channel(rank_).sizes);
        }
        for (int r = 0; r < size(); ++r) {
          const auto index = static_cast<size_t>(r);
          const Piece piece = PieceOf(staged[index], slot, i);
          if (piece.length == 0) continue;
          CopyToCache(send_half(rank_, i) +
                          StagedFor(send_bytes.data(), rank_, r).begin,
                      from + send_offsets[index] + piece.begin, piece.length);
        }
      },
      [&](int64_t i) -> Result<void> {
        for (int r = 0; r < size(); ++r) {
          if (r == rank_) continue;
          const auto index = static_cast<size_t>(r);
          const int64_t* const sizes = channel(r).sizes;
          if (i == 0 && sizes[rank_] != recv_bytes[index]) {
            return world_.Fail(PartsDiffer(Global(r), sizes[rank_],
                                           world_.rank_, recv_bytes[index]));
          }
          if (recv_bytes[index] == 0) continue;
          const Slot theirs = StagedFor(sizes, r, rank_);
          const Piece piece = PieceOf(recv_bytes[index], theirs.bytes, i);
          CopyOut(to + recv_offsets[index] + piece.begin,
                  send_half(r, i) + theirs.begin, piece.length,
                  recv_offsets.back());
        }
        return {};
      });
}

Result<void> RegionCommunicator::Broadcast(void* data, int64_t bytes,
                                           int root) {
  if (auto valid = CheckBroadcast(bytes, root, size()); !valid) {
    return Here(valid.error(), "broadcast");
  }
  const int64_t per_round = world_.region_->half_bytes();
  CollectiveHeader header =
      Header(CollectiveKind::kBroadcast, bytes, per_round);
  header.detail =
      Fnv1a().Add(header.detail).Add(static_cast<uint64_t>(root)).value();
  auto* const place = static_cast<std::byte*>(data);
  return RunRounds(
      header,
      [&](int64_t i) {
        if (rank_ != root || size() == 1) return;
        const Piece piece = PieceOf(bytes, per_round, i);
        CopyToCache(send_half(rank_, i), place + piece.begin, piece.length);
      },
      [&](int64_t i) {
        if (rank_ == root) return;
        const Piece piece = PieceOf(bytes, per_round, i);
        CopyOut(place + piece.begin, send_half(root, i), piece.length, bytes);
      });
}

Result<void> RegionCommunicator::Barrier() {
  return RunRounds(
      Header(CollectiveKind::kBarrier, 0, 1), [](int64_t) {}, [](int64_t) {});
}

Result<void> RegionCommunicator::Send(const void* data, int64_t bytes, int peer,
                                      uint64_t tag) {
  if (auto valid = CheckSend(bytes, peer, size()); !valid) {
    return Here(valid.error(), "send");
  }
  if (auto usable = world_.CheckUsable(); !usable) {
    return Here(usable.error(), "send");
  }
  const auto* const from = static_cast<const std::byte*>(data);
  const int to = Global(peer);
  const std::lock_guard lock(world_.mail_mutex_);
  RegionWorld::Peer& state = world_.peers_[static_cast<size_t>(to)];
  if (peer == rank_) {
    RegionWorld::Message message{group_, tag, bytes, bytes, nullptr, {}};
    message.buffer =
        std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(bytes));
    message.data = message.buffer.get();
    CopyToCache(message.data, from, bytes);
    state.messages.push_back(std::move(message));
    Ring(world_.region_->inbox(to).mail);
    return {};
  }
  const RegionWorld::MessageHeader header = {group_, tag, bytes};
  const auto* const head = reinterpret_cast<const std::byte*>(&header);
  constexpr auto kHeaderBytes = static_cast<int64_t>(sizeof(header));
  int64_t head_written = 0;
  int64_t written = 0;
  world_.PushQueue(to);
  if (state.queue.empty()) {
    head_written = world_.WriteRing(to, head, kHeaderBytes);
    if (head_written == kHeaderBytes) {
      written = world_.WriteRing(to, from, bytes);
    }
  }
  if (head_written == kHeaderBytes && written == bytes) return {};
  RegionWorld::Outgoing rest;
  rest.bytes.assign(head + head_written, head + kHeaderBytes);
  if (bytes > written) {
    rest.bytes.insert(rest.bytes.end(), from + written, from + bytes);
  }
  state.queue.push_back(std::move(rest));
  world_.region_->ring(world_.rank_, to).backlog.store(1);
  // The peer's courier has to make room, and then the own one to go on; or it
  // has made some meanwhile.
  Ring(world_.region_->inbox(to).courier);
  Ring(world_.region_->inbox(world_.rank_).courier);
  return {};
}

Result<void> RegionCommunicator::Recv(void* data, int64_t bytes, int peer,
                                      uint64_t tag) {
  if (auto valid = CheckRecv(bytes, peer, size()); !valid) {
    return Here(valid.error(), "receive");
  }
  if (auto usable = world_.CheckUsable(); !usable) {
    return Here(usable.error(), "receive");
  }
  const int from = Global(peer);
  auto& messages = world_.peers_[static_cast<size_t>(from)].messages;
  auto* const place = static_cast<std::byte*>(data);
  RegionWorld::PostedRecv post = {from, group_, tag, bytes,
                                  bytes > 0 ? place : nullptr};
  const auto find = [&] {
    return std::find_if(messages.begin(), messages.end(), [&](const auto& m) {
      return m.group == group_ && m.tag == tag;
    });
  };
  auto found = messages.end();
  const auto ready = [&] {
    const std::lock_guard lock(world_.mail_mutex_);
    if (peer != rank_) world_.DrainRing(from);
    if (found == messages.end()) found = find();
    return found != messages.end() &&
           (found->filled == found->bytes || found->bytes != bytes);
  };
  {
    // What has begun to arrive comes before what a post would take.
    const std::lock_guard lock(world_.mail_mutex_);
    found = find();
    if (found == messages.end()) world_.posted_.push_back(&post);
  }
  Result<void> result =
      world_.Wait(world_.region_->inbox(world_.rank_).mail, ready,
                  [&](int r) { return r == from && r != world_.rank_; });
  const std::lock_guard lock(world_.mail_mutex_);
  world_.posted_.remove(&post);
  if (!result) return Here(result.error(), "receive");
  if (found->bytes != bytes) {
    return Here(MessageSizesDiffer(from, found->bytes, tag, bytes), "receive");
  }
  if (found->buffer != nullptr) CopyToCache(place, found->buffer.get(), bytes);
  messages.erase(found);
  return {};
}

}  // namespace tessera
