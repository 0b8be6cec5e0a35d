#include "costmodel/fusion.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "planner/base/element_count.h"

namespace tessera {
namespace {

double ElementsOf(const Graph& graph, TensorId tensor) {
  return LargeElementCount(graph.tensor(tensor).shape);
}

double BytesOf(const Graph& graph, TensorId tensor) {
  return ElementsOf(graph, tensor) * SizeOf(graph.tensor(tensor).dtype);
}

// Every operand and the only result have the same factors in the same order.
// Sums of gradients are the framework's own kernels.
bool IsElementwise(const Node& node) {
  return node.op->op_class == OpClass::kMemory && node.op->name != "sum" &&
         node.rule.results.size() == 1 &&
         std::ranges::all_of(node.rule.operands, [&](const Indices& operand) {
           return operand == node.rule.results[0];
         });
}

bool IsLinear(const Node& node) {
  return node.op->name.starts_with("linear");
}

// The forward node of a gradient's.
const Node& LayerOf(const Graph& graph, const Node& node) {
  return node.forward.valid() ? graph.node(node.forward) : node;
}

void MarkHead(const Graph& graph, std::vector<Fusion>& fusion) {
  std::set<TensorId> logits;
  for (const Node& node : graph.nodes) {
    if (node.op->name == "cross_entropy") logits.insert(node.operands[0]);
  }
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& layer = LayerOf(graph, graph.nodes[i]);
    fusion[i].of_head = IsLinear(layer) && logits.contains(layer.results[0]);
  }
}

void FuseProjections(const Graph& graph, std::vector<Fusion>& fusion) {
  std::map<TensorId, double> readers;
  for (const Node& node : graph.nodes) {
    if (node.op->name == "linear") {
      readers[node.operands[0]] += ElementsOf(graph, node.operands[1]);
    }
  }
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& layer = LayerOf(graph, graph.nodes[i]);
    if (layer.op->name != "linear") continue;
    fusion[i].outputs =
        readers.at(layer.operands[0]) / ElementsOf(graph, layer.operands[1]);
  }
}

// By tensor: the nodes that read it.
using Readers = std::vector<std::vector<size_t>>;

void FuseElementwise(const Graph& graph, const Readers& readers,
                     const std::vector<int>& maker,
                     std::vector<Fusion>& fusion) {
  const size_t n = graph.nodes.size();
  // Each node's kernel, named by its last node: of the operators that hand on
  // to each other alone in one direction, and of the gradients of one operator.
  std::vector<size_t> kernel(n);
  std::iota(kernel.begin(), kernel.end(), size_t{0});
  const auto kernel_of = [&](size_t i) {
    while (kernel[i] != i) i = kernel[i] = kernel[kernel[i]];
    return i;
  };
  const auto join = [&](size_t a, size_t b) {
    a = kernel_of(a);
    b = kernel_of(b);
    kernel[std::min(a, b)] = std::max(a, b);
  };
  // By tensor. What a norm or a product reads too has to be in memory.
  std::vector<bool> handed_on(readers.size());
  for (size_t t = 0; t < readers.size(); ++t) {
    handed_on[t] = std::ranges::all_of(readers[t], [&](size_t reader) {
      return IsElementwise(graph.nodes[reader]);
    });
  }
  std::map<NodeId, size_t> gradient;
  for (size_t i = 0; i < n; ++i) {
    const Node& node = graph.nodes[i];
    if (!IsElementwise(node)) continue;
    for (TensorId operand : node.operands) {
      const int from = maker[operand.index()];
      if (from < 0) continue;
      const Node& other = graph.nodes[static_cast<size_t>(from)];
      if (handed_on[operand.index()] && IsElementwise(other) &&
          other.pass == node.pass && other.block == node.block) {
        join(i, static_cast<size_t>(from));
      }
    }
    if (!node.forward.valid()) continue;
    const auto [it, is_first] = gradient.try_emplace(node.forward, i);
    if (!is_first) join(i, it->second);
  }

  // By tensor: whether only its own kernel reads it, and kernels of the
  // gradients of that.
  std::vector<bool> stays(readers.size());
  for (size_t t = 0; t < readers.size(); ++t) {
    if (maker[t] < 0 || !handed_on[t]) continue;
    const size_t own = kernel_of(static_cast<size_t>(maker[t]));
    const auto is_inside = [&](size_t reader) {
      return kernel_of(reader) == own;
    };
    stays[t] = std::ranges::any_of(readers[t], is_inside) &&
               std::ranges::all_of(readers[t], [&](size_t reader) {
                 const NodeId forward = graph.nodes[reader].forward;
                 return is_inside(reader) ||
                        (forward.valid() && is_inside(forward.index()));
               });
  }
  std::vector<double> traffic(n, 0);
  std::vector<int> members(n, 0);
  std::set<std::pair<size_t, TensorId>> counted;
  for (size_t i = 0; i < n; ++i) {
    const Node& node = graph.nodes[i];
    if (!IsElementwise(node)) continue;
    const size_t k = kernel_of(i);
    ++members[k];
    for (const auto* tensors : {&node.operands, &node.results}) {
      for (TensorId tensor : *tensors) {
        if (!stays[tensor.index()] && counted.emplace(k, tensor).second) {
          traffic[k] += BytesOf(graph, tensor);
        }
      }
    }
  }
  for (size_t i = 0; i < n; ++i) {
    const Node& node = graph.nodes[i];
    if (!IsElementwise(node)) continue;
    const size_t k = kernel_of(i);
    if (members[k] == 1) continue;
    double own = 0;
    for (const auto* tensors : {&node.operands, &node.results}) {
      for (TensorId tensor : *tensors) own += BytesOf(graph, tensor);
    }
    fusion[i].traffic = k == i ? traffic[k] / own : 0;
  }
}

}  // namespace

std::vector<Fusion> FusionOf(const Graph& graph, const Stack& stack) {
  std::vector<Fusion> fusion(graph.nodes.size());
  MarkHead(graph, fusion);
  if (stack.fuses_projections) FuseProjections(graph, fusion);
  if (!stack.fuses_elementwise) return fusion;

  Readers readers(graph.tensors.size());
  std::vector<int> maker(graph.tensors.size(), -1);
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    for (TensorId tensor : node.operands) readers[tensor.index()].push_back(i);
    for (TensorId tensor : node.results) {
      maker[tensor.index()] = static_cast<int>(i);
    }
  }
  FuseElementwise(graph, readers, maker, fusion);
  // By tensor: whether products alone read it.
  std::vector<bool> of_products(readers.size());
  for (size_t t = 0; t < readers.size(); ++t) {
    of_products[t] = std::ranges::all_of(readers[t], [&](size_t reader) {
      return IsLinear(graph.nodes[reader]);
    });
  }
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    if (!IsLinear(node)) continue;
    const size_t operand = node.operands[0].index();
    const int from = maker[operand];
    fusion[i].operand_rounded =
        from >= 0 && of_products[operand] &&
        graph.nodes[static_cast<size_t>(from)].op->op_class == OpClass::kMemory;
  }
  return fusion;
}

}  // namespace tessera
