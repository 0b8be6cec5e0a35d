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
#include <string_view>
#include <system_error>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/kernel_fusions.h"
#include "costmodel/memory/peak_memory.h"
#include "costmodel/profile/profile_io.h"
#include "costmodel/simulate/simulator.h"
#include "planner/base/file.h"
#include "planner/base/format.h"
#include "planner/lower/lower.h"
#include "planner/plan/describe.h"
#include "runtime/comm/peer_errors.h"
#include "runtime/comm/thread_world.h"
#include "runtime/device/cpu_device.h"
#include "runtime/launch/backend.h"
#include "runtime/launch/launch.h"
#include "runtime/mapped_file.h"
#include "runtime/trainer.h"
#include "tools/inputs.h"
#include "tools/interrupt.h"
#include "tools/job_ranks.h"
#include "tools/json.h"
#include "tools/loss_check.h"
#include "tools/origin.h"
#include "tools/progress_line.h"
#include "tools/run_data.h"
#include "tools/run_job.h"
#include "tools/run_memory.h"
#include "tools/run_report.h"
#include "tools/step_report.h"
#include "tools/trace.h"
#include "tools/verb.h"

namespace tessera {
namespace {

// So many take some seconds to prepare.
constexpr int64_t kManyTasks = 200'000;

void PrintStep(const StepReport& step, int64_t last, std::string_view unit) {
  std::cout << "step " << step.step + 1 << " of " << last << "  loss "
            << FormatFixed(step.loss, 6) << "  lr "
            << FormatNumber(step.learning_rate) << "  "
            << FormatTime(step.step_time) << "  "
            << FormatFixed(step.tokens_per_s, 0) << " " << unit << "/s";
  if (step.skipped) {
    std::cout << "  skipped at loss scale " << FormatFixed(*step.loss_scale, 0);
  }
  if (step.validation_loss) {
    std::cout << "  validation loss " << FormatFixed(*step.validation_loss, 6);
  }
  std::cout << std::endl;
}

// Whether a file, perhaps by another name, is what standard output goes to.
bool IsStandardOutput(const std::string& path) {
  struct stat file = {};
  struct stat output = {};
  return ::stat(path.c_str(), &file) == 0 &&
         ::fstat(STDOUT_FILENO, &output) == 0 && file.st_dev == output.st_dev &&
         file.st_ino == output.st_ino;
}

// Takes away what a run that was killed, or whose disk was full, has left of a
// line.
void CutUnfinishedLine(const std::string& path) {
  if (!IsRegularFile(path)) return;
  const auto file = MappedFile::Open(path);
  if (!file) return;
  const std::string_view text(
      reinterpret_cast<const char*>(file->bytes().data()),
      file->bytes().size());
  const size_t end = text.rfind('\n');
  const size_t whole = end == std::string_view::npos ? 0 : end + 1;
  std::error_code code;
  if (whole < text.size()) std::filesystem::resize_file(path, whole, code);
}

// One line of --log, which is there whole or not at all.
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
  if (step.loss_scale) {
    line.Set("loss_scale", *step.loss_scale);
    line.Set("skipped", step.skipped);
  }
  log << line.OneLine() + '\n' << std::flush;
  if (log) return {};
  Error error{ErrorCode::kUnavailable,
              std::string("cannot write: ") + std::strerror(errno), path};
  if (!IsStandardOutput(path)) CutUnfinishedLine(path);
  // One that a reader of the output has left is no error: it ends the run.
  if (Interrupted()) return {};
  return error;
}

// What is done before the first step.
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

// Rank 0's --log: `file`, opened for it, or standard output where that goes to
// the same file, since the two would overwrite each other. Null where there is
// none.
std::ostream* OpenLog(const Options& options, int64_t first_step,
                      std::ofstream& file) {
  if (options.log.empty()) return nullptr;
  if (IsStandardOutput(options.log)) return &std::cout;
  if (IsRegularFile(options.log)) {
    // A resumed run's steps follow those before.
    if (first_step == 0) {
      std::ofstream(options.log, std::ios::trunc);
    } else {
      CutUnfinishedLine(options.log);
    }
  }
  // Without a buffer, which would write what failed once more as it closes.
  file.rdbuf()->pubsetbuf(nullptr, 0);
  // At the end, wherever that is by then.
  file.open(options.log, std::ios::app);
  return &file;
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
  const Timeline timeline = Simulate(evaluator.pricer(), tasks);
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
  const ProfileDb learned =
      Learn(pricer, tasks, report.comparisons, OriginOfJob(options, job));
  TESSERA_RETURN_IF_ERROR(ExtendProfile(path, /*known=*/{}, learned));
  return {};
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
  training.steps = job.steps;
  SetData(job.data, training);
  training.learning_rate = job.learning_rate;
  training.world = &world;
  training.device = &device;
  training.load_path = options.load;
  if (!options.load.empty()) training.load_step = job.first_step;
  training.layout = job.inputs.layout;
  training.stop = &CatchInterrupts();
  return training;
}

// The first steps of a run, once more on one rank of the CPU: its losses, fewer
// where that is interrupted.
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
    training.learning_rate->steps = result.first_step + job.steps;
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
  if (trained) return std::move(trained->losses);
  if (trained.error().code == ErrorCode::kInterrupted) {
    return std::vector<double>();
  }
  return trained.error().At("--check");
}

// The report, in JSON, of a run without a step; null where it has begun before
// it is known behind which.
void PrintNothingTrained(std::optional<int64_t> first_step, bool interrupted) {
  std::cout << Json::Object({{"first_step", first_step ? *first_step : Json()},
                             {"losses", Json::Array()},
                             {"interrupted", interrupted}})
                   .ToString()
            << std::endl;
}

// Of a job whose steps are done.
void PrintNothingLeft(const Options& options, const Job& job) {
  std::cerr << "tessera: " << options.load << " is of step " << job.first_step
            << ": none is left until step " << options.until << std::endl;
  if (options.json) PrintNothingTrained(job.first_step, /*interrupted=*/false);
}

// All that a rank trains with, but for whom it tells.
Result<TrainingJob> SetUp(const Options& options, const Job& job,
                          const TaskGraph& tasks, const RankSeat& seat) {
  TrainingJob training =
      TrainingOf(options, job, tasks, *seat.world, *seat.device);
  training.validation.every = options.validate_every;
  training.save_path = options.save;
  training.save_every = options.save_every;
  training.keep_checkpoints = options.keep_checkpoints;
  training.export_folder = options.export_folder;
  training.export_file_bytes = {static_cast<int64_t>(options.export_shard)};
  training.offload_directory = OffloadDirectory(options);
  training.graphs = options.graph;
  training.deterministic = options.deterministic;
  // Where tasks are timed, as they are priced.
  const bool times_tasks =
      options.compare || !options.learn.empty() || !options.trace.empty();
  training.fuses =
      !times_tasks || KernelFusions(job.inputs.graph, job.inputs.cluster,
                                    job.inputs.profile_or_null(),
                                    PricerOptionsOf(options.training))
                          .FusesAll();
  training.tune = !options.tune.empty();
  training.products_path = options.tune;
  if (training.tune && seat.world->world_rank() == 0) {
    auto known = ReadFile(options.tune);
    if (!known && known.error().code != ErrorCode::kNotFound) {
      return known.error();
    }
    if (known) training.products = std::move(*known);
  }
  return training;
}

// What rank 0 says before the training.
void PrintBeginning(const Options& options, const Job& job,
                    const TaskGraph& tasks) {
  if (!options.json) {
    std::cout << Describe(job.inputs.graph, job.inputs.cluster, job.plan)
              << std::endl;
  }
  if (std::ssize(tasks.tasks) > kManyTasks) {
    std::cerr << "tessera: preparing a step of " << job.plan.microbatches
              << " microbatches, " << tasks.tasks.size() << " tasks"
              << std::endl;
  }
}

// --check: the first steps once more, on one rank of the CPU. Where that is
// interrupted, so is the run.
Result<void> AddCheck(const Options& options, const Job& job,
                      TrainingResult& result, RunReport& report) {
  const int64_t compared = std::min(options.check, job.steps);
  TESSERA_TRY(auto expected, LossesOfOneRank(options, job, result, compared));
  if (std::ssize(expected) < compared) {
    result.interrupted = true;
    std::cerr << "tessera: --check interrupted after step "
              << result.first_step + std::ssize(expected) << " of "
              << result.first_step + compared << std::endl;
  }
  if (!expected.empty()) {
    report.check =
        CheckLosses(result.losses, std::move(expected), job.inputs.graph.dtype);
  }
  return {};
}

// The report of a run of some steps, and the files that go with it.
Result<void> WriteReport(const Options& options, const Job& job,
                         const TaskGraph& tasks, TrainingResult& result,
                         bool unsaved) {
  RunReport report = ReportOf(job, tasks, options, result);
  Result<void> checked;  // the run is told of whatever becomes of that
  if (job.check && !result.interrupted && !result.untold) {
    checked = AddCheck(options, job, result, report);
  }
  if (options.json) {
    std::cout << RunJson(report).ToString() << std::endl;
  } else {
    std::cout << RunText(report) << std::flush;
  }
  if (!options.tune.empty()) {
    TESSERA_RETURN_IF_ERROR(WriteFileAtomically(options.tune, result.products));
  }
  if (!options.learn.empty()) {
    TESSERA_RETURN_IF_ERROR(WriteLearned(options, job, tasks, report));
  }
  if (!options.trace.empty()) {
    TESSERA_RETURN_IF_ERROR(WriteFileAtomically(
        options.trace, ChromeTrace(tasks, job.inputs.graph, job.inputs.cluster,
                                   Joined(result.timelines))));
  }
  TESSERA_RETURN_IF_ERROR(checked);
  if (report.check && !report.check->agrees()) {
    return Error{ErrorCode::kUnavailable, CheckText(*report.check), "--check"};
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
  return {};
}

// What rank 0 says and writes at the end.
Result<void> Finish(const Options& options, const Job& job,
                    const TaskGraph& tasks, TrainingResult& result) {
  if (result.exported && !job.config.empty()) {
    TESSERA_RETURN_IF_ERROR(
        WriteFileAtomically(ConfigIn(options.export_folder), job.config));
  }
  const auto steps = result.first_step + std::ssize(result.losses);
  const bool unsaved = !options.save.empty() && result.saved != steps;
  if (result.interrupted) {
    std::cerr << "tessera: interrupted after step " << steps << "; "
              << (options.save.empty() ? "not saved, as there is no --save FILE"
                  : unsaved            ? UnsavedText(options, result)
                                       : "saved in " + options.save)
              << std::endl;
  }
  if (!result.losses.empty()) {
    auto written = WriteReport(options, job, tasks, result, unsaved);
    if (!result.untold) return written;
    Error error = *result.untold;
    error.message += "; the run ends behind step " + std::to_string(steps);
    if (!options.save.empty()) {
      error.message += ", " + (unsaved ? UnsavedText(options, result)
                                       : "saved in " + options.save);
    }
    return error;
  }
  if (options.json) PrintNothingTrained(job.first_step, /*interrupted=*/true);
  return {};
}

// This rank's part of the job; rank 0 prints.
Result<int> TrainInWorld(const Options& options, const Job& job,
                         const RankSeat& seat) {
  const Graph& graph = job.inputs.graph;
  const TaskGraph tasks =
      Lower(graph, job.inputs.cluster, job.plan, options.training);
  auto set_up = SetUp(options, job, tasks, seat);
  if (!set_up) {
    seat.world->Abort(set_up.error().ToString());
    return set_up.error();
  }
  TrainingJob& training = *set_up;
  const bool prints = seat.world->world_rank() == 0;
  if (prints) PrintBeginning(options, job, tasks);
  std::ofstream file;
  std::ostream* const log =
      prints ? OpenLog(options, job.first_step, file) : nullptr;
  const std::string start_up = StartUpText(options, graph);
  ProgressLine line(std::chrono::seconds(5));
  training.starting = [&](Bytes done, Bytes total) {
    line.Show(start_up + ": " +
              FormatPercent(static_cast<double>(done.value) /
                            static_cast<double>(total.value)) +
              " of " + FormatBytes(total));
  };
  int64_t last = 0;
  bool diverged = false;
  training.progress = [&](const StepReport& step) -> Result<void> {
    if (last == 0) last = step.step + job.steps;
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
    if (prints && last == 0 && options.json)
      PrintNothingTrained(job.first_step, /*interrupted=*/true);
    if (prints) std::cerr << "tessera: " << error.ToString() << std::endl;
    return ExitCodeOf(error.code);
  }
  if (prints) {
    TESSERA_RETURN_IF_ERROR(Finish(options, job, tasks, *trained));
  }
  return trained->interrupted ? ExitCodeOf(ErrorCode::kInterrupted) : 0;
}

// The error of a run that ends before ranks train. Where it was interrupted
// --json says so, with the step if that is known.
Error BeforeTraining(const Options& options, std::optional<int64_t> first_step,
                     const Error& error) {
  if (error.code == ErrorCode::kInterrupted && options.json) {
    if (options.load.empty()) first_step = 0;
    PrintNothingTrained(first_step, /*interrupted=*/true);
  }
  return error;
}

// The same of a rank. Those of our launcher are all told: one line is enough.
Result<int> RankBeforeTraining(const Options& options,
                               const RankEnvironment& environment,
                               std::optional<int64_t> first_step,
                               const Error& error) {
  const bool prints = environment.rank == 0;
  if (prints) BeforeTraining(options, first_step, error);
  if (error.code != ErrorCode::kInterrupted ||
      environment.launcher != "tessera") {
    return error;
  }
  if (prints) {
    std::cerr << "tessera: interrupted before the first step" << std::endl;
  }
  TellLauncher(error);
  return kInterruptedExitCode;
}

Result<int> TrainAsRank(const Options& options,
                        const RankEnvironment& environment) {
  const std::atomic<bool>& stop = CatchInterrupts();
  auto read = ReadJob(options, environment, stop);
  if (!read) {
    return RankBeforeTraining(options, environment, {}, read.error());
  }
  const Job job = *std::move(read);
  if (job.steps == 0) {
    if (environment.rank == 0) PrintNothingLeft(options, job);
    return 0;
  }
  if (environment.rank == 0 && environment.launcher != "tessera") {
    PrintWarnings(job.inputs);
  }
  auto seat = JoinJob(*job.backend, environment,
                      ThreadsOf(options, environment.local_size), &stop);
  if (!seat) {
    return RankBeforeTraining(options, environment, job.first_step,
                              seat.error());
  }
  auto code = TrainInWorld(options, job, *seat);
  EndBehindRankZero(*seat, code);
  return code;
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
  const std::atomic<bool>& stop = CatchInterrupts();
  auto read = ReadJob(options, std::nullopt, stop);
  if (!read) return BeforeTraining(options, {}, read.error());
  Job job = *std::move(read);
  PrintWarnings(job.inputs);
  if (job.steps == 0) {
    PrintNothingLeft(options, job);
    return 0;
  }
  const auto ranks = static_cast<int>(job.inputs.cluster.devices.size());
  if (ranks > 1 && !job.backend->threads) {
    job.lock.reset();  // rank 0 takes both
    job.log_lock.reset();
    auto code = LaunchRanks(ranks, options.arguments, &stop);
    if (code) return code;
    return BeforeTraining(options, job.first_step, code.error());
  }
  return TrainInThreads(options, job, ranks);
}

}  // namespace

Result<int> RunRun(const Options& options) {
  return RunAsRankOrJob(options, TrainAsRank, TrainAsJob);
}

}  // namespace tessera
