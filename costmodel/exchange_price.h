#pragma once
// ExchangePrices: the time of collectives and sends by the alpha-beta model
// (collective/collective.h), or as they were measured, and what the cluster's
// stack makes of either; and how they load the links.
//
//   kComm     the collective over all subgroups of `axes` at once; several
//             buffers are one payload.
//   kSend     pairs of ranks: destination rank j of n receives its block from
//             source rank j*m/n of m. Where the stack splits sends, each of
//             the ranks that have the block alike sends a part, and the
//             destination's gather them.
//
// Where links are slow (LinkType::slowness) or parts failed, what was measured
// of a collective takes as many times as long as the alpha-beta model does,
// against how the cluster was before. The stack takes from collectives of
// activations that belong to tensor parallelism what products hide; gathers of
// parameters amid the passes it slows.
//
// Thread-safe.

#include <memory>
#include <vector>

#include "costmodel/collective/collective.h"
#include "costmodel/expert_exchange.h"
#include "costmodel/group_classes.h"
#include "costmodel/link/fair_share.h"
#include "costmodel/memo.h"
#include "costmodel/profile/profile_db.h"
#include "costmodel/source/cost_source.h"
#include "costmodel/task_view.h"
#include "planner/base/units.h"
#include "planner/ir/cluster.h"
#include "planner/ir/graph.h"

namespace tessera {

// What a kComm or kSend moves, as costmodel/collective counts it.
Bytes PayloadOf(const TaskView& view);

class ExchangePrices {
  // Who exchange with each other.
  using RankGroups = std::vector<std::vector<DeviceId>>;

 public:
  // `profile` may be null, and so may `whole`: the cluster before parts failed,
  // with the same devices, numbered alike, and maybe others behind them.
  // `cluster` and `profile` outlive this, unchanged.
  ExchangePrices(const Graph& graph, const Cluster& cluster,
                 const ProfileDb* profile, const Cluster* whole = nullptr);

  const Router& router() const { return collectives_.router(); }
  // Whether tokens and experts exchange it.
  bool HasSlots(TensorId tensor) const {
    return exchanged_slots_[tensor.index()];
  }

  // All that a price depends on, but for the classes of the groups.
  void AppendKey(const TaskView& view, IntKey& key) const;

  // `where` is the class of a kComm's group, of a kSend's pair of groups.
  Cost Price(const TaskView& view, const GroupClass& where) const;
  ProfileKey KeyOf(const TaskView& view, const GroupClass& where) const;

  // The share of each link that the task fills while it runs at full speed on
  // the devices it really has.
  std::vector<LinkUse> LinkUses(const TaskView& view, Duration duration) const;

 private:
  bool MovesSlots(const TaskView& view) const;
  AxisSet SplitAxes(const TaskView& view) const;
  int64_t Shards(const TaskView& view) const;
  Bytes Sent(const TaskView& view) const;
  ProfileKey KeyOf(CommKind kind, const RankGroups& groups,
                   Bytes payload) const;
  Cost Collective(CommKind kind, const RankGroups& groups, Bytes payload) const;
  double OfStack(const TaskView& view, double seconds) const;

  const Cluster& cluster_;
  const ProfileDb* const profile_;
  const CollectiveModel collectives_;
  // As it was when its collectives were measured; null where it still is.
  const std::unique_ptr<const Cluster> usual_;
  const std::unique_ptr<const CollectiveModel> usual_collectives_;
  const Routing routing_;
  const std::vector<bool> exchanged_slots_;  // by tensor
};

}  // namespace tessera
