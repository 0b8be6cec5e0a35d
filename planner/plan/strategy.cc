#include "planner/plan/strategy.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <filesystem>
#include <limits>
#include <numeric>
#include <set>

#include "planner/base/table.h"
#include "planner/plan/axis_roles.h"
#include "planner/plan/branches.h"
#include "planner/plan/rooted.h"
#include "planner/plan/stages.h"
#include "planner/plan/tiles.h"
#include "planner/plan/validate.h"
#include "planner/schedule/action_table.h"

namespace tessera {
namespace {

struct DimensionRow {
  std::string_view name;
  MeshDimension dimension;
  int Strategy::*degree;
};

// In the order of MeshDimension.
constexpr std::array kDimensions = {
    DimensionRow{"tp", MeshDimension::kTensor, &Strategy::tp},
    DimensionRow{"cp", MeshDimension::kContext, &Strategy::cp},
    DimensionRow{"ep", MeshDimension::kExpert, &Strategy::ep},
    DimensionRow{"dp", MeshDimension::kData, &Strategy::dp},
    DimensionRow{"pp", MeshDimension::kPipeline, &Strategy::pp},
};

const DimensionRow& RowOf(MeshDimension dimension) {
  return kDimensions[static_cast<size_t>(dimension)];
}

// Of the tensor ranks that have other experts each.
constexpr std::string_view kFoldedAxes = "tpe";

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

struct ByteUnit {
  std::string_view name;
  int64_t bytes;
};
// The larger first; SI.
constexpr std::array kByteUnits = {ByteUnit{"GB", 1'000'000'000},
                                   ByteUnit{"MB", 1'000'000},
                                   ByteUnit{"kB", 1'000}, ByteUnit{"B", 1}};

Result<void> ReadBucket(std::string_view value, Strategy& strategy) {
  std::string_view number = value;
  int64_t unit = 1;
  for (const ByteUnit& row : kByteUnits) {
    if (!number.ends_with(row.name)) continue;
    number.remove_suffix(row.name.size());
    unit = row.bytes;
    break;
  }
  const auto count = ReadNumber(number, 0, kMostDegree, "");
  if (!count) {
    return InvalidInput("is '" + std::string(value) +
                        "': expected a size such as 25MB, or 0 for one bucket "
                        "for each block");
  }
  strategy.bucket = {*count * unit};
  return {};
}

// "25MB": in the largest unit that is whole.
std::string BucketText(Bytes size) {
  for (const ByteUnit& row : kByteUnits) {
    if (size.value % row.bytes == 0) {
      return std::to_string(size.value / row.bytes) + std::string(row.name);
    }
  }
  return std::to_string(size.value);
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

std::vector<std::string_view> Split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
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
    text += (text.empty() ? "" : ",") + std::string(row.name) + ":" +
            std::string(NameOf(tier));
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

struct KeyRow {
  std::string_view name;
  Result<void> (*read)(std::string_view value, Strategy& strategy);
  // Of a key that says nothing on its own: whether the others, all read, give
  // it a meaning, and what would. A value that is the default needs none.
  bool (*has_effect)(const Strategy& strategy) = nullptr;
  std::string_view needs = {};
};

constexpr std::array kKeys = {
    KeyRow{"dp", ReadDegree<&Strategy::dp>},
    KeyRow{"tp", ReadDegree<&Strategy::tp>},
    KeyRow{"pp", ReadDegree<&Strategy::pp>},
    KeyRow{"vp", ReadDegree<&Strategy::vp>},
    KeyRow{"cp", ReadDegree<&Strategy::cp>},
    KeyRow{"cp-kind", ReadContextKind,
           [](const Strategy& s) {
             return s.cp > 1 || s.cp_kind == Strategy().cp_kind;
           },
           "cp of at least 2"},
    KeyRow{"cp-balance", ReadBalance,
           [](const Strategy& s) {
             return !s.zigzag || (s.cp > 1 && s.cp_kind != "ulysses");
           },
           "cp of at least 2 and cp-kind=gather or ring"},
    KeyRow{"ep", ReadDegree<&Strategy::ep>},
    KeyRow{"etp", ReadDegree<&Strategy::etp>,
           [](const Strategy& s) { return s.etp <= 1 || s.tp > 1; },
           "tp of at least 2"},
    KeyRow{"mbs", ReadDegree<&Strategy::mbs>},
    KeyRow{"balance", ReadShares},
    KeyRow{"zero", ReadZero},
    KeyRow{"dp-kind", ReadDataParallelKind},
    KeyRow{"zero-group", ReadZeroGroup,
           [](const Strategy& s) { return s.zero > 0; }, "zero=1, 2 or 3"},
    KeyRow{"bucket", ReadBucket},
    KeyRow{"prefetch", ReadPrefetch,
           [](const Strategy& s) {
             return s.zero == 3 || s.parameter_tier != MemoryTier::kDevice ||
                    s.prefetch == Strategy().prefetch;
           },
           "zero=3 or offload=parameters:host|file"},
    KeyRow{"tiles", ReadTiles},
    KeyRow{"offload", ReadOffload,
           [](const Strategy& s) {
             return s.gradient_tier == MemoryTier::kDevice ||
                    s.optimizer_tier != MemoryTier::kDevice;
           },
           "a step on the host for gradients:host: optimizer:host or "
           "optimizer:file"},
    KeyRow{"sp", ReadSequence,
           [](const Strategy& s) { return !s.sp || s.tp > 1; },
           "tp of at least 2"},
    KeyRow{"branches", ReadBranches},
    KeyRow{"recompute", ReadRecompute},
    KeyRow{"schedule", ReadSchedule},
    KeyRow{"order", ReadOrder},
};

std::string RecomputeText(const Strategy& strategy) {
  std::string text(NameOf(strategy.recompute));
  if (strategy.recompute_layers > 0) {
    text += ":" + std::to_string(strategy.recompute_layers);
  }
  return text;
}

// Strategy::mbs where none is given. REQUIRES: dp is known.
int DefaultSamples(const Graph& graph, const Strategy& strategy) {
  const int64_t replicas = int64_t{strategy.dp} * strategy.ep;
  if (graph.seq_len > 1 || graph.global_batch % replicas != 0) return 1;
  return static_cast<int>(std::min<int64_t>(graph.global_batch / replicas,
                                            std::numeric_limits<int>::max()));
}

// One digit of a rank number.
struct Digit {
  std::string_view name;  // of its axes
  int size = 1;
  int stride = 1;
};

// The tensor ranks that have other experts each.
int Folded(const Strategy& strategy) {
  return strategy.etp == 0 ? 1 : strategy.tp / strategy.etp;
}

std::vector<DeviceGroup> Groups(const Strategy& strategy) {
  std::vector<Digit> outer_first;
  int stride = 1;
  int stage_stride = 1;
  Digit folded = {kFoldedAxes, Folded(strategy), 1};
  for (MeshDimension dimension : strategy.order) {
    const DimensionRow& row = RowOf(dimension);
    const int size = strategy.*row.degree;
    if (dimension == MeshDimension::kPipeline) {
      stage_stride = stride;
    } else if (dimension == MeshDimension::kTensor) {
      outer_first.push_back({row.name, size / folded.size, stride});
      folded.stride = stride * (size / folded.size);
    } else {
      outer_first.push_back({row.name, size, stride});
    }
    stride *= size;
  }
  std::ranges::reverse(outer_first);
  // Experts are split by these first: then tokens are exchanged among the
  // ranks of each of their coordinates.
  outer_first.insert(
      std::ranges::find(outer_first, RowOf(MeshDimension::kExpert).name,
                        &Digit::name),
      folded);
  std::vector<DeviceGroup> groups;
  for (int stage = 0; stage < strategy.pp; ++stage) {
    DeviceGroup group;
    group.name = strategy.pp == 1 ? "all" : "stage" + std::to_string(stage);
    std::vector<int> ranks = {stage * stage_stride};
    for (const Digit& digit : outer_first) {
      std::vector<int> finer;
      for (int rank : ranks) {
        for (int i = 0; i < digit.size; ++i) {
          finer.push_back(rank + i * digit.stride);
        }
      }
      ranks = std::move(finer);
      int number = 0;
      for (int prime : PrimeFactors(digit.size)) {
        group.axes.push_back(
            {std::string(digit.name) + std::to_string(number++), prime});
      }
    }
    for (int rank : ranks) group.devices.push_back(DeviceId(rank));
    groups.push_back(std::move(group));
  }
  return groups;
}

// The speed of the slowest device at each coordinate of an axis.
std::vector<double> SpeedsAlong(const Cluster& cluster, DType dtype,
                                const DeviceGroup& group, size_t axis) {
  std::vector<double> speeds(static_cast<size_t>(group.axes[axis].size),
                             std::numeric_limits<double>::infinity());
  for (int i = 0; i < std::ssize(group.devices); ++i) {
    double& slowest = speeds[static_cast<size_t>(
        group.Coordinate(i, static_cast<int>(axis)))];
    slowest = std::min(
        slowest,
        SpeedOf(cluster, group.devices[static_cast<size_t>(i)], dtype));
  }
  return speeds;
}

// Gives data axes across unlike devices shares of `samples`, those of one
// microbatch.
void ShareSamples(const Cluster& cluster, DType dtype, int64_t samples,
                  DeviceGroup& group) {
  int64_t parts = 1;
  for (const MeshAxis& axis : group.axes) {
    if (axis.name.starts_with("dp") || axis.name.starts_with("ep")) {
      parts *= axis.size;
    }
  }
  for (size_t a = 0; a < group.axes.size(); ++a) {
    MeshAxis& axis = group.axes[a];
    if (!axis.name.starts_with("dp")) continue;
    const std::vector<double> speeds = SpeedsAlong(cluster, dtype, group, a);
    const auto [least, most] = std::ranges::minmax(speeds);
    if (least == most) continue;
    axis.shares =
        ReducedShares(SharesBySpeed(samples / (parts / axis.size), speeds));
  }
}

// As the strategy gives them, with the shares of their axes.
std::vector<DeviceGroup> GroupsOn(const GraphIndex& index,
                                  const Cluster& cluster,
                                  const Strategy& strategy) {
  std::vector<DeviceGroup> groups = Groups(strategy);
  if (!strategy.by_speed) return groups;
  const int64_t samples = int64_t{strategy.mbs} * strategy.dp * strategy.ep;
  for (DeviceGroup& group : groups) {
    ShareSamples(cluster, index.graph->dtype, samples, group);
  }
  return groups;
}

// Of each position of the pipeline, or none where all are alike.
std::vector<double> StageSpeeds(const GraphIndex& index, const Cluster& cluster,
                                const Strategy& strategy,
                                std::span<const DeviceGroup> groups) {
  std::vector<double> speeds;
  if (!strategy.by_speed) return speeds;
  for (const DeviceGroup& group : groups) {
    speeds.push_back(SlowestSpeed(cluster, group, index.graph->dtype));
  }
  const auto [least, most] = std::ranges::minmax(speeds);
  if (least == most) return {};
  const size_t stages = speeds.size();
  for (size_t p = stages; p < stages * static_cast<size_t>(strategy.vp); ++p) {
    speeds.push_back(speeds[p - stages]);
  }
  return speeds;
}

AxisRoles Roles(const Strategy& strategy, const DeviceGroup& group) {
  AxisRoles roles;
  for (size_t a = 0; a < group.axes.size(); ++a) {
    const AxisSet axis = AxisSet{1} << a;
    const std::string_view name = group.axes[a].name;
    if (name.starts_with("dp")) roles.data |= axis;
    if (name.starts_with("ep")) roles.expert |= axis;
    if (name.starts_with("cp")) roles.context |= axis;
    if (name.starts_with("tp")) roles.tensor |= axis;
    if (name.starts_with(kFoldedAxes)) roles.folded |= axis;
  }
  roles.sequence = strategy.sp && roles.tensor != 0;
  roles.heads = strategy.cp_kind == "ulysses" && roles.context != 0;
  roles.ring = strategy.cp_kind == "ring" && roles.context != 0;
  return roles;
}

// The axes of a group that one ZeRO cut may take: of the data and context axes
// the innermost that make up the strategy's zero-group.
Result<AxisSet> ZeroGroupAxes(const Cluster& cluster, const Strategy& strategy,
                              const DeviceGroup& group) {
  const AxisRoles roles = Roles(strategy, group);
  const AxisSet all = roles.data | roles.expert | roles.context;
  if (strategy.zero_group == 0) return all;
  if (strategy.zero_group == Strategy::kWithinNode) {
    return InnermostWithin(AxesWithinNode(cluster, group), all);
  }
  AxisSet best = 0;
  bool found = strategy.zero_group == 1;
  for (AxisSet axes = all; axes != 0; axes = (axes - 1) & all) {
    if (group.Size(axes) != strategy.zero_group) continue;
    // Lower axes are outer.
    if (!found || std::countr_zero(axes) > std::countr_zero(best)) best = axes;
    found = true;
  }
  if (!found) {
    return InvalidInput(
        "zero-group=" + std::to_string(strategy.zero_group) +
        ": expected a product of prime factors of dp=" +
        std::to_string(strategy.dp) +
        (strategy.ep > 1 ? " * ep=" + std::to_string(strategy.ep) : "") +
        " * cp=" + std::to_string(strategy.cp));
  }
  return best;
}

// Along the outermost data axis of two ranks.
Result<Plan> WithSplitBranches(const GraphIndex& index, Plan plan) {
  bool any_axis = false;
  bool any_block = false;
  // From the last group, since halves come behind theirs.
  for (int64_t g = std::ssize(plan.groups); g-- > 0;) {
    const auto& axes = plan.groups[static_cast<size_t>(g)].axes;
    const auto axis =
        std::find_if(axes.begin(), axes.end(), [](const MeshAxis& a) {
          return a.size == 2 && a.name.starts_with("dp");
        });
    if (axis == axes.end()) continue;
    any_axis = true;
    auto split = SplitBranches(index, plan, GroupId(g),
                               static_cast<int>(axis - axes.begin()));
    if (!split.has_value()) continue;
    any_block = true;
    plan = *std::move(split);
  }
  if (any_block) return plan;
  return InvalidInput(any_axis ? "branches=split: no block has two branches "
                                 "with dense layers"
                               : "branches=split needs a dp that 2 divides");
}

Error EmptyShard(const GraphIndex& index, const UnusedAxes& unused,
                 const Strategy& strategy) {
  std::string degrees = "tp=" + std::to_string(strategy.tp);
  int ranks = strategy.tp;
  if (unused.context) {
    degrees += " and cp=" + std::to_string(strategy.cp);
    ranks *= strategy.cp;
  }
  return InvalidInput(degrees + (unused.context ? " leave" : " leaves") +
                      " an empty shard: " + std::to_string(unused.columns) +
                      (unused.attention ? " heads" : " columns") +
                      " cannot be split over " + std::to_string(ranks) +
                      " ranks ('" + index.graph->node(unused.node).name + "')");
}

}  // namespace

Result<Strategy> ParseStrategy(std::string_view text) {
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
  std::vector<const KeyRow*> given;
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
    given.push_back(*row);
  }
  if (strategy.vp > 1 && !seen.contains("schedule")) {
    strategy.schedule = "interleaved";
  }
  for (const KeyRow* row : given) {
    if (row->has_effect == nullptr || row->has_effect(strategy)) continue;
    return InvalidInput("has no effect: needs " + std::string(row->needs),
                        std::string(row->name));
  }
  return strategy;
}

std::vector<int> StageStarts(const GraphIndex& index, int positions) {
  const auto blocks = static_cast<int>(index.block_flops.size());
  TESSERA_CHECK(positions >= 1 && positions <= blocks)
      << positions << " of " << blocks;
  // The first and the last block are no layers where there are others; with
  // more positions than layers each block counts as one.
  const bool has_layers = blocks - 2 >= positions;
  const int layers = has_layers ? blocks - 2 : blocks;
  std::vector<int> counts(static_cast<size_t>(positions), layers / positions);
  std::vector<double> loads(counts.size(), 0);
  if (has_layers) {
    loads.front() += index.block_flops.front();
    loads.back() += index.block_flops.back();
  }
  // Of equals the later first: earlier stages keep more microbatches.
  std::vector<size_t> lightest_first(counts.size());
  std::iota(lightest_first.rbegin(), lightest_first.rend(), size_t{0});
  std::stable_sort(lightest_first.begin(), lightest_first.end(),
                   [&](size_t a, size_t b) { return loads[a] < loads[b]; });
  for (size_t i = 0; i < static_cast<size_t>(layers % positions); ++i) {
    ++counts[lightest_first[i]];
  }
  std::vector<int> starts = {0};
  for (size_t s = 0; s + 1 < counts.size(); ++s) {
    starts.push_back(starts.back() + counts[s] +
                     (s == 0 && has_layers ? 1 : 0));
  }
  return starts;
}

std::vector<int> StageStarts(const GraphIndex& index,
                             std::span<const double> speeds) {
  const size_t blocks = index.block_flops.size();
  const size_t positions = speeds.size();
  TESSERA_CHECK(positions >= 1 && positions <= blocks)
      << positions << " of " << blocks;
  // Whether the work fits when no position takes longer than `limit`; `starts`
  // are then where each begins that takes what it can.
  std::vector<int> starts(positions);
  const auto fits = [&](double limit) {
    size_t block = 0;
    for (size_t p = 0; p < positions; ++p) {
      starts[p] = static_cast<int>(block);
      double work = 0;
      const size_t left_for_others = positions - 1 - p;
      for (bool first = true; block + left_for_others < blocks;
           first = false, ++block) {
        work += index.block_flops[block];
        if (work <= limit * speeds[p]) continue;
        if (first) return false;
        break;
      }
    }
    return block == blocks;
  };
  double most = 0;
  for (double flops : index.block_flops) most += flops;
  most /= std::ranges::min(speeds);
  double least = 0;
  // Closer than any difference between two ways to cut.
  for (int i = 0; i < 60; ++i) {
    const double middle = (least + most) / 2;
    (fits(middle) ? most : least) = middle;
  }
  TESSERA_CHECK(fits(most)) << "no cut into " << positions;
  return starts;
}

double SpeedOf(const Cluster& cluster, DeviceId device, DType dtype) {
  const DeviceType& type = cluster.TypeOf(device);
  return type.Peak(dtype).value * type.compute_efficiency;
}

double SlowestSpeed(const Cluster& cluster, const DeviceGroup& group,
                    DType dtype) {
  double slowest = std::numeric_limits<double>::infinity();
  for (DeviceId device : group.devices) {
    slowest = std::min(slowest, SpeedOf(cluster, device, dtype));
  }
  return slowest;
}

bool HasUnlikeSpeeds(const Cluster& cluster, DType dtype) {
  if (cluster.device_types.size() < 2) return false;
  const double first = SpeedOf(cluster, DeviceId(0), dtype);
  for (size_t d = 1; d < cluster.devices.size(); ++d) {
    if (SpeedOf(cluster, DeviceId(d), dtype) != first) return true;
  }
  return false;
}

std::vector<int> SharesBySpeed(int64_t units, std::span<const double> speeds) {
  TESSERA_CHECK(units >= std::ssize(speeds)) << units;
  std::vector<int> shares(speeds.size(), 1);
  // Each further one to who would be done with it first.
  for (int64_t i = std::ssize(speeds); i < units; ++i) {
    size_t best = 0;
    for (size_t w = 1; w < speeds.size(); ++w) {
      if ((shares[w] + 1) * speeds[best] < (shares[best] + 1) * speeds[w]) {
        best = w;
      }
    }
    ++shares[best];
  }
  return shares;
}

std::vector<int> ReducedShares(std::vector<int> shares) {
  int divisor = 0;
  for (int share : shares) divisor = std::gcd(divisor, share);
  for (int& share : shares) share /= divisor;
  if (std::ranges::max(shares) == 1) shares.clear();
  return shares;
}

Result<Strategy> Complete(const GraphIndex& index, const Cluster& cluster,
                          Strategy strategy) {
  const auto devices = static_cast<int64_t>(cluster.devices.size());
  const int64_t others =
      int64_t{strategy.tp} * strategy.pp * strategy.cp * strategy.ep;
  const std::string product = "tp=" + std::to_string(strategy.tp) +
                              " * pp=" + std::to_string(strategy.pp) +
                              " * cp=" + std::to_string(strategy.cp) +
                              " * ep=" + std::to_string(strategy.ep);
  if (strategy.dp == 0) {
    if (devices % others != 0) {
      return InvalidInput(product + " = " + std::to_string(others) +
                          " does not divide the " + std::to_string(devices) +
                          " devices of " + cluster.name);
    }
    strategy.dp = static_cast<int>(devices / others);
  }
  if (strategy.dp * others != devices) {
    return InvalidInput("dp=" + std::to_string(strategy.dp) + " * " + product +
                        " = " + std::to_string(strategy.dp * others) +
                        ": expected the " + std::to_string(devices) +
                        " devices of " + cluster.name);
  }
  if (strategy.ep > 1 && !index.has_experts) {
    return InvalidInput("ep=" + std::to_string(strategy.ep) + ": expected 1, " +
                        index.graph->name + " has no experts");
  }
  if (strategy.etp > 0) {
    const std::string key = "etp=" + std::to_string(strategy.etp);
    if (!index.has_experts) {
      return InvalidInput(key + " has no effect: " + index.graph->name +
                          " has no experts");
    }
    if (strategy.tp % strategy.etp != 0) {
      return InvalidInput(
          key + ": expected a divisor of tp=" + std::to_string(strategy.tp));
    }
    if (strategy.etp == strategy.tp) strategy.etp = 0;
  }
  for (const auto& [key, given] :
       {std::pair{"cp=" + std::to_string(strategy.cp), strategy.cp > 1},
        std::pair{std::string("sp=1"), strategy.sp}}) {
    if (given && !index.has_sequence) {
      return InvalidInput(key + " has no effect: " + index.graph->name +
                          " has no sequence to split");
    }
  }
  if (strategy.cp_kind != Strategy().cp_kind && !index.has_attention) {
    return InvalidInput("cp-kind=" + strategy.cp_kind + " has no effect: " +
                        index.graph->name + " has no attention");
  }
  if (strategy.zigzag && !index.has_attention) {
    return InvalidInput("cp-balance=zigzag has no effect: " +
                        index.graph->name + " has no causal attention");
  }
  if (strategy.zigzag && strategy.cp == 1) {
    return InvalidInput(
        "cp-balance=zigzag is an order for ranks that split the sequence: "
        "expected cp of at least 2");
  }
  if (strategy.by_speed && !HasUnlikeSpeeds(cluster, index.graph->dtype)) {
    return InvalidInput("balance=speed has no effect: all devices of " +
                        cluster.name + " are alike");
  }
  if (strategy.dp_kind == DataParallelKind::kRooted && strategy.dp == 1) {
    return InvalidInput("dp-kind=rooted has no effect: needs dp of at least 2");
  }
  if (strategy.bucket > Bytes{} &&
      int64_t{strategy.dp} * strategy.cp * strategy.ep == 1 && !strategy.sp) {
    return InvalidInput("bucket=" + BucketText(strategy.bucket) +
                        " has no effect: no gradient is reduced where dp, cp "
                        "and ep are 1");
  }
  if (strategy.zero > 0 &&
      int64_t{strategy.dp} * strategy.cp * strategy.ep == 1) {
    return InvalidInput("zero=" + std::to_string(strategy.zero) +
                        " has no effect: no weight has copies to cut where "
                        "dp, cp and ep are 1");
  }
  if (strategy.mbs == 0) strategy.mbs = DefaultSamples(*index.graph, strategy);
  const int64_t samples = int64_t{strategy.mbs} * strategy.dp * strategy.ep;
  if (index.graph->global_batch % samples != 0) {
    return InvalidInput(
        "mbs=" + std::to_string(strategy.mbs) +
        " * dp=" + std::to_string(strategy.dp) +
        (strategy.ep > 1 ? " * ep=" + std::to_string(strategy.ep) : "") +
        " = " + std::to_string(samples) +
        ": expected a divisor of the global batch " +
        std::to_string(index.graph->global_batch));
  }
  const auto blocks = static_cast<int64_t>(index.graph->blocks.size());
  if (int64_t{strategy.pp} * strategy.vp > blocks) {
    return InvalidInput(
        "pp=" + std::to_string(strategy.pp) +
        (strategy.vp > 1
             ? " * vp=" + std::to_string(strategy.vp) + " = " +
                   std::to_string(int64_t{strategy.pp} * strategy.vp)
             : "") +
        ": expected at most " + std::to_string(blocks) +
        ", the number of blocks of " + index.graph->name);
  }
  TESSERA_TRY(const PipelineSchedule* schedule,
              FindSchedule(strategy.schedule));
  if (auto accepted = Accepts(*schedule, {strategy.pp, strategy.vp, 1});
      !accepted) {
    return accepted.error();
  }
  const auto [first, last] = Layers(index);
  if (strategy.recompute_layers > last - first) {
    return InvalidInput("recompute=" + RecomputeText(strategy) +
                        ": expected at most " + std::to_string(last - first) +
                        ", the number of layers of " + index.graph->name);
  }
  if (schedule->order == nullptr) {
    const PipelineShape table = ShapeOf(strategy.actions);
    const auto microbatches =
        static_cast<int>(index.graph->global_batch / samples);
    if (table != PipelineShape{strategy.pp, strategy.vp, microbatches}) {
      return InvalidInput(
          "the schedule's table has pp=" + std::to_string(table.stages) +
          ", vp=" + std::to_string(table.chunks) + " and " +
          std::to_string(table.microbatches) +
          " microbatches; the strategy has pp=" + std::to_string(strategy.pp) +
          ", vp=" + std::to_string(strategy.vp) + " and " +
          std::to_string(microbatches));
    }
  }
  return strategy;
}

Result<Plan> PlanFromStrategy(const GraphIndex& index, const Cluster& cluster,
                              const Strategy& requested) {
  TESSERA_TRY(const Strategy strategy, Complete(index, cluster, requested));
  Plan plan;
  plan.graph_fingerprint = index.fingerprint;
  plan.cluster_name = cluster.name;
  plan.groups = GroupsOn(index, cluster, strategy);
  plan.schedule = strategy.schedule;
  plan.actions = strategy.actions;
  plan.microbatches =
      static_cast<int>(index.graph->global_batch /
                       (int64_t{strategy.mbs} * strategy.dp * strategy.ep));
  plan.ops.resize(index.forward_nodes);
  const std::vector<double> speeds =
      StageSpeeds(index, cluster, strategy, plan.groups);
  const std::vector<int> starts =
      speeds.empty() ? StageStarts(index, strategy.pp * strategy.vp)
                     : StageStarts(index, speeds);
  for (size_t position = 0; position < starts.size(); ++position) {
    const size_t stage = position % plan.groups.size();
    const DeviceGroup& group = plan.groups[stage];
    if (group.axes.size() > static_cast<size_t>(kMaxAxes)) break;  // Validate
    const AxisRoles roles = Roles(strategy, group);
    const int end = position + 1 < starts.size()
                        ? starts[position + 1]
                        : static_cast<int>(index.nodes_of_block.size());
    for (int block = starts[position]; block < end; ++block) {
      std::vector<UnusedAxes> unused;
      SetBlock(index, block,
               PlaceBlock(index, block, group,
                          GroupId(static_cast<int64_t>(stage)), roles, &unused),
               plan);
      for (NodeId node : index.nodes_of_block[static_cast<size_t>(block)]) {
        plan.ops[node.index()].chunk =
            static_cast<int>(position / plan.groups.size());
      }
      if (!unused.empty()) return EmptyShard(index, unused[0], strategy);
    }
  }
  const auto [first_layer, last_layer] = Layers(index);
  const int again = strategy.recompute_layers > 0 ? strategy.recompute_layers
                                                  : last_layer - first_layer;
  for (int layer = first_layer; layer < first_layer + again; ++layer) {
    SetRecompute(index, layer, strategy.recompute, plan);
  }
  if (strategy.split_branches) {
    TESSERA_TRY(plan, WithSplitBranches(index, std::move(plan)));
  }
  for (size_t b = 0; b < index.nodes_of_block.size(); ++b) {
    if (strategy.tiles > 1) {
      SetTiles(index, static_cast<int>(b), strategy.tiles, plan);
    }
  }
  plan.weights.assign(index.weights.size(), {});
  for (size_t w = 0; w < plan.weights.size(); ++w) {
    plan.weights[w].zero_stage =
        HighestZeroStage(index, plan, w, strategy.zero);
  }
  SetZeroAxes(index, plan);
  for (size_t w = 0; w < plan.weights.size(); ++w) {
    if (strategy.zero_group == 0 || plan.weights[w].zero_axes == 0) continue;
    const GroupId home = plan.ops[index.weights[w].home.node.index()].group;
    TESSERA_TRY(const AxisSet axes,
                ZeroGroupAxes(cluster, strategy, plan.groups[home.index()]));
    plan.weights[w].zero_axes &= axes;
  }
  if (strategy.dp_kind == DataParallelKind::kRooted) {
    if (strategy.zero > 0) {
      return InvalidInput(
          "dp-kind=rooted keeps all state on the root: expected "
          "zero=0, not zero=" +
          std::to_string(strategy.zero));
    }
    std::vector<AxisSet> data;
    for (const DeviceGroup& group : plan.groups) {
      data.push_back(Roles(strategy, group).data);
    }
    SetRooted(index, data, plan);
  }
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    if (!KeepsResults(index, plan, NodeId(i))) continue;
    plan.ops[i].activation_tier = strategy.activation_tier;
  }
  for (size_t w = 0; w < plan.weights.size(); ++w) {
    plan.weights[w].optimizer_tier = strategy.optimizer_tier;
    if (!IsTiedAcrossGroups(index, plan, w)) {
      plan.weights[w].parameter_tier = strategy.parameter_tier;
      plan.weights[w].gradient_tier = strategy.gradient_tier;
    }
  }
  plan.bucket_bytes = strategy.bucket;
  plan.prefetch = strategy.prefetch;
  plan.zigzag = strategy.zigzag ? strategy.cp : 0;
  const std::vector<Error> errors = Validate(index, cluster, plan);
  if (!errors.empty()) return errors[0];
  return plan;
}

Result<Plan> PlanFromStrategy(const Graph& graph, const Cluster& cluster,
                              const Strategy& strategy) {
  return PlanFromStrategy(GraphIndex(graph), cluster, strategy);
}

std::optional<Strategy> UniformStrategy(const GraphIndex& index,
                                        const Cluster& cluster,
                                        const Plan& plan) {
  Strategy strategy;
  if (plan.groups.empty() || plan.ops.empty()) return std::nullopt;
  strategy.pp = static_cast<int>(plan.groups.size());
  strategy.vp = ShapeOf(*index.graph, plan).chunks;
  strategy.schedule = plan.schedule;
  strategy.actions = plan.actions;
  strategy.bucket = plan.bucket_bytes;
  strategy.prefetch = plan.prefetch;
  for (const OpPlacement& op : plan.ops) {
    strategy.tiles = std::max(strategy.tiles, op.tiles);
    strategy.activation_tier =
        std::max(strategy.activation_tier, op.activation_tier);
  }
  strategy.zigzag = plan.zigzag != 0;
  for (const WeightPlacement& weight : plan.weights) {
    strategy.optimizer_tier = weight.optimizer_tier;
    strategy.parameter_tier =
        std::max(strategy.parameter_tier, weight.parameter_tier);
    strategy.gradient_tier =
        std::max(strategy.gradient_tier, weight.gradient_tier);
  }
  if (UsesRoot(plan)) strategy.dp_kind = DataParallelKind::kRooted;
  const auto plain = WithoutRoot(index, plan);
  if (!plain.has_value()) return std::nullopt;
  Plan whole = plan;
  SetZeroAxes(index, whole);
  int64_t zero_group = 1;
  for (size_t w = 0; w < plan.weights.size(); ++w) {
    const WeightPlacement& weight = plan.weights[w];
    strategy.zero = std::max(strategy.zero, weight.zero_stage);
    const GroupId home = plan.ops[index.weights[w].home.node.index()].group;
    zero_group =
        std::max(zero_group, plan.groups[home.index()].Size(weight.zero_axes));
  }
  if (whole.weights != plan.weights) {
    strategy.zero_group = static_cast<int>(zero_group);
  }
  // Degrees as the first stage has them, over all of its blocks: an axis may
  // show its role in few of them.
  const DeviceGroup& group = plan.groups[0];
  AxisRoles roles;
  for (size_t b = 0; b < index.nodes_of_block.size(); ++b) {
    const auto& nodes = index.nodes_of_block[b];
    if (nodes.empty() || plan.ops[nodes[0].index()].group != GroupId(0)) {
      continue;
    }
    const auto of_block = RolesOf(index, *plain, static_cast<int>(b));
    if (!of_block.has_value()) return std::nullopt;
    roles.data |= of_block->data;
    roles.expert |= of_block->expert;
    roles.context |= of_block->context;
    roles.tensor |= of_block->tensor;
    roles.folded |= of_block->folded;
    roles.sequence |= of_block->sequence;
    roles.heads |= of_block->heads;
    roles.ring |= of_block->ring;
  }
  // Blocks without experts show the expert axes as data axes.
  roles.data &= ~roles.expert;
  strategy.dp = static_cast<int>(group.Size(roles.data));
  strategy.ep = static_cast<int>(group.Size(roles.expert));
  strategy.cp = static_cast<int>(group.Size(roles.context));
  strategy.tp = static_cast<int>(group.Size(roles.tensor));
  if (roles.folded != 0) {
    strategy.etp = strategy.tp / static_cast<int>(group.Size(roles.folded));
  }
  strategy.sp = roles.sequence;
  const auto [first_layer, last_layer] = Layers(index);
  for (int layer = first_layer; layer < last_layer; ++layer) {
    const auto level = RecomputeOf(index, plan, layer);
    if (!level.has_value()) return std::nullopt;
    if (layer == first_layer) strategy.recompute = *level;
    if (level != strategy.recompute) {
      strategy.recompute_layers = layer - first_layer;
      break;
    }
  }
  if (roles.heads) strategy.cp_kind = "ulysses";
  if (roles.ring) strategy.cp_kind = "ring";
  const int64_t parts = int64_t{plan.microbatches} * strategy.dp * strategy.ep;
  if (parts == 0 || index.graph->global_batch % parts != 0) return std::nullopt;
  strategy.mbs = static_cast<int>(index.graph->global_batch / parts);
  // The plan it gives must be this one, up to names; a few orders are usual.
  using D = MeshDimension;
  const std::vector<D> orders[] = {
      {D::kTensor, D::kContext, D::kExpert, D::kData, D::kPipeline},
      {D::kTensor, D::kContext, D::kExpert, D::kPipeline, D::kData},
      {D::kData, D::kTensor, D::kContext, D::kExpert, D::kPipeline},
      {D::kTensor, D::kData, D::kContext, D::kExpert, D::kPipeline},
  };
  const auto complete = Complete(index, cluster, strategy);
  if (!complete) return std::nullopt;
  struct Way {
    std::vector<D> order;
    bool by_speed;
  };
  std::vector<Way> ways;
  const bool unlike = HasUnlikeSpeeds(cluster, index.graph->dtype);
  for (const std::vector<D>& order : orders) {
    ways.push_back({order, false});
    if (unlike) ways.push_back({order, true});
  }
  Plan named = plan;
  // Groups of unlike stages may be equal with and without balance.
  std::vector<std::pair<bool, std::vector<DeviceGroup>>> tried;
  for (const auto& [order, by_speed] : ways) {
    strategy.order = order;
    strategy.by_speed = by_speed;
    // An order changes groups and nothing else, but for what a zero-group
    // takes: of other groups, or of the same, no plan need be made.
    if (strategy.zero_group == 0) {
      Strategy of_order = *complete;
      of_order.order = order;
      of_order.by_speed = by_speed;
      std::pair groups = {by_speed, GroupsOn(index, cluster, of_order)};
      const bool same =
          std::ranges::equal(groups.second, plan.groups,
                             [](const DeviceGroup& a, const DeviceGroup& b) {
                               return a.devices == b.devices && SameMesh(a, b);
                             });
      if (!same || std::ranges::find(tried, groups) != tried.end()) continue;
      tried.push_back(std::move(groups));
    }
    const auto made = PlanFromStrategy(index, cluster, strategy);
    if (!made) return std::nullopt;
    if (made->groups.size() != plan.groups.size()) return std::nullopt;
    for (size_t g = 0; g < named.groups.size(); ++g) {
      named.groups[g].name = made->groups[g].name;
      for (size_t a = 0;
           a < named.groups[g].axes.size() && a < made->groups[g].axes.size();
           ++a) {
        named.groups[g].axes[a].name = made->groups[g].axes[a].name;
      }
    }
    named.cluster_name = made->cluster_name;
    if (named == *made) return strategy;
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
  text += " zero" + std::to_string(strategy.zero) +
          (strategy.zero_group == 0 ? ""
           : strategy.zero_group == Strategy::kWithinNode
               ? " within nodes"
               : " within " + std::to_string(strategy.zero_group) + " ranks") +
          " sp" + (strategy.sp ? "1" : "0");
  if (strategy.dp_kind == DataParallelKind::kRooted) text += " rooted";
  if (strategy.by_speed) text += " by speed";
  if (strategy.split_branches) text += " branches split";
  if (strategy.bucket.value > 0)
    text += " bucket " + BucketText(strategy.bucket);
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
  if (strategy.pp * strategy.vp > 1) text += " " + strategy.schedule;
  if (strategy.order != Strategy().order) {
    text += " order ";
    for (size_t i = 0; i < strategy.order.size(); ++i) {
      text += (i == 0 ? "" : "-") + std::string(RowOf(strategy.order[i]).name);
    }
  }
  return text;
}

std::string StrategyText(const GraphIndex& index, const Cluster& cluster,
                         const Plan& plan) {
  const auto strategy = UniformStrategy(index, cluster, plan);
  if (strategy.has_value()) return ToString(*strategy);
  const int stages = StagesOf(*index.graph, plan).count();
  const size_t devices = World(plan).devices.size();
  return "custom (" + std::to_string(stages) +
         (stages == 1 ? " stage on " : " stages on ") +
         std::to_string(devices) + (devices == 1 ? " device)" : " devices)");
}

void NameAxes(const GraphIndex& index, Plan& plan) {
  struct Use {
    AxisSet sample = 0;
    AxisSet expert = 0;
    AxisSet sequence = 0;
    AxisSet other = 0;
  };
  std::vector<Use> uses(plan.groups.size());
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    const NodeId id(static_cast<int64_t>(i));
    Use& use = uses[plan.ops[i].group.index()];
    for (int f = 0; f < kMaxFactors; ++f) {
      const AxisSet axes = plan.ops[i].axes[static_cast<size_t>(f)];
      (f == index.SampleFactor(id)     ? use.sample
       : f == index.ExpertFactor(id)   ? use.expert
       : f == index.SequenceFactor(id) ? use.sequence
                                       : use.other) |= axes;
    }
  }
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    const Use& use = uses[g];
    std::array<int, 5> numbers = {};
    for (size_t a = 0; a < plan.groups[g].axes.size(); ++a) {
      const AxisSet axis = AxisSet{1} << a;
      const size_t role = use.other & axis      ? 0
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
