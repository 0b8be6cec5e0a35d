#include "planner/plan/whole_extents.h"

#include <algorithm>

namespace tessera {

std::array<int64_t, kMaxFactors> WholeExtents(const Graph& graph,
                                              const Node& node) {
  std::array<int64_t, kMaxFactors> extents = {};
  const auto read = [&](const std::vector<TensorId>& tensors,
                        const std::vector<Indices>& sides) {
    // A coupled operator's state stands behind its operands.
    for (size_t i = 0; i < std::min(tensors.size(), sides.size()); ++i) {
      const Shape& shape = graph.tensor(tensors[i]).shape;
      for (size_t d = 0; d < sides[i].size(); ++d) {
        extents[sides[i][d]] = shape[d];
      }
    }
  };
  read(node.results, node.rule.results);
  read(node.operands, node.rule.operands);
  return extents;
}

}  // namespace tessera
