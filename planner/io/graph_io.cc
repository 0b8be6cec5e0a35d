#include "planner/io/graph_io.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <unordered_map>

#include "planner/base/file.h"
#include "planner/base/indexed.h"
#include "planner/base/table.h"
#include "planner/io/json_value.h"
#include "planner/io/proto_endings.h"
#include "planner/io/proto_file_io.h"
#include "proto/graph.pb.h"

namespace tessera {
namespace {

// Beyond any model; sums of sizes in bytes stay within int64.
constexpr double kMaxElements = 0x1p50;

// The kinds of a forward graph in the order of the file's enum, from 1.
constexpr TensorKind kTensorKinds[] = {TensorKind::kInput, TensorKind::kWeight,
                                       TensorKind::kActivation};

// Positions of unique names, with the error for an unknown one.
class NameIndex {
 public:
  // False when the name is taken.
  bool Add(const std::string& name) {
    names_.push_back(name);
    return index_.emplace(name, static_cast<int>(names_.size()) - 1).second;
  }
  Result<int> Find(std::string_view kind, const std::string& name,
                   const std::string& where) const {
    const auto found = index_.find(name);
    if (found != index_.end()) return found->second;
    // A list of every tensor of a model would hide the message.
    const std::vector<std::string_view> known(names_.begin(), names_.end());
    std::string message = "unknown " + std::string(kind) + " '" + name + "'";
    const std::string nearest = NearestName(name, known);
    if (!nearest.empty()) message += "; did you mean '" + nearest + "'?";
    return InvalidInput(message, where);
  }

 private:
  std::vector<std::string> names_;
  std::unordered_map<std::string, int> index_;
};

// ---- to the file ----------------------------------------------------------

proto::Graph ToProto(const Graph& graph) {
  proto::Graph out;
  out.set_schema_version(kSchemaVersion);
  out.set_name(graph.name);
  out.set_global_batch(graph.global_batch);
  out.set_seq_len(graph.seq_len);
  out.set_dtype(std::string(NameOf(graph.dtype)));
  for (const std::string& block : graph.blocks) out.add_blocks(block);
  for (const Tensor& tensor : graph.tensors) {
    proto::Tensor& row = *out.add_tensors();
    row.set_name(tensor.name);
    const auto kind = std::find(std::begin(kTensorKinds),
                                std::end(kTensorKinds), tensor.kind);
    TESSERA_CHECK(kind != std::end(kTensorKinds)) << tensor.name;
    row.set_kind(
        static_cast<proto::TensorKind>(kind - std::begin(kTensorKinds) + 1));
    for (int64_t extent : tensor.shape) row.add_shape(extent);
    row.set_dtype(std::string(NameOf(tensor.dtype)));
    if (tensor.sample_dim >= 0) row.set_sample_dim(tensor.sample_dim);
    if (!(tensor.init == Initializer{})) {
      row.mutable_init()->set_stddev(tensor.init.stddev);
      row.mutable_init()->set_constant(tensor.init.constant);
    }
    row.set_weight_decay(tensor.weight_decay);
    row.mutable_values()->Add(tensor.values.begin(), tensor.values.end());
  }
  for (const Node& node : graph.nodes) {
    TESSERA_CHECK(node.pass == Pass::kForward) << node.name;
    proto::Node& row = *out.add_nodes();
    row.set_name(node.name);
    row.set_op(std::string(node.op->name));
    row.set_rule(node.rule.ToString());
    for (const Attribute& attribute : node.attributes) {
      row.add_attributes()->set_name(attribute.name);
      row.mutable_attributes()->rbegin()->set_value(attribute.value);
    }
    for (TensorId id : node.operands) {
      row.add_operands(graph.tensor(id).name);
    }
    for (TensorId id : node.results) row.add_results(graph.tensor(id).name);
    row.set_block(graph.blocks[static_cast<size_t>(node.block)]);
  }
  out.set_loss(graph.tensor(graph.loss).name);
  std::vector<const OpDef*> written;
  for (const Node& node : graph.nodes) {
    const OwnOp* own = OwnOpOf(*node.op);
    if (own == nullptr || std::ranges::count(written, node.op) > 0) continue;
    written.push_back(node.op);
    proto::Operator& row = *out.add_operators();
    row.set_name(own->name);
    row.set_summary(own->summary);
    row.set_rule(own->rule);
    row.set_flops_per_point(own->flops_per_point);
    row.set_backward_flops_per_point(own->backward_flops_per_point);
    row.set_backward_reads_result(own->backward_reads_result);
    row.set_one_backward(own->one_backward);
    row.set_exchanged(own->exchanged);
    for (const size_t operand : own->integer_operands) {
      row.add_integer_operands(static_cast<int32_t>(operand));
    }
    for (const size_t operand : own->forward_operands) {
      row.add_forward_operands(static_cast<int32_t>(operand));
    }
  }
  return out;
}

// ---- from the file --------------------------------------------------------

Result<DType> FloatDType(const std::string& name, const std::string& where) {
  auto dtype = ParseDType(name);
  if (!dtype) return InvalidInput(dtype.error().message, where);
  if (!IsFloat(*dtype)) {
    return InvalidInput("is " + name + ": expected a floating-point type",
                        where);
  }
  return *dtype;
}

Result<Tensor> FromProto(const proto::Tensor& row, int64_t global_batch,
                         int index) {
  const auto at = [&](std::string_view field) {
    return Indexed("tensors", index, field);
  };
  Tensor tensor;
  tensor.name = row.name();
  if (row.kind() < 1 ||
      static_cast<size_t>(row.kind()) > std::size(kTensorKinds)) {
    return InvalidInput("expected input, weight or activation", at("kind"));
  }
  tensor.kind = kTensorKinds[row.kind() - 1];
  tensor.shape.assign(row.shape().begin(), row.shape().end());
  if (row.shape_size() > kMaxDims) {
    return InvalidInput("has " + std::to_string(row.shape_size()) +
                            " dimensions: expected at most " +
                            std::to_string(kMaxDims),
                        at("shape"));
  }
  double elements = 1;
  for (int64_t extent : tensor.shape) {
    if (extent < 1) {
      return InvalidInput(
          "has the extent " + std::to_string(extent) + ": expected at least 1",
          at("shape"));
    }
    elements *= static_cast<double>(extent);
  }
  if (elements > kMaxElements) {
    return InvalidInput("has more than 2^50 elements", at("shape"));
  }
  auto dtype = ParseDType(row.dtype());
  if (!dtype) return InvalidInput(dtype.error().message, at("dtype"));
  tensor.dtype = *dtype;
  if (row.has_sample_dim()) {
    tensor.sample_dim = row.sample_dim();
    if (tensor.sample_dim < 0 || tensor.sample_dim >= row.shape_size()) {
      return InvalidInput("is " + std::to_string(tensor.sample_dim) +
                              ": expected a dimension of the shape",
                          at("sample_dim"));
    }
    const int64_t samples = row.shape(tensor.sample_dim);
    if (samples != global_batch) {
      return InvalidInput("has extent " + std::to_string(samples) +
                              ": expected the global batch " +
                              std::to_string(global_batch),
                          at("sample_dim"));
    }
  }
  const bool is_weight = tensor.kind == TensorKind::kWeight;
  if (!is_weight && row.has_init()) {
    return InvalidInput("only weights have one", at("init"));
  }
  if (!is_weight && row.weight_decay()) {
    return InvalidInput("only weights have one", at("weight_decay"));
  }
  tensor.init = {row.init().stddev(), row.init().constant()};
  if (!std::isfinite(tensor.init.stddev) || tensor.init.stddev < 0 ||
      !std::isfinite(tensor.init.constant)) {
    return InvalidInput("expected finite numbers, stddev of at least 0",
                        at("init"));
  }
  tensor.weight_decay = row.weight_decay();
  tensor.values.assign(row.values().begin(), row.values().end());
  return tensor;
}

Result<void> Define(const proto::Operator& row, int index) {
  OwnOp own = {.name = row.name(),
               .summary = row.summary(),
               .rule = row.rule(),
               .flops_per_point = row.flops_per_point(),
               .backward_flops_per_point = row.has_backward_flops_per_point()
                                               ? row.backward_flops_per_point()
                                               : row.flops_per_point(),
               .backward_reads_result = row.backward_reads_result(),
               .one_backward = row.one_backward(),
               .exchanged = row.exchanged()};
  const auto read = [&](const auto& operands, std::string_view field,
                        std::vector<size_t>& to) -> Result<void> {
    for (const int32_t operand : operands) {
      if (operand < 0) {
        return InvalidInput(
            "names operand " + std::to_string(operand) + ": they count from 0",
            Indexed("operators", index, field));
      }
      to.push_back(static_cast<size_t>(operand));
    }
    return {};
  };
  TESSERA_RETURN_IF_ERROR(
      read(row.integer_operands(), "integer_operands", own.integer_operands));
  TESSERA_RETURN_IF_ERROR(
      read(row.forward_operands(), "forward_operands", own.forward_operands));
  const auto defined = DefineOp(own);
  if (defined) return {};
  return InvalidInput(defined.error().message,
                      Indexed("operators", index, defined.error().where));
}

Result<std::vector<Attribute>> ReadAttributes(const proto::Node& row,
                                              const OpDef& op, int index) {
  std::vector<Attribute> attributes;
  for (int i = 0; i < row.attributes_size(); ++i) {
    const proto::Attribute& attribute = row.attributes(i);
    const std::string where = Indexed("nodes", index, Indexed("attributes", i));
    attributes.push_back({attribute.name(), attribute.value()});
    std::string problem = AttributeProblem(op, attributes.back());
    if (!problem.empty()) return InvalidInput(std::move(problem), where);
  }
  std::ranges::stable_sort(attributes, {}, &Attribute::name);
  for (size_t i = 1; i < attributes.size(); ++i) {
    if (attributes[i].name != attributes[i - 1].name) continue;
    const auto def = std::ranges::find(op.attributes, attributes[i].name,
                                       &AttributeDef::name);
    if (!def->list) {
      return InvalidInput("'" + attributes[i].name + "' occurs twice",
                          Indexed("nodes", index, "attributes"));
    }
  }
  return attributes;
}

Result<IndexRule> ReadRule(const proto::Node& row, const OpDef& op,
                           const std::string& where) {
  if (row.rule().empty() && op.rule.empty()) {
    return InvalidInput("missing: " + row.op() + " has no rule of its own",
                        where);
  }
  auto rule = IndexRule::Parse(
      row.rule().empty() ? op.rule : std::string_view(row.rule()));
  if (!rule) return InvalidInput(rule.error().message, where);
  // What has a form is checked by it (Validate).
  if (op.rule.empty() || op.form.accepts != nullptr) return rule;
  // The operator's FLOPs, kernels and couplings know the factors by letter.
  const auto own = IndexRule::Parse(op.rule);
  TESSERA_CHECK(own.has_value()) << op.name;
  const auto of_samples = IndexRule::Parse(op.rule_of_samples);
  if (!(*rule == *own) && !(of_samples && *rule == *of_samples)) {
    return InvalidInput("is '" + row.rule() + "': expected " + row.op() +
                            "'s own, '" + std::string(op.rule) + "'",
                        where);
  }
  return rule;
}

Result<Node> FromProto(const proto::Node& row, const NameIndex& own_ops,
                       const NameIndex& tensors, const NameIndex& blocks,
                       int index) {
  Node node;
  node.name = row.name();
  const auto op = FindOp(row.op());
  if (!op) {
    return InvalidInput(op.error().message, Indexed("nodes", index, "op"));
  }
  node.op = *op;
  // Another file's is unknown here.
  if (OwnOpOf(*node.op) != nullptr) {
    const auto own =
        own_ops.Find("operator", row.op(), Indexed("nodes", index, "op"));
    if (!own) return own.error();
  }
  if (node.op->rule.empty() && node.op->adjoints.empty() &&
      node.op->form.accepts == nullptr) {
    return InvalidInput("'" + row.op() + "' is not a forward operator",
                        Indexed("nodes", index, "op"));
  }
  TESSERA_TRY(node.rule,
              ReadRule(row, *node.op, Indexed("nodes", index, "rule")));
  TESSERA_TRY(node.attributes, ReadAttributes(row, *node.op, index));
  const auto expect = [&](std::string_view field, int found,
                          size_t wanted) -> Result<void> {
    if (static_cast<size_t>(found) == wanted) return {};
    return InvalidInput("has " + std::to_string(found) + ": expected " +
                            std::to_string(wanted) + ", as its rule '" +
                            node.rule.ToString() + "'",
                        Indexed("nodes", index, field));
  };
  TESSERA_RETURN_IF_ERROR(
      expect("operands", row.operands_size(), node.rule.operands.size()));
  TESSERA_RETURN_IF_ERROR(
      expect("results", row.results_size(), node.rule.results.size()));
  for (int i = 0; i < row.operands_size(); ++i) {
    TESSERA_TRY(const int tensor,
                tensors.Find("tensor", row.operands(i),
                             Indexed("nodes", index, Indexed("operands", i))));
    node.operands.push_back(TensorId(tensor));
  }
  for (int i = 0; i < row.results_size(); ++i) {
    TESSERA_TRY(const int tensor,
                tensors.Find("tensor", row.results(i),
                             Indexed("nodes", index, Indexed("results", i))));
    node.results.push_back(TensorId(tensor));
  }
  TESSERA_TRY(node.block, blocks.Find("block", row.block(),
                                      Indexed("nodes", index, "block")));
  return node;
}

Result<void> CheckPositive(int64_t value, std::string_view field) {
  if (value >= 1) return {};
  return InvalidInput("is " + std::to_string(value) + ": expected at least 1",
                      std::string(field));
}

// Of inputs of whole numbers that have places behind their samples, "tokens"
// have those of the sequence; where there are none, one of the others has.
Result<void> CheckSequence(const Graph& graph) {
  const auto places = [&](size_t i) {
    const Tensor& tensor = graph.tensors[i];
    const auto behind = static_cast<size_t>(tensor.sample_dim + 1);
    const bool has = tensor.kind == TensorKind::kInput &&
                     tensor.sample_dim >= 0 && !IsFloat(tensor.dtype) &&
                     behind < tensor.shape.size();
    return has ? tensor.shape[behind] : 0;
  };
  std::optional<size_t> wrong;
  bool any = false;
  for (size_t i = 0; i < graph.tensors.size(); ++i) {
    if (places(i) == 0) continue;
    const bool same = places(i) == graph.seq_len;
    if (graph.tensors[i].name == "tokens") {
      wrong = same ? std::optional<size_t>() : i;
      any = same;
      break;
    }
    any = any || same || graph.seq_len == 1;  // what has no sequence
    if (!same && !wrong) wrong = i;
  }
  if (any || !wrong) return {};
  return InvalidInput("'" + graph.tensors[*wrong].name + "' has " +
                          std::to_string(places(*wrong)) +
                          " places: expected seq_len, " +
                          std::to_string(graph.seq_len),
                      Indexed("tensors", *wrong, "shape"));
}

Result<Graph> FromProto(const proto::Graph& message) {
  Graph graph;
  graph.name = message.name();
  graph.global_batch = message.global_batch();
  graph.seq_len = message.seq_len();
  TESSERA_RETURN_IF_ERROR(CheckPositive(graph.global_batch, "global_batch"));
  TESSERA_RETURN_IF_ERROR(CheckPositive(graph.seq_len, "seq_len"));
  TESSERA_TRY(graph.dtype, FloatDType(message.dtype(), "dtype"));
  NameIndex own_ops;
  for (int i = 0; i < message.operators_size(); ++i) {
    TESSERA_RETURN_IF_ERROR(Define(message.operators(i), i));
    if (!own_ops.Add(message.operators(i).name())) {
      return InvalidInput("'" + message.operators(i).name() + "' occurs twice",
                          Indexed("operators", i, "name"));
    }
  }
  NameIndex blocks;
  for (int i = 0; i < message.blocks_size(); ++i) {
    graph.blocks.push_back(message.blocks(i));
    if (!blocks.Add(message.blocks(i))) {
      return InvalidInput("'" + message.blocks(i) + "' occurs twice",
                          Indexed("blocks", i));
    }
  }
  NameIndex tensors;
  for (int i = 0; i < message.tensors_size(); ++i) {
    TESSERA_TRY(Tensor tensor,
                FromProto(message.tensors(i), graph.global_batch, i));
    if (!tensors.Add(tensor.name)) {
      return InvalidInput("'" + tensor.name + "' occurs twice",
                          Indexed("tensors", i, "name"));
    }
    graph.tensors.push_back(std::move(tensor));
  }
  std::vector<bool> produced(graph.tensors.size(), false);
  NameIndex node_names;
  for (int i = 0; i < message.nodes_size(); ++i) {
    TESSERA_TRY(Node node,
                FromProto(message.nodes(i), own_ops, tensors, blocks, i));
    if (!node_names.Add(node.name)) {
      return InvalidInput("'" + node.name + "' occurs twice",
                          Indexed("nodes", i, "name"));
    }
    for (TensorId id : node.results) produced[id.index()] = true;
    graph.nodes.push_back(std::move(node));
  }
  for (size_t i = 0; i < graph.tensors.size(); ++i) {
    if (graph.tensors[i].kind == TensorKind::kActivation && !produced[i]) {
      return InvalidInput("no node produces '" + graph.tensors[i].name + "'",
                          Indexed("tensors", static_cast<int>(i)));
    }
  }
  TESSERA_TRY(const int loss, tensors.Find("tensor", message.loss(), "loss"));
  graph.loss = TensorId(loss);
  const std::vector<Error> errors = Validate(graph);
  if (!errors.empty()) return errors[0];
  TESSERA_RETURN_IF_ERROR(CheckSequence(graph));
  return graph;
}

Error Disagrees(const std::string& path, std::string_view field,
                const std::string& own, const std::string& wanted) {
  return InvalidInput("the graph has " + own + ", not " + wanted,
                      path + ": " + std::string(field));
}

}  // namespace

Result<Graph> ReadGraph(const std::string& path) {
  proto::Graph message;
  TESSERA_RETURN_IF_ERROR(ReadProtoFile(path, message));
  auto graph = FromProto(message);
  if (!graph) return graph.error().At(path);
  return graph;
}

Result<void> WriteGraph(const std::string& path, const Graph& graph) {
  TESSERA_CHECK(graph.gradients.empty()) << graph.name;
  return WriteProtoFile(path, ToProto(graph));
}

bool IsGraphFile(const std::string& path) {
  const auto encoding = ProtoEncodingOf(path);
  if (encoding != ProtoEncoding::kJson) return encoding.has_value();
  if (!IsRegularFile(path)) return false;
  const auto value = ReadJson(path);
  return value.has_value() && value->fields.contains("schema_version");
}

Result<Graph> ImportGraph(const std::string& path,
                          const ImportOptions& options) {
  TESSERA_TRY(Graph graph, ReadGraph(path));
  if (options.global_batch != 0 && options.global_batch != graph.global_batch) {
    return Disagrees(path, "global_batch", std::to_string(graph.global_batch),
                     std::to_string(options.global_batch));
  }
  if (options.seq_len != 0 && options.seq_len != graph.seq_len) {
    return Disagrees(path, "seq_len", std::to_string(graph.seq_len),
                     std::to_string(options.seq_len));
  }
  if (options.dtype.has_value() && *options.dtype != graph.dtype) {
    return Disagrees(path, "dtype", std::string(NameOf(graph.dtype)),
                     std::string(NameOf(*options.dtype)));
  }
  return graph;
}

}  // namespace tessera
