#pragma once
// KernelFusions: which tasks are done by the kernels of others, by the stack of
// the cluster (fusion.h) and by the FusedKernels that the device has.
//
// Products of weights' gradients that add to those of other microbatches have
// rows of their own (kAdds), where there are any, unless just that size was
// timed, and writing alone; the first microbatch's counts as the others.
//
// Thread-safe.

#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "costmodel/fusion.h"
#include "costmodel/profile/profile_db.h"
#include "costmodel/source/cost_source.h"
#include "planner/ir/cluster.h"
#include "planner/ir/graph.h"
#include "planner/lower/fused_nodes.h"
#include "planner/lower/task_graph.h"
#include "planner/plan/plan.h"

namespace tessera {

struct PricerOptions {
  // All FusedKernels are there, and products that add to gradients have times
  // of their own: not just those that the profile has rows of for every device
  // of the cluster.
  bool all_fused = false;
  // The kernel of updates with which casts of updated masters are fused, where
  // there is such a kernel; empty: they run alone.
  std::string update = "adamw";
};
// Those of a training: with stochastic rounding casts run alone.
PricerOptions PricerOptionsOf(const TrainingOptions& options);

class KernelFusions {
 public:
  // `profile` may be null. All three outlive this, unchanged.
  KernelFusions(const Graph& graph, const Cluster& cluster,
                const ProfileDb* profile, const PricerOptions& options);

  // What the stack fuses a task's node with.
  const Fusion& StackFusionOf(const Task& task) const;
  // What the FusedKernels do beside a task's node; null where there are none,
  // or the task is computed again: of its neighbours some are kept.
  const FusedNode* FusedAt(const Task& task) const {
    if (fused_.empty() || task.kind != TaskKind::kCompute ||
        !task.node.valid()) {
      return nullptr;
    }
    const Node& node = graph_.node(task.node);
    const bool own = task.kernel == node.op->name && task.pass == node.pass;
    return own ? &fused_[task.node.index()] : nullptr;
  }

  // The kernel that does a task, and maybe others with it.
  std::string_view KernelOf(const Task& task) const;
  // The nodes behind a task's that its kernel does, too.
  std::span<const FusedNode::Part> PartsOf(const Task& task) const;
  // What these would take beside it, by the bytes that only they read or write;
  // for a kernel of whose size nothing was measured.
  double PartsSeconds(const Task& task, const CostQuery& query) const;
  // Whether a task's work is done by the kernel of another one.
  bool IsElsewhere(const Task& task) const;
  // Whether a product that adds is priced by rows of such: not where just its
  // size was timed, and writing alone.
  bool HasAddingRow(const Task& task, const ProfileKey& key) const;
  // Whether all that a device with the FusedKernels would fuse is priced so.
  bool FusesAll() const;

  // All that tells the fusions of a node from another's.
  void AppendSignature(size_t node, std::vector<double>& signature) const;

 private:
  bool HasRows(std::string_view kernel) const;

  const Graph& graph_;
  const Cluster& cluster_;
  const ProfileDb* const profile_;
  const PricerOptions options_;
  const std::vector<Fusion> stack_;  // by node
  std::vector<FusedNode> fused_;     // by node; empty: none is fused
  std::set<std::string> adding_;  // products whose rows include such that add
  // The fused kernel of updates and casts; empty: there is none.
  std::string_view update_with_cast_;
  bool casts_fused_ = false;  // with updates: its rows are there
};

}  // namespace tessera
