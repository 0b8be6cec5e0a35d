#pragma once
// The failure of a job, in its store: how ranks on several hosts, which share
// no memory, tell each other why they end.

#include <optional>
#include <string>

#include "planner/base/result.h"
#include "runtime/comm/store.h"

namespace tessera {

// What the keys begin with of the n-th world, from 1, that a job makes over
// NCCL.
std::string NcclPrefix(int64_t world);
// A counter of the ranks that have failed.
std::string FailuresKey(const std::string& prefix);

// Where a rank is gone without a word (kGoneKey), or rank 0's store with it,
// the error that says so, to rank `rank`; else nothing. To be asked where a
// connection to some rank has ended, which the store may learn of a moment
// later: it takes 0.1 s, and 5 s more at most where the store does not answer.
// The store's timeout is then another one.
std::optional<Error> GoneRank(Store& store, int rank);

// Makes what rank `rank` has met the job's failure, unless there is one
// already; that failure. It takes 5 s at most, and the store's timeout is then
// another one.
Error PublishFailure(Store& store, const std::string& prefix, int rank,
                     const Error& error);

}  // namespace tessera
