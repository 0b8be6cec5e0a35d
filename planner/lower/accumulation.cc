#include "planner/lower/accumulation.h"

#include <cstddef>

namespace tessera {

bool AddsItsGradients(const Graph& graph, const Node& node) {
  bool any = false;
  bool adds = true;
  for (size_t k = 0; k < node.results.size(); ++k) {
    const bool of_weight =
        graph.tensor(node.results[k]).kind == TensorKind::kWeightGradient;
    any = any || of_weight;
    adds = adds && of_weight == AddsToResult(*node.op, k);
  }
  return adds || !any || OwnOpOf(*node.op) != nullptr;
}

}  // namespace tessera
