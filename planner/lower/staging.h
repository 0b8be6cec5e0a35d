#pragma once
// Staging: the memory in which the ranks of a collective or transfer pack what
// they send and receive, where buffers do not lie in the order in which it
// travels. It is taken while the task runs. Pure functions of layouts, so that
// the cost model predicts what the runtime (runtime/reshard_exec.h) takes.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "planner/lower/task_graph.h"

namespace tessera {

// Tensors below this size share a message of their collective: the start of a
// collective between processes of one host takes about as long as copying this
// much (tens of microseconds at a few GB/s).
inline constexpr int64_t kShareBelowBytes = 256 * 1024;

// The most bytes that the rank at `position` of the group stages at one time in
// a task; without a position, that the one that stages most does. Exact but for
// exchanges of unequal shards within groups of a thousand ranks or more, where
// ranks are taken to send in proportion to their shards, and for sends of what
// several ranks hold, of which some may send nothing. `values` are what the
// task's ids index, on `group`; `peer` is the value on the other side of a send
// or receive and `peer_group` its group, else null.
Bytes StagingBytes(const Task& task, std::span<const Value> values,
                   const DeviceGroup& group, const Value* peer,
                   const DeviceGroup* peer_group,
                   std::optional<int> position = {});

// Appends all that StagingBytes depends on, but for the groups and the
// position.
void AppendStagingKey(const Task& task, std::span<const Value> values,
                      const Value* peer, std::vector<int64_t>& key);

// What the task's kernel needs beside its values while it runs
// (Task::scratch_of), of the rank at `position`, or of that which needs most.
Bytes ScratchBytes(const Task& task, std::span<const Value> values,
                   const DeviceGroup& group, std::optional<int> position = {});

}  // namespace tessera
