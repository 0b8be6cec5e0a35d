// Nodes that call dimensions, or the type of elements, otherwise.

#include <algorithm>
#include <numeric>

#include "planner/io/onnx_walk.h"

namespace tessera::onnx {

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

namespace {

// Whether the function that a node makes is 0 or 1 everywhere.
bool MakesMarks(const Expression* f) {
  return f != nullptr && (!ComparisonOf(f->op).empty() || f->op == "Not" ||
                          f->op == "And" || f->op == "Or" || f->op == "Xor");
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
  return SetReshaped(node, flat);
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
  // [samples, channels, places], or a series of lines.
  if (atoms_.JoinsPlaces() && to.size() == 3) {
    const auto is_part = [&](const Atom& atom) { return atoms_.IsPart(atom); };
    const Dim places = Wide(x.dims[2]);
    if (places.size() == 2 && !std::ranges::any_of(places, is_part) &&
        !HasSamples(places)) {
      TESSERA_TRY(x, Joined(node, std::move(x), 2));
    }
  }
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

}  // namespace tessera::onnx
