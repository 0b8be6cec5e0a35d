// What of a file cannot be mapped, all of it at once: behind a node that is
// not, values of the shapes that are known stand in for its results, so that
// each node is judged by itself.

#include <algorithm>
#include <map>
#include <optional>

#include "planner/io/onnx_walk.h"

namespace tessera::onnx {

Value Walk::StandIn(const std::string& name, const Shape& shape) {
  Value value;
  if (!stands_in_) return value;
  Activation x;
  constexpr std::string_view kImage = "bchw";
  const bool image = shape.size() == 4 && seq_len_ == 1;
  bool sampled = false;
  bool placed = false;
  double elements = 1;
  for (size_t d = 0; d < shape.size(); ++d) {
    elements *= Number(shape[d]);
    if (shape[d] < 1 || elements > kMostElements) return {};
    const bool sample = d < 2 && !sampled && shape[d] == sizes_.batch;
    const bool place = d > 0 && !placed && seq_len_ > 1 && shape[d] == seq_len_;
    sampled = sampled || sample;
    placed = placed || place;
    if (shape[d] == 1 && !sample) {
      x.dims.push_back({});
      continue;
    }
    // Samples and places of their own: those of inputs stay whole.
    x.dims.push_back(sample  ? atoms_.Make("?samples", shape[d], 'b')
                     : place ? atoms_.Make("?places", shape[d], 's')
                             : atoms_.Make(name + "?" + std::to_string(d),
                                           shape[d], image ? kImage[d] : 'f'));
  }
  x.own = Flatten(x.dims);
  if (x.own.empty() || x.own.size() > kMaxDims) return {};
  // Features may be divided as those of a layer are.
  const Dim features = x.dims.back();
  const std::vector<int64_t>* const cut =
      features.size() == 1 ? atoms_.CutOf(features[0]) : nullptr;
  if (cut == nullptr) {
    x.tensor = builder_.Input(Unique(name + "?"), ExtentsOf(x.own),
                              options_.dtype.value_or(DType::kFloat32));
    if (features.size() == 1) whole_layers_[features[0].id] = x.tensor;
    return ActivationValue(std::move(x));
  }
  value.kind = Value::Kind::kPieces;
  value.axis = x.dims.size() - 1;
  for (size_t i = 0; i < cut->size(); ++i) {
    Activation piece = x;
    piece.dims.back() = atoms_.Piece(features[0], i, (*cut)[i]);
    piece.own = Flatten(piece.dims);
    if (piece.own.size() > kMaxDims) return {};
    piece.tensor = builder_.Input(Unique(name + "?"), ExtentsOf(piece.own),
                                  options_.dtype.value_or(DType::kFloat32));
    value.pieces.push_back(std::move(piece));
  }
  return value;
}

std::optional<Shape> Walk::ShapeOfResult(const OnnxNode& node, size_t i) {
  const auto said = model_.shapes.find(node.outputs[i]);
  if (said != model_.shapes.end()) {
    Shape shape;
    for (const OnnxDimension& dim : said->second) {
      int64_t extent = dim.extent;
      for (const BoundInput& input : sizes_.inputs) {
        for (size_t d = 0; d < input.shape.size() && !dim.symbol.empty(); ++d) {
          if (input.input->dims[d].symbol == dim.symbol) {
            extent = input.shape[d];
          }
        }
      }
      shape.push_back(extent);
    }
    if (std::ranges::all_of(shape, [](int64_t n) { return n > 0; })) {
      return shape;
    }
  }
  // Of operators that work element by element, or as if they did.
  constexpr std::string_view kAsTheFirst[] = {"Acos",
                                              "Acosh",
                                              "Asin",
                                              "Asinh",
                                              "Atan",
                                              "Atanh",
                                              "Ceil",
                                              "CumSum",
                                              "Dropout",
                                              "Floor",
                                              "IsInf",
                                              "LRN",
                                              "Mod",
                                              "LeakyRelu",
                                              "LogSoftmax",
                                              "Reverse",
                                              "Round",
                                              "Sign",
                                              "ScatterND",
                                              "ScatterElements",
                                              "Softmax",
                                              "Trilu",
                                              "PRelu",
                                              "Clip",
                                              "LayerNormalization",
                                              "BatchNormalization"};
  const bool elementwise = ApplyOnnx(node.op, 1, 1, true).has_value() ||
                           node.op == "Where" || node.op == "Max" ||
                           node.op == "Min" || node.op == "Sum";
  if (node.op == "MatMul" && node.inputs.size() == 2) {
    const Shape left = ShapeOf(In(node, 0));
    const Shape right = ShapeOf(In(node, 1));
    if (left.size() < 2 || right.size() < 2) return std::nullopt;
    Shape shape = left.size() < right.size() ? right : left;
    shape[shape.size() - 2] = left[left.size() - 2];
    shape.back() = right.back();
    return shape;
  }
  if (i > 0 ||
      (!elementwise && std::ranges::count(kAsTheFirst, node.op) == 0)) {
    return std::nullopt;
  }
  Shape shape;
  for (size_t k = 0; k < (elementwise ? node.inputs.size() : 1); ++k) {
    if (In(node, k).Is(Value::Kind::kUnknown)) return std::nullopt;
    const Shape of = ShapeOf(In(node, k));
    while (shape.size() < of.size()) shape.insert(shape.begin(), 1);
    for (size_t d = 0; d < of.size(); ++d) {
      int64_t& extent = shape[shape.size() - of.size() + d];
      extent = std::max(extent, of[d]);
    }
  }
  return shape;
}

bool Walk::MapWithStandIns(const OnnxNode& node,
                           std::span<const std::string> operands) {
  std::map<std::string, Value> held;
  for (const std::string& input : operands) {
    if (held.contains(input)) continue;
    held[input] = values_[input];
    values_[input] = StandIn(input + "?", ShapeOf(held[input]));
  }
  for (const std::string& output : node.outputs) values_[output] = {};
  auto mapped = Map(node);
  if (mapped) mapped = CheckSizes(node);
  for (auto& [input, value] : held) values_[input] = std::move(value);
  return mapped.has_value();
}

void Walk::MapOrName(const OnnxNode& node) {
  auto mapped = Declare(node);
  const bool declared = mapped.has_value();
  if (mapped) mapped = Map(node);
  if (mapped) mapped = CheckSizes(node);
  const auto rotary = rotary_.find(&node);
  const bool turns = rotary != rotary_.end();
  std::vector<std::string> computed;  // operands
  bool behind = false;
  for (const std::string& input :
       turns ? std::vector<std::string>{rotary->second.x} : node.inputs) {
    behind = behind || doubtful_.contains(input);
    const auto value = values_.find(input);
    if (value == values_.end()) continue;
    const Value::Kind kind = value->second.kind;
    if (kind == Value::Kind::kActivation || kind == Value::Kind::kPieces ||
        kind == Value::Kind::kScores || kind == Value::Kind::kSoftmax) {
      computed.push_back(input);
    }
  }
  bool known = mapped.has_value();  // its results
  bool named = !known;
  if (!known && declared && turns) {
    named = !behind;
    const auto x = values_.find(rotary->second.x);
    if (x != values_.end()) {
      values_[node.outputs[0]] = StandIn(node.outputs[0], ShapeOf(x->second));
    }
    known = true;
  } else if (!known && declared && stands_in_ && !computed.empty()) {
    known = MapWithStandIns(node, computed);
    named = !behind || !known;
  }
  if (named) {
    problems_.push_back("node '" + NameOf(node) + "' (" + node.op +
                        "): " + mapped.error().message);
  }
  for (size_t i = 0; declared && i < node.outputs.size(); ++i) {
    const std::string& output = node.outputs[i];
    if (!known) {
      values_[output] = {};
      const auto shape = ShapeOfResult(node, i);
      if (output.empty() || !shape) continue;
      values_[output] = StandIn(output, *shape);
    }
    if (mapped && (!behind || values_[output].Is(Value::Kind::kConstant))) {
      continue;
    }
    doubtful_.insert(output);
    for (const OnnxNode* reader : readers_[output]) {
      if (!done_.contains(reader)) continue;
      doubtful_.insert(reader->outputs.begin(), reader->outputs.end());
    }
  }
}

Result<void> Walk::Problems() const {
  if (problems_.empty()) return {};
  std::string text = std::to_string(problems_.size()) + " of " +
                     std::to_string(model_.nodes.size()) +
                     " nodes cannot be mapped";
  for (size_t i = 0; i < problems_.size(); ++i) {
    text += (i == 0 ? ": " : "; ") + problems_[i];
  }
  if (behind_problems_ > 0) {
    text += "; " + std::to_string(behind_problems_) +
            " behind them, of shapes that are not known, were not looked at";
  }
  return InvalidInput(text, path_);
}

}  // namespace tessera::onnx
