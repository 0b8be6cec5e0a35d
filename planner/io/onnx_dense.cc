// Nodes that compute features: dense layers, their norms, dropout.

#include <algorithm>
#include <cmath>

#include "planner/io/onnx_walk.h"

namespace tessera::onnx {

Result<TensorId> Walk::BiasOf(const Value& bias, const Value& matrix,
                              const Shape& shape, RowRange rows) {
  const auto key = std::pair(matrix.weight, bias.weight);
  const auto made = biases_.find(key);
  if (made != biases_.end()) return made->second;
  TESSERA_TRY(const TensorId id,
              Weight(bias, {0}, shape, /*stddev=*/0, /*constant=*/0, rows));
  return biases_[key] = id;
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

void Walk::ReadAlike(const std::string& weight, const Shape& shape) {
  const auto made = weights_.find(weight);
  if (made == weights_.end() || made->second.shape == shape) return;
  const auto wide = [](Shape of) {
    std::erase(of, 1);
    return of;
  };
  if (wide(made->second.shape) == wide(shape)) atoms_.ReadWide(weight);
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
  if (atoms_.IsReadWide(w.weight)) {
    for (const Atom& atom : Dim(x.dims.back())) {
      if (atom.extent > 1 || x.dims.back().size() == 1) continue;
      x = WithoutOne(node, std::move(x), atom);
    }
  }
  const Dim k = x.dims.back();
  if (Extent(k) != in || out < 1) {
    return InvalidInput("reads " + std::to_string(Extent(k)) +
                        " features: its weight has " + std::to_string(in));
  }
  if (!EndsIn(x, k)) {
    TESSERA_TRY(x, EndingInLast(node, std::move(x)));
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
    // Where one of several readers has heads of the features all have them.
    if (const auto other =
            made_by_
                .emplace(std::pair(piece.weight, w.order[transposed ? 1 : 0]),
                         n)
                .first;
        !Fit(atoms_, n, other->second)) {
      return InvalidInput("weight '" + piece.weight +
                          "' makes other features in another node");
    }
    std::vector<size_t> order = {0, 1};
    if (transposed) std::swap(order[0], order[1]);
    ReadAlike(piece.weight, matrix);
    TESSERA_TRY(const TensorId weight,
                Weight(piece, std::move(order), matrix, stddev, 0, part_of));
    std::string rule = m + from + "," + made + from;
    std::vector<TensorId> operands = {x.tensor, weight};
    if (bias != nullptr) {
      Value part = *bias;
      part.weight += suffix;
      TESSERA_TRY(const TensorId added, BiasOf(part, piece, features, part_of));
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
    if (n.size() == 1 && cut == nullptr) whole_layers_[n[0].id] = y.tensor;
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

Result<void> Walk::Gemm(const OnnxNode& node) {
  const Value w = AsWeight(In(node, 1));
  const Value given = AsWeight(In(node, 2));
  const Value* const bias = Has(node, 2) ? &given : nullptr;
  const bool transposed = node.Int("transB", 0) == 0;
  const Shape shape = ShapeOf(w);
  const bool dense =
      node.Float("alpha", 1) == 1 && node.Float("beta", 1) == 1 &&
      node.Int("transA", 0) == 0 && w.Is(Value::Kind::kWeight) &&
      !In(node, 0).Is(Value::Kind::kWeight) &&
      (!UniformIn(node, 0) || (bias != nullptr && IsFirstState(node))) &&
      (bias == nullptr ||
       (bias->Is(Value::Kind::kWeight) && shape.size() == 2 &&
        ShapeOf(*bias) == Shape{shape[transposed ? 1 : 0]}));
  if (!dense) return GeneralGemm(node);
  TESSERA_TRY(Activation x,
              IsFirstState(node) ? FirstState(node) : Computed(node, 0));
  return Dense(node, std::move(x), w, transposed, bias, node.outputs[0]);
}

Result<void> Walk::MatMul(const OnnxNode& node) {
  const Value w = AsWeight(In(node, 1));
  const OnnxNode* const add =
      w.Is(Value::Kind::kWeight) && ShapeOf(w).size() == 2
          ? BiasBehind(node, ShapeOf(w)[1])
          : nullptr;
  const bool first_state = add != nullptr && IsFirstState(node);
  if (UniformIn(node, 0) == 0.0 && ShapeOf(In(node, 0)).size() >= 2 &&
      ShapeOf(w).size() == 2 && !first_state) {
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
  TESSERA_TRY(Activation x, first_state ? FirstState(node) : Computed(node, 0));
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
  const auto is_known = [&](size_t i) {
    const Value value = AsWeight(In(node, i));
    return ShapeOf(value) == features &&
           (value.Is(Value::Kind::kWeight) || value.Is(Value::Kind::kConstant));
  };
  const bool is_row = *axis + 1 == x.dims.size() && x.dims.back().size() == 1 &&
                      is_known(1) && is_known(2);
  const bool wants_more = std::ranges::any_of(
      std::span(node.outputs).subspan(1), [&](const std::string& name) {
        return !name.empty() && uses_[name] > 0;
      });
  if (!is_row || wants_more || In(node, 0).Is(Value::Kind::kWeight)) {
    return GeneralNorm(node);
  }
  if (!EndsIn(x, x.dims.back())) {
    TESSERA_TRY(x, EndingInLast(node, std::move(x)));
  }
  // Of a scale that is 1, or a shift that is 0, before training.
  const auto row = [&](size_t i, double first) -> Result<TensorId> {
    const Value value = AsWeight(In(node, i));
    if (value.Is(Value::Kind::kWeight)) {
      return Weight(value, {0}, features, 0, first);
    }
    TESSERA_TRY(const Activation known, Known(node, i));
    return known.tensor;
  };
  TESSERA_TRY(const TensorId scale, row(1, 1));
  TESSERA_TRY(const TensorId shift, row(2, 0));
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

}  // namespace tessera::onnx
