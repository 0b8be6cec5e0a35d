#pragma once
// Where a plan has a weight at home: with the first forward node that reads it.

#include <cstddef>

#include "planner/plan/graph_index.h"
#include "planner/plan/plan.h"

namespace tessera {

struct WeightHome {
  GroupId group;
  Layout layout;  // of the stored parameter
};

// `weight` counts as in GraphIndex::weights.
inline WeightHome HomeOf(const GraphIndex& index, const Plan& plan,
                         size_t weight) {
  const auto [reader, operand] = index.weights[weight].home;
  const OpPlacement& placement = plan.ops[reader.index()];
  return {placement.group,
          OperandLayout(*index.graph, index.graph->node(reader), placement,
                        plan.groups[placement.group.index()], operand)};
}

}  // namespace tessera
