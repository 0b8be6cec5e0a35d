#include "planner/search/mixed_plans.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>
#include <optional>
#include <ranges>
#include <utility>

#include "planner/plan/axis_roles.h"
#include "planner/plan/strategy.h"

namespace tessera {
namespace {

// Where all layers but those with the most work have less of the parameters,
// there is little to win.
constexpr double kWorthMixing = 0.03;
// Units that are looked at.
constexpr size_t kMostUnits = 64;
// Microbatches of the data parallelism that is mixed; walks go on from there.
constexpr int kMostMixed = 64;

// Blocks that are split alike.
struct Unit {
  std::vector<int> blocks;
  double elements = 0;  // of their weights
  double flops = 0;
};

// Those with most parameters for their work first.
std::vector<Unit> UnitsOf(const SearchSpace& space) {
  const GraphIndex& index = space.index;
  const Graph& graph = *index.graph;
  // By block the number of its unit: its class, joined with those that read one
  // of its weights.
  std::vector<int> unit_of(index.block_class);
  std::map<TensorId, int> reader;  // a block
  for (const Node& node : graph.nodes) {
    if (node.pass != Pass::kForward) continue;
    for (TensorId operand : node.operands) {
      if (graph.tensor(operand).kind != TensorKind::kWeight) continue;
      const auto [at, is_new] = reader.try_emplace(operand, node.block);
      const int own = unit_of[static_cast<size_t>(node.block)];
      const int joined = unit_of[static_cast<size_t>(at->second)];
      if (!is_new && own != joined) std::ranges::replace(unit_of, own, joined);
    }
  }
  std::map<int, Unit> units;
  for (size_t b = 0; b < unit_of.size(); ++b) {
    Unit& unit = units[unit_of[b]];
    unit.blocks.push_back(static_cast<int>(b));
    unit.flops += index.block_flops[b];
    for (size_t w : space.weights_of_block[b]) {
      unit.elements += static_cast<double>(index.weights[w].elements);
    }
  }
  std::vector<Unit> sorted;
  for (auto& [number, unit] : units) {
    if (unit.elements > 0) sorted.push_back(std::move(unit));
  }
  std::ranges::stable_sort(sorted, [](const Unit& a, const Unit& b) {
    return a.elements * b.flops > b.elements * a.flops;
  });
  return sorted;
}

bool IsWorthMixing(const std::vector<Unit>& units) {
  if (units.size() < 2) return false;
  const auto most = std::ranges::max_element(units, {}, &Unit::flops);
  const double all = std::accumulate(
      units.begin(), units.end(), 0.0,
      [](double sum, const Unit& unit) { return sum + unit.elements; });
  return all - most->elements >= kWorthMixing * all;
}

// How blocks may be split: by block its placements, none where that is not so.
using Splits = std::vector<std::vector<OpPlacement>>;

// As tensor parallelism along these axes of the group splits them, and as data
// parallelism along the others.
Splits TensorSplits(const SearchSpace& space, const Plan& base,
                    AxisSet tensor) {
  const DeviceGroup& group = base.groups[0];
  AxisRoles roles;
  roles.tensor = tensor;
  roles.data = group.all_axes() & ~tensor;
  Splits splits;
  const auto blocks = static_cast<int>(space.index.nodes_of_block.size());
  for (int b = 0; b < blocks; ++b) {
    splits.push_back(PlaceBlock(space.index, b, group, GroupId(0), roles));
  }
  return splits;
}

// As the base, but that what reads a weight has its columns split: the last
// factor of the weight that the result has, too.
Splits ColumnSplits(const SearchSpace& space, const Plan& base) {
  const GraphIndex& index = space.index;
  const Graph& graph = *index.graph;
  const DeviceGroup& group = base.groups[0];
  Splits splits;
  for (const std::vector<NodeId>& nodes : index.nodes_of_block) {
    std::vector<OpPlacement>& ops = splits.emplace_back();
    for (const NodeId id : nodes) {
      OpPlacement& op = ops.emplace_back(base.ops[id.index()]);
      const Node& node = graph.node(id);
      const auto weight =
          std::ranges::find_if(node.operands, [&](TensorId operand) {
            return graph.tensor(operand).kind == TensorKind::kWeight;
          });
      if (weight == node.operands.end() || node.rule.results.size() != 1) {
        continue;
      }
      const Indices& of_weight =
          node.rule
              .operands[static_cast<size_t>(weight - node.operands.begin())];
      const Indices& of_result = node.rule.results[0];
      const auto column = std::ranges::find_if(
          of_weight | std::views::reverse, [&](size_t factor) {
            return std::ranges::count(of_result, factor) > 0;
          });
      if (column == of_weight.rend()) continue;
      const auto factor = static_cast<size_t>(*column);
      const int64_t extent = index.Extent(id, factor, graph.global_batch);
      AxisSet& columns = op.axes[factor];
      for (size_t a = 0; a < group.axes.size(); ++a) {
        const AxisSet with = columns | AxisSet{1} << a;
        if (group.Size(with) > extent) continue;
        for (AxisSet& axes : op.axes) axes &= ~(AxisSet{1} << a);
        columns = with;
      }
    }
  }
  return splits;
}

// Mixes plans of one mesh.
class Mixer {
 public:
  Mixer(const SearchSpace& space, const Objective& objective,
        const std::vector<Unit>& units, const Plan& like,
        const std::function<bool()>& stop)
      : space_(space), objective_(objective), units_(units), stop_(stop) {
    const DeviceGroup& group = like.groups[0];
    const AxisSet all = group.all_axes();
    const AxisSet within = AxesWithinNode(*space_.cluster, group);
    ways_ = {Splits(), ColumnSplits(space_, like),
             TensorSplits(space_, like, all)};
    if (within != 0 && within != all) {
      ways_.push_back(TensorSplits(space_, like, within));
    }
  }

  // For each unit the way it is split, from 1 on; 0: as the base has it.
  using Choice = std::vector<size_t>;

  size_t ways() const { return ways_.size(); }

  // One way for those units that have most parameters for their work, as many
  // as is best; nothing where no number of them gives an allowed plan.
  std::optional<Choice> BestOf(const Plan& base, size_t way) const {
    Choice choice(units_.size(), 0);
    std::optional<FoundPlan> best = With(base, choice);
    Choice some = choice;
    for (size_t& of_unit : some) {
      of_unit = way;
      See(base, some, best, choice);
    }
    if (!best) return std::nullopt;
    return choice;
  }

  // Changes the choice unit by unit where that makes the plan better.
  void Improve(const Plan& base, std::optional<FoundPlan>& best,
               Choice& choice) const {
    for (size_t u = 0; u < units_.size(); ++u) {
      for (size_t way = 0; way < ways_.size(); ++way) {
        Choice other = choice;
        other[u] = way;
        if (other != choice) See(base, other, best, choice);
      }
    }
  }

  std::optional<FoundPlan> With(const Plan& base, const Choice& choice) const {
    Plan plan = base;
    for (size_t u = 0; u < units_.size(); ++u) {
      if (choice[u] > 0) Place(units_[u], ways_[choice[u]], plan);
    }
    if (!MakeCanonical(space_, plan) || !Allowed(space_, plan)) {
      return std::nullopt;
    }
    Evaluation evaluation = objective_.Evaluate(plan);
    return FoundPlan{std::move(plan), std::move(evaluation)};
  }

 private:
  void See(const Plan& base, const Choice& other,
           std::optional<FoundPlan>& best, Choice& choice) const {
    if (stop_()) return;
    auto found = With(base, other);
    if (!found || (best && !Better(found->evaluation, best->evaluation))) {
      return;
    }
    best = std::move(found);
    choice = other;
  }

  void Place(const Unit& unit, const Splits& splits, Plan& to) const {
    for (int b : unit.blocks) {
      const auto block = static_cast<size_t>(b);
      const auto& nodes = space_.index.nodes_of_block[block];
      for (size_t i = 0; i < splits[block].size(); ++i) {
        OpPlacement& op = to.ops[nodes[i].index()];
        op.axes = splits[block][i].axes;
        op.streamed = splits[block][i].streamed;
      }
    }
  }

  const SearchSpace& space_;
  const Objective& objective_;
  const std::vector<Unit>& units_;
  const std::function<bool()>& stop_;
  std::vector<Splits> ways_;  // but the first
};

// Data parallelism with as few microbatches as may be, and more.
std::vector<Plan> DataParallel(const SearchSpace& space) {
  std::vector<Plan> plans;
  const int64_t batch = space.index.graph->global_batch;
  for (int m = 1; m <= kMostMixed; m *= 2) {
    for (const int zero : {1, 0, 3}) {
      Strategy strategy;
      strategy.dp = space.devices();
      strategy.zero = space.devices() > 1 ? zero : 0;
      if (batch % (int64_t{strategy.dp} * m) != 0) continue;
      strategy.mbs = static_cast<int>(batch / strategy.dp / m);
      auto plan = PlanFromStrategy(space.index, *space.cluster, strategy);
      if (plan) plans.push_back(*std::move(plan));
    }
  }
  return plans;
}

}  // namespace

std::vector<FoundPlan> MixedPlans(const SearchSpace& space,
                                  const Objective& objective,
                                  std::span<const Plan> bases,
                                  const std::function<bool()>& stop) {
  // Of many unlike layers each plan takes long to price.
  if (space.devices() == 1 || objective.EstimatesUniform()) return {};
  std::vector<Unit> units = UnitsOf(space);
  if (!IsWorthMixing(units)) return {};
  units.resize(std::min(units.size(), kMostUnits));
  std::vector<Plan> all = DataParallel(space);
  if (all.empty()) return {};
  const Mixer mixer(space, objective, units, all[0], stop);
  std::ranges::copy_if(bases, std::back_inserter(all), [&](const Plan& base) {
    return std::ranges::equal(base.groups, all[0].groups, SameMesh);
  });
  std::vector<FoundPlan> mixed;
  for (size_t way = 1; way < mixer.ways(); ++way) {
    // What is best for one base is nearly that for the others. Constraints may
    // rule out the first ones.
    std::optional<Mixer::Choice> choice;
    for (const Plan& probe : all) {
      if (choice || stop()) break;
      choice = mixer.BestOf(probe, way);
    }
    if (!choice) continue;
    std::optional<FoundPlan> best;
    const Plan* base = nullptr;
    for (const Plan& other : all) {
      if (stop()) break;
      auto found = mixer.With(other, *choice);
      if (!found || (best && !Better(found->evaluation, best->evaluation))) {
        continue;
      }
      best = std::move(found);
      base = &other;
    }
    if (!best) continue;
    mixed.push_back(*best);
    mixer.Improve(*base, best, *choice);
    if (best->plan != mixed.back().plan) mixed.push_back(*std::move(best));
  }
  std::ranges::stable_sort(mixed, [](const FoundPlan& a, const FoundPlan& b) {
    return Better(a.evaluation, b.evaluation);
  });
  return mixed;
}

}  // namespace tessera
