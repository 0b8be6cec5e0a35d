#include "planner/search/adapt.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "planner/plan/axis_roles.h"
#include "planner/plan/idle_keys.h"
#include "planner/plan/layers_again.h"
#include "planner/plan/recompute.h"
#include "planner/plan/rooted.h"
#include "planner/plan/stages.h"
#include "planner/plan/strategy_groups.h"
#include "planner/schedule/action_table.h"
#include "planner/search/uniform_strategies.h"

namespace tessera {
namespace {

// Where most of the weight is.
template <typename T>
T MostOf(const std::map<T, double>& weights, const T& otherwise) {
  const auto most = std::ranges::max_element(
      weights,
      [](const auto& a, const auto& b) { return a.second < b.second; });
  return most == weights.end() ? otherwise : most->first;
}

// What the axes of a block do, by their sizes.
struct Degrees {
  int64_t data = 1;
  int64_t expert = 1;
  int64_t context = 1;
  int64_t tensor = 1;
  int64_t folded = 1;
  bool sequence = false;
  bool heads = false;
  bool ring = false;
  auto operator<=>(const Degrees&) const = default;
};

// The dimensions of a strategy, innermost first, by how far apart the devices
// of neighbours are: of the usual orders the first that has those of several
// ranks so.
std::vector<MeshDimension> OrderOf(const Plan& plan, const DeviceGroup& group,
                                   const AxisRoles& roles) {
  const auto apart = [](DeviceId a, DeviceId b) {
    return std::abs(a.value - b.value);
  };
  std::map<MeshDimension, int64_t> distances;
  int64_t stride = 1;
  for (size_t a = group.axes.size(); a-- > 0;) {
    if (group.axes[a].size == 1) continue;
    const AxisSet axis = AxisSet{1} << a;
    const int64_t distance =
        apart(group.devices[0], group.devices[static_cast<size_t>(stride)]);
    stride *= group.axes[a].size;
    for (const auto& [dimension, axes] :
         {std::pair(MeshDimension::kTensor, roles.tensor),
          std::pair(MeshDimension::kContext, roles.context),
          std::pair(MeshDimension::kExpert, roles.expert),
          std::pair(MeshDimension::kData, roles.data)}) {
      if (axes & axis) distances.emplace(dimension, distance);
    }
  }
  if (plan.groups.size() > 1) {
    distances[MeshDimension::kPipeline] =
        apart(plan.groups[0].devices[0], plan.groups[1].devices[0]);
  }
  for (const std::vector<MeshDimension>& order : UsualOrders()) {
    int64_t last = 0;
    const bool rises = std::ranges::all_of(order, [&](MeshDimension dimension) {
      const auto found = distances.find(dimension);
      if (found == distances.end()) return true;
      return std::exchange(last, found->second) <= found->second;
    });
    if (rises) return order;
  }
  return Strategy().order;
}

// Sets the degrees of most blocks and the order of their dimensions.
void SetDegrees(const GraphIndex& index, const Plan& plan, Strategy& strategy) {
  std::map<Degrees, double> degrees;
  std::map<std::vector<MeshDimension>, double> orders;
  for (size_t b = 0; b < index.nodes_of_block.size(); ++b) {
    const auto& nodes = index.nodes_of_block[b];
    if (nodes.empty()) continue;
    const double weight = 1 + index.block_flops[b];
    const auto roles = RolesOf(index, plan, static_cast<int>(b));
    if (!roles.has_value()) continue;
    const DeviceGroup& group =
        plan.groups[plan.ops[nodes[0].index()].group.index()];
    degrees[{group.Size(roles->data), group.Size(roles->expert),
             group.Size(roles->context), group.Size(roles->tensor),
             group.Size(roles->folded), roles->sequence, roles->heads,
             roles->ring}] += weight;
    orders[OrderOf(plan, group, *roles)] += weight;
  }
  const Degrees most = MostOf(degrees, Degrees());
  strategy.dp = static_cast<int>(most.data);
  strategy.ep = static_cast<int>(most.expert);
  strategy.cp = static_cast<int>(most.context);
  strategy.tp = static_cast<int>(most.tensor);
  if (most.folded > 1) {
    strategy.etp = static_cast<int>(most.tensor / most.folded);
  }
  strategy.sp = most.sequence;
  if (most.heads) strategy.cp_kind = "ulysses";
  if (most.ring) strategy.cp_kind = "ring";
  strategy.order = MostOf(orders, strategy.order);
}

// Sets what most blocks have: how often their operators run, in how many tiles,
// and where their activations are.
void SetRuns(const GraphIndex& index, const Plan& plan, Strategy& strategy) {
  std::map<RecomputeLevel, double> levels;
  std::map<int, double> tiles;
  std::map<MemoryTier, double> activations;
  for (size_t b = 0; b < index.nodes_of_block.size(); ++b) {
    const auto& nodes = index.nodes_of_block[b];
    if (nodes.empty()) continue;
    const double weight = 1 + index.block_flops[b];
    const auto level = RecomputeOf(index, plan, static_cast<int>(b));
    if (level.has_value()) levels[*level] += weight;
    int most_tiles = 1;
    MemoryTier tier = MemoryTier::kDevice;
    for (NodeId node : nodes) {
      most_tiles = std::max(most_tiles, plan.ops[node.index()].tiles);
      tier = std::max(tier, plan.ops[node.index()].activation_tier);
    }
    tiles[most_tiles] += weight;
    activations[tier] += weight;
  }
  strategy.tiles = MostOf(tiles, 1);
  strategy.activation_tier = MostOf(activations, MemoryTier::kDevice);
  if (const auto again = LayersAgainOf(index, plan)) {
    strategy.recompute = again->level;
    strategy.recompute_layers = again->layers;
  } else {
    strategy.recompute = MostOf(levels, RecomputeLevel::kNone);
  }
}

// Sets how most parameters are stored.
void SetStorage(const GraphIndex& index, const Plan& plan, Strategy& strategy) {
  const std::vector<AxisSet> whole = AllZeroAxes(index, plan);
  std::map<std::pair<int, int>, double> zero;  // by stage and ranks, 0 for all
  std::map<MemoryTier, double> parameters;
  std::map<MemoryTier, double> optimizer;
  std::map<MemoryTier, double> gradients;
  for (size_t w = 0; w < plan.weights.size(); ++w) {
    const auto elements = static_cast<double>(index.weights[w].elements);
    const WeightPlacement& weight = plan.weights[w];
    const DeviceGroup& home =
        plan.groups[plan.ops[index.weights[w].home.node.index()].group.index()];
    const bool within = weight.zero_axes != 0 && weight.zero_axes != whole[w];
    const auto ranks = static_cast<int>(home.Size(weight.zero_axes));
    zero[{weight.zero_stage, within ? ranks : 0}] += elements;
    parameters[plan.weights[w].parameter_tier] += elements;
    optimizer[plan.weights[w].optimizer_tier] += elements;
    gradients[plan.weights[w].gradient_tier] += elements;
  }
  std::tie(strategy.zero, strategy.zero_group) = MostOf(zero, std::pair(0, 0));
  strategy.parameter_tier = MostOf(parameters, MemoryTier::kDevice);
  strategy.optimizer_tier = MostOf(optimizer, MemoryTier::kDevice);
  if (strategy.optimizer_tier != MemoryTier::kDevice) {
    strategy.gradient_tier = MostOf(gradients, MemoryTier::kDevice);
  }
}

double Distance(int64_t a, int64_t b) {
  return std::abs(std::log(static_cast<double>(a) / static_cast<double>(b)));
}

// A strategy, and how far its degrees are from another's: that of the pipeline,
// and the others together.
struct Near {
  double stages = 0;
  double others = 0;
  Strategy strategy;
};

int64_t SamplesOfReplica(const Strategy& strategy) {
  return strategy.mbs;
}

// `rough` with all degrees that make up the cluster and the microbatch whose
// `samples` are nearest to its own; with context parallelism by
// `context_kinds`, or none.
std::vector<Near> NearStrategies(const SearchSpace& space,
                                 const Strategy& rough,
                                 const std::vector<std::string>& context_kinds,
                                 int64_t (*samples)(const Strategy&)) {
  std::vector<Near> near;
  const auto add = [&](Strategy s) {
    if (s.etp > 0 && s.tp % s.etp != 0) s.etp = 0;
    if (s.pp != rough.pp) s.recompute_layers = 0;
    const int copies = s.dp * s.ep * s.cp;
    if (s.zero_group > 0 && (copies <= s.zero_group || copies % s.zero_group)) {
      s.zero_group = 0;
    }
    const auto sized = WithSamples(space, WithoutIdleKeys(space, s));
    if (sized.empty()) return;
    const auto& nearest =
        *std::ranges::min_element(sized, {}, [&](const Strategy& with) {
          return Distance(samples(with), samples(rough));
        });
    near.push_back({Distance(s.pp, rough.pp),
                    Distance(s.tp, rough.tp) + Distance(s.cp, rough.cp) +
                        Distance(s.ep, rough.ep),
                    WithSchedule(space, nearest)});
  };
  const int devices = space.devices();
  for (int tp : Divisors(devices)) {
    for (int pp : Divisors(devices / tp)) {
      for (int cp : Divisors(context_kinds.empty() ? 1 : devices / tp / pp)) {
        for (int ep : Divisors(rough.ep == 1 ? 1 : devices / tp / pp / cp)) {
          Strategy s = rough;
          s.tp = tp;
          s.pp = pp;
          s.cp = cp;
          s.ep = ep;
          s.dp = devices / tp / pp / cp / ep;
          if (cp != rough.cp) s.zigzag = IsBalancedByZigzag(space, s);
          if (cp == 1) {
            add(std::move(s));
            continue;
          }
          for (const std::string& kind : context_kinds) {
            s.cp_kind = kind;
            add(s);
          }
        }
      }
    }
  }
  return near;
}

}  // namespace

Strategy RoughStrategy(const GraphIndex& index, const Plan& plan) {
  Strategy strategy;
  strategy.by_speed =
      std::ranges::any_of(plan.groups, [](const DeviceGroup& group) {
        return group.IsUneven(group.all_axes());
      });
  strategy.pp = StagesOf(*index.graph, plan).count();
  strategy.vp = ShapeOf(*index.graph, plan).chunks;
  strategy.schedule = plan.schedule;
  strategy.actions = plan.actions;
  strategy.bucket = plan.bucket_bytes;
  strategy.prefetch = plan.prefetch;
  strategy.zigzag = plan.zigzag > 1;
  if (UsesRoot(plan)) strategy.dp_kind = DataParallelKind::kRooted;
  SetDegrees(index, plan, strategy);
  SetRuns(index, plan, strategy);
  SetStorage(index, plan, strategy);
  const double parts =
      static_cast<double>(plan.microbatches) * strategy.dp * strategy.ep;
  const double samples = static_cast<double>(index.graph->global_batch) / parts;
  strategy.mbs = static_cast<int>(std::clamp(samples, 1.0, 1e9));
  return strategy;
}

Strategy WithoutIdleKeys(const SearchSpace& space, const Strategy& strategy) {
  std::vector<std::string> notes;
  return WithoutIdleKeys(space.index, *space.cluster, strategy, notes);
}

Plan ForBatch(Plan plan, int64_t from, int64_t to) {
  const int before = plan.microbatches;
  const double wanted = static_cast<double>(plan.microbatches) *
                        static_cast<double>(to) / static_cast<double>(from);
  const std::vector<int> divisors = Divisors(to);
  plan.microbatches = *std::ranges::min_element(divisors, {}, [&](int count) {
    return std::abs(std::log(count / wanted));
  });
  if (plan.microbatches != before && !plan.actions.empty()) {
    const bool one_chunk = ShapeOf(plan.actions).chunks == 1;
    plan.schedule = one_chunk ? Strategy().schedule : "interleaved";
    plan.actions.clear();
  }
  return plan;
}

std::vector<Plan> AdaptedPlans(const SearchSpace& space, const Plan& old,
                               size_t count) {
  std::vector<Plan> plans;
  const auto add = [&](Plan plan) {
    const bool is_there = std::ranges::any_of(
        plans, [&](const Plan& p) { return SameUpToNames(p, plan); });
    if (!is_there && Allowed(space, plan)) plans.push_back(std::move(plan));
  };
  Plan same = old;
  if (MakeCanonical(space, same)) add(std::move(same));
  const Strategy rough = RoughStrategy(space.index, old);
  std::vector<std::string> kinds;
  if (rough.cp > 1) kinds.push_back(rough.cp_kind);
  std::vector<Near> near =
      NearStrategies(space, rough, kinds, SamplesOfReplica);
  std::ranges::stable_sort(near, {},
                           [](const Near& n) { return n.stages + n.others; });
  for (const Near& n : near) {
    if (plans.size() >= count) break;
    auto plan = PlanFromStrategy(space.index, *space.cluster, n.strategy);
    if (plan) add(*std::move(plan));
  }
  return plans;
}

std::optional<Strategy> NearestOfItsKind(const SearchSpace& space,
                                         const Strategy& rough) {
  std::vector<std::string> kinds = {rough.cp_kind};
  if (rough.cp == 1) kinds = {"gather", "ring", "ulysses"};
  std::vector<Near> near = NearStrategies(space, rough, kinds, SamplesOf);
  std::erase_if(near, [&](const Near& n) {
    return (n.strategy.pp > 1) != (rough.pp > 1);
  });
  std::ranges::stable_sort(
      near, {}, [](const Near& n) { return std::pair(n.stages, n.others); });
  for (const Near& n : near) {
    const auto plan = PlanFromStrategy(space.index, *space.cluster, n.strategy);
    if (!plan) continue;
    auto uniform = UniformStrategy(space.index, *space.cluster, *plan);
    if (uniform) return uniform;
  }
  return std::nullopt;
}

}  // namespace tessera
