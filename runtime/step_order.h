#pragma once
// How one rank enqueues a step on a device that works behind the host's back:
// which stream waits for which job, where every buffer lies, what is launched
// at once, and what is captured as graphs. Plain functions of plain data, so
// that they are tested without such a device.
//
// Jobs are enqueued in index order, each into its stream, and start when what
// is before them in the stream has ended and all that they wait for. A buffer
// has its place for the whole run: nothing is allocated within a step.

#include <cstdint>
#include <span>
#include <vector>

#include "planner/base/units.h"
#include "planner/lower/task_graph.h"
#include "runtime/kernels/kernel.h"

namespace tessera {

struct EnqueuedJob {
  int stream = 0;         // from 0
  std::vector<int> deps;  // jobs of smaller index that end before it starts
};

// By job the jobs of other streams that its stream waits for before it: of its
// dependencies those that do not follow from the order within streams and from
// other waits. Memory grows with jobs times streams.
std::vector<std::vector<int>> WaitsOf(const std::vector<EnqueuedJob>& jobs);

// A buffer that several jobs use, in index order; the first writes it.
struct BufferUse {
  Bytes bytes;
  std::vector<int> jobs;  // ascending, at least one
};

struct BufferPlaces {
  std::vector<int64_t> offsets;  // by buffer; multiples of the alignment
  Bytes arena;                   // what all need together
};

// Places buffers of a step in one arena, best fit in index order: a buffer
// takes the room of others whose last job came before its first. Where the
// streams do not order these jobs, the first gets the others as dependencies,
// by adding to `jobs`. Buffers that one stream alone uses share room only with
// each other, so that a stream seldom waits for another's memory. A step that
// follows on such a step starts when that has ended.
BufferPlaces PlaceBuffers(const std::vector<BufferUse>& buffers,
                          int64_t alignment, std::vector<EnqueuedJob>& jobs);

// ---- Launches ---------------------------------------------------------------

// What tells whether calls of a task can share a launch (Kernel::run_list).
struct ListedCall {
  const Kernel* kernel = nullptr;
  std::vector<DType> dtypes;    // of operands, then of results
  std::vector<ValueId> shared;  // the operands behind the first
  bool operator==(const ListedCall&) const = default;
};

// How many calls each launch of a task makes. A launch never has calls of two
// tasks, unless their kernels are fused: other streams wait for the end of a
// task, and would wait for both; and every task has a time of its own.
std::vector<int> LaunchSizes(std::span<const ListedCall> calls);

// ---- Graphs -----------------------------------------------------------------

// Whether what a rank does of a task can be captured and replayed
// (QueueDevice::BeginCapture): kernels on the device, slices, copies between
// device and host, and loads, which the host prepares before the step's work is
// enqueued. Not what needs the host amid a step: kernels on the host, files;
// and not collectives and messages, for which peers, and the host's watch over
// them, count every call.
bool IsCapturable(const Task& task, std::span<const Value> values);

// A part of a step: a job, or several that are captured once and replayed as
// one graph. A part is enqueued in its stream, behind the parts before it there
// and all that it waits for.
struct StepPart {
  int begin = 0;  // jobs [begin, end)
  int end = 0;
  bool captured = false;
  int stream = 0;          // that of its first job
  std::vector<int> waits;  // earlier parts, of other streams
};
struct StepParts {
  std::vector<StepPart> parts;  // in issue order
  // By job: the jobs of its graph, of other streams, that it waits for. Empty
  // outside of graphs.
  std::vector<std::vector<int>> waits_inside;
};

// Makes graphs of all runs of at least two jobs, by index, that are capturable.
// A graph begins when all has ended that its jobs wait for, and that came
// before them in their streams; whoever waits for one of its jobs, or follows
// it in its stream, waits for the whole graph. So what is ordered in `jobs` is
// ordered in parts.
StepParts PartsOf(const std::vector<EnqueuedJob>& jobs,
                  const std::vector<bool>& capturable);

}  // namespace tessera
