#include "runtime/comm/host_messages.h"

#include <vector>

#include "runtime/device/staging.h"

namespace tessera {

Result<void> HostMessages::AllGather(const void* send, int64_t bytes,
                                     void* recv) {
  const std::vector<int64_t> sizes(static_cast<size_t>(size()), bytes);
  if (device_.queues() == nullptr) {
    return group_.AllGather(send, bytes, recv, sizes);
  }
  TESSERA_TRY(const Staging mine, Staging::Allocate(device_, {bytes}));
  TESSERA_TRY(const Staging all, Staging::Allocate(device_, {bytes * size()}));
  device_.Write(mine.data(), send, {bytes});
  TESSERA_RETURN_IF_ERROR(
      group_.AllGather(mine.data(), bytes, all.data(), sizes));
  device_.Read(recv, all.data(), {bytes * size()});
  return device_.Synchronize();
}

Result<void> HostMessages::Broadcast(void* data, int64_t bytes, int root) {
  if (device_.queues() == nullptr) return group_.Broadcast(data, bytes, root);
  TESSERA_TRY(const Staging copy, Staging::Allocate(device_, {bytes}));
  device_.Write(copy.data(), data, {bytes});
  TESSERA_RETURN_IF_ERROR(group_.Broadcast(copy.data(), bytes, root));
  device_.Read(data, copy.data(), {bytes});
  return device_.Synchronize();
}

Result<void> HostMessages::ToRankZero(int from, const void* send, void* recv,
                                      int64_t bytes) {
  // Not a message of its own: NCCL would make a communicator for each sender.
  std::vector<int64_t> sent(static_cast<size_t>(size()));
  std::vector<int64_t> received(sent.size());
  if (rank() == from) sent[0] = bytes;
  if (rank() == 0) received[static_cast<size_t>(from)] = bytes;
  if (device_.queues() == nullptr) {
    return group_.AllToAll(send, sent, recv, received);
  }
  const Bytes to_send{sent[0]};
  const Bytes to_receive{received[static_cast<size_t>(from)]};
  TESSERA_TRY(const Staging mine, Staging::Allocate(device_, to_send));
  TESSERA_TRY(const Staging theirs, Staging::Allocate(device_, to_receive));
  device_.Write(mine.data(), send, to_send);
  TESSERA_RETURN_IF_ERROR(
      group_.AllToAll(mine.data(), sent, theirs.data(), received));
  device_.Read(recv, theirs.data(), to_receive);
  return device_.Synchronize();
}

}  // namespace tessera
