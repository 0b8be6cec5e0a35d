#include "planner/ir/vocabulary.h"

#include <algorithm>

namespace tessera {

int64_t TokensOf(std::span<const Attribute> attributes, int64_t rows) {
  const auto found =
      std::ranges::find(attributes, kVocabulary, &Attribute::name);
  return found == attributes.end() ? rows : static_cast<int64_t>(found->value);
}

std::string VocabularyProblem(std::span<const Attribute> attributes,
                              int64_t rows) {
  if (std::ranges::count(attributes, kVocabulary, &Attribute::name) > 1) {
    return "'vocabulary' occurs twice";
  }
  const int64_t tokens = TokensOf(attributes, rows);
  if (tokens <= rows) return "";
  return "'vocabulary' is " + std::to_string(tokens) +
         ": expected at most the " + std::to_string(rows) + " rows that it has";
}

std::map<TensorId, int64_t> PaddedWeights(const Graph& graph) {
  std::map<TensorId, int64_t> padded;
  const auto add = [&](TensorId weight, int64_t tokens) {
    const Tensor& tensor = graph.tensor(weight);
    if (tensor.kind == TensorKind::kWeight && tokens < tensor.shape[0]) {
      padded[weight] = tokens;
    }
  };
  for (const Node& node : graph.nodes) {
    if (node.pass != Pass::kForward) break;
    if (std::ranges::count(node.attributes, kVocabulary, &Attribute::name) ==
        0) {
      continue;
    }
    if (node.op->name == "embedding") {
      const TensorId table = node.operands[1];
      add(table, TokensOf(node.attributes, graph.tensor(table).shape[0]));
      continue;
    }
    const TensorId logits = node.operands[0];
    const auto maker =
        std::ranges::find_if(graph.nodes, [&](const Node& other) {
          return std::ranges::count(other.results, logits) > 0;
        });
    if (maker == graph.nodes.end() || maker->op->op_class != OpClass::kMatmul) {
      continue;
    }
    const int64_t tokens =
        TokensOf(node.attributes, graph.tensor(logits).shape.back());
    const IndexRule& rule = maker->rule;
    for (size_t i = 0; i < rule.operands.size(); ++i) {
      const Indices& indices = rule.operands[i];
      if (!indices.empty() && indices[0] == rule.results[0].back()) {
        add(maker->operands[i], tokens);
      }
    }
  }
  return padded;
}

}  // namespace tessera
