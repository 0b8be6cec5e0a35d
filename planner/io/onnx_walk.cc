#include "planner/io/onnx_walk.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>

#include "planner/base/table.h"

namespace tessera::onnx {

Walk::Walk(const OnnxModel& model, const std::string& path,
           const BoundSizes& sizes, const ImportOptions& options,
           std::span<const std::string> outputs,
           std::span<const std::string> frozen, Atoms& atoms, Found& found)
    : model_(model),
      path_(path),
      options_(options),
      sizes_(sizes),
      atoms_(atoms),
      found_(found),
      builder_(std::filesystem::path(path).stem().string(), sizes.batch,
               sizes.seq_len, options.dtype.value_or(DType::kFloat32)),
      outputs_(outputs.begin(), outputs.end()),
      names_({"labels", "count", "loss"}),
      frozen_(frozen.begin(), frozen.end()),
      seq_len_(sizes.seq_len) {
  layout_.onnx = true;
  FindNeeded();
  for (const OnnxNode& node : model.nodes) {
    if (!needed_.contains(&node)) continue;
    for (const std::string& input : node.inputs) {
      ++uses_[input];
      readers_[input].push_back(&node);
    }
  }
  for (const std::string& output : outputs_) ++uses_[output];
  for (const OnnxInput& input : model.inputs) types_[input.name] = input.type;
  for (const OnnxTensor& tensor : model.initializers) {
    types_[tensor.name] = tensor.type;
    Value value;
    double elements = 1;
    for (int64_t extent : tensor.dims) elements *= Number(extent);
    const bool whole = std::ranges::all_of(
        tensor.dims, [](int64_t extent) { return extent >= 0; });
    if (!whole || elements > kMostElements) {
      problems_.push_back("tensor '" + tensor.name + "': its shape is " +
                          TextOf(tensor.dims));
    } else if (IsOnnxFloat(tensor.type) &&
               (elements > 1 || (elements == 1 && IsTrainedNumber(tensor)))) {
      value.kind = Value::Kind::kWeight;
      value.source = &tensor;
      value.weight = tensor.name;
      value.order.resize(tensor.dims.size());
      std::iota(value.order.begin(), value.order.end(), 0);
    } else {
      value.source = &tensor;
      std::vector<double> values = tensor.Values();
      if (Number(std::ssize(values)) == elements) {
        value = ConstantValue(
            {tensor.dims, std::move(values), IsOnnxFloat(tensor.type)});
        // A weight, to nodes that have one there (AsWeight).
        if (value.constant.is_float && !tensor.dims.empty() &&
            !IsFrozen(tensor.name)) {
          value.source = &tensor;
        }
      }
    }
    values_[tensor.name] = std::move(value);
  }
}

void Walk::FindNeeded() {
  for (const OnnxNode& node : model_.nodes) {
    for (const std::string& output : node.outputs) {
      producers_.emplace(output, &node);
    }
  }
  std::vector<std::string_view> behind(outputs_.begin(), outputs_.end());
  while (!behind.empty()) {
    const auto made = producers_.find(behind.back());
    behind.pop_back();
    if (made == producers_.end() || !needed_.insert(made->second).second) {
      continue;
    }
    behind.insert(behind.end(), made->second->inputs.begin(),
                  made->second->inputs.end());
  }
}

const Value& Walk::In(const OnnxNode& node, size_t i) const {
  static const Value unknown;
  if (i >= node.inputs.size()) return unknown;
  const auto found = values_.find(node.inputs[i]);
  return found == values_.end() ? unknown : found->second;
}

bool Walk::Has(const OnnxNode& node, size_t i) const {
  return i < node.inputs.size() && !node.inputs[i].empty();
}

void Walk::Set(const OnnxNode& node, Value value, size_t i) {
  if (i < node.outputs.size() && !node.outputs[i].empty()) {
    values_[node.outputs[i]] = std::move(value);
  }
}

Shape Walk::ShapeOf(const Value& value) {
  Shape shape;
  switch (value.kind) {
    case Value::Kind::kConstant:
    case Value::Kind::kLarge:
      return value.constant.shape;
    case Value::Kind::kWeight:
      for (size_t d : value.order) shape.push_back(value.source->dims[d]);
      return shape;
    case Value::Kind::kPieces: {
      for (const Dim& dim : value.pieces[0].dims) shape.push_back(Extent(dim));
      shape[value.axis] = 0;
      for (const Activation& piece : value.pieces) {
        shape[value.axis] += Extent(piece.dims[value.axis]);
      }
      return shape;
    }
    case Value::Kind::kSlab:
      return value.slab.shape;
    default:
      if (value.scores) {
        const Scores& scores = *value.scores;
        for (const Dim& dim : scores.q.dims) shape.push_back(Extent(dim));
        shape.back() = Extent(scores.k.dims.back());
        return shape;
      }
      for (const Dim& dim : value.x.dims) shape.push_back(Extent(dim));
      return shape;
  }
}

Result<OnnxConstant> Walk::Constant(const OnnxNode& node, size_t i) const {
  const Value& value = In(node, i);
  if (value.Is(Value::Kind::kConstant)) return value.constant;
  if (value.Is(Value::Kind::kWeight) && OnnxElements(ShapeOf(value))) {
    OnnxConstant constant = {value.source->dims, value.source->Values(), true};
    if (!constant.values.empty()) return TransposeOnnx(constant, value.order);
  }
  return InvalidInput("operand " + std::to_string(i) + " is not a constant");
}

Result<std::vector<int64_t>> Walk::Ints(const OnnxNode& node, size_t i) const {
  TESSERA_TRY(const OnnxConstant constant, Constant(node, i));
  return constant.Ints();
}

Result<Activation> Walk::Computed(const OnnxNode& node, size_t i) {
  const Value& value = In(node, i);
  if (value.Is(Value::Kind::kActivation)) return value.x;
  const std::string operand = "operand " + std::to_string(i);
  // Read by others than attention and the loss.
  if (value.Is(Value::Kind::kScores) || value.Is(Value::Kind::kSoftmax)) {
    const Value held = value;
    Activation x = held.x;
    if (held.scores) {
      TESSERA_TRY(x, ScoresOf(node, *held.scores));
    }
    if (held.Is(Value::Kind::kSoftmax)) {
      TESSERA_TRY(x, SoftmaxOf(node, std::move(x), held.axis, held.log));
    }
    values_[node.inputs[i]] = ActivationValue(x);
    return x;
  }
  if (value.Is(Value::Kind::kWeight)) {
    NoteTrained(node, value);
    return Trained(value);
  }
  if (value.Is(Value::Kind::kSteps)) {
    const Value held = value;
    Activation x = held.x;
    x.tensor = Stacked(NameOf(node), held.x.own[0].letter == 'b', held.steps);
    values_[node.inputs[i]] = ActivationValue(x);
    return x;
  }
  switch (value.kind) {
    case Value::Kind::kPieces:
      if (value.pieces[0].dims[value.axis].empty()) {
        return JoinedStates(node, value);
      }
      return InvalidInput(operand + " is read whole and in pieces");
    case Value::Kind::kConstant:
      return Known(node, i);
    case Value::Kind::kSlab:
      return InvalidInput(operand +
                          " is a weight that a recurrent layer reads, too");
    default:
      return InvalidInput(operand +
                          " is a constant: expected what another "
                          "node computes");
  }
}

Value Walk::AsWeight(const Value& value) {
  Value weight = value;
  if (value.Is(Value::Kind::kConstant) && value.source != nullptr) {
    weight.kind = Value::Kind::kWeight;
    weight.weight = value.source->name;
    weight.order.resize(value.source->dims.size());
    std::iota(weight.order.begin(), weight.order.end(), 0);
  }
  return weight;
}

std::string Walk::Unique(const std::string& name) {
  if (names_.insert(name).second) return name;
  constexpr size_t kMostQuotes = 256;  // then they are counted
  size_t& repeat = repeats_[name];
  for (;;) {
    ++repeat;
    std::string other =
        name + (repeat <= kMostQuotes ? std::string(repeat, '\'')
                                      : "'" + std::to_string(repeat));
    if (names_.insert(other).second) return other;
  }
}

std::string Walk::NameOf(const OnnxNode& node) {
  if (!node.name.empty()) return node.name;
  return node.outputs.empty() ? node.op : node.outputs[0];
}

Result<Atom> Walk::Whole(const std::string& name, int64_t extent, char letter) {
  const Dim dim = atoms_.Make(name, extent, letter);
  if (dim.size() == 1 && atoms_.CutOf(dim[0]) == nullptr) return dim[0];
  return InvalidInput(
      "a dimension of its result is taken apart behind it, which only those of "
      "dense layers may be");
}

Result<Activation> Walk::Trained(const Value& value) {
  const std::string key =
      value.weight + " " + TextOf({value.order.begin(), value.order.end()});
  const auto made = trained_.find(key);
  if (made != trained_.end()) return made->second;
  Activation x;
  for (size_t d : value.order) {
    const int64_t extent = value.source->dims[d];
    const bool number = value.order.size() == 1;
    x.dims.push_back(
        extent == 1 && !number
            ? Dim()
            : atoms_.Make(value.weight + "." + std::to_string(d), extent, 'f'));
  }
  x.own = Flatten(x.dims);
  std::vector<size_t> order(value.order.size());
  std::iota(order.begin(), order.end(), 0);
  TESSERA_TRY(x.tensor,
              Weight(value, std::move(order), ExtentsOf(x.own), kTableStddev));
  // A node of its own has the gradient, whatever reads the weight.
  const std::string letters = Letters().Of(x.own);
  x.tensor = builder_.Add1("scale", Unique(value.weight + ".read"), {x.tensor},
                           letters + "->" + letters, {{"factor", 1}});
  return trained_[key] = x;
}

Result<Activation> Walk::Known(const OnnxNode& node, size_t i) {
  const std::string& name = node.inputs[i];
  OnnxConstant constant = In(node, i).constant;
  // What is the same for each sample, as where an exporter was given a batch,
  // is there once.
  const auto samples = [&](const std::string& input) {
    const auto found = values_.find(input);
    return found != values_.end() &&
           found->second.Is(Value::Kind::kActivation) &&
           found->second.x.dims.size() == constant.shape.size() &&
           HasSamples(found->second.x.dims[0]);
  };
  if (!constant.shape.empty() && constant.shape[0] == sizes_.batch &&
      sizes_.batch > 1 && std::ranges::any_of(node.inputs, samples)) {
    const std::vector<double>& values = constant.values;
    const auto row = std::ssize(values) / sizes_.batch;
    if (std::equal(values.begin() + row, values.end(), values.begin())) {
      constant.shape[0] = 1;
      constant.values.resize(static_cast<size_t>(row));
    }
  }
  const std::string key = name + " " + TextOf(constant.shape);
  const auto made = known_.find(key);
  if (made != known_.end()) return made->second;
  Activation x;
  for (size_t d = 0; d < constant.shape.size(); ++d) {
    const int64_t extent = constant.shape[d];
    if (extent < 1) return InvalidInput("'" + name + "' has no elements");
    const std::string atom = name + "." + std::to_string(d);
    x.dims.push_back(extent == 1 && constant.shape.size() > 1
                         ? Dim()
                         : atoms_.Make(atom, extent, 'f'));
  }
  x.own = Flatten(x.dims);
  if (x.own.size() > kMaxDims) {
    return InvalidInput("'" + name + "' has more than " +
                        std::to_string(kMaxDims) + " dimensions");
  }
  const bool marks = !constant.is_float &&
                     std::ranges::all_of(constant.values, [](double value) {
                       return value == 0 || value == 1;
                     });
  x.tensor = builder_.Constant(Unique(name), ExtentsOf(x.own),
                               std::move(constant.values));
  if (marks) marks_.insert(x.tensor);
  return known_[key] = x;
}

Result<TensorId> Walk::Weight(const Value& value, std::vector<size_t> order,
                              const Shape& shape, double stddev,
                              double constant, RowRange rows) {
  if (!value.Is(Value::Kind::kWeight)) {
    return InvalidInput("a weight is not one of the file's tensors");
  }
  if (shape.size() > kMaxDims) {
    return InvalidInput("weight '" + value.weight + "' has more than " +
                        std::to_string(kMaxDims) + " dimensions");
  }
  for (size_t& d : order) d = value.order[d];
  const auto made = weights_.find(value.weight);
  // Exporters write equal tensors once. Matrices that are read twice are tied;
  // vectors, such as the zeros that biases start as, are one for each layer.
  if (made == weights_.end() || order.size() < 2) {
    const std::string name = Unique(value.weight);
    if (value.source->is_parameter == false) buffers_.insert(value.weight);
    const TensorId id =
        builder_.Weight(name, shape, {.stddev = stddev, .constant = constant},
                        order.size() > 1);
    Slab slab =
        SlabOf(value.whole == nullptr ? *value.source : *value.whole, order);
    if (value.whole != nullptr) {
      const auto at = std::ranges::find(order, value.cut_dim);
      slab = CutOf(slab, static_cast<size_t>(at - order.begin()),
                   value.cut_begin, value.source->dims[value.cut_dim]);
    }
    if (rows.count > 0) slab = CutOf(slab, 0, rows.begin, rows.count);
    layout_.pieces[name] = PiecesOf(slab);
    weights_[value.weight] = {id, std::move(order), shape};
    return id;
  }
  if (made->second.order != order || made->second.shape != shape) {
    return InvalidInput("weight '" + value.weight + "' is read in two forms, " +
                        TextOf(made->second.shape) + " and " + TextOf(shape));
  }
  return made->second.tensor;
}

const OnnxNode* Walk::BiasBehind(const OnnxNode& node, int64_t features) {
  const std::string& product = node.outputs[0];
  if (uses_[product] != 1 || readers_[product].empty()) return nullptr;
  const OnnxNode* const reader = readers_[product][0];
  if (reader->op != "Add" || reader->inputs.size() != 2 ||
      reader->outputs.size() != 1) {
    return nullptr;
  }
  const Value bias =
      AsWeight(In(*reader, reader->inputs[0] == product ? 1 : 0));
  const bool fits =
      bias.Is(Value::Kind::kWeight) && ShapeOf(bias) == Shape{features};
  return fits ? reader : nullptr;
}

Result<void> Walk::Dense(const OnnxNode& node, Activation x, const Value& w,
                         bool transposed, const Value* bias,
                         const std::string& to) {
  TESSERA_TRY(x, Materialise(std::move(x)));
  const Shape shape = ShapeOf(w);
  if (!w.Is(Value::Kind::kWeight) || shape.size() != 2 || x.dims.size() < 2) {
    return InvalidInput("expected a tensor of the file with two dimensions");
  }
  const int64_t in = shape[transposed ? 0 : 1];
  const int64_t out = shape[transposed ? 1 : 0];
  const Dim k = x.dims.back();
  if (Extent(k) != in || out < 1) {
    return InvalidInput("reads " + std::to_string(Extent(k)) +
                        " features: its weight has " + std::to_string(in));
  }
  if (!EndsIn(x, k)) {
    TESSERA_TRY(x, Contiguous(node, std::move(x)));
  }
  const std::vector<Atom> rows(x.own.begin(),
                               x.own.end() - static_cast<int64_t>(k.size()));
  const std::string name = NameOf(node);
  const Dim whole = atoms_.Make(AtomOf(node, "out"), out, 'f');
  const double stddev = 1 / std::sqrt(3 * Number(in));
  // One layer, or one for each piece of the features.
  const std::vector<int64_t>* const cut =
      whole.size() == 1 ? atoms_.CutOf(whole[0]) : nullptr;
  std::vector<Activation> pieces;
  RowRange part_of;  // the features
  for (size_t i = 0; i < (cut == nullptr ? 1 : cut->size()); ++i) {
    const Dim n = cut == nullptr ? whole : atoms_.Piece(whole[0], i, (*cut)[i]);
    if (cut != nullptr) part_of = {part_of.begin + part_of.count, (*cut)[i]};
    const std::string suffix = cut == nullptr ? "" : "." + std::to_string(i);
    Letters letters;
    const std::string m = letters.Of(rows);
    const std::string from = letters.Of(k);
    const std::string made = letters.Of(n);
    Shape matrix = ExtentsOf(n);
    const Shape features = matrix;
    for (const Atom& atom : k) matrix.push_back(atom.extent);
    Value piece = w;
    piece.weight += suffix;
    std::vector<size_t> order = {0, 1};
    if (transposed) std::swap(order[0], order[1]);
    TESSERA_TRY(const TensorId weight,
                Weight(piece, std::move(order), matrix, stddev, 0, part_of));
    std::string rule = m + from + "," + made + from;
    std::vector<TensorId> operands = {x.tensor, weight};
    if (bias != nullptr) {
      Value part = *bias;
      part.weight += suffix;
      TESSERA_TRY(const TensorId added,
                  Weight(part, {0}, features, 0, 0, part_of));
      operands.push_back(added);
      rule += "+" + made;
    }
    Activation y;
    y.tensor = builder_.Add1("linear", Unique(name + suffix),
                             std::move(operands), rule + "->" + m + made);
    y.own = rows;
    y.own.insert(y.own.end(), n.begin(), n.end());
    y.dims = x.dims;
    y.dims.back() = n;
    if (n.size() == 1 && cut == nullptr) whole_layers_.insert(n[0].id);
    pieces.push_back(std::move(y));
  }
  Value value;
  value.kind = cut == nullptr ? Value::Kind::kActivation : Value::Kind::kPieces;
  if (cut == nullptr) {
    value.x = std::move(pieces[0]);
  } else {
    value.axis = pieces[0].dims.size() - 1;
    value.pieces = std::move(pieces);
  }
  values_[to] = std::move(value);
  return {};
}

// Atoms in another grouping. Where one belongs to two dimensions it is split.
Result<Activation> Walk::Relabelled(Activation x, const Shape& shape) {
  std::vector<Atom> atoms = Flatten(x.dims);
  const auto misfit = [&] {
    return InvalidInput("cannot make " + TextOf(shape) + " of " +
                        TextOf(ShapeOf(ActivationValue(x))) +
                        " without moving elements");
  };
  std::vector<Dim> dims;
  size_t next = 0;
  for (int64_t extent : shape) {
    if (extent < 1) return misfit();
    Dim dim;
    if (extent == 1 && next < atoms.size() && atoms[next].extent == 1) {
      dim.push_back(atoms[next++]);
    }
    for (int64_t rest = extent; rest > 1;) {
      if (next == atoms.size()) return misfit();
      const Atom atom = atoms[next];
      if (rest % atom.extent == 0) {
        dim.push_back(atom);
        rest /= atom.extent;
        ++next;
        continue;
      }
      if (atom.extent % rest != 0) return misfit();
      const Dim parts = atoms_.Split(atom, rest);
      if (parts.size() < 2 || parts[0].extent != rest) return misfit();
      ReplaceIn(atoms, atom, parts);
      ReplaceIn(x.own, atom, parts);
    }
    // Heads that are split into (heads, 1) stay one dimension.
    while (!dim.empty() && next < atoms.size() && atoms[next].extent == 1 &&
           atoms[next].letter == dim.back().letter) {
      dim.push_back(atoms[next++]);
    }
    dims.push_back(std::move(dim));
  }
  for (; next < atoms.size(); ++next) {
    if (atoms[next].extent != 1 || dims.empty()) return misfit();
    dims.back().push_back(atoms[next]);
  }
  x.dims = std::move(dims);
  return x;
}

std::string Walk::AtomOf(const OnnxNode& node, std::string_view which) {
  return node.outputs[0] + "." + std::string(which);
}

Result<void> Walk::Gemm(const OnnxNode& node) {
  const Value w = AsWeight(In(node, 1));
  const Value given = AsWeight(In(node, 2));
  const Value* const bias = Has(node, 2) ? &given : nullptr;
  const bool transposed = node.Int("transB", 0) == 0;
  const Shape shape = ShapeOf(w);
  const bool dense =
      node.Float("alpha", 1) == 1 && node.Float("beta", 1) == 1 &&
      node.Int("transA", 0) == 0 && w.Is(Value::Kind::kWeight) &&
      !In(node, 0).Is(Value::Kind::kWeight) && !UniformIn(node, 0) &&
      (bias == nullptr ||
       (bias->Is(Value::Kind::kWeight) && shape.size() == 2 &&
        ShapeOf(*bias) == Shape{shape[transposed ? 1 : 0]}));
  if (!dense) return GeneralGemm(node);
  TESSERA_TRY(Activation x, Computed(node, 0));
  return Dense(node, std::move(x), w, transposed, bias, node.outputs[0]);
}

Result<void> Walk::MatMul(const OnnxNode& node) {
  const Value w = AsWeight(In(node, 1));
  if (UniformIn(node, 0) == 0.0 && ShapeOf(In(node, 0)).size() >= 2 &&
      ShapeOf(w).size() == 2) {
    // Such as a first state times a matrix.
    Shape shape = ShapeOf(In(node, 0));
    shape.back() = ShapeOf(w)[1];
    Set(node, LargeValue(LargeOnnx(std::move(shape), 0, true)));
    return {};
  }
  if (!w.Is(Value::Kind::kWeight) || ShapeOf(w).size() != 2 ||
      In(node, 0).Is(Value::Kind::kWeight) || ShapeOf(In(node, 0)).size() < 2) {
    return Product(node);
  }
  TESSERA_TRY(Activation x, Computed(node, 0));
  const OnnxNode* const add = BiasBehind(node, ShapeOf(w)[1]);
  if (add == nullptr) {
    return Dense(node, std::move(x), w, true, nullptr, node.outputs[0]);
  }
  const Value bias =
      AsWeight(In(*add, add->inputs[0] == node.outputs[0] ? 1 : 0));
  TESSERA_RETURN_IF_ERROR(
      Dense(node, std::move(x), w, true, &bias, add->outputs[0]));
  done_.insert(add);
  return {};
}

Result<void> Walk::LayerNorm(const OnnxNode& node) {
  TESSERA_TRY(Activation x, Computed(node, 0));
  TESSERA_TRY(x, Materialise(std::move(x)));
  const auto axis = AxisOf(node.Int("axis", -1), x.dims.size());
  if (!axis) return InvalidInput("has no such dimension");
  const Shape features = {Extent(x.dims.back())};
  const Value by = AsWeight(In(node, 1));
  const Value plus = AsWeight(In(node, 2));
  const bool is_row = *axis + 1 == x.dims.size() && x.dims.back().size() == 1 &&
                      by.Is(Value::Kind::kWeight) &&
                      plus.Is(Value::Kind::kWeight) &&
                      ShapeOf(by) == features && ShapeOf(plus) == features;
  const bool wants_more = std::ranges::any_of(
      std::span(node.outputs).subspan(1), [&](const std::string& name) {
        return !name.empty() && uses_[name] > 0;
      });
  if (!is_row || wants_more || In(node, 0).Is(Value::Kind::kWeight)) {
    return GeneralNorm(node);
  }
  if (!EndsIn(x, x.dims.back())) {
    TESSERA_TRY(x, Contiguous(node, std::move(x)));
  }
  TESSERA_TRY(const TensorId scale, Weight(by, {0}, features, 0, 1));
  TESSERA_TRY(const TensorId shift, Weight(plus, {0}, features, 0));
  Letters letters;
  const std::string rows = letters.Of(std::span(x.own).first(x.own.size() - 1));
  const std::string h = letters.Of(std::span(x.own).last(1));
  x.tensor = builder_.Add1(
      "layer_norm", Unique(NameOf(node)), {x.tensor, scale, shift},
      rows + h + "!," + h + "," + h + "->" + rows + h + "," + rows + "," + rows,
      {{"epsilon", node.Float("epsilon", 1e-5)}});
  Set(node, ActivationValue(std::move(x)));
  return {};
}

Result<void> Walk::Dropout(const OnnxNode& node) {
  if (node.outputs.size() > 1 && uses_[node.outputs[1]] > 0) {
    return InvalidInput("its mask is read");
  }
  double probability = 0.5;
  if (Has(node, 1)) {
    TESSERA_TRY(const OnnxConstant ratio, Constant(node, 1));
    if (ratio.values.size() != 1) return InvalidInput("has no single ratio");
    probability = ratio.values[0];
  }
  bool training = false;
  if (Has(node, 2)) {
    TESSERA_TRY(const OnnxConstant mode, Constant(node, 2));
    training = !mode.values.empty() && mode.values[0] != 0;
  }
  if (training && probability > 0) {
    if (!(probability <= 0.99)) {
      return InvalidInput("drops more than 0.99 of its elements");
    }
    TESSERA_TRY(Activation x, Computed(node, 0));
    TESSERA_TRY(x, Materialise(std::move(x)));
    const std::string letters = Letters().Of(x.own);
    x.tensor = builder_.Add1(
        "dropout", Unique(NameOf(node)), {x.tensor}, letters + "->" + letters,
        {{"probability", probability}, {"salt", Number(dropouts_++)}});
    Set(node, ActivationValue(std::move(x)));
    return {};
  }
  Set(node, In(node, 0));
  return {};
}

namespace {

// Whether the function that a node makes is 0 or 1 everywhere.
bool MakesMarks(const Expression* f) {
  return f != nullptr && (!ComparisonOf(f->op).empty() || f->op == "Not");
}

}  // namespace

std::optional<int64_t> Walk::TypeOf(const OnnxNode& node, size_t i) const {
  if (!Has(node, i)) return std::nullopt;
  const std::string& name = node.inputs[i];
  if (const auto given = types_.find(name); given != types_.end()) {
    return given->second;
  }
  if (const OnnxNode* const cast = Producer(name, "Cast")) {
    return cast->Int("to", kOnnxFloat);
  }
  const Value& value = In(node, i);
  if (value.Is(Value::Kind::kConstant) || value.Is(Value::Kind::kLarge)) {
    const OnnxNode* const made = Producer(name, "Constant");
    const OnnxAttribute* const tensor =
        made == nullptr ? nullptr : made->Find("value");
    if (tensor != nullptr) return tensor->t.type;
    return value.constant.is_float ? std::optional<int64_t>(kOnnxFloat)
                                   : std::nullopt;
  }
  const Activation& x = value.x;
  if (ids_.contains(x.tensor) || marks_.contains(x.tensor) ||
      MakesMarks(x.f.get())) {
    return std::nullopt;  // whole numbers or bools
  }
  return kOnnxFloat;
}

Result<void> Walk::CastLike(const OnnxNode& node) {
  const auto to = TypeOf(node, 1);
  if (!to) {
    return InvalidInput("casts to the type of operand 1, which is not known");
  }
  OnnxAttribute type;
  type.name = "to";
  type.i = *to;
  OnnxNode& cast = parts_.emplace_back(node);
  cast.op = "Cast";
  cast.inputs.resize(1);
  cast.attributes = {type};
  return Map(cast);
}

Result<void> Walk::Identity(const OnnxNode& node) {
  const bool casts = node.op == "Cast";
  const int64_t to = casts ? node.Int("to", kOnnxFloat) : kOnnxFloat;
  if (to == 8 || to > 16) {  // of 4 and 8 bits, and texts
    return InvalidInput("makes elements of a type that is not supported");
  }
  if (!IsOnnxFloat(static_cast<int>(to))) {
    // Whole numbers of one width or another.
    if (In(node, 0).Is(Value::Kind::kWeight)) {
      return InvalidInput(
          "rounds a tensor of the file that is trained: expected that it is "
          "one of model.frozen");
    }
    TESSERA_TRY(Activation x, Computed(node, 0));
    if (MakesMarks(x.f.get())) {
      TESSERA_TRY(x, Materialise(std::move(x)));
      marks_.insert(x.tensor);
    }
    if (x.f != nullptr ||
        !(ids_.contains(x.tensor) || marks_.contains(x.tensor))) {
      return InvalidInput("rounds what is computed");
    }
    Set(node, ActivationValue(std::move(x)));
    return {};
  }
  Value value = In(node, 0);
  // Such a node gives a name to one of several equal tensors.
  if (value.Is(Value::Kind::kWeight) && value.order.size() < 2) {
    value.weight = node.outputs[0];
  }
  Set(node, std::move(value));
  return {};
}

Result<void> Walk::Flat(const OnnxNode& node) {
  TESSERA_TRY(Activation x, Computed(node, 0));
  const Shape shape = ShapeOf(In(node, 0));
  int64_t axis = node.Int("axis", 1);
  if (axis < 0) axis += std::ssize(shape);
  if (axis < 0 || axis > std::ssize(shape)) {
    return InvalidInput("has no dimension " + std::to_string(axis));
  }
  Shape flat = {1, 1};
  for (size_t d = 0; d < shape.size(); ++d) {
    flat[static_cast<int64_t>(d) < axis ? 0 : 1] *= shape[d];
  }
  TESSERA_TRY(x, Relabelled(std::move(x), flat));
  Set(node, ActivationValue(std::move(x)));
  return {};
}

Result<void> Walk::Reshape(const OnnxNode& node) {
  TESSERA_TRY(Shape shape, Ints(node, 1));
  const Shape from = ShapeOf(In(node, 0));
  double all = 1;
  for (int64_t extent : from) all *= Number(extent);
  double known = 1;
  int64_t open = -1;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] == 0 && node.Int("allowzero", 0) == 0 && d < from.size()) {
      shape[d] = from[d];
    }
    if (shape[d] == -1 && open < 0) {
      open = static_cast<int64_t>(d);
    } else {
      known *= Number(shape[d]);
    }
  }
  if (open >= 0 && known >= 1) {
    shape[static_cast<size_t>(open)] = static_cast<int64_t>(all / known);
    known *= Number(shape[static_cast<size_t>(open)]);
  }
  const bool negative =
      std::ranges::any_of(shape, [](int64_t extent) { return extent < 0; });
  if (known != all || negative) {
    return InvalidInput("cannot make " + TextOf(shape) + " of " + TextOf(from));
  }
  if (In(node, 0).Is(Value::Kind::kPieces) && !shape.empty() &&
      In(node, 0).axis + 1 == from.size() && shape.back() == from.back()) {
    Value value = In(node, 0);
    for (Activation& piece : value.pieces) {
      shape.back() = Extent(piece.dims.back());
      TESSERA_TRY(piece, Relabelled(std::move(piece), shape));
    }
    value.axis = shape.size() - 1;
    Set(node, std::move(value));
    return {};
  }
  return SetReshaped(node, shape);
}

Result<void> Walk::SetReshaped(const OnnxNode& node, const Shape& to) {
  if (In(node, 0).Is(Value::Kind::kConstant)) {
    TESSERA_TRY(OnnxConstant constant, Constant(node, 0));
    constant.shape = to;
    Value value = ConstantValue(std::move(constant));
    value.source = In(node, 0).source;  // a number of the file (AsWeight)
    Set(node, std::move(value));
    return {};
  }
  if (const auto& large = In(node, 0).large) {
    Set(node, LargeValue(ReshapeLargeOnnx(*large, to)));
    return {};
  }
  if (In(node, 0).Is(Value::Kind::kSteps)) {
    Value value = In(node, 0);
    TESSERA_TRY(value.x, Relabelled(std::move(value.x), to));
    Set(node, std::move(value));
    return {};
  }
  if (In(node, 0).Is(Value::Kind::kPieces)) {
    TESSERA_TRY(const bool joined, JoinDirections(node, to));
    if (joined) return {};
  }
  TESSERA_TRY(Activation x, Computed(node, 0));
  TESSERA_TRY(x, Relabelled(std::move(x), to));
  Set(node, ActivationValue(std::move(x)));
  return {};
}

Result<void> Walk::Squeeze(const OnnxNode& node) {
  const Shape shape = ShapeOf(In(node, 0));
  std::vector<int64_t> axes = node.Ints("axes", {});
  if (Has(node, 1)) {
    TESSERA_TRY(axes, Ints(node, 1));
  }
  const bool all = axes.empty();
  std::set<size_t> out;
  for (size_t d = 0; all && d < shape.size(); ++d) {
    if (shape[d] == 1) out.insert(d);
  }
  for (int64_t axis : axes) {
    const auto d = AxisOf(axis, shape.size());
    if (!d || shape[*d] != 1) {
      return InvalidInput("cannot leave out dimension " + std::to_string(axis) +
                          " of " + TextOf(shape));
    }
    out.insert(*d);
  }
  Shape to;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (!out.contains(d)) to.push_back(shape[d]);
  }
  return SetReshaped(node, to);
}

Result<void> Walk::Unsqueeze(const OnnxNode& node) {
  std::vector<int64_t> axes = node.Ints("axes", {});
  if (Has(node, 1)) {
    TESSERA_TRY(axes, Ints(node, 1));
  }
  const Shape from = ShapeOf(In(node, 0));
  const size_t rank = from.size() + axes.size();
  std::set<size_t> ones;
  for (int64_t axis : axes) {
    const auto d = AxisOf(axis, rank);
    if (!d || !ones.insert(*d).second) {
      return InvalidInput("has no dimension " + std::to_string(axis));
    }
  }
  Shape to;
  for (size_t d = 0, next = 0; d < rank; ++d) {
    to.push_back(ones.contains(d) ? 1 : from[next++]);
  }
  return SetReshaped(node, to);
}

namespace {

std::vector<Dim> Turned(const std::vector<Dim>& dims,
                        std::span<const size_t> axes) {
  std::vector<Dim> turned;
  for (size_t axis : axes) turned.push_back(dims[axis]);
  return turned;
}

}  // namespace

Result<std::vector<size_t>> Walk::OrderOf(const OnnxNode& node, size_t rank) {
  std::vector<int64_t> perm = node.Ints("perm", {});
  if (perm.empty()) {
    perm.resize(rank);
    std::iota(perm.rbegin(), perm.rend(), 0);
  }
  std::vector<size_t> order;
  for (int64_t axis : perm) {
    const auto d = AxisOf(axis, rank);
    if (d && std::ranges::count(order, *d) == 0) order.push_back(*d);
  }
  if (order.size() != rank || perm.size() != rank) {
    return InvalidInput("perm is no order of its dimensions");
  }
  return order;
}

Result<void> Walk::Transpose(const OnnxNode& node) {
  Value value = In(node, 0);
  TESSERA_TRY(const std::vector<size_t> axes,
              OrderOf(node, ShapeOf(value).size()));
  if (value.Is(Value::Kind::kConstant)) {
    value.constant = TransposeOnnx(value.constant, axes);
  } else if (value.large) {
    value = LargeValue(TransposeLargeOnnx(*value.large, axes));
  } else if (value.Is(Value::Kind::kWeight)) {
    std::vector<size_t> reordered;
    for (size_t axis : axes) reordered.push_back(value.order[axis]);
    value.order = std::move(reordered);
  } else if (value.Is(Value::Kind::kPieces)) {
    for (Activation& piece : value.pieces)
      piece.dims = Turned(piece.dims, axes);
    const auto at = std::ranges::find(axes, value.axis);
    value.axis = static_cast<size_t>(at - axes.begin());
  } else if (value.Is(Value::Kind::kSteps)) {
    value.x.dims = Turned(value.x.dims, axes);
  } else {
    TESSERA_TRY(Activation x, Computed(node, 0));
    x.dims = Turned(x.dims, axes);
    value = ActivationValue(std::move(x));
  }
  Set(node, std::move(value));
  return {};
}

std::span<const Walk::Row> Walk::Rows() {
  static constexpr Row kRows[] = {
      {"ArgMax", "top_k", &Walk::ArgMax},
      {"ArgMin", "top_k", &Walk::ArgMax},
      {"AveragePool", "average_pool", &Walk::AveragePool},
      {"BatchNormalization", "batch_norm, of microbatches", &Walk::BatchNorm},
      {"Cast", "nothing", &Walk::Identity},
      {"CastLike", "nothing", &Walk::CastLike},
      {"Celu", "elu", &Walk::Function1},
      {"Clip", "clip", &Walk::Clip},
      {"Concat", "concat_channels", &Walk::Concat},
      {"Conv", "conv2d, or linear of patches", &Walk::Convolution},
      {"ConvTranspose", "conv_transpose2d", &Walk::TransposedConvolution},
      {"Cosh", "exp and others", &Walk::Function1},
      {"DepthToSpace", "nothing", &Walk::Depth},
      {"Dropout", "dropout while training, else nothing", &Walk::Dropout},
      {"Einsum", "einsum, reduce_sum or transpose", &Walk::Einsum},
      {"Elu", "elu", &Walk::Parametric},
      {"Expand", "nothing, of tensors of the file and of heads", &Walk::Expand},
      {"Flatten", "nothing", &Walk::Flat},
      {"Gather",
       "rows of a table: embedding; a place of a sequence: select; by other "
       "ids: gather",
       &Walk::Gather},
      {"GatherElements", "gather", &Walk::GatherElements},
      {"GatherND", "gather, of rows", &Walk::GatherND},
      {"Gelu", "gelu or gelu_erf", &Walk::Gelu},
      {"Gemm", "linear", &Walk::Gemm},
      {"GRU", "linear and gru_gates, or others, step by step",
       &Walk::Recurrent},
      {"GlobalAveragePool", "image_mean", &Walk::GlobalAveragePool},
      {"GlobalMaxPool", "reduce_max", &Walk::GlobalMaxPool},
      {"GroupNormalization", "means, differences and products",
       &Walk::GroupNorm},
      {"Hardmax", "top_k and one_hot", &Walk::Hardmax},
      {"HardSigmoid", "hard_sigmoid, or scale and clip", &Walk::Function1},
      {"HardSwish", "hard_swish", &Walk::Function1},
      {"Identity", "nothing", &Walk::Identity},
      {"InstanceNormalization", "means, differences and products",
       &Walk::GeneralNorm},
      {"IsNaN", "nothing, of a softmax", &Walk::IsNaN},
      {"LSTM", "linear and lstm_gates, step by step", &Walk::Recurrent},
      {"LayerNormalization", "layer_norm, or means, differences and products",
       &Walk::LayerNorm},
      {"LeakyRelu", "leaky_relu", &Walk::Parametric},
      {"LogSoftmax", "log_softmax, or a part of the loss", &Walk::Softmax},
      {"LpNormalization", "reduce_sum and divide", &Walk::LpNorm},
      {"MatMul", "linear, einsum, or a part of attention", &Walk::MatMul},
      {"Max", "maximum", &Walk::Variadic},
      {"MaxPool", "max_pool", &Walk::MaxPool},
      {"Mean", "sums", &Walk::Variadic},
      {"MeanVarianceNormalization", "means, differences and products",
       &Walk::GeneralNorm},
      {"Min", "minimum", &Walk::Variadic},
      {"Mish", "softplus, tanh and multiply", &Walk::Function1},
      {"OneHot", "one_hot", &Walk::OneHot},
      {"PRelu", "leaky_relu by channel", &Walk::PRelu},
      {"Pad", "pad; of edges resample, of what is reflected slice", &Walk::Pad},
      {"RNN", "linear, add and tanh or relu, step by step", &Walk::Recurrent},
      {"ReduceL1", "reduce_sum", &Walk::ReduceMore},
      {"ReduceL2", "reduce_sum", &Walk::ReduceMore},
      {"ReduceLogSum", "reduce_sum and log", &Walk::ReduceMore},
      {"ReduceLogSumExp", "exp, reduce_sum and log", &Walk::ReduceMore},
      {"ReduceMax", "reduce_max", &Walk::Reduce},
      {"ReduceMean", "reduce_mean, or image_mean", &Walk::Reduce},
      {"ReduceMin", "reduce_max", &Walk::ReduceMore},
      {"ReduceSum", "reduce_sum", &Walk::Reduce},
      {"ReduceSumSquare", "reduce_sum", &Walk::ReduceMore},
      {"Reshape", "nothing", &Walk::Reshape},
      {"Resize", "resample", &Walk::Resize},
      {"ScatterElements", "scatter_add", &Walk::ScatterElements},
      {"Selu", "elu", &Walk::Function1},
      {"Shrink", "comparisons and products", &Walk::Function1},
      {"Sinh", "exp and others", &Walk::Function1},
      {"Slice", "slice", &Walk::Slice},
      {"Softmax", "softmax, or a part of attention or of the loss",
       &Walk::Softmax},
      {"Softsign", "abs and divide", &Walk::Function1},
      {"SpaceToDepth", "nothing", &Walk::Depth},
      {"SequenceAt", "nothing", &Walk::SequenceAt},
      {"Split", "several layers instead of a fused one, or slice",
       &Walk::Split},
      {"SplitToSequence", "as Split", &Walk::SplitToSequence},
      {"Squeeze", "nothing", &Walk::Squeeze},
      {"Sum", "sums", &Walk::Variadic},
      {"Tan", "sin, cos and divide", &Walk::Function1},
      {"ThresholdedRelu", "a comparison and a product", &Walk::Function1},
      {"TopK", "top_k", &Walk::TopK},
      {"Transpose", "nothing", &Walk::Transpose},
      {"Unsqueeze", "nothing", &Walk::Unsqueeze},
      {"Where", "where, or a mask of attention", &Walk::Where},
  };
  return kRows;
}

Result<void> Walk::Declare(const OnnxNode& node) {
  // That of all steps may be left out where the last ones are read.
  const bool last = node.op == "LSTM" || node.op == "GRU" || node.op == "RNN";
  if (node.outputs.empty() || (node.outputs[0].empty() && !last)) {
    return InvalidInput("has no output");
  }
  for (const std::string& output : node.outputs) {
    if (!output.empty() && !values_.emplace(output, Value()).second) {
      return InvalidInput("makes '" + output + "', which is there already");
    }
  }
  return {};
}

Result<void> Walk::CheckSizes(const OnnxNode& node) {
  for (const std::string& output : node.outputs) {
    Value& value = values_[output];
    double elements = 1;
    for (int64_t extent : ShapeOf(value)) elements *= Number(extent);
    if (elements <= kMostElements) continue;
    value = {};
    return InvalidInput("makes more than 2^50 elements");
  }
  return {};
}

// Its shape alone is asked for, or its elements are put elsewhere by a handler.
bool Walk::MovesLarge(const OnnxNode& node) const {
  constexpr std::string_view kMoves[] = {"Flatten",  "Reshape", "Shape",
                                         "Size",     "Squeeze", "Transpose",
                                         "Unsqueeze"};
  if (std::ranges::count(kMoves, node.op) == 0) return false;
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    const Value& value = In(node, i);
    const bool known =
        i == 0 ? value.large.has_value() : !value.Is(Value::Kind::kLarge);
    if (!known) return false;
  }
  return true;
}

// What a node makes of constants, some of them or its result large.
Value Walk::FoldedLarge(const OnnxNode& node) const {
  std::vector<OnnxLarge> operands(node.inputs.size());
  std::vector<const OnnxLarge*> given(node.inputs.size());
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    if (!Has(node, i)) continue;
    const Value& value = In(node, i);
    if (value.large) {
      operands[i] = *value.large;
    } else if (value.Is(Value::Kind::kConstant)) {
      operands[i] = LargeOnnx(value.constant);
    } else {
      return LargeValue();
    }
    given[i] = &operands[i];
  }
  return LargeValue(FoldLargeOnnx(node, given));
}

Result<Walk::OperandKinds> Walk::KindsOfOperands(const OnnxNode& node) const {
  using Kind = Value::Kind;
  OperandKinds kinds;
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    if (!Has(node, i)) continue;
    const Value& value = In(node, i);
    if (!values_.contains(node.inputs[i])) {
      return InvalidInput("reads '" + node.inputs[i] +
                          "', which nothing in front of it makes");
    }
    if (value.Is(Kind::kUnknown) && value.source != nullptr) {
      return InvalidInput("reads '" + node.inputs[i] +
                          "', whose elements are not in the file" +
                          (value.source->location.empty()
                               ? ""
                               : ", nor in '" + value.source->location + "'"));
    }
    if (value.Is(Kind::kUnknown)) {
      kinds.behind_problem = true;
      return kinds;
    }
    if (value.Is(Kind::kSequence) && node.op != "SequenceAt") {
      return InvalidInput("reads a sequence of tensors as a whole");
    }
    kinds.constants = kinds.constants && value.Is(Kind::kConstant);
    kinds.known = kinds.known && !value.Is(Kind::kActivation) &&
                  !value.Is(Kind::kPieces) && !value.Is(Kind::kSteps) &&
                  !value.Is(Kind::kScores) && !value.Is(Kind::kSoftmax) &&
                  !value.Is(Kind::kSequence);
    kinds.large = kinds.large || value.Is(Kind::kLarge);
  }
  return kinds;
}

namespace {

// Of a node "Constant".
Result<OnnxConstant> GivenConstant(const OnnxNode& node) {
  OnnxConstant constant;
  if (const OnnxAttribute* const tensor = node.Find("value")) {
    constant = {tensor->t.dims, tensor->t.Values(),
                IsOnnxFloat(tensor->t.type)};
    const auto elements = OnnxElements(constant.shape);
    if (!elements || *elements != std::ssize(constant.values)) {
      return InvalidInput("its value is not in the file");
    }
  } else if (node.Find("value_float") != nullptr) {
    constant = {{}, {node.Float("value_float", 0)}, true};
  } else if (node.Find("value_int") != nullptr) {
    constant = {{}, {Number(node.Int("value_int", 0))}, false};
  } else if (node.Find("value_ints") != nullptr) {
    for (int64_t value : node.Ints("value_ints", {})) {
      constant.values.push_back(Number(value));
    }
    constant.shape = {std::ssize(constant.values)};
  } else if (node.Find("value_floats") != nullptr) {
    constant.values = node.Find("value_floats")->floats;
    constant.shape = {std::ssize(constant.values)};
    constant.is_float = true;
  } else {
    return InvalidInput("expected a tensor or numbers");
  }
  return constant;
}

// Of a node "Size", whose operand has this shape.
OnnxConstant ElementCount(const Shape& shape) {
  double elements = 1;
  for (int64_t extent : shape) elements *= Number(extent);
  return {{}, {elements}, false};
}

// Of a node "Shape".
OnnxConstant ExtentsOf(const OnnxNode& node, const Shape& shape) {
  const auto rank = std::ssize(shape);
  const auto place = [&](int64_t at) {
    return std::clamp<int64_t>(at < 0 ? at + rank : at, 0, rank);
  };
  OnnxConstant constant;
  for (int64_t d = place(node.Int("start", 0));
       d < place(node.Int("end", rank)); ++d) {
    constant.values.push_back(Number(shape[static_cast<size_t>(d)]));
  }
  constant.shape = {std::ssize(constant.values)};
  return constant;
}

// Why a node of this operator, which has no row, is not mapped.
Error NotMapped(std::string_view op) {
  constexpr std::string_view kByData[] = {"Compress", "NonZero", "Unique"};
  constexpr std::string_view kPrograms[] = {"If", "Loop", "Scan"};
  if (std::ranges::count(kByData, op) > 0) {
    return InvalidInput(
        "what it computes has a shape that depends on data, as where experts "
        "are given their tokens: tools/export_torch.py maps those of PyTorch "
        "models, and exporters write them with fixed shapes where each token "
        "has its experts' weights (transformers' "
        "experts_implementation=\"batched_mm\")");
  }
  if (std::ranges::count(kPrograms, op) > 0) {
    return InvalidInput("has graphs of its own, which are not read");
  }
  return InvalidInput("no operator of Tessera's is known for it");
}

}  // namespace

Result<bool> Walk::FoldConstants(const OnnxNode& node) {
  std::vector<const OnnxConstant*> given(node.inputs.size());
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    if (Has(node, i)) given[i] = &In(node, i).constant;
  }
  auto result = FoldOnnx(node, given);
  if (!result && result.error().code == ErrorCode::kInfeasible) {
    Set(node, FoldedLarge(node));
    return true;
  }
  TESSERA_TRY(auto folded, std::move(result));
  if (!folded) return false;
  Value value = ConstantValue(*std::move(folded));
  // By another name it is of the file all the same.
  if (node.op == "Identity") value.source = In(node, 0).source;
  Set(node, std::move(value));
  return true;
}

Result<void> Walk::Map(const OnnxNode& node) {
  if (const auto rotary = rotary_.find(&node); rotary != rotary_.end()) {
    return Rotate(node, rotary->second);
  }
  TESSERA_TRY(const OperandKinds operands, KindsOfOperands(node));
  if (operands.behind_problem) {  // said where it is made
    ++behind_problems_;
    return {};
  }
  if (node.op == "CastLike") return CastLike(node);  // of constants, too
  if (operands.known && operands.large && !MovesLarge(node)) {
    Set(node, FoldedLarge(node));
    return {};
  }
  if (of_slabs_.contains(&node)) return PartOfSlab(node);
  if (node.op == "Constant") {
    TESSERA_TRY(OnnxConstant constant, GivenConstant(node));
    Set(node, ConstantValue(std::move(constant)));
    return {};
  }
  if ((node.op == "Size" || node.op == "Shape") && Has(node, 0)) {
    const Shape shape = ShapeOf(In(node, 0));
    Set(node, ConstantValue(node.op == "Size" ? ElementCount(shape)
                                              : ExtentsOf(node, shape)));
    return {};
  }
  if (operands.constants && !node.inputs.empty()) {
    TESSERA_TRY(const bool folded, FoldConstants(node));
    if (folded) return {};
  }
  TESSERA_TRY(const bool numbers, FoldNumbers(node));
  if (numbers) return {};
  for (const Row& row : Rows()) {
    if (row.name != node.op) continue;
    if (node.inputs.empty()) return InvalidInput("has no operands");
    return (this->*row.handler)(node);
  }
  const bool elementwise = ApplyOnnx(node.op, 1, 1, true).has_value();
  if (elementwise && (node.inputs.size() == 1 || node.inputs.size() == 2)) {
    return Elementwise(node);
  }
  return NotMapped(node.op);
}

void Walk::Run() {
  FindPatches();
  FindSlabs();
  FindRotary();
  FindNumbers();
  for (const BoundInput& input : sizes_.inputs) {
    if (input.all_ones) {
      values_[input.input->name] =
          LargeValue(LargeOnnx(input.shape, 1, input.is_float));
      continue;
    }
    Activation x;
    const size_t rank = input.shape.size();
    const std::string_view image = rank == 3 ? "bcw" : "bchw";
    std::vector<std::pair<size_t, std::string>> apart;
    for (size_t d = 0; d < rank; ++d) {
      char letter = image[d];
      if (!input.is_float && d == 1) letter = 's';
      // Samples and places are those of all inputs, but an encoder's has places
      // of its own.
      const std::string of =
          letter == 'b' || (letter == 's' && input.name != "source")
              ? "input"
              : input.name;
      const std::string name = of + "." + std::to_string(d);
      const auto atom = Whole(name, input.shape[d], letter);
      if (!atom && d > 0 && input.is_float && !patches_) {
        apart.emplace_back(d, name);
      } else if (!atom) {
        problems_.push_back("input '" + input.input->name +
                            "': what reads it takes its dimensions apart");
        return;
      }
      x.own.push_back(
          atom ? *atom
               : Atom{-2 - static_cast<int>(d), input.shape[d], letter});
      x.dims.push_back({x.own.back()});
    }
    Shape shape = input.shape;
    if (input.name == "images" && rank == 1) {
      x.own.push_back({-1, 1, 'c'});
      shape.push_back(1);
    }
    if (!patches_) {
      x.tensor = builder_.Input(Unique(input.name), shape,
                                input.is_float
                                    ? options_.dtype.value_or(DType::kFloat32)
                                    : DType::kInt32);
      if (!input.is_float) ids_.insert(x.tensor);
    }
    OnnxNode taker;
    taker.name = input.name;
    for (size_t i = apart.size(); i-- > 0;) {
      const auto& [d, name] = apart[i];
      auto taken =
          WithDim(taker, x, d, d, name, input.shape[d], x.own[d].letter);
      if (!taken) {
        problems_.push_back("input '" + input.input->name +
                            "': " + taken.error().message);
        return;
      }
      x = *std::move(taken);
    }
    values_[input.input->name] = ActivationValue(std::move(x));
  }
  // Weights are not called as what Extra makes.
  names_.insert(
      {"mask_positions", "patch_rows", "patches", "positions", "zeros"});
  for (const OnnxNode& node : model_.nodes) {
    if (!done_.contains(&node) && needed_.contains(&node)) MapOrName(node);
  }
  whole_ = true;
}

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
    made.inputs.push_back(
        {input.input->name, values_[input.input->name].x.tensor});
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
  auto logits = Materialise(value.x);
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
  if ((rank != 2 && rank != 3) || x.dims.empty() || x.dims.back().size() != 1 ||
      !SameAtoms(Flatten(x.dims), x.own) || x.own[0].letter != 'b' ||
      (rank == 3 && x.own[1].letter != 's')) {
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
