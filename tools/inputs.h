#pragma once
// What the verbs read, from the flags that they share.

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "costmodel/profile/profile_db.h"
#include "planner/io/json_value.h"
#include "planner/io/published_weights.h"
#include "planner/ir/cluster.h"
#include "planner/ir/graph.h"
#include "planner/plan/evaluation.h"
#include "planner/plan/plan.h"
#include "tools/options.h"

namespace tessera {

struct Inputs {
  Cluster cluster;
  Graph graph;             // differentiated
  PublishedLayout layout;  // of the model's weights
  // What --set puts in place of keys of the model's config.json.
  std::map<std::string, JsonValue> overrides;
  std::optional<ProfileDb> profile;
  std::vector<ProfileOrigin> origins;  // of each --profile
  std::optional<Plan> plan;            // of --plan or --strategy, valid
  std::vector<std::string> warnings;

  const ProfileDb* profile_or_null() const {
    return profile ? &*profile : nullptr;
  }
};

// Reads --cluster, --model, --profile and the plan. Errors name the file or
// flag. `default_cluster`, by name or as it is, stands in for an absent
// --cluster; without either, and without --model, that part of the result is
// empty.
Result<Inputs> ReadInputs(const Options& options,
                          std::string_view default_cluster = "");
Result<Inputs> ReadInputs(const Options& options, Cluster default_cluster);

// The rows of all files; of two with one key that of the later file. Nothing
// without files. `origins`, unless null, gets one of each.
Result<std::optional<ProfileDb>> ReadProfiles(
    const std::vector<std::string>& paths,
    std::vector<ProfileOrigin>* origins = nullptr);

// Adds a warning for each --profile that was measured on another host than this
// one, whose cores the inputs' cluster is.
void WarnOfOtherHosts(const Options& options, Inputs& inputs);

// Of predictions, where local-cpu:N is of more cores than this host has, and no
// profile says what ranks that share them take; else empty.
std::string FewerCoresText(const Options& options, const Inputs& inputs);

// Of a plan's task time, where most of it is analytical though there is a
// profile of the cluster's devices; else empty.
std::string UnmeasuredText(const SourceShares& sources, const Inputs& inputs);

// The plan of a file, if it is valid for `graph` on `cluster`. What was made
// for another cluster is, where that has the devices; a warning names both
// then.
Result<Plan> ReadPlanFor(const std::string& path, const Graph& graph,
                         const Cluster& cluster,
                         std::vector<std::string>& warnings);

// The plan of `inputs`, else data parallelism over the whole cluster.
Result<Plan> PlanOrDataParallel(const Inputs& inputs);

// Says that the plan leaves devices of the cluster without work; empty where it
// leaves none.
std::string IdleText(const Plan& plan, const Cluster& cluster);
// The same as a warning, which names the plan's file if `path` does.
void WarnOfIdle(const Plan& plan, Inputs& inputs, const std::string& path = "");

// A warning where the cluster's choice of collectives changes nothing of the
// plan.
void WarnOfIdleCollective(const Plan& plan, const TrainingOptions& training,
                          Inputs& inputs);

// A "tessera: warning: ..." line on standard error, unless the text is empty.
void PrintWarning(const std::string& text);
void PrintWarnings(const Inputs& inputs);

// An error unless a file can be written at `path`: asked before the work whose
// result it is to hold. Writes nothing.
Result<void> CheckWritable(const std::string& path, std::string_view flag);
// The same of a file that is written beside `path` and renamed: what is there
// must be a regular file.
Result<void> CheckReplaceable(const std::string& path, std::string_view flag);
// The same for a file of proto/, whose ending must be known.
Result<void> CheckProtoOutput(const std::string& path,
                              std::string_view flag = "-o");

// An error where a file that a flag writes is one that another flag reads or
// writes, or that it keeps beside its own or in its folder, but for what is
// meant to be replaced. `writes_plan`: -o is a plan.
Result<void> CheckPathsDiffer(const Options& options, bool writes_plan);

// An error for a --seq-len that the model has no use for.
Result<void> CheckLength(const Options& options);

// An error unless there is a file or folder at `path` that can be read.
Result<void> CheckReadable(const std::string& path);

// The same of a --model, which may also be one of the zoo.
Result<void> CheckModelReadable(const std::string& model);

}  // namespace tessera
