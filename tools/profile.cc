#include <algorithm>
#include <chrono>
#include <iostream>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "costmodel/profile/profile_io.h"
#include "costmodel/source/cost_source.h"
#include "planner/base/format.h"
#include "profiler/case_order.h"
#include "profiler/profile_cases.h"
#include "profiler/profiler.h"
#include "runtime/launch/backend.h"
#include "runtime/launch/launch.h"
#include "runtime/trainer.h"
#include "tools/gpu_share.h"
#include "tools/inputs.h"
#include "tools/interrupt.h"
#include "tools/job_ranks.h"
#include "tools/json.h"
#include "tools/origin.h"
#include "tools/progress_line.h"
#include "tools/text.h"
#include "tools/verb.h"

namespace tessera {
namespace {

constexpr double kDefaultTimeLimit = 60;  // seconds
// Samples of the microbatches that are timed where no plan is given: for one
// model, and for many.
constexpr int kSamples[] = {1, 2, 4, 8, 16};
constexpr int kFewSamples[] = {1, 4, 16};

struct ProfileJob {
  const Backend* backend = nullptr;
  int ranks = 0;
  Inputs inputs;  // their cluster is what plans are for
  ProfileCases cases;
  ProfileDb known;  // the rows of the file
  ProfileOrigin origin;
};

// The ranks and the cluster of cores of this host.
Result<void> ReadHost(const Options& options, ProfileJob& job) {
  if (options.cluster.empty() && job.ranks == 0) {
    return InvalidInput("needs --cluster local-cpu:N or --nproc N", "profile");
  }
  TESSERA_TRY(job.inputs,
              ReadInputs(options, "local-cpu:" + std::to_string(job.ranks)));
  const Cluster& cluster = job.inputs.cluster;
  if (cluster.devices.size() > kMostRanks) {
    return InvalidInput("cluster '" + cluster.name + "' has " +
                            std::to_string(cluster.devices.size()) +
                            " devices: at most " + std::to_string(kMostRanks) +
                            " ranks on one host",
                        "--cluster");
  }
  if (cluster.device_types.size() != 1 ||
      cluster.device_types[0].name != "cpu-core" || cluster.num_nodes() != 1) {
    return InvalidInput(
        "only the ranks of this host can be timed: expected "
        "local-cpu:N, not '" +
            cluster.name + "'",
        "--cluster");
  }
  const auto devices = static_cast<int>(cluster.devices.size());
  if (job.ranks != 0 && job.ranks != devices) {
    return InvalidInput(
        "cluster '" + cluster.name + "' has " + std::to_string(devices) +
            (devices == 1 ? " device" : " devices") + " for a job of " +
            std::to_string(job.ranks) +
            " ranks: expected local-cpu:" + std::to_string(job.ranks),
        "--cluster");
  }
  job.ranks = devices;
  job.origin = OriginOf(job.ranks, ThreadsOf(options, job.ranks));
  AddLadder(cluster, job.cases);
  return {};
}

// The ranks, a GPU for each, and the cluster that plans are for: that of these
// ranks, or a larger one of such GPUs.
Result<void> ReadGpus(const Options& options,
                      const std::optional<RankEnvironment>& environment,
                      ProfileJob& job) {
  if (job.ranks == 0) {
    const auto gpus = VisibleGpus();
    if (!gpus) return gpus.error().At("--backend " + options.backend);
    job.ranks = job.backend->threads ? 1 : static_cast<int>(gpus->size());
  }
  const RankEnvironment here = environment.value_or(LastRank(job.ranks));
  TESSERA_TRY(const auto share, GpuShareOf(*job.backend, here));
  TESSERA_CHECK(share.has_value()) << options.backend;
  const GpuShare& gpu = *share;
  std::string warning;
  TESSERA_TRY(
      const Cluster cluster,
      ClusterOfGpus(gpu.gpu, job.ranks, here.local_size, gpu.ranks, &warning));
  const std::string name = cluster.device_types[0].name;
  TESSERA_TRY(job.inputs, ReadInputs(options, cluster));
  if (options.cluster.empty() && !warning.empty()) {
    job.inputs.warnings.push_back(warning);
  }
  for (const DeviceType& type : job.inputs.cluster.device_types) {
    if (type.name == name) continue;
    return InvalidInput("cluster '" + job.inputs.cluster.name + "' has '" +
                            type.name + "', and the GPU here is '" + name + "'",
                        "--cluster");
  }
  AddLadder(LadderCluster(gpu.gpu, cluster, job.inputs.cluster), job.cases);
  job.origin = OriginOf(job.ranks, /*threads=*/0, gpu.gpu.name);
  return {};
}

// The file to write, which is extended where it is there.
Result<void> ReadKnown(const Options& options, ProfileJob& job) {
  TESSERA_RETURN_IF_ERROR(CheckProtoOutput(options.output));
  TESSERA_TRY(job.known,
              ProfileToExtend(options.output, job.origin, options.again));
  return {};
}

// Reads and checks everything, and finds what there is to time. `environment`
// is that of a rank, if this process is one of several: the file is left to
// rank 0, as other ranks' hosts need not have its folder.
Result<ProfileJob> ReadProfileJob(
    const Options& options, const std::optional<RankEnvironment>& environment) {
  ProfileJob job;
  TESSERA_TRY(job.backend, BackendOf(options));
  if (options.time_limit_s && *options.time_limit_s <= 0) {
    return InvalidInput("expected a time above 0", "--time-limit");
  }
  job.ranks = environment ? environment->size : options.nproc;
  const bool one_host = !job.backend->gpu || job.backend->threads;
  if (one_host && job.ranks > kMostRanks) {
    return InvalidInput(std::to_string(job.ranks) +
                            " ranks on one host: at most " +
                            std::to_string(kMostRanks),
                        "--nproc");
  }
  if (job.backend->gpu) {
    TESSERA_RETURN_IF_ERROR(ReadGpus(options, environment, job));
  } else {
    TESSERA_RETURN_IF_ERROR(ReadHost(options, job));
  }
  if (!environment) TESSERA_RETURN_IF_ERROR(ReadKnown(options, job));
  const Inputs& inputs = job.inputs;
  const Cluster& cluster = inputs.cluster;
  const auto add = [&](const Graph& graph, const std::vector<Plan>& plans) {
    AddCases(graph, cluster, plans, options.training, job.cases,
             /*fused=*/job.backend->gpu);
  };
  if (options.model.empty()) {
    if (!options.plan.empty() || options.strategy) {
      return InvalidInput("a plan or strategy needs its model", "--model");
    }
    for (const char* flag : {"--global-batch", "--seq-len", "--dtype", "--set",
                             "--end-of-text", "--stochastic-rounding"}) {
      if (!options.Given(flag)) continue;
      return InvalidInput("has no effect: it needs a --model", flag);
    }
    TESSERA_TRY(const std::vector<Graph> graphs, TypicalGraphs());
    for (const Graph& graph : graphs) {
      add(graph, UniformPlans(graph, cluster, kFewSamples));
    }
    return job;
  }
  std::vector<Plan> plans;
  if (inputs.plan) {
    plans.push_back(*inputs.plan);
  } else {
    plans = UniformPlans(inputs.graph, cluster, kSamples);
  }
  if (plans.empty()) {
    return InvalidInput(
        "no uniform plan of '" + options.model + "' is valid there",
        "--cluster");
  }
  add(inputs.graph, plans);
  return job;
}

// The fastest rates of a profile, for people. On the host a message's row is
// what is left of it beside a copy: both are its time.
std::string Summary(const ProfileDb& profile, bool on_host) {
  std::map<std::string, std::pair<int, double>> kinds;  // rows, best rate
  for (const auto& [key, row] : profile.rows) {
    double work = static_cast<double>(key.payload.value);
    if (!key.rule.empty()) work = WorkOf(key).value_or(0);
    std::string name = key.name;
    if (key.ranks > 1) name += " over " + std::to_string(key.ranks);
    double seconds = row.median_s;
    if (on_host && key.name == NameOf(CommKind::kSendRecv)) {
      const Measurement* const copy = profile.Find(CopyOfMessage(key));
      seconds += copy == nullptr ? 0 : copy->median_s;
    }
    auto& [rows, rate] = kinds[name];
    ++rows;
    rate = std::max(rate, work / seconds);
  }
  std::vector<std::vector<std::string>> table = {
      {"kernel or exchange", "sizes", "fastest"}};
  for (const auto& [name, kind] : kinds) {
    const OpDef* op = OperatorOf(name);
    const bool counts_flops = op != nullptr && op->op_class != OpClass::kMemory;
    table.push_back({name, std::to_string(kind.first),
                     FormatFixed(kind.second * 1e-9, 2) +
                         (counts_flops ? " GFLOP/s" : " GB/s")});
  }
  return FormatTable(table);
}

// Profiles with a line of progress, if this rank `prints`.
Result<ProfilerResult> ProfileWithProgress(const ProfileJob& job,
                                           const RankSeat& seat, bool prints,
                                           ProfilerOptions profiler) {
  ProgressLine line(std::chrono::seconds(10), /*rewrites=*/prints);
  if (prints) {
    profiler.progress = [&](size_t done, size_t all) {
      line.Show("profiling: " + std::to_string(done) + " of " +
                std::to_string(all));
    };
  }
  return Profile(job.cases, *seat.device, *seat.world, profiler);
}

void PrintJson(const Options& options, const ProfileJob& job,
               const ProfileDb& profile, const ProfilerResult& result) {
  std::cout << Json::Object(
                   {{"file", options.output},
                    {"rows", static_cast<int64_t>(profile.rows.size())},
                    {"measured", static_cast<int64_t>(result.measured)},
                    {"left_out", static_cast<int64_t>(result.left_out)},
                    {"too_large", static_cast<int64_t>(result.too_large)},
                    {"interrupted", result.interrupted},
                    {"ranks", job.ranks},
                    {"threads", job.origin.threads},
                    {"host", job.origin.host},
                    {"date", job.origin.date}})
                   .ToString()
            << std::endl;
}

// This rank's part; rank 0 writes and prints.
Result<int> ProfileInWorld(const Options& options, const ProfileJob& job,
                           const RankSeat& seat) {
  const bool prints = seat.world->world_rank() == 0;
  // What the file holds then.
  const auto write = [&](ProfileDb profile) -> Result<ProfileDb> {
    if (profile.rows.empty()) return profile;
    profile.origin = job.origin;
    return ExtendProfile(options.output, job.known, profile, options.again);
  };
  ProfilerOptions profiler;
  profiler.time_limit_s = options.time_limit_s.value_or(kDefaultTimeLimit);
  profiler.known = job.known;
  profiler.again = options.again;
  profiler.save = [&](const ProfileDb& rows) -> Result<void> {
    TESSERA_TRY([[maybe_unused]] const ProfileDb written, write(rows));
    return {};
  };
  if (!job.backend->gpu) profiler.cores = CoresOf(job.ranks);
  profiler.under_load = true;
  profiler.stop = &CatchInterrupts();
  TESSERA_TRY(const ProfilerResult result,
              ProfileWithProgress(job, seat, prints, std::move(profiler)));
  if (!prints) return result.interrupted ? kInterruptedExitCode : 0;
  TESSERA_TRY(const ProfileDb profile, write(result.profile));
  if (result.too_large > 0) {
    std::cerr << "tessera: warning: " << result.too_large
              << " of the sizes do not fit into memory\n";
  }
  if (result.interrupted) {
    if (options.json) PrintJson(options, job, profile, result);
    std::cerr << "tessera: interrupted: "
              << (profile.rows.empty()
                      ? "nothing was measured"
                      : options.output + " has " +
                            std::to_string(profile.rows.size()) + " times")
              << ", " << result.left_out << " are missing"
              << (options.again ? "" : "; the same command goes on")
              << std::endl;
    return kInterruptedExitCode;
  }
  if (result.left_out > 0 && result.measured == 0) {
    return Error{ErrorCode::kUnavailable,
                 "there was no time for any of " +
                     std::to_string(result.left_out) + " sizes",
                 "--time-limit"};
  }
  if (result.left_out > 0) {
    std::cerr << "tessera: warning: no time for " << result.left_out
              << " of the sizes; they will be interpolated"
              << (options.again ? "" : ", or measured by the same command")
              << "\n";
  }
  if (options.json) {
    PrintJson(options, job, profile, result);
  } else {
    std::cout << profile.rows.size() << " times on " << job.origin.host << ", "
              << job.ranks << " ranks at once, " << result.measured
              << " measured here: " << options.output << "\n\n"
              << Summary(profile, /*on_host=*/!job.backend->gpu) << std::flush;
  }
  return 0;
}

Result<int> ProfileAsRank(const Options& options,
                          const RankEnvironment& environment) {
  TESSERA_TRY(ProfileJob job, ReadProfileJob(options, environment));
  TESSERA_TRY(RankSeat seat, JoinJob(*job.backend, environment,
                                     ThreadsOf(options, environment.local_size),
                                     &CatchInterrupts()));
  // Here an error of it ends the others, too.
  const auto known =
      environment.rank == 0 ? ReadKnown(options, job) : Result<void>();
  auto code =
      known ? ProfileInWorld(options, job, seat) : Result<int>(known.error());
  if (!code) seat.world->Abort(code.error().ToString());
  EndBehindRankZero(seat, code);
  return code;
}

// All ranks, as threads of this process.
Result<int> ProfileInThreads(const Options& options, const ProfileJob& job) {
  TESSERA_TRY(std::vector<RankSeat> seats,
              MakeJob(*job.backend, job.ranks, ThreadsOf(options, job.ranks)));
  std::vector<Result<int>> codes(seats.size(), 0);
  RunThreads(job.ranks, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    codes[r] = ProfileInWorld(options, job, seats[r]);
    if (!codes[r]) seats[r].world->Abort(codes[r].error().ToString());
    seats[r].world.reset();
  });
  for (const Result<int>& code : codes) {
    if (!code) return code;
  }
  return codes[0];
}

// Starts the ranks.
Result<int> ProfileAsJob(const Options& options) {
  TESSERA_TRY(const ProfileJob job, ReadProfileJob(options, std::nullopt));
  PrintWarnings(job.inputs);
  if (job.ranks > 1 && !job.backend->threads) {
    return LaunchRanks(job.ranks, options.arguments);
  }
  return ProfileInThreads(options, job);
}

}  // namespace

Result<int> RunProfile(const Options& options) {
  return RunAsRankOrJob(options, ProfileAsRank, ProfileAsJob);
}

}  // namespace tessera
