#include "planner/plan/graph_index.h"

#include <algorithm>

#include "planner/base/check.h"
#include "planner/base/element_count.h"
#include "planner/plan/whole_extents.h"

namespace tessera {
namespace {

// FLOPs of matrix products, the forward part of the model's FLOPs.
double MatmulFlops(const Graph& graph, const Node& node,
                   std::span<const int64_t> extents) {
  if (node.op->op_class == OpClass::kMemory) return 0;
  const std::vector<DType> dtypes(
      std::max(node.operands.size(), node.results.size()), graph.dtype);
  const OpCall call = {&node.rule, extents.first(node.rule.factors.size()),
                       std::span(dtypes).first(node.operands.size()),
                       std::span(dtypes).first(node.results.size()),
                       node.attributes};
  return CallFlops(*node.op, call).value;
}

// The factor of GraphIndex::ExpertFactor. `expert_dim` has the dimension of
// the experts of each tensor so far, or -1; `of_weights` those that are made of
// weights alone.
int FindExpertFactor(const Node& node, const std::vector<int>& expert_dim,
                     const std::vector<bool>& of_weights) {
  const IndexRule& rule = node.rule;
  const auto in_result = [&](int f) { return Holds(rule.results[0], f); };
  if (node.op->op_class == OpClass::kMatmul) {
    if (node.op->windows) return -1;  // groups of channels
    // What a product of two activations shares is samples, heads and so on.
    const bool has_weight = std::ranges::any_of(
        node.operands,
        [&](TensorId operand) { return of_weights[operand.index()]; });
    for (uint8_t f : rule.operands[0]) {
      if (!has_weight) break;
      if (Holds(rule.operands[1], f) && in_result(f)) return f;
    }
  }
  for (size_t i = 0; i < node.operands.size(); ++i) {
    const int dim = expert_dim[node.operands[i].index()];
    if (dim < 0) continue;
    const int f = rule.operands[i][static_cast<size_t>(dim)];
    if (in_result(f)) return f;
  }
  return -1;
}

// The factor that indexes dimension `dim` of a result, where it may be split,
// or -1.
int FactorOfResult(const Node& node, TensorId result, size_t dim) {
  const auto at = std::ranges::find(node.results, result);
  const auto k = static_cast<size_t>(at - node.results.begin());
  const int f = node.rule.results[k][dim];
  return node.rule.factors[static_cast<size_t>(f)].splittable ? f : -1;
}

int FindSequenceFactor(const IndexRule& rule) {
  const int sequence = rule.FactorOf(kSequenceFactor);
  if (sequence >= 0 || rule.FactorOf('w') < 0) return sequence;
  for (const char letter : {'y', 'h', 'x'}) {
    if (const int f = rule.FactorOf(letter); f >= 0) return f;
  }
  // Of a signal.
  const int f = rule.FactorOf('w');
  const Factor& width = rule.factors[static_cast<size_t>(f)];
  return width.splittable && width.role == Role::kAttribute ? f : -1;
}

// Whether a reader of a tensor lets a split of dimension `dim` through.
bool LetsThrough(const GraphIndex& index, const GraphIndex::Use& use,
                 size_t dim) {
  const Node& node = index.graph->node(use.node);
  const uint8_t f = node.rule.operands[use.operand][dim];
  if (!node.rule.factors[f].splittable) return false;
  if (node.op->op_class == OpClass::kMatmul) return true;
  for (size_t k = 0; k < node.results.size(); ++k) {
    const Indices& indices = node.rule.results[k];
    for (size_t d = 0; d < indices.size(); ++d) {
      if (indices[d] == f && !index.carried[node.results[k].index()][d]) {
        return false;
      }
    }
  }
  return true;
}

// The factor by which a lookup addresses the rows of its table, or -1: the
// first of the table's that the ids and the result lack.
int RowFactor(const Node& node) {
  if (node.operands.size() != 2 || node.op->op_class != OpClass::kMemory) {
    return -1;
  }
  for (uint8_t f : node.rule.operands[1]) {
    if (!Holds(node.rule.operands[0], f) && !Holds(node.rule.results[0], f)) {
      return f;
    }
  }
  return -1;
}

// Whether a lookup is one of bags: ids have a factor that the result lacks.
bool IsLookupOfBags(const Node& node) {
  return !std::ranges::all_of(node.rule.operands[0], [&](uint8_t f) {
    return Holds(node.rule.results[0], f);
  });
}

std::vector<bool> VocabularyTables(const GraphIndex& index) {
  const Graph& graph = *index.graph;
  std::vector<int64_t> classes;
  for (size_t i = 0; i < index.forward_nodes; ++i) {
    // Of a loss: states of others, which read no labels, are not over classes.
    const OpDef& op = *graph.nodes[i].op;
    const std::string_view factors = op.coupling.factors;
    const int f = factors.size() == 1 && !op.integer_operands.empty()
                      ? graph.nodes[i].rule.FactorOf(factors[0])
                      : -1;
    if (f >= 0) classes.push_back(index.extents[i][static_cast<size_t>(f)]);
  }
  std::vector<bool> tables(graph.tensors.size(), false);
  std::vector<bool> tied(graph.tensors.size(), false);
  bool any_tied = false;
  for (size_t i = 0; i < index.forward_nodes; ++i) {
    const Node& node = graph.nodes[i];
    const int row = RowFactor(node);
    if (row < 0 || graph.tensor(node.operands[1]).kind != TensorKind::kWeight) {
      continue;
    }
    const bool has_classes =
        std::find(classes.begin(), classes.end(),
                  index.extents[i][static_cast<size_t>(row)]) != classes.end();
    if (!has_classes && !IsLookupOfBags(node)) continue;
    const size_t table = node.operands[1].index();
    tables[table] = true;
    tied[table] = std::any_of(
        index.readers[table].begin(), index.readers[table].end(),
        [&](const GraphIndex::Use& use) {
          return graph.node(use.node).op->op_class == OpClass::kMatmul;
        });
    any_tied |= tied[table];
  }
  return any_tied ? tied : tables;
}

}  // namespace

GraphIndex::GraphIndex(const Graph& graph_in)
    : graph(&graph_in),
      fingerprint(Fingerprint(graph_in)),
      producer(graph_in.tensors.size()),
      readers(graph_in.tensors.size()),
      carried(graph_in.tensors.size()),
      nodes_of_block(graph_in.blocks.size()),
      block_class(BlockClasses(graph_in)),
      block_flops(graph_in.blocks.size(), 0) {
  std::vector<int> expert_dim(graph->tensors.size(), -1);
  std::vector<bool> of_weights;
  of_weights.reserve(graph->tensors.size());
  for (const Tensor& tensor : graph->tensors) {
    of_weights.push_back(tensor.kind == TensorKind::kWeight);
  }
  for (const Node& node : graph->nodes) {
    if (node.pass != Pass::kForward) break;
    const NodeId id(static_cast<int64_t>(forward_nodes++));
    extents.push_back(WholeExtents(*graph, node));
    position.push_back(nodes_of_block[static_cast<size_t>(node.block)].size());
    nodes_of_block[static_cast<size_t>(node.block)].push_back(id);
    node_flops.push_back(MatmulFlops(*graph, node, extents.back()));
    block_flops[static_cast<size_t>(node.block)] += node_flops.back();
    sequence_factor.push_back(FindSequenceFactor(node.rule));
    sample_factor.push_back(-1);
    for (size_t f = 0; f < node.rule.factors.size(); ++f) {
      if (node.rule.factors[f].role == Role::kSample) {
        sample_factor.back() = static_cast<int>(f);
      }
    }
    expert_factor.push_back(FindExpertFactor(node, expert_dim, of_weights));
    dispatch_factor.push_back(-1);
    has_experts |= expert_factor.back() >= 0;
    has_sequence |= sequence_factor.back() >= 0;
    has_attention |= node.op->op_class == OpClass::kAttention;
    for (size_t k = 0; k < node.results.size(); ++k) {
      const Indices& indices = node.rule.results[k];
      for (size_t d = 0; d < indices.size(); ++d) {
        if (static_cast<int>(indices[d]) != expert_factor.back()) continue;
        expert_dim[node.results[k].index()] = static_cast<int>(d);
      }
    }
    for (size_t i = 0; i < node.operands.size(); ++i) {
      const TensorId operand = node.operands[i];
      readers[operand.index()].push_back({id, i});
      const NodeId from = producer[operand.index()];
      if (!from.valid()) continue;
      if (graph->node(from).block != node.block) {
        block_edges.push_back({from, id});
      } else if (expert_factor.back() >= 0 && expert_factor[from.index()] < 0) {
        const Indices& indices = node.rule.operands[i];
        const auto dim = std::ranges::find(
            indices, static_cast<uint8_t>(expert_factor.back()));
        if (dim == indices.end()) continue;
        dispatch_factor[from.index()] =
            FactorOfResult(graph->node(from), operand,
                           static_cast<size_t>(dim - indices.begin()));
      }
    }
    const bool weights_alone = std::ranges::all_of(
        node.operands,
        [&](TensorId operand) { return of_weights[operand.index()]; });
    for (TensorId result : node.results) {
      producer[result.index()] = id;
      of_weights[result.index()] = weights_alone;
    }
  }
  for (size_t t = 0; t < graph->tensors.size(); ++t) {
    const Tensor& tensor = graph->tensors[t];
    if (tensor.kind != TensorKind::kWeight) continue;
    // A graph whose loss does not depend on one is refused (Differentiate).
    TESSERA_CHECK(!readers[t].empty())
        << "no forward node reads weight " << tensor.name;
    weights.push_back({TensorId(static_cast<int64_t>(t)), readers[t][0],
                       ElementCount(tensor.shape)});
  }
  // Backwards, so that what reads a node's results is known before it.
  for (size_t i = forward_nodes; i-- > 0;) {
    for (TensorId result : graph->nodes[i].results) {
      const size_t dims = graph->tensor(result).shape.size();
      for (size_t d = 0; d < dims; ++d) {
        carried[result.index()][d] = std::all_of(
            readers[result.index()].begin(), readers[result.index()].end(),
            [&](const Use& use) { return LetsThrough(*this, use, d); });
      }
    }
  }
  vocabulary = VocabularyTables(*this);
}

int64_t GraphIndex::Extent(NodeId node, size_t factor, int64_t batch) const {
  if (static_cast<int>(factor) == sample_factor[node.index()] &&
      !graph->node(node).op->once_per_step) {
    return batch;
  }
  return extents[node.index()][factor];
}

}  // namespace tessera
