#pragma once
// The values of all command-line flags. A flag means the same in every verb
// that takes it (flags.cc); what is not given keeps the value below.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "planner/ir/dtype.h"
#include "planner/plan/plan.h"

namespace tessera {

struct Options {
  // What is planned or run.
  std::string model;
  std::string cluster;
  std::string stack;
  std::string collective;  // in place of the cluster's, unless empty
  std::string plan;
  std::optional<std::string> strategy;
  int64_t global_batch = 0;  // 0: not given
  int64_t seq_len = 0;       // 0: not given
  std::optional<DType> dtype;
  TrainingOptions training;
  int betas = 0;  // how many of them were given
  std::vector<std::string> profiles;
  uint64_t seed = 0;
  bool json = false;

  // search, profile and run
  std::optional<double> time_limit_s;
  std::optional<int64_t> proposals;
  int chains = 8;
  double temperature = 0.1;
  int threads = 0;  // of the search, or of each rank; 0: all cores together
  std::string output;

  // search
  std::vector<std::string> fix;
  std::vector<std::string> forbid;
  int max_microbatch = 0;  // 0: any
  std::string space;
  std::string constraints;  // a file
  std::string from;         // a plan of another cluster
  bool resume = false;
  int confirm = 5;
  int verify = 0;
  std::string prefer = "simple";

  // explain
  bool which_strategy = false;
  std::string trainer;  // of --as

  // simulate; trace also run
  std::string trace;
  std::string plan_output;

  // profile
  bool again = false;

  // discover
  int nodes = 0;  // 0: not given

  // run and profile
  std::string backend = "cpu";
  int nproc = 0;  // 0: as the plan or cluster has it

  // run
  std::string data;
  int64_t steps = 20;
  int64_t until = 0;  // 0: --steps counts
  std::string save;
  std::string load;
  int64_t save_every = 0;
  int keep_checkpoints = 1;
  std::string export_folder;
  double export_shard = 5e9;      // bytes
  std::string offload_directory;  // empty: the strategy's, or the system's
  std::string log;
  bool graph = false;
  bool deterministic = false;
  std::string tune;
  int64_t check = 0;  // steps; 0: not asked
  bool compare = false;
  std::string learn;
  std::string decay = "constant";
  double min_learning_rate = 0;
  int64_t warmup = 0;
  int64_t decay_steps = 0;  // 0: those of this run and before
  int64_t validate_every = 0;
  int64_t validate_batches = 4;
  int64_t end_of_text = -1;  // -1: not given
  int64_t mask_token = -1;   // -1: not given

  // whatif
  std::vector<std::string> vary;  // "PATH=VALUE,VALUE"
  std::vector<std::string> set;   // "PATH=VALUE"
  std::vector<std::string> fail;
  std::vector<std::string> slow;  // "PART=FACTORx"
  bool replan = false;
  bool fast = false;
  bool sensitivity = false;
  bool csv = false;
  double jitter = 0;  // of a device's time; 0: not given
  int samples = 100;
  double tokens = 0;         // of a run; 0: not given
  double days = 0;           // 0: not given
  int checkpoint_every = 0;  // steps; 0: the best interval
  double restart_s = 300;
  double scaling_limit = 0;  // efficiency; 0: not asked
  std::string scaling = "strong";
  std::string cheapest;  // clusters, with commas
  bool fit = false;

  // What is not a flag, such as the KIND of `list`.
  std::vector<std::string> positional;

  // The names of the flags that were given.
  std::vector<std::string_view> given;
  bool Given(std::string_view flag) const {
    return std::ranges::find(given, flag) != given.end();
  }

  // The command line behind the program's name, for launching ranks.
  std::vector<std::string> arguments;
};

}  // namespace tessera
