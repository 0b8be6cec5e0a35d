#pragma once
// The profiler: times the runtime's own kernels, copies and collectives on the
// devices of a job into a profile.
//
// All ranks of the job call Profile together and time the same case at the same
// time, since ranks may share the host's cores, its caches and its memory: a
// time is what a rank gets while its peers work too. Behind a barrier a sample
// is the mean of several runs in a row, and of the ranks that take part; a row
// is the median of the samples, with their spread.
//
// On the host five samples are taken by the clock, each of as many runs as fill
// some milliseconds, so that it spans several time slices of the operating
// system where ranks outnumber cores.
//
// On a device with queues (a GPU) twenty samples are taken, each of up to 64
// runs between two marks on the queue. The host waits for none of them. Kernels
// do not even begin before all of a sample are enqueued, so that the time
// between them is the device's and not the host's; a collective, which may need
// the host to go on, begins at once.
//
// A run, of an exchange too, works on other buffers than those before it: on
// the host 8 MiB take turns, more than a core's share of the last-level cache,
// on a GPU 256 MiB, twice the largest L2, but not more than 64 sets of buffers
// (SetsInTurn). So caches are cold where a run works on more than 128 KiB on
// the host; smaller ones find in a cache what fits there 64 times. On a GPU
// 256 MiB are written before each sample, which touches no buffer twice unless
// they fill those 256 MiB.

#include <atomic>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "costmodel/profile/profile_db.h"
#include "planner/base/result.h"
#include "planner/ir/cluster.h"
#include "planner/ir/graph.h"
#include "planner/plan/plan.h"
#include "profiler/kernel_case.h"
#include "runtime/comm/communicator.h"
#include "runtime/device/device.h"

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
// (within a node, or of whole nodes), with payloads from 1 KiB to 16 MiB;
// messages between two neighbours, unless some are of one node and others of
// two; copies of the same sizes.
void AddLadder(const Cluster& cluster, ProfileCases& cases);

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

struct ProfilerOptions {
  // Cases that there is no time for are left out.
  double time_limit_s = 60;
  // A sample's least time. By default what the time limit leaves for each,
  // within what the device needs.
  std::optional<double> sample_s;
  // Of buffers that take turns; by default the device's figure (above).
  std::optional<Bytes> rotated;
  // On a device with queues, products run for 5 ms before each sample: in a
  // step products take most of the time, and the clocks that a GPU's power then
  // allows are those that kernels have there. A case takes 0.15 s longer.
  bool under_load = false;
  // Rows that are there: not measured again unless `again`, and part of the
  // result. Those of rank 0 count.
  ProfileDb known;
  bool again = false;
  // Called on rank 0 every few seconds, and before an interruption returns,
  // with all rows there are.
  std::function<Result<void>(const ProfileDb&)> save;
  // Set on any rank: no further case is begun. May be null.
  const std::atomic<bool>* stop = nullptr;
  // Called now and then, on every rank: cases done, and all that were missing.
  std::function<void(size_t done, size_t all)> progress;
};

struct ProfilerResult {
  ProfileDb profile;     // on rank 0 with what was known
  size_t measured = 0;   // cases
  size_t left_out = 0;   // for want of time
  size_t too_large = 0;  // for the device's memory
  bool interrupted = false;
};

// Called by all ranks of `world`, on their devices, with equal cases and
// options (but for what is rank 0's). The order is that of value: first the
// kernels and exchanges that plans spend most time on, but of kernels that do
// about the same work of the same rule in other shapes one alone, and none
// where such a row is known, as interpolation does best without them; then
// these; then what no plan needs. A message on the host is behind the copy that
// its row is made with.
//
// kNotFound for a kernel that the device has not, before anything is timed;
// errors of the device and the world, and of `save`.
Result<ProfilerResult> Profile(const ProfileCases& cases, RankDevice& device,
                               CommWorld& world,
                               const ProfilerOptions& options);

}  // namespace tessera
