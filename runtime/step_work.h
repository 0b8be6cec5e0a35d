#pragma once
// What one rank does of the tasks of a step: which kernels it calls on which
// tensors, what it copies and communicates, and the buffers that takes. Plain
// data, made once and run in every step.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "planner/base/units.h"
#include "planner/ir/graph.h"
#include "planner/lower/task_graph.h"
#include "planner/lower/timeline.h"
#include "planner/plan/layout.h"
#include "runtime/kernels/kernel.h"
#include "runtime/placement.h"
#include "runtime/reshard_exec.h"

namespace tessera {

// One call of a kernel; data pointers are filled in when it runs.
struct TaskCall {
  const Kernel* kernel = nullptr;
  const IndexRule* rule = nullptr;
  std::vector<Attribute> attributes;
  std::vector<ValueId> reads;  // invalid: masked, or the scalar 1
  std::vector<ValueId> writes;
  std::vector<LocalTensor> operands;
  std::vector<LocalTensor> results;
  bool accumulate = false;
  std::optional<Range> run;
  bool reads_positions = false;  // and no other integers: attention
  bool alone = false;            // no other rank computes the same
};

// kSlice, for one value.
struct TaskSlice {
  ValueId from;
  ValueId to;
  bool zero = false;  // this rank holds nothing of the sum
  std::vector<BoxCopy> copies;
};

// What this rank does of a task.
struct TaskWork {
  TaskId task;
  std::string name;
  std::vector<ValueId> zeroes;  // results that start as zero
  std::vector<TaskCall> calls;
  std::vector<int> launches;  // how many calls each of them makes
  std::vector<TaskSlice> slices;
  // kLoad: by Task::writes; with graphs in pinned memory that these copy to the
  // device.
  std::vector<LocalTensor> inputs;
  std::shared_ptr<const Collective> collective;  // perhaps of several tasks
  std::unique_ptr<GroupTransfer> transfer;
  GroupTransfer::Way way;
  // What it reads or writes besides, for the tasks that it is fused with.
  std::vector<ValueId> also_uses;
  // By work, itself included, what its time is divided by: of one product for
  // several tasks.
  std::vector<std::pair<size_t, int64_t>> shares;
  // Roots that are not persistent, without the loss.
  std::vector<ValueId> uses;
  std::vector<ValueId> allocates;  // whose first use this is
  Bytes staging;                   // besides, while it runs
  void* staged = nullptr;          // its place, on a device with queues
};

// Says how many calls each launch of a task makes (LaunchSizes in
// runtime/step_order.h), by kernels, types and operands.
void PlanLaunches(TaskWork& work);

// A span for each work, without times.
Timeline EmptyTimeline(const TaskGraph& tasks, std::span<const TaskWork> work,
                       int rank);

}  // namespace tessera
