#pragma once

#include "planner/ir/cluster.h"

namespace tessera {

// Makes each device of local-cpu:N, which is one core, what a rank of `threads`
// threads has of a host of `cores`: `threads` cores, or fewer where all ranks
// together have more threads than there are cores and take turns. Peak rates
// and memory bandwidth scale by min(threads, cores / ranks); that is what a
// processor's time shared out evenly gives kernels that keep a core busy.
// REQUIRES: cores >= 1, threads >= 1.
void ShareCores(Cluster& cluster, int cores, int threads);

}  // namespace tessera
