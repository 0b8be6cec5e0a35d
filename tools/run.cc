#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <numeric>
#include <optional>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/memory/peak_memory.h"
#include "costmodel/profile/profile_io.h"
#include "costmodel/simulate/simulator.h"
#include "planner/base/file.h"
#include "planner/base/format.h"
#include "planner/base/table.h"
#include "planner/io/graph_io.h"
#include "planner/io/huggingface.h"
#include "planner/io/plan_io.h"
#include "planner/lower/check_order.h"
#include "planner/lower/lower.h"
#include "planner/plan/describe.h"
#include "planner/plan/strategy.h"
#include "planner/topology/topologies.h"
#include "runtime/checkpoint.h"
#include "runtime/comm/peer_errors.h"
#include "runtime/comm/thread_world.h"
#include "runtime/device/cpu_device.h"
#include "runtime/launch/backend.h"
#include "runtime/launch/launch.h"
#include "runtime/published_files.h"
#include "runtime/thread_pool.h"
#include "runtime/trainer.h"
#include "tools/export_config.h"
#include "tools/gpu_share.h"
#include "tools/inputs.h"
#include "tools/interrupt.h"
#include "tools/job_ranks.h"
#include "tools/json.h"
#include "tools/loss_check.h"
#include "tools/origin.h"
#include "tools/run_data.h"
#include "tools/run_memory.h"
#include "tools/run_report.h"
#include "tools/share_cores.h"
#include "tools/step_report.h"
#include "tools/trace.h"
#include "tools/verb.h"
#include "tools/vocabulary_advice.h"

namespace tessera {
namespace {

// As many as one world of one host holds (runtime/comm/shm_world.h and
// loopback_world.h).
constexpr int kMostRanks = 64;

// So many take some seconds to prepare.
constexpr int64_t kManyTasks = 200'000;

// The ranks that the flags other than --nproc and --cluster ask for.
Result<int> RanksOfPlan(const Options& options) {
  if (options.strategy) {
    const auto strategy = ParseStrategy(*options.strategy);
    if (!strategy) return strategy.error().At("--strategy");
    int64_t ranks = 1;
    for (const int degree : {std::max(1, strategy->dp), strategy->tp,
                             strategy->pp, strategy->cp, strategy->ep}) {
      ranks *= degree;
      if (ranks > kMostPlannedDevices) {
        return InvalidInput("its degrees make up more than " +
                                std::to_string(kMostPlannedDevices) + " ranks",
                            "--strategy");
      }
    }
    return static_cast<int>(ranks);
  }
  if (options.plan.empty()) return 1;
  // A plan names the parts of its model, so that is read first.
  Options model = options;
  model.plan.clear();
  TESSERA_TRY(const Inputs inputs, ReadInputs(model, "local-cpu:1"));
  TESSERA_TRY(const Plan plan, ReadPlan(options.plan, inputs.graph));
  int last = 0;
  for (const DeviceGroup& group : plan.groups) {
    for (const DeviceId device : group.devices) {
      last = std::max(last, device.value);
    }
  }
  return last + 1;
}

// What --check compares with: the model on one rank of the CPU.
struct OneRank {
  Cluster cluster;
  Plan plan;
};

struct Job {
  const Backend* backend = nullptr;
  std::optional<GpuShare> gpu;  // where ranks have one
  Inputs inputs;
  Plan plan;
  // Of the checkpoint, if one is loaded.
  uint64_t seed = 0;
  int64_t first_step = 0;
  RunData data;
  LearningRate learning_rate;
  std::optional<OneRank> check;  // where it was asked for
  std::string config;            // to export; empty: none
};

ProfileOrigin OriginOfJob(const Job& job) {
  return OriginOf(static_cast<int>(job.inputs.cluster.devices.size()),
                  job.gpu ? job.gpu->gpu.name : "");
}

Result<LearningRate> LearningRateOf(const Options& options) {
  LearningRate rate;
  const auto decay = FindDecay(options.decay);
  if (!decay) return decay.error().At("--decay");
  rate.decay = *decay;
  rate.peak = options.training.learning_rate;
  rate.least = options.min_learning_rate;
  rate.warmup = options.warmup;
  rate.steps = options.decay_steps;
  for (const std::string_view flag : {"--min-lr", "--decay-steps"}) {
    if (options.decay != "constant" || !options.Given(flag)) continue;
    return InvalidInput(
        "has no effect: the learning rate is constant (--decay NAME)",
        std::string(flag));
  }
  if (rate.least > rate.peak) {
    return InvalidInput("is above --lr", "--min-lr");
  }
  return rate;
}

// The plan of --check: as many microbatches as the job's own has, since some
// operators look at a microbatch (batch norms). Other ranks of this machine
// have ended or hold nothing more when it runs.
Result<OneRank> OneRankOf(const Options& options, const Graph& graph,
                          const Plan& plan) {
  OneRank one;
  TESSERA_TRY(one.cluster, MakeCluster("local-cpu:1"));
  Strategy strategy;
  strategy.dp = 1;
  strategy.mbs =
      static_cast<int>(graph.global_batch / std::max(1, plan.microbatches));
  auto alone = PlanFromStrategy(graph, one.cluster, strategy);
  if (!alone) return alone.error().At("--check");
  one.plan = *std::move(alone);
  const TaskGraph tasks = Lower(graph, one.cluster, one.plan, options.training);
  TESSERA_RETURN_IF_ERROR(CheckMemoryOfOneRank(graph, one.plan, tasks));
  return one;
}

// A run that goes on takes what this command says, whatever it was before.
void WarnOfOtherRun(const Options& options, const Graph& graph,
                    const SavedRun& saved, Inputs& inputs) {
  if (!saved.graph.empty() && saved.graph != Fingerprint(graph)) {
    std::string theirs;
    std::string ours;
    const auto compare = [&](std::string_view what, const std::string& then,
                             const std::string& now) {
      if (then.empty() || then == now) return;
      theirs += (theirs.empty() ? "" : ", ") + std::string(what) + " " + then;
      ours += (ours.empty() ? "" : ", ") + now;
    };
    const auto text = [](std::optional<int64_t> n) {
      return n ? std::to_string(*n) : "";
    };
    compare("global batch", text(saved.global_batch),
            std::to_string(graph.global_batch));
    compare("sequence length", text(saved.seq_len),
            std::to_string(graph.seq_len));
    compare("type", saved.dtype, std::string(NameOf(graph.dtype)));
    const bool says_all =
        saved.global_batch && saved.seq_len && !saved.dtype.empty();
    if (theirs.empty()) {
      theirs = says_all ? "another model"
                        : "another batch, sequence length, type or model";
      theirs += " than this one";
    } else {
      theirs += ", and this one has " + ours;
    }
    inputs.warnings.push_back(options.load + ": the run that wrote it had " +
                              theirs);
  }
  if (saved.stochastic_rounding != options.training.stochastic_rounding) {
    const bool then = saved.stochastic_rounding;
    inputs.warnings.push_back(
        options.load + ": the run that wrote it rounded " +
        (then ? "at random, which this one does not"
              : "to the nearest, and this one rounds at random") +
        " (--stochastic-rounding)");
  }
}

// That a run begins where its learning rate has ended, or ends where that still
// rises or has been 0.
void WarnOfLearningRate(const Options& options, Job& job) {
  const LearningRate& rate = job.learning_rate;
  const int64_t last = job.first_step + options.steps;
  if (last < rate.warmup) {
    job.inputs.warnings.push_back(
        "the run ends behind step " + std::to_string(last) +
        ", within the warm-up of " + std::to_string(rate.warmup) +
        " steps (--warmup): its learning rate reaches " +
        FormatNumber(RateAt(rate, last - 1)));
  }
  if (rate.steps == 0) return;
  if (job.first_step < rate.steps) {
    // Others than 0 are to go on with.
    if (rate.steps < last && RateAt(rate, rate.steps) == 0) {
      job.inputs.warnings.push_back(
          "the learning rate is 0 from step " + std::to_string(rate.steps + 1) +
          " on (--decay-steps), and this run goes to step " +
          std::to_string(last) + ": --min-lr X goes on at X");
    }
    return;
  }
  job.inputs.warnings.push_back(
      "the learning rate ends at step " + std::to_string(rate.steps) +
      " (--decay-steps), and this run begins behind step " +
      std::to_string(job.first_step) + ": it stays at " +
      FormatNumber(RateAt(rate, job.first_step)));
}

// That a file without a header, which is read as 16-bit tokens, has 32-bit
// ones: their upper halves are near 0.
void WarnOfWiderTokens(const TokenData& tokens, Inputs& inputs) {
  if (!LooksWider(tokens)) return;
  inputs.warnings.push_back(
      tokens.path() +
      ": looks like 32-bit tokens, as every second number is near 0, but is "
      "read as 16-bit ones, which a .bin without a header has: write them as "
      "uint16, or as uint32 behind llm.c's header (magic 20240801, version 7)");
}

// Of a run on this host's cores whose predictions are of other devices.
void WarnOfRunOnCores(const Options& options, Inputs& inputs) {
  const Cluster& cluster = inputs.cluster;
  const bool cores = std::ranges::all_of(
      cluster.device_types, [](const auto& t) { return t.shared_memory; });
  if (!cores) {
    inputs.warnings.push_back(
        "the run is on this host's cores, predictions are of the devices of "
        "cluster '" +
        cluster.name + "'");
    return;
  }
  // Of others the inputs' reader has warned.
  if (!options.cluster.starts_with("local-cpu")) {
    WarnOfOtherHosts(options, inputs);
  }
  const auto ranks = std::ssize(cluster.devices);
  if (!inputs.profile && options.cluster.starts_with("local-cpu") &&
      ranks > HostCores()) {
    inputs.warnings.push_back(
        "predictions are of ranks with a core each, and " +
        std::to_string(ranks) + " ranks share " + std::to_string(HostCores()) +
        " here: --nproc " + std::to_string(ranks) +
        " without --cluster predicts that");
  }
}

// "rank 2, rank 3", of those that are in none of the plan's groups.
std::string IdleRanks(const Plan& plan, int ranks) {
  std::string idle;
  for (int rank = 0; rank < ranks; ++rank) {
    const bool works = std::ranges::any_of(plan.groups, [&](const auto& group) {
      return std::ranges::count(group.devices, DeviceId(rank)) > 0;
    });
    if (works) continue;
    idle += (idle.empty() ? "rank " : ", rank ") + std::to_string(rank);
  }
  return idle;
}

std::string ConfigIn(const std::string& folder) {
  return folder + "/config.json";
}

// Makes the folder, which must have no weights, and no other `config` than this
// one (none where it is empty): those of two models would look like one.
Result<void> MakeExportFolder(const std::string& folder,
                              const std::string& config) {
  std::error_code code;
  if (std::filesystem::exists(folder, code) &&
      !std::filesystem::is_directory(folder, code)) {
    return InvalidInput("expected a folder", "--export " + folder);
  }
  std::filesystem::create_directory(folder, code);
  if (code || access(folder.c_str(), W_OK) != 0) {
    return InvalidInput("cannot make or write the folder: " +
                            (code ? code.message() : std::strerror(errno)),
                        "--export " + folder);
  }
  for (const auto& entry : std::filesystem::directory_iterator(folder, code)) {
    const std::string name = entry.path().filename();
    // Of a run that was killed there may be "….tmp.HOST.PID.N" (AtomicFile).
    if (name.starts_with("model") &&
        name.find(".safetensors") != std::string::npos &&
        name.find(".tmp.") == std::string::npos) {
      return InvalidInput("has weights already: " + name, "--export " + folder);
    }
  }
  const std::string path = ConfigIn(folder);
  if (!std::filesystem::exists(path, code)) return {};
  TESSERA_TRY(const std::string there, ReadFile(path));
  if (there == config) return {};
  return InvalidInput("has another model's config.json", "--export " + folder);
}

// That the flags go together, on the backend too, and their files can be
// written.
Result<void> CheckFlags(const Options& options, const Backend& backend) {
  if (!options.save.empty()) {
    TESSERA_RETURN_IF_ERROR(CheckReplaceable(options.save, "--save"));
  } else if (options.save_every > 0) {
    return InvalidInput("needs --save FILE", "--save-every");
  }
  if (options.export_shard < 1 || options.export_shard > 1e18) {
    return InvalidInput("expected from 1 byte to 10^18", "--export-shard");
  }
  if (options.export_folder.empty() && options.Given("--export-shard")) {
    return InvalidInput("needs --export DIR", "--export-shard");
  }
  if (!options.log.empty()) {
    TESSERA_RETURN_IF_ERROR(CheckWritable(options.log, "--log"));
  }
  if (!options.trace.empty()) {
    TESSERA_RETURN_IF_ERROR(CheckWritable(options.trace, "--trace"));
  }
  if (!options.learn.empty()) {
    TESSERA_RETURN_IF_ERROR(CheckProtoOutput(options.learn, "--learn"));
  }
  if (options.graph && !backend.gpu) {
    return InvalidInput("has no effect: --backend " +
                            std::string(backend.name) + " has no graphs",
                        "--graph");
  }
  if (!options.tune.empty()) {
    if (!backend.gpu) {
      return InvalidInput("has no effect: on --backend " +
                              std::string(backend.name) +
                              " products have one algorithm",
                          "--tune");
    }
    TESSERA_RETURN_IF_ERROR(CheckWritable(options.tune, "--tune"));
  }
  if (options.Given("--validate-batches") && options.validate_every == 0) {
    return InvalidInput("needs --validate-every N", "--validate-batches");
  }
  return {};
}

Result<void> CheckOperatorsRun(const Graph& graph, const std::string& model) {
  for (const Node& node : graph.nodes) {
    if (const OwnOp* own = OwnOpOf(*node.op)) {
      return InvalidInput("operator '" + own->name + "' of '" + node.name +
                              "' is the file's own: it is planned and priced, "
                              "but nothing runs it",
                          model);
    }
  }
  return {};
}

// The ranks, a GPU for each where they have one, and the cluster that they are:
// of this host, or that of --cluster.
Result<void> ReadInputsForRanks(
    const Options& options, const std::optional<RankEnvironment>& environment,
    Job& job) {
  // 0 where nobody has said.
  int ranks = environment ? environment->size : options.nproc;
  if (ranks == 0 && options.cluster.empty()) {
    TESSERA_TRY(ranks, RanksOfPlan(options));
  }
  const bool one_host = !job.backend->gpu || job.backend->threads;
  if (one_host && ranks > kMostRanks) {
    return InvalidInput(std::to_string(ranks) + " ranks on one host: at most " +
                            std::to_string(kMostRanks),
                        "--nproc");
  }
  const auto here = [&](int count) {
    return environment.value_or(LastRank(count));
  };
  std::optional<GpuShare>& gpu = job.gpu;
  if (job.backend->gpu && options.cluster.empty()) {
    TESSERA_TRY(gpu, GpuShareOf(*job.backend, here(ranks)));
    std::string warning;
    TESSERA_TRY(Cluster cluster,
                ClusterOfGpus(gpu->gpu, ranks, here(ranks).local_size,
                              gpu->ranks, &warning));
    TESSERA_TRY(job.inputs, ReadInputs(options, std::move(cluster)));
    if (!warning.empty()) job.inputs.warnings.push_back(warning);
  } else {
    TESSERA_TRY(job.inputs,
                ReadInputs(options, "local-cpu:" + std::to_string(ranks)));
  }
  TESSERA_RETURN_IF_ERROR(CheckOperatorsRun(job.inputs.graph, options.model));
  const auto devices = static_cast<int>(job.inputs.cluster.devices.size());
  if (ranks != 0 && ranks != devices) {
    return InvalidInput(std::to_string(ranks) + " ranks on the " +
                            std::to_string(devices) + " devices of cluster '" +
                            job.inputs.cluster.name + "'",
                        "--nproc");
  }
  if (!gpu) {
    TESSERA_TRY(gpu, GpuShareOf(*job.backend, here(devices)));
  }
  if (one_host && devices > kMostRanks) {
    return InvalidInput("cluster '" + job.inputs.cluster.name + "' has " +
                            std::to_string(devices) + " devices: at most " +
                            std::to_string(kMostRanks) + " ranks on one host",
                        "--cluster");
  }
  if (options.cluster.empty() && !gpu) {
    ShareCores(job.inputs.cluster, HostCores(), ThreadsOf(options, devices));
  } else if (!gpu) {
    WarnOfRunOnCores(options, job.inputs);
  }
  return {};
}

// What of the plan may be otherwise than it was meant, or better.
void WarnOfPlan(const Options& options, Job& job) {
  std::vector<std::string>& warnings = job.inputs.warnings;
  const auto ranks = static_cast<int>(job.inputs.cluster.devices.size());
  if (const std::string idle = IdleRanks(job.plan, ranks); !idle.empty()) {
    warnings.push_back("without work in this plan: " + idle);
  }
  if (job.backend->gpu && options.cluster.empty() &&
      (Uses(job.plan, MemoryTier::kHost) ||
       Uses(job.plan, MemoryTier::kFile))) {
    warnings.emplace_back(
        "times on the host and its files are predicted for a host that such "
        "GPUs come with: --cluster with a file of 'tessera discover' has this "
        "one's speed");
  }
  if (job.backend->gpu && IsHuggingFace(options.model) &&
      !IsGraphFile(options.model)) {
    std::string advice = VocabularyAdvice(job.inputs.graph, job.plan);
    if (!advice.empty()) warnings.push_back(std::move(advice));
  }
}

// That the ranks can run the job's plan, and have the memory for it.
Result<void> CheckPlanRuns(const Options& options, const Job& job) {
  const Graph& graph = job.inputs.graph;
  const TaskGraph tasks =
      Lower(graph, job.inputs.cluster, job.plan, options.training);
  if (const auto problems = CheckOrder(tasks, graph); !problems.empty()) {
    return problems[0].At("the plan's tasks");
  }
  TESSERA_RETURN_IF_ERROR(CheckOffloadDirectory(options, job.plan));
  return CheckMemory(options, job.inputs, job.gpu, job.plan, tasks);
}

// What --load goes on from, and the seed that follows from that.
Result<void> ReadSaved(const Options& options, Job& job) {
  const Graph& graph = job.inputs.graph;
  job.seed = options.seed;
  if (options.load.empty()) return {};
  TESSERA_RETURN_IF_ERROR(CheckReadable(options.load));
  TESSERA_RETURN_IF_ERROR(
      CheckCheckpoint(options.load, options.training.optimizer, graph));
  TESSERA_TRY(const auto saved, SavedRunOf(options.load));
  if (saved) {
    WarnOfOtherRun(options, graph, *saved, job.inputs);
    job.seed = saved->seed.value_or(options.seed);
    job.first_step = saved->step;
  } else {
    TESSERA_TRY(const PublishedFiles files,
                PublishedFiles::Open(options.load, job.inputs.layout, graph));
    if (const std::string head = files.HeadThatDiffers(); !head.empty()) {
      job.inputs.warnings.push_back(
          options.load + ": tensor '" + head +
          "' differs from the table to which the model ties its head, and is "
          "left out");
    }
  }
  if (options.Given("--seed") && job.seed != options.seed) {
    return InvalidInput("is " + std::to_string(options.seed) + ", but '" +
                            options.load + "' goes on with its own, " +
                            std::to_string(job.seed),
                        "--seed");
  }
  return {};
}

// Reads and checks everything, so that no rank starts on bad input.
// `environment` is that of a rank, if this process is one of several.
Result<Job> ReadJob(const Options& options,
                    const std::optional<RankEnvironment>& environment) {
  Job job;
  TESSERA_TRY(job.backend, BackendOf(options));
  TESSERA_RETURN_IF_ERROR(CheckFlags(options, *job.backend));
  TESSERA_RETURN_IF_ERROR(ReadInputsForRanks(options, environment, job));
  const Graph& graph = job.inputs.graph;
  TESSERA_TRY(job.plan, PlanOrDataParallel(job.inputs));
  WarnOfPlan(options, job);
  TESSERA_RETURN_IF_ERROR(CheckPlanRuns(options, job));
  if (options.check > 0) {
    TESSERA_TRY(job.check, OneRankOf(options, graph, job.plan));
  }
  if (!options.export_folder.empty()) {
    if (auto can = CheckCanBePublished(job.inputs.layout, graph); !can) {
      return can.error().At("--export");
    }
  }
  TESSERA_RETURN_IF_ERROR(ReadSaved(options, job));
  TESSERA_TRY(job.learning_rate, LearningRateOf(options));
  WarnOfLearningRate(options, job);
  TESSERA_TRY(job.data, ReadData(options, graph, job.seed));
  if (job.data.tokens) WarnOfWiderTokens(*job.data.tokens, job.inputs);
  if (!options.learn.empty()) {
    TESSERA_TRY([[maybe_unused]] const ProfileDb before,
                ProfileToExtend(options.learn, OriginOfJob(job)));
  }
  const bool writes = !environment || environment->rank == 0;
  if (writes) TESSERA_RETURN_IF_ERROR(CheckRoomToSave(options, graph));
  if (writes && !options.export_folder.empty()) {
    TESSERA_TRY(job.config,
                ConfigToExport(options.model, job.inputs.overrides));
    TESSERA_RETURN_IF_ERROR(
        MakeExportFolder(options.export_folder, job.config));
  }
  return job;
}

void PrintStep(const StepReport& step, int64_t last, std::string_view unit) {
  std::cout << "step " << step.step + 1 << " of " << last << "  loss "
            << FormatFixed(step.loss, 6) << "  lr "
            << FormatNumber(step.learning_rate) << "  "
            << FormatTime(step.step_time) << "  "
            << FormatFixed(step.tokens_per_s, 0) << " " << unit << "/s";
  if (step.validation_loss) {
    std::cout << "  validation loss " << FormatFixed(*step.validation_loss, 6);
  }
  std::cout << std::endl;
}

// One line of --log.
Result<void> LogStep(const StepReport& step, const std::string& path,
                     std::ostream& log) {
  Json line = Json::Object({{"step", step.step + 1},
                            {"loss", step.loss},
                            {"learning_rate", step.learning_rate},
                            {"step_time_s", step.step_time.seconds()},
                            {"tokens_per_s", step.tokens_per_s}});
  if (step.validation_loss) {
    line.Set("validation_loss", *step.validation_loss);
  }
  log << line.OneLine() << std::endl;
  // One that a reader of the output has left is no error: it ends the run.
  if (!log && !CatchInterrupts()) {
    return Error{ErrorCode::kUnavailable,
                 std::string("cannot write: ") + std::strerror(errno), path};
  }
  return {};
}

// Says how far weights and states are set, where that takes long.
class StartUpLine {
 public:
  explicit StartUpLine(std::string what) : what_(std::move(what)) {}
  void Show(Bytes done, Bytes total) {
    const auto now = std::chrono::steady_clock::now();
    if (now < next_) return;
    next_ = now + kInterval;
    std::cerr << "tessera: " << what_ << ": "
              << FormatPercent(static_cast<double>(done.value) /
                               static_cast<double>(total.value))
              << " of " << FormatBytes(total) << std::endl;
  }

 private:
  static constexpr auto kInterval = std::chrono::seconds(5);

  const std::string what_;
  std::chrono::steady_clock::time_point next_ =
      std::chrono::steady_clock::now() + kInterval;
};

std::string StartUpText(const Options& options, const Graph& graph) {
  if (!options.load.empty()) return "loading " + options.load;
  int64_t parameters = 0;
  for (const Tensor& tensor : graph.tensors) {
    if (tensor.kind != TensorKind::kWeight) continue;
    parameters += std::accumulate(tensor.shape.begin(), tensor.shape.end(),
                                  int64_t{1}, std::multiplies());
  }
  return "initialising " + FormatCount(static_cast<double>(parameters)) +
         " parameters";
}

// Whether a file, perhaps by another name, is what standard output goes to.
bool IsStandardOutput(const std::string& path) {
  struct stat file = {};
  struct stat output = {};
  return ::stat(path.c_str(), &file) == 0 &&
         ::fstat(STDOUT_FILENO, &output) == 0 && file.st_dev == output.st_dev &&
         file.st_ino == output.st_ino;
}

// How a run left --save whose last weights or states are not finite.
std::string UnsavedText(const Options& options, const TrainingResult& result) {
  return "not saved, as weights or states are not finite" +
         (result.saved ? "; " + options.save + " is of step " +
                             std::to_string(*result.saved)
                       : "");
}

// All ranks' spans. Each rank's time counts from its own beginning of the step.
Timeline Joined(const std::vector<Timeline>& timelines) {
  Timeline all;
  for (const Timeline& timeline : timelines) {
    all.step_time = Max(all.step_time, timeline.step_time);
    all.spans.insert(all.spans.end(), timeline.spans.begin(),
                     timeline.spans.end());
  }
  return all;
}

RunReport ReportOf(const Job& job, const TaskGraph& tasks,
                   const Options& options, const TrainingResult& result) {
  const Inputs& inputs = job.inputs;
  const Evaluator evaluator(inputs.graph, inputs.cluster,
                            inputs.profile_or_null(), options.training);
  RunReport report;
  report.result = &result;
  report.measured = MeasuredBreakdown(tasks, result.timelines);
  report.rates =
      ThroughputOf(inputs.graph, inputs.cluster, job.plan, result.step_time);
  report.predicted = evaluator.Evaluate(job.plan);
  // The simulator never fails.
  const Timeline timeline = Simulator(evaluator.pricer()).Run(tasks).value();
  report.predicted.step_time = timeline.step_time;
  report.predicted.breakdown = PredictedBreakdown(tasks, timeline);
  std::vector<DeviceId> ranks;
  for (size_t rank = 0; rank < inputs.cluster.devices.size(); ++rank) {
    ranks.emplace_back(rank);
  }
  report.predicted_memory = PeakMemoryOf(tasks, ranks);
  report.predicted_host = PeakMemoryOf(tasks, ranks, MemoryTier::kHost);
  report.predicted_file = PeakMemoryOf(tasks, ranks, MemoryTier::kFile);
  if (options.compare || !options.learn.empty()) {
    report.comparisons =
        CompareTasks(evaluator.pricer(), tasks, inputs.graph, result.timelines);
  }
  return report;
}

// Adds what was learned to the profile at --learn, if there is one.
Result<void> WriteLearned(const Options& options, const Job& job,
                          const TaskGraph& tasks, const RunReport& report) {
  const std::string& path = options.learn;
  const Inputs& inputs = job.inputs;
  const Pricer pricer(inputs.graph, inputs.cluster, inputs.profile_or_null(),
                      PricerOptionsOf(options.training));
  TESSERA_TRY(ProfileDb before, ProfileToExtend(path, OriginOfJob(job)));
  ProfileDb learned =
      Learn(pricer, tasks, report.comparisons, OriginOfJob(job));
  learned.rows.merge(before.rows);
  return WriteProfile(path, learned);
}

// What a rank of the job and that of --check train alike.
TrainingJob TrainingOf(const Options& options, const Job& job,
                       const TaskGraph& tasks, CommWorld& world,
                       RankDevice& device) {
  TrainingJob training;
  training.graph = &job.inputs.graph;
  training.tasks = &tasks;
  training.options = options.training;
  training.seed = job.seed;
  training.steps = options.steps;
  SetData(job.data, training);
  training.learning_rate = job.learning_rate;
  training.world = &world;
  training.device = &device;
  training.load_path = options.load;
  training.layout = job.inputs.layout;
  training.stop = &CatchInterrupts();
  return training;
}

// The first steps of a run, once more on one rank of the CPU: its losses.
Result<std::vector<double>> LossesOfOneRank(const Options& options,
                                            const Job& job,
                                            const TrainingResult& result,
                                            int64_t steps) {
  const Graph& graph = job.inputs.graph;
  const TaskGraph tasks =
      Lower(graph, job.check->cluster, job.check->plan, options.training);
  TESSERA_TRY(const auto world, MakeLoneWorld());
  CpuDevice device(ThreadsOf(options, 1));
  TrainingJob training = TrainingOf(options, job, tasks, *world, device);
  training.steps = steps;
  if (job.learning_rate.steps == 0) {
    training.learning_rate->steps = result.first_step + options.steps;
  }
  if (!options.json) {
    training.progress = [&](const StepReport& step) -> Result<void> {
      std::cout << "one rank of the CPU: step " << step.step + 1 << "  loss "
                << FormatFixed(step.loss, 6) << "  "
                << FormatTime(step.step_time) << std::endl;
      return {};
    };
  }
  auto trained = Train(training);
  if (!trained) return trained.error().At("--check");
  return std::move(trained->losses);
}

// The report, in JSON, of a run that was interrupted before its first step.
void PrintNothingTrained(const Job& job) {
  std::cout << Json::Object({{"first_step", job.first_step},
                             {"losses", Json::Array()},
                             {"interrupted", true}})
                   .ToString()
            << std::endl;
}

// This rank's part of the job; rank 0 prints.
Result<int> TrainInWorld(const Options& options, const Job& job,
                         const RankSeat& seat) {
  CommWorld& world = *seat.world;
  const Graph& graph = job.inputs.graph;
  const TaskGraph tasks =
      Lower(graph, job.inputs.cluster, job.plan, options.training);
  TrainingJob training = TrainingOf(options, job, tasks, world, *seat.device);
  training.validation.every = options.validate_every;
  training.save_path = options.save;
  training.save_every = options.save_every;
  training.export_folder = options.export_folder;
  training.export_file_bytes = {static_cast<int64_t>(options.export_shard)};
  training.offload_directory = OffloadDirectory(options);
  training.graphs = options.graph;
  training.deterministic = options.deterministic;
  // Where tasks are timed, as they are priced.
  const bool times_tasks =
      options.compare || !options.learn.empty() || !options.trace.empty();
  training.fuses = !times_tasks || Pricer(graph, job.inputs.cluster,
                                          job.inputs.profile_or_null(),
                                          PricerOptionsOf(options.training))
                                       .FusesAll();
  training.tune = !options.tune.empty();
  training.products_path = options.tune;
  if (training.tune) {
    auto known = ReadFile(options.tune);
    if (!known && known.error().code != ErrorCode::kNotFound) {
      return known.error();
    }
    if (known) training.products = std::move(*known);
  }
  const bool prints = world.world_rank() == 0;
  if (prints && !options.json) {
    std::cout << Describe(graph, job.inputs.cluster, job.plan) << std::endl;
  }
  if (prints && std::ssize(tasks.tasks) > kManyTasks) {
    std::cerr << "tessera: preparing a step of " << job.plan.microbatches
              << " microbatches, " << tasks.tasks.size() << " tasks"
              << std::endl;
  }
  std::ofstream file;
  std::ostream* log = nullptr;
  if (prints && !options.log.empty()) {
    // Two files that are one would overwrite each other.
    log = IsStandardOutput(options.log) ? &std::cout : &file;
    // A resumed run's steps follow those before.
    if (log == &file) {
      file.open(options.log,
                options.load.empty() ? std::ios::trunc : std::ios::app);
    }
  }
  int64_t last = 0;
  bool diverged = false;
  StartUpLine start_up(StartUpText(options, graph));
  training.starting = [&](Bytes done, Bytes total) {
    start_up.Show(done, total);
  };
  training.progress = [&](const StepReport& step) -> Result<void> {
    if (last == 0) last = step.step + options.steps;
    if (!options.json) PrintStep(step, last, UnitOf(graph));
    if (!std::isfinite(step.loss) && !diverged) {
      diverged = true;
      std::cerr << "tessera: warning: the loss is not finite from step "
                << step.step + 1 << " on" << std::endl;
    }
    return log ? LogStep(step, options.log, *log) : Result<void>();
  };
  if (!options.save.empty() || !options.export_folder.empty()) {
    InterruptWhenUnread();
  }
  auto trained = Train(training);
  if (!trained) {
    // All ranks say so: one line is enough.
    const Error& error = trained.error();
    if (error.code != ErrorCode::kInterrupted) return error;
    if (prints && last == 0 && options.json) PrintNothingTrained(job);
    if (prints) std::cerr << "tessera: " << error.ToString() << std::endl;
    return ExitCodeOf(error.code);
  }
  TrainingResult& result = *trained;
  if (prints && result.exported && !job.config.empty()) {
    TESSERA_RETURN_IF_ERROR(
        WriteFileAtomically(ConfigIn(options.export_folder), job.config));
  }
  const auto steps = result.first_step + std::ssize(result.losses);
  const bool unsaved = !options.save.empty() && result.saved != steps;
  if (prints && result.interrupted) {
    std::cerr << "tessera: interrupted after step " << steps << "; "
              << (options.save.empty() ? "not saved, as there is no --save FILE"
                  : unsaved            ? UnsavedText(options, result)
                                       : "saved in " + options.save)
              << std::endl;
  }
  if (prints && result.losses.empty() && options.json) PrintNothingTrained(job);
  if (prints && !result.losses.empty()) {
    RunReport report = ReportOf(job, tasks, options, result);
    if (job.check && !result.interrupted) {
      const int64_t compared = std::min(options.check, options.steps);
      TESSERA_TRY(auto expected,
                  LossesOfOneRank(options, job, result, compared));
      if (std::ssize(expected) < compared) {
        result.interrupted = true;
        std::cerr << "tessera: --check interrupted after step "
                  << result.first_step + std::ssize(expected) << " of "
                  << result.first_step + compared << std::endl;
      }
      if (!expected.empty()) {
        report.check =
            CheckLosses(result.losses, std::move(expected), graph.dtype);
      }
    }
    if (options.json) {
      std::cout << RunJson(report).ToString() << std::endl;
    } else {
      std::cout << RunText(report) << std::flush;
    }
    if (training.tune) {
      TESSERA_RETURN_IF_ERROR(
          WriteFileAtomically(options.tune, result.products));
    }
    if (!options.learn.empty()) {
      TESSERA_RETURN_IF_ERROR(WriteLearned(options, job, tasks, report));
    }
    if (!options.trace.empty()) {
      TESSERA_RETURN_IF_ERROR(WriteFileAtomically(
          options.trace, ChromeTrace(tasks, graph, job.inputs.cluster,
                                     Joined(result.timelines))));
    }
    if (report.check && !report.check->agrees()) {
      return Error{ErrorCode::kUnavailable, CheckText(*report.check),
                   "--check"};
    }
    if (unsaved && !result.interrupted) {
      return Error{ErrorCode::kUnavailable, UnsavedText(options, result),
                   options.save};
    }
    if (!options.export_folder.empty() && !result.exported) {
      return Error{ErrorCode::kUnavailable,
                   "no weights are left, as they are not finite",
                   options.export_folder};
    }
  }
  return result.interrupted ? ExitCodeOf(ErrorCode::kInterrupted) : 0;
}

Result<int> TrainAsRank(const Options& options,
                        const RankEnvironment& environment) {
  TESSERA_TRY(const Job job, ReadJob(options, environment));
  if (environment.rank == 0 && environment.launcher != "tessera") {
    PrintWarnings(job.inputs);
  }
  TESSERA_TRY(
      const RankSeat seat,
      JoinJob(*job.backend, environment,
              ThreadsOf(options, environment.local_size), &Interrupted()));
  return TrainInWorld(options, job, seat);
}

// All ranks, as threads of this process.
Result<int> TrainInThreads(const Options& options, const Job& job, int ranks) {
  TESSERA_TRY(std::vector<RankSeat> seats,
              MakeJob(*job.backend, ranks, ThreadsOf(options, ranks)));
  if (ranks == 1) return TrainInWorld(options, job, seats[0]);
  std::vector<std::optional<Result<int>>> codes(seats.size());
  RunThreads(ranks, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    codes[r] = TrainInWorld(options, job, seats[r]);
    seats[r].world.reset();
  });
  // That of the rank which failed, not of those which were told of it.
  const Result<int>* worst = &*codes[0];
  for (const auto& code : codes) {
    if (*code) continue;
    const bool told = RankToldOf(code->error()).has_value();
    if (*worst || !told) worst = &*code;
    if (!told) break;
  }
  return *worst;
}

// Starts the ranks.
Result<int> TrainAsJob(const Options& options) {
  TESSERA_TRY(const Job job, ReadJob(options, std::nullopt));
  PrintWarnings(job.inputs);
  const auto ranks = static_cast<int>(job.inputs.cluster.devices.size());
  if (ranks > 1 && !job.backend->threads) {
    return LaunchRanks(ranks, options.arguments);
  }
  return TrainInThreads(options, job, ranks);
}

}  // namespace

Result<int> RunRun(const Options& options) {
  return RunAsRankOrJob(options, TrainAsRank, TrainAsJob);
}

}  // namespace tessera
