#pragma once
// TaskGraph: a plan as work. Lower makes it; the simulator runs it with a
// clock and the runtime with kernels, and both return a Timeline.
//
// Tasks and values are per device group, not per rank: a task is the work of
// every rank of its group (for a collective, of all subgroups over its axes),
// and what a rank does follows from its mesh coordinate. `tasks` is the issue
// order: every rank executes the tasks of its groups in this order. Within a
// stream tasks run in issue order; across streams only dependencies order.
// Groups that share a device share its compute stream: there a task waits for
// all earlier compute of these groups.

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/ids.h"
#include "planner/ir/graph.h"
#include "planner/lower/comm_kind.h"
#include "planner/plan/evaluation.h"
#include "planner/plan/layout.h"
#include "planner/plan/memory_tier.h"

namespace tessera {

// A buffer on every rank of a group: a tensor, or a microbatch of one, in one
// layout.
struct Value {
  std::string_view what;  // for people: "parameter", "m", "clip", …
  TensorId tensor;        // whose elements; invalid for step scalars
  GroupId group;
  Shape shape;                // of the microbatch, over the whole group
  int64_t sample_offset = 0;  // of the microbatch in the batch, on sample_dim
  int sample_dim = -1;
  DType dtype = DType::kFloat32;
  // What other software keeps of an element in its place (Stack::memory); by
  // `dtype` where not given.
  std::optional<int64_t> element_bytes;
  Layout layout;
  MemoryCategory category = MemoryCategory::kActivation;
  MemoryTier tier = MemoryTier::kDevice;
  // Lives through the whole run; otherwise from its first write to the last
  // task that reads it (or an alias of it).
  bool persistent = false;
  // Shares the buffer of this value, which nothing reads any more.
  ValueId alias_of;

  int64_t ElementBytes() const { return element_bytes.value_or(SizeOf(dtype)); }
};

enum class TaskKind : uint8_t {
  kLoad,     // fills an input value from the data
  kCompute,  // kernel on local shards
  kSlice,    // local change of layout: slice, mask, copy
  kCopy,     // reads[i] to writes[i], alike but on the next tier
  kComm,     // collective over `axes`; reads[i] becomes writes[i]
  kSend,     // reads[0] to the group of its `peer` value
  kRecv,     // writes[0], sent as the peer group's value
};

// The streams of a rank. A device without concurrent streams runs all on
// kCompute.
enum class StreamRole : uint8_t {
  kCompute,
  kComm,  // one for each (group, axes)
  kSendForward,
  kSendBackward,
  kRecvForward,
  kRecvBackward,
  kHost,       // kernels on the host's memory
  kCopyIn,     // host to device
  kCopyOut,    // device to host
  kFileRead,   // file to host
  kFileWrite,  // host to file
};

struct Task {
  TaskKind kind = TaskKind::kCompute;
  StreamRole stream = StreamRole::kCompute;
  CommKind comm = CommKind::kAllReduce;  // kComm only
  Pass pass = Pass::kForward;
  bool accumulate = false;  // kCompute: add to the results
  // Of a weight's gradient where a step has several microbatches: all but the
  // first add to the results.
  bool adds_microbatches = false;
  bool optimizer = false;  // belongs to the optimizer step
  // Starts only when all earlier compute of its group has ended (a gather of
  // parameters that may run ahead, but not further than memory allows).
  bool after_compute = false;
  GroupId group;
  AxisSet axes = 0;     // kComm: over which ranks exchange; of a kCompute on
                        // a communicator's stream: that of these axes
  int microbatch = -1;  // -1: once a step
  NodeId node;          // kCompute of a graph node, else invalid
  std::string_view
      kernel;  // kCompute: "linear", "cross_entropy.state", "adamw"
  // Optimizer kernels work on lists: "adamw" reads the gradients and then the
  // clip coefficient (if gradients are clipped or scaled) and updates
  // parameter, m, v of each in turn; "sgd" the parameters, "running_average"
  // those of distances; "square_sum" reads the gradients. In fp16 the state of
  // the loss scale stands behind these, and "clip_coefficient" updates it.
  // "cast" and "stochastic_cast" make writes[i] of reads[i]. A sum of squares
  // that has a tensor is that of the reads of this tensor. Factored lists:
  // factored_update.h.
  std::vector<ValueId> reads;
  std::vector<ValueId> writes;
  // kCompute: axes by operand; at nonzero coordinates of these the operand
  // counts as zero (a bias where the reduction is split). Empty: no masks.
  std::vector<AxisSet> masks;
  ValueId peer;  // kSend, kRecv: the value on the other side
  // kCompute: what the stack's kernel needs while it runs, so many bytes for
  // each element of one of its values; Tessera's own need nothing worth
  // counting.
  ValueId scratch_of;
  int64_t scratch_bytes = 0;
  // Ascending, all smaller than the task's own id. Tasks that precede it in
  // its own stream are left out: the stream orders them.
  std::vector<TaskId> deps;
  // The first task that does the same for another microbatch, on values of the
  // same shapes and layouts between the same groups: what takes the same time.
  // Invalid where there is none before this one.
  TaskId like;
};

struct TaskGraph {
  std::vector<DeviceGroup> groups;  // the plan's, then World(plan)
  GroupId world;
  std::vector<Value> values;
  std::vector<Task> tasks;
  ValueId loss;  // scalar, whole on its group after the step
  int microbatches = 1;
  int zigzag = 0;  // Plan::zigzag: how inputs are loaded

  const Value& value(ValueId id) const { return values[id.index()]; }
  const Task& task(TaskId id) const { return tasks[id.index()]; }
  const DeviceGroup& group(GroupId id) const { return groups[id.index()]; }
  std::span<const DeviceGroup> plan_groups() const {
    return {groups.data(), world.index()};
  }
  // The value that owns the buffer of `id`.
  ValueId Root(ValueId id) const;
};

// The tasks of a step that its loss depends on: the forward passes and the sum
// over ranks. Values keep their numbers.
TaskGraph LossOnly(const TaskGraph& graph);

// For each task the non-persistent buffers (roots) whose last use it is.
std::vector<std::vector<ValueId>> LastUses(const TaskGraph& graph);

// Whether a kCompute works in the host's memory, on values there.
bool OnHost(const Task& task, std::span<const Value> values);

// Bytes of the largest shard of a value.
Bytes LargestBytes(const TaskGraph& graph, ValueId value);

// Whether the task computes a forward node again in the backward pass.
bool IsRecomputed(const Graph& graph, const Task& task);

// A short name for traces: "h.3.attn.q_proj mb2", "all-reduce grad h.3".
std::string NameOf(const TaskGraph& tasks, const Graph& graph, TaskId id);

}  // namespace tessera
