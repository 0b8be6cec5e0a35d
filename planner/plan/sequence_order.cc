#include "planner/plan/sequence_order.h"

#include <algorithm>

#include "planner/base/quoted.h"

namespace tessera {
namespace {

// 1 + 2 + … + n.
int64_t Triangle(int64_t n) {
  return n > 0 ? n * (n + 1) / 2 : 0;
}

// Pairs with key <= query. A query at x has max(0, x-begin+1) keys from `begin`
// on, which over the queries [a, b) add up to Triangle(b-begin) -
// Triangle(a-begin); those from keys.end on do not count.
int64_t PairsUpTo(Range queries, Range keys) {
  const auto from = [&](int64_t begin) {
    return Triangle(queries.end - begin) - Triangle(queries.begin - begin);
  };
  return from(keys.begin) - from(keys.end);
}

// Of a causal mask.
int64_t CausalPairs(Range queries, Range keys, int64_t window) {
  int64_t pairs = PairsUpTo(queries, keys);
  if (window > 0) {
    pairs -= PairsUpTo({queries.begin - window, queries.end - window}, keys);
  }
  return pairs;
}

// Whether the node is an attention with a causal mask.
bool IsCausal(const Node& node) {
  return node.op->op_class == OpClass::kAttention && MaskOf(node).causal;
}

// Ranks that split the sequence of the node, where that is a causal attention;
// else 1.
int64_t DegreeAt(const GraphIndex& index, const Plan& plan, size_t node) {
  const int sequence = index.SequenceFactor(NodeId(node));
  if (!IsCausal(index.graph->nodes[node]) || sequence < 0) return 1;
  const OpPlacement& placement = plan.ops[node];
  return plan.groups[placement.group.index()].Size(
      placement.axes[static_cast<size_t>(sequence)]);
}

// What of a node would not follow its tokens.
std::string OrderProblem(const GraphIndex& index, const Node& node,
                         int sequence) {
  const Graph& graph = *index.graph;
  if (node.op->name == "causal_mask") {
    return Quoted(node.name) + " hides places by their order";
  }
  for (const Attribute& attribute : node.attributes) {
    if (attribute.name == "capacity" &&
        attribute.value < static_cast<double>(graph.seq_len)) {
      return Quoted(node.name) +
             " gives experts' room to tokens in their order; expected room "
             "for all";
    }
  }
  for (size_t operand : node.op->integer_operands) {
    if (operand >= node.operands.size()) continue;
    const TensorId id = node.operands[operand];
    const Tensor& positions = graph.tensor(id);
    // What a gate has chosen for each token follows it.
    const bool follows =
        (positions.kind == TensorKind::kInput && positions.sample_dim >= 0) ||
        (index.producer[id.index()].valid() && node.op->streamed == 0);
    if (follows) continue;
    return "positions " + Quoted(positions.name) + " of " + Quoted(node.name) +
           " are no input that can be reordered";
  }
  for (size_t k = 0; k < node.operands.size(); ++k) {
    const Tensor& weight = graph.tensor(node.operands[k]);
    const bool constant =
        weight.kind == TensorKind::kInput && weight.sample_dim < 0;
    if ((weight.kind != TensorKind::kWeight && !constant) || sequence < 0 ||
        !Holds(node.rule.operands[k], sequence)) {
      continue;
    }
    return Quoted(node.name) + " reads " + Quoted(weight.name) +
           " by the order of positions";
  }
  return "";
}

}  // namespace

std::vector<Range> PositionsOf(int64_t length, int zigzag, Range elements) {
  if (zigzag <= 1 || elements == Range{0, length}) return {elements};
  const int64_t chunk = length / (2 * zigzag);
  std::vector<Range> runs;
  for (int64_t i = elements.begin; i < elements.end;) {
    const int64_t end = std::min(elements.end, (i / chunk + 1) * chunk);
    const int64_t first = ZigzagPosition(length, zigzag, i);
    runs.push_back({first, first + (end - i)});
    i = end;
  }
  return runs;
}

AttentionMask MaskOf(const Node& node) {
  AttentionMask mask;
  for (const Attribute& attribute : node.attributes) {
    if (attribute.name == "causal") mask.causal = attribute.value != 0;
    if (attribute.name == "window") {
      mask.window = static_cast<int64_t>(attribute.value);
    }
  }
  return mask;
}

int64_t SeenPairs(Range queries, Range keys, const AttentionMask& mask) {
  if (mask.causal) return CausalPairs(queries, keys, mask.window);
  if (mask.window == 0) return queries.size() * keys.size();
  // Keys before a query, keys behind it, and those at its position in both.
  const Range both = {std::max(queries.begin, keys.begin),
                      std::min(queries.end, keys.end)};
  return CausalPairs(queries, keys, mask.window) +
         CausalPairs(keys, queries, mask.window) -
         std::max<int64_t>(0, both.size());
}

int64_t SeenPairs(const std::vector<Range>& queries,
                  const std::vector<Range>& keys, const AttentionMask& mask) {
  int64_t pairs = 0;
  for (Range q : queries) {
    for (Range k : keys) pairs += SeenPairs(q, k, mask);
  }
  return pairs;
}

int64_t SequenceDegree(const GraphIndex& index, const Plan& plan) {
  int64_t degree = 1;
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    degree = std::max(degree, DegreeAt(index, plan, i));
  }
  return degree;
}

std::string ReorderProblem(const GraphIndex& index) {
  const Graph& graph = *index.graph;
  for (const Tensor& tensor : graph.tensors) {
    if (tensor.kind == TensorKind::kInput && tensor.sample_dim >= 0 &&
        (tensor.shape.size() != 2 || tensor.shape[1] != graph.seq_len)) {
      return "input " + Quoted(tensor.name) + " has no positions to reorder";
    }
  }
  for (size_t i = 0; i < index.forward_nodes; ++i) {
    std::string problem =
        OrderProblem(index, graph.nodes[i], index.SequenceFactor(NodeId(i)));
    if (!problem.empty()) return problem;
  }
  const std::span forward(graph.nodes.data(), index.forward_nodes);
  return std::ranges::any_of(forward, IsCausal)
             ? ""
             : "no attention has a causal mask: expected 0";
}

std::string ZigzagProblem(const GraphIndex& index, const Plan& plan) {
  const Graph& graph = *index.graph;
  const int ranks = plan.zigzag;
  if (ranks == 0) return "";
  if (ranks < 2) return "expected 0, or at least 2 ranks";
  const int64_t chunks = 2 * int64_t{ranks};
  if (graph.seq_len % chunks != 0) {
    return "the order cuts sequences into " + std::to_string(chunks) +
           " chunks: expected a divisor of the sequence length " +
           std::to_string(graph.seq_len);
  }
  if (std::string problem = ReorderProblem(index); !problem.empty()) {
    return problem;
  }
  for (size_t i = 0; i < index.forward_nodes; ++i) {
    const int64_t degree = DegreeAt(index, plan, i);
    if (ranks % degree == 0) continue;
    return Quoted(graph.nodes[i].name) + " splits the sequence over " +
           std::to_string(degree) +
           " ranks, which that order does not balance: expected " +
           std::to_string(SequenceDegree(index, plan));
  }
  if (const int64_t degree = SequenceDegree(index, plan); degree != ranks) {
    return degree == 1
               ? "no causal attention splits its sequence: expected 0"
               : "attention splits the sequence over " +
                     std::to_string(degree) + " ranks: expected as many";
  }
  return "";
}

bool StaysZigzag(const GraphIndex& index, const Plan& plan,
                 std::span<const NodeId> nodes) {
  if (plan.zigzag == 0) return true;
  // The degrees of all divide that of the order, and one is that.
  bool lower = false;
  for (NodeId node : nodes) {
    const int64_t degree = DegreeAt(index, plan, node.index());
    if (plan.zigzag % degree != 0) return false;
    lower |= degree < plan.zigzag;
  }
  if (!lower) return true;
  for (size_t i = 0; i < index.forward_nodes; ++i) {
    if (DegreeAt(index, plan, i) == plan.zigzag) return true;
  }
  return false;
}

}  // namespace tessera
