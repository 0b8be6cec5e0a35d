#pragma once
// Train: the training loop of one rank. Every rank of the job calls it with the
// same job, but for its own world and device.

#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "planner/base/result.h"
#include "planner/lower/timeline.h"
#include "planner/plan/plan.h"
#include "runtime/checkpoint.h"
#include "runtime/executor.h"
#include "runtime/learning_rate.h"
#include "runtime/weight_export.h"

namespace tessera {

struct StepReport {
  int64_t step = 0;  // 0-based
  double loss = 0;
  Duration step_time;  // of the slowest rank
  double tokens_per_s = 0;
  double learning_rate = 0;
  std::optional<double> validation_loss;  // after the step
  // Where the loss is scaled (runtime/loss_scale.h): by what, and whether a
  // gradient was not finite, so that the step left the weights as they were.
  std::optional<double> loss_scale;
  bool skipped = false;
};

// The loss on batches that are not trained on, with the weights as they are and
// without dropout: the mean over all labels that count.
struct Validation {
  int64_t every = 0;  // steps; 0: never
  int64_t batches = 0;
  // Batch i has the samples from i * global_batch on.
  LoadInput load;
  // How many labels count in batch i.
  std::function<Result<int64_t>(int64_t)> labels;
};

// Owns nothing: what it points to outlives the call.
struct TrainingJob {
  const Graph* graph = nullptr;      // differentiated
  const TaskGraph* tasks = nullptr;  // of the plan
  TrainingOptions options;
  // Fixes weights and dropout.
  uint64_t seed = 0;
  int64_t steps = 1;  // after those of the checkpoint, if one is loaded
  LoadInput load;
  // Tells the data of `load` from other data, where ranks open it each.
  uint64_t data = 0;
  // `load` fills the input "positions" with places in the row, from 0: rows
  // hold no documents of their own.
  bool places_are_positions = false;
  // Of TrainingOptions::learning_rate where not given.
  std::optional<LearningRate> learning_rate;
  Validation validation;
  CommWorld* world = nullptr;
  RankDevice* device = nullptr;
  // Where what the plan keeps in files lies, if it does.
  std::string offload_directory = ".";
  PublishedLayout layout;  // of the model's published weights
  std::string load_path;   // checkpoint or weights to start from; empty: none
  // The step behind which that was when the rest of this was worked out, unless
  // nothing was: another one since is an error.
  std::optional<int64_t> load_step;
  // Checkpoint to leave; empty: none. None is left of weights or states that
  // are not finite: what was there stays.
  std::string save_path;
  int64_t save_every = 0;    // at steps that it divides; 0: only at the end
  int keep_checkpoints = 1;  // of the last ones (SaveCheckpoint)
  // Folder that is left the weights, in the graph's type, where they are
  // finite; empty: none.
  std::string export_folder;
  Bytes export_file_bytes = WeightFiles().file_bytes;
  // Once true on any rank, all ranks finish the step, save and return; before
  // the first step, and where it comes while weights are exported, they return
  // kInterrupted.
  const std::atomic<bool>* stop = nullptr;
  // Replays what can be captured of a step as graphs. REQUIRES: a device with
  // queues.
  bool graphs = false;
  // Whether algorithms of products are timed, between the step that first runs
  // them and the next one, or of validation's behind the next one; and those
  // that were chosen before (TrainingResult::products), of which rank 0's
  // count, with the file's name for errors. No effect on devices whose products
  // have one algorithm.
  bool tune = false;
  std::string products;
  std::string products_path;
  // Whether kernels of several tasks in one are taken. Else every task has a
  // time of its own.
  bool fuses = true;
  // Whether runs are equal bit for bit. Else sums that no two ranks compute may
  // have any order, where that is faster.
  bool deterministic = true;
  // Called on rank 0: while weights and states are set, with what is set there
  // of what it holds; and after each step. Where the latter is an error all
  // ranks end as at `stop`, at the latest behind the next step.
  std::function<void(Bytes done, Bytes total)> starting;
  std::function<Result<void>(const StepReport&)> progress;
};

// A rank's file of what has no room in memory, and how it is read and written
// (runtime/storage/file_tier.h).
struct FileUse {
  Bytes length;
  bool direct = false;  // past the page cache
  bool ring = false;    // by io_uring
};

struct TrainingResult {
  int64_t first_step = 0;
  std::vector<double> losses;             // by step; of the global batch
  std::vector<Duration> step_times;       // of the slowest rank
  std::optional<double> validation_loss;  // the last one
  // By step, where the loss is scaled; and which steps were skipped, 0-based.
  std::vector<double> loss_scales;
  std::vector<int64_t> skipped_steps;
  // Medians, without the first step (which allocates) where there are more.
  Duration step_time;
  double tokens_per_s = 0;
  bool interrupted = false;
  // On rank 0: the first error of TrainingJob::progress.
  std::optional<Error> untold;
  std::optional<int64_t> saved;  // the step behind which it left a checkpoint
  bool exported = false;
  GraphUse graphs;       // of this rank; none without TrainingJob::graphs
  std::string products;  // of all ranks, with TrainingJob::tune
  // By rank, on rank 0 only: the true peak of memory, and the step that took
  // the median time, of the last ones (KeptTimelines) that replayed no graphs.
  std::vector<MemoryUse> memory;
  // The same of what it kept in the host's memory, and its file.
  std::vector<MemoryUse> host_memory;
  std::vector<FileUse> files;
  // By rank: the most that its process held beyond what it held before
  // training, as the operating system counts: `memory` and `host_memory`, some
  // MB that the kernels pack operands into, the channels between ranks, and
  // what is kept of each task: how it is done, and its times in the last steps.
  std::vector<Bytes> os_peak;
  std::vector<Timeline> timelines;
};

// Of how many last steps a rank keeps the times of all tasks, to report those
// of the median step: fewer where the task graph has many, so that they take a
// few MB, or little beside the task graph itself. The same on all ranks.
size_t KeptTimelines(size_t tasks);

// On an error of its own this rank aborts the job, so that no peer waits.
Result<TrainingResult> Train(const TrainingJob& job);

// Runs f(0) … f(n - 1) on a thread each and returns when all have.
void RunThreads(int n, const std::function<void(int)>& f);

}  // namespace tessera
