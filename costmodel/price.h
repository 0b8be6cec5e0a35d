#pragma once
// Pricer: the time of a task on the ranks of its group. What a rank does
// follows from the layouts of the values that the task reads and writes; the
// largest shard counts. The cost sources (source/cost_source.h) turn it into
// seconds, rounded once to whole picoseconds.
//
//   kCompute  the kernel at its local extents (kernel_fusions.h says which do
//             others' work, too). Optimizer kernels count the elements of all
//             their tensors; sums move their operands through memory.
//             Attention whose sequence is split does what its mask leaves
//             the busiest rank (planner/plan/sequence_order.h), relative to
//             the mean of the mask: unsplit it counts in full, so do the shares
//             of all ranks together.
//   kLoad     a copy into place: its bytes written once.
//   kSlice    a copy: read and written.
//   kCopy     over the device's link to its host, or the device's share of the
//             storage's bandwidth. Where host and device are one memory, a copy
//             as kSlice.
//   kComm, kSend
//             exchange_price.h.
//   kRecv     nothing where communication has streams of its own (the send
//             carries the time); else the copy out.
//
// Kernels and copies on a device that is slow take DeviceType::slowness times
// as long, from whatever source.
//
// The cluster's stack (planner/ir/stack.h) says which operators are one kernel
// (fusion.h), sets a floor under kernels and the host's time to start them.
//
// What computes on the host moves its operands through the device's share of
// the host's memory bandwidth; where the device is a core of the host, it is a
// kernel as any other.
//
// Ranks of one group may have devices of several types: the slowest counts,
// each with the largest shard that its type has.
//
// Groups are priced by their class (group_classes.h).

#include <optional>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "costmodel/exchange_price.h"
#include "costmodel/group_classes.h"
#include "costmodel/kernel_fusions.h"
#include "costmodel/link/fair_share.h"
#include "costmodel/memo.h"
#include "costmodel/profile/profile_db.h"
#include "costmodel/source/cost_source.h"
#include "costmodel/source/measured_products.h"
#include "costmodel/task_view.h"
#include "planner/base/units.h"
#include "planner/ir/cluster.h"
#include "planner/ir/graph.h"
#include "planner/plan/layout.h"
#include "planner/plan/plan.h"

namespace tessera {

struct TaskCost {
  Duration duration;
  CostSource source = CostSource::kAnalytical;
  bool operator==(const TaskCost&) const = default;
};

class Pricer {
 public:
  // `profile` may be null. All three outlive this, unchanged. `whole`: as
  // ExchangePrices has it.
  Pricer(const Graph& graph, const Cluster& cluster, const ProfileDb* profile,
         const PricerOptions& options = {}, const Cluster* whole = nullptr);
  Pricer(const Pricer&) = delete;
  Pricer& operator=(const Pricer&) = delete;

  const Graph& graph() const { return graph_; }
  const Cluster& cluster() const { return cluster_; }
  const PricerOptions& options() const { return options_; }

  // Numbers groups (or pairs of groups) so that equal numbers cost the same.
  // Thread-safe, as are all methods.
  int ClassOf(const DeviceGroup& group,
              const DeviceGroup* peer = nullptr) const {
    return classes_.NumberOf(group, peer);
  }
  // Of the graph, equal numbers: tasks of such nodes, and of such tensors, that
  // are else alike cost the same.
  int NumberOf(NodeId node) const { return signature_[node.index()]; }
  int NumberOf(TensorId tensor) const { return exchanges_.HasSlots(tensor); }
  // Whether renaming hosts changes no price.
  bool hosts_are_alike() const { return classes_.hosts_are_alike(); }

  TaskCost Price(const TaskView& view) const;

  // StagingBytes (planner/lower/staging.h) of a task, remembered.
  Bytes Staging(const TaskView& view, std::optional<int> position = {}) const;

  // What of a profile would be exactly this task's time, on the first device
  // of its group. The profiler measures just these.
  ProfileKey ProfileKeyOf(const TaskView& view) const;

  // Which tasks are done by the kernels of others.
  const KernelFusions& fusions() const { return fusions_; }

  // The share of each link that the task fills while it runs at full speed on
  // the devices it really has; empty for tasks that do not communicate.
  std::vector<LinkUse> LinkUses(const TaskView& view, Duration duration) const;

 private:
  // The memos: by everything that a price, or a staging, depends on.
  struct Shard {
    std::shared_mutex mutex;
    std::unordered_map<IntKey, TaskCost, IntKeyHash> costs;
    std::unordered_map<IntKey, Bytes, IntKeyHash> staging;
  };
  static constexpr size_t kShards = 16;

  void NumberNodes();
  void NumberKernels();
  Shard& ShardOf(const IntKey& key) const;
  void AppendKey(const TaskView& view, IntKey& key) const;
  void SetAttentionShare(const TaskView& view, CostQuery& query) const;
  double HostSeconds(const TaskView& view, const CostQuery& query) const;
  Cost CostOf(const TaskView& view) const;
  Cost KernelCost(const TaskView& view) const;
  CostQuery KernelQuery(const TaskView& view) const;
  void AddStack(const TaskView& view, const OpCall& call,
                CostQuery& query) const;
  const DeviceType& TypeOf(const GroupClass& where, size_t type) const;
  template <typename Traffic>
  Cost CopyCost(const TaskView& view, Traffic traffic) const;
  Cost TierCost(const TaskView& view) const;
  // The same on the hosts of that row, in seconds.
  double TierSeconds(const TaskView& view, size_t host) const;

  const Graph& graph_;
  const Cluster& cluster_;
  const ProfileDb* const profile_;
  const PricerOptions options_;
  const MeasuredProducts products_;
  const ExchangePrices exchanges_;
  const GroupClasses classes_;
  const KernelFusions fusions_;
  // By row of the cluster's hosts, the most of a node.
  const std::vector<double> devices_per_host_;
  std::vector<int> signature_;  // by node: operator and rule
  std::unordered_map<std::string_view, int> kernels_;
  mutable std::vector<Shard> shards_;
};

}  // namespace tessera
