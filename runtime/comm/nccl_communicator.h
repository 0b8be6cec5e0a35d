#pragma once
// A group's operations over NCCL (nccl_world.h).

#include <nccl.h>

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "planner/base/fnv1a.h"
#include "runtime/comm/communicator.h"
#include "runtime/comm/nccl_job.h"
#include "runtime/comm/nccl_messages.h"

namespace tessera {

// Of messages in turn, by this rank's ends in the job.
using NcclChannels = std::map<ChannelEnd, ncclComm_t>;

class NcclCommunicator : public Communicator {
 public:
  NcclCommunicator(NcclJob& job, NcclMessages& messages, NcclChannels& channels,
                   std::vector<int> ranks, int rank, ncclComm_t comm)
      : job_(job),
        messages_(messages),
        channels_(channels),
        ranks_(std::move(ranks)),
        rank_(rank),
        id_(Fnv1a().AddAll(ranks_).value()),
        comm_(comm) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(ranks_.size()); }
  Result<void> AllReduce(void* data, int64_t count, DType dtype) override;
  Result<void> AllGather(const void* send, int64_t send_bytes, void* recv,
                         std::span<const int64_t> bytes_per_rank) override;
  Result<void> ReduceScatter(const void* send, void* recv,
                             std::span<const int64_t> counts_per_rank,
                             DType dtype) override;
  Result<void> AllToAll(const void* send, std::span<const int64_t> send_bytes,
                        void* recv,
                        std::span<const int64_t> recv_bytes) override;
  Result<void> Broadcast(void* data, int64_t bytes, int root) override;
  Result<void> Barrier() override;
  Result<void> Send(const void* data, int64_t bytes, int peer,
                    uint64_t tag) override;
  Result<void> Recv(void* data, int64_t bytes, int peer, uint64_t tag) override;
  bool SendInTurnWaits() const override { return true; }
  Result<void> OpenChannels(
      std::span<const ChannelEnd> ends,
      std::span<const std::vector<int64_t>> sizes) override;
  Result<void> SendInTurn(const void* data, int64_t bytes,
                          const ChannelEnd& end) override;
  Result<void> RecvInTurn(void* data, int64_t bytes,
                          const ChannelEnd& end) override;

 private:
  // issue(stream) calls NCCL, several times if it likes.
  using Issue = std::function<ncclResult_t(cudaStream_t)>;
  Result<void> Enqueue(std::string_view operation, int64_t bytes,
                       const Issue& issue) {
    return EnqueueOn(comm_, operation, bytes, issue);
  }
  Result<void> EnqueueOn(ncclComm_t comm, std::string_view operation,
                         int64_t bytes, const Issue& issue);
  Result<void> OpenChannel(const ChannelEnd& end,
                           std::span<const int64_t> sizes);
  ChannelEnd InWorld(const ChannelEnd& end) const {
    return {end.channel, ranks_[static_cast<size_t>(end.from)],
            ranks_[static_cast<size_t>(end.to)]};
  }
  Error Here(const Error& error, std::string_view operation) const;

  NcclJob& job_;
  NcclMessages& messages_;
  NcclChannels& channels_;
  const std::vector<int> ranks_;
  const int rank_;
  const uint64_t id_;
  const ncclComm_t comm_;
};

}  // namespace tessera
