#pragma once
// Ranks as processes of one host, over shared memory (a memfd: it has no name,
// so nothing is left behind however the processes end, and the size of
// /dev/shm does not matter).

#include <memory>

#include "runtime/comm/communicator.h"
#include "runtime/comm/store.h"

namespace tessera {

// Called by all `size` ranks; they meet through `store`, which is not used
// afterwards. May be called again for another world of the same job.
// Errors: ranks on different hosts or in different containers (kInvalidInput
// on every rank), more than 64 ranks, a rank that has not come when the store's
// timeout is over since this one opened it (of a later world, since this call).
// A rank that dies makes its peers' operations fail within about 0.2 s of
// waiting, with "rank R (pid P) died in task 'T'".
Result<std::unique_ptr<CommWorld>> MakeShmWorld(int rank, int size,
                                                Store& store,
                                                CommOptions options = {});

}  // namespace tessera
