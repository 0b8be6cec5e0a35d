#include "runtime/comm/arguments.h"

#include <vector>

#include "runtime/comm/text.h"

namespace tessera {
namespace {

Result<void> CheckPeer(std::string_view verb, int64_t bytes,
                       std::string_view direction, int peer, int size) {
  if (peer >= 0 && peer < size && bytes >= 0) return {};
  return InvalidInput(Text("cannot ", verb, " ", bytes, " bytes ", direction,
                           " rank ", peer, " of a group of ", size));
}

}  // namespace

Result<void> CheckGroup(std::span<const int> ranks, int world_rank,
                        int world_size) {
  std::vector<bool> seen(static_cast<size_t>(world_size), false);
  for (int rank : ranks) {
    if (rank < 0 || rank >= world_size) {
      return InvalidInput(Text("rank ", rank,
                               " of a group is not among the job's ",
                               world_size, " ranks"));
    }
    if (seen[static_cast<size_t>(rank)]) {
      return InvalidInput(Text("rank ", rank, " is twice in a group"));
    }
    seen[static_cast<size_t>(rank)] = true;
  }
  if (seen[static_cast<size_t>(world_rank)]) return {};
  return InvalidInput(
      Text("rank ", world_rank, " asks for a group that it is not in"));
}

Result<void> CheckCount(int64_t count) {
  if (count >= 0) return {};
  return InvalidInput(Text("negative count ", count));
}

Result<void> CheckLengths(std::span<const int64_t> lengths, int size) {
  if (static_cast<int>(lengths.size()) != size) {
    return InvalidInput(
        Text("got ", lengths.size(), " sizes for a group of ", size));
  }
  for (int64_t length : lengths) {
    if (length < 0) return InvalidInput(Text("negative size ", length));
  }
  return {};
}

Result<void> CheckGather(int64_t send_bytes,
                         std::span<const int64_t> bytes_per_rank, int rank,
                         int size) {
  TESSERA_RETURN_IF_ERROR(CheckLengths(bytes_per_rank, size));
  const int64_t mine = bytes_per_rank[static_cast<size_t>(rank)];
  if (send_bytes == mine) return {};
  return InvalidInput(
      Text("sends ", send_bytes, " bytes, but expects ", mine, " from itself"));
}

Result<void> CheckExchange(std::span<const int64_t> send_bytes,
                           std::span<const int64_t> recv_bytes, int rank,
                           int size) {
  TESSERA_RETURN_IF_ERROR(CheckLengths(send_bytes, size));
  TESSERA_RETURN_IF_ERROR(CheckLengths(recv_bytes, size));
  const auto me = static_cast<size_t>(rank);
  if (send_bytes[me] == recv_bytes[me]) return {};
  return InvalidInput(Text("sends ", send_bytes[me],
                           " bytes to itself, but expects ", recv_bytes[me]));
}

Result<void> CheckBroadcast(int64_t bytes, int root, int size) {
  return CheckPeer("send", bytes, "from", root, size);
}

Result<void> CheckSend(int64_t bytes, int peer, int size) {
  return CheckPeer("send", bytes, "to", peer, size);
}

Result<void> CheckRecv(int64_t bytes, int peer, int size) {
  return CheckPeer("receive", bytes, "from", peer, size);
}

}  // namespace tessera
