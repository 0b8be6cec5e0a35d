#include "runtime/executor.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <limits>
#include <type_traits>
#include <utility>

#include "planner/lower/message_channels.h"
#include "planner/plan/sequence_order.h"
#include "runtime/device/staging.h"
#include "runtime/float16.h"
#include "runtime/fuse_calls.h"

namespace tessera {
namespace {

std::vector<TaskId> IssueOrder(const TaskGraph& tasks) {
  std::vector<TaskId> order;
  for (size_t t = 0; t < tasks.tasks.size(); ++t) order.emplace_back(t);
  return order;
}

std::vector<int> WorldRanks(const DeviceGroup& group) {
  std::vector<int> ranks;
  for (DeviceId device : group.devices) ranks.push_back(device.value);
  return ranks;
}

}  // namespace

Result<std::unique_ptr<RankExecutor>> RankExecutor::Create(
    const TaskGraph& tasks, const Graph& graph, const TrainingOptions& options,
    uint64_t seed, CommWorld& world, RankDevice& device, LoadInput load,
    const FileTierOptions& files) {
  std::unique_ptr<RankExecutor> executor(new RankExecutor(
      tasks, graph, options, seed, world, device, std::move(load)));
  TESSERA_RETURN_IF_ERROR(executor->Prepare(files));
  return executor;
}

Result<std::unique_ptr<RankExecutor>> RankExecutor::CreateForLoss(
    const TaskGraph& tasks, const RankExecutor& of, LoadInput load) {
  std::unique_ptr<RankExecutor> executor(
      new RankExecutor(tasks, of.graph_, of.options_, of.seed_, of.world_,
                       of.device_, std::move(load), &of));
  TESSERA_RETURN_IF_ERROR(executor->Prepare({}));
  return executor;
}

RankExecutor::RankExecutor(const TaskGraph& tasks, const Graph& graph,
                           const TrainingOptions& options, uint64_t seed,
                           CommWorld& world, RankDevice& device, LoadInput load,
                           const RankExecutor* lender)
    : tasks_(tasks),
      graph_(graph),
      options_(options),
      seed_(seed),
      view_(tasks, graph, world.world_rank()),
      world_(world),
      device_(device),
      queue_device_(device.queues()),
      buffers_(view_, device, lender == nullptr ? nullptr : &lender->buffers_),
      load_input_(std::move(load)),
      lender_(lender),
      learning_rate_(options.learning_rate) {}

// ---- Preparation

Result<void> RankExecutor::Prepare(const FileTierOptions& files) {
  TESSERA_RETURN_IF_ERROR(JoinGroups());
  TESSERA_RETURN_IF_ERROR(buffers_.OpenTiers(files));

  std::vector<TaskId> order = IssueOrder(tasks_);
  bool in_turn = true;  // how messages go
  if (everyone_->SendInTurnWaits()) {
    auto meetings = MeetingOrder(tasks_);
    in_turn = meetings.has_value();
    if (in_turn) order = *std::move(meetings);
  }
  KernelFacts facts;
  CollectiveMaker collectives;
  for (TaskId id : order) {
    const Task& task = tasks_.task(id);
    if (view_.position(task.group) < 0 || view_.IsIdle(task)) continue;
    TaskWork work;
    work.task = id;
    work.name = NameOf(tasks_, graph_, work.task);
    switch (task.kind) {
      case TaskKind::kLoad:
        for (ValueId value : task.writes) {
          work.inputs.push_back(view_.local(value));
        }
        break;
      case TaskKind::kCompute:
        if (auto done = PrepareCompute(task, facts, work); !done) {
          return done.error().At(work.name);
        }
        break;
      case TaskKind::kSlice:
        PrepareSlices(task, work);
        break;
      case TaskKind::kCopy:
        break;
      case TaskKind::kComm:
        PrepareCollective(task, collectives, work);
        break;
      case TaskKind::kSend:
      case TaskKind::kRecv:
        PrepareTransfer(task, work);
        break;
    }
    work_.push_back(std::move(work));
  }
  if (in_turn) TESSERA_RETURN_IF_ERROR(OpenChannels());
  FuseCalls(view_, device_, buffers_, work_);
  jobs_ = PlanJobs(tasks_, buffers_, StreamsOfWork(), work_);
  TESSERA_RETURN_IF_ERROR(buffers_.AllocatePersistent());
  return queue_device_ == nullptr ? Result<void>() : MakeQueueRunner();
}

Result<void> RankExecutor::MakeQueueRunner() {
  QueueHooks hooks;
  hooks.run = [this](TaskWork& work, const StepNumbers* captured) {
    return RunTask(work, work.staged, captured);
  };
  hooks.fill_inputs = [this](const TaskWork& work) { return FillInputs(work); };
  const QueueRunner* const lender =
      lender_ == nullptr ? nullptr : lender_->queue_runner_.get();
  TESSERA_TRY(queue_runner_,
              QueueRunner::Make(tasks_, work_, jobs_, buffers_, world_,
                                *queue_device_, std::move(hooks), lender));
  return {};
}

// Every rank walks all groups in the same order, since joining one may need its
// other members.
Result<void> RankExecutor::JoinGroups() {
  std::vector<int> everyone;
  for (int rank = 0; rank < world_.world_size(); ++rank) {
    everyone.push_back(rank);
  }
  TESSERA_TRY(everyone_, world_.Group(everyone));
  std::vector<std::pair<GroupId, AxisSet>> seen;
  for (const Task& task : tasks_.tasks) {
    if (task.kind != TaskKind::kComm) continue;
    const auto key = std::pair(task.group, task.axes);
    if (std::find(seen.begin(), seen.end(), key) != seen.end()) continue;
    seen.push_back(key);
    if (view_.position(task.group) < 0) continue;
    TESSERA_RETURN_IF_ERROR(world_.Group(view_.RanksOfSubgroup(task)));
  }
  return {};
}

// What tells the streams of this rank apart: a communicator, or for all else
// the role, which has an address here as communicators have theirs.
const void* RankExecutor::StreamOf(const TaskWork& work) const {
  static constexpr std::array<
      char, std::numeric_limits<std::underlying_type_t<StreamRole>>::max() + 1>
      kRoles = {};
  const Task& task = tasks_.task(work.task);
  const bool several = device_.concurrent() || queue_device_ != nullptr;
  const StreamRole role = several ? task.stream : StreamRole::kCompute;
  if (role == StreamRole::kComm) return &CommunicatorOf(task);
  return &kRoles[static_cast<size_t>(role)];
}

std::vector<int> RankExecutor::StreamsOfWork() const {
  std::vector<const void*> keys;  // by stream
  std::vector<int> streams;
  for (const TaskWork& work : work_) {
    const void* const key = StreamOf(work);
    const auto it = std::ranges::find(keys, key);
    streams.push_back(static_cast<int>(it - keys.begin()));
    if (it == keys.end()) keys.push_back(key);
  }
  return streams;
}

RankDevice& RankExecutor::DeviceOf(const Task& task) const {
  return buffers_.DeviceOf(OnHost(task, tasks_.values) ? MemoryTier::kHost
                                                       : MemoryTier::kDevice);
}

void RankExecutor::PrepareSlices(const Task& task, TaskWork& work) const {
  const DeviceGroup& group = tasks_.group(task.group);
  for (size_t i = 0; i < task.reads.size(); ++i) {
    const Value& from = tasks_.value(task.reads[i]);
    const Value& to = tasks_.value(task.writes[i]);
    TESSERA_CHECK(from.dtype == to.dtype) << "slice to another type";
    if (view_.IsAbsent(task.writes[i])) continue;
    TaskSlice slice{task.reads[i], task.writes[i], false, {}};
    // A whole tensor that becomes a partial sum counts at coordinate 0.
    const AxisSet masked = to.layout.partial & ~from.layout.partial;
    slice.zero = group.Coordinate(view_.position(task.group), masked) != 0;
    const Placement source = view_.placement(slice.from);
    const Placement target = view_.placement(slice.to);
    const bool in_place = buffers_.root(slice.from) == buffers_.root(slice.to);
    TESSERA_CHECK(!in_place || source == target) << "slice in place";
    if (!slice.zero && !in_place) {
      // A tile goes to its place in the whole; else all of the target is read.
      const bool joins = from.layout.tile.count > to.layout.tile.count;
      for (const Box& box : BoxesOf(joins ? source : target)) {
        slice.copies.push_back(CopyOf(box, source, target, SizeOf(to.dtype)));
      }
    }
    work.slices.push_back(std::move(slice));
  }
}

Communicator& RankExecutor::CommunicatorOf(const Task& task) const {
  // Joined by JoinGroups.
  return *world_.Group(view_.RanksOfSubgroup(task)).value();
}

void RankExecutor::PrepareCollective(const Task& task,
                                     CollectiveMaker& collectives,
                                     TaskWork& work) const {
  const std::vector<int>& members = view_.Subgroup(task);
  std::vector<CollectivePart> parts;
  for (size_t i = 0; i < task.reads.size(); ++i) {
    parts.push_back({tasks_.value(task.reads[i]).dtype,
                     view_.Placements(task.reads[i], members),
                     view_.Placements(task.writes[i], members)});
  }
  work.collective =
      collectives.Make(task.comm, CommunicatorOf(task), std::move(parts));
  work.staging = work.collective->staging();
}

void RankExecutor::PrepareTransfer(const Task& task, TaskWork& work) const {
  const bool sends = task.kind == TaskKind::kSend;
  const ValueId from_id = sends ? task.reads[0] : task.peer;
  const ValueId to_id = sends ? task.peer : task.writes[0];
  const Value& from = tasks_.value(from_id);
  const Value& to = tasks_.value(to_id);
  const DeviceGroup& senders = tasks_.group(from.group);
  const DeviceGroup& receivers = tasks_.group(to.group);
  const auto all = [](const DeviceGroup& group) {
    std::vector<int> positions;
    for (size_t i = 0; i < group.devices.size(); ++i) {
      positions.push_back(static_cast<int>(i));
    }
    return positions;
  };
  const std::vector<Placement> sources =
      view_.Placements(from_id, all(senders));
  const std::vector<Placement> targets =
      view_.Placements(to_id, all(receivers));
  // Like meshes and layouts: position to position, partial sums as they are.
  const bool positionwise = from.layout == to.layout && sources == targets;
  TESSERA_CHECK(positionwise || from.layout.partial == 0)
      << work.name << " sends partial sums to an unlike group";
  work.transfer = std::make_unique<GroupTransfer>(
      *everyone_, from.dtype, WorldRanks(senders), sources,
      WorldRanks(receivers), targets, positionwise);
  work.staging =
      sends ? work.transfer->send_staging() : work.transfer->receive_staging();
  // A message is told from others between the same ranks by the value that
  // receives it.
  work.way.tag = static_cast<uint64_t>(to_id.value);
}

Result<void> RankExecutor::OpenChannels() {
  const MessageChannels channels = FindMessageChannels(tasks_);
  GroupTransfer::SizesByEnd sizes;
  for (TaskWork& work : work_) {
    if (work.transfer == nullptr) continue;
    work.way.channel = channels.of_task[work.task.index()];
    if (work.way.channel < 0) continue;
    work.transfer->AddTo(sizes, work.way.channel);
  }
  std::vector<ChannelEnd> ends;
  std::vector<std::vector<int64_t>> bytes;
  for (const auto& [end, of_end] : sizes) {
    ends.push_back(end);
    bytes.push_back(of_end);
  }
  return everyone_->OpenChannels(ends, bytes);
}

// ---- Between steps

void RankExecutor::ZeroValue(ValueId id) {
  TESSERA_CHECK(tasks_.value(id).tier == MemoryTier::kDevice);
  device_.Zero(data(id), view_.BytesOf(id));
}

MemoryUse RankExecutor::host_peak() const {
  const CpuDevice* const host = buffers_.host();
  return host == nullptr ? MemoryUse() : host->account().peak();
}

Result<void> RankExecutor::UseGraphs() {
  TESSERA_CHECK(queue_runner_ != nullptr) << "graphs without queues";
  return queue_runner_->UseGraphs();
}

GraphUse RankExecutor::graph_use() const {
  return queue_runner_ == nullptr ? GraphUse() : queue_runner_->graph_use();
}

bool RankExecutor::Replays() const {
  return queue_runner_ != nullptr && queue_runner_->Replays();
}

// ---- Running

Result<Timeline> RankExecutor::Run(const TaskGraph& tasks) {
  TESSERA_CHECK(&tasks == &tasks_) << "another task graph";
  TESSERA_TRY(Timeline timeline,
              queue_runner_ != nullptr
                  ? queue_runner_->Run({step_, learning_rate_})
                  : RunInThreads());
  ++step_;
  samples_ += graph_.global_batch;
  return timeline;
}

Result<Timeline> RankExecutor::RunInThreads() {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  const auto now = [begin] {
    const auto elapsed = Clock::now() - begin;
    return Duration{
        std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count() *
        1000};
  };
  Timeline timeline = EmptyTimeline(tasks_, work_, world_.world_rank());
  uses_left_ = jobs_.use_counts;
  const auto at = [](auto& list, int job) -> auto& {
    return list[static_cast<size_t>(job)];
  };
  StreamHooks hooks;
  hooks.admit = [&](int job) -> Result<void> {
    const TaskWork& work = at(work_, job);
    if (auto done = Admit(work); !done) return done.error().At(work.name);
    return {};
  };
  hooks.run = [&](int job) -> Result<void> {
    TaskWork& work = at(work_, job);
    Span& span = at(timeline.spans, job);
    span.start = now();
    world_.SetCurrentTask(work.name);
    if (auto done = RunStaged(work); !done) return done.error().At(work.name);
    span.end = now();
    return {};
  };
  hooks.finish = [&](int job) { return Release(at(work_, job)); };
  // Own threads may wait for peers, and peers for this rank.
  hooks.fail = [&](const Error& error) { world_.Abort(error.ToString()); };
  TESSERA_RETURN_IF_ERROR(RunStreams(jobs_.jobs, jobs_.budget, hooks));
  TESSERA_RETURN_IF_ERROR(device_.Synchronize());
  timeline.step_time = now();
  return timeline;
}

Result<void> RankExecutor::Admit(const TaskWork& work) {
  for (ValueId root : work.allocates) {
    // The loss of the step before is still there.
    if (buffers_.Holds(root)) continue;
    TESSERA_RETURN_IF_ERROR(buffers_.Allocate(root));
  }
  return {};
}

HeldBytes RankExecutor::Release(const TaskWork& work) {
  HeldBytes given{work.staging, {}};
  for (ValueId root : work.uses) {
    if (--uses_left_[root.index()] > 0) continue;
    buffers_.Free(root);
    given += buffers_.MemoryOf(root);
  }
  return given;
}

Result<void> RankExecutor::RunStaged(TaskWork& work) {
  if (work.staging == Bytes{}) return RunTask(work, nullptr, nullptr);
  TESSERA_TRY(const Staging staging, Staging::Allocate(device_, work.staging));
  return RunTask(work, staging.data(), nullptr);
}

Result<void> RankExecutor::RunTask(TaskWork& work, void* staged,
                                   const StepNumbers* captured) {
  const Task& task = tasks_.task(work.task);
  for (ValueId value : work.zeroes) {
    if (tasks_.value(value).tier == MemoryTier::kDevice) {
      device_.Zero(data(value), view_.BytesOf(value));
      continue;
    }
    TESSERA_RETURN_IF_ERROR(RunOnHost([this, value]() -> Result<void> {
      buffers_.host()->Zero(data(value), view_.BytesOf(value));
      return {};
    }));
  }
  switch (task.kind) {
    case TaskKind::kLoad:
      TESSERA_RETURN_IF_ERROR(RunLoad(work, captured != nullptr));
      break;
    case TaskKind::kCompute:
      TESSERA_RETURN_IF_ERROR(RunCalls(work, captured));
      break;
    case TaskKind::kSlice:
      for (const TaskSlice& slice : work.slices) {
        if (slice.zero) device_.Zero(data(slice.to), view_.BytesOf(slice.to));
        for (const BoxCopy& copy : slice.copies) {
          device_.Copy(static_cast<std::byte*>(data(slice.to)) + copy.to_offset,
                       static_cast<const std::byte*>(data(slice.from)) +
                           copy.from_offset,
                       copy.strided);
        }
      }
      break;
    case TaskKind::kCopy:
      TESSERA_RETURN_IF_ERROR(RunCopy(task));
      break;
    case TaskKind::kComm: {
      std::vector<PartBuffers> buffers;
      for (size_t i = 0; i < task.reads.size(); ++i) {
        buffers.push_back({data(task.reads[i]), data(task.writes[i])});
      }
      TESSERA_RETURN_IF_ERROR(work.collective->Run(device_, buffers, staged));
      break;
    }
    case TaskKind::kSend:
      TESSERA_RETURN_IF_ERROR(
          work.transfer->Send(device_, data(task.reads[0]), work.way, staged));
      break;
    case TaskKind::kRecv:
      TESSERA_RETURN_IF_ERROR(work.transfer->Receive(
          device_, data(task.writes[0]), work.way, staged));
      break;
  }
  return {};
}

namespace {

// The block's part of a constant of the graph.
void FillConstant(const Tensor& tensor, const LocalTensor& block) {
  Shape at(block.shape.size(), 0);  // within the block
  for (int64_t i = 0; i < block.elements(); ++i) {
    int64_t element = 0;
    for (size_t d = 0; d < at.size(); ++d) {
      element = element * tensor.shape[d] + block.offset[d] + at[d];
    }
    StoreNumber(block.data, block.dtype, i,
                tensor.values[static_cast<size_t>(element)]);
    for (size_t d = at.size(); d-- > 0 && ++at[d] == block.shape[d];) at[d] = 0;
  }
}

}  // namespace

Result<void> RankExecutor::RunLoad(const TaskWork& work, bool captured) {
  const Task& task = tasks_.task(work.task);
  for (size_t i = 0; i < task.writes.size(); ++i) {
    const LocalTensor& input = work.inputs[i];
    const Bytes bytes{input.elements() * SizeOf(input.dtype)};
    void* const to = data(task.writes[i]);
    if (captured) {
      queue_device_->EnqueueWrite(to, input.data, bytes);
      continue;
    }
    const auto host = std::make_unique_for_overwrite<std::byte[]>(
        static_cast<size_t>(bytes.value));
    LocalTensor block = input;
    block.data = host.get();
    TESSERA_RETURN_IF_ERROR(FillInput(task.writes[i], block));
    device_.Write(to, host.get(), bytes);
  }
  return {};
}

Result<void> RankExecutor::FillInputs(const TaskWork& work) const {
  const Task& task = tasks_.task(work.task);
  for (size_t i = 0; i < work.inputs.size(); ++i) {
    TESSERA_RETURN_IF_ERROR(FillInput(task.writes[i], work.inputs[i]));
  }
  return {};
}

Result<void> RankExecutor::FillInput(ValueId value,
                                     const LocalTensor& block) const {
  const Tensor& tensor = graph_.tensor(tasks_.value(value).tensor);
  if (!tensor.values.empty()) {
    FillConstant(tensor, block);
    return {};
  }
  if (tasks_.zigzag > 1) return FillZigzag(tensor, block);
  return load_input_(tensor, block, samples_);
}

// The second dimension of an input is the sequence: each run of positions that
// follow one another is loaded and put into its columns.
Result<void> RankExecutor::FillZigzag(const Tensor& tensor,
                                      const LocalTensor& block) const {
  TESSERA_CHECK(block.shape.size() >= 2) << tensor.name;
  const int64_t columns = block.shape[1];
  const auto place = [&](int64_t column) {
    return ZigzagPosition(graph_.seq_len, tasks_.zigzag,
                          block.offset[1] + column);
  };
  const int64_t rows = block.shape[0];
  const int64_t size = SizeOf(block.dtype);
  for (int64_t first = 0; first < columns;) {
    int64_t end = first + 1;
    while (end < columns && place(end) == place(end - 1) + 1) ++end;
    const int64_t width = end - first;
    LocalTensor run = block;
    run.shape[1] = width;
    run.offset[1] = place(first);
    const auto host = std::make_unique_for_overwrite<std::byte[]>(
        static_cast<size_t>(rows * width * size));
    run.data = host.get();
    TESSERA_RETURN_IF_ERROR(load_input_(tensor, run, samples_));
    for (int64_t row = 0; row < rows; ++row) {
      std::copy_n(host.get() + row * width * size, width * size,
                  block.as<std::byte>() + (row * columns + first) * size);
    }
    first = end;
  }
  return {};
}

Result<void> RankExecutor::RunCopy(const Task& task) {
  std::vector<FileTier::Transfer> transfers;
  bool to_file = false;
  for (size_t i = 0; i < task.reads.size(); ++i) {
    const ValueId from = task.reads[i];
    const ValueId to = task.writes[i];
    const Bytes bytes = view_.BytesOf(to);
    if (bytes == Bytes{}) continue;
    if (tasks_.value(from).tier == MemoryTier::kFile) {
      transfers.push_back({buffers_.file_offset(from), data(to), bytes.value});
    } else if (tasks_.value(to).tier == MemoryTier::kFile) {
      transfers.push_back({buffers_.file_offset(to), data(from), bytes.value});
      to_file = true;
    } else if (tasks_.value(to).tier == MemoryTier::kDevice) {
      if (queue_device_ != nullptr) {
        queue_device_->EnqueueWrite(data(to), data(from), bytes);
      } else {
        device_.Write(data(to), data(from), bytes);
      }
    } else if (queue_device_ != nullptr) {
      queue_device_->EnqueueRead(data(to), data(from), bytes);
    } else {
      device_.Read(data(to), data(from), bytes);
    }
  }
  if (transfers.empty()) return {};
  return RunOnHost([this, to_file, transfers = std::move(transfers)] {
    FileTier& file = *buffers_.file();
    return to_file ? file.Write(transfers) : file.Read(transfers);
  });
}

Result<void> RankExecutor::RunOnHost(std::function<Result<void>()> function) {
  if (queue_device_ == nullptr) return function();
  queue_device_->EnqueueOnHost(std::move(function));
  return {};
}

Result<void> RankExecutor::RunCalls(TaskWork& work,
                                    const StepNumbers* captured) {
  if (!OnHost(tasks_.task(work.task), tasks_.values)) {
    LaunchCalls(work, device_, captured);
    return {};
  }
  return RunOnHost([this, &work]() -> Result<void> {
    LaunchCalls(work, *buffers_.host(), nullptr);
    return {};
  });
}

void RankExecutor::LaunchCalls(TaskWork& work, RankDevice& device,
                               const StepNumbers* captured) {
  if (work.launches.empty()) {
    for (TaskCall& call : work.calls) {
      device.Launch(*call.kernel, KernelCallOf(call, device, captured));
    }
    return;
  }
  std::vector<KernelCall> calls;
  size_t next = 0;
  for (const int size : work.launches) {
    const Kernel& kernel = *work.calls[next].kernel;
    calls.clear();
    for (int i = 0; i < size; ++i) {
      calls.push_back(KernelCallOf(work.calls[next++], device, captured));
    }
    if (size == 1) {
      device.Launch(kernel, calls[0]);
    } else {
      device.LaunchList(kernel, calls);
    }
  }
}

KernelCall RankExecutor::KernelCallOf(TaskCall& call, RankDevice& device,
                                      const StepNumbers* captured) const {
  for (size_t i = 0; i < call.reads.size(); ++i) {
    if (call.reads[i].valid()) call.operands[i].data = data(call.reads[i]);
  }
  for (size_t i = 0; i < call.writes.size(); ++i) {
    call.results[i].data = data(call.writes[i]);
  }
  KernelCall kernel_call;
  kernel_call.rule = call.rule;
  kernel_call.attributes = call.attributes;
  kernel_call.operands = call.operands;
  kernel_call.results = call.results;
  kernel_call.accumulate = call.accumulate;
  kernel_call.run = call.run;
  kernel_call.seed = seed_;
  kernel_call.step = step_;
  kernel_call.numbers = captured;
  kernel_call.threads =
      device_.threads() != nullptr ? device_.threads() : device.threads();
  kernel_call.zigzag = tasks_.zigzag;
  kernel_call.any_order = !deterministic_ && call.alone;
  kernel_call.places_are_positions =
      places_are_positions_ && call.reads_positions && tasks_.zigzag <= 1;
  return kernel_call;
}

}  // namespace tessera
