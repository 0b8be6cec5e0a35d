#include "planner/ir/graph.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "planner/base/element_count.h"
#include "planner/base/fnv1a.h"
#include "planner/base/indexed.h"
#include "planner/base/table.h"
#include "planner/ir/running_average.h"
#include "planner/ir/statistics_dtype.h"

namespace tessera {
namespace {

// Of a forward node's result `k`.
DType ResultDType(DType graph_dtype, const OpDef& op, size_t k,
                  const Shape& shape) {
  const std::vector<size_t>& integers = op.integer_results;
  if (std::find(integers.begin(), integers.end(), k) != integers.end()) {
    return DType::kInt32;
  }
  return k > 0 || shape.empty() || op.wide ? StatisticsDType(graph_dtype)
                                           : graph_dtype;
}

// The dimension of the samples, or -1.
int SampleDim(const IndexRule& rule, const Indices& indices) {
  for (size_t d = 0; d < indices.size(); ++d) {
    if (rule.factors[indices[d]].role == Role::kSample) {
      return static_cast<int>(d);
    }
  }
  return -1;
}

Result<std::vector<int64_t>> NodeExtents(const Graph& graph, const Node& node) {
  std::vector<Shape> operand_shapes;
  std::vector<Shape> result_shapes;
  for (TensorId id : node.operands) {
    operand_shapes.push_back(graph.tensor(id).shape);
  }
  for (TensorId id : node.results) {
    result_shapes.push_back(graph.tensor(id).shape);
  }
  return Extents(node.rule, operand_shapes, result_shapes);
}

Flops ForwardFlops(const Graph& graph, const Node& node) {
  const auto extents = NodeExtents(graph, node);
  TESSERA_CHECK(extents.has_value()) << node.name;
  std::vector<DType> dtypes(std::max(node.operands.size(), node.results.size()),
                            graph.dtype);
  const OpCall call = {
      &node.rule, *extents, std::span(dtypes).first(node.operands.size()),
      std::span(dtypes).first(node.results.size()), node.attributes};
  return CallFlops(*node.op, call);
}

std::string ShapeText(const Shape& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ",") + std::to_string(shape[i]);
  }
  return text + "]";
}

// Exact text of an attribute list; salts only tell dropouts apart.
std::string AttributeText(const Node& node, bool with_salt) {
  std::string text;
  for (const Attribute& attribute : node.attributes) {
    if (!with_salt && attribute.name == "salt") continue;
    char value[40];
    std::snprintf(value, sizeof value, "=%a;", attribute.value);
    text += attribute.name + value;
  }
  return text;
}

// How often a token meets the weights of a matrix product, and the shares of
// the weights and of the computed products that count for it: all of them, but
// for experts, of which a token has `top_k` while their slots are all computed.
struct ActiveShare {
  double weights = 1;
  double products = 1;
};

ActiveShare ActiveShareOf(const Graph& graph, const Node& node) {
  const std::vector<AttributeDef>& attributes = node.op->attributes;
  if (std::none_of(attributes.begin(), attributes.end(),
                   [](const AttributeDef& a) { return a.name == "top_k"; })) {
    return {};
  }
  const auto extents = NodeExtents(graph, node);
  TESSERA_CHECK(extents.has_value()) << node.name;
  const auto extent = [&](char letter) {
    const int f = node.rule.FactorOf(letter);
    return static_cast<double>((*extents)[static_cast<size_t>(f)]);
  };
  const double used = node.attribute("top_k") / extent('e');
  return {used, used * static_cast<double>(graph.seq_len) / extent('s')};
}

}  // namespace

double Node::attribute(std::string_view attribute_name) const {
  for (const Attribute& a : attributes) {
    if (a.name == attribute_name) return a.value;
  }
  TESSERA_CHECK(false) << name << " has no attribute " << attribute_name;
  return 0;
}

int64_t ParameterCount(const Graph& graph) {
  int64_t count = 0;
  const std::vector<double> momenta = RunningMomenta(graph);
  for (size_t t = 0; t < graph.tensors.size(); ++t) {
    const Tensor& tensor = graph.tensors[t];
    if (tensor.kind != TensorKind::kWeight || momenta[t] >= 0) continue;
    count += ElementCount(tensor.shape);
  }
  return count;
}

namespace {

// Of the pairs of a query and a key those that the mask leaves, but for the
// diagonal: half of a causal one's, and of a window of w of s keys
// w/s (1 - w/2s), or twice that on both sides of a query.
double AttendedShare(const Graph& graph, const Node& node) {
  const auto attribute = [&](std::string_view name, double absent) {
    const auto found =
        std::ranges::find(node.attributes, name, &Attribute::name);
    return found == node.attributes.end() ? absent : found->value;
  };
  const double sides = attribute("causal", 1) == 0 ? 2 : 1;
  const double window = attribute("window", 0);
  const auto keys =
      static_cast<double>(graph.tensor(node.operands[1]).shape[1]);
  const double share = window > 0 ? std::min(1.0, window / keys) : 1;
  return sides * share * (1 - share / 2);
}

}  // namespace

Flops ModelFlops(const Graph& graph, bool halve_causal) {
  Flops total;
  for (const Node& node : graph.nodes) {
    if (node.pass != Pass::kForward) continue;
    // Backward does twice the forward's matrix products.
    if (node.op->op_class == OpClass::kMatmul) {
      total +=
          ForwardFlops(graph, node) * (3 * ActiveShareOf(graph, node).products);
    } else if (node.op->op_class == OpClass::kAttention) {
      const double share = halve_causal ? AttendedShare(graph, node) : 1;
      total += ForwardFlops(graph, node) * (3 * share);
    } else if (const OwnOp* own = OwnOpOf(*node.op); own != nullptr) {
      const double forward = own->flops_per_point;
      if (forward > 0) {
        double backward = 0;
        for (const AdjointDef& adjoint : node.op->adjoints) {
          const auto op = FindOp(adjoint.op);
          TESSERA_CHECK(op.has_value()) << adjoint.op;
          backward += (*op)->flops_per_point;
        }
        total += ForwardFlops(graph, node) * (1 + backward / forward);
      }
    }
  }
  return total;
}

std::string_view UnitOf(const Graph& graph) {
  for (const Tensor& tensor : graph.tensors) {
    if (tensor.kind != TensorKind::kInput) continue;
    if (tensor.name == "images") return "images";
    if (tensor.name == "patches") return "patches";
    if (tensor.name == "dense") return "samples";
  }
  return "tokens";
}

GraphBuilder::GraphBuilder(std::string name, int64_t global_batch,
                           int64_t seq_len, DType dtype) {
  graph_.name = std::move(name);
  graph_.global_batch = global_batch;
  graph_.seq_len = seq_len;
  graph_.dtype = dtype;
}

void GraphBuilder::BeginBlock(std::string name) {
  graph_.blocks.push_back(std::move(name));
}

TensorId GraphBuilder::Input(std::string name, Shape shape, DType dtype) {
  Tensor tensor;
  tensor.name = std::move(name);
  tensor.shape = std::move(shape);
  tensor.dtype = dtype;
  tensor.kind = TensorKind::kInput;
  tensor.sample_dim = 0;
  graph_.tensors.push_back(std::move(tensor));
  return TensorId(graph_.tensors.size() - 1);
}

TensorId GraphBuilder::Weight(std::string name, Shape shape, Initializer init,
                              bool weight_decay) {
  Tensor tensor;
  tensor.name = std::move(name);
  tensor.shape = std::move(shape);
  tensor.dtype = graph_.dtype;
  tensor.kind = TensorKind::kWeight;
  tensor.init = init;
  tensor.weight_decay = weight_decay;
  graph_.tensors.push_back(std::move(tensor));
  return TensorId(graph_.tensors.size() - 1);
}

TensorId GraphBuilder::Constant(std::string name, Shape shape,
                                std::vector<double> values) {
  Tensor tensor;
  tensor.name = std::move(name);
  tensor.shape = std::move(shape);
  tensor.dtype = graph_.dtype;
  tensor.kind = TensorKind::kInput;
  tensor.values = std::move(values);
  graph_.tensors.push_back(std::move(tensor));
  return TensorId(graph_.tensors.size() - 1);
}

std::vector<TensorId> GraphBuilder::Add(std::string_view op, std::string name,
                                        std::vector<TensorId> operands,
                                        std::string_view rule,
                                        std::vector<Attribute> attributes) {
  Node node;
  node.name = std::move(name);
  const auto fail = [&](const Error& error) {
    errors_.push_back(error.At("node " + node.name));
    return std::vector<TensorId>(4);  // invalid ids, never read: Finish fails
  };
  if (graph_.blocks.empty()) graph_.blocks.emplace_back("main");
  node.block = static_cast<int>(graph_.blocks.size()) - 1;
  for (TensorId id : operands) {
    if (!id.valid()) return fail(InvalidInput("an operand could not be built"));
  }
  auto found = FindOp(op);
  if (!found) return fail(found.error());
  node.op = *found;
  auto parsed = IndexRule::Parse(rule.empty() ? node.op->rule : rule);
  if (!parsed) return fail(parsed.error());
  node.rule = *std::move(parsed);
  node.operands = std::move(operands);
  node.attributes = std::move(attributes);
  std::ranges::stable_sort(node.attributes, {}, &Attribute::name);
  std::vector<int64_t> extents(node.rule.factors.size(), -1);
  if (node.rule.operands.size() != node.operands.size()) {
    return fail(InvalidInput("rule '" + node.rule.ToString() + "' has " +
                             std::to_string(node.rule.operands.size()) +
                             " operands, found " +
                             std::to_string(node.operands.size())));
  }
  for (size_t i = 0; i < node.operands.size(); ++i) {
    const Shape& shape = graph_.tensor(node.operands[i]).shape;
    for (size_t d = 0; d < shape.size() && d < node.rule.operands[i].size();
         ++d) {
      extents[node.rule.operands[i][d]] = shape[d];
    }
  }
  for (const FactorSize& size : node.op->sizes) {
    const int f = node.rule.FactorOf(size.factor);
    for (const Attribute& attribute : node.attributes) {
      if (attribute.name != size.attribute || f < 0) continue;
      extents[static_cast<size_t>(f)] = static_cast<int64_t>(attribute.value);
    }
  }
  for (size_t k = 0; k < node.rule.results.size(); ++k) {
    Tensor result;
    result.name = k == 0 ? node.name : node.name + ":" + std::to_string(k);
    for (size_t d = 0; d < node.rule.results[k].size(); ++d) {
      result.shape.push_back(extents[node.rule.results[k][d]]);
    }
    result.sample_dim = SampleDim(node.rule, node.rule.results[k]);
    result.dtype = ResultDType(graph_.dtype, *node.op, k, result.shape);
    graph_.tensors.push_back(std::move(result));
    node.results.push_back(TensorId(graph_.tensors.size() - 1));
  }
  if (auto checked = NodeExtents(graph_, node); !checked) {
    return fail(checked.error());
  }
  std::vector<TensorId> results = node.results;
  graph_.nodes.push_back(std::move(node));
  return results;
}

TensorId GraphBuilder::Add1(std::string_view op, std::string name,
                            std::vector<TensorId> operands,
                            std::string_view rule,
                            std::vector<Attribute> attributes) {
  return Add(op, std::move(name), std::move(operands), rule,
             std::move(attributes))[0];
}

Result<Graph> GraphBuilder::Finish(TensorId loss) {
  if (!errors_.empty()) return errors_[0];
  graph_.loss = loss;
  const std::vector<Error> errors = Validate(graph_);
  if (!errors.empty()) return errors[0];
  return std::move(graph_);
}

namespace {

// What the rule and the operator of a forward node demand of its tensors.
// REQUIRES: the rule fits their shapes.
void CheckTensors(const Graph& graph, const Node& node,
                  const std::string& where, std::vector<Error>& errors) {
  const auto check = [&](TensorId id, const Indices& indices,
                         DType expected_dtype) {
    const Tensor& tensor = graph.tensor(id);
    if (tensor.dtype != expected_dtype) {
      errors.push_back(InvalidInput(
          "'" + tensor.name + "' is " + std::string(NameOf(tensor.dtype)) +
              "; here a graph of " + std::string(NameOf(graph.dtype)) +
              " has " + std::string(NameOf(expected_dtype)),
          where));
    }
    const int sample_dim = SampleDim(node.rule, indices);
    if (tensor.sample_dim != sample_dim) {
      errors.push_back(InvalidInput(
          "'" + tensor.name + "' has the sample dimension " +
              std::to_string(tensor.sample_dim) + " (-1: none); by the rule '" +
              node.rule.ToString() + "' it is " + std::to_string(sample_dim),
          where));
    }
  };
  const std::vector<size_t>& integers = node.op->integer_operands;
  for (size_t i = 0; i < node.operands.size(); ++i) {
    const Tensor& operand = graph.tensor(node.operands[i]);
    DType expected = DType::kInt32;
    if (std::find(integers.begin(), integers.end(), i) == integers.end()) {
      // What a node produces was checked there.
      expected =
          operand.kind == TensorKind::kActivation && IsFloat(operand.dtype)
              ? operand.dtype
              : graph.dtype;
    }
    check(node.operands[i], node.rule.operands[i], expected);
  }
  for (size_t k = 0; k < node.results.size(); ++k) {
    check(node.results[k], node.rule.results[k],
          ResultDType(graph.dtype, *node.op, k,
                      graph.tensor(node.results[k]).shape));
  }
}

// The numbers of a constant; `total`: those of all so far.
std::string ConstantProblem(const Tensor& tensor, int64_t& total) {
  if (tensor.values.empty()) return "";
  if (tensor.kind != TensorKind::kInput || tensor.sample_dim >= 0) {
    return "has values: only inputs without samples have them";
  }
  const double elements = LargeElementCount(tensor.shape);
  const auto count = static_cast<int64_t>(tensor.values.size());
  if (static_cast<double>(count) != elements) {
    return "has " + std::to_string(count) + " values: expected those of " +
           ShapeText(tensor.shape);
  }
  total += count;
  if (total > kMostConstants) {
    return "is one of constants of more than " +
           std::to_string(kMostConstants) + " numbers together";
  }
  const bool whole = tensor.dtype == DType::kInt32;
  for (const double value : tensor.values) {
    if (std::isnan(value)) return "has a value that is no number";
    if (whole && (value != std::floor(value) || std::abs(value) > 0x7fffffff)) {
      return "has a value that is no whole number of 32 bits";
    }
  }
  return "";
}

// Attributes and rule of a forward node. An adjoint has its forward's.
void CheckAgainstOperator(const Node& node, const std::string& where,
                          std::vector<Error>& errors) {
  for (const Attribute& attribute : node.attributes) {
    std::string problem = AttributeProblem(*node.op, attribute);
    if (!problem.empty()) {
      errors.push_back(InvalidInput(std::move(problem), where));
    }
  }
  const RuleForm& form = node.op->form;
  if (form.accepts != nullptr && !form.accepts(node.rule)) {
    errors.push_back(InvalidInput(
        "rule '" + node.rule.ToString() + "' is not of the form of " +
            std::string(node.op->name) + ": " + std::string(form.text),
        where));
  }
}

// Extents that attributes give.
void CheckSizes(const Node& node, const std::vector<int64_t>& extents,
                const std::string& where, std::vector<Error>& errors) {
  for (const FactorSize& size : node.op->sizes) {
    const int f = node.rule.FactorOf(size.factor);
    if (f < 0) continue;
    const int64_t extent = extents[static_cast<size_t>(f)];
    for (const Attribute& attribute : node.attributes) {
      if (attribute.name != size.attribute ||
          attribute.value == static_cast<double>(extent)) {
        continue;
      }
      errors.push_back(InvalidInput(
          std::string("factor '") + size.factor + "' is " +
              std::to_string(extent) + ": expected the attribute '" +
              attribute.name + "', " + std::to_string(attribute.value),
          where));
    }
  }
}

// Shape and numbers; `constants`: those of all tensors so far.
void CheckTensor(const Tensor& tensor, const std::string& where,
                 int64_t& constants, std::vector<Error>& errors) {
  if (std::string problem = ConstantProblem(tensor, constants);
      !problem.empty()) {
    errors.push_back(InvalidInput("'" + tensor.name + "' " + problem, where));
  }
  if (std::ranges::any_of(tensor.shape,
                          [](int64_t extent) { return extent < 1; })) {
    errors.push_back(InvalidInput("tensor '" + tensor.name + "' has shape " +
                                      ShapeText(tensor.shape) +
                                      "; every extent must be at least 1",
                                  where));
  }
}

// Whether a node has all attributes of its operator, but for lists, which may
// be empty.
bool CheckAttributes(const Node& node, const std::string& where,
                     std::vector<Error>& errors) {
  bool complete = true;
  for (const AttributeDef& def : node.op->attributes) {
    const bool found =
        std::ranges::find(node.attributes, def.name, &Attribute::name) !=
        node.attributes.end();
    if (found || def.list) continue;
    errors.push_back(InvalidInput(
        "lacks the attribute '" + std::string(def.name) + "'", where));
    complete = false;
  }
  return complete;
}

// By tensor, while nodes are looked at in their order.
struct Progress {
  std::vector<bool> ready;  // it is given, or a node before has produced it
  // An operator of the user's own keeps it for its gradients.
  std::vector<bool> kept;
};

// Whether the tensors of a node exist. Its results are ready then.
bool CheckOrder(const Graph& graph, const Node& node, const std::string& where,
                Progress& progress, std::vector<Error>& errors) {
  bool exist = true;
  const auto fail = [&](std::string message) {
    errors.push_back(InvalidInput(std::move(message), where));
  };
  for (TensorId id : node.operands) {
    if (!id.valid() || id.index() >= graph.tensors.size()) {
      fail("operand " + std::to_string(id.value) + " does not exist");
      exist = false;
    } else if (progress.kept[id.index()] && node.pass == Pass::kForward) {
      fail("reads '" + graph.tensor(id).name +
           "', which an operator keeps for its own gradients");
    } else if (!progress.ready[id.index()]) {
      fail("reads '" + graph.tensor(id).name +
           "' before it is produced: the graph has a cycle or its nodes are "
           "out of order");
    }
  }
  for (TensorId id : node.results) {
    if (!id.valid() || id.index() >= graph.tensors.size()) {
      fail("result " + std::to_string(id.value) + " does not exist");
      exist = false;
    } else if (progress.ready[id.index()]) {
      fail("'" + graph.tensor(id).name + "' is produced twice");
    } else {
      progress.ready[id.index()] = true;
      progress.kept[id.index()] =
          id != node.results[0] && OwnOpOf(*node.op) != nullptr;
    }
  }
  return exist;
}

void CheckNode(const Graph& graph, const Node& node, const std::string& where,
               Progress& progress, std::vector<Error>& errors) {
  if (node.op == nullptr) {
    errors.push_back(InvalidInput("has no operator", where));
    return;
  }
  if (node.block < 0 || node.block >= static_cast<int>(graph.blocks.size())) {
    errors.push_back(InvalidInput("block " + std::to_string(node.block) +
                                      " of " +
                                      std::to_string(graph.blocks.size()),
                                  where));
  }
  const bool has_attributes = CheckAttributes(node, where, errors);
  if (node.pass == Pass::kForward) CheckAgainstOperator(node, where, errors);
  if (!CheckOrder(graph, node, where, progress, errors)) return;
  const auto extents = NodeExtents(graph, node);
  if (!extents) {
    errors.push_back(extents.error().At(where));
    return;
  }
  if (node.pass != Pass::kForward) return;
  CheckTensors(graph, node, where, errors);
  if (node.op->problem != nullptr && has_attributes) {
    std::string problem =
        node.op->problem({&node.rule, *extents, {}, {}, node.attributes});
    if (!problem.empty()) {
      errors.push_back(InvalidInput(std::move(problem), where));
    }
  }
  CheckSizes(node, *extents, where, errors);
}

}  // namespace

std::vector<Error> Validate(const Graph& graph) {
  std::vector<Error> errors;
  if (graph.nodes.empty()) {
    errors.push_back(InvalidInput("expected at least one node", "nodes"));
  }
  Progress progress;
  int64_t constants = 0;
  for (size_t i = 0; i < graph.tensors.size(); ++i) {
    const Tensor& tensor = graph.tensors[i];
    CheckTensor(tensor, Indexed("tensors", i), constants, errors);
    progress.ready.push_back(tensor.kind == TensorKind::kInput ||
                             tensor.kind == TensorKind::kWeight);
  }
  progress.kept.resize(graph.tensors.size(), false);
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    CheckNode(graph, node, Indexed("nodes", i) + " '" + node.name + "'",
              progress, errors);
  }
  const TensorId loss = graph.loss;
  if (!loss.valid() || loss.index() >= graph.tensors.size() ||
      !graph.tensor(loss).shape.empty() || !progress.ready[loss.index()] ||
      progress.kept[loss.index()]) {
    errors.push_back(
        InvalidInput("expected a scalar tensor that a node produces", "loss"));
  }
  return errors;
}

namespace {

// Everything of a node but names: operands by `tensor_text`.
template <typename TensorText>
std::string NodeText(const Node& node, bool with_salt, TensorText tensor_text) {
  std::string text(node.op->name);
  text += " " + node.rule.ToString() + " " + AttributeText(node, with_salt) +
          (node.pass == Pass::kForward ? "f" : "b");
  for (TensorId id : node.operands) text += " " + tensor_text(id);
  text += " ->";
  for (TensorId id : node.results) text += " " + tensor_text(id);
  return text + "\n";
}

}  // namespace

std::string Fingerprint(const Graph& graph) {
  std::string text = std::to_string(graph.global_batch) + "," +
                     std::to_string(graph.seq_len) + "," +
                     std::string(NameOf(graph.dtype)) + "\n";
  for (const Node& node : graph.nodes) {
    if (node.pass != Pass::kForward) continue;
    text += node.name + " " + std::to_string(node.block) + " " +
            NodeText(node, true, [&](TensorId id) {
              return graph.tensor(id).name + ShapeText(graph.tensor(id).shape);
            });
  }
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx",
                static_cast<unsigned long long>(Fnv1a().Add(text).value()));
  return digits;
}

std::vector<int> BlockClasses(const Graph& graph) {
  std::vector<std::string> texts(graph.blocks.size());
  std::vector<std::map<TensorId, int>> numbers(graph.blocks.size());
  std::vector<int> producer_block(graph.tensors.size(), -1);
  for (const Node& node : graph.nodes) {
    for (TensorId id : node.results) {
      producer_block[id.index()] = node.block;
    }
  }
  for (const Node& node : graph.nodes) {
    const auto b = static_cast<size_t>(node.block);
    texts[b] += NodeText(node, false, [&](TensorId id) {
      const int number = static_cast<int>(numbers[b].size());
      const bool is_new = numbers[b].emplace(id, number).second;
      std::string text = std::to_string(numbers[b].at(id));
      if (!is_new) return text;
      const Tensor& tensor = graph.tensor(id);
      const bool outside = producer_block[id.index()] != node.block;
      return text + (outside ? "<" : "") + ShapeText(tensor.shape) +
             std::string(NameOf(tensor.dtype)) +
             std::to_string(static_cast<int>(tensor.kind));
    });
  }
  std::map<std::string, int> first;
  std::vector<int> classes;
  for (size_t b = 0; b < texts.size(); ++b) {
    classes.push_back(
        first.emplace(texts[b], static_cast<int>(b)).first->second);
  }
  return classes;
}

}  // namespace tessera
