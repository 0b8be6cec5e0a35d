#include "runtime/queue_runner.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "planner/base/check.h"
#include "planner/base/divide.h"
#include "runtime/storage/file_tier.h"

namespace tessera {
namespace {

// Steps before graphs are replayed.
constexpr int kSingleSteps = 2;

// Marks of a step: where it begins, where each job begins and ends, and of
// parts that are graphs where others of their streams may begin, and where they
// have ended. A job that follows another in its queue, and waits for no other
// queue, begins where that ends.
constexpr int kBegin = 0;
int StartOf(int job) {
  return 1 + 2 * job;
}
int EndOf(int job) {
  return 2 + 2 * job;
}
int ForkOf(int jobs, int part) {
  return 1 + 2 * jobs + 2 * part;
}
int EndOfGraph(int jobs, int part) {
  return 2 + 2 * jobs + 2 * part;
}

// For people: what a task that no graph has is.
std::string KindOf(const Task& task, std::span<const Value> values) {
  switch (task.kind) {
    case TaskKind::kComm:
      return "collectives";
    case TaskKind::kSend:
    case TaskKind::kRecv:
      return "messages";
    case TaskKind::kCompute:
      if (OnHost(task, values)) return "kernels on the host";
      break;
    case TaskKind::kCopy:
      if (!IsCapturable(task, values)) return "files";
      break;
    case TaskKind::kLoad:
    case TaskKind::kSlice:
      break;
  }
  return "single tasks between these";
}

// What cudaMalloc aligns to (CUDA C++ Programming Guide 13.0, "Device Memory
// Accesses"); on the host a multiple of what a file wants is used.
int64_t AlignmentOf(MemoryTier tier) {
  return tier == MemoryTier::kHost ? kFileBlockBytes : 256;
}

}  // namespace

Result<std::unique_ptr<QueueRunner>> QueueRunner::Make(
    const TaskGraph& tasks, std::vector<TaskWork>& work, const StepJobs& jobs,
    StepBuffers& buffers, CommWorld& world, QueueDevice& device,
    QueueHooks hooks, const QueueRunner* lender) {
  std::unique_ptr<QueueRunner> runner(new QueueRunner(
      tasks, work, jobs, buffers, world, device, std::move(hooks)));
  TESSERA_RETURN_IF_ERROR(runner->Plan(jobs, lender));
  return runner;
}

QueueRunner::QueueRunner(const TaskGraph& tasks, std::vector<TaskWork>& work,
                         const StepJobs& jobs, StepBuffers& buffers,
                         CommWorld& world, QueueDevice& device,
                         QueueHooks hooks)
    : tasks_(tasks),
      work_(work),
      buffers_(buffers),
      world_(world),
      device_(device),
      hooks_(std::move(hooks)) {
  for (const StreamJob& job : jobs.jobs) {
    jobs_.push_back({job.stream, job.deps});
  }
}

QueueRunner::~QueueRunner() {
  if (inputs_ != nullptr) device_.Unpin(inputs_);
  if (numbers_ != nullptr) device_.Free(numbers_);
}

Result<void> QueueRunner::Plan(const StepJobs& jobs,
                               const QueueRunner* lender) {
  std::vector<StreamRole> roles(static_cast<size_t>(jobs.streams),
                                StreamRole::kCompute);
  for (size_t i = 0; i < work_.size(); ++i) {
    roles[static_cast<size_t>(jobs_[i].stream)] =
        tasks_.task(work_[i].task).stream;
  }
  // Queue 0 is that of computation.
  if (lender != nullptr) queues_of_role_ = lender->queues_of_role_;
  std::map<StreamRole, size_t> used;
  for (StreamRole role : roles) {
    if (role == StreamRole::kCompute) {
      queue_of_.push_back(0);
      continue;
    }
    std::vector<int>& queues = queues_of_role_[role];
    const size_t next = used[role]++;
    if (next == queues.size()) {
      TESSERA_TRY(const int made, device_.MakeQueue(role));
      queues.push_back(made);
    }
    queue_of_.push_back(queues[next]);
  }
  TESSERA_RETURN_IF_ERROR(PlaceTier(MemoryTier::kDevice));
  if (buffers_.host() != nullptr) {
    TESSERA_RETURN_IF_ERROR(PlaceTier(MemoryTier::kHost));
    TESSERA_RETURN_IF_ERROR(buffers_.PinPersistent());
  }
  jobs_apart_ = PartsOf(jobs_, std::vector<bool>(jobs_.size()));
  std::map<int, int> last;  // by queue: the job
  for (int job = 0; job < static_cast<int>(jobs_.size()); ++job) {
    const auto j = static_cast<size_t>(job);
    const int queue = queue_of_[static_cast<size_t>(jobs_[j].stream)];
    const auto [before, is_first] = last.try_emplace(queue, job);
    const bool follows = !is_first && jobs_apart_.parts[j].waits.empty();
    follows_.push_back(follows ? before->second : -1);
    before->second = job;
  }
  return device_.Synchronize();
}

Result<void> QueueRunner::UseGraphs() {
  std::vector<bool> capturable;
  for (const TaskWork& work : work_) {
    capturable.push_back(IsCapturable(tasks_.task(work.task), tasks_.values));
  }
  parts_ = PartsOf(jobs_, capturable);
  graphs_.assign(parts_.parts.size(), -1);
  graph_names_.resize(parts_.parts.size());
  graph_use_ = {};
  graph_use_.tasks = std::ssize(work_);
  for (size_t p = 0; p < parts_.parts.size(); ++p) {
    const StepPart& part = parts_.parts[p];
    const TaskWork& first = work_[static_cast<size_t>(part.begin)];
    if (!part.captured) {
      ++graph_use_.left[KindOf(tasks_.task(first.task), tasks_.values)];
      continue;
    }
    const TaskWork& last = work_[static_cast<size_t>(part.end) - 1];
    graph_names_[p] = "graph from '" + first.name + "' to '" + last.name + "'";
    graph_use_.captured += part.end - part.begin;
    ++graph_use_.graphs;
  }
  TESSERA_TRY(
      void* const numbers,
      device_.Allocate({sizeof(StepNumbers)}, MemoryCategory::kWorkspace));
  numbers_ = static_cast<StepNumbers*>(numbers);
  runs_singly_ = kSingleSteps;
  return PlaceInputs();
}

// Gives all inputs of a step their places in one piece of memory, which is
// pinned at once: whole pages, so that nothing else that is pinned shares one.
Result<void> QueueRunner::PlaceInputs() {
  constexpr size_t kAligned = 64;
  std::vector<size_t> offsets;
  size_t size = 0;
  for (const TaskWork& work : work_) {
    for (const LocalTensor& block : work.inputs) {
      offsets.push_back(size);
      const auto bytes =
          static_cast<size_t>(block.elements() * SizeOf(block.dtype));
      size += RoundUp(bytes, kAligned);
    }
  }
  if (size == 0) return {};
  size = RoundUp(size, kFileBlockBytes);
  size_t room = size + kFileBlockBytes;
  room_of_inputs_.resize(room);
  void* begin = room_of_inputs_.data();
  TESSERA_CHECK(std::align(kFileBlockBytes, size, begin, room) != nullptr);
  auto offset = offsets.begin();
  for (TaskWork& work : work_) {
    for (LocalTensor& block : work.inputs) {
      block.data = static_cast<std::byte*>(begin) + *offset++;
    }
  }
  TESSERA_RETURN_IF_ERROR(device_.Pin(begin, {static_cast<int64_t>(size)}));
  inputs_ = begin;
  return {};
}

// Those of graphs, before these are enqueued. The step before has ended, so
// that nothing reads there.
Result<void> QueueRunner::FillInputs() {
  for (const StepPart& part : parts_.parts) {
    if (!part.captured) continue;
    for (int job = part.begin; job < part.end; ++job) {
      const TaskWork& work = work_[static_cast<size_t>(job)];
      if (auto done = hooks_.fill_inputs(work); !done) {
        return done.error().At(work.name);
      }
    }
  }
  return {};
}

// Gives every buffer of a step, and what tasks stage, a place.
Result<void> QueueRunner::PlaceTier(MemoryTier tier) {
  const auto last = static_cast<int>(work_.size()) - 1;
  const ValueId loss =
      tasks_.loss.valid() ? tasks_.Root(tasks_.loss) : ValueId();
  struct Owner {  // of a buffer: a root, or what a task stages
    ValueId root;
    TaskWork* staging = nullptr;
  };
  std::vector<BufferUse> buffers;
  std::vector<Owner> owners;
  std::vector<int> buffer_of(tasks_.values.size(), -1);
  for (int job = 0; job <= last; ++job) {
    TaskWork& work = work_[static_cast<size_t>(job)];
    for (ValueId root : work.allocates) {
      if (tasks_.value(root).tier != tier) continue;
      buffer_of[root.index()] = static_cast<int>(buffers.size());
      buffers.push_back({buffers_.size(root), {}});
      owners.push_back({root});
      // It is read after the step.
      if (root == loss) buffers.back().jobs = {job, last};
    }
    for (ValueId root : work.uses) {
      const int buffer = buffer_of[root.index()];
      if (buffer < 0) continue;
      buffers[static_cast<size_t>(buffer)].jobs.push_back(job);
    }
    if (tier == MemoryTier::kDevice && work.staging > Bytes{}) {
      buffers.push_back({work.staging, {job}});
      owners.push_back({ValueId(), &work});
    }
  }
  const BufferPlaces placed = PlaceBuffers(buffers, AlignmentOf(tier), jobs_);
  TESSERA_TRY(std::byte* const arena, buffers_.MakeArena(tier, placed.arena));
  for (size_t b = 0; b < buffers.size(); ++b) {
    std::byte* const place = arena + placed.offsets[b];
    if (owners[b].staging != nullptr) {
      owners[b].staging->staged = place;
    } else {
      buffers_.Place(owners[b].root, place);
    }
  }
  return {};
}

int QueueRunner::EndMarkOf(const StepParts& step, int part) const {
  const StepPart& of = step.parts[static_cast<size_t>(part)];
  return of.captured ? EndOfGraph(static_cast<int>(work_.size()), part)
                     : EndOf(of.begin);
}

Result<void> QueueRunner::RunJob(int job, const StepNumbers* captured) {
  TaskWork& work = work_[static_cast<size_t>(job)];
  if (captured == nullptr && follows_[static_cast<size_t>(job)] < 0) {
    device_.Mark(StartOf(job));
  }
  world_.SetCurrentTask(work.name);
  device_.BeginRange(work.name);
  const auto done = hooks_.run(work, captured);
  device_.EndRange();
  device_.Mark(EndOf(job));
  if (!done) return done.error().At(work.name);
  return {};
}

Result<int> QueueRunner::Capture(size_t p) {
  const StepPart& part = parts_.parts[p];
  const auto queue_of = [&](int stream) {
    return queue_of_[static_cast<size_t>(stream)];
  };
  const int fork = ForkOf(static_cast<int>(work_.size()), static_cast<int>(p));
  TESSERA_RETURN_IF_ERROR(device_.BeginCapture());
  device_.Mark(fork);
  std::map<int, int> last;  // by stream
  Result<void> done;
  for (int job = part.begin; done && job < part.end; ++job) {
    const int stream = jobs_[static_cast<size_t>(job)].stream;
    device_.UseQueue(queue_of(stream));
    if (stream != part.stream && !last.contains(stream)) device_.Await(fork);
    for (int wait : parts_.waits_inside[static_cast<size_t>(job)]) {
      device_.Await(EndOf(wait));
    }
    done = RunJob(job, numbers_);
    last[stream] = job;
  }
  device_.UseQueue(queue_of(part.stream));
  for (const auto& [stream, job] : last) {
    if (stream != part.stream) device_.Await(EndOf(job));
  }
  auto graph = device_.EndCapture();
  if (!done) return done.error();
  return graph;
}

Result<void> QueueRunner::RunGraph(size_t p) {
  const std::string& name = graph_names_[p];
  if (graphs_[p] < 0) {
    auto graph = Capture(p);
    if (!graph) return graph.error().At(name);
    graphs_[p] = *graph;
  }
  world_.SetCurrentTask(name);
  device_.BeginRange(name);
  device_.Replay(graphs_[p]);
  device_.EndRange();
  return {};
}

Result<Timeline> QueueRunner::TimelineOfJobs() {
  Timeline timeline = EmptyTimeline(tasks_, work_, world_.world_rank());
  for (int job = 0; job < static_cast<int>(work_.size()); ++job) {
    Span& span = timeline.spans[static_cast<size_t>(job)];
    TESSERA_TRY(span.end, device_.Between(kBegin, EndOf(job)));
  }
  for (int job = 0; job < static_cast<int>(work_.size()); ++job) {
    const auto j = static_cast<size_t>(job);
    Span& span = timeline.spans[j];
    if (follows_[j] >= 0) {
      span.start = timeline.spans[static_cast<size_t>(follows_[j])].end;
    } else {
      TESSERA_TRY(span.start, device_.Between(kBegin, StartOf(job)));
    }
  }
  for (size_t w = 0; w < work_.size(); ++w) {
    const auto& shares = work_[w].shares;
    int64_t all = 0;
    for (const auto& [other, share] : shares) all += share;
    const Span whole = timeline.spans[w];
    const int64_t time = (whole.end - whole.start).picoseconds;
    Duration begin = whole.start;
    int64_t before = 0;
    for (const auto& [other, share] : shares) {
      before += share;
      Span& span = timeline.spans[other];
      span.start = begin;
      begin = span.end = whole.start + Duration{time * before / all};
    }
  }
  return timeline;
}

Result<Timeline> QueueRunner::Run(const StepNumbers& numbers) {
  const auto began = std::chrono::steady_clock::now();
  const bool replays = Replays();
  const StepParts& step = replays ? parts_ : jobs_apart_;
  device_.UseQueue(0);
  if (replays) device_.Write(numbers_, &numbers, {sizeof(numbers)});
  device_.Mark(kBegin);
  for (int queue : queue_of_) {
    if (queue == 0) continue;
    device_.UseQueue(queue);
    device_.Await(kBegin);
  }
  std::vector<int> last(queue_of_.size(), -1);  // part
  const auto finish = [&] {
    device_.UseQueue(0);
    for (int part : last) {
      if (part >= 0) device_.Await(EndMarkOf(step, part));
    }
    return device_.Synchronize();
  };
  // What is enqueued uses the buffers, and what the hooks do, until it has
  // ended.
  const auto fail = [&](const Error& error) {
    world_.Abort(error.ToString());
    device_.WaitForAll();
    return error;
  };
  if (replays) {
    if (auto done = FillInputs(); !done) return fail(done.error());
  }
  for (size_t p = 0; p < step.parts.size(); ++p) {
    const StepPart& part = step.parts[p];
    const auto stream = static_cast<size_t>(part.stream);
    device_.UseQueue(queue_of_[stream]);
    for (int wait : part.waits) device_.Await(EndMarkOf(step, wait));
    const auto done = part.captured ? RunGraph(p) : RunJob(part.begin, nullptr);
    last[stream] = static_cast<int>(p);
    if (part.captured) device_.Mark(EndMarkOf(step, last[stream]));
    if (!done) return fail(done.error());
  }
  if (auto done = finish(); !done) return fail(done.error());
  Timeline timeline;
  if (!replays) {
    auto timed = TimelineOfJobs();
    if (!timed) return fail(timed.error());
    timeline = std::move(*timed);
    runs_singly_ = std::max(0, runs_singly_ - 1);
  }
  // With what the host does before and behind: that is a part of each step.
  timeline.step_time = {std::chrono::duration_cast<std::chrono::nanoseconds>(
                            std::chrono::steady_clock::now() - began)
                            .count() *
                        1000};
  return timeline;
}

}  // namespace tessera
