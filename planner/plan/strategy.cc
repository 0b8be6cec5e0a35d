#include "planner/plan/strategy.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <set>

#include "planner/base/amount.h"
#include "planner/base/append.h"
#include "planner/base/format.h"
#include "planner/base/split.h"
#include "planner/base/table.h"
#include "planner/plan/axis_roles.h"
#include "planner/plan/idle_keys.h"
#include "planner/plan/stages.h"
#include "planner/plan/strategy_text.h"
#include "planner/plan/tiles.h"
#include "planner/plan/used_part.h"
#include "planner/schedule/action_table.h"

namespace tessera {
namespace {

// No cluster has as many devices, no batch as many samples, no model as many
// blocks.
constexpr int kMostDegree = 1 << 24;

// A whole number within [least, most]; `supported` says what would do, but for
// a limit as large as kMostDegree.
Result<int> ReadNumber(std::string_view value, int least, int most,
                       std::string_view supported) {
  int64_t number = 0;
  const auto [end, status] =
      std::from_chars(value.data(), value.data() + value.size(), number);
  const bool whole =
      end == value.data() + value.size() && !value.empty() &&
      (status == std::errc() || status == std::errc::result_out_of_range);
  const bool too_large =
      whole && value[0] != '-' && (status != std::errc() || number > most);
  if (too_large && most == kMostDegree) {
    return InvalidInput("is '" + std::string(value) + "': expected at most " +
                        std::to_string(most));
  }
  if (!whole || too_large || status != std::errc() || number < least) {
    return InvalidInput("is '" + std::string(value) + "': expected " +
                        std::string(supported));
  }
  return static_cast<int>(number);
}

template <int Strategy::*kField>
Result<void> ReadDegree(std::string_view value, Strategy& strategy) {
  TESSERA_TRY(strategy.*kField,
              ReadNumber(value, 1, kMostDegree, "a whole number from 1"));
  return {};
}

template <int Strategy::*kField>
std::string NumberText(const Strategy& strategy) {
  return strategy.*kField == Strategy().*kField
             ? ""
             : std::to_string(strategy.*kField);
}

Result<void> ReadZero(std::string_view value, Strategy& strategy) {
  TESSERA_TRY(strategy.zero, ReadNumber(value, 0, 3, "0, 1, 2 or 3"));
  return {};
}

// The index of a value among the names that a key takes.
Result<size_t> ReadName(std::string_view key, std::string_view value,
                        std::span<const std::string_view> names) {
  const auto found = std::ranges::find(names, value);
  if (found == names.end()) return UnknownName(key, value, names);
  return static_cast<size_t>(found - names.begin());
}

Result<void> ReadDataParallelKind(std::string_view value, Strategy& strategy) {
  // In the order of DataParallelKind.
  static constexpr std::string_view kNames[] = {"ddp", "rooted"};
  TESSERA_TRY(const size_t kind, ReadName("dp-kind", value, kNames));
  strategy.dp_kind = static_cast<DataParallelKind>(kind);
  return {};
}

Result<void> ReadZeroGroup(std::string_view value, Strategy& strategy) {
  if (value == "node") {
    strategy.zero_group = Strategy::kWithinNode;
    return {};
  }
  TESSERA_TRY(strategy.zero_group,
              ReadNumber(value, 1, kMostDegree,
                         "a whole number of ranks from 1, or node"));
  return {};
}

std::string ZeroGroupText(const Strategy& strategy) {
  return strategy.zero_group == Strategy::kWithinNode
             ? "node"
             : NumberText<&Strategy::zero_group>(strategy);
}

Result<void> ReadBucket(std::string_view value, Strategy& strategy) {
  constexpr double kMost = 1e15;  // no model has as many bytes
  const auto size = ParseAmount(value);
  const auto letter = [](char c) {
    return std::isalpha(static_cast<unsigned char>(c)) != 0;
  };
  const auto end =
      std::ranges::find_if_not(value.rbegin(), value.rend(), letter);
  const std::string_view unit(end.base(), value.end());
  if (!size && !unit.empty() && unit != value) {
    constexpr std::array<std::string_view, 9> kUnits = {
        "B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"};
    return UnknownName("unit", unit, kUnits);
  }
  const bool is_size =
      size &&
      (size->dimension == Dimension::kBytes ||
       (size->dimension == Dimension::kNumber && !value.ends_with('%')));
  if (!is_size || size->value < 0 || size->value > kMost ||
      size->value != std::floor(size->value)) {
    return InvalidInput("is '" + std::string(value) +
                        "': expected a size such as 25MB (B, kB, MB, GB, KiB, "
                        "MiB or GiB), or 0 for one bucket for each block");
  }
  strategy.bucket = {static_cast<int64_t>(size->value)};
  return {};
}

std::string BucketText(const Strategy& strategy) {
  return strategy.bucket == Bytes{} ? ""
                                    : FormatExactBytes(strategy.bucket, "");
}

Result<void> ReadPrefetch(std::string_view value, Strategy& strategy) {
  TESSERA_TRY(strategy.prefetch,
              ReadNumber(value, 0, kMostDegree, "a whole number of blocks"));
  return {};
}

Result<void> ReadTiles(std::string_view value, Strategy& strategy) {
  TESSERA_TRY(strategy.tiles, ReadNumber(value, 1, kMostTiles,
                                         "a whole number from 1 to " +
                                             std::to_string(kMostTiles)));
  return {};
}

struct OffloadRow {
  std::string_view name;
  MemoryTier Strategy::*tier;
};
constexpr std::array kOffloads = {
    OffloadRow{"optimizer", &Strategy::optimizer_tier},
    OffloadRow{"parameters", &Strategy::parameter_tier},
    OffloadRow{"gradients", &Strategy::gradient_tier},
    OffloadRow{"activations", &Strategy::activation_tier},
};

// "optimizer:host,parameters:file:/mnt/nvme".
Result<void> ReadOffload(std::string_view value, Strategy& strategy) {
  if (value == "none") return {};
  for (std::string_view item : Split(value, ',')) {
    const size_t colon = item.find(':');
    const auto row = Find("offload", std::span<const OffloadRow>(kOffloads),
                          item.substr(0, colon));
    if (!row) return InvalidInput(row.error().message);
    if (colon == std::string_view::npos) {
      return InvalidInput("'" + std::string(item) +
                          "' lacks its tier: expected :host or :file");
    }
    std::string_view tier = item.substr(colon + 1);
    std::string_view directory;
    if (const size_t end = tier.find(':'); end != std::string_view::npos) {
      directory = tier.substr(end + 1);
      tier = tier.substr(0, end);
    }
    auto found = FindMemoryTier(tier);
    if (!found) return found.error().At((*row)->name);
    if (strategy.*(*row)->tier != MemoryTier::kDevice) {
      return InvalidInput(std::string((*row)->name) + " is given twice");
    }
    if ((*row)->tier == &Strategy::gradient_tier &&
        *found == MemoryTier::kFile) {
      return InvalidInput("'" + std::string(item) +
                          "': gradients wait on the device or the host");
    }
    strategy.*(*row)->tier = *found;
    if (directory.empty()) continue;
    if (*found != MemoryTier::kFile) {
      return InvalidInput("'" + std::string(item) +
                          "': only the file tier has a directory");
    }
    if (!strategy.offload_directory.empty() &&
        strategy.offload_directory != directory) {
      return InvalidInput("names two directories, " +
                          strategy.offload_directory + " and " +
                          std::string(directory) + ": expected one");
    }
    strategy.offload_directory = std::string(directory);
  }
  return {};
}

// "optimizer:host,parameters:file"; empty where all is on the devices.
std::string OffloadText(const Strategy& strategy) {
  std::string text;
  for (const OffloadRow& row : kOffloads) {
    const MemoryTier tier = strategy.*row.tier;
    if (tier == MemoryTier::kDevice) continue;
    AppendTo(text, ",",
             std::string(row.name) + ":" + std::string(NameOf(tier)));
  }
  return text;
}

Result<void> ReadSequence(std::string_view value, Strategy& strategy) {
  TESSERA_TRY(const int sp, ReadNumber(value, 0, 1, "0 or 1"));
  strategy.sp = sp == 1;
  return {};
}

Result<void> ReadShares(std::string_view value, Strategy& strategy) {
  static constexpr std::string_view kNames[] = {"equal", "speed"};
  TESSERA_TRY(const size_t by_speed, ReadName("balance", value, kNames));
  strategy.by_speed = by_speed == 1;
  return {};
}

Result<void> ReadBranches(std::string_view value, Strategy& strategy) {
  static constexpr std::string_view kNames[] = {"whole", "split"};
  TESSERA_TRY(const size_t split, ReadName("branches", value, kNames));
  strategy.split_branches = split == 1;
  return {};
}

// "full", "selective:4".
Result<void> ReadRecompute(std::string_view value, Strategy& strategy) {
  const size_t colon = value.find(':');
  TESSERA_TRY(strategy.recompute, FindRecomputeLevel(value.substr(0, colon)));
  if (colon == std::string_view::npos) return {};
  TESSERA_TRY(strategy.recompute_layers,
              ReadNumber(value.substr(colon + 1), 1, kMostDegree,
                         "a whole number of layers behind the ':'"));
  return {};
}

// A row that has its order in itself, or a file that has it.
Result<void> ReadSchedule(std::string_view value, Strategy& strategy) {
  std::vector<std::string_view> names;
  for (const PipelineSchedule& row : Schedules()) {
    if (row.order == nullptr) continue;
    names.push_back(row.name);
    if (row.name != value) continue;
    strategy.schedule = std::string(value);
    return {};
  }
  const std::string path(value);
  // A name without a folder or an ending is a slip of a schedule's.
  const bool is_path = path.find_first_of("/.") != std::string::npos;
  std::error_code unreadable;
  if (!is_path && !std::filesystem::is_regular_file(path, unreadable)) {
    return InvalidInput(UnknownName("schedule", value, names).message +
                        ", or the path of a file with a table of actions");
  }
  TESSERA_TRY(strategy.actions, ReadActionTable(path));
  strategy.schedule = "table";
  return {};
}

Result<void> ReadContextKind(std::string_view value, Strategy& strategy) {
  static constexpr std::string_view kNames[] = {"gather", "ring", "ulysses"};
  TESSERA_RETURN_IF_ERROR(ReadName("cp-kind", value, kNames));
  strategy.cp_kind = std::string(value);
  return {};
}

std::string ContextKindText(const Strategy& strategy) {
  return strategy.cp_kind == Strategy().cp_kind ? "" : strategy.cp_kind;
}

Result<void> ReadBalance(std::string_view value, Strategy& strategy) {
  static constexpr std::string_view kNames[] = {"none", "zigzag"};
  TESSERA_TRY(const size_t zigzag, ReadName("cp-balance", value, kNames));
  strategy.zigzag = zigzag == 1;
  return {};
}

Result<void> ReadOrder(std::string_view value, Strategy& strategy) {
  std::vector<MeshDimension> order;
  for (std::string_view name : Split(value, '-')) {
    TESSERA_TRY(const DimensionRow* row,
                Find("mesh dimension",
                     std::span<const DimensionRow>(kDimensions), name));
    if (std::find(order.begin(), order.end(), row->dimension) != order.end()) {
      return InvalidInput("names " + std::string(name) + " twice");
    }
    order.push_back(row->dimension);
  }
  if (order.size() != kDimensions.size()) {
    return InvalidInput("is '" + std::string(value) +
                        "': expected tp, cp, ep, dp and pp in some order, "
                        "such as tp-cp-ep-dp-pp");
  }
  strategy.order = order;
  return {};
}

std::string OrderText(const Strategy& strategy) {
  std::string text;
  for (MeshDimension dimension : strategy.order) {
    AppendTo(text, "-", RowOf(dimension).name);
  }
  return text;
}

template <auto kField>
void Reset(Strategy& strategy) {
  strategy.*kField = Strategy().*kField;
}

struct KeyRow {
  std::string_view name;
  Result<void> (*read)(std::string_view value, Strategy& strategy);
  // The value as it is read; nothing for what it is without the key.
  std::string (*text)(const Strategy& strategy);
  // Of a key that says nothing on its own: whether the others, all read, give
  // it a meaning, and what would. A value that is the default needs none.
  bool (*has_effect)(const Strategy& strategy) = nullptr;
  std::string_view needs = {};
  void (*drop)(Strategy& strategy) = nullptr;  // IdleKey::drop
};

constexpr std::array kKeys = {
    KeyRow{"dp", ReadDegree<&Strategy::dp>, NumberText<&Strategy::dp>},
    KeyRow{"tp", ReadDegree<&Strategy::tp>, NumberText<&Strategy::tp>},
    KeyRow{"pp", ReadDegree<&Strategy::pp>, NumberText<&Strategy::pp>},
    KeyRow{"vp", ReadDegree<&Strategy::vp>, NumberText<&Strategy::vp>},
    KeyRow{"cp", ReadDegree<&Strategy::cp>, NumberText<&Strategy::cp>},
    KeyRow{"cp-kind", ReadContextKind, ContextKindText,
           [](const Strategy& s) {
             return s.cp > 1 || s.cp_kind == Strategy().cp_kind;
           },
           "cp of at least 2", Reset<&Strategy::cp_kind>},
    KeyRow{"cp-balance", ReadBalance,
           [](const Strategy& s) -> std::string {
             return s.zigzag ? "zigzag" : "";
           },
           [](const Strategy& s) {
             return !s.zigzag || (s.cp > 1 && s.cp_kind != "ulysses");
           },
           "cp of at least 2 and cp-kind=gather or ring",
           Reset<&Strategy::zigzag>},
    KeyRow{"ep", ReadDegree<&Strategy::ep>, NumberText<&Strategy::ep>},
    KeyRow{"etp", ReadDegree<&Strategy::etp>, NumberText<&Strategy::etp>,
           [](const Strategy& s) { return s.etp <= 1 || s.tp > 1; },
           "tp of at least 2", Reset<&Strategy::etp>},
    KeyRow{"mbs", ReadDegree<&Strategy::mbs>, NumberText<&Strategy::mbs>},
    KeyRow{"balance", ReadShares,
           [](const Strategy& s) -> std::string {
             return s.by_speed ? "speed" : "";
           }},
    KeyRow{"zero", ReadZero, NumberText<&Strategy::zero>},
    KeyRow{"dp-kind", ReadDataParallelKind,
           [](const Strategy& s) -> std::string {
             return s.dp_kind == DataParallelKind::kRooted ? "rooted" : "";
           }},
    KeyRow{"zero-group", ReadZeroGroup, ZeroGroupText,
           [](const Strategy& s) { return s.zero > 0 || s.zero_group == 0; },
           "zero=1, 2 or 3", Reset<&Strategy::zero_group>},
    KeyRow{"bucket", ReadBucket, BucketText},
    KeyRow{"prefetch", ReadPrefetch, NumberText<&Strategy::prefetch>,
           [](const Strategy& s) {
             return s.zero == 3 || s.parameter_tier != MemoryTier::kDevice ||
                    s.prefetch == Strategy().prefetch;
           },
           "zero=3 or offload=parameters:host|file",
           Reset<&Strategy::prefetch>},
    KeyRow{"tiles", ReadTiles, NumberText<&Strategy::tiles>},
    KeyRow{"offload", ReadOffload, OffloadText,
           [](const Strategy& s) {
             return s.gradient_tier == MemoryTier::kDevice ||
                    s.optimizer_tier != MemoryTier::kDevice;
           },
           "a step on the host for gradients:host: optimizer:host or "
           "optimizer:file"},
    KeyRow{"sp", ReadSequence,
           [](const Strategy& s) -> std::string { return s.sp ? "1" : ""; },
           [](const Strategy& s) { return !s.sp || s.tp > 1; },
           "tp of at least 2", Reset<&Strategy::sp>},
    KeyRow{"branches", ReadBranches,
           [](const Strategy& s) -> std::string {
             return s.split_branches ? "split" : "";
           }},
    KeyRow{"recompute", ReadRecompute,
           [](const Strategy& s) -> std::string {
             const std::string text = RecomputeText(s);
             return text == RecomputeText(Strategy()) ? "" : text;
           },
           [](const Strategy& s) {
             return s.recompute_layers == 0 ||
                    s.recompute != RecomputeLevel::kNone;
           },
           "selective or full where it counts layers",
           Reset<&Strategy::recompute_layers>},
    KeyRow{"schedule", ReadSchedule,
           [](const Strategy& s) -> std::string {
             return s.schedule == Strategy().schedule ? "" : s.schedule;
           }},
    KeyRow{"order", ReadOrder,
           [](const Strategy& s) -> std::string {
             return s.order == Strategy().order ? "" : OrderText(s);
           }},
};

}  // namespace

std::string ZeroGroupWords(const Strategy& strategy) {
  if (strategy.zero_group == 0) return "";
  if (strategy.zero_group == Strategy::kWithinNode) return " within nodes";
  return " within " + std::to_string(strategy.zero_group) + " ranks";
}

std::string RecomputeText(const Strategy& strategy) {
  std::string text(NameOf(strategy.recompute));
  if (strategy.recompute_layers > 0) {
    text += ":" + std::to_string(strategy.recompute_layers);
  }
  return text;
}

Result<Strategy> ParseStrategy(std::string_view text) {
  TESSERA_TRY(Strategy strategy, ReadStrategy(text));
  if (const auto idle = FirstIdleKey(strategy)) {
    return InvalidInput("has no effect: " + idle->why, idle->key);
  }
  return strategy;
}

Result<Strategy> ReadStrategy(std::string_view text) {
  Strategy strategy;
  std::set<std::string_view> seen;
  if (text.empty()) return strategy;
  std::vector<std::string_view> parts;
  for (std::string_view part : Split(text, ',')) {
    if (part.empty()) {
      return InvalidInput(text.ends_with(',')
                              ? "ends in a comma: expected KEY=VALUE behind it"
                              : "has a comma with nothing before it: expected "
                                "KEY=VALUE");
    }
    if (part.find('=') != std::string_view::npos || parts.empty() ||
        !parts.back().starts_with("offload=")) {
      parts.push_back(part);
    } else {
      // The comma is of the value.
      parts.back() = {parts.back().data(),
                      parts.back().size() + 1 + part.size()};
    }
  }
  for (std::string_view part : parts) {
    const size_t equals = part.find('=');
    const std::string_view key = part.substr(0, equals);
    const auto row = Find("strategy key", std::span<const KeyRow>(kKeys), key);
    if (!row) return InvalidInput(row.error().message);
    if (equals == std::string_view::npos) {
      return InvalidInput("expected KEY=VALUE", std::string(key));
    }
    if (!seen.insert(key).second) {
      return InvalidInput("is given twice", std::string(key));
    }
    if (auto read = (*row)->read(part.substr(equals + 1), strategy); !read) {
      return read.error().At(key);
    }
  }
  if (strategy.vp > 1 && !seen.contains("schedule")) {
    strategy.schedule = "interleaved";
  }
  return strategy;
}

std::optional<IdleKey> FirstIdleKey(const Strategy& strategy) {
  for (const KeyRow& row : kKeys) {
    if (row.has_effect == nullptr || row.has_effect(strategy)) continue;
    return IdleKey{std::string(row.name), row.text(strategy),
                   "needs " + std::string(row.needs), row.drop};
  }
  return std::nullopt;
}

std::string ToString(const Strategy& strategy) {
  std::string text = "dp" + std::to_string(strategy.dp) + " tp" +
                     std::to_string(strategy.tp) + " pp" +
                     std::to_string(strategy.pp);
  if (strategy.cp > 1) text += " cp" + std::to_string(strategy.cp);
  if (strategy.cp > 1 && strategy.cp_kind != "gather") {
    text += " " + strategy.cp_kind;
  }
  if (strategy.zigzag) text += " zigzag";
  if (strategy.ep > 1) text += " ep" + std::to_string(strategy.ep);
  if (strategy.etp > 0) text += " etp" + std::to_string(strategy.etp);
  if (strategy.mbs > 0) text += " mbs" + std::to_string(strategy.mbs);
  text += " zero" + std::to_string(strategy.zero) + ZeroGroupWords(strategy) +
          " sp" + (strategy.sp ? "1" : "0");
  if (strategy.dp_kind == DataParallelKind::kRooted) text += " rooted";
  if (strategy.by_speed) text += " by speed";
  if (strategy.split_branches) text += " branches split";
  if (const std::string bucket = BucketText(strategy); !bucket.empty()) {
    text += " bucket " + bucket;
  }
  if (strategy.prefetch != Strategy().prefetch) {
    text += " prefetch " + std::to_string(strategy.prefetch);
  }
  if (strategy.tiles > 1) text += " tiles" + std::to_string(strategy.tiles);
  if (const std::string offload = OffloadText(strategy); !offload.empty()) {
    text += " offload " + offload;
  }
  if (strategy.recompute != RecomputeLevel::kNone) {
    text += " recompute " + RecomputeText(strategy);
  }
  if (strategy.vp > 1) text += " vp" + std::to_string(strategy.vp);
  if (strategy.pp > 1 || strategy.vp > 1) text += " " + strategy.schedule;
  if (strategy.order != Strategy().order) {
    text += " order " + OrderText(strategy);
  }
  return text;
}

std::optional<std::string> FlagTextOf(const Strategy& strategy) {
  // The folder of the file tier is no part of a plan.
  Strategy told = strategy;
  told.dp = 0;
  told.offload_directory.clear();
  std::string text;
  for (const KeyRow& row : kKeys) {
    const std::string value = row.text(told);
    if (value.empty()) continue;
    AppendTo(text, ",", std::string(row.name) + "=" + value);
  }
  // A table of actions has no name.
  const auto back = ParseStrategy(text);
  if (!back || *back != told) return std::nullopt;
  return text;
}

std::string StrategyText(const GraphIndex& index, const Cluster& cluster,
                         const Plan& plan) {
  const size_t devices = World(plan).devices.size();
  if (const auto strategy = StrategyOnPart(index, cluster, plan)) {
    return ToString(*strategy) +
           (devices == cluster.devices.size()
                ? ""
                : " on " + std::to_string(devices) + " of " +
                      std::to_string(cluster.devices.size()) + " devices");
  }
  const int stages = StagesOf(*index.graph, plan).count();
  return "custom (" + std::to_string(stages) +
         (stages == 1 ? " stage on " : " stages on ") +
         std::to_string(devices) + (devices == 1 ? " device)" : " devices)");
}

void NameAxes(const GraphIndex& index, Plan& plan) {
  std::vector<AxisUse> uses(plan.groups.size());
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    AddUse(index, NodeId(static_cast<int64_t>(i)), plan.ops[i],
           uses[plan.ops[i].group.index()]);
  }
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    const AxisUse& use = uses[g];
    const AxisSet tensor = (use.other | use.heads) & ~HeadContextAxesOf(use);
    std::array<int, 5> numbers = {};
    for (size_t a = 0; a < plan.groups[g].axes.size(); ++a) {
      const AxisSet axis = AxisSet{1} << a;
      const size_t role = tensor & axis         ? 0
                          : use.expert & axis   ? 1
                          : use.sample & axis   ? 2
                          : use.sequence & axis ? 3
                                                : 4;
      static constexpr std::array kNames = {"tp", "ep", "dp", "cp", "rep"};
      plan.groups[g].axes[a].name =
          kNames[role] + std::to_string(numbers[role]++);
    }
  }
}

}  // namespace tessera
