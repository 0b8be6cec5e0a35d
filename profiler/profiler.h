#pragma once
// The profiler: times the CPU runtime's kernels and collectives on this host
// into a profile.
//
// All ranks of the job call Profile together and time the same case at the same
// time, since they share the host's cores, its caches and its memory: a time is
// what a rank gets while its peers work too. A sample is the mean of as many
// runs in a row as fill some milliseconds, so that it spans several time slices
// of the operating system where ranks outnumber cores; behind a barrier each; a
// row is the median of five samples, each the mean over the ranks.

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "costmodel/profile/profile_db.h"
#include "planner/base/result.h"
#include "planner/ir/cluster.h"
#include "planner/ir/graph.h"
#include "planner/plan/plan.h"
#include "profiler/kernel_case.h"
#include "runtime/comm/communicator.h"

namespace tessera {

struct ProfileCases {
  std::map<ProfileKey, KernelCase> kernels;
  std::set<ProfileKey> collectives;
};

// The uniform strategies that `graph` has on `cluster`: every (dp, tp, pp),
// with and without sequence parallelism and ZeRO-1, with microbatches of so
// many `samples` on a replica. Valid plans only.
std::vector<Plan> UniformPlans(const Graph& graph, const Cluster& cluster,
                               std::span<const int> samples);

// What `plans` run, on the ranks of a host. Errors of AddKernelCases.
Result<void> AddCases(const Graph& graph, const Cluster& cluster,
                      std::span<const Plan> plans,
                      const TrainingOptions& options, ProfileCases& cases);

// Every kind of exchange among every divisor of the ranks, with payloads from
// 1 KiB to 16 MiB; copies of the same sizes.
void AddLadder(const Cluster& cluster, ProfileCases& cases);

// Graphs that stand for many models where none is given: a small decoder of the
// GPT-2 and one of the Llama family.
Result<std::vector<Graph>> TypicalGraphs();

struct ProfilerOptions {
  // Cases that there is no time for are left out.
  double time_limit_s = 60;
  int threads = 1;  // on which each rank's kernels run
  // A sample's least time. By default what the time limit leaves for each, but
  // between one and four of Linux's time slices.
  std::optional<double> sample_s;
  // Called now and then, on every rank: cases done, and all.
  std::function<void(size_t done, size_t all)> progress;
};

struct ProfilerResult {
  ProfileDb profile;    // the same on every rank
  size_t left_out = 0;  // cases
};

// Called by all ranks of `world`, with equal arguments. Collectives first.
Result<ProfilerResult> Profile(const ProfileCases& cases, CommWorld& world,
                               const ProfilerOptions& options);

}  // namespace tessera
