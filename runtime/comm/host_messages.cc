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

Result<void> HostMessages::Send(const void* data, int64_t bytes, int peer,
                                uint64_t tag) {
  if (device_.queues() == nullptr) return group_.Send(data, bytes, peer, tag);
  TESSERA_TRY(const Staging copy, Staging::Allocate(device_, {bytes}));
  device_.Write(copy.data(), data, {bytes});
  TESSERA_RETURN_IF_ERROR(group_.Send(copy.data(), bytes, peer, tag));
  return device_.Synchronize();
}

Result<void> HostMessages::Recv(void* data, int64_t bytes, int peer,
                                uint64_t tag) {
  if (device_.queues() == nullptr) return group_.Recv(data, bytes, peer, tag);
  TESSERA_TRY(const Staging copy, Staging::Allocate(device_, {bytes}));
  TESSERA_RETURN_IF_ERROR(group_.Recv(copy.data(), bytes, peer, tag));
  device_.Read(data, copy.data(), {bytes});
  return device_.Synchronize();
}

}  // namespace tessera
