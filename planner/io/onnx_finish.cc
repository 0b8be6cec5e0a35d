// The end of a walk: losses, sums of outputs, and blocks.

#include <algorithm>

#include "planner/base/table.h"
#include "planner/io/onnx_walk.h"

namespace tessera::onnx {

namespace {

// Blocks end where a single tensor goes on. Each has a dense layer, convolution
// or lookup, and is called by the first of them. Those of recurrent layers are
// the runs of steps that it has already.
void CutIntoBlocks(Graph& graph, const std::set<std::string>& runs) {
  const std::vector<std::string> named = std::move(graph.blocks);
  std::vector<size_t> last_read(graph.tensors.size(), 0);
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    for (TensorId id : graph.nodes[i].operands) last_read[id.index()] = i;
  }
  graph.blocks.clear();
  std::set<TensorId> alive;  // computed, and read behind this node
  size_t begin = 0;          // of what may become a block
  bool begun = false;        // whether it is one
  int within = -1;           // of `named`
  const auto start = [&](const std::string& name, size_t i) {
    graph.blocks.push_back(name);
    begun = true;
    for (size_t j = begin; j < i; ++j) {
      graph.nodes[j].block = static_cast<int>(graph.blocks.size()) - 1;
    }
  };
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    Node& node = graph.nodes[i];
    const auto of = static_cast<size_t>(node.block);
    const bool steps = of < named.size() && runs.contains(named[of]);
    if (node.block != std::exchange(within, node.block) && i > 0) {
      // What is in front of a first layer is in its block.
      if (begun || !steps) begin = i;
      begun = false;
    }
    const bool layer =
        node.op->op_class != OpClass::kMemory || node.op->name == "embedding";
    if (!begun && (steps || layer)) start(steps ? named[of] : node.name, i);
    node.block = std::max(0, static_cast<int>(graph.blocks.size()) - 1);
    for (TensorId id : node.results) {
      if (last_read[id.index()] > i) alive.insert(id);
    }
    for (TensorId id : node.operands) {
      if (last_read[id.index()] == i) alive.erase(id);
    }
    if (alive.size() == 1 && !steps) {
      begin = i + 1;
      begun = false;
    }
  }
  if (graph.blocks.empty()) graph.blocks.push_back(graph.nodes[0].name);
}

}  // namespace

Result<OnnxComputation> Walk::FinishComputation() {
  TESSERA_RETURN_IF_ERROR(Problems());
  OnnxComputation made;
  TensorId loss;
  bool computes = false;  // besides constants
  for (const std::string& name : outputs_) {
    const std::string where = path_ + ": output '" + name + "'";
    OnnxNode reader;
    reader.name = name + ".sum";
    reader.inputs = {name};
    reader.outputs = {name + ".sum"};
    OnnxComputation::Output& output = made.outputs.emplace_back();
    output.name = name;
    if (In(reader, 0).Is(Value::Kind::kConstant)) {
      output.shape = In(reader, 0).constant.shape;
      output.values = In(reader, 0).constant.values;
      continue;
    }
    auto x = Computed(reader, 0);
    if (x) x = Materialise(*std::move(x));
    if (!x) return x.error().At(where);
    output.tensor = x->tensor;
    output.shape = ShapeOf(ActivationValue(*x));
    for (size_t d = 0; d < x->dims.size(); ++d) {
      if (auto own = CheckOwn(*x, d); !own) return own.error().At(where);
    }
    for (const Atom& atom : Flatten(x->dims)) {
      const auto at = std::ranges::find(x->own, atom.id, &Atom::id);
      output.order.push_back(static_cast<size_t>(at - x->own.begin()));
    }
    Letters of_x("v");
    std::string letters = of_x.Of(x->own);
    if (ids_.contains(x->tensor)) {
      // Of numbers that can be added up.
      x->tensor = builder_.Add1("one_hot", Unique(reader.name + ".marks"),
                                {x->tensor}, letters + "->" + letters + "v",
                                {{"first", 0}, {"places", 1}});
      letters += "v";
    }
    const TensorId sum = builder_.Add1("reduce_sum", Unique(reader.name),
                                       {x->tensor}, letters + "->");
    loss = computes ? builder_.Add1("add", Unique(reader.name + ".all"),
                                    {loss, sum}, ",->")
                    : sum;
    computes = true;
  }
  if (computes) {
    TESSERA_TRY(made.graph, builder_.Finish(loss));
  }
  for (const BoundInput& input : sizes_.inputs) {
    made.inputs.push_back({input.input->name, inputs_[input.input]});
  }
  made.layout = layout_;
  return made;
}

Result<Graph> Walk::Finish() {
  TESSERA_RETURN_IF_ERROR(Problems());
  const std::string output = outputs_.empty() ? "" : outputs_[0];
  const std::string where = path_ + ": output '" + output + "'";
  if (!values_.contains(output) ||
      std::ranges::count(model_.outputs, output) == 0) {
    std::vector<std::string_view> known(model_.outputs.begin(),
                                        model_.outputs.end());
    return Error{ErrorCode::kNotFound,
                 UnknownName("output", output, known).message, path_};
  }
  OnnxNode reader;
  reader.name = output;
  reader.inputs = {output};
  reader.outputs = {output + ".loss"};
  if (In(reader, 0).Is(Value::Kind::kSteps)) {
    if (auto whole = Computed(reader, 0); !whole) {
      return whole.error().At(where);
    }
  }
  const Value& value = In(reader, 0);
  if (!value.Is(Value::Kind::kActivation) && !value.Is(Value::Kind::kSoftmax)) {
    return InvalidInput("is not computed from the inputs", where);
  }
  const LossRow* row = &Losses()[0];
  if (const auto named = options_.overrides.find("loss");
      named != options_.overrides.end()) {
    TESSERA_TRY(row, Find("loss", Losses(), WordsOf(named->second)));
  }
  if (row->of_elements && value.Is(Value::Kind::kSoftmax)) {
    return InvalidInput("ends in a softmax, which " + std::string(row->name) +
                            " does not go with",
                        where);
  }
  Activation last = value.x;
  // Of its operand the loss is that of the sigmoid's result.
  if (row->name == "binary_cross_entropy" && last.f != nullptr &&
      last.f->op == "Sigmoid") {
    last.f = last.f->terms[0].of_x;
  }
  auto logits = Materialise(std::move(last));
  if (logits && logits->own.size() > logits->dims.size()) {
    logits = WithoutOnes(reader, *std::move(logits));
  }
  // Such as of steps in front of samples, turned behind the last layer.
  if (logits && logits->own.size() == Flatten(logits->dims).size()) {
    logits = Contiguous(reader, *std::move(logits));
  }
  if (!logits) return logits.error().At(where);
  const Activation& x = *logits;
  for (size_t d = 0; d < x.dims.size(); ++d) {
    if (auto own = CheckOwn(x, d); !own) return own.error().At(where);
  }
  TensorId loss;
  if (row->of_elements) {
    TESSERA_TRY(loss, ElementLoss(*row, x, where));
  } else {
    TESSERA_TRY(loss, CrossEntropy(x, where));
  }
  auto graph = builder_.Finish(loss);
  if (!graph) return graph.error().At(path_);
  graph->seq_len = seq_len_;
  CutIntoBlocks(*graph, runs_of_steps_);
  WarnOfTrained();
  if (options_.layout != nullptr) *options_.layout = layout_;
  return graph;
}

Result<TensorId> Walk::ElementLoss(const LossRow& row, const Activation& x,
                                   const std::string& where) {
  if (x.own.empty() || x.own[0].letter != 'b') {
    return InvalidInput("is " + TextOf(ShapeOf(ActivationValue(x))) +
                            ": expected the samples first",
                        where);
  }
  const TensorId targets = builder_.Input(
      "targets", ExtentsOf(x.own), options_.dtype.value_or(DType::kFloat32));
  return AddElementLoss(builder_, row, "loss", x.tensor, targets,
                        Letters().Of(x.own), 1);
}

Result<TensorId> Walk::CrossEntropy(const Activation& x,
                                    const std::string& where) {
  const size_t rank = x.own.size();
  // Those that were joined to others and cut off again have another name.
  const auto are_places = [&](const Atom& atom) {
    return atom.letter == 's' || (seq_len_ > 1 && atom.extent == seq_len_);
  };
  if ((rank != 2 && rank != 3) || x.dims.empty() || x.dims.back().size() != 1 ||
      !SameAtoms(Flatten(x.dims), x.own) || x.own[0].letter != 'b' ||
      (rank == 3 && !are_places(x.own[1]))) {
    return InvalidInput("is " + TextOf(ShapeOf(ActivationValue(x))) +
                            ": expected a number for each class, of each "
                            "sample or of each token",
                        where);
  }
  const TensorId labels = builder_.Input(
      "labels", ExtentsOf(std::span(x.own).first(rank - 1)), DType::kInt32);
  const TensorId count =
      builder_.Add1("count_labels", "count", {labels}, rank == 2 ? "b->" : "");
  return builder_.Add1("cross_entropy", "loss", {x.tensor, labels, count},
                       rank == 2 ? "bv,b,->,b" : "");
}

}  // namespace tessera::onnx
