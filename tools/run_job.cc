#include "tools/run_job.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "planner/base/file.h"
#include "planner/base/format.h"
#include "planner/io/graph_io.h"
#include "planner/io/huggingface.h"
#include "planner/io/plan_io.h"
#include "planner/lower/check_order.h"
#include "planner/lower/lower.h"
#include "planner/plan/strategy.h"
#include "planner/topology/topologies.h"
#include "runtime/checkpoint.h"
#include "runtime/older_checkpoints.h"
#include "runtime/published_files.h"
#include "runtime/weight_export.h"
#include "tools/export_config.h"
#include "tools/gpu_share.h"
#include "tools/inputs.h"
#include "tools/job_ranks.h"
#include "tools/origin.h"
#include "tools/run_memory.h"
#include "tools/share_cores.h"
#include "tools/vocabulary_advice.h"

namespace tessera {
namespace {

// The ranks that the flags other than --nproc and --cluster ask for, and what
// asks for the last one.
struct PlannedRanks {
  int count = 1;
  std::string where;
};
Result<PlannedRanks> RanksOfPlan(const Options& options) {
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
    return PlannedRanks{static_cast<int>(ranks), "--strategy"};
  }
  PlannedRanks ranks;
  if (options.plan.empty()) return ranks;
  // A plan names the parts of its model, so that is read first.
  Options model = options;
  model.plan.clear();
  TESSERA_TRY(const Inputs inputs, ReadInputs(model, "local-cpu:1"));
  TESSERA_TRY(const Plan plan, ReadPlan(options.plan, inputs.graph));
  ranks.count = 1;
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    const std::vector<DeviceId>& devices = plan.groups[g].devices;
    for (size_t d = 0; d < devices.size(); ++d) {
      if (devices[d].value < ranks.count) continue;
      ranks = {devices[d].value + 1, options.plan + ": groups[" +
                                         std::to_string(g) + "].devices[" +
                                         std::to_string(d) + "]"};
    }
  }
  return ranks;
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
void WarnOfLearningRate(Job& job) {
  const LearningRate& rate = job.learning_rate;
  const int64_t last = job.first_step + job.steps;
  // The warm-up is not cut.
  const int64_t end = std::max(rate.steps, rate.warmup);
  if (last < rate.warmup) {
    job.inputs.warnings.push_back(
        "the run ends behind step " + std::to_string(last) +
        ", within the warm-up of " + std::to_string(rate.warmup) +
        " steps (--warmup): its learning rate reaches " +
        FormatNumber(RateAt(rate, last - 1)));
  }
  if (rate.steps == 0) return;
  if (job.first_step < end) {
    // Others than 0 are to go on with.
    if (end < last && RateAt(rate, end) == 0) {
      job.inputs.warnings.push_back(
          "the learning rate is 0 from step " + std::to_string(end + 1) +
          " on (--decay-steps), and this run goes to step " +
          std::to_string(last) + ": --min-lr X goes on at X");
    }
    return;
  }
  job.inputs.warnings.push_back(
      "the learning rate ends at step " + std::to_string(end) +
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

// Of data that each step reads more than once.
void WarnOfFewSamples(const Options& options, const Graph& graph,
                      const RunData& data, Inputs& inputs) {
  if (options.data.empty()) return;
  const int64_t samples = data.images   ? data.images->size()
                          : data.clicks ? data.clicks->size()
                                        : data.batches->rows();
  if (samples >= graph.global_batch) return;
  inputs.warnings.push_back(options.data + ": has " + std::to_string(samples) +
                            (samples == 1 ? " sample" : " samples") +
                            " to train on, fewer than the global batch, " +
                            std::to_string(graph.global_batch) +
                            ": each step reads some again");
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
  if (std::string text = FewerCoresText(options, inputs); !text.empty()) {
    inputs.warnings.push_back(std::move(text));
  }
}

// Of a --profile by ranks of other threads than those that run here.
void WarnOfOtherThreads(const Options& options, int threads, Inputs& inputs) {
  for (size_t i = 0; i < inputs.origins.size(); ++i) {
    const int measured = inputs.origins[i].threads;
    if (measured == 0 || measured == threads) continue;
    inputs.warnings.push_back(
        options.profiles[i] + ": was measured by ranks of " +
        ThreadsText(measured) + ", and these have " + ThreadsText(threads));
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

// That the folder is there or can be made, and has no weights, and no other
// `config` than this one (none where it is empty): those of two models would
// look like one. It is made with its first file.
Result<void> CheckExportFolder(const std::string& folder,
                               const std::string& config) {
  std::error_code code;
  if (std::filesystem::exists(folder, code) &&
      !std::filesystem::is_directory(folder, code)) {
    return InvalidInput("expected a folder", "--export " + folder);
  }
  const bool made = std::filesystem::create_directory(folder, code);
  const int error = access(folder.c_str(), W_OK) == 0 ? 0 : errno;
  std::error_code ignored;
  if (made) std::filesystem::remove(folder, ignored);
  if (code || error != 0) {
    return InvalidInput("cannot make or write the folder: " +
                            (code ? code.message() : std::strerror(error)),
                        "--export " + folder);
  }
  if (const auto has_none = CheckHasNoWeights(folder); !has_none) {
    return InvalidInput(has_none.error().message, "--export " + folder);
  }
  const std::string path = ConfigIn(folder);
  if (!std::filesystem::exists(path, code)) return {};
  TESSERA_TRY(const std::string there, ReadFile(path));
  if (there == config) return {};
  return InvalidInput("has another model's config.json", "--export " + folder);
}

// Whether the run goes on from what --save replaces: the checkpoint there, or
// one that lies beside it.
bool GoesOnFromSaved(const Options& options) {
  std::error_code code;
  return !options.load.empty() &&
         (std::filesystem::equivalent(options.save, options.load, code) ||
          IsNameOfOlder(options.save, options.load));
}

// That no work of others is replaced by --save, or removed with it.
Result<void> CheckReplacesOwn(const Options& options) {
  if (options.save.empty() || GoesOnFromSaved(options)) return {};
  const auto refuse = [](const std::string& path, const std::string& what,
                         const std::string& or_load) {
    return InvalidInput("'" + path + "' " + what + ": expected " + or_load +
                            "another FILE, or that you remove it",
                        "--save");
  };
  // An empty one, made to have its name (mktemp), holds nothing.
  std::error_code code;
  const auto bytes = std::filesystem::file_size(options.save, code);
  if (!code && bytes > 0) {
    const auto saved = SavedRunOf(options.save);
    if (!saved || !*saved) {
      return refuse(options.save, "is there, and no checkpoint of a run", "");
    }
    const SavedRun& run = **saved;
    return refuse(options.save,
                  "is a checkpoint" +
                      (run.model.empty() ? "" : " of '" + run.model + "'") +
                      " behind step " + std::to_string(run.step) +
                      ", which this run would replace",
                  "--load '" + options.save + "' to go on from it, ");
  }
  if (options.keep_checkpoints == 1) return {};
  const auto older = OlderCheckpoints(options.save);
  if (older.empty()) return {};
  const std::string& last = older.rbegin()->second;
  return refuse(last,
                "is a checkpoint that --keep-checkpoints of this run would "
                "remove",
                "--load '" + last + "' to go on from it, ");
}

// That what the flags name can be written.
Result<void> CheckOutputs(const Options& options) {
  for (const auto& [flag, path] :
       {std::pair("--save", &options.save), std::pair("--log", &options.log),
        std::pair("--trace", &options.trace),
        std::pair("--tune", &options.tune),
        std::pair("--export", &options.export_folder)}) {
    if (*path != "-") continue;
    return InvalidInput(
        "'-' is no name here: expected a file's (/dev/stdout, ./-)", flag);
  }
  if (!options.save.empty()) {
    TESSERA_RETURN_IF_ERROR(CheckReplaceable(options.save, "--save"));
    if (!IsOneFile(options.save)) {
      return InvalidInput("--load would take '" + options.save +
                              "' for published weights: expected another "
                              "ending than .json or .onnx",
                          "--save");
    }
  }
  if (options.keep_checkpoints > 1) {
    if (auto can = CheckCanKeepOlder(options.save); !can) {
      return can.error().At("--keep-checkpoints");
    }
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
  if (!options.tune.empty()) {
    TESSERA_RETURN_IF_ERROR(CheckWritable(options.tune, "--tune"));
  }
  return {};
}

// That the flags go together, on the backend too.
Result<void> CheckFlags(const Options& options, const Backend& backend) {
  if (options.until > 0 && options.Given("--steps")) {
    return InvalidInput("has no effect beside --until", "--steps");
  }
  for (const std::string_view flag : {"--save-every", "--keep-checkpoints"}) {
    if (!options.save.empty() || !options.Given(flag)) continue;
    return InvalidInput("needs --save FILE", std::string(flag));
  }
  if (options.export_shard < 1 || options.export_shard > 1e18) {
    return InvalidInput("expected from 1 byte to 10^18", "--export-shard");
  }
  if (options.export_folder.empty() && options.Given("--export-shard")) {
    return InvalidInput("needs --export DIR", "--export-shard");
  }
  if (options.graph && !backend.gpu) {
    return InvalidInput("has no effect: --backend " +
                            std::string(backend.name) + " has no graphs",
                        "--graph");
  }
  if (!options.tune.empty() && !backend.gpu) {
    return InvalidInput("has no effect: on --backend " +
                            std::string(backend.name) +
                            " products have one algorithm",
                        "--tune");
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
  std::string where = "--nproc";
  if (ranks == 0 && options.cluster.empty()) {
    TESSERA_TRY(const PlannedRanks planned, RanksOfPlan(options));
    ranks = planned.count;
    where = planned.where;
  }
  const bool one_host = !job.backend->gpu || job.backend->threads;
  if (one_host && ranks > kMostRanks) {
    return InvalidInput(std::to_string(ranks) + " ranks on one host: at most " +
                            std::to_string(kMostRanks),
                        where);
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
  if (!gpu)
    WarnOfOtherThreads(options, ThreadsOf(options, devices), job.inputs);
  if (options.cluster.empty() && !gpu) {
    ShareCores(job.inputs.cluster, CoresOf(devices),
               ThreadsOf(options, devices));
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

// That the ranks can run the job's plan, and have the memory for it, of which
// so much is files on rank 0's host.
Result<Bytes> CheckPlanRuns(const Options& options,
                            const std::optional<RankEnvironment>& environment,
                            const Job& job) {
  const Graph& graph = job.inputs.graph;
  const TaskGraph tasks =
      Lower(graph, job.inputs.cluster, job.plan, options.training);
  if (const auto problems = CheckOrder(tasks, graph); !problems.empty()) {
    return problems[0].At("the plan's tasks");
  }
  TESSERA_RETURN_IF_ERROR(CheckOffloadDirectory(options, job.plan));
  const auto ranks = static_cast<int>(job.inputs.cluster.devices.size());
  return CheckMemory(options, job.inputs, job.gpu,
                     environment ? environment->local_size : ranks, job.plan,
                     tasks);
}

// Of weights whose family gives every expert all of its tokens, where the model
// has no room for all and --set does not say so.
void WarnOfDroppedTokens(const Options& options, Inputs& inputs) {
  constexpr char kFactor[] = "expert_capacity_factor";
  if (!IsHuggingFace(options.model) || inputs.overrides.contains(kFactor)) {
    return;
  }
  const bool drops =
      std::ranges::any_of(inputs.graph.nodes, [&](const Node& node) {
        return node.op->name == "moe_gate" &&
               node.attribute("capacity") <
                   static_cast<double>(inputs.graph.seq_len);
      });
  if (!drops) return;
  inputs.warnings.push_back(
      options.load +
      ": the model drops tokens for which an expert has no room, and "
      "transformers, whose weights these may be, drops none: --set model." +
      kFactor + "=0");
}

// That a folder does not have PyTorch's own files alone.
Result<void> CheckIsNoPickle(const std::string& folder) {
  const auto has = [&](const std::string& name) {
    std::error_code code;
    return std::filesystem::exists(folder + "/" + name, code);
  };
  if (has("model.safetensors") || has("model.safetensors.index.json")) {
    return {};
  }
  for (const char* name :
       {"pytorch_model.bin", "pytorch_model.bin.index.json"}) {
    if (!has(name)) continue;
    return InvalidInput(std::string("has ") + name +
                            ": expected safetensors, model.safetensors or its "
                            "index (as transformers' save_pretrained writes)",
                        folder);
  }
  return {};
}

// What --load goes on from, and the seed that follows from that.
Result<void> ReadSaved(const Options& options, Job& job) {
  const Graph& graph = job.inputs.graph;
  job.seed = options.seed;
  if (options.load.empty()) return {};
  TESSERA_RETURN_IF_ERROR(CheckReadable(options.load));
  std::error_code code;
  // A pipe without a writer would be waited for.
  if (!std::filesystem::is_directory(options.load, code) &&
      !IsRegularFile(options.load)) {
    return InvalidInput("not a regular file", options.load);
  }
  TESSERA_RETURN_IF_ERROR(CheckIsNoPickle(options.load));
  TESSERA_TRY(const auto saved, SavedRunOf(options.load));
  if (saved) {
    TESSERA_RETURN_IF_ERROR(CheckCheckpoint(*saved, options.load,
                                            options.training.optimizer, graph));
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
    for (const std::string& part : files.passed_over()) {
      job.inputs.warnings.push_back(options.load + ": " + part);
    }
    WarnOfDroppedTokens(options, job.inputs);
  }
  if (options.Given("--seed") && job.seed != options.seed) {
    return InvalidInput("is " + std::to_string(options.seed) + ", but '" +
                            options.load + "' goes on with its own, " +
                            std::to_string(job.seed),
                        "--seed");
  }
  return {};
}

// That a run ends before it validates, for which it holds data out.
void WarnOfNoValidation(const Options& options, Job& job) {
  const int64_t every = options.validate_every;
  const int64_t last = job.first_step + job.steps;
  if (every == 0 || last / every > job.first_step / every) return;
  job.inputs.warnings.push_back(
      "--validate-every " + std::to_string(every) +
      ": nothing is validated, as the run ends behind step " +
      std::to_string(last));
}

Result<void> CheckGoesOn(const std::atomic<bool>& stop) {
  if (!stop) return {};
  return Error{ErrorCode::kInterrupted, "interrupted before the first step",
               ""};
}

// How many checkpoints the job writes, unless it is interrupted.
int64_t SavesOf(const Options& options, const Job& job) {
  const int64_t last = job.first_step + job.steps;
  if (options.save_every == 0) return 1;
  return last / options.save_every - job.first_step / options.save_every +
         (last % options.save_every == 0 ? 0 : 1);
}

}  // namespace

Result<Job> ReadJob(const Options& options,
                    const std::optional<RankEnvironment>& environment,
                    const std::atomic<bool>& stop) {
  Job job;
  TESSERA_TRY(job.backend, BackendOf(options));
  TESSERA_RETURN_IF_ERROR(CheckFlags(options, *job.backend));
  // The other ranks' hosts need not have the folders.
  const bool writes = !environment || environment->rank == 0;
  if (writes) TESSERA_RETURN_IF_ERROR(CheckOutputs(options));
  if (writes && !options.save.empty()) {
    auto lock = CheckpointLock::Take(options.save);
    if (!lock) return lock.error().At("--save");
    job.lock.emplace(*std::move(lock));
  }
  // Any number may write to a terminal or a pipe.
  std::error_code code;
  if (writes && !options.log.empty() &&
      (IsRegularFile(options.log) ||
       !std::filesystem::exists(options.log, code))) {
    auto lock = CheckpointLock::Take(options.log);
    if (!lock) return lock.error().At("--log");
    job.log_lock.emplace(*std::move(lock));
  }
  TESSERA_RETURN_IF_ERROR(CheckGoesOn(stop));
  TESSERA_RETURN_IF_ERROR(ReadInputsForRanks(options, environment, job));
  TESSERA_RETURN_IF_ERROR(CheckGoesOn(stop));
  const Graph& graph = job.inputs.graph;
  TESSERA_TRY(job.plan, PlanOrDataParallel(job.inputs));
  WarnOfPlan(options, job);
  TESSERA_TRY(const Bytes offloaded, CheckPlanRuns(options, environment, job));
  TESSERA_RETURN_IF_ERROR(CheckGoesOn(stop));
  if (options.check > 0) {
    TESSERA_TRY(job.check, OneRankOf(options, graph, job.plan));
  }
  if (!options.export_folder.empty()) {
    if (auto can = CheckCanBePublished(job.inputs.layout, graph); !can) {
      return can.error().At("--export");
    }
    const std::string why = WhyNotPublished(job.inputs.layout, graph);
    if (!why.empty()) {
      job.inputs.warnings.push_back(
          "--export " + options.export_folder +
          ": the weights will have the shapes of Tessera's graph, which "
          "transformers does not take: " +
          why);
    }
  }
  TESSERA_RETURN_IF_ERROR(ReadSaved(options, job));
  job.steps = options.until == 0
                  ? options.steps
                  : std::max<int64_t>(0, options.until - job.first_step);
  if (job.steps == 0) return job;
  if (job.steps > kMostRunSteps - job.first_step) {
    return InvalidInput("the run would end behind a step above 2^53",
                        options.until == 0 ? "--steps" : "--until");
  }
  TESSERA_TRY(job.learning_rate, LearningRateOf(options));
  WarnOfLearningRate(job);
  WarnOfNoValidation(options, job);
  TESSERA_TRY(job.data, ReadData(options, graph, job.seed));
  TESSERA_RETURN_IF_ERROR(CheckGoesOn(stop));
  if (job.data.tokens) WarnOfWiderTokens(*job.data.tokens, job.inputs);
  WarnOfFewSamples(options, graph, job.data, job.inputs);
  if (!writes) return job;
  if (!options.learn.empty()) {
    TESSERA_TRY([[maybe_unused]] const ProfileDb before,
                ProfileToExtend(options.learn, OriginOfJob(options, job)));
  }
  TESSERA_RETURN_IF_ERROR(CheckReplacesOwn(options));
  if (options.check > 0 && !options.save.empty() && GoesOnFromSaved(options)) {
    return InvalidInput("begins again from '" + options.load +
                            "' at the end, when --save has replaced it: "
                            "expected another FILE for --save",
                        "--check");
  }
  TESSERA_RETURN_IF_ERROR(CheckRoomToSave(options, job.inputs.layout, graph,
                                          SavesOf(options, job), offloaded));
  if (!options.export_folder.empty()) {
    TESSERA_TRY(job.config, ConfigToExport(options.model, job.inputs.overrides,
                                           options.set));
    TESSERA_RETURN_IF_ERROR(
        CheckExportFolder(options.export_folder, job.config));
  }
  return job;
}

ProfileOrigin OriginOfJob(const Options& options, const Job& job) {
  const auto ranks = static_cast<int>(job.inputs.cluster.devices.size());
  return OriginOf(ranks, ThreadsOf(options, ranks),
                  job.gpu ? job.gpu->gpu.name : "");
}

std::string ConfigIn(const std::string& folder) {
  return folder + "/config.json";
}

}  // namespace tessera
