// RankExecutor on a device with queues.

#include "runtime/executor.h"

namespace tessera {
namespace {

// Marks of a step: where it begins, where each job begins and ends, and where
// all have ended.
constexpr int kBegin = 0;
int StartOf(int job) {
  return 1 + 2 * job;
}
int EndOf(int job) {
  return 2 + 2 * job;
}

// What cudaMalloc aligns to (CUDA C++ Programming Guide 13.0, "Device Memory
// Accesses"); on the host a multiple of what a file wants is used.
int64_t AlignmentOf(MemoryTier tier) {
  return tier == MemoryTier::kHost ? kFileBlockBytes : 256;
}

}  // namespace

Result<void> RankExecutor::PlanQueues() {
  std::vector<EnqueuedJob> jobs;
  std::vector<StreamRole> roles(streams_.size(), StreamRole::kCompute);
  for (size_t i = 0; i < work_.size(); ++i) {
    jobs.push_back({jobs_[i].stream, jobs_[i].deps});
    roles[static_cast<size_t>(jobs_[i].stream)] =
        tasks_.task(work_[i].task).stream;
  }
  // Queue 0 is that of computation.
  for (StreamRole role : roles) {
    int queue = 0;
    if (role != StreamRole::kCompute) {
      TESSERA_TRY(queue, queues_->MakeQueue(role));
    }
    queue_of_.push_back(queue);
  }
  TESSERA_RETURN_IF_ERROR(PlaceTier(MemoryTier::kDevice, jobs));
  if (host_ != nullptr) {
    TESSERA_RETURN_IF_ERROR(PlaceTier(MemoryTier::kHost, jobs));
    for (size_t v = 0; v < tasks_.values.size(); ++v) {
      const Value& value = tasks_.values[v];
      if (weights_ != nullptr || !value.persistent || buffers_[v] == nullptr ||
          value.tier != MemoryTier::kHost) {
        continue;
      }
      TESSERA_RETURN_IF_ERROR(Pin(buffers_[v], buffer_bytes_[v]));
    }
  }
  waits_ = WaitsOf(jobs);
  return device_.Synchronize();
}

// Gives every buffer of a step, and what tasks stage, a place.
Result<void> RankExecutor::PlaceTier(MemoryTier tier,
                                     std::vector<EnqueuedJob>& jobs) {
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
  const BufferPlaces placed = PlaceBuffers(buffers, AlignmentOf(tier), jobs);
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
  const bool host = tier == MemoryTier::kHost;
  TESSERA_TRY(
      arena.data,
      (host ? *host_ : device_).Allocate(bytes, MemoryCategory::kActivation));
  arena.bytes = bytes;
  return host ? Pin(arena.data, bytes) : Result<void>();
}

Result<void> RankExecutor::Pin(void* data, Bytes bytes) {
  TESSERA_RETURN_IF_ERROR(queues_->Pin(data, bytes));
  pinned_.push_back(data);
  return {};
}

Result<Timeline> RankExecutor::RunInQueues() {
  Timeline timeline = EmptyTimeline();
  const auto jobs = static_cast<int>(work_.size());
  queues_->UseQueue(0);
  queues_->Mark(kBegin);
  for (int queue : queue_of_) {
    if (queue == 0) continue;
    queues_->UseQueue(queue);
    queues_->Await(kBegin);
  }
  std::vector<int> last(streams_.size(), -1);
  const int end = StartOf(jobs);
  // What is enqueued uses the buffers and this executor until it has ended.
  const auto finish = [&] {
    queues_->UseQueue(0);
    for (int job : last) {
      if (job >= 0) queues_->Await(EndOf(job));
    }
    queues_->Mark(end);
    return queues_->Synchronize();
  };
  for (int job = 0; job < jobs; ++job) {
    Work& work = work_[static_cast<size_t>(job)];
    const auto stream =
        static_cast<size_t>(jobs_[static_cast<size_t>(job)].stream);
    queues_->UseQueue(queue_of_[stream]);
    for (int wait : waits_[static_cast<size_t>(job)]) {
      queues_->Await(EndOf(wait));
    }
    queues_->Mark(StartOf(job));
    world_.SetCurrentTask(work.name);
    const auto done = RunTask(work, work.staged);
    queues_->Mark(EndOf(job));
    last[stream] = job;
    if (!done) {
      const Error error = done.error().At(work.name);
      world_.Abort(error.ToString());
      (void)finish();
      return error;
    }
  }
  if (auto done = finish(); !done) {
    world_.Abort(done.error().ToString());
    return done.error();
  }
  for (int job = 0; job < jobs; ++job) {
    Span& span = timeline.spans[static_cast<size_t>(job)];
    TESSERA_TRY(span.start, queues_->Between(kBegin, StartOf(job)));
    TESSERA_TRY(span.end, queues_->Between(kBegin, EndOf(job)));
  }
  TESSERA_TRY(timeline.step_time, queues_->Between(kBegin, end));
  return timeline;
}

}  // namespace tessera
