// RankExecutor on a device with queues.

#include <chrono>
#include <memory>
#include <utility>

#include "planner/base/divide.h"
#include "runtime/executor.h"
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

Result<void> RankExecutor::PlanQueues() {
  std::vector<EnqueuedJob>& jobs = enqueued_;
  std::vector<StreamRole> roles(streams_.size(), StreamRole::kCompute);
  for (size_t i = 0; i < work_.size(); ++i) {
    jobs.push_back({jobs_[i].stream, jobs_[i].deps});
    roles[static_cast<size_t>(jobs_[i].stream)] =
        tasks_.task(work_[i].task).stream;
  }
  // Queue 0 is that of computation. Those of the executor whose weights these
  // are serve: the two do not run at the same time.
  if (weights_ != nullptr) queues_of_role_ = weights_->queues_of_role_;
  std::map<StreamRole, size_t> used;
  for (StreamRole role : roles) {
    if (role == StreamRole::kCompute) {
      queue_of_.push_back(0);
      continue;
    }
    std::vector<int>& queues = queues_of_role_[role];
    const size_t next = used[role]++;
    if (next == queues.size()) {
      TESSERA_TRY(const int made, queues_->MakeQueue(role));
      queues.push_back(made);
    }
    queue_of_.push_back(queues[next]);
  }
  TESSERA_RETURN_IF_ERROR(PlaceTier(MemoryTier::kDevice));
  if (host_ != nullptr) {
    TESSERA_RETURN_IF_ERROR(PlaceTier(MemoryTier::kHost));
    for (size_t v = 0; v < tasks_.values.size(); ++v) {
      const Value& value = tasks_.values[v];
      if (weights_ != nullptr || !value.persistent || buffers_[v] == nullptr ||
          value.tier != MemoryTier::kHost) {
        continue;
      }
      TESSERA_RETURN_IF_ERROR(Pin(buffers_[v], buffer_bytes_[v]));
    }
  }
  jobs_apart_ = PartsOf(jobs, std::vector<bool>(jobs.size()));
  std::map<int, int> last;  // by queue: the job
  for (int job = 0; job < static_cast<int>(jobs.size()); ++job) {
    const auto j = static_cast<size_t>(job);
    const int queue = queue_of_[static_cast<size_t>(jobs[j].stream)];
    const auto [before, is_first] = last.try_emplace(queue, job);
    const bool follows = !is_first && jobs_apart_.parts[j].waits.empty();
    follows_.push_back(follows ? before->second : -1);
    before->second = job;
  }
  return device_.Synchronize();
}

Result<void> RankExecutor::UseGraphs() {
  TESSERA_CHECK(queues_ != nullptr) << "graphs without queues";
  std::vector<bool> capturable;
  for (const Work& work : work_) {
    capturable.push_back(IsCapturable(tasks_.task(work.task), tasks_.values));
  }
  parts_ = PartsOf(enqueued_, capturable);
  graphs_.assign(parts_.parts.size(), -1);
  graph_names_.resize(parts_.parts.size());
  graph_use_ = {};
  graph_use_.tasks = std::ssize(work_);
  for (size_t p = 0; p < parts_.parts.size(); ++p) {
    const StepPart& part = parts_.parts[p];
    const Work& first = work_[static_cast<size_t>(part.begin)];
    if (!part.captured) {
      ++graph_use_.left[KindOf(tasks_.task(first.task), tasks_.values)];
      continue;
    }
    const Work& last = work_[static_cast<size_t>(part.end) - 1];
    graph_names_[p] = "graph from '" + first.name + "' to '" + last.name + "'";
    graph_use_.captured += part.end - part.begin;
    ++graph_use_.graphs;
  }
  TESSERA_TRY(
      void* const numbers,
      device_.Allocate({sizeof(StepNumbers)}, MemoryCategory::kWorkspace));
  numbers_ = static_cast<StepNumbers*>(numbers);
  runs_singly_ = kSingleSteps;
  return PlaceLoads();
}

// Gives all loads of a step their places in one piece of memory, which is
// pinned at once: whole pages, so that nothing else that is pinned shares one.
Result<void> RankExecutor::PlaceLoads() {
  constexpr size_t kAligned = 64;
  std::vector<size_t> offsets;
  size_t size = 0;
  for (const Work& work : work_) {
    for (const LocalTensor& block : work.loads) {
      offsets.push_back(size);
      const auto bytes =
          static_cast<size_t>(block.elements() * SizeOf(block.dtype));
      size += RoundUp(bytes, kAligned);
    }
  }
  if (size == 0) return {};
  size = RoundUp(size, kFileBlockBytes);
  size_t room = size + kFileBlockBytes;
  loaded_.resize(room);
  void* begin = loaded_.data();
  TESSERA_CHECK(std::align(kFileBlockBytes, size, begin, room) != nullptr);
  auto offset = offsets.begin();
  for (Work& work : work_) {
    for (LocalTensor& block : work.loads) {
      block.data = static_cast<std::byte*>(begin) + *offset++;
    }
  }
  return Pin(begin, {static_cast<int64_t>(size)});
}

// Those of graphs, before these are enqueued. The step before has ended, so
// that nothing reads there.
Result<void> RankExecutor::FillLoads() {
  for (const StepPart& part : parts_.parts) {
    if (!part.captured) continue;
    for (int job = part.begin; job < part.end; ++job) {
      const Work& work = work_[static_cast<size_t>(job)];
      const Task& task = tasks_.task(work.task);
      for (size_t i = 0; i < work.loads.size(); ++i) {
        const LocalTensor& block = work.loads[i];
        if (auto done = Load(task.writes[i], block, block.as<std::byte>());
            !done) {
          return done.error().At(work.name);
        }
      }
    }
  }
  return {};
}

// Gives every buffer of a step, and what tasks stage, a place.
Result<void> RankExecutor::PlaceTier(MemoryTier tier) {
  const auto last = static_cast<int>(work_.size()) - 1;
  const ValueId loss =
      tasks_.loss.valid() ? tasks_.Root(tasks_.loss) : ValueId();
  std::vector<BufferUse> buffers;
  std::vector<void**> places;
  std::vector<int> buffer_of(tasks_.values.size(), -1);
  for (int job = 0; job <= last; ++job) {
    Work& work = work_[static_cast<size_t>(job)];
    for (ValueId root : work.allocates) {
      if (tasks_.value(root).tier != tier) continue;
      buffer_of[root.index()] = static_cast<int>(buffers.size());
      buffers.push_back({buffer_bytes_[root.index()], {}});
      places.push_back(&buffers_[root.index()]);
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
      places.push_back(&work.staged);
    }
  }
  const BufferPlaces placed =
      PlaceBuffers(buffers, AlignmentOf(tier), enqueued_);
  TESSERA_RETURN_IF_ERROR(MakeArena(tier, placed.arena));
  auto* const arena =
      static_cast<std::byte*>(arenas_[static_cast<size_t>(tier)].data);
  for (size_t b = 0; b < buffers.size(); ++b) {
    *places[b] = arena + placed.offsets[b];
  }
  return {};
}

// That of the executor whose weights these are serves, if it is large enough:
// the two do not run at the same time.
Result<void> RankExecutor::MakeArena(MemoryTier tier, Bytes bytes) {
  Arena& arena = arenas_[static_cast<size_t>(tier)];
  if (bytes == Bytes{}) return {};
  if (weights_ != nullptr) {
    const Arena& other = weights_->arenas_[static_cast<size_t>(tier)];
    if (other.bytes >= bytes) {
      arena = other;
      return {};
    }
  }
  TESSERA_TRY(arena.data,
              DeviceOf(tier).Allocate(bytes, MemoryCategory::kActivation));
  arena.bytes = bytes;
  return tier == MemoryTier::kHost ? Pin(arena.data, bytes) : Result<void>();
}

Result<void> RankExecutor::Pin(void* data, Bytes bytes) {
  TESSERA_RETURN_IF_ERROR(queues_->Pin(data, bytes));
  pinned_.push_back(data);
  return {};
}

int RankExecutor::EndMarkOf(const StepParts& step, int part) const {
  const StepPart& of = step.parts[static_cast<size_t>(part)];
  return of.captured ? EndOfGraph(static_cast<int>(work_.size()), part)
                     : EndOf(of.begin);
}

// What follows is enqueued in the queue in use, that of the job's stream or of
// the part's.
Result<void> RankExecutor::RunJob(int job) {
  Work& work = work_[static_cast<size_t>(job)];
  if (!capturing_ && follows_[static_cast<size_t>(job)] < 0) {
    queues_->Mark(StartOf(job));
  }
  world_.SetCurrentTask(work.name);
  queues_->BeginRange(work.name);
  const auto done = RunTask(work, work.staged);
  queues_->EndRange();
  queues_->Mark(EndOf(job));
  if (!done) return done.error().At(work.name);
  return {};
}

Result<int> RankExecutor::Capture(size_t p) {
  const StepPart& part = parts_.parts[p];
  const auto queue_of = [&](int stream) {
    return queue_of_[static_cast<size_t>(stream)];
  };
  const int fork = ForkOf(static_cast<int>(work_.size()), static_cast<int>(p));
  TESSERA_RETURN_IF_ERROR(queues_->BeginCapture());
  capturing_ = true;
  queues_->Mark(fork);
  std::map<int, int> last;  // by stream
  Result<void> done;
  for (int job = part.begin; done && job < part.end; ++job) {
    const int stream = enqueued_[static_cast<size_t>(job)].stream;
    queues_->UseQueue(queue_of(stream));
    if (stream != part.stream && !last.contains(stream)) queues_->Await(fork);
    for (int wait : parts_.waits_inside[static_cast<size_t>(job)]) {
      queues_->Await(EndOf(wait));
    }
    done = RunJob(job);
    last[stream] = job;
  }
  queues_->UseQueue(queue_of(part.stream));
  for (const auto& [stream, job] : last) {
    if (stream != part.stream) queues_->Await(EndOf(job));
  }
  capturing_ = false;
  auto graph = queues_->EndCapture();
  if (!done) return done.error();
  return graph;
}

Result<void> RankExecutor::RunGraph(size_t p) {
  const std::string& name = graph_names_[p];
  if (graphs_[p] < 0) {
    auto graph = Capture(p);
    if (!graph) return graph.error().At(name);
    graphs_[p] = *graph;
  }
  world_.SetCurrentTask(name);
  queues_->BeginRange(name);
  queues_->Replay(graphs_[p]);
  queues_->EndRange();
  return {};
}

Result<Timeline> RankExecutor::TimelineOfQueues() {
  Timeline timeline = EmptyTimeline();
  for (int job = 0; job < static_cast<int>(work_.size()); ++job) {
    Span& span = timeline.spans[static_cast<size_t>(job)];
    TESSERA_TRY(span.end, queues_->Between(kBegin, EndOf(job)));
  }
  for (int job = 0; job < static_cast<int>(work_.size()); ++job) {
    const auto j = static_cast<size_t>(job);
    Span& span = timeline.spans[j];
    if (follows_[j] >= 0) {
      span.start = timeline.spans[static_cast<size_t>(follows_[j])].end;
    } else {
      TESSERA_TRY(span.start, queues_->Between(kBegin, StartOf(job)));
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

Result<Timeline> RankExecutor::RunInQueues() {
  const auto began = std::chrono::steady_clock::now();
  const bool replays = Replays();
  const StepParts& step = replays ? parts_ : jobs_apart_;
  queues_->UseQueue(0);
  if (replays) {
    const StepNumbers now{step_, learning_rate_};
    device_.Write(numbers_, &now, {sizeof(now)});
  }
  queues_->Mark(kBegin);
  for (int queue : queue_of_) {
    if (queue == 0) continue;
    queues_->UseQueue(queue);
    queues_->Await(kBegin);
  }
  std::vector<int> last(streams_.size(), -1);  // part
  const auto finish = [&] {
    queues_->UseQueue(0);
    for (int part : last) {
      if (part >= 0) queues_->Await(EndMarkOf(step, part));
    }
    return queues_->Synchronize();
  };
  // What is enqueued uses the buffers and this executor until it has ended.
  const auto fail = [&](const Error& error) {
    world_.Abort(error.ToString());
    queues_->WaitForAll();
    return error;
  };
  if (replays) {
    if (auto done = FillLoads(); !done) return fail(done.error());
  }
  for (size_t p = 0; p < step.parts.size(); ++p) {
    const StepPart& part = step.parts[p];
    const auto stream = static_cast<size_t>(part.stream);
    queues_->UseQueue(queue_of_[stream]);
    for (int wait : part.waits) queues_->Await(EndMarkOf(step, wait));
    const auto done = part.captured ? RunGraph(p) : RunJob(part.begin);
    last[stream] = static_cast<int>(p);
    if (part.captured) queues_->Mark(EndMarkOf(step, last[stream]));
    if (!done) return fail(done.error());
  }
  if (auto done = finish(); !done) return fail(done.error());
  Timeline timeline;
  if (!replays) {
    auto timed = TimelineOfQueues();
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
