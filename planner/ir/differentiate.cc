// Reverse-mode differentiation of a graph: walks the forward nodes backwards
// and appends, for each, the adjoints its operator declares. The rule of an
// adjoint is the forward rule's factors over exactly what the adjoint reads
// and writes, so its layouts are derived like any other operator's.

#include <algorithm>

#include "planner/ir/graph.h"
#include "planner/ir/statistics_dtype.h"

namespace tessera {
namespace {

// One symbol of an adjoint's signature: "x1", "y0", "dy0", "dx2".
struct Symbol {
  bool gradient = false;
  bool of_result = false;
  size_t index = 0;
};

std::vector<Symbol> ReadSymbols(std::string_view text) {
  std::vector<Symbol> symbols;
  for (size_t i = 0; i < text.size();) {
    Symbol symbol;
    if (text[i] == ',') ++i;
    if (text[i] == 'd') {
      symbol.gradient = true;
      ++i;
    }
    TESSERA_CHECK(i + 1 < text.size() && (text[i] == 'x' || text[i] == 'y'))
        << "adjoint signature " << text;
    symbol.of_result = text[i++] == 'y';
    for (; i < text.size() && text[i] != ','; ++i) {
      symbol.index = 10 * symbol.index + static_cast<size_t>(text[i] - '0');
    }
    symbols.push_back(symbol);
  }
  return symbols;
}

// A gradient that reaches a tensor, and the node whose operand it is.
struct Contribution {
  TensorId gradient;
  NodeId consumer;
};

class Differentiator {
 public:
  explicit Differentiator(Graph graph) : graph_(std::move(graph)) {}

  Result<Graph> Run() {
    const size_t forward_nodes = graph_.nodes.size();
    contributions_.resize(graph_.tensors.size());
    adds_to_loss_.assign(graph_.tensors.size(), false);
    adds_to_loss_[graph_.loss.index()] = true;
    producer_.resize(graph_.tensors.size());
    FindDependents(forward_nodes);
    if (!depends_[graph_.loss.index()]) {
      return InvalidInput("the loss depends on no weight", "loss");
    }
    for (size_t i = forward_nodes; i-- > 0;) {
      AddAdjoints(NodeId(i));
    }
    for (size_t t = 0; t < contributions_.size(); ++t) {
      if (graph_.tensors[t].kind != TensorKind::kWeight) continue;
      if (contributions_[t].empty()) {
        return InvalidInput("the loss does not depend on it",
                            "weight '" + graph_.tensors[t].name + "'");
      }
      for (const Contribution& c : contributions_[t]) {
        graph_.gradients.push_back({TensorId(t), c.gradient});
      }
    }
    return std::move(graph_);
  }

 private:
  // Which tensors depend on a weight by operators that have gradients (a
  // comparison's is zero), and who produces each.
  void FindDependents(size_t forward_nodes) {
    depends_.assign(graph_.tensors.size(), false);
    for (size_t t = 0; t < graph_.tensors.size(); ++t) {
      depends_[t] = graph_.tensors[t].kind == TensorKind::kWeight;
    }
    for (size_t i = 0; i < forward_nodes; ++i) {
      const Node& node = graph_.nodes[i];
      const bool any =
          std::any_of(node.operands.begin(), node.operands.end(),
                      [&](TensorId id) { return depends_[id.index()]; });
      for (TensorId id : node.results) {
        depends_[id.index()] = any && !node.op->adjoints.empty();
        producer_[id.index()] = NodeId(i);
      }
    }
  }

  TensorId NewGradient(TensorId of_id, const std::string& name) {
    const Tensor& of = graph_.tensor(of_id);
    Tensor gradient;
    gradient.gradient_of = of_id;
    gradient.name = name;
    gradient.shape = of.shape;
    gradient.sample_dim = of.sample_dim;
    if (of.kind == TensorKind::kWeight) {
      gradient.kind = TensorKind::kWeightGradient;
      gradient.dtype = StatisticsDType(of.dtype);
    } else {
      gradient.kind = TensorKind::kGradient;
      gradient.dtype = of.dtype;
    }
    graph_.tensors.push_back(std::move(gradient));
    return TensorId(graph_.tensors.size() - 1);
  }

  // The whole gradient of a forward tensor; invalid when there is none. Where
  // several contribute, "sum" nodes add them block by block, from the last
  // block to the first: each adds to the sum of those behind it, so that one
  // gradient travels from block to block and no block keeps those of others.
  TensorId GradientOf(TensorId tensor) {
    std::vector<Contribution>& terms = contributions_[tensor.index()];
    if (terms.empty()) return TensorId();
    TensorId total;
    for (size_t i = 0; i < terms.size();) {
      const NodeId consumer = terms[i].consumer;
      const int block = graph_.node(consumer).block;
      std::vector<TensorId> gradients;
      if (total.valid()) gradients.push_back(total);
      for (; i < terms.size() && graph_.node(terms[i].consumer).block == block;
           ++i) {
        gradients.push_back(terms[i].gradient);
      }
      total = gradients.size() > 1 ? AddSum(tensor, gradients, consumer)
                                   : gradients[0];
    }
    terms = {{total, terms.back().consumer}};
    return total;
  }

  // A "sum" node of gradients of `tensor`, in the block of `consumer`, which
  // reads it.
  TensorId AddSum(TensorId tensor, const std::vector<TensorId>& gradients,
                  NodeId consumer) {
    Node sum;
    const auto op = FindOp("sum");
    TESSERA_CHECK(op.has_value()) << "no operator 'sum'";
    sum.op = *op;
    sum.name = graph_.tensor(tensor).name + ".d_sum";
    sum.pass = Pass::kBackward;
    sum.forward = consumer;
    sum.block = graph_.node(consumer).block;
    const Node& producer = graph_.node(producer_[tensor.index()]);
    const auto k = static_cast<size_t>(
        std::find(producer.results.begin(), producer.results.end(), tensor) -
        producer.results.begin());
    for (uint8_t f : producer.rule.results[k]) {
      sum.rule.factors.push_back(producer.rule.factors[f]);
    }
    Indices all;
    for (size_t f = 0; f < sum.rule.factors.size(); ++f) {
      all.push_back(static_cast<uint8_t>(f));
    }
    for (TensorId gradient : gradients) {
      sum.operands.push_back(gradient);
      sum.rule.operands.push_back(all);
      sum.rule.terms.push_back(0);
    }
    sum.rule.results = {all};
    const TensorId total =
        NewGradient(tensor, graph_.tensor(tensor).name + ".d");
    sum.results = {total};
    graph_.nodes.push_back(std::move(sum));
    return total;
  }

  void Contribute(TensorId tensor, TensorId gradient, NodeId consumer) {
    contributions_[tensor.index()].push_back({gradient, consumer});
  }

  void AddAdjoints(NodeId id) {
    // Copied: adding nodes and tensors moves the vectors.
    const Node node = graph_.node(id);
    const bool is_loss = std::any_of(
        node.results.begin(), node.results.end(),
        [&](TensorId result) { return adds_to_loss_[result.index()]; });
    std::vector<TensorId> result_gradients;
    bool reached = is_loss;
    for (TensorId result : node.results) {
      result_gradients.push_back(depends_[result.index()] ? GradientOf(result)
                                                          : TensorId());
      reached = reached || result_gradients.back().valid();
    }
    if (!reached) return;
    for (const AdjointDef& adjoint : node.op->adjoints) {
      AddAdjoint(id, node, adjoint, result_gradients);
    }
  }

  void AddAdjoint(NodeId id, const Node& node, const AdjointDef& adjoint,
                  const std::vector<TensorId>& result_gradients) {
    const size_t arrow = adjoint.signature.find("->");
    const auto reads = ReadSymbols(adjoint.signature.substr(0, arrow));
    const auto writes = ReadSymbols(adjoint.signature.substr(arrow + 2));
    const bool wanted =
        std::any_of(writes.begin(), writes.end(), [&](const Symbol& s) {
          return s.index < node.operands.size() &&
                 depends_[node.operands[s.index].index()];
        });
    if (!wanted) return;
    // A gradient that is passed on is an activation's: a weight's is a tensor
    // of its own, which is added up.
    const bool passes = adjoint.op.empty();
    if (const TensorId operand = node.operands[writes[0].index];
        passes && graph_.tensor(operand).kind != TensorKind::kWeight) {
      if (adds_to_loss_[node.results[reads[0].index].index()]) {
        adds_to_loss_[operand.index()] = true;
      } else {
        Contribute(operand, result_gradients[reads[0].index], id);
      }
      return;
    }
    Node backward;
    const auto op = FindOp(passes ? "scale" : adjoint.op);
    TESSERA_CHECK(op.has_value()) << op.error().message;
    backward.op = *op;
    backward.attributes =
        passes ? std::vector<Attribute>{{"factor", 1}} : node.attributes;
    backward.block = node.block;
    backward.pass = Pass::kBackward;
    backward.forward = id;
    for (const Symbol& s : reads) {
      const auto& side = s.of_result ? node.results : node.operands;
      if (s.index >= side.size()) continue;
      const TensorId tensor = s.gradient    ? result_gradients[s.index]
                              : s.of_result ? node.results[s.index]
                                            : node.operands[s.index];
      if (!tensor.valid()) return;  // no gradient arrives there
      backward.operands.push_back(tensor);
      backward.rule.operands.push_back(s.of_result
                                           ? node.rule.results[s.index]
                                           : node.rule.operands[s.index]);
      backward.rule.terms.push_back(0);
    }
    for (const Symbol& s : writes) {
      if (s.index >= node.operands.size()) continue;
      const TensorId operand = node.operands[s.index];
      const std::string suffix = ".d" + std::to_string(s.index);
      if (backward.name.empty()) backward.name = node.name + suffix;
      const TensorId gradient = NewGradient(operand, node.name + suffix);
      backward.results.push_back(gradient);
      backward.rule.results.push_back(node.rule.operands[s.index]);
    }
    KeepUsedFactors(node.rule, backward.rule);
    graph_.nodes.push_back(backward);
    for (size_t k = 0; k < backward.results.size(); ++k) {
      Contribute(node.operands[writes[k].index], backward.results[k], id);
    }
  }

  // Gives `rule`, whose indices refer to `forward`'s factors, a factor list of
  // its own with those that it uses.
  static void KeepUsedFactors(const IndexRule& forward, IndexRule& rule) {
    std::vector<int> renumbered(forward.factors.size(), -1);
    const auto renumber = [&](std::vector<Indices>& sides) {
      for (Indices& indices : sides) {
        for (uint8_t& f : indices) {
          if (renumbered[f] < 0) {
            renumbered[f] = static_cast<int>(rule.factors.size());
            rule.factors.push_back(forward.factors[f]);
          }
          f = static_cast<uint8_t>(renumbered[f]);
        }
      }
    };
    renumber(rule.operands);
    renumber(rule.results);
  }

  Graph graph_;
  std::vector<std::vector<Contribution>> contributions_;  // by forward tensor
  std::vector<NodeId> producer_;                          // by forward tensor
  std::vector<bool> depends_;                             // on a weight
  // The loss and what is added up to it: their gradient is one, which the
  // adjoints of the operators that compute them take for granted.
  std::vector<bool> adds_to_loss_;
};

}  // namespace

Result<Graph> Differentiate(Graph forward) {
  return Differentiator(std::move(forward)).Run();
}

}  // namespace tessera
