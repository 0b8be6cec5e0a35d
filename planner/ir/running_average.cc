#include "planner/ir/running_average.h"

#include <algorithm>

namespace tessera {

std::vector<double> RunningMomenta(const Graph& graph) {
  // Of x, scale, shift, and the averages of mean and variance.
  constexpr size_t kFirst = 3;
  std::vector<double> momenta(graph.tensors.size(), -1);
  for (const Node& node : graph.nodes) {
    if (node.pass != Pass::kForward || node.op == nullptr ||
        std::ranges::find(node.op->attributes, "momentum",
                          &AttributeDef::name) == node.op->attributes.end()) {
      continue;
    }
    for (size_t k = kFirst; k < node.operands.size(); ++k) {
      const TensorId id = node.operands[k];
      if (graph.tensor(id).kind == TensorKind::kWeight) {
        momenta[id.index()] = node.attribute("momentum");
      }
    }
  }
  return momenta;
}

}  // namespace tessera
