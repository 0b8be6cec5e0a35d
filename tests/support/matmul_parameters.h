#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "planner/base/element_count.h"
#include "planner/ir/graph.h"

namespace tessera {

// Trained scalars that take part in a token's matrix products: each weight once
// for every linear that reads it (a tied output head once, lookups not), of
// experts the share that a token is routed to.
inline int64_t MatmulParameterCount(const Graph& graph) {
  int64_t count = 0;
  for (const Node& node : graph.nodes) {
    if (node.pass != Pass::kForward || node.op->op_class != OpClass::kMatmul) {
      continue;
    }
    for (size_t k = 0; k < node.operands.size(); ++k) {
      const Tensor& tensor = graph.tensor(node.operands[k]);
      if (tensor.kind != TensorKind::kWeight || tensor.shape.size() < 2 ||
          node.rule.terms[k] != 0) {
        continue;
      }
      const bool of_experts = std::ranges::any_of(
          node.attributes,
          [](const Attribute& a) { return a.name == "top_k"; });
      const double active =
          of_experts
              ? node.attribute("top_k") / static_cast<double>(tensor.shape[0])
              : 1;
      count += std::llround(active *
                            static_cast<double>(ElementCount(tensor.shape)));
    }
  }
  return count;
}

}  // namespace tessera
