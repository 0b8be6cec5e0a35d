#pragma once
// QueueRunner: runs the jobs of a step on a device with queues. Each stream is
// a queue, jobs are enqueued in issue order, and every buffer has a place for
// good (runtime/step_order.h): a step allocates nothing, and the host waits for
// its end alone. With graphs what can be captured is captured once and
// replayed.
//
// Thread safety: it belongs to one thread.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "planner/base/result.h"
#include "planner/lower/task_graph.h"
#include "planner/lower/timeline.h"
#include "runtime/comm/communicator.h"
#include "runtime/device/device.h"
#include "runtime/step_buffers.h"
#include "runtime/step_jobs.h"
#include "runtime/step_order.h"
#include "runtime/step_work.h"

namespace tessera {

// What of a step is replayed as graphs.
struct GraphUse {
  int64_t graphs = 0;
  int64_t tasks = 0;                    // of this rank
  int64_t captured = 0;                 // of these in graphs
  std::map<std::string, int64_t> left;  // of the others how many of each kind
};

struct QueueHooks {
  // Enqueues what a work is, in the queue in use. In a capture with where its
  // kernels find what changes from step to step; else with null.
  std::function<Result<void>(TaskWork&, const StepNumbers*)> run;
  // Fills TaskWork::inputs where they lie.
  std::function<Result<void>(const TaskWork&)> fill_inputs;
};

class QueueRunner {
 public:
  // Places the buffers of a step, and what its work stages. `work` and `jobs`
  // are those of PlanJobs. The queues are those of `lender` as far as they go,
  // unless it is null: the two do not run at the same time. All outlive this.
  static Result<std::unique_ptr<QueueRunner>> Make(
      const TaskGraph& tasks, std::vector<TaskWork>& work, const StepJobs& jobs,
      StepBuffers& buffers, CommWorld& world, QueueDevice& device,
      QueueHooks hooks, const QueueRunner* lender);
  QueueRunner(const QueueRunner&) = delete;
  QueueRunner& operator=(const QueueRunner&) = delete;
  ~QueueRunner();

  // RankExecutor::UseGraphs, graph_use and Replays.
  Result<void> UseGraphs();
  const GraphUse& graph_use() const { return graph_use_; }
  bool Replays() const { return numbers_ != nullptr && runs_singly_ == 0; }

  // One step. After an error the job has been aborted, and nothing of the step
  // goes on: what was enqueued uses the buffers, and what the hooks do.
  Result<Timeline> Run(const StepNumbers& numbers);

 private:
  QueueRunner(const TaskGraph& tasks, std::vector<TaskWork>& work,
              const StepJobs& jobs, StepBuffers& buffers, CommWorld& world,
              QueueDevice& device, QueueHooks hooks);
  Result<void> Plan(const StepJobs& jobs, const QueueRunner* lender);
  Result<void> PlaceTier(MemoryTier tier);
  Result<void> PlaceInputs();
  Result<void> FillInputs();
  int EndMarkOf(const StepParts& step, int part) const;
  // What follows is enqueued in the queue in use, that of the job's stream or
  // of the part's. `captured` as in QueueHooks.
  Result<void> RunJob(int job, const StepNumbers* captured);
  Result<void> RunGraph(size_t part);
  Result<int> Capture(size_t part);
  Result<Timeline> TimelineOfJobs();

  const TaskGraph& tasks_;
  std::vector<TaskWork>& work_;
  StepBuffers& buffers_;
  CommWorld& world_;
  QueueDevice& device_;
  const QueueHooks hooks_;

  // The jobs as they are enqueued, job by job, and the queue of each stream.
  std::vector<EnqueuedJob> jobs_;
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
  StepNumbers* numbers_ = nullptr;  // in the device's memory; null: no graphs
  // What graphs copy to the device, and where in it this begins, once pinned.
  std::vector<std::byte> room_of_inputs_;
  void* inputs_ = nullptr;
};

}  // namespace tessera
