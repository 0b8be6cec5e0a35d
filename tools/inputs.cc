#include "tools/inputs.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <set>
#include <span>

#include "costmodel/collective/collective.h"
#include "costmodel/profile/profile_io.h"
#include "costmodel/whatif/idle_collective.h"
#include "costmodel/whatif/scenario.h"
#include "planner/base/append.h"
#include "planner/base/file.h"
#include "planner/base/format.h"
#include "planner/base/system_error.h"
#include "planner/io/cluster_io.h"
#include "planner/io/graph_io.h"
#include "planner/io/huggingface.h"
#include "planner/io/importer.h"
#include "planner/io/onnx.h"
#include "planner/io/plan_io.h"
#include "planner/io/proto_endings.h"
#include "planner/io/zoo.h"
#include "planner/ir/token_ids.h"
#include "planner/plan/stages.h"
#include "planner/plan/strategy.h"
#include "planner/search/idle_in_plan.h"
#include "planner/topology/stacks.h"
#include "runtime/checkpoint_lock.h"
#include "runtime/older_checkpoints.h"
#include "runtime/weight_export.h"
#include "tools/job_ranks.h"
#include "tools/origin.h"

namespace tessera {
namespace {

Error NoSequence(const Options& options) {
  return InvalidInput(
      "has no effect: samples of '" + options.model + "' are no sequences",
      "--seq-len");
}

// Whether `name` is what a run that saves at `path` may keep beside it.
bool IsBesideCheckpoint(const std::string& path, const std::string& name) {
  return IsNameOfOlder(path, name) ||
         ResolveLinks(name) == CheckpointLockName(path);
}

// What --set sets.
struct Settings {
  std::vector<Setting> model;    // keys, without "model."
  std::vector<Setting> cluster;  // fields
};

// The flag that gives what 'tessera whatif' takes as a path, too.
std::string_view FlagFor(std::string_view path) {
  if (path == "cluster" || path == "nodes" || path == "gpus") {
    return "--cluster NAME:NODESxGPUS";
  }
  if (path == "stack") return "--stack";
  if (path == "batch") return "--global-batch";
  if (path == "seq") return "--seq-len";
  if (path == "dtype") return "--dtype";
  return "--strategy";
}

Result<Settings> ReadSettings(const Options& options) {
  constexpr std::string_view kModel = "model.";
  Settings settings;
  std::set<std::string> seen;
  if (!options.collective.empty()) seen.insert("collective");
  for (const std::string& text : options.set) {
    auto setting = ParseSetting(text);
    if (!setting) return setting.error().At("--set");
    const std::string& path = setting->path;
    if (!seen.insert(FilePathOf(path)).second) {
      return InvalidInput("given twice", "--set " + path);
    }
    if (path.starts_with(kModel)) {
      settings.model.push_back({path.substr(kModel.size()), setting->value});
    } else if (IsClusterField(path)) {
      settings.cluster.push_back(*std::move(setting));
    } else {
      return InvalidInput(
          "'" + path + "' is given by " + std::string(FlagFor(path)) + " here",
          "--set");
    }
  }
  return settings;
}

// Sets of the inputs what the model has besides its graph.
// `otherwise` is the dtype of a model that has none of its own, where none is
// asked for.
Result<Graph> ReadModel(const Options& options, const Cluster& cluster,
                        DType otherwise, std::span<const Setting> keys,
                        Inputs& inputs) {
  ImportOptions import = {.global_batch = options.global_batch,
                          .seq_len = options.seq_len,
                          .dtype = options.dtype,
                          .documents = options.end_of_text >= 0,
                          .warnings = &inputs.warnings,
                          .layout = &inputs.layout};
  // A graph file has sizes and a dtype of its own.
  if (!IsGraphFile(options.model)) {
    if (!import.dtype) import.dtype = otherwise;
    TESSERA_RETURN_IF_ERROR(CheckModelReadable(options.model));
    // What is wrong with the file comes before what is missing of the flags. An
    // ONNX file may fix its sizes, too.
    const bool config = IsHuggingFace(options.model);
    if (config) {
      const auto readable = ReadModelConfig(options.model);
      if (!readable) return readable.error();
    }
    const char* missing = !config                    ? nullptr
                          : import.global_batch == 0 ? "--global-batch N"
                          : import.seq_len == 0 && !HasOwnLength(options.model)
                              ? "--seq-len N"
                              : nullptr;
    if (missing != nullptr) {
      return InvalidInput(std::string("needs ") + missing, options.model);
    }
  }
  TESSERA_RETURN_IF_ERROR(CheckLength(options));
  if (auto set = SetModelKeys(options.model, keys, import); !set) {
    return set.error().At("--set");
  }
  inputs.overrides = import.overrides;
  TESSERA_TRY(Graph forward, ImportModel(options.model, import));
  if (options.Given("--seq-len") && IsOnnx(options.model) &&
      UnitOf(forward) != "tokens") {
    return NoSequence(options);
  }
  auto graph = Differentiate(std::move(forward));
  if (!graph) return graph.error().At(options.model);
  for (const DeviceType& type : cluster.device_types) {
    if (type.Peak(graph->dtype).value > 0) continue;
    return InvalidInput("device type '" + type.name + "' of cluster '" +
                            cluster.name + "' does not compute in " +
                            std::string(NameOf(graph->dtype)),
                        "--dtype");
  }
  if (options.training.stochastic_rounding &&
      graph->dtype != DType::kBFloat16) {
    return InvalidInput("rounds parameters in bf16, and those of '" +
                            options.model + "' are in " +
                            std::string(NameOf(graph->dtype)) +
                            ": add --dtype bf16",
                        "--stochastic-rounding");
  }
  if (options.end_of_text >= 0) {
    TESSERA_RETURN_IF_ERROR(CheckEndOfText(*graph, options.end_of_text));
  }
  return graph;
}

// All problems on one line.
Result<void> CheckPlan(const Graph& graph, const Cluster& cluster,
                       const Plan& plan, const std::string& where) {
  const std::vector<Error> errors = Validate(graph, cluster, plan);
  if (errors.empty()) return {};
  Error error = errors.front().At(where);
  if (errors.size() > 1) {
    error.message += " (and " + std::to_string(errors.size() - 1) + " more)";
  }
  return error;
}

Result<std::optional<Plan>> ReadPlanOrStrategy(
    const Options& options, const Graph& graph, const Cluster& cluster,
    std::vector<std::string>& warnings) {
  if (!options.plan.empty() && options.strategy) {
    return InvalidInput("give a plan or a strategy, not both", "--strategy");
  }
  if (!options.plan.empty()) {
    TESSERA_TRY(Plan plan, ReadPlanFor(options.plan, graph, cluster, warnings));
    return std::optional(std::move(plan));
  }
  if (options.strategy) {
    const auto strategy = ParseStrategy(*options.strategy);
    if (!strategy) return strategy.error().At("--strategy");
    // In a grid over pp it is one that some cells have no use for.
    if (strategy->pp == 1 && strategy->schedule != Strategy().schedule) {
      const bool chunks =
          options.strategy->find("schedule=") == std::string::npos;
      return InvalidInput(std::string(chunks ? "vp" : "schedule") +
                              ": has no effect: needs pp of at least 2",
                          "--strategy");
    }
    const GraphIndex index(graph);
    auto plan = PlanFromStrategy(index, cluster, *strategy);
    if (!plan) return plan.error().At("--strategy");
    const auto idle = FirstIdleIn(index, cluster, *strategy, *plan);
    if (idle) return IdleError(*idle).At("--strategy");
    return std::optional(*std::move(plan));
  }
  return std::optional<Plan>();
}

// Operators of the user's own whose times neither FLOPs nor rows of a profile
// tell: they would take as long as their memory traffic.
void WarnOfUnpriced(Inputs& inputs) {
  std::set<std::string_view> timed;
  if (inputs.profile) {
    for (const auto& [key, timing] : inputs.profile->rows) {
      const bool here = key.dtype == inputs.graph.dtype &&
                        std::ranges::any_of(inputs.cluster.device_types,
                                            [&](const DeviceType& type) {
                                              return type.name == key.device;
                                            });
      if (here) timed.insert(key.name);
    }
  }
  std::set<std::string_view> untimed;
  for (const Node& node : inputs.graph.nodes) {
    if (OwnOpOf(*node.op) != nullptr && node.op->flops_per_point == 0 &&
        !timed.contains(node.op->name)) {
      untimed.insert(node.op->name);
    }
  }
  if (untimed.empty()) return;
  std::string names;
  for (std::string_view name : untimed) {
    AppendTo(names, ", ", name);
  }
  inputs.warnings.push_back(
      "no FLOPs, and no rows of a profile for these devices in " +
      std::string(NameOf(inputs.graph.dtype)) + ": " + names +
      "; priced by their memory traffic alone");
}

std::set<std::string_view> TimedDevices(const ProfileDb& profile) {
  std::set<std::string_view> timed;
  for (const auto& [key, timing] : profile.rows) timed.insert(key.device);
  return timed;
}

// A profile of other devices prices nothing.
void WarnOfOtherDevices(Inputs& inputs) {
  if (!inputs.profile) return;
  const std::set<std::string_view> timed = TimedDevices(*inputs.profile);
  std::string names;
  for (const DeviceType& type : inputs.cluster.device_types) {
    if (timed.contains(type.name)) return;
    AppendTo(names, ", ", type.name);
  }
  inputs.warnings.push_back(
      "--profile has no times of the cluster's devices (" + names + ")" +
      (timed.empty() ? "" : ", but of " + std::string(*timed.begin())));
}

// Ranks that share a host's cores and its memory take longer the more they are.
void WarnOfOtherRanks(Inputs& inputs) {
  if (!inputs.profile || inputs.profile->rows.empty()) return;
  const auto ranks = std::ssize(inputs.cluster.devices);
  const int measured = inputs.profile->origin.ranks_at_once;
  const bool shared =
      std::ranges::all_of(inputs.cluster.device_types,
                          [](const auto& t) { return t.shared_memory; });
  if (!shared || measured == ranks) return;
  inputs.warnings.push_back("--profile was measured by " +
                            std::to_string(measured) +
                            " ranks at once, and these are " +
                            std::to_string(ranks) + ", which share the host");
}

// Everything but --cluster.
Result<Inputs> ReadOnCluster(const Options& options, Cluster cluster) {
  Inputs inputs;
  inputs.cluster = std::move(cluster);
  // By the cluster as it is named: another rate of a device leaves the numbers
  // what they are.
  const DType dtype = DefaultDType(inputs.cluster);
  if (!options.stack.empty()) {
    auto stack = ParseStack(options.stack);
    if (!stack) return stack.error().At("--stack");
    inputs.cluster.stack = *std::move(stack);
  }
  TESSERA_TRY(const Settings settings, ReadSettings(options));
  if (auto choice = ParseCollectiveChoice(inputs.cluster.collective); !choice) {
    return choice.error().At("collective").At(options.cluster);
  }
  if (!options.collective.empty()) {
    inputs.cluster.collective = options.collective;
    auto choice = ParseCollectiveChoice(options.collective);
    if (!choice) return choice.error().At("--collective");
  }
  if (!settings.cluster.empty()) {
    if (inputs.cluster.devices.empty()) {
      return InvalidInput(
          "'" + settings.cluster.front().path + "' needs --cluster", "--set");
    }
    auto set =
        SetClusterFields(settings.cluster, inputs.cluster, inputs.warnings);
    if (!set) return set.error().At("--set");
  }
  TESSERA_TRY(inputs.profile, ReadProfiles(options.profiles, &inputs.origins));
  WarnOfOtherDevices(inputs);
  WarnOfOtherRanks(inputs);
  if (options.model.empty()) return inputs;
  TESSERA_TRY(inputs.graph, ReadModel(options, inputs.cluster, dtype,
                                      settings.model, inputs));
  WarnOfUnpriced(inputs);
  TESSERA_TRY(inputs.plan, ReadPlanOrStrategy(options, inputs.graph,
                                              inputs.cluster, inputs.warnings));
  return inputs;
}

}  // namespace

Result<std::optional<ProfileDb>> ReadProfiles(
    const std::vector<std::string>& paths,
    std::vector<ProfileOrigin>* origins) {
  std::optional<ProfileDb> all;
  for (const std::string& path : paths) {
    TESSERA_TRY(ProfileDb profile, ReadProfile(path));
    if (origins != nullptr) origins->push_back(profile.origin);
    if (all) profile.rows.merge(all->rows);
    all = std::move(profile);
  }
  return all;
}

Result<Inputs> ReadInputs(const Options& options,
                          std::string_view default_cluster) {
  const std::string_view cluster =
      options.cluster.empty() ? default_cluster : options.cluster;
  if (cluster.empty()) return ReadOnCluster(options, {});
  auto loaded = LoadCluster(cluster);
  if (!loaded) {
    return loaded.error().where.empty() ? loaded.error().At("--cluster")
                                        : loaded.error();
  }
  TESSERA_TRY(Inputs inputs, ReadOnCluster(options, *std::move(loaded)));
  if (cluster.starts_with("local-cpu")) WarnOfOtherHosts(options, inputs);
  return inputs;
}

Result<Inputs> ReadInputs(const Options& options, Cluster default_cluster) {
  if (!options.cluster.empty()) return ReadInputs(options, "");
  return ReadOnCluster(options, std::move(default_cluster));
}

void WarnOfOtherHosts(const Options& options, Inputs& inputs) {
  const std::string here = OriginOf(1, 1).host;
  for (size_t i = 0; i < inputs.origins.size(); ++i) {
    const std::string& there = inputs.origins[i].host;
    // GPUs that were measured besides stand behind the cores.
    if (there.empty() || (there + ",").starts_with(here + ",")) continue;
    inputs.warnings.push_back(options.profiles[i] + ": was measured on '" +
                              there + "', and this is '" + here +
                              "': its times are not this host's");
  }
}

std::string FewerCoresText(const Options& options, const Inputs& inputs) {
  const auto ranks = static_cast<int>(inputs.cluster.devices.size());
  const int cores = CoresOf(ranks);
  if (inputs.profile || !options.cluster.starts_with("local-cpu") ||
      ranks <= cores) {
    return "";
  }
  const std::string count = std::to_string(ranks);
  return "predictions are of ranks with a core each, and " + count +
         " ranks share " + std::to_string(cores) +
         " here: 'tessera discover --nproc " + count +
         "' writes a cluster of what each has of them, and 'run --nproc " +
         count + "' without --cluster predicts that";
}

std::string UnmeasuredText(const SourceShares& sources, const Inputs& inputs) {
  if (!inputs.profile || sources.analytical <= 0.5) return "";
  const auto timed = TimedDevices(*inputs.profile);
  const bool of_others = std::ranges::none_of(
      inputs.cluster.device_types,
      [&](const DeviceType& type) { return timed.contains(type.name); });
  if (of_others) return "";
  return FormatPercent(sources.analytical) +
         " of the plan's task time is of kernels and exchanges that --profile "
         "does not have, or at far other sizes: 'tessera profile' measures "
         "them for this model, batch and strategy";
}

Result<Plan> ReadPlanFor(const std::string& path, const Graph& graph,
                         const Cluster& cluster,
                         std::vector<std::string>& warnings) {
  TESSERA_TRY(Plan plan, ReadPlan(path, graph));
  TESSERA_RETURN_IF_ERROR(CheckPlan(graph, cluster, plan, path));
  if (!plan.cluster_name.empty() && plan.cluster_name != cluster.name) {
    warnings.push_back(path + ": the plan was made for cluster '" +
                       plan.cluster_name + "', not for '" + cluster.name + "'");
  }
  return plan;
}

Result<Plan> PlanOrDataParallel(const Inputs& inputs) {
  if (inputs.plan) return *inputs.plan;
  auto plan = PlanFromStrategy(inputs.graph, inputs.cluster, Strategy{});
  if (!plan) {
    return plan.error().At("data parallelism, as no plan or strategy is given");
  }
  return plan;
}

std::string IdleText(const Plan& plan, const Cluster& cluster) {
  const size_t used = World(plan).devices.size();
  const size_t devices = cluster.devices.size();
  if (used == devices) return "";
  return "the plan uses " + std::to_string(used) + " of the " +
         std::to_string(devices) + " devices of cluster '" + cluster.name + "'";
}

void WarnOfIdle(const Plan& plan, Inputs& inputs, const std::string& path) {
  const std::string text = IdleText(plan, inputs.cluster);
  if (text.empty()) return;
  inputs.warnings.push_back((path.empty() ? "" : path + ": ") + text);
}

void WarnOfIdleCollective(const Plan& plan, const TrainingOptions& training,
                          Inputs& inputs) {
  std::string note = IdleCollectiveNote(inputs.graph, inputs.cluster, plan,
                                        inputs.profile_or_null(), training);
  if (!note.empty()) inputs.warnings.push_back(std::move(note));
}

void PrintWarning(const std::string& text) {
  if (!text.empty()) std::cerr << "tessera: warning: " << text << std::endl;
}

void PrintWarnings(const Inputs& inputs) {
  std::ranges::for_each(inputs.warnings, PrintWarning);
}

Result<void> CheckWritable(const std::string& path, std::string_view flag) {
  const auto fail = [&](const std::string& message) {
    return InvalidInput("cannot write '" + path + "': " + message,
                        std::string(flag));
  };
  std::error_code error;
  const std::filesystem::path file(ResolveLinks(path));
  if (std::filesystem::is_directory(file, error)) {
    return fail("it is a directory");
  }
  std::filesystem::path directory = file.parent_path();
  if (directory.empty()) directory = ".";
  const bool exists = std::filesystem::exists(file, error);
  // Files are replaced; what is none (a terminal, a pipe) is written in place.
  const bool in_place =
      exists && !std::filesystem::is_regular_file(file, error);
  if (!std::filesystem::is_directory(directory, error)) {
    return fail("there is no directory '" + directory.string() + "'");
  }
  const std::filesystem::path written = in_place ? file : directory;
  if (access(written.c_str(), W_OK) != 0) return fail(std::strerror(errno));
  return {};
}

Result<void> CheckReplaceable(const std::string& path, std::string_view flag) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (std::filesystem::exists(status) &&
      !std::filesystem::is_regular_file(status)) {
    return InvalidInput("cannot write '" + path + "': it is no regular file",
                        std::string(flag));
  }
  TESSERA_RETURN_IF_ERROR(CheckWritable(path, flag));
  // Not every folder that may be written takes files: /proc does not.
  std::string beside = ResolveLinks(path) + ".XXXXXX";
  const int fd = mkstemp(beside.data());
  if (fd < 0) {
    return InvalidInput(
        "cannot write beside '" + path + "': " + std::strerror(errno),
        std::string(flag));
  }
  close(fd);
  unlink(beside.c_str());
  return {};
}

Result<void> CheckProtoOutput(const std::string& path, std::string_view flag) {
  if (!HasProtoFileEnding(path)) {
    return InvalidInput("'" + path + "' does not end in " + ProtoEndings(),
                        std::string(flag));
  }
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  // A pipe is written in place.
  return std::filesystem::exists(status) &&
                 !std::filesystem::is_regular_file(status)
             ? CheckWritable(path, flag)
             : CheckReplaceable(path, flag);
}

namespace {

// A file that a flag names.
struct FlagFile {
  std::string_view flag;
  std::string path;
  bool written = false;
  std::string_view replaces = {};  // the flag whose file it may be
  std::string place = {};          // PlaceOf(path)
};

// By one name of the same place, whether or not there is something yet.
std::string PlaceOf(const std::string& path) {
  if (path.empty()) return "";
  std::error_code code;
  const std::filesystem::path absolute =
      std::filesystem::absolute(ResolveLinks(path), code);
  std::filesystem::path place =
      std::filesystem::weakly_canonical(absolute, code);
  if (code) place = absolute.lexically_normal();
  return place.has_filename() ? place : place.parent_path();  // "folder/"
}

// The files that flags name, those that are written behind the others.
std::vector<FlagFile> FilesOf(const Options& options, bool writes_plan) {
  std::error_code code;
  const std::filesystem::path model(options.model);
  std::vector<FlagFile> files = {
      {"--data", options.data},
      {"--cluster", options.cluster},
      {"--plan", options.plan},
      {"--from", options.from},
      {"--constraints", options.constraints},
      {"--load", options.load},
      {"--model", std::filesystem::is_directory(model, code)
                      ? model / "config.json"
                      : model}};
  for (const std::string& profile : options.profiles) {
    files.push_back({"--profile", profile});
  }
  // A run goes on from the checkpoint that it replaces, and adds to a profile;
  // a search goes on from a plan. Whether a folder may take weights is for
  // CheckHasNoWeights to say.
  files.push_back({"--save", options.save, true, "--load"});
  files.push_back({"--export", options.export_folder, true, "--load"});
  files.push_back({"--log", options.log, true});
  files.push_back({"--trace", options.trace, true});
  files.push_back({"--learn", options.learn, true, "--profile"});
  files.push_back({"--tune", options.tune, true});
  files.push_back({"--plan-out", options.plan_output, true, "--plan"});
  files.push_back({"-o", options.output, true, writes_plan ? "--plan" : ""});
  std::erase_if(files, [](const FlagFile& file) { return file.path.empty(); });
  for (FlagFile& file : files) file.place = PlaceOf(file.path);
  return files;
}

// Whether `file` has a name in the folder of --export, at `folder`, that one
// has which this writes.
bool IsInExport(const std::string& folder, const FlagFile& file) {
  const std::filesystem::path place(file.place);
  return place.parent_path() == folder &&
         (place.filename() == "config.json" ||
          IsNameOfWeights(place.filename().string()));
}

// Of two files one of which is written: by one of them alone.
Result<void> CheckDiffer(const FlagFile& file, const FlagFile& other) {
  const auto refuse = [](const FlagFile& one, const std::string& what) {
    return InvalidInput("'" + one.path + "' " + what, std::string(one.flag));
  };
  for (const auto& [one, two] :
       {std::pair(&file, &other), std::pair(&other, &file)}) {
    if (one->flag == "--save" && IsBesideCheckpoint(one->place, two->place)) {
      return refuse(*two,
                    "has the name of a file that --save keeps beside its own");
    }
    if (one->flag == "--export" && two->written &&
        IsInExport(one->place, *two)) {
      return refuse(
          *two, "has a name of what --export " + one->path + " writes there");
    }
  }
  std::error_code code;
  if (file.path == other.path || file.place == other.place ||
      std::filesystem::equivalent(file.path, other.path, code)) {
    return refuse(file, "is " + std::string(other.flag) + " too");
  }
  return {};
}

}  // namespace

Result<void> CheckPathsDiffer(const Options& options, bool writes_plan) {
  const std::vector<FlagFile> files = FilesOf(options, writes_plan);
  for (size_t i = 0; i < files.size(); ++i) {
    std::error_code code;
    if (!files[i].written ||
        std::filesystem::is_character_file(files[i].path, code)) {
      continue;
    }
    for (size_t j = 0; j < i; ++j) {
      if (files[j].flag == files[i].replaces) continue;
      TESSERA_RETURN_IF_ERROR(CheckDiffer(files[i], files[j]));
    }
  }
  return {};
}

Result<void> CheckLength(const Options& options) {
  if (!options.Given("--seq-len") || !IsHuggingFace(options.model) ||
      IsGraphFile(options.model) || !HasNoSequence(options.model)) {
    return {};
  }
  return NoSequence(options);
}

Result<void> CheckModelReadable(const std::string& model) {
  if (IsZoo(model)) return {};
  if (access(model.c_str(), F_OK) != 0 && errno == ENOENT) {
    return InvalidInput(
        "there is no such file or folder: expected a model's config.json (of "
        "one at Hugging Face downloaded before), its folder, an .onnx or graph "
        "file, or zoo:NAME ('tessera list models')",
        model);
  }
  return CheckReadable(model);
}

Result<void> CheckReadable(const std::string& path) {
  if (access(path.c_str(), R_OK) == 0) return {};
  return SystemError("cannot open", path, errno);
}

}  // namespace tessera
