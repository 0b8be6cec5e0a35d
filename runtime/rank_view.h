#pragma once
// RankView: what a task graph is to one rank: where in the groups it stands,
// which elements of the values it has, and which tasks leave it something to
// do. A pure function of the task graph and the rank.
//
// Thread safety: immutable.

#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "planner/base/units.h"
#include "planner/ir/graph.h"
#include "planner/lower/task_graph.h"
#include "planner/plan/layout.h"
#include "planner/plan/transfer.h"
#include "runtime/kernels/kernel.h"

namespace tessera {

// A value's block at a placement, without data: of a flat layout the block of
// which the rank keeps a run.
LocalTensor BlockOf(const Value& value, const Placement& here);

class RankView {
 public:
  // Both outlive it.
  RankView(const TaskGraph& tasks, const Graph& graph, int rank);

  const TaskGraph& tasks() const { return tasks_; }

  // Index of this rank in a group, or -1.
  int position(GroupId group) const { return group_positions_[group.index()]; }
  // The positions in a task's group of the ranks that it joins this one with.
  // REQUIRES: it is a kComm, or on the stream of these; and this rank is in the
  // group.
  const std::vector<int>& Subgroup(const Task& task) const;
  // These ranks.
  std::vector<int> RanksOfSubgroup(const Task& task) const;

  // What follows is of values whose group has this rank.

  Placement placement(ValueId value) const;
  // Those of other positions of the value's group.
  std::vector<Placement> Placements(ValueId value,
                                    std::span<const int> positions) const;
  Bytes BytesOf(ValueId value) const;
  // This rank's part as a tensor of the whole batch, without data. Of a flat
  // layout a vector of the run.
  LocalTensor local(ValueId value) const;
  // A value of a weight as the block of the whole weight that it is, or that it
  // has the elements `run` of (flat layouts). Without data.
  LocalTensor InWeight(ValueId value, std::optional<Range>& run) const;
  // A value of a weight, with groups of so many dimensions made one each: this
  // rank's block of it (of a flat layout the block that is cut), placed in what
  // the rank has of all tiles; and the whole's extents. Without data.
  LocalTensor Regrouped(ValueId value, std::span<const size_t> groups) const;

  // Whether this rank is away from the root that alone has the value.
  bool IsAbsent(ValueId value) const;
  // Whether no other rank of its group has the same part of a value.
  bool IsAlone(ValueId value) const;
  // Whether a task leaves this rank nothing to do, since all that it makes is
  // elsewhere. REQUIRES: this rank is in the task's group.
  bool IsIdle(const Task& task) const;

 private:
  const TaskGraph& tasks_;
  const Graph& graph_;
  std::vector<int> group_positions_;  // by group
  // By group and axes, of the exchanges that this rank has part in.
  std::map<std::pair<GroupId, AxisSet>, std::vector<int>> subgroups_;
};

}  // namespace tessera
