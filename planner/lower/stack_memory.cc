#include "planner/lower/stack_memory.h"

#include <algorithm>

#include "planner/plan/graph_index.h"

namespace tessera {
namespace {

// A mask has a byte for each element.
constexpr int64_t kMaskBytes = 1;

class KernelMemoryMaker {
 public:
  KernelMemoryMaker(const Graph& graph, const Stack& stack)
      : graph_(graph), stack_(stack) {
    memory_.kept.resize(graph.tensors.size());
    memory_.scratch.resize(graph.nodes.size());
  }

  KernelMemory Make() {
    for (size_t i = 0; i < graph_.nodes.size(); ++i) {
      const Node& node = graph_.nodes[i];
      if (node.op->op_class == OpClass::kAttention) {
        if (stack_.attention == StackAttention::kUnfused) Attention(i, node);
      } else if (node.op->name == "layer_norm") {
        if (stack_.memory.dropout_masks) {
          const TensorId result = node.results[0];
          Keep(result, SizeOf(graph_.tensor(result).dtype) + kMaskBytes);
        }
      } else if (node.op->name == "cross_entropy") {
        Loss(i, node);
      }
    }
    return std::move(memory_);
  }

 private:
  void Keep(TensorId tensor, int64_t bytes) {
    memory_.kept[tensor.index()] = bytes;
  }

  // Forward keeps the softmax's result and, of the dropout, its mask and its
  // result, beside the scores that it reads. Backward has the gradients of the
  // dropout's result and of the softmax's.
  void Attention(size_t node_id, const Node& node) {
    if (node.pass == Pass::kBackward) {
      const KernelScratch& forward = memory_.scratch[node.forward.index()];
      memory_.scratch[node_id] = {forward.of, 2 * forward.bytes};
      return;
    }
    const TensorId keys = node.operands[1];
    const int factor = node.rule.FactorOf(kKeyFactor);
    const Indices& indices = node.rule.operands[1];
    const auto dim = std::ranges::find(indices, factor) - indices.begin();
    const int64_t count = graph_.tensor(keys).shape[static_cast<size_t>(dim)];
    const int64_t value = SizeOf(graph_.tensor(keys).dtype);
    const int64_t dropout =
        stack_.memory.dropout_masks ? kMaskBytes + value : 0;
    const TensorId statistics = node.results[1];
    Keep(statistics, count * (value + dropout));
    memory_.scratch[node_id] = {statistics, count * value};
  }

  void Loss(size_t node_id, const Node& node) {
    const TensorId logits = node.operands[0];
    switch (stack_.memory.logits) {
      case StackLogits::kAsValues:
        break;
      case StackLogits::kFp32: {
        // The head's logits, their copy less its maximum, and the softmax, of
        // which the last stays.
        const int64_t fp32 = SizeOf(DType::kFloat32);
        const int64_t value = SizeOf(graph_.tensor(logits).dtype);
        Keep(logits, fp32);
        memory_.scratch[node_id] = {logits, fp32 + (value < fp32 ? value : 0)};
        break;
      }
      case StackLogits::kNever:
        Keep(logits, 0);
        for (size_t t = 0; t < graph_.tensors.size(); ++t) {
          const Tensor& tensor = graph_.tensors[t];
          if (tensor.kind == TensorKind::kGradient &&
              tensor.gradient_of == logits) {
            Keep(TensorId(static_cast<int64_t>(t)), 0);
          }
        }
    }
  }

  const Graph& graph_;
  const Stack& stack_;
  KernelMemory memory_;
};

}  // namespace

KernelMemory KernelMemoryOf(const Graph& graph, const Stack& stack) {
  const Stack own;
  if (stack.memory == own.memory && stack.attention == own.attention) return {};
  return KernelMemoryMaker(graph, stack).Make();
}

}  // namespace tessera
