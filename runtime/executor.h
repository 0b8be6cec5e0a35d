#pragma once
// RankExecutor: runs the steps of a task graph on one rank, with kernels and
// collectives. Every rank of the job makes one from the same task graph and
// runs it as often as the others; what a rank does of a task follows from its
// position in the task's group.
//
// On a device whose calls may come from several threads, streams run beside
// each other (runtime/streams.h): this rank's computation is one, each
// communicator one, and sends and receives one for each StreamRole. Memory then
// never exceeds what issue order needs. On a device with queues each stream is
// a queue, tasks are enqueued in issue order, and every buffer has a fixed
// place (runtime/step_order.h): a step allocates nothing and the host waits for
// its end alone. Otherwise all tasks run in issue order. Where a send waits for
// its receive, MeetingOrder (planner/lower/message_channels.h) takes the place
// of issue order, or messages are copied if there is none. Results do not
// depend on it.
//
// Thread safety: an executor belongs to one thread at a time, which alone calls
// Run, and between Runs data, ReadValue, WriteValue and all else; what Run does
// on other threads has ended when it returns. Only what the task graph alone
// tells (placement, position, tasks) may be asked from any thread.

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "planner/base/result.h"
#include "planner/ir/graph.h"
#include "planner/lower/factored_update.h"
#include "planner/lower/file_layout.h"
#include "planner/lower/task_graph.h"
#include "planner/lower/timeline.h"
#include "planner/plan/matrix_form.h"
#include "planner/plan/plan.h"
#include "runtime/comm/communicator.h"
#include "runtime/device/cpu_device.h"
#include "runtime/device/device.h"
#include "runtime/placement.h"
#include "runtime/reshard_exec.h"
#include "runtime/step_order.h"
#include "runtime/storage/file_tier.h"
#include "runtime/streams.h"

namespace tessera {

// What of a step is replayed as graphs.
struct GraphUse {
  int64_t graphs = 0;
  int64_t tasks = 0;                    // of this rank
  int64_t captured = 0;                 // of these in graphs
  std::map<std::string, int64_t> left;  // of the others how many of each kind
};

// Fills one rank's block of an input tensor in host memory. The block's offset
// says which samples and positions of the global batch it holds; the number is
// how many samples the run has taken before this batch.
using LoadInput =
    std::function<Result<void>(const Tensor&, const LocalTensor&, int64_t)>;

// A value's block at a placement, without data: of a flat layout the block of
// which the rank keeps a run.
LocalTensor BlockOf(const Value& value, const Placement& here);

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
  ~RankExecutor();

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
  const GraphUse& graph_use() const { return graph_use_; }
  // Whether the next Run replays graphs.
  bool Replays() const { return numbers_ != nullptr && runs_singly_ == 0; }
  // Of the next steps; at first TrainingOptions::learning_rate.
  void set_learning_rate(double rate);

  // One training step, measured from when the call begins. The timeline of one
  // that replays graphs has no spans. An error names the task; the job has then
  // been aborted, and this executor is of no further use.
  // REQUIRES: `tasks` is that of Create.
  Result<Timeline> Run(const TaskGraph& tasks);

  // This rank's buffer of a value, in the memory of its tier, and where its
  // elements belong; null on the ranks outside of the value's group, and for
  // what lies in a file. Persistent values, and after a Run the loss.
  void* data(ValueId value) const;
  Placement placement(ValueId value) const;
  // The same as a tensor of the whole batch. REQUIRES: the rank is in the
  // value's group. Of a flat layout a vector of the run.
  LocalTensor local(ValueId value) const;
  // Whether this rank has a part of a persistent value, on whatever tier; and
  // that part from and to memory of the caller.
  bool Holds(ValueId value) const;
  Result<void> ReadValue(ValueId value, void* to) const;
  Result<void> WriteValue(ValueId value, const void* from);
  // Of that part `size` bytes from `offset` on, a multiple of kFileBlockBytes.
  Result<void> WriteValue(ValueId value, const void* from, Bytes offset,
                          Bytes size);
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
  const FileTier* file() const { return files_.get(); }

  // Index of this rank in a group of the task graph, or -1.
  int position(GroupId group) const { return positions_[group.index()]; }

  const TaskGraph& tasks() const { return tasks_; }
  RankDevice& device() const { return device_; }
  CommWorld& world() const { return world_; }

 private:
  // One call of a kernel; data pointers are filled in when it runs.
  struct Call {
    const Kernel* kernel = nullptr;
    const IndexRule* rule = nullptr;
    std::vector<Attribute> attributes;
    std::vector<ValueId> reads;  // invalid: One(), or masked
    std::vector<ValueId> writes;
    std::vector<LocalTensor> operands;
    std::vector<LocalTensor> results;
    bool accumulate = false;
    std::optional<Range> run;
    bool reads_positions = false;  // and no other integers: attention
    bool alone = false;            // no other rank computes the same
  };
  // kSlice, for one value.
  struct Slice {
    ValueId from;
    ValueId to;
    bool zero = false;  // this rank holds nothing of the sum
    std::vector<BoxCopy> copies;
  };
  // What this rank does of a task.
  struct Work {
    TaskId task;
    std::string name;
    std::vector<ValueId> zeroes;  // results that start as zero
    std::vector<Call> calls;
    std::vector<int> launches;  // how many calls each of them makes
    std::vector<Slice> slices;
    // By Task::writes; with graphs in `loaded_`.
    std::vector<LocalTensor> loads;
    std::unique_ptr<Collective> collective;
    std::unique_ptr<GroupTransfer> transfer;
    GroupTransfer::Way way;
    // What it reads or writes besides, for the tasks that it is fused with.
    std::vector<ValueId> fused;
    // By work, itself included, what its time is divided by: of one product for
    // several tasks.
    std::vector<std::pair<size_t, int64_t>> shares;
    // Roots that are not persistent, without the loss.
    std::vector<ValueId> uses;
    std::vector<ValueId> allocates;  // whose first use this is
    Bytes staging;                   // besides, while it runs
    void* staged = nullptr;          // its place, on a device with queues
  };

  RankExecutor(const TaskGraph& tasks, const Graph& graph,
               const TrainingOptions& options, uint64_t seed, CommWorld& world,
               RankDevice& device, LoadInput load,
               const RankExecutor* weights = nullptr);
  Result<void> Prepare(const FileTierOptions& files);
  Result<void> OpenTiers(const FileTierOptions& files);
  Result<void> JoinGroups();
  void SizeBuffers();
  void ExpectPersistent();
  Result<void> AllocatePersistent();
  class Fuser;
  void FuseCalls();  // executor_fusion.cc
  void FindLifetimes();
  void PlanStreams();
  // What had a file value's place before it has ended when `job`, its first,
  // starts.
  void AwaitPlace(ValueId root, StreamJob& job);
  // executor_queues.cc
  Result<void> PlanQueues();
  Result<void> PlaceTier(MemoryTier tier);
  Result<void> MakeArena(MemoryTier tier, Bytes bytes);
  Result<void> Pin(void* data, Bytes bytes);
  int StreamOf(const Work& work);
  // executor_kernels.cc
  class ListCalls;
  Result<void> PrepareCompute(const Task& task, Work& work);
  static void PlanLaunches(Work& work);
  Result<void> PrepareFactoredKernel(const Task& task,
                                     const FactoredKernel& kernel, Work& work);
  // A value of a weight as the block of the whole weight that it is, or that it
  // has the elements `run` of (flat layouts). Without data.
  LocalTensor InWeight(ValueId value, std::optional<Range>& run) const;
  std::vector<Attribute> RoundingAttributes(ValueId parameter) const;
  // A value of a weight, with groups of so many dimensions made one each: this
  // rank's block of it (of a flat layout the block that is cut), placed in what
  // the rank has of all tiles; and the whole's extents.
  LocalTensor Regrouped(ValueId value, const std::vector<size_t>& groups) const;
  // Whether no other rank of its group has the same part of a value.
  bool IsAlone(ValueId value) const;
  // Whether all integers among the values are the input "positions".
  bool ReadsPositions(const std::vector<ValueId>& values) const;
  // What a kernel of `device` does.
  Result<Call> MakeCall(const RankDevice& device, std::string_view kernel,
                        std::vector<ValueId> reads,
                        std::vector<ValueId> writes) const;
  // Memory of `device` that holds the scalar 1: the clip coefficient where none
  // is computed.
  Result<void*> One(RankDevice& device);

  void PrepareSlices(const Task& task, Work& work) const;
  // That of a task's exchange over its axes.
  Communicator& CommunicatorOf(const Task& task) const;
  void PrepareCollective(const Task& task, Work& work) const;
  void PrepareTransfer(const Task& task, Work& work) const;
  Result<void> OpenChannels();

  Timeline EmptyTimeline() const;
  Result<Timeline> RunInThreads();
  // executor_queues.cc
  Result<Timeline> RunInQueues();
  Result<Timeline> TimelineOfQueues();
  Result<void> RunJob(int job);
  Result<void> RunGraph(size_t part);
  Result<int> Capture(size_t part);
  Result<void> PlaceLoads();
  Result<void> FillLoads();
  int EndMarkOf(const StepParts& step, int part) const;
  Result<void> RunStaged(Work& work);
  // `staged` is memory of work.staging bytes.
  Result<void> RunTask(Work& work, void* staged);
  // Allocates what a task uses first; and frees what it used last.
  Result<void> Admit(const Work& work);
  HeldBytes Release(const Work& work);
  Result<void> RunLoad(const Work& work);
  Result<void> Load(ValueId value, LocalTensor block, std::byte* host) const;
  Result<void> LoadZigzag(const Tensor& tensor, const LocalTensor& block) const;
  Result<void> RunCopy(const Task& task);
  // In order of the queue in use, where there are queues.
  Result<void> RunOnHost(std::function<Result<void>()> function);
  Result<void> RunCalls(Work& work);
  void LaunchCalls(Work& work, RankDevice& device);
  KernelCall KernelCallOf(Call& call, RankDevice& device) const;
  Result<void> Allocate(ValueId root);
  void Free(ValueId root);
  bool InFile(ValueId root) const;
  // Of a buffer's tier; of what lies in a file nothing.
  HeldBytes MemoryOf(ValueId root) const;

  std::vector<Placement> Placements(ValueId value,
                                    const std::vector<int>& positions) const;
  Bytes BytesOf(ValueId value) const;
  // The device of a tier's memory, which is none in a file; and where a task
  // computes.
  RankDevice& DeviceOf(MemoryTier tier) const;
  RankDevice& DeviceOf(const Task& task) const;
  // Whether this rank is away from the root that alone has the value.
  bool IsAbsent(ValueId value) const;
  // Whether a task leaves this rank nothing to do, since all that it makes is
  // elsewhere.
  bool IsIdle(const Task& task) const;

  const TaskGraph& tasks_;
  const Graph& graph_;
  const TrainingOptions options_;
  const uint64_t seed_;
  CommWorld& world_;
  RankDevice& device_;
  const LoadInput load_;
  const RankExecutor* const weights_ = nullptr;  // whose weights these are
  // Memory of the host, and the file; null where no value is there. Those of
  // `weights_` where there are such.
  std::shared_ptr<CpuDevice> host_;
  std::shared_ptr<FileTier> files_;
  int64_t step_ = 0;
  bool places_are_positions_ = false;
  bool deterministic_ = true;
  int64_t samples_ = 0;

  std::vector<int> positions_;  // of this rank, by group
  Communicator* everyone_ = nullptr;
  std::vector<ValueId> roots_;       // by value
  std::vector<Bytes> buffer_bytes_;  // by root value
  std::vector<void*> buffers_;       // by root value
  std::vector<Bytes> offsets_;       // by value, in the root's buffer
  // Persistent values whose buffers lie one behind the other, as one.
  std::vector<std::vector<ValueId>> rows_of_buffers_;
  FileLayout layout_;  // of the file, if there is one
  // One() of a device, once it is wanted.
  std::vector<std::pair<RankDevice*, void*>> ones_;
  // By tensor, once running averages are updated.
  std::vector<double> running_momenta_;
  // By weight, once a factored optimizer's kernels want them.
  std::map<TensorId, std::optional<MatrixForm>> matrix_forms_;
  std::vector<Work> work_;
  std::vector<int> use_counts_;  // by root value: of tasks that use it
  std::vector<int> uses_left_;   // by root value: of those not ended

  // By task of this rank.
  std::vector<StreamJob> jobs_;
  // Who has had a place in the file, with its jobs, as PlanStreams goes on.
  std::vector<std::pair<ValueId, std::vector<int>>> placed_;
  HeldBytes budget_;
  std::vector<const void*> streams_;  // what tells the streams apart

  // On a device with queues: the jobs as they are enqueued, job by job, and the
  // queue of each stream.
  QueueDevice* const queues_;
  std::vector<EnqueuedJob> enqueued_;
  StepParts jobs_apart_;
  std::vector<int> follows_;  // by job: the one with whose end it begins, or -1
  std::vector<int> queue_of_;
  std::map<StreamRole, std::vector<int>> queues_of_role_;
  // With graphs: the parts of a step; by part the graph's number, or -1, and
  // its name; how many more steps run without graphs.
  StepParts parts_;
  std::vector<int> graphs_;
  std::vector<std::string> graph_names_;
  GraphUse graph_use_;
  int runs_singly_ = 0;
  bool capturing_ = false;
  StepNumbers* numbers_ = nullptr;  // in the device's memory; null: no graphs
  std::vector<std::byte> loaded_;   // what graphs copy to the device
  double learning_rate_;
  // What holds the buffers of a step on the device and on the host.
  struct Arena {
    void* data = nullptr;
    Bytes bytes;
  };
  std::array<Arena, kMemoryTiers> arenas_;
  std::vector<void*> pinned_;
};

}  // namespace tessera
