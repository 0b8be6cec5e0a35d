#pragma once
// Checks of what worlds and communicators are called with (communicator.h):
// kInvalidInput where the arguments alone are wrong. `rank` and `size` are this
// rank's in the group, and the group's.

#include <cstdint>
#include <span>

#include "planner/base/result.h"

namespace tessera {

// Of CommWorld::Group, with this rank's number in the job and the job's size.
Result<void> CheckGroup(std::span<const int> ranks, int world_rank,
                        int world_size);

// Of AllReduce.
Result<void> CheckCount(int64_t count);

// There are `size` lengths, none negative.
Result<void> CheckLengths(std::span<const int64_t> lengths, int size);

// Of AllGather.
Result<void> CheckGather(int64_t send_bytes,
                         std::span<const int64_t> bytes_per_rank, int rank,
                         int size);

// Of AllToAll: a rank's part for itself has one length.
Result<void> CheckExchange(std::span<const int64_t> send_bytes,
                           std::span<const int64_t> recv_bytes, int rank,
                           int size);

Result<void> CheckBroadcast(int64_t bytes, int root, int size);
Result<void> CheckSend(int64_t bytes, int peer, int size);
Result<void> CheckRecv(int64_t bytes, int peer, int size);

}  // namespace tessera
