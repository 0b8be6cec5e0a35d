#pragma once
// Scenario: a model on a cluster as a command line gives them, with settings
// by path; and the Case that it makes: graph, cluster and strategy.
//
// Paths: the rows of Paths() ("nodes", "device.memory", "batch", …), a key of
// the model's config.json behind "model.", a key of the strategy behind
// "strategy.", and any field of a cluster file (planner/io/cluster_io.h), in
// which "device." stands for all "device_types[*]." and "link." for all
// "link_types[*].". A value is an Amount (planner/base/amount.h) or, for
// clusters, element types and strategies, a text.

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"
#include "planner/io/importer.h"
#include "planner/ir/cluster.h"
#include "planner/ir/graph.h"
#include "planner/plan/plan.h"
#include "planner/plan/strategy.h"

namespace tessera {

struct Setting {
  std::string path;
  std::string value;
  bool operator==(const Setting&) const = default;
};

struct PathRow {
  std::string_view name;
  std::string_view summary;
  std::string_view stands_for;  // a path of the cluster file, or empty
};
std::span<const PathRow> Paths();

// "PATH=VALUE" and "PATH=VALUE,VALUE,…", where a number without a unit has the
// unit of the next one.
Result<Setting> ParseSetting(std::string_view text);
// Keys of the config of `model`, "layers" or "num_hidden_layers" for paths, as
// overrides of its import. Errors name the key.
Result<void> SetModelKeys(const std::string& model,
                          std::span<const Setting> settings,
                          ImportOptions& import);
// Whether a path is of a field of the cluster: "device.", "link.", "fabric." or
// of the cluster's file, known or not.
bool IsClusterField(const std::string& path);
// Sets such fields, in order; `notes` has what did not apply. The result is
// valid (planner/ir/cluster.h). Errors name the path, and the field of a
// cluster file that it makes wrong, if that is another.
Result<void> SetClusterFields(std::span<const Setting> settings,
                              Cluster& cluster,
                              std::vector<std::string>& notes);
struct Axis {
  std::string path;
  std::vector<std::string> values;
};
// "PATH=VALUE,VALUE". What can be no value whatever the other settings are is
// an error: names that there are not, a strategy's or a count that is none.
Result<Axis> ParseAxis(std::string_view text);
// The path of the cluster file that `path` stands for, or `path`.
std::string FilePathOf(const std::string& path);

struct Scenario {
  std::string model;
  std::string cluster;
  int64_t global_batch = 0;
  int64_t seq_len = 0;
  std::optional<DType> dtype;
  // The token that ends a document, which keeps documents apart
  // (ImportOptions::documents); -1: there are none.
  int64_t end_of_text = -1;
  std::optional<Stack> stack;           // in place of the cluster's
  std::optional<std::string> strategy;  // degrees; dp follows where absent
  std::vector<Setting> settings;        // in order
  std::vector<std::string> failed;      // degrade.h
  std::vector<Setting> slow;            // part, factor
  // One of many with the same strategy: where a key of it has no effect, it is
  // dropped with a note (planner/plan/idle_keys.h), else that is an error.
  bool drops_idle_keys = false;
};

struct Case {
  Cluster cluster;
  // That before parts failed (costmodel/exchange_price.h); null where none did.
  std::shared_ptr<const Cluster> whole;
  // What failures left, of which `cluster` may be a part: the others stand by.
  // Null where nothing failed.
  std::shared_ptr<const Cluster> left;
  std::shared_ptr<const Graph> graph;  // differentiated
  std::shared_ptr<const GraphIndex> index;
  std::string strategy;            // with its settings
  bool degraded = false;           // parts failed: devices may stand by
  bool drops_idle_keys = false;    // as the scenario says
  std::vector<std::string> notes;  // what was done that a reader should know
};

// Models that several cases share. Thread-safe.
class ModelCache {
 public:
  struct Model {
    std::shared_ptr<const Graph> graph;
    std::shared_ptr<const GraphIndex> index;
    std::vector<std::string> warnings;  // ImportOptions::warnings
  };
  // The model of `key`, made on first use: who asks for another meanwhile does
  // not wait.
  template <typename Make>
  Result<Model> Get(const std::string& key, Make make) {
    Entry* entry = nullptr;
    {
      const std::lock_guard lock(mutex_);
      entry = &entries_[key];
    }
    const std::lock_guard lock(entry->mutex);
    if (!entry->model) {
      TESSERA_TRY(entry->model, make());
    }
    return *entry->model;
  }

 private:
  struct Entry {
    std::mutex mutex;
    std::optional<Model> model;
  };
  std::mutex mutex_;
  std::map<std::string, Entry> entries_;
};

// Errors: kInvalidInput and kNotFound where a setting is wrong; kInfeasible
// where the settings are well-formed but give no model (a width that the heads
// do not divide).
Result<Case> MakeCase(const Scenario& scenario, ModelCache& models);

// The plan of the case's strategy, with `dp` devices where it is absent. Where
// parts failed and what is left does not divide, the largest dp that does, on
// the first devices: the others stand by, and leave case.cluster. Errors are
// kInfeasible.
Result<Plan> PlanOf(Case& of);

// `text` with `key` of the strategy set to `value`.
std::string WithStrategyKey(const std::string& text, std::string_view key,
                            std::string_view value);

}  // namespace tessera
