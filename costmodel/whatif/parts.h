#pragma once
// Plans that leave some devices out: slow ones beside fast ones, those that the
// batch cannot be divided by, and more than a model can use.
//
// A walk hardly comes to them from plans on all devices, and no uniform
// strategy of the whole cluster says them.

#include <atomic>
#include <optional>
#include <vector>

#include "costmodel/profile/profile_db.h"
#include "planner/ir/cluster.h"
#include "planner/ir/graph.h"
#include "planner/plan/plan.h"
#include "planner/search/constraints.h"
#include "planner/search/mcmc.h"

namespace tessera {

struct PartOptions {
  const ProfileDb* profile = nullptr;  // may be null
  TrainingOptions training;
  Constraints constraints;  // of the whole cluster
  int threads = 0;          // 0: as many as the machine runs at once
  const std::atomic<bool>* stop = nullptr;
  const Cluster* whole = nullptr;  // as Evaluator has it; may be null
};

// By device, whether it is in the part.
using ClusterSubset = std::vector<bool>;

// The devices of each type, where there are several, and those of all types but
// one, where there are more than two; and where the batch is no multiple of the
// devices, of the fastest hosts the most that it is a multiple of, and the most
// that are a power of two times what divides it; and where the devices are no
// multiple of all `degrees`, or of one of them, the most that are.
std::vector<ClusterSubset> LikelyParts(const Cluster& cluster,
                                       int64_t global_batch, DType dtype,
                                       const std::vector<int>& degrees = {});

// The devices of half of the hosts, the fastest, of half of these, and so on to
// one host; then half of its devices, and so on to one device.
std::vector<ClusterSubset> EverSmallerParts(const Cluster& cluster,
                                            DType dtype);

// The best plan that a search of each likely part would start from, where that
// fits and takes less time than `best`, if there is one, and all before, for
// the ranks of the whole cluster. Where one fits then on ever smaller parts, as
// long as a step may take a fifth less there. (Without a profile: with one
// nothing says what a step takes at least.) Done in `seconds`; 0: without end.
// REQUIRES: `graph` is differentiated.
std::vector<Plan> PlansOnParts(const Graph& graph, const Cluster& cluster,
                               std::optional<Duration> best, double seconds,
                               const PartOptions& options);

// The same for SearchOptions::more_starts. `graph`, `cluster` and what
// `options` point to outlive it.
MoreStarts StartsOnParts(const Graph& graph, const Cluster& cluster,
                         const PartOptions& options);

}  // namespace tessera
