#include "runtime/step_jobs.h"

#include <algorithm>
#include <utility>

#include "planner/base/check.h"
#include "planner/lower/file_layout.h"

namespace tessera {
namespace {

// Fills in what `work` uses and allocates; by root how much work uses it.
std::vector<int> FindLifetimes(const TaskGraph& tasks,
                               const StepBuffers& buffers,
                               std::vector<TaskWork>& all) {
  std::vector<int> use_counts(tasks.values.size());
  const ValueId loss = tasks.loss.valid() ? tasks.Root(tasks.loss) : ValueId();
  for (TaskWork& work : all) {
    const Task& task = tasks.task(work.task);
    for (const auto* list :
         {&task.reads, &task.writes, &std::as_const(work.also_uses)}) {
      for (ValueId value : *list) {
        const ValueId root = buffers.root(value);
        if (tasks.value(root).persistent || buffers.size(root) == Bytes{} ||
            std::ranges::count(work.uses, root) > 0) {
          continue;
        }
        if (use_counts[root.index()] == 0) {
          TESSERA_CHECK(list != &task.reads)
              << work.name << " reads what was never written";
          work.allocates.push_back(root);
        }
        ++use_counts[root.index()];
        work.uses.push_back(root);
      }
    }
    std::erase(work.uses, loss);
  }
  return use_counts;
}

// Who has had a place in the file, as jobs go on.
class FilePlaces {
 public:
  explicit FilePlaces(const StepBuffers& buffers) : buffers_(buffers) {}

  // Who had any of a value's place before it has ended when `job`, its first,
  // starts.
  void Await(ValueId root, StreamJob& job) {
    for (const auto& [before, jobs] : places_) {
      if (Begin(before) >= End(root) || Begin(root) >= End(before)) continue;
      job.deps.insert(job.deps.end(), jobs.begin(), jobs.end());
    }
    // Who comes after waits for `root`, and so for those whose whole place it
    // has.
    std::erase_if(places_, [&](const auto& place) {
      return Begin(root) <= Begin(place.first) && End(place.first) <= End(root);
    });
    places_.emplace_back(root, std::vector<int>());
  }

  void Use(const std::vector<ValueId>& roots, int job) {
    for (auto& [root, jobs] : places_) {
      if (std::ranges::count(roots, root) > 0) jobs.push_back(job);
    }
  }

 private:
  int64_t Begin(ValueId root) const { return buffers_.file_offset(root); }
  int64_t End(ValueId root) const {
    return Begin(root) + WholeFileBlocks(buffers_.size(root)).value;
  }

  const StepBuffers& buffers_;
  std::vector<std::pair<ValueId, std::vector<int>>> places_;  // with its jobs
};

}  // namespace

StepJobs PlanJobs(const TaskGraph& tasks, const StepBuffers& buffers,
                  std::span<const int> streams, std::vector<TaskWork>& work) {
  StepJobs planned;
  planned.use_counts = FindLifetimes(tasks, buffers, work);
  std::vector<int> job_of(tasks.tasks.size(), -1);
  std::vector<int> left = planned.use_counts;
  std::vector<HeldBytes> gives;
  FilePlaces places(buffers);
  for (size_t w = 0; w < work.size(); ++w) {
    const auto index = static_cast<int>(w);
    StreamJob job;
    job.stream = streams[w];
    planned.streams = std::max(planned.streams, job.stream + 1);
    for (TaskId dep : tasks.task(work[w].task).deps) {
      if (job_of[dep.index()] >= 0) job.deps.push_back(job_of[dep.index()]);
    }
    job.takes.device = work[w].staging;
    HeldBytes given = job.takes;
    for (ValueId root : work[w].allocates) {
      job.takes += buffers.MemoryOf(root);
      if (buffers.InFile(root)) places.Await(root, job);
    }
    for (ValueId root : work[w].uses) {
      if (--left[root.index()] == 0) given += buffers.MemoryOf(root);
    }
    places.Use(work[w].uses, index);
    job_of[work[w].task.index()] = index;
    planned.jobs.push_back(std::move(job));
    gives.push_back(given);
  }
  planned.budget = SequentialPeak(planned.jobs, gives);
  return planned;
}

}  // namespace tessera
