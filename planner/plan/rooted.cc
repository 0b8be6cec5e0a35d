#include "planner/plan/rooted.h"

#include <algorithm>

namespace tessera {

void SetRooted(const GraphIndex& index, const std::vector<AxisSet>& data,
               Plan& plan) {
  const auto move = [&](NodeId id) {
    OpPlacement& placement = plan.ops[id.index()];
    placement.rooted = data[placement.group.index()];
    for (AxisSet& axes : placement.axes) axes &= ~placement.rooted;
  };
  const NodeId loss = index.producer[index.graph->loss.index()];
  move(loss);
  for (TensorId operand : index.graph->node(loss).operands) {
    const NodeId from = index.producer[operand.index()];
    if (from.valid() && index.graph->node(from).op->once_per_step) move(from);
  }
  for (size_t w = 0; w < plan.weights.size(); ++w) {
    const auto& [node, operand] = index.weights[w].home;
    const OpPlacement& placement = plan.ops[node.index()];
    const Layout stored =
        OperandLayout(*index.graph, index.graph->node(node), placement,
                      plan.groups[placement.group.index()], operand);
    plan.weights[w].rooted = data[placement.group.index()] & ~stored.sharded();
  }
}

bool UsesRoot(const Plan& plan) {
  const auto rooted = [](const auto& placement) {
    return placement.rooted != 0;
  };
  return std::ranges::any_of(plan.weights, rooted) ||
         std::ranges::any_of(plan.ops, rooted);
}

Plan WithoutRoot(const GraphIndex& index, Plan plan) {
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    OpPlacement& op = plan.ops[i];
    if (op.rooted == 0) continue;
    const int sample = index.SampleFactor(NodeId(i));
    if (sample >= 0) op.axes[static_cast<size_t>(sample)] |= op.rooted;
    op.rooted = 0;
  }
  for (WeightPlacement& weight : plan.weights) weight.rooted = 0;
  return plan;
}

}  // namespace tessera
