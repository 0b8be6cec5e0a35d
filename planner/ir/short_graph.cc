#include "planner/ir/short_graph.h"

#include <numeric>
#include <utility>

#include "planner/base/check.h"

namespace tessera {
namespace {

// Blocks that stay of each run of equal ones.
constexpr int kKept = 3;

// By block the one of the whole graph that stands for it.
std::vector<int> Representatives(const Graph& graph) {
  const std::vector<int> classes = BlockClasses(graph);
  const auto n = static_cast<int>(classes.size());
  std::vector<int> stands(classes.size());
  std::iota(stands.begin(), stands.end(), 0);
  for (int begin = 0, end = 0; begin < n; begin = end) {
    while (end < n && classes[static_cast<size_t>(end)] ==
                          classes[static_cast<size_t>(begin)]) {
      ++end;
    }
    for (int b = begin + kKept - 1; b < end - 1; ++b) {
      stands[static_cast<size_t>(b)] = begin + 1;
    }
  }
  return stands;
}

// By tensor, how many operands of forward nodes it is.
std::vector<int> Readers(const Graph& graph) {
  std::vector<int> readers(graph.tensors.size(), 0);
  for (const Node& node : graph.nodes) {
    if (node.pass != Pass::kForward) continue;
    for (TensorId id : node.operands) ++readers[id.index()];
  }
  return readers;
}

}  // namespace

ShortGraph Shorten(const Graph& graph) {
  ShortGraph whole = {graph, std::vector<int>(graph.blocks.size())};
  std::iota(whole.block_of.begin(), whole.block_of.end(), 0);
  const std::vector<int> stands = Representatives(graph);

  ShortGraph out;
  out.graph.name = graph.name;
  out.graph.global_batch = graph.global_batch;
  out.graph.seq_len = graph.seq_len;
  out.graph.dtype = graph.dtype;
  std::vector<int> number(graph.blocks.size(), -1);  // of those that stay
  for (size_t b = 0; b < graph.blocks.size(); ++b) {
    if (stands[b] == static_cast<int>(b)) {
      number[b] = static_cast<int>(out.graph.blocks.size());
      out.graph.blocks.push_back(graph.blocks[b]);
    }
    out.block_of.push_back(number[static_cast<size_t>(stands[b])]);
  }
  if (out.graph.blocks.size() == graph.blocks.size()) return whole;

  std::vector<std::vector<const Node*>> nodes(graph.blocks.size());
  for (const Node& node : graph.nodes) {
    if (node.pass != Pass::kForward) continue;
    nodes[static_cast<size_t>(node.block)].push_back(&node);
  }
  // By tensor, its number in the short graph, and that tensor's there.
  std::vector<TensorId> renamed(graph.tensors.size());
  std::vector<TensorId> original;
  const auto rename = [&](TensorId id) {
    TensorId& to = renamed[id.index()];
    if (!to.valid()) {
      to = TensorId(static_cast<int64_t>(out.graph.tensors.size()));
      out.graph.tensors.push_back(graph.tensor(id));
      original.push_back(id);
    }
    return to;
  };
  for (size_t b = 0; b < nodes.size(); ++b) {
    const auto& like = nodes[static_cast<size_t>(stands[b])];
    if (number[b] < 0) {
      if (like.size() != nodes[b].size()) return whole;
      for (size_t i = 0; i < like.size(); ++i) {
        for (size_t r = 0; r < like[i]->results.size(); ++r) {
          renamed[nodes[b][i]->results[r].index()] =
              renamed[like[i]->results[r].index()];
        }
      }
      continue;
    }
    for (const Node* node : nodes[b]) {
      Node copy = *node;
      copy.block = number[b];
      for (TensorId& id : copy.operands) id = rename(id);
      for (TensorId& id : copy.results) id = rename(id);
      out.graph.nodes.push_back(std::move(copy));
    }
  }
  if (!renamed[graph.loss.index()].valid()) return whole;
  out.graph.loss = renamed[graph.loss.index()];

  const std::vector<int> before = Readers(graph);
  const std::vector<int> after = Readers(out.graph);
  for (size_t t = 0; t < original.size(); ++t) {
    // What every block reads from outside is data of the whole batch.
    if (out.graph.tensors[t].kind == TensorKind::kInput) continue;
    const int had = before[original[t].index()];
    const int has = after[t];
    if (has != had && (has < 2 || has > had)) return whole;
  }
  auto differentiated = Differentiate(std::move(out.graph));
  if (!differentiated) return whole;
  out.graph = *std::move(differentiated);
  return out;
}

}  // namespace tessera
