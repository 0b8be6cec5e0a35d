#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <thread>

#include "costmodel/profile/profile_io.h"
#include "costmodel/source/cost_source.h"
#include "profiler/profiler.h"
#include "runtime/comm/shm_world.h"
#include "runtime/comm/thread_world.h"
#include "runtime/launch/launch.h"
#include "runtime/thread_pool.h"
#include "tools/format.h"
#include "tools/inputs.h"
#include "tools/json.h"
#include "tools/origin.h"
#include "tools/verb.h"

namespace tessera {
namespace {

constexpr double kDefaultTimeLimit = 60;  // seconds
// Samples of the microbatches that are timed where no plan is given: for one
// model, and for many.
constexpr int kSamples[] = {1, 2, 4, 8, 16};
constexpr int kFewSamples[] = {1, 4, 16};

// Reads and checks everything, and finds what there is to time.
Result<ProfileCases> ReadCases(const Options& options, Inputs& inputs) {
  TESSERA_RETURN_IF_ERROR(CheckProtoOutput(options.output));
  TESSERA_TRY(inputs, ReadInputs(options));
  if (inputs.cluster.device_types.size() != 1 ||
      inputs.cluster.device_types[0].name != "cpu-core" ||
      inputs.cluster.num_nodes() != 1) {
    return InvalidInput(
        "only the ranks of this host can be timed: expected "
        "local-cpu:N, not '" +
            inputs.cluster.name + "'",
        "--cluster");
  }
  ProfileCases cases;
  AddLadder(inputs.cluster, cases);
  if (options.model.empty()) {
    if (!options.plan.empty() || options.strategy) {
      return InvalidInput("a plan or strategy needs its model", "--model");
    }
    TESSERA_TRY(const std::vector<Graph> graphs, TypicalGraphs());
    for (const Graph& graph : graphs) {
      const auto plans = UniformPlans(graph, inputs.cluster, kFewSamples);
      TESSERA_RETURN_IF_ERROR(
          AddCases(graph, inputs.cluster, plans, options.training, cases));
    }
    return cases;
  }
  std::vector<Plan> plans;
  if (inputs.plan) {
    plans.push_back(*inputs.plan);
  } else {
    plans = UniformPlans(inputs.graph, inputs.cluster, kSamples);
  }
  if (plans.empty()) {
    return InvalidInput(
        "no uniform plan of '" + options.model + "' is valid there",
        "--cluster");
  }
  TESSERA_RETURN_IF_ERROR(
      AddCases(inputs.graph, inputs.cluster, plans, options.training, cases));
  return cases;
}

// The fastest rates of a profile, for people.
std::string Summary(const ProfileDb& profile) {
  std::map<std::string, std::pair<int, double>> kinds;  // rows, best rate
  for (const auto& [key, row] : profile.rows) {
    double work = static_cast<double>(key.payload.value);
    if (!key.rule.empty()) work = WorkOf(key).value_or(0);
    std::string name = key.name;
    if (key.ranks > 1) name += " over " + std::to_string(key.ranks);
    auto& [rows, rate] = kinds[name];
    ++rows;
    rate = std::max(rate, work / row.median_s);
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

void ShowProgress(size_t done, size_t all) {
  const bool terminal = isatty(STDERR_FILENO) != 0;
  if (!terminal && done != all && done % 100 != 0) return;
  std::fprintf(
      stderr,
      terminal ? "\rprofiling: %zu of %zu%s" : "profiling: %zu of %zu%s", done,
      all, terminal && done != all ? "" : "\n");
}

Result<int> ProfileInWorld(const Options& options, const ProfileCases& cases,
                           CommWorld& world) {
  const bool prints = world.world_rank() == 0;
  ProfilerOptions profiler;
  profiler.time_limit_s = options.time_limit_s.value_or(kDefaultTimeLimit);
  profiler.threads = options.threads > 0 ? options.threads
                                         : ThreadsPerRank(world.world_size());
  if (prints) profiler.progress = ShowProgress;
  TESSERA_TRY(ProfilerResult result, Profile(cases, world, profiler));
  if (!prints) return 0;
  ProfileDb& profile = result.profile;
  profile.origin = OriginOf(world.world_size());
  TESSERA_RETURN_IF_ERROR(WriteProfile(options.output, profile));
  if (result.left_out > 0) {
    std::cerr << "tessera: warning: no time for " << result.left_out
              << " of the sizes; they will be interpolated\n";
  }
  if (options.json) {
    std::cout << Json::Object(
                     {{"file", options.output},
                      {"rows", static_cast<int64_t>(profile.rows.size())},
                      {"left_out", static_cast<int64_t>(result.left_out)},
                      {"ranks", world.world_size()},
                      {"host", profile.origin.host},
                      {"date", profile.origin.date}})
                     .ToString()
              << std::endl;
  } else {
    std::cout << profile.rows.size() << " times on " << profile.origin.host
              << ", " << world.world_size()
              << " ranks at once: " << options.output << "\n\n"
              << Summary(profile) << std::flush;
  }
  return 0;
}

Result<int> ProfileAsRank(const Options& options,
                          const RankEnvironment& environment) {
  Inputs inputs;
  TESSERA_TRY(const ProfileCases cases, ReadCases(options, inputs));
  if (environment.size != std::ssize(inputs.cluster.devices)) {
    return InvalidInput("cluster '" + inputs.cluster.name + "' for a job of " +
                            std::to_string(environment.size) + " ranks",
                        "--cluster");
  }
  TESSERA_TRY(const auto store, Store::Open(StoreOptionsOf(environment)));
  TESSERA_TRY(const auto world,
              MakeShmWorld(environment.rank, environment.size, *store));
  return ProfileInWorld(options, cases, *world);
}

}  // namespace

Result<int> RunProfile(const Options& options) {
  TESSERA_TRY(const std::optional<RankEnvironment> environment,
              DetectRankEnvironment());
  if (environment) {
    const auto code = ProfileAsRank(options, *environment);
    if (code) return code;
    ReportRankError(code.error());
    return ExitCodeOf(code.error().code);
  }
  Inputs inputs;
  TESSERA_TRY(const ProfileCases cases, ReadCases(options, inputs));
  PrintWarnings(inputs);
  const auto ranks = static_cast<int>(inputs.cluster.devices.size());
  if (ranks > 1) return LaunchRanks(ranks, options.arguments);
  TESSERA_TRY(const auto world, MakeLoneWorld());
  return ProfileInWorld(options, cases, *world);
}

}  // namespace tessera
