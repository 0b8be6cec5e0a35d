#include "planner/plan/tiles.h"

#include <algorithm>

namespace tessera {

int TiledDim(const Graph& graph, TensorId weight) {
  const Shape& shape = graph.tensor(weight).shape;
  const auto it = std::find_if(shape.begin(), shape.end(),
                               [](int64_t extent) { return extent > 1; });
  return it == shape.end() ? 0 : static_cast<int>(it - shape.begin());
}

int TiledFactor(const Graph& graph, const OpPlacement& placement, NodeId id) {
  const Node& node = graph.node(id);
  if (placement.tiles == 1 ||
      (node.op->name != "linear" && node.op->name != "linear_dx" &&
       node.op->name != "linear_dw")) {
    return -1;
  }
  const Node& forward = node.forward.valid() ? graph.node(node.forward) : node;
  const auto dim = static_cast<size_t>(TiledDim(graph, forward.operands[1]));
  const uint8_t factor = forward.rule.operands[1][dim];
  return node.rule.FactorOf(forward.rule.factors[factor].letter);
}

bool CanTile(const GraphIndex& index, NodeId id) {
  const Node& node = index.graph->node(id);
  if (node.op->name != "linear" ||
      index.graph->tensor(node.operands[1]).kind != TensorKind::kWeight ||
      index.readers[node.operands[1].index()].size() != 1) {
    return false;
  }
  // A weight of one row has the reduced dimension alone.
  const auto dim =
      static_cast<size_t>(TiledDim(*index.graph, node.operands[1]));
  return Holds(node.rule.results[0], node.rule.operands[1][dim]);
}

int MostTiles(const GraphIndex& index, const Plan& plan, NodeId id) {
  const Node& node = index.graph->node(id);
  const OpPlacement& placement = plan.ops[id.index()];
  const auto dim =
      static_cast<size_t>(TiledDim(*index.graph, node.operands[1]));
  const AxisSet axes = placement.axes[node.rule.operands[1][dim]];
  const int64_t rows =
      index.graph->tensor(node.operands[1]).shape[dim] /
      std::max<int64_t>(1, plan.groups[placement.group.index()].Size(axes));
  return static_cast<int>(std::clamp<int64_t>(rows, 1, kMostTiles));
}

void SetTiles(const GraphIndex& index, int block, int tiles, Plan& plan) {
  for (NodeId node : index.nodes_of_block[static_cast<size_t>(block)]) {
    plan.ops[node.index()].tiles =
        CanTile(index, node) ? std::min(tiles, MostTiles(index, plan, node))
                             : 1;
  }
}

std::optional<int> TilesOf(const GraphIndex& index, const Plan& plan,
                           int block) {
  const auto& nodes = index.nodes_of_block[static_cast<size_t>(block)];
  int tiles = 1;
  for (NodeId node : nodes) {
    tiles = std::max(tiles, plan.ops[node.index()].tiles);
  }
  const bool so = std::all_of(nodes.begin(), nodes.end(), [&](NodeId node) {
    const int most = CanTile(index, node) ? MostTiles(index, plan, node) : 1;
    return plan.ops[node.index()].tiles == std::min(tiles, most);
  });
  return so ? std::optional(tiles) : std::nullopt;
}

}  // namespace tessera
