#pragma once
// What `run` trains, read and checked.

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

#include "planner/base/result.h"
#include "planner/ir/cluster.h"
#include "planner/plan/plan.h"
#include "runtime/checkpoint_lock.h"
#include "runtime/launch/backend.h"
#include "runtime/launch/rank_environment.h"
#include "runtime/trainer.h"
#include "tools/gpu_share.h"
#include "tools/inputs.h"
#include "tools/options.h"
#include "tools/origin.h"
#include "tools/run_data.h"

namespace tessera {

// What --check compares with: the model on one rank of the CPU.
struct OneRank {
  Cluster cluster;
  Plan plan;
};

struct Job {
  const Backend* backend = nullptr;
  // Of --save and of --log, in the process that checks them.
  std::optional<CheckpointLock> lock;
  std::optional<CheckpointLock> log_lock;
  std::optional<GpuShare> gpu;  // where ranks have one
  Inputs inputs;
  Plan plan;
  // Of the checkpoint, if one is loaded.
  uint64_t seed = 0;
  int64_t first_step = 0;
  int64_t steps = 0;  // to train; 0: those of --until are done
  RunData data;
  LearningRate learning_rate;
  std::optional<OneRank> check;  // where it was asked for
  std::string config;            // to export; empty: none
};

// Reads and checks everything, so that no rank starts on bad input.
// `environment` is that of a rank, if this process is one of several.
// kInterrupted where `stop` becomes true meanwhile.
Result<Job> ReadJob(const Options& options,
                    const std::optional<RankEnvironment>& environment,
                    const std::atomic<bool>& stop);

// Of what is measured in the job.
ProfileOrigin OriginOfJob(const Options& options, const Job& job);

// The file in the folder of --export that says which model it is.
std::string ConfigIn(const std::string& folder);

}  // namespace tessera
