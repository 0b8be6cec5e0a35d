#include "costmodel/whatif/scenario.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <map>
#include <optional>
#include <set>

#include "costmodel/collective/collective.h"
#include "costmodel/whatif/degrade.h"
#include "costmodel/whatif/fabric.h"
#include "planner/base/amount.h"
#include "planner/base/table.h"
#include "planner/io/cluster_io.h"
#include "planner/io/graph_io.h"
#include "planner/io/huggingface.h"
#include "planner/io/importer.h"
#include "planner/io/json_value.h"
#include "planner/io/onnx.h"
#include "planner/io/proto_endings.h"
#include "planner/ir/token_ids.h"
#include "planner/plan/idle_keys.h"
#include "planner/search/idle_in_plan.h"
#include "planner/topology/stacks.h"
#include "planner/topology/topologies.h"

namespace tessera {
namespace {

constexpr std::array kPaths = {
    PathRow{"cluster", "a preset or a cluster file", ""},
    PathRow{"nodes", "nodes; more than a file has are copies of its own", ""},
    PathRow{"gpus", "devices of each node of the preset", ""},
    PathRow{"stack", "the software: a name of 'tessera list stacks'", ""},
    PathRow{"batch", "sequences of one step", ""},
    PathRow{"seq", "tokens of a sequence", ""},
    PathRow{"dtype", "of parameters and activations", ""},
    PathRow{"model.layers", "num_hidden_layers, n_layer or num_layers", ""},
    PathRow{"model.hidden", "hidden_size, n_embd or d_model", ""},
    PathRow{"model.heads", "num_attention_heads, n_head or num_heads", ""},
    PathRow{"model.vocab", "vocab_size", ""},
    PathRow{"model.KEY", "a key of the model's config.json", ""},
    PathRow{"strategy.KEY", "a key of --strategy, such as strategy.tp", ""},
    PathRow{"device.memory", "memory of a device", "device_types[*].memory"},
    PathRow{"device.bandwidth", "of a device's memory",
            "device_types[*].memory_bandwidth"},
    PathRow{"device.flops",
            "peak of 16-bit matrix products; other types change with it", ""},
    PathRow{"device.launch", "the least time of a kernel",
            "device_types[*].launch_overhead"},
    PathRow{"device.price", "USD per device-hour",
            "device_types[*].upkeep.price"},
    PathRow{"device.power", "watts of a device",
            "device_types[*].upkeep.power"},
    PathRow{"device.mtbf", "mean time between failures of a device",
            "device_types[*].upkeep.mtbf"},
    PathRow{"host.memory", "memory of a node beside its devices",
            "host[*].memory"},
    PathRow{"host.memory_bandwidth", "of that memory",
            "host[*].memory_bandwidth"},
    PathRow{"host.device_link", "between a device and that memory",
            "host[*].device_link"},
    PathRow{"host.storage", "room for files of a node", "host[*].storage"},
    PathRow{"host.storage_read", "of these files", "host[*].storage_read"},
    PathRow{"host.storage_write", "of these files", "host[*].storage_write"},
    PathRow{"fabric.intra.bandwidth", "NVLink, or PCIe where there is none",
            ""},
    PathRow{"fabric.intra.latency",
            "the same, with the time that collectives take to start", ""},
    PathRow{"fabric.pcie.bandwidth", "links to bridges, hosts and NICs", ""},
    PathRow{"fabric.pcie.latency",
            "the same, with the time that collectives take to start", ""},
    PathRow{"fabric.inter.bandwidth", "of a NIC; trunks change with it", ""},
    PathRow{"fabric.inter.latency",
            "the same, with the time that collectives take to start", ""},
};

constexpr std::string_view kModelPrefix = "model.";
constexpr std::string_view kStrategyPrefix = "strategy.";

bool IsText(std::string_view path) {
  return path == "cluster" || path == "dtype" || path == "stack" ||
         path == "collective" || path.starts_with(kStrategyPrefix);
}

// That `value` is one of those which such a path can have.
Result<void> CheckText(std::string_view path, const std::string& value) {
  if (path == "cluster") {
    if (auto found = LoadCluster(value); !found) return found.error();
  } else if (path == "dtype") {
    TESSERA_RETURN_IF_ERROR(ParseParameterType(value));
  } else if (path == "stack") {
    TESSERA_RETURN_IF_ERROR(ParseStack(value));
  } else if (path == "collective") {
    TESSERA_RETURN_IF_ERROR(ParseCollectiveChoice(value));
  } else if (path.starts_with(kStrategyPrefix)) {
    // What a key needs of others is not asked.
    const std::string key(path.substr(kStrategyPrefix.size()));
    const auto read = ReadStrategy(key + "=" + value);
    if (!read) return InvalidInput(read.error().message);
  }
  return {};
}

// That `value` can be one of what any model has so many of.
Result<void> CheckCount(std::string_view path, const Amount& value) {
  if (!path.starts_with(kModelPrefix) ||
      std::ranges::find(ModelAliases(), path.substr(kModelPrefix.size()),
                        &ModelAlias::name) == ModelAliases().end()) {
    return {};
  }
  const bool factor = value.dimension == Dimension::kFactor;
  const bool number = value.dimension == Dimension::kNumber;
  if (factor ? value.value > 0
             : number && value.value >= 1 &&
                   value.value == std::floor(value.value)) {
    return {};
  }
  return InvalidInput("'" + value.text +
                      "' is not a whole number of at least 1, nor a factor "
                      "such as 2x");
}

// What settings build up before there is a cluster or a model.
struct Draft {
  std::string cluster;
  std::optional<int64_t> nodes;
  std::optional<int64_t> gpus;
  int64_t global_batch = 0;
  int64_t seq_len = 0;
  std::optional<DType> dtype;
  std::vector<Setting> model;
  std::string strategy;
  std::optional<Stack> stack;
  std::vector<Setting> fields;  // of the cluster
};

Result<int64_t> WholeNumber(const Setting& setting, double most) {
  TESSERA_TRY(const Amount amount, ParseAmount(setting.value));
  if (amount.dimension != Dimension::kNumber || amount.value < 1 ||
      amount.value > most || amount.value != std::floor(amount.value)) {
    return InvalidInput("'" + setting.value +
                        "' is not a whole number of at least 1 (and at most " +
                        std::to_string(static_cast<int64_t>(most)) + ")");
  }
  return static_cast<int64_t>(amount.value);
}

Error UnknownPath(std::string_view path) {
  std::vector<std::string> all;
  for (const PathRow& row : kPaths) all.emplace_back(row.name);
  for (std::string field : ClusterFieldPaths()) all.push_back(std::move(field));
  const std::vector<std::string_view> known(all.begin(), all.end());
  // The whole list is long; 'tessera list paths' prints it.
  const std::string nearest = NearestName(path, known);
  std::string message = "unknown path '" + std::string(path) + "'";
  if (!nearest.empty()) message += "; did you mean '" + nearest + "'?";
  message += nearest.empty() ? "; known: " : " known: ";
  for (const PathRow& row : kPaths) message += std::string(row.name) + ", ";
  message += "and the fields of a cluster file ('tessera list paths')";
  return {ErrorCode::kNotFound, message, ""};
}

constexpr double kMostSamples = 2147483648.0;
constexpr double kMostSlow = 1000;

Result<void> Apply(const Setting& setting, Draft& draft) {
  const std::string& path = setting.path;
  if (path == "cluster") {
    draft.cluster = setting.value;
  } else if (path == "nodes") {
    TESSERA_TRY(draft.nodes, WholeNumber(setting, kMostNodes));
  } else if (path == "gpus") {
    TESSERA_TRY(draft.gpus, WholeNumber(setting, kMostNodes));
  } else if (path == "batch") {
    TESSERA_TRY(draft.global_batch, WholeNumber(setting, kMostSamples));
  } else if (path == "seq") {
    TESSERA_TRY(draft.seq_len, WholeNumber(setting, kMostSamples));
  } else if (path == "dtype") {
    TESSERA_TRY(draft.dtype, ParseParameterType(setting.value));
  } else if (path == "stack") {
    TESSERA_TRY(draft.stack, ParseStack(setting.value));
  } else if (path.starts_with(kModelPrefix)) {
    draft.model.push_back({path.substr(kModelPrefix.size()), setting.value});
  } else if (path.starts_with(kStrategyPrefix)) {
    const std::string key = path.substr(kStrategyPrefix.size());
    draft.strategy = WithStrategyKey(draft.strategy, key, setting.value);
  } else {
    draft.fields.push_back(setting);
  }
  return {};
}

// "NAME[:NODES[xGPUS]][@NETWORK]" with other counts. REQUIRES: no mixture.
std::string WithCounts(const Draft& draft) {
  const size_t at = std::min(draft.cluster.find('@'), draft.cluster.size());
  const std::string machine = draft.cluster.substr(0, at);
  const size_t colon = machine.find(':');
  std::string nodes = "1";
  std::string gpus;
  if (colon != std::string::npos) {
    const std::string counts = machine.substr(colon + 1);
    const size_t x = counts.find('x');
    nodes = counts.substr(0, x);
    if (x != std::string::npos) gpus = counts.substr(x + 1);
  }
  if (draft.nodes) nodes = std::to_string(*draft.nodes);
  if (draft.gpus) gpus = std::to_string(*draft.gpus);
  return machine.substr(0, colon) + ":" + nodes +
         (gpus.empty() ? "" : "x" + gpus) + draft.cluster.substr(at);
}

std::string NodesText(const Cluster& cluster) {
  const int nodes = cluster.num_nodes();
  return std::to_string(nodes) + (nodes == 1 ? " node" : " nodes");
}

Result<Cluster> LoadFor(const Draft& draft, std::vector<std::string>& notes) {
  if (!HasProtoFileEnding(draft.cluster)) {
    if (!draft.nodes && !draft.gpus) return LoadCluster(draft.cluster);
    if (draft.cluster.find('+') != std::string::npos) {
      return InvalidInput("the nodes of '" + draft.cluster +
                              "' are unlike: expected their numbers in the "
                              "cluster's name alone",
                          draft.nodes ? "nodes" : "gpus");
    }
    return LoadCluster(WithCounts(draft));
  }
  TESSERA_TRY(Cluster cluster, LoadCluster(draft.cluster));
  if (draft.gpus) {
    return InvalidInput("'" + draft.cluster +
                            "' is a file, whose devices are all listed; name a "
                            "preset instead",
                        "gpus");
  }
  if (!draft.nodes) return cluster;
  const int own = cluster.num_nodes();
  if (*draft.nodes == own) return cluster;
  // By its name a plan tells whether it was made for the cluster.
  const auto named = [&](Cluster other) {
    other.name = cluster.name + " with " + NodesText(other);
    return other;
  };
  if (*draft.nodes > own) {
    auto larger = WithMoreNodes(cluster, static_cast<int>(*draft.nodes));
    if (!larger) return larger.error().At(draft.cluster).At("nodes");
    notes.push_back("nodes from " + std::to_string(own) +
                    " on are copies of those of the file, on their switches; "
                    "links between switches stay as they are");
    return named(*std::move(larger));
  }
  const auto devices = std::ranges::count_if(
      cluster.devices, [&](const Device& d) { return d.node < *draft.nodes; });
  Cluster fewer = FirstDevices(cluster, static_cast<size_t>(devices));
  // What was valid can have lost only its ways.
  if (!Validate(fewer).empty()) {
    return InvalidInput("the first " + NodesText(fewer) + " of '" +
                            draft.cluster +
                            "' reach each other only by way of others",
                        "nodes");
  }
  return named(std::move(fewer));
}

Result<void> ApplyFabric(const Setting& setting, Cluster& cluster,
                         std::vector<std::string>& notes) {
  const size_t dot = setting.path.rfind('.');
  const std::string name = setting.path.substr(0, dot);
  const auto row = std::ranges::find(LinkClasses(), name, &LinkClassRow::name);
  const std::string field =
      dot == std::string::npos ? "" : setting.path.substr(dot + 1);
  const bool bandwidth = field == "bandwidth";
  if (row == LinkClasses().end() || (!bandwidth && field != "latency")) {
    return UnknownPath(setting.path);
  }
  TESSERA_TRY(const Amount amount, ParseAmount(setting.value));
  const Dimension wanted = bandwidth ? Dimension::kBandwidth : Dimension::kTime;
  if (!IsOf(amount, wanted) && amount.dimension != Dimension::kFactor) {
    return InvalidInput("'" + setting.value + "' is not " +
                        std::string(Expected(wanted)));
  }
  if (bandwidth ? !(amount.value > 0) : !(amount.value >= 0)) {
    return InvalidInput("'" + setting.value + "' is " +
                        (bandwidth ? "not positive" : "negative"));
  }
  const auto reference = ReferenceLink(cluster, row->link_class);
  if (!reference) {
    notes.push_back(setting.path + ": the cluster of " + NodesText(cluster) +
                    " has no such links");
    return {};
  }
  double factor = amount.value;
  if (amount.dimension != Dimension::kFactor) {
    const double before =
        bandwidth ? reference->bandwidth.value : reference->latency.seconds();
    if (amount.value > 0 && !(before > 0)) {
      return InvalidInput("is 0 and cannot be scaled; set link." + field);
    }
    factor = amount.value > 0 ? amount.value / before : 0;
  }
  if (!std::isfinite(factor)) {
    return InvalidInput("'" + setting.value + "' is out of range");
  }
  ScaleLinks(row->link_class, bandwidth ? factor : 1, bandwidth ? 1 : factor,
             cluster);
  return {};
}

Result<void> ApplyFlops(const Setting& setting, Cluster& cluster) {
  TESSERA_TRY(const Amount amount, ParseAmount(setting.value));
  if (!IsOf(amount, Dimension::kFlops) &&
      amount.dimension != Dimension::kFactor) {
    return InvalidInput("'" + setting.value + "' is not " +
                        std::string(Expected(Dimension::kFlops)));
  }
  if (!(amount.value > 0)) {
    return InvalidInput("'" + setting.value + "' is not positive");
  }
  for (DeviceType& type : cluster.device_types) {
    double factor = amount.value;
    if (amount.dimension == Dimension::kFlops) {
      const FlopsPerSecond half = std::max(type.peak_bf16, type.peak_fp16);
      factor /= half.value > 0 ? half.value : type.peak_fp32.value;
    }
    ScalePeaks(factor, type);
  }
  return {};
}

// What a change has made wrong: the field is said in the message, as it is
// another than what was changed.
Result<void> CheckChanged(const Cluster& cluster) {
  const auto checked = CheckCluster(cluster);
  if (checked) return {};
  return Error{checked.error().code, checked.error().ToString(), ""};
}

Result<void> ApplyField(const Setting& setting, Cluster& cluster,
                        std::vector<std::string>& notes) {
  if (setting.path.starts_with("fabric.")) {
    TESSERA_RETURN_IF_ERROR(ApplyFabric(setting, cluster, notes));
    return CheckChanged(cluster);
  }
  if (setting.path == "device.flops") {
    TESSERA_RETURN_IF_ERROR(ApplyFlops(setting, cluster));
    return CheckChanged(cluster);
  }
  TESSERA_TRY(const Amount amount, ParseAmount(setting.value));
  const FieldValue field = {FilePathOf(setting.path), amount};
  if (field.path.starts_with("host[") && cluster.hosts.empty()) {
    return InvalidInput("the cluster has no figures of its hosts");
  }
  auto changed = WithFields(cluster, {&field, 1});
  if (!changed) {
    Error error = changed.error();
    if (error.code == ErrorCode::kNotFound &&
        setting.path.find('[') == std::string::npos) {
      return UnknownPath(setting.path);
    }
    // Another place than the path's is said, too.
    if (error.where != field.path) {
      error.message = "'" + setting.value + "' gives " + error.ToString();
    }
    return Error{error.code, error.message, ""};
  }
  if (!std::ranges::equal(cluster.link_types, changed->link_types, {},
                          &LinkType::slowness, &LinkType::slowness)) {
    notes.push_back(setting.path +
                    ": changes only collectives that a --profile has the time "
                    "of; link.bandwidth changes the others, and --slow both");
  }
  if (amount.value == 0 && field.path.find(".upkeep.") != std::string::npos) {
    notes.push_back(setting.path + ": 0 stands for a figure that is not known");
  }
  cluster = *std::move(changed);
  return {};
}

// ---- model ----------------------------------------------------------------

// A list, an object or null, as in JSON; nothing where the text is none of
// them.
Result<std::optional<JsonValue>> AsJson(const std::string& text) {
  if (text != "null" && !text.starts_with('[') && !text.starts_with('{')) {
    return std::optional<JsonValue>();
  }
  const auto object = ParseJson("{\"value\": " + text + "}");
  if (!object || object->fields.size() != 1) {
    return InvalidInput("'" + text + "' is not a value of JSON such as [1, 2]");
  }
  return std::optional<JsonValue>(object->Field("value"));
}

// The config's name of what a setting may call as any family does.
std::string KeyOf(const std::string& path, const JsonValue& config) {
  std::string key = path;
  for (const ModelAlias& alias : ModelAliases()) {
    if (alias.name != path) continue;
    for (const std::string_view candidate : alias.keys) {
      if (config.fields.contains(candidate)) key = candidate;
    }
  }
  return key;
}

Result<void> ResolveModel(const Setting& setting, const std::string& key,
                          const JsonValue& config, ImportOptions& import) {
  TESSERA_TRY(const auto json, AsJson(setting.value));
  if (json) {
    import.overrides[key] = *json;
    return {};
  }
  TESSERA_TRY(const Amount amount, ParseAmount(setting.value));
  const JsonValue& before = config.Field(key);
  JsonValue value;
  switch (amount.dimension) {
    case Dimension::kNumber:
      value.kind = JsonValue::Kind::kNumber;
      value.number = amount.value;
      break;
    case Dimension::kFactor:
      if (before.kind != JsonValue::Kind::kNumber) {
        return InvalidInput("is " + before.ToString() + ", not a number");
      }
      value.kind = JsonValue::Kind::kNumber;
      value.number = before.number * amount.value;
      // Layers and heads are counted; rates are not.
      if (before.number == std::floor(before.number)) {
        value.number = std::round(value.number);
      }
      break;
    case Dimension::kText:
      if (amount.text == "true" || amount.text == "false") {
        value.kind = JsonValue::Kind::kBool;
        value.boolean = amount.text == "true";
      } else {
        value.kind = JsonValue::Kind::kString;
        value.text = amount.text;
      }
      break;
    default:
      return InvalidInput("'" + setting.value + "' is not " +
                          std::string(Expected(Dimension::kNumber)));
  }
  import.overrides[key] = std::move(value);
  return {};
}

}  // namespace

Result<void> SetModelKeys(const std::string& model,
                          std::span<const Setting> settings,
                          ImportOptions& import) {
  if (settings.empty()) return {};
  if (IsGraphFile(model)) {
    return InvalidInput("a graph file has no keys to set", model);
  }
  JsonValue config;  // an ONNX file has sizes by symbols, and no defaults
  if (!IsOnnx(model)) {
    TESSERA_TRY(config, ReadModelConfig(model));
  }
  std::map<std::string, std::string> set_by;  // of the config's keys
  for (const Setting& setting : settings) {
    const std::string key = KeyOf(setting.path, config);
    const auto [first, is_new] = set_by.emplace(key, setting.path);
    if (!is_new) {
      return InvalidInput(
          "'" + key + "' is given twice, by model." + first->second + " too",
          "model." + setting.path);
    }
    auto resolved = ResolveModel(setting, key, config, import);
    if (!resolved) return resolved.error().At("model." + setting.path);
  }
  return {};
}

namespace {

// `otherwise` is the dtype of a model that has none of its own, where none is
// asked for.
Result<ModelCache::Model> ImportFor(const Scenario& scenario,
                                    const Draft& draft, DType otherwise,
                                    ModelCache& models) {
  ImportOptions import = {.global_batch = draft.global_batch,
                          .seq_len = draft.seq_len,
                          .dtype = draft.dtype,
                          .documents = scenario.end_of_text >= 0};
  const bool graph_file = IsGraphFile(scenario.model);
  if (!graph_file && !import.dtype) import.dtype = otherwise;
  TESSERA_RETURN_IF_ERROR(SetModelKeys(scenario.model, draft.model, import));
  std::string key = scenario.model + "|" + std::to_string(import.global_batch) +
                    "|" + std::to_string(import.seq_len) + "|" +
                    (import.dtype ? std::string(NameOf(*import.dtype)) : "");
  for (const auto& [name, value] : import.overrides) {
    key += "|" + name + "=" + value.ToString();
  }
  return models.Get(key, [&]() -> Result<ModelCache::Model> {
    const auto not_possible = [&](Error error) {
      // But for a key that there is not.
      if (!import.overrides.empty() && error.code != ErrorCode::kNotFound) {
        error.code = ErrorCode::kInfeasible;
      }
      return error;
    };
    ModelCache::Model model;
    import.warnings = &model.warnings;
    auto forward = ImportModel(scenario.model, import);
    if (!forward) return not_possible(forward.error());
    auto graph = Differentiate(*std::move(forward));
    if (!graph) return not_possible(graph.error().At(scenario.model));
    model.graph = std::make_shared<const Graph>(*std::move(graph));
    model.index = std::make_shared<const GraphIndex>(*model.graph);
    return model;
  });
}

Error Infeasible(Error error) {
  error.code = ErrorCode::kInfeasible;
  return error;
}

// The plan of the case's strategy on a cluster of its own, without idle keys
// where the case may drop them; then it has the notes of that.
Result<Plan> PlanOn(const Cluster& cluster, const Strategy& strategy,
                    Case& of) {
  if (!of.drops_idle_keys) {
    auto plan = PlanFromStrategy(*of.index, cluster, strategy);
    if (!plan) return plan;
    const auto idle = FirstIdleIn(*of.index, cluster, strategy, *plan);
    if (idle) return IdleError(*idle);
    return plan;
  }
  std::vector<std::string> notes;
  const Strategy without = WithoutIdleKeys(*of.index, cluster, strategy, notes);
  if (const auto idle = FirstIdleKey(without)) {
    return InvalidInput("has no effect: " + idle->why, idle->key);
  }
  auto plan = PlanFromStrategy(*of.index, cluster, without);
  if (!plan) return plan;
  if (const auto idle = FirstIdleIn(*of.index, cluster, without, *plan)) {
    notes.push_back(IdleNote(*idle));
  }
  of.notes.insert(of.notes.end(), notes.begin(), notes.end());
  return plan;
}

}  // namespace

std::span<const PathRow> Paths() {
  return kPaths;
}

std::string FilePathOf(const std::string& path) {
  const auto row = std::ranges::find(kPaths, path, &PathRow::name);
  if (row != kPaths.end() && !row->stands_for.empty()) {
    return std::string(row->stands_for);
  }
  for (const auto& [from, to] :
       {std::pair<std::string_view, std::string_view>{"device", "device_types"},
        {"link", "link_types"}}) {
    if (path.starts_with(std::string(from) + ".") ||
        path.starts_with(std::string(from) + "[")) {
      return std::string(to) + path.substr(from.size());
    }
  }
  return path;
}

Result<Setting> ParseSetting(std::string_view text) {
  const size_t equals = text.find('=');
  if (equals == 0 || equals == std::string_view::npos ||
      equals + 1 == text.size()) {
    return InvalidInput("'" + std::string(text) + "' is not PATH=VALUE");
  }
  return Setting{std::string(text.substr(0, equals)),
                 std::string(text.substr(equals + 1))};
}

bool IsClusterField(const std::string& path) {
  return !path.starts_with(kModelPrefix) &&
         !path.starts_with(kStrategyPrefix) &&
         std::ranges::none_of(
             std::array{"cluster", "nodes", "gpus", "stack", "batch", "seq",
                        "dtype"},
             [&](std::string_view name) { return path == name; });
}

Result<void> SetClusterFields(std::span<const Setting> settings,
                              Cluster& cluster,
                              std::vector<std::string>& notes) {
  for (const Setting& setting : settings) {
    if (auto done = ApplyField(setting, cluster, notes); !done) {
      return done.error().At(setting.path);
    }
  }
  if (auto choice = ParseCollectiveChoice(cluster.collective); !choice) {
    return choice.error().At("collective");
  }
  return {};
}

Result<Axis> ParseAxis(std::string_view text) {
  TESSERA_TRY(const Setting setting, ParseSetting(text));
  Axis axis = {setting.path, {}};
  if (IsText(setting.path)) {
    std::string word;
    for (const char c : setting.value + ",") {
      if (c != ',') {
        word += c;
        continue;
      }
      if (word.empty()) return InvalidInput("a value is empty", setting.path);
      if (auto is_name = CheckText(setting.path, word); !is_name) {
        return is_name.error().At(setting.path);
      }
      axis.values.push_back(std::move(word));
      word.clear();
    }
  } else {
    auto amounts = ParseAmounts(setting.value);
    if (!amounts) return amounts.error().At(setting.path);
    for (const Amount& amount : *amounts) {
      if (auto is_count = CheckCount(setting.path, amount); !is_count) {
        return is_count.error().At(setting.path);
      }
      axis.values.push_back(amount.text);
    }
  }
  const std::set<std::string> distinct(axis.values.begin(), axis.values.end());
  if (distinct.size() < axis.values.size()) {
    return InvalidInput("a value is given twice", setting.path);
  }
  return axis;
}

Result<Case> MakeCase(const Scenario& scenario, ModelCache& models) {
  Draft draft;
  draft.cluster = scenario.cluster;
  draft.global_batch = scenario.global_batch;
  draft.seq_len = scenario.seq_len;
  draft.dtype = scenario.dtype;
  draft.strategy = scenario.strategy.value_or("");
  for (const Setting& setting : scenario.settings) {
    if (auto done = Apply(setting, draft); !done) {
      return done.error().At(setting.path);
    }
  }
  Case made;
  made.strategy = draft.strategy;
  TESSERA_TRY(made.cluster, LoadFor(draft, made.notes));
  if (auto choice = ParseCollectiveChoice(made.cluster.collective); !choice) {
    return choice.error().At("collective").At(draft.cluster);
  }
  // By the cluster as it is named: another rate of a device leaves the numbers
  // what they are.
  const DType dtype = DefaultDType(made.cluster);
  if (scenario.stack) made.cluster.stack = *scenario.stack;
  if (draft.stack) made.cluster.stack = *draft.stack;
  TESSERA_RETURN_IF_ERROR(
      SetClusterFields(draft.fields, made.cluster, made.notes));
  for (const Setting& slow : scenario.slow) {
    TESSERA_TRY(const Amount factor, ParseAmount(slow.value));
    if (factor.dimension != Dimension::kFactor || !(factor.value > 0) ||
        factor.value > kMostSlow) {
      return InvalidInput("'" + slow.value + "' is not " +
                              std::string(Expected(Dimension::kFactor)) +
                              ", at most 1000x",
                          slow.path);
    }
    TESSERA_RETURN_IF_ERROR(SlowDown(slow.path, factor.value, made.cluster));
    if (auto checked = CheckChanged(made.cluster); !checked) {
      return checked.error().At(slow.path);
    }
  }
  made.degraded = !scenario.failed.empty();
  if (made.degraded) {
    auto whole = std::make_shared<Cluster>();
    TESSERA_RETURN_IF_ERROR(
        Fail(scenario.failed, made.cluster, made.notes, whole.get()));
    made.whole = std::move(whole);
    made.left = std::make_shared<const Cluster>(made.cluster);
  }
  made.drops_idle_keys = scenario.drops_idle_keys;
  TESSERA_TRY(const ModelCache::Model model,
              ImportFor(scenario, draft, dtype, models));
  made.graph = model.graph;
  made.index = model.index;
  if (scenario.end_of_text >= 0) {
    TESSERA_RETURN_IF_ERROR(CheckEndOfText(*made.graph, scenario.end_of_text));
  }
  made.notes.insert(made.notes.end(), model.warnings.begin(),
                    model.warnings.end());
  for (const DeviceType& type : made.cluster.device_types) {
    if (type.Peak(made.graph->dtype).value > 0) continue;
    return Error{ErrorCode::kInfeasible,
                 "device type '" + type.name + "' does not compute in " +
                     std::string(NameOf(made.graph->dtype)),
                 "dtype"};
  }
  return made;
}

Result<Plan> PlanOf(Case& of) {
  const auto parsed = of.drops_idle_keys ? ReadStrategy(of.strategy)
                                         : ParseStrategy(of.strategy);
  if (!parsed) return Infeasible(parsed.error().At("strategy"));
  const Strategy& strategy = *parsed;
  auto plan = PlanOn(of.cluster, strategy, of);
  if (plan) return plan;
  if (!of.degraded || strategy.dp > 0) return Infeasible(plan.error());
  size_t replica = 1;
  for (int degree : {strategy.tp, strategy.pp, strategy.cp, strategy.ep}) {
    replica *= static_cast<size_t>(degree);
    if (replica > of.cluster.devices.size()) return Infeasible(plan.error());
  }
  // Most numbers of replicas do not share the batch evenly, whatever it is that
  // a strategy without mbs takes; no cluster is made for them.
  const int64_t of_each = int64_t{strategy.ep} * std::max(strategy.mbs, 1);
  for (size_t dp = of.cluster.devices.size() / replica; dp > 0; --dp) {
    if (of.graph->global_batch % (static_cast<int64_t>(dp) * of_each) != 0) {
      continue;
    }
    Cluster used = FirstDevices(of.cluster, dp * replica);
    // They may reach each other only by way of those that would stand by.
    if (!Validate(used).empty()) continue;
    auto smaller = PlanOn(used, strategy, of);
    if (!smaller) continue;
    const size_t spare = of.cluster.devices.size() - used.devices.size();
    of.notes.push_back("dp=" + std::to_string(dp) +
                       " is the most that is left; " + std::to_string(spare) +
                       " devices stand by, and are paid for");
    of.cluster = std::move(used);
    return smaller;
  }
  return Infeasible(plan.error());
}

std::string WithStrategyKey(const std::string& text, std::string_view key,
                            std::string_view value) {
  // "offload=a:b,c:d" has commas of its own: what has no '=' goes with the key
  // before it.
  std::vector<std::string> entries;
  std::string word;
  for (const char c : text + ",") {
    if (c != ',') {
      word += c;
      continue;
    }
    if (word.find('=') == std::string::npos && !entries.empty()) {
      entries.back() += "," + word;
    } else if (!word.empty()) {
      entries.push_back(word);
    }
    word.clear();
  }
  std::erase_if(entries, [&](const std::string& entry) {
    return entry.substr(0, entry.find('=')) == key;
  });
  entries.push_back(std::string(key) + "=" + std::string(value));
  std::string joined;
  for (const std::string& entry : entries) {
    joined += (joined.empty() ? "" : ",") + entry;
  }
  return joined;
}

}  // namespace tessera
