#include "profiler/prepared_exchange.h"

#include <cstddef>
#include <numeric>

#include "planner/base/check.h"
#include "profiler/kernel_case.h"

namespace tessera {

bool SharesPayload(CommKind kind) {
  return kind == CommKind::kAllGather || kind == CommKind::kReduceScatter ||
         kind == CommKind::kAllToAll;
}

Result<std::unique_ptr<PreparedExchange>> PreparedExchange::Make(
    const ProfileKey& key, RankDevice& device, CommWorld& world,
    Bytes rotated) {
  std::unique_ptr<PreparedExchange> exchange(new PreparedExchange(device));
  exchange->kind_ = KindOf(key.name);
  const int first = world.world_rank() / key.ranks * key.ranks;
  // Ranks that are left over watch.
  if (first + key.ranks > world.world_size()) return exchange;
  std::vector<int> ranks(static_cast<size_t>(key.ranks));
  std::iota(ranks.begin(), ranks.end(), first);
  TESSERA_TRY(exchange->group_, world.Group(ranks));
  const auto n = static_cast<int64_t>(key.ranks);
  exchange->count_ = key.payload.value / SizeOf(DType::kFloat32);
  const int64_t share = exchange->count_ / n;
  TESSERA_CHECK(share > 0 || !SharesPayload(exchange->kind_))
      << key.payload.value << " bytes for " << key.ranks << " ranks";
  exchange->counts_.assign(ranks.size(), share);
  exchange->bytes_.assign(ranks.size(), share * SizeOf(DType::kFloat32));
  const int64_t one = AlignedBytes(key.payload.value);
  exchange->sets_ = SetsInTurn(rotated, 2 * one);
  const Bytes all_sets = {exchange->sets_ * 2 * one};
  TESSERA_TRY(exchange->memory_,
              device.Allocate(all_sets, MemoryCategory::kCommunication));
  device.Zero(exchange->memory_, all_sets);
  exchange->buffer_bytes_ = one;
  // A shift's go to the rank before and come from the one behind.
  const auto self = static_cast<size_t>(exchange->group_->rank());
  exchange->shift_send_.assign(ranks.size(), 0);
  exchange->shift_receive_.assign(ranks.size(), 0);
  const int64_t all = exchange->count_ * SizeOf(DType::kFloat32);
  exchange->shift_send_[(self + ranks.size() - 1) % ranks.size()] = all;
  exchange->shift_receive_[(self + 1) % ranks.size()] = all;
  return exchange;
}

Result<void> PreparedExchange::Open() {
  if (!takes_part() || kind_ != CommKind::kSendRecv) return {};
  const int64_t bytes = count_ * SizeOf(DType::kFloat32);
  const ChannelEnd ends[] = {kThere, kBack};
  const std::vector<int64_t> sizes[] = {{bytes}, {bytes}};
  return group_->OpenChannels(ends, sizes);
}

PreparedExchange::~PreparedExchange() {
  if (memory_ != nullptr) device_.Free(memory_);
}

Result<void> PreparedExchange::Run() {
  if (group_ == nullptr) return {};
  const auto self = static_cast<size_t>(group_->rank());
  std::byte* const send =
      static_cast<std::byte*>(memory_) + next_ * 2 * buffer_bytes_;
  std::byte* const receive = send + buffer_bytes_;
  next_ = (next_ + 1) % sets_;
  switch (kind_) {
    case CommKind::kAllReduce:
      return group_->AllReduce(send, count_, DType::kFloat32);
    case CommKind::kAllGather:
      return group_->AllGather(send, bytes_[self], receive, bytes_);
    case CommKind::kReduceScatter:
      return group_->ReduceScatter(send, receive, counts_, DType::kFloat32);
    case CommKind::kAllToAll:
      return group_->AllToAll(send, bytes_, receive, bytes_);
    case CommKind::kShift:
      return group_->AllToAll(send, shift_send_, receive, shift_receive_);
    // Never timed: the exchanges with a root are priced analytically.
    case CommKind::kScatter:
    case CommKind::kBroadcast:
    case CommKind::kGather:
    case CommKind::kReduce:
    case CommKind::kRedistribute:
    case CommKind::kSendRecv:
      break;
  }
  // There and back, as stages send: two messages.
  const int64_t bytes = count_ * SizeOf(DType::kFloat32);
  if (self == 0) {
    TESSERA_RETURN_IF_ERROR(group_->SendInTurn(send, bytes, kThere));
    return group_->RecvInTurn(receive, bytes, kBack);
  }
  TESSERA_RETURN_IF_ERROR(group_->RecvInTurn(receive, bytes, kThere));
  return group_->SendInTurn(send, bytes, kBack);
}

CommKind PreparedExchange::KindOf(std::string_view name) {
  for (const CommKind kind : kTimedCollectives) {
    if (NameOf(kind) == name) return kind;
  }
  TESSERA_CHECK(name == NameOf(CommKind::kSendRecv)) << name;
  return CommKind::kSendRecv;
}

}  // namespace tessera
