#pragma once
// Pricer: the time of a task on the ranks of its group. What a rank does
// follows from the layouts of the values that the task reads and writes; the
// largest shard counts. The cost sources (source/cost_source.h) turn it into
// seconds, rounded once to whole picoseconds.
//
//   kCompute  the kernel at its local extents. Optimizer kernels count the
//             elements of all their tensors; kernels outside the operator
//             table ("cast") and sums move their operands through memory.
//             Attention whose sequence is split does what its mask leaves
//             the busiest rank (planner/plan/sequence_order.h), relative to
//             the mean of the mask: unsplit it counts in full, so do the shares
//             of all ranks together. Products of weights' gradients that add to
//             those of other microbatches have rows of their own (kAdds), where
//             there are any, unless just that size was timed, and writing
//             alone; the first microbatch's counts as the others.
//   kLoad     a copy into place: its bytes written once.
//   kSlice    a copy: read and written.
//   kCopy     over the device's link to its host, or the device's share of the
//             storage's bandwidth. Where host and device are one memory, a copy
//             as kSlice.
//   kComm     the collective over all subgroups of `axes` at once; several
//             buffers are one payload.
//   kSend     pairs of ranks: destination rank j of n receives its block from
//             source rank j*m/n of m. Where the stack splits sends, each of
//             the ranks that have the block alike sends a part, and the
//             destination's gather them.
//   kRecv     nothing where communication has streams of its own (the send
//             carries the time); else the copy out.
//
// Kernels and copies on a device that is slow take DeviceType::slowness times
// as long, from whatever source. Where links are (LinkType::slowness), what was
// measured of a collective takes as many times as long as the alpha-beta model
// does.
//
// The cluster's stack (planner/ir/stack.h) says which operators are one kernel
// (fusion.h), sets a floor under kernels, the host's time to start them, and
// takes from collectives of activations that belong to tensor parallelism what
// products hide; gathers of parameters amid the passes it slows.
//
// What computes on the host moves its operands through the device's share of
// the host's memory bandwidth; where the device is a core of the host, it is a
// kernel as any other.
//
// Ranks of one group may have devices of several types: the slowest counts,
// each with the largest shard that its type has.
//
// Groups are priced up to a renaming of hosts, where hosts are alike: stages
// that lie in their hosts in the same way cost the same, exactly.

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <shared_mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "costmodel/collective/collective.h"
#include "costmodel/expert_exchange.h"
#include "costmodel/fusion.h"
#include "costmodel/link/fair_share.h"
#include "costmodel/profile/profile_db.h"
#include "costmodel/source/cost_source.h"
#include "costmodel/source/measured_products.h"
#include "planner/base/units.h"
#include "planner/ir/cluster.h"
#include "planner/ir/graph.h"
#include "planner/lower/fused_nodes.h"
#include "planner/lower/task_graph.h"
#include "planner/plan/layout.h"
#include "planner/plan/plan.h"

namespace tessera {

struct TaskCost {
  Duration duration;
  CostSource source = CostSource::kAnalytical;
  bool operator==(const TaskCost&) const = default;
};

// A task in its surroundings: a TaskGraph's, or a BlockProgram's local ones.
struct TaskView {
  const Task* task = nullptr;
  std::span<const Value> values;  // that the task's ids index
  const DeviceGroup* group = nullptr;
  int group_class = -1;  // Pricer::ClassOf(*group)
  int zigzag = 0;        // Plan::zigzag
  // Of a send: the value that it becomes, and where.
  const Value* peer = nullptr;
  const DeviceGroup* peer_group = nullptr;
  int pair_class = -1;  // Pricer::ClassOf(*group, peer_group)
};

// A sequence of integers, compared exactly.
using IntKey = std::vector<int64_t>;
struct IntKeyHash {
  size_t operator()(const IntKey& key) const;
};

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

class Pricer {
 public:
  // `profile` may be null. All three outlive this, unchanged.
  Pricer(const Graph& graph, const Cluster& cluster, const ProfileDb* profile,
         const PricerOptions& options = {});
  Pricer(const Pricer&) = delete;
  Pricer& operator=(const Pricer&) = delete;

  const Graph& graph() const { return graph_; }
  const Cluster& cluster() const { return cluster_; }
  const PricerOptions& options() const { return options_; }

  // Numbers groups (or pairs of groups) so that equal numbers cost the same.
  // Thread-safe, as are all methods.
  int ClassOf(const DeviceGroup& group,
              const DeviceGroup* peer = nullptr) const;
  // Of the graph, equal numbers: tasks of such nodes, and of such tensors, that
  // are else alike cost the same.
  int NumberOf(NodeId node) const { return signature_[node.index()]; }
  int NumberOf(TensorId tensor) const {
    return exchanged_slots_[tensor.index()];
  }
  // Whether renaming hosts changes no price.
  bool hosts_are_alike() const { return hosts_alike_; }

  TaskCost Price(const TaskView& view) const;

  // StagingBytes (planner/lower/staging.h) of a task, remembered.
  Bytes Staging(const TaskView& view) const;

  // What of a profile would be exactly this task's time, on the first device
  // of its group. The profiler measures just these.
  ProfileKey ProfileKeyOf(const TaskView& view) const;

  // The nodes behind a task's that its kernel does, too.
  std::span<const FusedNode::Part> PartsOf(const Task& task) const;
  // Whether a task's work is done by the kernel of another one.
  bool IsElsewhere(const Task& task) const;
  // Whether all that a device with the FusedKernels would fuse is priced so.
  bool FusesAll() const;

  // What a kComm or kSend moves, as costmodel/collective counts it.
  Bytes Payload(const TaskView& view) const;

  // The share of each link that the task fills while it runs at full speed on
  // the devices it really has; empty for tasks that do not communicate.
  std::vector<LinkUse> LinkUses(const TaskView& view, Duration duration) const;

 private:
  // The canonical members of a class.
  struct GroupClass {
    DeviceGroup group;
    DeviceGroup peer;
    std::vector<int> device_types;  // distinct, of `group`
    // Where axes have shares: `group` as the devices of each of these see it.
    std::vector<DeviceGroup> counted;
  };

  // The memos: by everything that a price, or a staging, depends on.
  struct Shard {
    std::shared_mutex mutex;
    std::unordered_map<IntKey, TaskCost, IntKeyHash> costs;
    std::unordered_map<IntKey, Bytes, IntKeyHash> staging;
  };
  static constexpr size_t kShards = 16;

  Shard& ShardOf(const IntKey& key) const;
  bool HostsAreAlike() const;
  const GroupClass& Class(int number) const;
  void AppendKey(const TaskView& view, IntKey& key) const;
  void SetAttentionShare(const TaskView& view, CostQuery& query) const;
  Fusion FusionAt(const TaskView& view) const;
  bool HasRows(std::string_view kernel) const;
  // Whether a product that adds is priced by rows of such: not where just its
  // size was timed, and writing alone.
  bool HasAddingRow(const Task& task, const ProfileKey& key) const;
  const FusedNode* FusedAt(const Task& task) const;
  double PartsSeconds(const Task& task, const CostQuery& query) const;
  double HostSeconds(const TaskView& view, const CostQuery& query) const;
  TaskCost Compute(const TaskView& view) const;
  CostQuery KernelQuery(const TaskView& view) const;
  void AddStack(const TaskView& view, const OpCall& call,
                CostQuery& query) const;
  static TaskView CountedView(const TaskView& view, const GroupClass& where,
                              size_t type);
  template <typename Traffic>
  double CopySeconds(const TaskView& view, Traffic traffic,
                     CostSource& source) const;
  double TierSeconds(const TaskView& view, CostSource& source) const;
  ProfileKey ExchangeKey(const TaskView& view) const;
  bool MovesSlots(const TaskView& view) const;
  AxisSet SplitAxes(const TaskView& view) const;
  int64_t Shards(const TaskView& view) const;
  Bytes Sent(const TaskView& view) const;
  std::vector<std::vector<DeviceId>> Exchanging(const TaskView& view,
                                                const DeviceGroup& group,
                                                const DeviceGroup& peer) const;
  double ExchangeSeconds(const TaskView& view, const GroupClass& where,
                         const CollectiveModel& collectives) const;

  const Graph& graph_;
  const Cluster& cluster_;
  const ProfileDb* profile_;
  const MeasuredProducts products_;
  CollectiveModel collectives_;
  // The same with no link slow; null where none is.
  std::unique_ptr<const Cluster> usual_;
  std::unique_ptr<CollectiveModel> usual_collectives_;
  bool hosts_alike_ = false;
  std::vector<int> first_device_;  // by host
  double devices_per_host_ = 1;    // the most
  std::vector<int> signature_;     // by node: operator and rule
  std::vector<Fusion> fusion_;     // by node
  const PricerOptions options_;
  std::vector<FusedNode> fused_;  // by node; empty: none is fused
  std::set<std::string> adding_;  // products whose rows include such that add
  // The fused kernel of updates and casts; empty: there is none.
  std::string_view update_with_cast_;
  bool casts_fused_ = false;  // with updates: its rows are there
  Routing routing_;
  std::vector<bool> exchanged_slots_;  // by tensor
  std::unordered_map<std::string_view, int> kernels_;

  mutable std::shared_mutex class_mutex_;
  mutable std::unordered_map<IntKey, int, IntKeyHash> class_numbers_;
  mutable std::vector<std::unique_ptr<const GroupClass>> classes_;
  mutable std::vector<Shard> shards_;
};

}  // namespace tessera
