#pragma once
// What there is to profile: the kernels, copies and exchanges of plans, and a
// ladder of exchanges and copies that others are interpolated between.

#include <map>
#include <span>
#include <vector>

#include "costmodel/profile/profile_db.h"
#include "planner/base/result.h"
#include "planner/ir/cluster.h"
#include "planner/ir/graph.h"
#include "planner/plan/plan.h"
#include "profiler/kernel_case.h"
#include "runtime/launch/backend.h"

namespace tessera {

struct ProfileCases {
  std::map<ProfileKey, KernelCase> kernels;
  // Of the ladder; by what plans are predicted to spend on such exchanges, as
  // KernelCase::seconds.
  std::map<ProfileKey, double> collectives;
};

// The uniform strategies that `graph` has on `cluster`: every (dp, tp, pp),
// with and without sequence parallelism and ZeRO-1, with microbatches of so
// many `samples` on a replica. Valid plans only.
std::vector<Plan> UniformPlans(const Graph& graph, const Cluster& cluster,
                               std::span<const int> samples);

// Every kind of exchange among every divisor of the ranks that `cluster` has
// (within a node, or of whole nodes), with payloads from 1 KiB to 16 MiB (where
// ranks have shares of it, from 4 bytes of each on); messages between two
// neighbours, unless some are of one node and others of two; copies of the same
// sizes. REQUIRES: nodes of equally many devices.
void AddLadder(const Cluster& cluster, ProfileCases& cases);

// Of which cluster the ladder of ranks on such GPUs is where their hosts are
// the nodes of `hosts` and plans are for `planned`: of that one where it is of
// the same ranks and joins hosts to nodes of equally many, and NVLink may do
// so; elsewhere it is a machine that plans are made for in advance.
const Cluster& LadderCluster(const Gpu& gpu, const Cluster& hosts,
                             const Cluster& planned);

// What `plans` run: kernels and copies of `cluster`'s devices, and what the
// exchanges of the ladder are worth to them. Work that is priced by the host's
// figures (copies between tiers, optimizers on the host of a GPU) is none, nor
// are operators of a graph file's own, which nothing runs.
// With `fused`, fused kernels (planner/lower/fused_kernels.h) besides those
// that they stand for. REQUIRES: AddLadder was called, the plans are valid.
void AddCases(const Graph& graph, const Cluster& cluster,
              std::span<const Plan> plans, const TrainingOptions& options,
              ProfileCases& cases, bool fused = false);

// Graphs that stand for many models where none is given: a small decoder of the
// GPT-2 and one of the Llama family.
Result<std::vector<Graph>> TypicalGraphs();

}  // namespace tessera
