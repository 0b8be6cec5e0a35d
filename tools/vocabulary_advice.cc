#include "tools/vocabulary_advice.h"

#include <algorithm>
#include <numeric>

#include "runtime/float16.h"

namespace tessera {
namespace {

// 16 bytes of 16-bit numbers: what cuBLASLt's kernels for tensor cores load at
// once.
constexpr int64_t kAligned = 8;
// Megatron-LM's --make-vocab-size-divisible-by, of each rank's rows.
constexpr int64_t kUsual = 128;

// Rows of the largest table in which tokens are looked up; 0: none.
int64_t LargestTable(const Graph& graph) {
  int64_t rows = 0;
  for (const Node& node : graph.nodes) {
    if (node.pass != Pass::kForward || node.op->name != "embedding") continue;
    const std::string& ids = graph.tensor(node.operands[0]).name;
    if (ids != "tokens" && ids != "source") continue;
    rows = std::max(rows, graph.tensor(node.operands[1]).shape[0]);
  }
  return rows;
}

}  // namespace

std::string VocabularyAdvice(const Graph& graph, const Plan& plan) {
  if (!Is16Bit(graph.dtype)) return "";
  const int64_t table = LargestTable(graph);
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    if (node.pass != Pass::kForward) break;
    if (node.op->name != "cross_entropy") continue;
    const int64_t rows = graph.tensor(node.operands[0]).shape.back();
    if (rows != table) continue;  // a head of labels
    const OpPlacement& placement = plan.ops[n];
    const int v = node.rule.FactorOf('v');
    const int64_t shards = plan.groups[placement.group.index()].Size(
        placement.axes[static_cast<size_t>(v)]);
    if (rows % (shards * kAligned) == 0) continue;
    const int64_t multiple = std::lcm(kUsual, shards * kAligned);
    return "rows of " + std::to_string(rows) + " logits" +
           (shards > 1 ? " on " + std::to_string(shards) + " ranks" : "") +
           " are not aligned to 16 bytes, which makes their matrix products "
           "slow; --set model.vocab_multiple=" +
           std::to_string(multiple) + " pads them, with the same losses";
  }
  return "";
}

}  // namespace tessera
