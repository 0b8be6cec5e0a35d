#include "runtime/comm/nccl_communicator.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include "runtime/comm/arguments.h"
#include "runtime/comm/nccl_calls.h"
#include "runtime/comm/parts.h"
#include "runtime/comm/peer_errors.h"
#include "runtime/comm/text.h"

namespace tessera {
namespace {

bool AllEqual(std::span<const int64_t> lengths) {
  return std::all_of(lengths.begin(), lengths.end(),
                     [&](int64_t length) { return length == lengths[0]; });
}

}  // namespace

// ---- Collectives ------------------------------------------------------------

Error NcclCommunicator::Here(const Error& error,
                             std::string_view operation) const {
  return job_.AtThisRank(error, Text(TaskText(job_.task()), ", ", operation,
                                     " of group ", GroupText(ranks_)));
}

Result<void> NcclCommunicator::EnqueueOn(ncclComm_t comm,
                                         std::string_view operation,
                                         int64_t bytes, const Issue& issue) {
  if (auto usable = job_.CheckUsable(); !usable) {
    return Here(usable.error(), operation);
  }
  const auto run = [&]() -> Result<void> {
    TESSERA_RETURN_IF_ERROR(job_.device().Select());
    TESSERA_RETURN_IF_ERROR(NcclOk(ncclGroupStart(), comm, "ncclGroupStart"));
    const ncclResult_t issued = issue(job_.device().queue());
    const ncclResult_t ended = ncclGroupEnd();
    TESSERA_RETURN_IF_ERROR(NcclOk(issued, comm, "issue"));
    TESSERA_RETURN_IF_ERROR(NcclOk(ended, comm, "ncclGroupEnd"));
    TESSERA_RETURN_IF_ERROR(job_.Settle(comm, "its peers"));
    return job_.AddInFlight(
        comm,
        Text("rank ", job_.rank(), ", ", TaskText(job_.task()), ", ", operation,
             " of ", bytes, " bytes of group ", GroupText(ranks_)));
  };
  if (auto done = run(); !done) {
    const Error failure = job_.Fail(done.error());
    // Where an operation before this one is to blame, it is named already.
    return done.error().where.empty() ? Here(failure, operation) : done.error();
  }
  return {};
}

Result<void> NcclCommunicator::AllReduce(void* data, int64_t count,
                                         DType dtype) {
  if (auto valid = CheckCount(count); !valid) {
    return Here(valid.error(), "all-reduce");
  }
  if (count == 0) return {};
  return Enqueue("all-reduce", count * SizeOf(dtype), [&](cudaStream_t queue) {
    return ncclAllReduce(data, data, static_cast<size_t>(count),
                         NcclType(dtype), ncclSum, comm_, queue);
  });
}

// Ragged parts are broadcast, all at once.
Result<void> NcclCommunicator::AllGather(
    const void* send, int64_t send_bytes, void* recv,
    std::span<const int64_t> bytes_per_rank) {
  if (auto valid = CheckGather(send_bytes, bytes_per_rank, rank_, size());
      !valid) {
    return Here(valid.error(), "all-gather");
  }
  const std::vector<int64_t> offsets = Offsets(bytes_per_rank);
  if (offsets.back() == 0) return {};
  auto* const to = static_cast<std::byte*>(recv);
  return Enqueue("all-gather", offsets.back(), [&](cudaStream_t queue) {
    if (AllEqual(bytes_per_rank)) {
      return ncclAllGather(send, recv, static_cast<size_t>(send_bytes),
                           ncclUint8, comm_, queue);
    }
    return ForEachRank(size(), [&](int root, size_t r) {
      if (bytes_per_rank[r] == 0) return ncclSuccess;
      std::byte* const part = to + offsets[r];
      return ncclBroadcast(root == rank_ ? send : part, part,
                           static_cast<size_t>(bytes_per_rank[r]), ncclUint8,
                           root, comm_, queue);
    });
  });
}

// Ragged parts are reduced, all at once, each to its rank.
Result<void> NcclCommunicator::ReduceScatter(
    const void* send, void* recv, std::span<const int64_t> counts_per_rank,
    DType dtype) {
  if (auto valid = CheckLengths(counts_per_rank, size()); !valid) {
    return Here(valid.error(), "reduce-scatter");
  }
  const std::vector<int64_t> offsets = Offsets(counts_per_rank);
  if (offsets.back() == 0) return {};
  const int64_t element = SizeOf(dtype);
  const auto* const from = static_cast<const std::byte*>(send);
  return Enqueue(
      "reduce-scatter", offsets.back() * element, [&](cudaStream_t queue) {
        if (AllEqual(counts_per_rank)) {
          return ncclReduceScatter(send, recv,
                                   static_cast<size_t>(counts_per_rank[0]),
                                   NcclType(dtype), ncclSum, comm_, queue);
        }
        return ForEachRank(size(), [&](int root, size_t r) {
          if (counts_per_rank[r] == 0) return ncclSuccess;
          return ncclReduce(from + offsets[r] * element,
                            root == rank_ ? recv : nullptr,
                            static_cast<size_t>(counts_per_rank[r]),
                            NcclType(dtype), ncclSum, root, comm_, queue);
        });
      });
}

Result<void> NcclCommunicator::AllToAll(const void* send,
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
  const auto* const from = static_cast<const std::byte*>(send);
  auto* const to = static_cast<std::byte*>(recv);
  if (auto usable = job_.CheckUsable(); !usable) {
    return Here(usable.error(), "all-to-all");
  }
  if (send_bytes[me] > 0) {
    job_.device().Copy(to + recv_offsets[me], from + send_offsets[me],
                       {.run_bytes = send_bytes[me]});
  }
  // A rank with nothing to exchange has no part in it; who has something to
  // exchange with it knows that.
  if (send_offsets.back() + recv_offsets.back() == 2 * send_bytes[me]) {
    return {};
  }
  return Enqueue("all-to-all", send_offsets.back(), [&](cudaStream_t queue) {
    return ForEachRank(size(), [&](int peer, size_t r) {
      if (peer == rank_) return ncclSuccess;
      if (send_bytes[r] > 0) {
        const ncclResult_t sent =
            ncclSend(from + send_offsets[r], static_cast<size_t>(send_bytes[r]),
                     ncclUint8, peer, comm_, queue);
        if (sent != ncclSuccess && sent != ncclInProgress) return sent;
      }
      if (recv_bytes[r] == 0) return ncclSuccess;
      return ncclRecv(to + recv_offsets[r], static_cast<size_t>(recv_bytes[r]),
                      ncclUint8, peer, comm_, queue);
    });
  });
}

Result<void> NcclCommunicator::Broadcast(void* data, int64_t bytes, int root) {
  if (auto valid = CheckBroadcast(bytes, root, size()); !valid) {
    return Here(valid.error(), "broadcast");
  }
  if (bytes == 0) return {};
  return Enqueue("broadcast", bytes, [&](cudaStream_t queue) {
    return ncclBroadcast(data, data, static_cast<size_t>(bytes), ncclUint8,
                         root, comm_, queue);
  });
}

// An all-reduce of one number that is waited for.
Result<void> NcclCommunicator::Barrier() {
  TESSERA_TRY(void* const number,
              job_.device().Allocate({4}, MemoryCategory::kCommunication));
  Result<void> done = Enqueue("barrier", 4, [&](cudaStream_t queue) {
    return ncclAllReduce(number, number, 1, ncclInt32, ncclSum, comm_, queue);
  });
  if (done) done = job_.Flush();
  job_.device().Free(number);
  return done;
}

// ---- Messages in turn -------------------------------------------------------

// A message of eight bytes connects the two GPUs, which NCCL does at the first
// message, when both sides are at it; and tells the receiver the sender's
// sizes.
Result<void> NcclCommunicator::OpenChannel(const ChannelEnd& end,
                                           std::span<const int64_t> sizes) {
  const bool sends = end.from == job_.rank();
  const int peer = sends ? end.to : end.from;
  const std::string who = Text("rank ", peer);
  TESSERA_TRY(
      const ncclComm_t comm,
      job_.Connect(Text("turn/", end.channel, "/", end.from, "/", end.to),
                   sends ? 0 : 1, 2, who, /*wait=*/true));
  channels_[end] = comm;
  CudaDevice& device = job_.device();
  TESSERA_TRY(void* const place,
              device.Allocate({8}, MemoryCategory::kCommunication));
  const auto exchange = [&]() -> Result<void> {
    const uint64_t mine = Fnv1a().AddAll(sizes).value();
    uint64_t theirs = mine;
    if (sends) device.Write(place, &mine, {8});
    TESSERA_RETURN_IF_ERROR(
        EnqueueOn(comm, "open a channel", 8, [&](cudaStream_t queue) {
          return sends ? ncclSend(place, 8, ncclUint8, 1, comm, queue)
                       : ncclRecv(place, 8, ncclUint8, 0, comm, queue);
        }));
    if (!sends) device.Read(&theirs, place, {8});
    TESSERA_RETURN_IF_ERROR(device.Synchronize());
    if (theirs == mine) return {};
    return Disagreement(Text(who, " sends other sizes or another number of ",
                             "messages than rank ", job_.rank(), " expects"));
  };
  const auto exchanged = exchange();
  device.Free(place);
  return exchanged;
}

Result<void> NcclCommunicator::OpenChannels(
    std::span<const ChannelEnd> ends,
    std::span<const std::vector<int64_t>> sizes) {
  for (size_t i = 0; i < ends.size(); ++i) {
    const ChannelEnd end = InWorld(ends[i]);
    if (end.from == end.to || channels_.contains(end)) continue;
    if (auto opened = OpenChannel(end, sizes[i]); !opened) {
      return Here(job_.Fail(opened.error()), "open a channel");
    }
  }
  return {};
}

Result<void> NcclCommunicator::SendInTurn(const void* data, int64_t bytes,
                                          const ChannelEnd& end) {
  if (end.from == end.to) return Communicator::SendInTurn(data, bytes, end);
  if (bytes == 0) return {};
  const ncclComm_t comm = channels_.at(InWorld(end));
  return EnqueueOn(comm, "send", bytes, [&](cudaStream_t queue) {
    return ncclSend(data, static_cast<size_t>(bytes), ncclUint8, /*peer=*/1,
                    comm, queue);
  });
}

Result<void> NcclCommunicator::RecvInTurn(void* data, int64_t bytes,
                                          const ChannelEnd& end) {
  if (end.from == end.to) return Communicator::RecvInTurn(data, bytes, end);
  if (bytes == 0) return {};
  const ncclComm_t comm = channels_.at(InWorld(end));
  return EnqueueOn(comm, "receive", bytes, [&](cudaStream_t queue) {
    return ncclRecv(data, static_cast<size_t>(bytes), ncclUint8, /*peer=*/0,
                    comm, queue);
  });
}

// ---- Messages ---------------------------------------------------------------

Result<void> NcclCommunicator::Send(const void* data, int64_t bytes, int peer,
                                    uint64_t tag) {
  if (auto valid = CheckSend(bytes, peer, size()); !valid) {
    return Here(valid.error(), "send");
  }
  if (auto usable = job_.CheckUsable(); !usable) {
    return Here(usable.error(), "send");
  }
  if (auto posted = messages_.Post(ranks_[static_cast<size_t>(peer)],
                                   {id_, tag, bytes}, data);
      !posted) {
    return Here(job_.Fail(posted.error()), "send");
  }
  return {};
}

Result<void> NcclCommunicator::Recv(void* data, int64_t bytes, int peer,
                                    uint64_t tag) {
  if (auto valid = CheckRecv(bytes, peer, size()); !valid) {
    return Here(valid.error(), "receive");
  }
  if (auto usable = job_.CheckUsable(); !usable) {
    return Here(usable.error(), "receive");
  }
  if (auto taken = messages_.Take(ranks_[static_cast<size_t>(peer)],
                                  {id_, tag, bytes}, data);
      !taken) {
    // A message of another size harms nothing.
    return Here(taken.error().code == ErrorCode::kInvalidInput
                    ? taken.error()
                    : job_.Fail(taken.error()),
                "receive");
  }
  return {};
}

}  // namespace tessera
