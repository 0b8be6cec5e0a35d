#pragma once
// The failure of a job, in its store: how ranks on several hosts, which share
// no memory, tell each other why they end.

#include <string>

#include "planner/base/result.h"
#include "runtime/comm/store.h"

namespace tessera {

// What the keys begin with of the n-th world, from 1, that a job makes over
// NCCL.
std::string NcclPrefix(int64_t world);
// A counter of the ranks that have failed.
std::string FailuresKey(const std::string& prefix);

// Makes what rank `rank` has met the job's failure, unless there is one
// already; that failure. It takes 5 s at most, and the store's timeout is then
// another one.
Error PublishFailure(Store& store, const std::string& prefix, int rank,
                     const Error& error);

}  // namespace tessera
