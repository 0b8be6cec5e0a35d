#include "planner/lower/fused_nodes.h"

#include <algorithm>
#include <utility>

namespace tessera {
namespace {

class NodeFuser {
 public:
  NodeFuser(const Graph& graph,
            const std::function<bool(std::string_view)>& has)
      : graph_(graph), has_(has), fused_(graph.nodes.size()) {
    readers_.resize(graph.tensors.size());
    maker_.resize(graph.tensors.size(), -1);
    for (size_t i = 0; i < graph.nodes.size(); ++i) {
      for (TensorId tensor : graph.nodes[i].operands) {
        readers_[tensor.index()].push_back(i);
      }
      for (TensorId tensor : graph.nodes[i].results) {
        maker_[tensor.index()] = static_cast<int>(i);
      }
    }
  }

  std::vector<FusedNode> Run() {
    if (!std::ranges::any_of(FusedKernels(), [&](const FusedKernel& kernel) {
          return has_(kernel.name);
        })) {
      return {};
    }
    for (size_t i = 0; i < graph_.nodes.size(); ++i) AddIntoOneSum(i);
    for (size_t i = 0; i < graph_.nodes.size(); ++i) Fuse(i);
    return std::move(fused_);
  }

 private:
  std::string_view NameAt(size_t i) const { return graph_.nodes[i].op->name; }

  // Products that add to one result need no sum.
  void AddIntoOneSum(size_t i) {
    const Node& node = graph_.nodes[i];
    if (node.op->name != "sum" || node.operands.size() < 2) return;
    fused_[i].elsewhere =
        std::ranges::all_of(node.operands, [&](TensorId term) {
          const int maker = maker_[term.index()];
          return maker >= 0 && readers_[term.index()].size() == 1 &&
                 NameAt(static_cast<size_t>(maker)) == "linear_dx";
        });
  }

  void Fuse(size_t i) {
    if (fused_[i].elsewhere) return;
    const Node& node = graph_.nodes[i];
    std::string_view name = node.op->name;
    std::vector<TensorId> operands = node.operands;
    std::vector<TensorId> results = node.results;
    bool again = true;
    while (again) {
      again = false;
      for (const FusedKernel& kernel : FusedKernels()) {
        if (kernel.first != name || operands.empty()) continue;
        const int second = SecondOf(i, kernel, operands, results[0]);
        if (second < 0) continue;
        const Node& other = graph_.nodes[static_cast<size_t>(second)];
        fused_[i].parts.push_back(
            {&kernel, NodeId(static_cast<size_t>(second))});
        fused_[static_cast<size_t>(second)].elsewhere = true;
        if (!kernel.keeps_first) results.erase(results.begin());
        results.insert(results.end(), other.results.begin(),
                       other.results.end());
        name = kernel.name;
        again = true;
        break;
      }
    }
    // Those on the way to a kernel need not be there.
    std::vector<FusedNode::Part>& parts = fused_[i].parts;
    while (!parts.empty() && !has_(parts.back().kernel->name)) {
      fused_[parts.back().node.index()].elsewhere = false;
      parts.pop_back();
    }
  }

  // The node that goes with node i, or -1.
  int SecondOf(size_t i, const FusedKernel& kernel,
               const std::vector<TensorId>& operands, TensorId result) const {
    const bool chain = kernel.kind == FusedKernel::Kind::kChain;
    const bool siblings = kernel.kind == FusedKernel::Kind::kSiblings;
    const TensorId shared = chain ? result : operands[0];
    for (const size_t reader : readers_[shared.index()]) {
      // What runs late makes its results late.
      if (kernel.late && reader != readers_[shared.index()].front()) break;
      if (reader <= i || fused_[reader].elsewhere ||
          !fused_[reader].parts.empty() || NameAt(reader) != kernel.second) {
        continue;
      }
      const std::vector<TensorId>& reads = graph_.nodes[reader].operands;
      const auto there = [&](TensorId operand) {
        if (siblings) return std::ranges::count(operands, operand) > 0;
        return operand == shared || kernel.late ||
               maker_[operand.index()] < static_cast<int>(i);
      };
      if (!std::ranges::all_of(reads, there)) continue;
      if (!chain && reads[0] != shared) continue;
      if (kernel.alike && !(HasOneShape(graph_.nodes[i].rule) &&
                            HasOneShape(graph_.nodes[reader].rule))) {
        continue;
      }
      const bool in_place =
          !chain || kernel.operand == FusedKernel::kAnyOperand ||
          (kernel.operand < reads.size() && reads[kernel.operand] == shared);
      const bool once =
          kernel.keeps_first || readers_[shared.index()].size() == 1;
      if (in_place && once) return static_cast<int>(reader);
    }
    return -1;
  }

  const Graph& graph_;
  const std::function<bool(std::string_view)>& has_;
  std::vector<FusedNode> fused_;
  std::vector<std::vector<size_t>> readers_;  // by tensor: nodes, in order
  std::vector<int> maker_;                    // by tensor; -1: an input
};

}  // namespace

std::vector<FusedNode> FuseNodes(
    const Graph& graph, const std::function<bool(std::string_view)>& has) {
  return NodeFuser(graph, has).Run();
}

}  // namespace tessera
