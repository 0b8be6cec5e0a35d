#pragma once
// Ranks as processes with a GPU each, over NCCL.
//
// Operations are enqueued and return before they have run. All of them are in
// the order of the device's queue: what was enqueued there before is their
// input, and what is enqueued after may use their buffers. Buffers are the
// device's memory. Barrier, and what Recv has to know of a message before it
// can receive it, are waited for.
//
// Where it differs from the other worlds:
//   - A world belongs, with its communicators, to one thread at a time.
//   - Sums run in NCCL's order, not the ranks': the same bits on every rank and
//     in every run on the same ranks and links, but other bits than elsewhere.
//     Those of 16-bit types may be rounded on the way.
//   - Ranks that disagree about an operation wait for each other until the time
//     limit; only messages (Send and Recv) are compared.
//   - Group, for a new list, is a collective of its members: each pair of ranks
//     makes the groups that they share in one order. (NCCL's ncclCommSplit
//     would be a collective of all ranks, those outside of the group too, and
//     a rank need not know groups that it is not in.) A communicator takes tens
//     of megabytes of the GPU, outside of the device's account.
//   - The time limit holds for an operation from when the last one before it,
//     in whatever queue, was done, the kernels between them included.
//   - Errors of operations that are under way come from later operations, from
//     Flush and from all that waits for the device; they name the operation
//     that did not end and the task in which it was enqueued.
//   - Abort waits for the store to take it, at most 5 s in all. What fails asks
//     it before who is gone, and waits 5.1 s more at most.
//   - A group, and the first message on a way, hand an id over by the store;
//     for its answer they wait, after it has just given one, at most 10 s with
//     nothing else done meanwhile.
//   - Flush waits for this rank's collectives and messages in turn, but not for
//     the receivers of its other messages; destroying the world does.
//   - A rank that dies is noticed by the end of its store's connection
//     (kGoneKey), by NCCL (a closed connection; the store then says whose) or
//     by the time limit. Its task is not known to the others. While rank 0's
//     store does not answer it is waited for.
//
// Messages in turn (SendInTurn) are one send or receive of NCCL in the queue in
// use, where a send waits for its receive: each end of a channel has a
// communicator of its own, so that no other message stands in its way. The two
// sides compare their sizes when they open it.
//
// Other messages. For each pair of ranks and direction there is a communicator
// and a stream, made when first used, so that a message that nobody receives
// yet holds up nothing else. Send copies the message, and it goes out while
// this rank waits in any operation of the world or for the device, and now and
// then while it enqueues kernels. It is preceded by its group, tag and size.

#include <memory>

#include "runtime/comm/communicator.h"
#include "runtime/comm/store.h"
#include "runtime/device/cuda_device.h"

namespace tessera {

// Called by all `size` ranks; they meet through `store`. `store` and `device`
// outlive the world, and the world is destroyed by the thread that used it.
// While it lives it sets the store's timeout and stop, and is what `device`
// calls while waiting (set_while_waiting).
// Errors: an NCCL before 2.27, NCCL's (two ranks on one GPU of one host, no
// route between hosts), a rank that does not come within the time limit.
Result<std::unique_ptr<CommWorld>> MakeNcclWorld(int rank, int size,
                                                 Store& store,
                                                 CudaDevice& device,
                                                 CommOptions options = {});

// "2.28.9": of the library that this process runs with.
std::string NcclVersion();

}  // namespace tessera
