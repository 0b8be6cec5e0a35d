#include "planner/plan/plan.h"

#include <algorithm>
#include <array>

namespace tessera {

std::span<const OptimizerRow> Optimizers() {
  static constexpr std::array kRows = {
      OptimizerRow{"adamw", "AdamW (Loshchilov and Hutter 2019)", 2},
      OptimizerRow{"momentum",
                   "gradient descent with momentum 0.9, as torch.optim.SGD", 1},
      OptimizerRow{"sgd", "plain gradient descent", 0},
  };
  return kRows;
}

std::optional<int> MomentsOf(std::string_view optimizer) {
  const auto row =
      std::ranges::find(Optimizers(), optimizer, &OptimizerRow::name);
  if (row == Optimizers().end()) return std::nullopt;
  return row->moments;
}

bool Uses(const Plan& plan, MemoryTier tier) {
  return std::ranges::any_of(plan.ops,
                             [&](const OpPlacement& op) {
                               return op.activation_tier == tier;
                             }) ||
         std::ranges::any_of(plan.weights, [&](const WeightPlacement& weight) {
           return weight.parameter_tier == tier ||
                  weight.optimizer_tier == tier;
         });
}

bool CanRecompute(const Graph& graph, NodeId id) {
  const Node& node = graph.node(id);
  return !node.op->once_per_step &&
         std::find(node.results.begin(), node.results.end(), graph.loss) ==
             node.results.end();
}

OpPlacement PlacementOf(const Graph& graph, const Plan& plan, NodeId id) {
  const Node& node = graph.node(id);
  if (node.pass == Pass::kForward) return plan.ops[id.index()];
  const Node& forward = graph.node(node.forward);
  const OpPlacement& placement = plan.ops[node.forward.index()];
  OpPlacement result;
  result.group = placement.group;
  result.chunk = placement.chunk;
  if (node.op->name == "sum") return result;
  result.rooted = placement.rooted;
  result.tiles = placement.tiles;
  if (node.op->streamed != 0) result.streamed = placement.streamed;
  for (size_t f = 0; f < node.rule.factors.size(); ++f) {
    const int from = forward.rule.FactorOf(node.rule.factors[f].letter);
    if (from >= 0) result.axes[f] = placement.axes[static_cast<size_t>(from)];
  }
  return result;
}

WeightHome HomeOf(const Graph& graph, const Plan& plan, TensorId weight) {
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    if (node.pass != Pass::kForward) break;
    for (size_t k = 0; k < node.operands.size(); ++k) {
      if (node.operands[k] != weight) continue;
      const OpPlacement& placement = plan.ops[i];
      return {NodeId(i), k, placement.group, OperandLayout(node, placement, k)};
    }
  }
  TESSERA_CHECK(false) << "weight " << graph.tensor(weight).name
                       << " is not read";
  return {};
}

std::vector<TensorId> Weights(const Graph& graph) {
  std::vector<TensorId> weights;
  for (size_t t = 0; t < graph.tensors.size(); ++t) {
    if (graph.tensors[t].kind == TensorKind::kWeight) {
      weights.push_back(TensorId(t));
    }
  }
  return weights;
}

namespace {

// The axes that shard a dimension of factor `f`.
AxisSet AxesOf(const Node& node, const OpPlacement& placement, uint8_t f) {
  const bool streamed = node.rule.factors[f].letter == node.op->streamed;
  return placement.axes[f] | (streamed ? placement.streamed : 0);
}

}  // namespace

Layout OperandLayout(const Node& node, const OpPlacement& placement,
                     size_t operand) {
  Layout layout;
  const Indices& indices = node.rule.operands[operand];
  for (size_t d = 0; d < indices.size(); ++d) {
    layout.dims[d] = AxesOf(node, placement, indices[d]);
  }
  layout.rooted = placement.rooted;
  return layout;
}

Layout ResultLayout(const Node& node, const OpPlacement& placement,
                    size_t result) {
  Layout layout;
  const Indices& indices = node.rule.results[result];
  for (size_t d = 0; d < indices.size(); ++d) {
    layout.dims[d] = AxesOf(node, placement, indices[d]);
  }
  for (size_t f = 0; f < node.rule.factors.size(); ++f) {
    const bool merged = node.op->coupling.Merges(node.rule.factors[f].letter);
    if (!merged && !Holds(indices, static_cast<int>(f))) {
      layout.partial |= placement.axes[f];
    }
  }
  // The sums of a streamed result go round with their blocks.
  layout.partial &= ~layout.sharded();
  layout.rooted = placement.rooted;
  return layout;
}

}  // namespace tessera
