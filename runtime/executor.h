#pragma once
// RankExecutor: runs the steps of a task graph on one rank, with kernels and
// collectives. Every rank of the job makes one from the same task graph and
// runs it as often as the others; what a rank does of a task follows from its
// position in the task's group. What is this rank's of the task graph says a
// RankView, where values lie StepBuffers; Create makes TaskWork of the tasks
// (runtime/step_work.h), fuses what the device has one kernel for
// (runtime/fuse_calls.h), and plans streams (runtime/step_jobs.h).
//
// On a device whose calls may come from several threads, streams run beside
// each other (runtime/streams.h): this rank's computation is one, each
// communicator one, and sends and receives one for each StreamRole. Memory then
// never exceeds what issue order needs. On a device with queues each stream is
// a queue, tasks are enqueued in issue order, and every buffer has a fixed
// place (runtime/queue_runner.h): a step allocates nothing and the host waits
// for its end alone. Otherwise all tasks run in issue order. Where a send waits
// for its receive, MeetingOrder (planner/lower/message_channels.h) takes the
// place of issue order, or messages are copied if there is none. Results do not
// depend on it.
//
// Thread safety: an executor belongs to one thread at a time, which alone calls
// Run, and between Runs data, ReadValue, WriteValue and all else; what Run does
// on other threads has ended when it returns. Only what the task graph alone
// tells (placement, position, tasks) may be asked from any thread.

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "planner/base/result.h"
#include "planner/ir/graph.h"
#include "planner/lower/factored_update.h"
#include "planner/lower/task_graph.h"
#include "planner/lower/timeline.h"
#include "planner/plan/matrix_form.h"
#include "planner/plan/plan.h"
#include "runtime/comm/communicator.h"
#include "runtime/device/device.h"
#include "runtime/queue_runner.h"
#include "runtime/rank_view.h"
#include "runtime/step_buffers.h"
#include "runtime/step_jobs.h"
#include "runtime/step_work.h"
#include "runtime/storage/file_tier.h"
#include "runtime/streams.h"

namespace tessera {

// Fills one rank's block of an input tensor in host memory. The block's offset
// says which samples and positions of the global batch it holds; the number is
// how many samples the run has taken before this batch.
using LoadInput =
    std::function<Result<void>(const Tensor&, const LocalTensor&, int64_t)>;

class RankExecutor {
 public:
  // Device i of the groups is rank i of `world`. Allocates what persists, with
  // unknown contents, and joins all groups: the ranks of the job call this
  // together. All references outlive the executor; `device` holds nothing else.
  // What the task graph keeps in files lies in one of this rank's own in
  // `files`.directory.
  static Result<std::unique_ptr<RankExecutor>> Create(
      const TaskGraph& tasks, const Graph& graph,
      const TrainingOptions& options, uint64_t seed, CommWorld& world,
      RankDevice& device, LoadInput load, const FileTierOptions& files = {});
  // Runs `tasks`, which is LossOnly of another executor's task graph, on that
  // one's weights: a Run computes the loss, without dropout. `of` outlives the
  // result, and the two do not run at the same time.
  static Result<std::unique_ptr<RankExecutor>> CreateForLoss(
      const TaskGraph& tasks, const RankExecutor& of, LoadInput load);

  // The optimizer step that the next Run makes, and the samples taken before
  // it, from 0. Run counts them up, by one and by the global batch.
  int64_t step() const { return step_; }
  int64_t samples() const { return samples_; }
  void set_progress(int64_t step, int64_t samples) {
    step_ = step;
    samples_ = samples;
  }
  // Whether the input "positions" holds places in the row, from 0; at first
  // not.
  void set_places_are_positions(bool yes) { places_are_positions_ = yes; }
  // Whether runs are equal bit for bit; at first they are.
  void set_deterministic(bool yes) { deterministic_ = yes; }
  // From the third Run from now on what can be captured of a step is replayed
  // as graphs (PartsOf in runtime/step_order.h). The first one prepares what
  // kernels prepare when they are first called; the second one is the last with
  // times of tasks. Results are the same, bit for bit. REQUIRES: a device with
  // queues. set_places_are_positions is not called any more.
  Result<void> UseGraphs();
  GraphUse graph_use() const;
  // Whether the next Run replays graphs.
  bool Replays() const;
  // Of the next steps; at first TrainingOptions::learning_rate.
  void set_learning_rate(double rate);

  // One training step, measured from when the call begins. The timeline of one
  // that replays graphs has no spans. An error of a task, or of a graph, names
  // it; the job has then been aborted, and this executor is of no further use.
  // REQUIRES: `tasks` is that of Create.
  Result<Timeline> Run(const TaskGraph& tasks);

  // This rank's buffer of a value, in the memory of its tier, and where its
  // elements belong; null on the ranks outside of the value's group, and for
  // what lies in a file. Persistent values, and after a Run the loss.
  void* data(ValueId value) const { return buffers_.data(value); }
  Placement placement(ValueId value) const { return view_.placement(value); }
  // Whether this rank has a part of a persistent value, on whatever tier; and
  // that part from and to memory of the caller.
  bool Holds(ValueId value) const { return buffers_.Holds(value); }
  Result<void> ReadValue(ValueId value, void* to) const {
    return buffers_.Read(value, to, {}, view_.BytesOf(value));
  }
  // Of that part `size` bytes from `offset` on.
  Result<void> ReadValue(ValueId value, void* to, Bytes offset,
                         Bytes size) const {
    return buffers_.Read(value, to, offset, size);
  }
  Result<void> WriteValue(ValueId value, const void* from) {
    return buffers_.Write(value, from, {}, view_.BytesOf(value));
  }
  // Of that part `size` bytes from `offset` on, a multiple of kFileBlockBytes.
  Result<void> WriteValue(ValueId value, const void* from, Bytes offset,
                          Bytes size) {
    return buffers_.Write(value, from, offset, size);
  }
  // What the last of `steps` steps has made of the masters of a 16-bit
  // parameter's elements here; of no step the nearest numbers.
  std::vector<std::byte> RoundedMasters(ValueId parameter,
                                        std::span<float> masters,
                                        int64_t steps) const;
  // Makes that part zero, without bytes from the host. REQUIRES: it lies on the
  // device.
  void ZeroValue(ValueId value);
  // The peak of what this rank keeps in the host's memory, and its file; null
  // where it has none.
  MemoryUse host_peak() const;
  const FileTier* file() const { return buffers_.file(); }

  // Index of this rank in a group of the task graph, or -1.
  int position(GroupId group) const { return view_.position(group); }

  const TaskGraph& tasks() const { return tasks_; }
  RankDevice& device() const { return device_; }
  CommWorld& world() const { return world_; }

 private:
  RankExecutor(const TaskGraph& tasks, const Graph& graph,
               const TrainingOptions& options, uint64_t seed, CommWorld& world,
               RankDevice& device, LoadInput load,
               const RankExecutor* lender = nullptr);
  Result<void> Prepare(const FileTierOptions& files);
  Result<void> JoinGroups();
  Result<void> MakeQueueRunner();
  // By work its stream, from 0; and what tells that one apart.
  std::vector<int> StreamsOfWork() const;
  const void* StreamOf(const TaskWork& work) const;
  // executor_kernels.cc
  class ListCalls;
  // Facts of the graph, by tensor, made when the first task wants them.
  struct KernelFacts {
    std::vector<double> running_momenta;
    std::map<TensorId, std::optional<MatrixForm>> matrix_forms;
  };
  Result<void> PrepareCompute(const Task& task, KernelFacts& facts,
                              TaskWork& work);
  Result<void> PrepareFactoredKernel(const Task& task,
                                     const FactoredKernel& kernel,
                                     KernelFacts& facts, TaskWork& work);
  std::vector<Attribute> RoundingAttributes(ValueId parameter) const;
  // Whether all integers among the values are the input "positions".
  bool ReadsPositions(const std::vector<ValueId>& values) const;
  // What a kernel of `device` does.
  Result<TaskCall> MakeCall(const RankDevice& device, std::string_view kernel,
                            std::vector<ValueId> reads,
                            std::vector<ValueId> writes) const;

  void PrepareSlices(const Task& task, TaskWork& work) const;
  // That of a task's exchange over its axes.
  Communicator& CommunicatorOf(const Task& task) const;
  void PrepareCollective(const Task& task, CollectiveMaker& collectives,
                         TaskWork& work) const;
  void PrepareTransfer(const Task& task, TaskWork& work) const;
  Result<void> OpenChannels();

  Result<Timeline> RunInThreads();
  Result<void> RunStaged(TaskWork& work);
  // `staged` is memory of work.staging bytes. `captured` is null but in a
  // capture (QueueHooks::run).
  Result<void> RunTask(TaskWork& work, void* staged,
                       const StepNumbers* captured);
  // Allocates what a task uses first; and frees what it used last.
  Result<void> Admit(const TaskWork& work);
  HeldBytes Release(const TaskWork& work);
  Result<void> RunLoad(const TaskWork& work, bool captured);
  // What a load writes, to where its inputs, or one of them, lie.
  Result<void> FillInputs(const TaskWork& work) const;
  Result<void> FillInput(ValueId value, const LocalTensor& block) const;
  Result<void> FillZigzag(const Tensor& tensor, const LocalTensor& block) const;
  Result<void> RunCopy(const Task& task);
  // In order of the queue in use, where there are queues.
  Result<void> RunOnHost(std::function<Result<void>()> function);
  Result<void> RunCalls(TaskWork& work, const StepNumbers* captured);
  void LaunchCalls(TaskWork& work, RankDevice& device,
                   const StepNumbers* captured);
  KernelCall KernelCallOf(TaskCall& call, RankDevice& device,
                          const StepNumbers* captured) const;
  // Where a task computes.
  RankDevice& DeviceOf(const Task& task) const;

  const TaskGraph& tasks_;
  const Graph& graph_;
  const TrainingOptions options_;
  const uint64_t seed_;
  const RankView view_;
  CommWorld& world_;
  RankDevice& device_;
  QueueDevice* const queue_device_;  // the same, or null
  StepBuffers buffers_;
  const LoadInput load_input_;
  const RankExecutor* const lender_;  // whose weights these are, or null
  int64_t step_ = 0;
  int64_t samples_ = 0;
  double learning_rate_;
  bool places_are_positions_ = false;
  bool deterministic_ = true;

  Communicator* everyone_ = nullptr;
  std::vector<TaskWork> work_;  // in issue order
  StepJobs jobs_;
  std::vector<int> uses_left_;  // by root: of the jobs that have not ended
  // On a device with queues. Uses what stands above.
  std::unique_ptr<QueueRunner> queue_runner_;
};

}  // namespace tessera
