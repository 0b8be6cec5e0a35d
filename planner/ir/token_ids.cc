#include "planner/ir/token_ids.h"

#include <algorithm>
#include <limits>
#include <string>

#include "planner/ir/vocabulary.h"

namespace tessera {

int64_t VocabularyOf(const Graph& graph) {
  int64_t rows = std::numeric_limits<int32_t>::max();
  for (const Node& node : graph.nodes) {
    const bool is_one_hot = node.op->name == "one_hot";
    if (node.op->name != "embedding" && !is_one_hot) continue;
    const Tensor& ids = graph.tensor(node.operands[0]);
    if (ids.name != "tokens" && ids.name != "source") continue;
    if (!is_one_hot) {
      const Tensor& table = graph.tensor(node.operands[1]);
      rows = std::min(rows, TokensOf(node.attributes, table.shape[0]));
      continue;
    }
    // A comparison with a token, such as that of padding, bounds nothing.
    const auto places = static_cast<int64_t>(node.attribute("places"));
    if (node.attribute("first") == 0 && places > 1) {
      rows = std::min(rows, places);
    }
  }
  return rows;
}

Result<void> CheckEndOfText(const Graph& graph, int64_t id) {
  const int64_t vocabulary = VocabularyOf(graph);
  if (id < vocabulary) return {};
  return InvalidInput("is " + std::to_string(id) +
                          ": expected less than the vocabulary size " +
                          std::to_string(vocabulary),
                      "--end-of-text");
}

}  // namespace tessera
