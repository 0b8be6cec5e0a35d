// Plans of strategies, and the strategies of plans.

#include <algorithm>
#include <bit>
#include <initializer_list>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "planner/base/append.h"
#include "planner/base/format.h"
#include "planner/plan/axis_roles.h"
#include "planner/plan/branches.h"
#include "planner/plan/idle_keys.h"
#include "planner/plan/recompute.h"
#include "planner/plan/rooted.h"
#include "planner/plan/sequence_order.h"
#include "planner/plan/stages.h"
#include "planner/plan/strategy.h"
#include "planner/plan/strategy_text.h"
#include "planner/plan/tiles.h"
#include "planner/plan/validate.h"
#include "planner/plan/work_shares.h"
#include "planner/schedule/action_table.h"

namespace tessera {
namespace {

// Of the tensor ranks that have other experts each.
constexpr std::string_view kFoldedAxes = "tpe";

// Strategy::mbs where none is given. REQUIRES: dp is known.
int DefaultSamples(const Graph& graph, const Strategy& strategy) {
  const int64_t replicas = int64_t{strategy.dp} * strategy.ep;
  if (graph.seq_len > 1 || graph.global_batch % replicas != 0) return 1;
  return static_cast<int>(std::min<int64_t>(graph.global_batch / replicas,
                                            std::numeric_limits<int>::max()));
}

// The samples of a microbatch over all replicas.
int64_t SamplesOf(const Strategy& strategy) {
  return int64_t{strategy.mbs} * strategy.dp * strategy.ep;
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
  for (DeviceGroup& group : groups) {
    ShareSamples(cluster, index.graph->dtype, SamplesOf(strategy), group);
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

// Which layers compute what again; whether a strategy says that. Layers may
// have the flags of several levels, as those without attention do.
bool FindRecompute(const GraphIndex& index, const Plan& plan,
                   Strategy& strategy) {
  const auto [first, last] = Layers(index);
  // Behind layers from `begin` on that are of the level.
  const auto behind = [&](int begin, RecomputeLevel level) {
    while (begin < last && HasLevel(index, plan, begin, level)) ++begin;
    return begin;
  };
  for (const RecomputeRow& row : RecomputeLevels()) {
    const int covered = behind(first, row.level);
    if (behind(covered, RecomputeLevel::kNone) < last) continue;
    strategy.recompute = row.level;
    strategy.recompute_layers = covered < last ? covered - first : 0;
    return true;
  }
  return false;
}

// All of the strategy that may give `plan`, but for the order of its dimensions
// and whether shares go by speed; nothing where none does.
std::optional<Strategy> WithoutOrder(const GraphIndex& index,
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
  // Degrees as the first stage has them, over blocks of all kinds: an axis may
  // show its role in few of them.
  const DeviceGroup& group = plan.groups[0];
  AxisRoles roles;
  std::set<int> classes;
  for (size_t b = 0; b < index.nodes_of_block.size(); ++b) {
    if (index.nodes_of_block[b].empty() ||
        !classes.insert(index.block_class[b]).second) {
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
  // Blocks without experts show the expert axes as data axes, and those of
  // which nothing but the sequence is split tensor axes as context axes.
  roles.data &= ~roles.expert;
  roles.context &= ~roles.tensor;
  strategy.dp = static_cast<int>(group.Size(roles.data));
  strategy.ep = static_cast<int>(group.Size(roles.expert));
  strategy.cp = static_cast<int>(group.Size(roles.context));
  strategy.tp = static_cast<int>(group.Size(roles.tensor));
  if (roles.folded != 0) {
    strategy.etp = strategy.tp / static_cast<int>(group.Size(roles.folded));
  }
  strategy.sp = roles.sequence;
  if (!FindRecompute(index, plan, strategy)) return std::nullopt;
  if (roles.heads) strategy.cp_kind = "ulysses";
  if (roles.ring) strategy.cp_kind = "ring";
  const int64_t parts = int64_t{plan.microbatches} * strategy.dp * strategy.ep;
  if (parts == 0 || index.graph->global_batch % parts != 0) return std::nullopt;
  strategy.mbs = static_cast<int>(index.graph->global_batch / parts);
  return strategy;
}

// Degrees multiplied: nothing where no number holds the product, and in words,
// "tp=2 * pp=3 = 6".
struct Product {
  std::optional<int64_t> value = 1;
  std::string text;
};

Product ProductOf(const Strategy& strategy,
                  std::initializer_list<MeshDimension> dimensions) {
  Product product;
  for (MeshDimension dimension : dimensions) {
    const DimensionRow& row = RowOf(dimension);
    const int degree = strategy.*row.degree;
    AppendTo(product.text, " * ",
             std::string(row.name) + "=" + std::to_string(degree));
    if (product.value &&
        __builtin_mul_overflow(*product.value, degree, &*product.value)) {
      product.value.reset();
    }
  }
  if (product.value) product.text += " = " + std::to_string(*product.value);
  return product;
}

// dp is what the other degrees leave of the cluster.
Result<void> CompleteDegrees(const Cluster& cluster, Strategy& strategy) {
  using D = MeshDimension;
  const auto devices = static_cast<int64_t>(cluster.devices.size());
  const std::string all =
      std::to_string(devices) + " devices of " + cluster.name;
  if (strategy.dp == 0) {
    const Product others = ProductOf(
        strategy, {D::kTensor, D::kPipeline, D::kContext, D::kExpert});
    if (!others.value || devices % *others.value != 0) {
      return InvalidInput(others.text + " does not divide the " + all);
    }
    strategy.dp = static_cast<int>(devices / *others.value);
  }
  const Product degrees = ProductOf(
      strategy, {D::kData, D::kTensor, D::kPipeline, D::kContext, D::kExpert});
  if (degrees.value != devices) {
    return InvalidInput(degrees.text + ": expected the " + all);
  }
  return {};
}

// An etp of tp is none.
Result<void> CompleteExperts(const GraphIndex& index, Strategy& strategy) {
  if (strategy.ep > 1 && !index.has_experts) {
    return InvalidInput("ep=" + std::to_string(strategy.ep) + ": expected 1, " +
                        index.graph->name + " has no experts");
  }
  if (strategy.etp == 0) return {};
  if (strategy.tp % strategy.etp != 0) {
    return InvalidInput(
        "etp=" + std::to_string(strategy.etp) +
        ": expected a divisor of tp=" + std::to_string(strategy.tp));
  }
  if (strategy.etp == strategy.tp) strategy.etp = 0;
  return {};
}

// The first key that changes nothing on this cluster, or of this model.
// REQUIRES: dp is known.
std::optional<IdleKey> FirstIdleOn(const GraphIndex& index,
                                   const Cluster& cluster,
                                   const Strategy& strategy) {
  const std::string& model = index.graph->name;
  const bool has_copies = int64_t{strategy.dp} * strategy.cp * strategy.ep > 1;
  const struct {
    bool is_idle;
    IdleKey key;
  } checks[] = {
      {strategy.etp > 0 && !index.has_experts,
       {"etp", std::to_string(strategy.etp), model + " has no experts",
        [](Strategy& s) { s.etp = 0; }}},
      {strategy.cp > 1 && !index.has_sequence,
       {"cp", std::to_string(strategy.cp),
        model + " has no sequence to split"}},
      {strategy.sp && !index.has_sequence,
       {"sp", "1", model + " has no sequence to split",
        [](Strategy& s) { s.sp = false; }}},
      {strategy.cp_kind != Strategy().cp_kind && !index.has_attention,
       {"cp-kind", strategy.cp_kind, model + " has no attention",
        [](Strategy& s) { s.cp_kind = Strategy().cp_kind; }}},
      {strategy.zigzag && !index.has_attention,
       {"cp-balance", "zigzag", model + " has no causal attention",
        [](Strategy& s) { s.zigzag = false; }}},
      {strategy.zigzag && strategy.cp == 1,
       {"cp-balance", "zigzag", "needs cp of at least 2",
        [](Strategy& s) { s.zigzag = false; }}},
      {strategy.by_speed && !HasUnlikeSpeeds(cluster, index.graph->dtype),
       {"balance", "speed", "all devices of " + cluster.name + " are alike",
        [](Strategy& s) { s.by_speed = false; }}},
      {strategy.dp_kind == DataParallelKind::kRooted && strategy.dp == 1,
       {"dp-kind", "rooted", "needs dp of at least 2",
        [](Strategy& s) { s.dp_kind = DataParallelKind::kDdp; }}},
      {strategy.bucket > Bytes{} && !has_copies && !strategy.sp,
       {"bucket", FormatExactBytes(strategy.bucket, ""),
        "no gradient is reduced where dp, cp and ep are 1",
        [](Strategy& s) { s.bucket = Bytes{}; }}},
      {strategy.zero > 0 && !has_copies,
       {"zero", std::to_string(strategy.zero),
        "no weight has copies to cut where dp, cp and ep are 1",
        [](Strategy& s) { s.zero = 0; }}},
  };
  for (const auto& check : checks) {
    if (check.is_idle) return check.key;
  }
  return std::nullopt;
}

Result<void> CompleteSamples(const GraphIndex& index, Strategy& strategy) {
  if (strategy.mbs == 0) strategy.mbs = DefaultSamples(*index.graph, strategy);
  const int64_t samples = SamplesOf(strategy);
  if (index.graph->global_batch % samples == 0) return {};
  return InvalidInput(
      "mbs=" + std::to_string(strategy.mbs) +
      " * dp=" + std::to_string(strategy.dp) +
      (strategy.ep > 1 ? " * ep=" + std::to_string(strategy.ep) : "") + " = " +
      std::to_string(samples) + ": expected a divisor of the global batch " +
      std::to_string(index.graph->global_batch));
}

// Whether the model is as deep as the strategy wants it.
Result<void> CheckDepth(const GraphIndex& index, const Strategy& strategy) {
  const auto blocks = static_cast<int64_t>(index.graph->blocks.size());
  const int64_t positions = int64_t{strategy.pp} * strategy.vp;
  if (positions > blocks) {
    return InvalidInput("pp=" + std::to_string(strategy.pp) +
                        (strategy.vp > 1
                             ? " * vp=" + std::to_string(strategy.vp) + " = " +
                                   std::to_string(positions)
                             : "") +
                        ": expected at most " + std::to_string(blocks) +
                        ", the number of blocks of " + index.graph->name);
  }
  const auto [first, last] = Layers(index);
  if (strategy.recompute_layers > last - first) {
    return InvalidInput("recompute=" + RecomputeText(strategy) +
                        ": expected at most " + std::to_string(last - first) +
                        ", the number of layers of " + index.graph->name);
  }
  return {};
}

// REQUIRES: dp and mbs are known.
Result<void> CheckSchedule(const GraphIndex& index, const Strategy& strategy) {
  TESSERA_TRY(const PipelineSchedule* schedule,
              FindSchedule(strategy.schedule));
  TESSERA_RETURN_IF_ERROR(Accepts(*schedule, {strategy.pp, strategy.vp, 1}));
  if (schedule->order != nullptr) return {};
  const PipelineShape table = ShapeOf(strategy.actions);
  const auto microbatches =
      static_cast<int>(index.graph->global_batch / SamplesOf(strategy));
  if (table == PipelineShape{strategy.pp, strategy.vp, microbatches}) return {};
  return InvalidInput(
      "the schedule's table has pp=" + std::to_string(table.stages) +
      ", vp=" + std::to_string(table.chunks) + " and " +
      std::to_string(table.microbatches) +
      " microbatches; the strategy has pp=" + std::to_string(strategy.pp) +
      ", vp=" + std::to_string(strategy.vp) + " and " +
      std::to_string(microbatches));
}

// Gives each position of the pipeline its blocks, and each block its placements
// by the roles of the axes of its group.
Result<void> PlaceBlocks(const GraphIndex& index, const Cluster& cluster,
                         const Strategy& strategy, Plan& plan) {
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
  return {};
}

// Cuts the weights' states by ZeRO. A weight of whose axes the zero-group has
// none stays whole, which is stage 0.
Result<void> CutWeights(const GraphIndex& index, const Cluster& cluster,
                        const Strategy& strategy, Plan& plan) {
  for (size_t w = 0; w < plan.weights.size(); ++w) {
    plan.weights[w].zero_stage =
        HighestZeroStage(index, plan, w, strategy.zero);
  }
  SetZeroAxes(index, plan);
  if (strategy.zero_group == 0) return {};
  std::vector<std::optional<AxisSet>> axes_of(plan.groups.size());
  for (size_t w = 0; w < plan.weights.size(); ++w) {
    if (plan.weights[w].zero_axes == 0) continue;
    const GroupId home = plan.ops[index.weights[w].home.node.index()].group;
    std::optional<AxisSet>& axes = axes_of[home.index()];
    if (!axes) {
      TESSERA_TRY(axes,
                  ZeroGroupAxes(cluster, strategy, plan.groups[home.index()]));
    }
    plan.weights[w].zero_axes &= *axes;
    if (plan.weights[w].zero_axes == 0) plan.weights[w].zero_stage = 0;
  }
  return {};
}

// Moves the loss and all state to the root of the data axes.
Result<void> MoveToRoot(const GraphIndex& index, const Strategy& strategy,
                        Plan& plan) {
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
  return {};
}

void SetTiers(const GraphIndex& index, const Strategy& strategy, Plan& plan) {
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
}

}  // namespace

Result<Strategy> Complete(const GraphIndex& index, const Cluster& cluster,
                          Strategy strategy) {
  TESSERA_RETURN_IF_ERROR(CompleteDegrees(cluster, strategy));
  if (const auto idle = FirstIdleOn(index, cluster, strategy)) {
    return IdleError(*idle);
  }
  TESSERA_RETURN_IF_ERROR(CompleteExperts(index, strategy));
  TESSERA_RETURN_IF_ERROR(CompleteSamples(index, strategy));
  TESSERA_RETURN_IF_ERROR(CheckDepth(index, strategy));
  TESSERA_RETURN_IF_ERROR(CheckSchedule(index, strategy));
  return strategy;
}

Error IdleError(const IdleKey& idle) {
  return InvalidInput(idle.key + "=" + idle.value +
                      " has no effect: " + idle.why);
}

std::string IdleNote(const IdleKey& idle) {
  return "without " + idle.key + "=" + idle.value +
         ", which has no effect: " + idle.why;
}

Strategy WithoutIdleKeys(const GraphIndex& index, const Cluster& cluster,
                         Strategy strategy, std::vector<std::string>& notes) {
  for (;;) {
    std::optional<IdleKey> idle = FirstIdleKey(strategy);
    Strategy complete = strategy;
    if (!idle && CompleteDegrees(cluster, complete)) {
      idle = FirstIdleOn(index, cluster, complete);
    }
    if (!idle || idle->drop == nullptr) return strategy;
    idle->drop(strategy);
    notes.push_back(IdleNote(*idle));
  }
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
      static_cast<int>(index.graph->global_batch / SamplesOf(strategy));
  plan.bucket_bytes = strategy.bucket;
  plan.prefetch = strategy.prefetch;
  plan.zigzag = strategy.zigzag ? strategy.cp : 0;
  TESSERA_RETURN_IF_ERROR(PlaceBlocks(index, cluster, strategy, plan));
  const auto [first_layer, last_layer] = Layers(index);
  const int again = strategy.recompute_layers > 0 ? strategy.recompute_layers
                                                  : last_layer - first_layer;
  for (int layer = first_layer; layer < first_layer + again; ++layer) {
    SetRecompute(index, layer, strategy.recompute, plan);
  }
  if (strategy.split_branches) {
    TESSERA_TRY(plan, WithSplitBranches(index, std::move(plan)));
  }
  if (strategy.tiles > 1) {
    for (int block = 0; block < std::ssize(index.nodes_of_block); ++block) {
      SetTiles(index, block, strategy.tiles, plan);
    }
  }
  plan.weights.assign(index.weights.size(), {});
  TESSERA_RETURN_IF_ERROR(CutWeights(index, cluster, strategy, plan));
  if (strategy.dp_kind == DataParallelKind::kRooted) {
    TESSERA_RETURN_IF_ERROR(MoveToRoot(index, strategy, plan));
  }
  SetTiers(index, strategy, plan);
  const std::vector<Error> errors = Validate(index, cluster, plan);
  if (errors.empty()) return plan;
  // As the strategy names it.
  if (errors[0].where == "zigzag") {
    return InvalidInput(
        ZigzagProblem(index, plan),
        "cp=" + std::to_string(strategy.cp) + ",cp-balance=zigzag");
  }
  return errors[0];
}

Result<Plan> PlanFromStrategy(const Graph& graph, const Cluster& cluster,
                              const Strategy& strategy) {
  return PlanFromStrategy(GraphIndex(graph), cluster, strategy);
}

std::optional<Strategy> UniformStrategy(const GraphIndex& index,
                                        const Cluster& cluster,
                                        const Plan& plan) {
  std::optional<Strategy> found = WithoutOrder(index, plan);
  if (!found) return std::nullopt;
  Strategy strategy = *std::move(found);
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

}  // namespace tessera
