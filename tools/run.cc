#include <algorithm>
#include <cmath>
#include <iostream>
#include <limits>
#include <optional>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/simulate/simulator.h"
#include "planner/base/table.h"
#include "planner/io/plan_io.h"
#include "planner/lower/check_order.h"
#include "planner/lower/lower.h"
#include "planner/plan/graph_index.h"
#include "planner/plan/stages.h"
#include "planner/plan/strategy.h"
#include "runtime/comm/shm_world.h"
#include "runtime/comm/thread_world.h"
#include "runtime/data/tokens.h"
#include "runtime/device/cpu_device.h"
#include "runtime/launch/launch.h"
#include "runtime/train_state.h"
#include "runtime/trainer.h"
#include "tools/format.h"
#include "tools/inputs.h"
#include "tools/interrupt.h"
#include "tools/run_report.h"
#include "tools/verb.h"

namespace tessera {
namespace {

// As many as one world of processes holds (runtime/comm/shm_world.h).
constexpr int kMostRanks = 64;

Result<void> CheckBackend(const Options& options) {
  static constexpr std::string_view kNames[] = {"cpu"};
  if (options.backend == kNames[0]) return {};
  return UnknownName("backend", options.backend, kNames).At("--backend");
}

// The ranks that the flags other than --nproc and --cluster ask for.
Result<int> RanksOfPlan(const Options& options) {
  if (options.strategy) {
    const auto strategy = ParseStrategy(*options.strategy);
    if (!strategy) return strategy.error().At("--strategy");
    return std::max(1, strategy->dp) * strategy->tp * strategy->pp *
           strategy->cp * strategy->ep;
  }
  if (options.plan.empty()) return 1;
  // A plan names the parts of its model, so that is read first.
  Options model = options;
  model.plan.clear();
  TESSERA_TRY(const Inputs inputs, ReadInputs(model, "local-cpu:1"));
  TESSERA_TRY(const Plan plan, ReadPlan(options.plan, inputs.graph));
  int ranks = 1;
  for (const DeviceGroup& group : plan.groups) {
    for (const DeviceId device : group.devices) {
      ranks = std::max(ranks, device.value + 1);
    }
  }
  return ranks;
}

// Rows of the table that tokens are looked up in.
int64_t VocabularyOf(const Graph& graph) {
  const GraphIndex index(graph);
  int64_t rows = std::numeric_limits<int32_t>::max();
  for (size_t t = 0; t < graph.tensors.size(); ++t) {
    if (index.vocabulary[t]) rows = std::min(rows, graph.tensors[t].shape[0]);
  }
  return rows;
}

struct Job {
  Inputs inputs;
  Plan plan;
  std::optional<TokenData> data;
};

// Reads and checks everything, so that no rank starts on bad input.
// `ranks` is 0 where nobody has said.
Result<Job> ReadJob(const Options& options, int ranks) {
  TESSERA_RETURN_IF_ERROR(CheckBackend(options));
  if (!options.save.empty()) {
    TESSERA_RETURN_IF_ERROR(CheckWritable(options.save, "--save"));
  }
  if (ranks == 0 && options.cluster.empty()) {
    TESSERA_TRY(ranks, RanksOfPlan(options));
  }
  if (ranks > kMostRanks) {
    return InvalidInput(std::to_string(ranks) + " ranks on one host: at most " +
                            std::to_string(kMostRanks),
                        "--nproc");
  }
  Job job;
  TESSERA_TRY(job.inputs,
              ReadInputs(options, "local-cpu:" + std::to_string(ranks)));
  const Graph& graph = job.inputs.graph;
  const auto devices = std::ssize(job.inputs.cluster.devices);
  if (ranks != 0 && ranks != devices) {
    return InvalidInput(std::to_string(ranks) + " ranks on the " +
                            std::to_string(devices) + " devices of cluster '" +
                            job.inputs.cluster.name + "'",
                        "--nproc");
  }
  if (devices > kMostRanks) {
    return InvalidInput("cluster '" + job.inputs.cluster.name + "' has " +
                            std::to_string(devices) + " devices: at most " +
                            std::to_string(kMostRanks) + " ranks on one host",
                        "--cluster");
  }
  TESSERA_TRY(job.plan, PlanOrDataParallel(job.inputs));
  const TaskGraph tasks =
      Lower(graph, job.inputs.cluster, job.plan, options.training);
  if (const auto problems = CheckOrder(tasks, graph); !problems.empty()) {
    return problems[0].At("the plan's tasks");
  }

  TESSERA_TRY(job.data, OpenTokens(options.data, VocabularyOf(graph)));
  // Whether the data is long enough shows with the first row.
  std::vector<int32_t> tokens(static_cast<size_t>(graph.seq_len));
  std::vector<int32_t> labels(tokens.size());
  TESSERA_RETURN_IF_ERROR(job.data->Sample(options.seed, 0, 0, graph.seq_len,
                                           tokens.data(), labels.data()));
  if (!options.load.empty()) {
    TESSERA_RETURN_IF_ERROR(CheckReadable(options.load));
  }
  return job;
}

void PrintStep(const StepReport& step) {
  std::cout << "step " << step.step + 1 << "  loss "
            << FormatFixed(step.loss, 6) << "  " << FormatTime(step.step_time)
            << "  " << FormatFixed(step.tokens_per_s, 0) << " tokens/s"
            << std::endl;
}

RunReport ReportOf(const Job& job, const TaskGraph& tasks,
                   const Options& options, const TrainingResult& result) {
  const Inputs& inputs = job.inputs;
  const Evaluator evaluator(inputs.graph, inputs.cluster,
                            inputs.profile_or_null(), options.training);
  RunReport report;
  report.result = &result;
  report.measured = MeasuredBreakdown(tasks, result.timelines);
  report.predicted = evaluator.Evaluate(job.plan);
  // The simulator never fails.
  const Timeline timeline = Simulator(evaluator.pricer()).Run(tasks).value();
  report.predicted.step_time = timeline.step_time;
  report.predicted.breakdown = PredictedBreakdown(tasks, timeline);
  report.predicted_memory.resize(inputs.cluster.devices.size());
  const std::vector<DeviceSet> sets = DeviceSets(job.plan.groups);
  for (size_t s = 0; s < sets.size(); ++s) {
    for (const DeviceId device : sets[s].devices) {
      report.predicted_memory[device.index()] = report.predicted.memory[s];
    }
  }
  return report;
}

// This process's part of the job; rank 0 prints.
Result<int> TrainInWorld(const Options& options, const Job& job,
                         CommWorld& world) {
  const Graph& graph = job.inputs.graph;
  const TaskGraph tasks =
      Lower(graph, job.inputs.cluster, job.plan, options.training);
  CpuDevice device;
  TrainingJob training;
  training.graph = &graph;
  training.tasks = &tasks;
  training.options = options.training;
  training.seed = options.seed;
  training.steps = options.steps;
  training.load = LoadFrom(*job.data, options.seed, graph);
  training.world = &world;
  training.device = &device;
  training.load_path = options.load;
  training.save_path = options.save;
  training.stop = &CatchInterrupts();
  const bool prints = world.world_rank() == 0;
  if (prints && !options.json) {
    std::cout << Describe(graph, job.inputs.cluster, job.plan) << std::endl;
    training.progress = PrintStep;
  }
  TESSERA_TRY(const TrainingResult result, Train(training));
  const auto diverged =
      std::find_if(result.losses.begin(), result.losses.end(),
                   [](double loss) { return !std::isfinite(loss); });
  if (prints && diverged != result.losses.end()) {
    std::cerr << "tessera: warning: the loss is not finite from step "
              << diverged - result.losses.begin() + 1 << " on\n";
  }
  if (prints && !result.losses.empty()) {
    const RunReport report = ReportOf(job, tasks, options, result);
    if (options.json) {
      std::cout << RunJson(report).ToString() << std::endl;
    } else {
      std::cout << RunText(report) << std::flush;
    }
  }
  return result.interrupted ? ExitCodeOf(ErrorCode::kInterrupted) : 0;
}

Result<int> TrainAsRank(const Options& options,
                        const RankEnvironment& environment) {
  if (options.nproc != 0 && options.nproc != environment.size) {
    return InvalidInput("is " + std::to_string(options.nproc) + ", but " +
                            environment.launcher + " started " +
                            std::to_string(environment.size) + " ranks",
                        "--nproc");
  }
  TESSERA_TRY(const Job job, ReadJob(options, environment.size));
  if (environment.rank == 0 && environment.launcher != "tessera") {
    PrintWarnings(job.inputs);
  }
  TESSERA_TRY(const auto store, Store::Open(StoreOptionsOf(environment)));
  TESSERA_TRY(const auto world,
              MakeShmWorld(environment.rank, environment.size, *store));
  return TrainInWorld(options, job, *world);
}

}  // namespace

Result<int> RunRun(const Options& options) {
  TESSERA_TRY(const std::optional<RankEnvironment> environment,
              DetectRankEnvironment());
  if (environment) {
    const auto code = TrainAsRank(options, *environment);
    if (code) return code;
    ReportRankError(code.error());
    return ExitCodeOf(code.error().code);
  }
  TESSERA_TRY(const Job job, ReadJob(options, options.nproc));
  PrintWarnings(job.inputs);
  const auto ranks = static_cast<int>(job.inputs.cluster.devices.size());
  if (ranks > 1) return LaunchRanks(ranks, options.arguments);
  return TrainInWorld(options, job, *MakeThreadWorlds(1)[0]);
}

}  // namespace tessera
