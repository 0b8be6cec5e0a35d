#pragma once
// HostMessages: what little the ranks of a group tell each other beside
// tensors, from and to host memory. The communicators of a device with queues
// take the device's memory: there it goes through a buffer of the device.
//
// Meaning, order and errors are those of Communicator. All calls wait.

#include <cstdint>

#include "planner/base/result.h"
#include "runtime/comm/communicator.h"
#include "runtime/device/device.h"

namespace tessera {

class HostMessages {
 public:
  // Both outlive it.
  HostMessages(RankDevice& device, Communicator& group)
      : device_(device), group_(group) {}

  int rank() const { return group_.rank(); }
  int size() const { return group_.size(); }

  // `bytes` of every rank, in rank order.
  Result<void> AllGather(const void* send, int64_t bytes, void* recv);
  Result<void> Broadcast(void* data, int64_t bytes, int root);
  // `bytes` of rank `from` to rank 0: all ranks call it. `send` counts on the
  // one, `recv` on the other.
  Result<void> ToRankZero(int from, const void* send, void* recv,
                          int64_t bytes);

 private:
  RankDevice& device_;
  Communicator& group_;
};

}  // namespace tessera
