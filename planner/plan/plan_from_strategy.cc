// Plans of strategies.

#include <algorithm>
#include <bit>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "planner/base/append.h"
#include "planner/base/format.h"
#include "planner/plan/axis_roles.h"
#include "planner/plan/branches.h"
#include "planner/plan/idle_keys.h"
#include "planner/plan/layers_again.h"
#include "planner/plan/rooted.h"
#include "planner/plan/sequence_order.h"
#include "planner/plan/strategy.h"
#include "planner/plan/strategy_groups.h"
#include "planner/plan/strategy_text.h"
#include "planner/plan/tiles.h"
#include "planner/plan/validate.h"
#include "planner/plan/work_shares.h"
#include "planner/schedule/action_table.h"

namespace tessera {
namespace {

// Strategy::mbs where none is given. REQUIRES: dp is known.
int DefaultSamples(const Graph& graph, const Strategy& strategy) {
  const int64_t replicas = int64_t{strategy.dp} * strategy.ep;
  if (graph.seq_len > 1 || graph.global_batch % replicas != 0) return 1;
  return static_cast<int>(std::min<int64_t>(graph.global_batch / replicas,
                                            std::numeric_limits<int>::max()));
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
  BranchesByClass branches(index);
  // From the last group, since halves come behind theirs.
  for (int64_t g = std::ssize(plan.groups); g-- > 0;) {
    const auto& axes = plan.groups[static_cast<size_t>(g)].axes;
    const auto axis =
        std::find_if(axes.begin(), axes.end(), [](const MeshAxis& a) {
          return a.size == 2 && a.name.starts_with("dp");
        });
    if (axis == axes.end()) continue;
    any_axis = true;
    auto split = SplitBranches(branches, plan, GroupId(g),
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

// What there is to split of heads that share keys and values in groups.
std::string ColumnsText(const GraphIndex& index, const UnusedAxes& unused,
                        int ranks) {
  const std::string columns = std::to_string(unused.columns);
  if (!unused.attention) return columns + " columns";
  if (unused.columns < ranks) return columns + " heads";
  const Node& node = index.graph->node(unused.node);
  const auto& extents = index.extents[unused.node.index()];
  const Indices& result = node.rule.results[0];
  std::vector<int64_t> split;
  for (size_t d = 0; d < result.size(); ++d) {
    const int f = result[d];
    if (f != index.SampleFactor(unused.node) &&
        f != index.SequenceFactor(unused.node) &&
        index.carried[node.results[0].index()][d] && extents[result[d]] > 1) {
      split.push_back(extents[result[d]]);
    }
  }
  // Key/value heads, and the query heads of each.
  if (split.size() != 2 || split[0] * split[1] != unused.columns) {
    return columns + " heads";
  }
  return std::to_string(split[0]) + " key/value heads of " +
         std::to_string(split[1]) + " query heads each";
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
                      " an empty shard: " + ColumnsText(index, unused, ranks) +
                      " cannot be split over " + std::to_string(ranks) +
                      " ranks ('" + index.graph->node(unused.node).name + "')");
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

// Why a zero-group leaves no rank another one to cut with; empty where it does.
// REQUIRES: the degrees make up the cluster.
std::string WhyNoCut(const GraphIndex& index, const Cluster& cluster,
                     const Strategy& strategy) {
  if (strategy.zero_group == 1) return "zero-group=1 has no other rank";
  if (strategy.zero_group != Strategy::kWithinNode) return "";
  // What is not complete yet alters no axes of copies.
  Strategy plain = strategy;
  plain.by_speed = false;
  plain.etp = 0;
  for (const DeviceGroup& group : GroupsOf(index, cluster, plain)) {
    const auto axes = ZeroGroupAxes(cluster, strategy, group);
    if (axes && *axes != 0) return "";
  }
  return "zero-group=node finds no two copies on one node";
}

// The first key that changes nothing on this cluster, or of this model.
// REQUIRES: the degrees make up the cluster.
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
       {"cp-kind", strategy.cp_kind, model + " has no operator 'attention'",
        [](Strategy& s) { s.cp_kind = Strategy().cp_kind; }}},
      {strategy.zigzag && !index.has_attention,
       {"cp-balance", "zigzag", model + " has no causal operator 'attention'",
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
  if (strategy.zero == 0) return std::nullopt;
  const std::string why = WhyNoCut(index, cluster, strategy);
  if (why.empty()) return std::nullopt;
  return IdleKey{"zero", std::to_string(strategy.zero), why,
                 [](Strategy& s) { s.zero = 0; }};
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
  const std::vector<int> starts =
      PositionStarts(index, cluster, strategy, plan.groups);
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
  plan.groups = GroupsOf(index, cluster, strategy);
  plan.schedule = strategy.schedule;
  plan.actions = strategy.actions;
  plan.microbatches =
      static_cast<int>(index.graph->global_batch / SamplesOf(strategy));
  plan.bucket_bytes = strategy.bucket;
  plan.prefetch = strategy.prefetch;
  plan.zigzag = strategy.zigzag ? strategy.cp : 0;
  TESSERA_RETURN_IF_ERROR(PlaceBlocks(index, cluster, strategy, plan));
  SetLayersAgain(index, {strategy.recompute, strategy.recompute_layers}, plan);
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
  // CutWeights leaves none of the weights that Validate alone would name.
  if (IsValid(index, cluster, plan)) return plan;
  const std::vector<Error> errors = Validate(index, cluster, plan);
  // As the strategy names it.
  if (errors[0].where == "zigzag") {
    return InvalidInput(
        SequenceDegree(index, plan) == 1
            ? "no causal attention splits its sequence: expected "
              "cp-balance=none"
            : ZigzagProblem(index, plan),
        "cp=" + std::to_string(strategy.cp) + ",cp-balance=zigzag");
  }
  return errors[0];
}

Result<Plan> PlanFromStrategy(const Graph& graph, const Cluster& cluster,
                              const Strategy& strategy) {
  return PlanFromStrategy(GraphIndex(graph), cluster, strategy);
}

}  // namespace tessera
