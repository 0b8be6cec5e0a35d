#pragma once
// Ranks as threads of one process whose devices share one memory: several
// CudaDevices of one GPU. It is for checks of plans on fewer GPUs than they
// have ranks.
//
// Operations are enqueued in the device's queue in use and return before they
// have run, as in nccl_world.h: what was enqueued there before is their input,
// what is enqueued after may use their buffers. Ranks read each other's buffers
// directly: where they meet, every rank records an event and its queue waits
// for those of the others. So the host waits until the peers have enqueued
// their half, never for the device, but for Barrier, which waits for queue 0. A
// queue only waits for what was enqueued before; nothing can hang the device.
//
// Sums run in the ranks' order, with the bits of the CPU's worlds. Copies of
// messages under way are memory of the sending device.
//
// A world belongs, with its communicators, to one thread at a time. It is
// destroyed before its device, and waits for the receivers of its messages.

#include <memory>
#include <span>
#include <vector>

#include "runtime/comm/communicator.h"
#include "runtime/device/device.h"

namespace tessera {

// The world of every rank, on devices of its own, which outlive it.
// REQUIRES: at most QueueDevice::kMostSources devices, of one kind.
std::vector<std::unique_ptr<CommWorld>> MakeLoopbackWorlds(
    std::span<QueueDevice* const> devices, CommOptions options = {});

}  // namespace tessera
