#pragma once
// How a process becomes a rank of `run` or `profile`, or starts the ranks.

#include "planner/base/result.h"
#include "runtime/launch/backend.h"
#include "runtime/launch/rank_environment.h"
#include "tools/options.h"

namespace tessera {

// As many as one world of one host holds (runtime/comm/shm_world.h and
// loopback_world.h).
inline constexpr int kMostRanks = 64;

// The cores that the `ranks` ranks of this host have together.
int CoresOf(int ranks);

// The kernel threads of each of the `ranks` ranks of a host.
int ThreadsOf(const Options& options, int ranks);

// Of `ranks` ranks that this process starts on its host, the last.
RankEnvironment LastRank(int ranks);

// What a rank of a job of processes does last. Where others end with a code
// other than 0 they wait for rank 0's word, however it ends: srun
// --kill-on-bad-exit, mpirun and others take the first such code for a failure
// and end the rest, and rank 0 may have to tell of the job.
void EndBehindRankZero(RankSeat& seat, const Result<int>& code);

// Runs `as_rank` where somebody started this process as one of a job's ranks,
// and reports its error as a rank does; else `as_job`, which starts the ranks.
// An error where --nproc or --backend is for other ranks than were started; a
// warning where another launcher started as many as --nproc says.
Result<int> RunAsRankOrJob(const Options& options,
                           Result<int> (*as_rank)(const Options&,
                                                  const RankEnvironment&),
                           Result<int> (*as_job)(const Options&));

}  // namespace tessera
