// The strategies of plans.

#include <algorithm>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "planner/plan/axis_roles.h"
#include "planner/plan/layers_again.h"
#include "planner/plan/rooted.h"
#include "planner/plan/stages.h"
#include "planner/plan/strategy.h"
#include "planner/plan/strategy_groups.h"
#include "planner/plan/work_shares.h"

namespace tessera {
namespace {

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
  const Plan plain = WithoutRoot(index, plan);
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
    const auto of_block = RolesOf(index, plain, static_cast<int>(b));
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
  const auto again = LayersAgainOf(index, plan);
  if (!again.has_value()) return std::nullopt;
  strategy.recompute = again->level;
  strategy.recompute_layers = again->layers;
  if (roles.heads) strategy.cp_kind = "ulysses";
  if (roles.ring) strategy.cp_kind = "ring";
  const int64_t parts = int64_t{plan.microbatches} * strategy.dp * strategy.ep;
  if (parts == 0 || index.graph->global_batch % parts != 0) return std::nullopt;
  strategy.mbs = static_cast<int>(index.graph->global_batch / parts);
  return strategy;
}

}  // namespace

std::optional<Strategy> UniformStrategy(const GraphIndex& index,
                                        const Cluster& cluster,
                                        const Plan& plan) {
  std::optional<Strategy> found = WithoutOrder(index, plan);
  if (!found) return std::nullopt;
  Strategy strategy = *std::move(found);
  // The plan it gives must be this one, up to names.
  const auto complete = Complete(index, cluster, strategy);
  if (!complete) return std::nullopt;
  struct Way {
    std::vector<MeshDimension> order;
    bool by_speed;
  };
  std::vector<Way> ways;
  const bool unlike = HasUnlikeSpeeds(cluster, index.graph->dtype);
  for (const std::vector<MeshDimension>& order : UsualOrders()) {
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
      std::pair groups = {by_speed, GroupsOf(index, cluster, of_order)};
      const bool same =
          std::ranges::equal(groups.second, plan.groups,
                             [](const DeviceGroup& a, const DeviceGroup& b) {
                               return a.devices == b.devices && SameMesh(a, b);
                             });
      if (!same || std::ranges::find(tried, groups) != tried.end()) continue;
      tried.push_back(std::move(groups));
    }
    const auto made = PlanFromStrategy(index, cluster, strategy);
    if (!made) continue;
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
