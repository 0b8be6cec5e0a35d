#include "runtime/executor.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <limits>
#include <type_traits>
#include <utility>

#include "planner/base/divide.h"
#include "planner/lower/message_channels.h"
#include "planner/plan/sequence_order.h"
#include "runtime/device/staging.h"
#include "runtime/float16.h"

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

// The positions of the subgroup over `axes` that holds `position`.
std::vector<int> SubgroupOf(const DeviceGroup& group, AxisSet axes,
                            int position) {
  const AxisSet others = group.all_axes() & ~axes;
  auto subgroups = Subgroups(group, axes);
  return std::move(
      subgroups[static_cast<size_t>(group.Coordinate(position, others))]);
}

std::vector<int> RanksOfSubgroup(const DeviceGroup& group, AxisSet axes,
                                 int position) {
  std::vector<int> ranks;
  for (int i : SubgroupOf(group, axes, position)) {
    ranks.push_back(group.devices[static_cast<size_t>(i)].value);
  }
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
                           const RankExecutor* weights)
    : tasks_(tasks),
      graph_(graph),
      options_(options),
      seed_(seed),
      world_(world),
      device_(device),
      load_(std::move(load)),
      weights_(weights),
      queues_(device.queues()),
      learning_rate_(options.learning_rate) {}

RankExecutor::~RankExecutor() {
  for (void* data : pinned_) queues_->Unpin(data);
  for (const std::vector<ValueId>& together : rows_of_buffers_) {
    for (ValueId id : together) {
      if (id != together[0]) buffers_[id.index()] = nullptr;
    }
  }
  for (size_t v = 0; v < buffers_.size(); ++v) {
    const bool borrowed = weights_ != nullptr && tasks_.values[v].persistent;
    const bool placed = queues_ != nullptr && !tasks_.values[v].persistent;
    if (!borrowed && !placed) Free(ValueId(v));
  }
  for (size_t tier = 0; tier < arenas_.size(); ++tier) {
    const bool borrowed = weights_ != nullptr &&
                          arenas_[tier].data == weights_->arenas_[tier].data;
    if (arenas_[tier].data == nullptr || borrowed) continue;
    DeviceOf(static_cast<MemoryTier>(tier)).Free(arenas_[tier].data);
  }
  for (const auto& [device, one] : ones_) device->Free(one);
  if (numbers_ != nullptr) device_.Free(numbers_);
}

// ---- Preparation

Result<void> RankExecutor::Prepare(const FileTierOptions& files) {
  for (const DeviceGroup& group : tasks_.groups) {
    const auto it = std::find(group.devices.begin(), group.devices.end(),
                              DeviceId(world_.world_rank()));
    positions_.push_back(it == group.devices.end()
                             ? -1
                             : static_cast<int>(it - group.devices.begin()));
  }
  TESSERA_RETURN_IF_ERROR(JoinGroups());
  SizeBuffers();
  TESSERA_RETURN_IF_ERROR(OpenTiers(files));

  std::vector<TaskId> order = IssueOrder(tasks_);
  bool in_turn = true;  // how messages go
  if (everyone_->SendInTurnWaits()) {
    auto meetings = MeetingOrder(tasks_);
    in_turn = meetings.has_value();
    if (in_turn) order = *std::move(meetings);
  }
  for (TaskId id : order) {
    const Task& task = tasks_.task(id);
    if (position(task.group) < 0 || IsIdle(task)) continue;
    Work work;
    work.task = id;
    work.name = NameOf(tasks_, graph_, work.task);
    switch (task.kind) {
      case TaskKind::kLoad:
        for (ValueId value : task.writes) work.loads.push_back(local(value));
        break;
      case TaskKind::kCompute:
        if (auto done = PrepareCompute(task, work); !done) {
          return done.error().At(work.name);
        }
        break;
      case TaskKind::kSlice:
        PrepareSlices(task, work);
        break;
      case TaskKind::kCopy:
        break;
      case TaskKind::kComm:
        PrepareCollective(task, work);
        break;
      case TaskKind::kSend:
      case TaskKind::kRecv:
        PrepareTransfer(task, work);
        break;
    }
    work_.push_back(std::move(work));
  }
  if (in_turn) TESSERA_RETURN_IF_ERROR(OpenChannels());
  FuseCalls();
  FindLifetimes();
  PlanStreams();
  TESSERA_RETURN_IF_ERROR(AllocatePersistent());
  return queues_ == nullptr ? Result<void>() : PlanQueues();
}

Result<void> RankExecutor::AllocatePersistent() {
  if (weights_ == nullptr) ExpectPersistent();
  for (const std::vector<ValueId>& together : rows_of_buffers_) {
    Bytes bytes;
    for (ValueId id : together) bytes += buffer_bytes_[id.index()];
    TESSERA_TRY(void* const data,
                device_.Allocate(bytes, tasks_.value(together[0]).category));
    auto* next = static_cast<std::byte*>(data);
    for (ValueId id : together) {
      buffers_[id.index()] = next;
      next += buffer_bytes_[id.index()].value;
    }
  }
  for (size_t v = 0; v < tasks_.values.size(); ++v) {
    if (!tasks_.values[v].persistent || buffer_bytes_[v].value == 0) continue;
    if (weights_ != nullptr) {
      buffers_[v] = weights_->buffers_[v];
    } else if (buffers_[v] == nullptr) {
      TESSERA_RETURN_IF_ERROR(Allocate(ValueId(v)));
    }
  }
  return {};
}

// What lives as long as this does, by category.
void RankExecutor::ExpectPersistent() {
  std::map<MemoryCategory, int64_t> bytes;
  for (size_t v = 0; v < tasks_.values.size(); ++v) {
    const Value& value = tasks_.values[v];
    if (!value.persistent || value.tier != MemoryTier::kDevice) continue;
    constexpr int64_t kUnit = RankDevice::kAlignment;
    bytes[value.category] += RoundUp(buffer_bytes_[v].value, kUnit);
  }
  for (const auto& [category, sum] : bytes) device_.Expect({sum}, category);
}

// The host's buffers are such as the file reads and writes directly, and such
// as are pinned: in pages of their own.
Result<void> RankExecutor::OpenTiers(const FileTierOptions& files) {
  if (weights_ != nullptr) {
    // Values have the same numbers, and the other one does not run.
    host_ = weights_->host_;
    files_ = weights_->files_;
    layout_ = weights_->layout_;
    return {};
  }
  bool host = false;
  bool file = false;
  for (const Value& value : tasks_.values) {
    if (position(value.group) < 0) continue;
    host = host || value.tier == MemoryTier::kHost;
    file = file || value.tier == MemoryTier::kFile;
  }
  if (host || file) {
    host_ = file || queues_ != nullptr
                ? std::make_shared<CpuDevice>(1, true, kFileBlockBytes)
                : std::make_shared<CpuDevice>();
  }
  if (file) {
    layout_ = LayOutFile(tasks_, buffer_bytes_);
    TESSERA_TRY(files_, FileTier::Open(files, layout_.length));
  }
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
    if (position(task.group) < 0) continue;
    TESSERA_RETURN_IF_ERROR(world_.Group(RanksOfSubgroup(
        tasks_.group(task.group), task.axes, position(task.group))));
  }
  return {};
}

void RankExecutor::SizeBuffers() {
  roots_.resize(tasks_.values.size());
  buffer_bytes_.resize(tasks_.values.size());
  buffers_.resize(tasks_.values.size());
  offsets_.resize(tasks_.values.size());
  for (size_t v = 0; v < tasks_.values.size(); ++v) {
    roots_[v] = tasks_.Root(ValueId(v));
    if (position(tasks_.values[v].group) < 0) continue;
    Bytes& bytes = buffer_bytes_[roots_[v].index()];
    bytes = Max(bytes, BytesOf(ValueId(v)));
  }
}

// A buffer lives from the first task of this rank that uses it until all that
// do have ended. The loss stays.
void RankExecutor::FindLifetimes() {
  use_counts_.assign(tasks_.values.size(), 0);
  const ValueId loss =
      tasks_.loss.valid() ? tasks_.Root(tasks_.loss) : ValueId();
  for (Work& work : work_) {
    const Task& task = tasks_.task(work.task);
    for (const auto* list :
         {&task.reads, &task.writes, &std::as_const(work.fused)}) {
      for (ValueId value : *list) {
        const ValueId root = roots_[value.index()];
        if (tasks_.value(root).persistent ||
            buffer_bytes_[root.index()].value == 0) {
          continue;
        }
        if (std::find(work.uses.begin(), work.uses.end(), root) !=
            work.uses.end()) {
          continue;
        }
        if (use_counts_[root.index()] == 0) {
          TESSERA_CHECK(list != &task.reads)
              << work.name << " reads what was never written";
          work.allocates.push_back(root);
        }
        ++use_counts_[root.index()];
        work.uses.push_back(root);
      }
    }
    std::erase(work.uses, loss);
  }
}

// What tells the streams of this rank apart: a communicator, or for all else
// the role, which has an address here as communicators have theirs.
int RankExecutor::StreamOf(const Work& work) {
  static constexpr std::array<
      char, std::numeric_limits<std::underlying_type_t<StreamRole>>::max() + 1>
      kRoles = {};
  const Task& task = tasks_.task(work.task);
  const void* key = &kRoles[static_cast<size_t>(StreamRole::kCompute)];
  const bool several = device_.concurrent() || queues_ != nullptr;
  if (several && task.stream != StreamRole::kCompute) {
    key = task.stream == StreamRole::kComm
              ? static_cast<const void*>(&CommunicatorOf(task))
              : &kRoles[static_cast<size_t>(task.stream)];
  }
  auto it = std::find(streams_.begin(), streams_.end(), key);
  if (it == streams_.end()) it = streams_.insert(it, key);
  return static_cast<int>(it - streams_.begin());
}

void RankExecutor::AwaitPlace(ValueId root, StreamJob& job) {
  const auto begin = [&](ValueId id) { return layout_.offsets[id.index()]; };
  const auto end = [&](ValueId id) {
    return begin(id) + WholeFileBlocks(buffer_bytes_[id.index()]).value;
  };
  for (auto& [before, jobs] : placed_) {
    if (begin(before) >= end(root) || begin(root) >= end(before)) continue;
    job.deps.insert(job.deps.end(), jobs.begin(), jobs.end());
  }
  // Who comes after waits for `root`, and so for those whose whole place it
  // has.
  std::erase_if(placed_, [&](const auto& place) {
    return begin(root) <= begin(place.first) && end(place.first) <= end(root);
  });
  placed_.emplace_back(root, std::vector<int>());
}

void RankExecutor::PlanStreams() {
  std::vector<int> job_of(tasks_.tasks.size(), -1);
  std::vector<int> left = use_counts_;
  std::vector<HeldBytes> gives;
  for (const Work& work : work_) {
    StreamJob job;
    job.stream = StreamOf(work);
    for (TaskId dep : tasks_.task(work.task).deps) {
      if (job_of[dep.index()] >= 0) job.deps.push_back(job_of[dep.index()]);
    }
    job.takes.device = work.staging;
    HeldBytes given = job.takes;
    for (ValueId root : work.allocates) {
      job.takes += MemoryOf(root);
      if (InFile(root)) AwaitPlace(root, job);
    }
    for (ValueId root : work.uses) {
      if (--left[root.index()] == 0) given += MemoryOf(root);
    }
    const auto index = static_cast<int>(jobs_.size());
    for (auto& [placed, jobs] : placed_) {
      if (std::ranges::count(work.uses, placed) > 0) jobs.push_back(index);
    }
    job_of[work.task.index()] = index;
    jobs_.push_back(std::move(job));
    gives.push_back(given);
  }
  budget_ = SequentialPeak(jobs_, gives);
}

bool RankExecutor::IsAbsent(ValueId id) const {
  const Value& value = tasks_.value(id);
  return IsAbsentAt(value.layout, tasks_.group(value.group),
                    position(value.group));
}

bool RankExecutor::IsIdle(const Task& task) const {
  switch (task.kind) {
    case TaskKind::kLoad:
    case TaskKind::kCompute:
    case TaskKind::kSlice:
    case TaskKind::kCopy:
      return !task.writes.empty() &&
             std::all_of(task.writes.begin(), task.writes.end(),
                         [&](ValueId id) { return IsAbsent(id); });
    case TaskKind::kComm: {
      // None of the subgroup has anything before or after.
      const DeviceGroup& group = tasks_.group(task.group);
      for (int i : SubgroupOf(group, task.axes, position(task.group))) {
        for (const auto* list : {&task.reads, &task.writes}) {
          for (ValueId id : *list) {
            if (!IsAbsentAt(tasks_.value(id).layout, group, i)) return false;
          }
        }
      }
      return true;
    }
    case TaskKind::kSend:
    case TaskKind::kRecv:
      return false;
  }
  return false;
}

RankDevice& RankExecutor::DeviceOf(MemoryTier tier) const {
  return tier == MemoryTier::kHost ? *host_ : device_;
}

RankDevice& RankExecutor::DeviceOf(const Task& task) const {
  return DeviceOf(OnHost(task, tasks_.values) ? MemoryTier::kHost
                                              : MemoryTier::kDevice);
}

Bytes RankExecutor::BytesOf(ValueId id) const {
  const Value& value = tasks_.value(id);
  return {ElementsAt(value.layout, tasks_.group(value.group), value.shape,
                     position(value.group)) *
          SizeOf(value.dtype)};
}

Placement RankExecutor::placement(ValueId id) const {
  const Value& value = tasks_.value(id);
  return PlacementAt(value.layout, tasks_.group(value.group), value.shape,
                     position(value.group));
}

LocalTensor BlockOf(const Value& value, const Placement& here) {
  LocalTensor block;
  block.dtype = value.dtype;
  for (const Range& range : here.block) {
    block.shape.push_back(range.size());
    block.offset.push_back(range.begin);
  }
  block.global_shape = value.shape;
  return block;
}

LocalTensor RankExecutor::local(ValueId id) const {
  const Value& value = tasks_.value(id);
  const Placement here = placement(id);
  LocalTensor tensor = BlockOf(value, here);
  tensor.data = data(id);
  if (value.layout.flat != 0) {
    tensor.shape = {here.elements()};
    tensor.offset = {0};
    tensor.global_shape = tensor.shape;
    return tensor;
  }
  // A microbatch is a range of samples of the tensor, or of what states, which
  // have no tensor, have of them.
  if (value.sample_dim >= 0) {
    const auto samples = static_cast<size_t>(value.sample_dim);
    tensor.offset[samples] += value.sample_offset;
    tensor.global_shape[samples] =
        value.tensor.valid() ? graph_.tensor(value.tensor).shape[samples]
                             : value.shape[samples] * tasks_.microbatches;
  }
  return tensor;
}

void* RankExecutor::data(ValueId id) const {
  auto* const buffer =
      static_cast<std::byte*>(buffers_[roots_[id.index()].index()]);
  return buffer == nullptr ? nullptr : buffer + offsets_[id.index()].value;
}

std::vector<Placement> RankExecutor::Placements(
    ValueId id, const std::vector<int>& positions) const {
  const Value& value = tasks_.value(id);
  std::vector<Placement> placements;
  for (int position : positions) {
    placements.push_back(PlacementAt(value.layout, tasks_.group(value.group),
                                     value.shape, position));
  }
  return placements;
}

void RankExecutor::PrepareSlices(const Task& task, Work& work) const {
  const DeviceGroup& group = tasks_.group(task.group);
  for (size_t i = 0; i < task.reads.size(); ++i) {
    const Value& from = tasks_.value(task.reads[i]);
    const Value& to = tasks_.value(task.writes[i]);
    TESSERA_CHECK(from.dtype == to.dtype) << "slice to another type";
    if (IsAbsent(task.writes[i])) continue;
    Slice slice{task.reads[i], task.writes[i], false, {}};
    // A whole tensor that becomes a partial sum counts at coordinate 0.
    const AxisSet masked = to.layout.partial & ~from.layout.partial;
    slice.zero = group.Coordinate(position(task.group), masked) != 0;
    const Placement source = placement(slice.from);
    const Placement target = placement(slice.to);
    const bool in_place =
        roots_[slice.from.index()] == roots_[slice.to.index()];
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
  return *world_
              .Group(RanksOfSubgroup(tasks_.group(task.group), task.axes,
                                     position(task.group)))
              .value();
}

void RankExecutor::PrepareCollective(const Task& task, Work& work) const {
  const std::vector<int> members =
      SubgroupOf(tasks_.group(task.group), task.axes, position(task.group));
  std::vector<CollectivePart> parts;
  for (size_t i = 0; i < task.reads.size(); ++i) {
    parts.push_back({tasks_.value(task.reads[i]).dtype,
                     Placements(task.reads[i], members),
                     Placements(task.writes[i], members)});
  }
  work.collective = std::make_unique<Collective>(
      task.comm, CommunicatorOf(task), std::move(parts));
  work.staging = work.collective->staging();
}

void RankExecutor::PrepareTransfer(const Task& task, Work& work) const {
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
  const std::vector<Placement> sources = Placements(from_id, all(senders));
  const std::vector<Placement> targets = Placements(to_id, all(receivers));
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
  for (Work& work : work_) {
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

// ---- Running

Result<void> RankExecutor::Allocate(ValueId root) {
  const Bytes bytes = buffer_bytes_[root.index()];
  const Value& value = tasks_.value(root);
  if (InFile(root)) return {};  // it has its place
  TESSERA_TRY(buffers_[root.index()],
              DeviceOf(value.tier).Allocate(bytes, value.category));
  return {};
}

void RankExecutor::Free(ValueId root) {
  void* const data = std::exchange(buffers_[root.index()], nullptr);
  if (data == nullptr) return;
  if (tasks_.value(root).tier == MemoryTier::kHost) {
    host_->Free(data);
  } else {
    device_.Free(data);
  }
}

HeldBytes RankExecutor::MemoryOf(ValueId root) const {
  const Bytes bytes = buffer_bytes_[root.index()];
  switch (tasks_.value(root).tier) {
    case MemoryTier::kDevice:
      return {bytes, {}};
    case MemoryTier::kHost:
      return {{}, bytes};
    case MemoryTier::kFile:
      break;
  }
  return {};
}

bool RankExecutor::InFile(ValueId root) const {
  return tasks_.value(root).tier == MemoryTier::kFile;
}

bool RankExecutor::Holds(ValueId id) const {
  const size_t root = roots_[id.index()].index();
  return buffers_[root] != nullptr ||
         (InFile(roots_[id.index()]) && buffer_bytes_[root] > Bytes{});
}

Result<void> RankExecutor::ReadValue(ValueId id, void* to) const {
  const Bytes bytes = BytesOf(id);
  const size_t root = roots_[id.index()].index();
  switch (tasks_.value(id).tier) {
    case MemoryTier::kDevice:
      device_.Read(to, buffers_[root], bytes);
      break;
    case MemoryTier::kHost:
      host_->Read(to, buffers_[root], bytes);
      break;
    case MemoryTier::kFile: {
      TESSERA_TRY(const Staging staging, Staging::Allocate(*host_, bytes));
      const FileTier::Transfer transfer{layout_.offsets[root], staging.data(),
                                        bytes.value};
      TESSERA_RETURN_IF_ERROR(files_->Read({&transfer, 1}));
      host_->Read(to, staging.data(), bytes);
      break;
    }
  }
  return {};
}

Result<void> RankExecutor::WriteValue(ValueId id, const void* from) {
  return WriteValue(id, from, {}, BytesOf(id));
}

Result<void> RankExecutor::WriteValue(ValueId id, const void* from,
                                      Bytes offset, Bytes size) {
  const size_t root = roots_[id.index()].index();
  // Of what lies in a file there is no buffer.
  const auto to = [&] {
    return static_cast<std::byte*>(buffers_[root]) + offset.value;
  };
  switch (tasks_.value(id).tier) {
    case MemoryTier::kDevice:
      device_.Write(to(), from, size);
      break;
    case MemoryTier::kHost:
      host_->Write(to(), from, size);
      break;
    case MemoryTier::kFile: {
      TESSERA_TRY(const Staging staging, Staging::Allocate(*host_, size));
      host_->Write(staging.data(), from, size);
      const FileTier::Transfer transfer{layout_.offsets[root] + offset.value,
                                        staging.data(), size.value};
      return files_->Write({&transfer, 1});
    }
  }
  return {};
}

void RankExecutor::ZeroValue(ValueId id) {
  TESSERA_CHECK(tasks_.value(id).tier == MemoryTier::kDevice);
  device_.Zero(buffers_[roots_[id.index()].index()], BytesOf(id));
}

MemoryUse RankExecutor::host_peak() const {
  return host_ == nullptr ? MemoryUse() : host_->account().peak();
}

Result<Timeline> RankExecutor::Run(const TaskGraph& tasks) {
  TESSERA_CHECK(&tasks == &tasks_) << "another task graph";
  TESSERA_TRY(Timeline timeline,
              queues_ != nullptr ? RunInQueues() : RunInThreads());
  ++step_;
  samples_ += graph_.global_batch;
  return timeline;
}

Timeline RankExecutor::EmptyTimeline() const {
  Timeline timeline;
  for (const Work& work : work_) {
    const Task& task = tasks_.task(work.task);
    Span span;
    span.task = work.task;
    span.group = task.group;
    span.rank = world_.world_rank();
    span.stream = task.stream;
    span.axes = task.axes;
    timeline.spans.push_back(span);
  }
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
  Timeline timeline = EmptyTimeline();
  uses_left_ = use_counts_;
  const auto at = [](auto& list, int job) -> auto& {
    return list[static_cast<size_t>(job)];
  };
  StreamHooks hooks;
  hooks.admit = [&](int job) -> Result<void> {
    const Work& work = at(work_, job);
    if (auto done = Admit(work); !done) return done.error().At(work.name);
    return {};
  };
  hooks.run = [&](int job) -> Result<void> {
    Work& work = at(work_, job);
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
  TESSERA_RETURN_IF_ERROR(RunStreams(jobs_, budget_, hooks));
  TESSERA_RETURN_IF_ERROR(device_.Synchronize());
  timeline.step_time = now();
  return timeline;
}

Result<void> RankExecutor::Admit(const Work& work) {
  for (ValueId root : work.allocates) {
    // The loss of the step before is still there.
    if (Holds(root)) continue;
    TESSERA_RETURN_IF_ERROR(Allocate(root));
  }
  return {};
}

HeldBytes RankExecutor::Release(const Work& work) {
  HeldBytes given{work.staging, {}};
  for (ValueId root : work.uses) {
    if (--uses_left_[root.index()] > 0) continue;
    Free(root);
    given += MemoryOf(root);
  }
  return given;
}

Result<void> RankExecutor::RunStaged(Work& work) {
  if (work.staging == Bytes{}) return RunTask(work, nullptr);
  TESSERA_TRY(const Staging staging, Staging::Allocate(device_, work.staging));
  return RunTask(work, staging.data());
}

Result<void> RankExecutor::RunTask(Work& work, void* staged) {
  const Task& task = tasks_.task(work.task);
  for (ValueId value : work.zeroes) {
    if (tasks_.value(value).tier == MemoryTier::kDevice) {
      device_.Zero(data(value), BytesOf(value));
      continue;
    }
    TESSERA_RETURN_IF_ERROR(RunOnHost([this, value]() -> Result<void> {
      host_->Zero(data(value), BytesOf(value));
      return {};
    }));
  }
  switch (task.kind) {
    case TaskKind::kLoad:
      TESSERA_RETURN_IF_ERROR(RunLoad(work));
      break;
    case TaskKind::kCompute:
      TESSERA_RETURN_IF_ERROR(RunCalls(work));
      break;
    case TaskKind::kSlice:
      for (const Slice& slice : work.slices) {
        if (slice.zero) device_.Zero(data(slice.to), BytesOf(slice.to));
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
void LoadConstant(const Tensor& tensor, const LocalTensor& block) {
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

Result<void> RankExecutor::RunLoad(const Work& work) {
  const Task& task = tasks_.task(work.task);
  for (size_t i = 0; i < task.writes.size(); ++i) {
    const Bytes bytes{work.loads[i].elements() * SizeOf(work.loads[i].dtype)};
    void* const to = data(task.writes[i]);
    if (capturing_) {
      queues_->EnqueueWrite(to, work.loads[i].data, bytes);
      continue;
    }
    const auto host = std::make_unique_for_overwrite<std::byte[]>(
        static_cast<size_t>(bytes.value));
    TESSERA_RETURN_IF_ERROR(Load(task.writes[i], work.loads[i], host.get()));
    device_.Write(to, host.get(), bytes);
  }
  return {};
}

// What a load task writes, to memory of the host.
Result<void> RankExecutor::Load(ValueId value, LocalTensor block,
                                std::byte* host) const {
  block.data = host;
  const Tensor& tensor = graph_.tensor(tasks_.value(value).tensor);
  if (!tensor.values.empty()) {
    LoadConstant(tensor, block);
    return {};
  }
  if (tasks_.zigzag > 1) return LoadZigzag(tensor, block);
  return load_(tensor, block, samples_);
}

// The second dimension of an input is the sequence: each run of positions that
// follow one another is loaded and put into its columns.
Result<void> RankExecutor::LoadZigzag(const Tensor& tensor,
                                      const LocalTensor& block) const {
  TESSERA_CHECK(block.shape.size() >= 2) << tensor.name;
  const int64_t columns = block.shape[1];
  const auto position = [&](int64_t column) {
    return ZigzagPosition(graph_.seq_len, tasks_.zigzag,
                          block.offset[1] + column);
  };
  const int64_t rows = block.shape[0];
  const int64_t size = SizeOf(block.dtype);
  for (int64_t first = 0; first < columns;) {
    int64_t end = first + 1;
    while (end < columns && position(end) == position(end - 1) + 1) ++end;
    const int64_t width = end - first;
    LocalTensor run = block;
    run.shape[1] = width;
    run.offset[1] = position(first);
    const auto host = std::make_unique_for_overwrite<std::byte[]>(
        static_cast<size_t>(rows * width * size));
    run.data = host.get();
    TESSERA_RETURN_IF_ERROR(load_(tensor, run, samples_));
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
    const Bytes bytes = BytesOf(to);
    if (bytes == Bytes{}) continue;
    const auto offset = [&](ValueId id) {
      return layout_.offsets[roots_[id.index()].index()];
    };
    if (tasks_.value(from).tier == MemoryTier::kFile) {
      transfers.push_back({offset(from), data(to), bytes.value});
    } else if (tasks_.value(to).tier == MemoryTier::kFile) {
      transfers.push_back({offset(to), data(from), bytes.value});
      to_file = true;
    } else if (tasks_.value(to).tier == MemoryTier::kDevice) {
      if (queues_ != nullptr) {
        queues_->EnqueueWrite(data(to), data(from), bytes);
      } else {
        device_.Write(data(to), data(from), bytes);
      }
    } else if (queues_ != nullptr) {
      queues_->EnqueueRead(data(to), data(from), bytes);
    } else {
      device_.Read(data(to), data(from), bytes);
    }
  }
  if (transfers.empty()) return {};
  return RunOnHost([this, to_file, transfers = std::move(transfers)] {
    return to_file ? files_->Write(transfers) : files_->Read(transfers);
  });
}

Result<void> RankExecutor::RunOnHost(std::function<Result<void>()> function) {
  if (queues_ == nullptr) return function();
  queues_->EnqueueOnHost(std::move(function));
  return {};
}

Result<void> RankExecutor::RunCalls(Work& work) {
  if (!OnHost(tasks_.task(work.task), tasks_.values)) {
    LaunchCalls(work, device_);
    return {};
  }
  return RunOnHost([this, &work]() -> Result<void> {
    LaunchCalls(work, *host_);
    return {};
  });
}

void RankExecutor::LaunchCalls(Work& work, RankDevice& device) {
  if (work.launches.empty()) {
    for (Call& call : work.calls) {
      device.Launch(*call.kernel, KernelCallOf(call, device));
    }
    return;
  }
  std::vector<KernelCall> calls;
  size_t next = 0;
  for (const int size : work.launches) {
    const Kernel& kernel = *work.calls[next].kernel;
    calls.clear();
    for (int i = 0; i < size; ++i) {
      calls.push_back(KernelCallOf(work.calls[next++], device));
    }
    if (size == 1) {
      device.Launch(kernel, calls[0]);
    } else {
      device.LaunchList(kernel, calls);
    }
  }
}

KernelCall RankExecutor::KernelCallOf(Call& call, RankDevice& device) const {
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
  // A thread of the host may be here while this rank's own captures.
  if (&device == &device_ && capturing_) kernel_call.numbers = numbers_;
  kernel_call.threads =
      device_.threads() != nullptr ? device_.threads() : device.threads();
  kernel_call.zigzag = tasks_.zigzag;
  kernel_call.any_order = !deterministic_ && call.alone;
  kernel_call.places_are_positions =
      places_are_positions_ && call.reads_positions && tasks_.zigzag <= 1;
  return kernel_call;
}

}  // namespace tessera
