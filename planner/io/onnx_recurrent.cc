// Recurrent layers, unrolled over the steps of their sequence with the
// operators of planner/io/recurrent.h, and what exporters put around them:
// gates in another order, states of several layers joined and cut.

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <numeric>

#include "planner/io/onnx_elements.h"
#include "planner/io/onnx_walk.h"

namespace tessera::onnx {

namespace {

// As planner/io/recurrent.h.
constexpr size_t kStepsPerBlock = 10;

struct CellDef {
  std::string_view op;
  std::vector<int64_t> gates;  // Tessera's, by their places in ONNX's weights
  std::vector<std::string_view> activations;  // ONNX's defaults
};

const CellDef& CellOf(const OnnxNode& node) {
  // LSTM: ONNX has (i, o, f, c), Tessera (i, f, g, o). GRU: ONNX has (z, r, h),
  // Tessera (r, z, n).
  static const std::array<CellDef, 3> kCells = {
      CellDef{"LSTM", {0, 2, 3, 1}, {"Sigmoid", "Tanh", "Tanh"}},
      CellDef{"GRU", {1, 0, 2}, {"Sigmoid", "Tanh"}},
      CellDef{"RNN", {0}, {"Tanh"}}};
  for (const CellDef& cell : kCells) {
    if (cell.op == node.op) return cell;
  }
  return kCells[2];
}

bool IsRecurrent(const OnnxNode& node) {
  return node.op == "LSTM" || node.op == "GRU" || node.op == "RNN";
}

bool MovesElements(const OnnxNode& node) {
  constexpr std::array<std::string_view, 8> kOps = {
      "Concat",  "Identity",  "Reshape",   "Slice",
      "Squeeze", "Transpose", "Unsqueeze", "Cast"};
  return std::ranges::find(kOps, node.op) != kOps.end();
}

// A rule over the samples b; what is of tensors of the file alone has rows that
// are no samples.
std::string RuleOver(bool sampled, std::string rule) {
  if (!sampled) std::ranges::replace(rule, 'b', 'm');
  return rule;
}

std::string LayerName(const std::string& node, int64_t direction) {
  return node + (direction == 1 ? ".reverse" : "");
}

constexpr std::string_view kLinear = "bi,gji->bgj";
constexpr std::string_view kLinearOfBias = "bi,gji+gj->bgj";

}  // namespace

// ---- Weights ----------------------------------------------------------------

void Walk::FindSlabs() {
  std::vector<const OnnxNode*> behind;
  const auto follow = [&](const std::string& name) {
    const auto made = producers_.find(name);
    if (made == producers_.end() || !MovesElements(*made->second)) return;
    if (of_slabs_.insert(made->second).second) behind.push_back(made->second);
  };
  for (const OnnxNode& node : model_.nodes) {
    if (!IsRecurrent(node)) continue;
    for (size_t i = 1; i <= 3 && i < node.inputs.size(); ++i) {
      follow(node.inputs[i]);
    }
  }
  while (!behind.empty()) {
    const OnnxNode* const node = behind.back();
    behind.pop_back();
    // Operands besides a joint's are numbers.
    const size_t count = node->op == "Concat" ? node->inputs.size() : 1;
    for (size_t i = 0; i < std::min(count, node->inputs.size()); ++i) {
      follow(node->inputs[i]);
    }
  }
}

Result<Slab> Walk::SlabIn(const OnnxNode& node, size_t i) const {
  const Value& value = In(node, i);
  if (value.Is(Value::Kind::kSlab)) return value.slab;
  if (value.Is(Value::Kind::kWeight) && value.whole == nullptr) {
    return SlabOf(*value.source, value.order);
  }
  return InvalidInput("operand " + std::to_string(i) +
                      " is no tensor of the file, of which the weights of "
                      "recurrent layers are made");
}

Result<void> Walk::PartOfSlab(const OnnxNode& node) {
  TESSERA_TRY(Slab slab, SlabIn(node, 0));
  const size_t rank = slab.shape.size();
  const auto relabelled = [&](const Shape& shape) -> Result<void> {
    auto made = RelabelledOf(slab, shape);
    if (!made) {
      return InvalidInput("cannot make " + TextOf(shape) + " of " +
                          TextOf(slab.shape) + ", a recurrent layer's weight");
    }
    slab = *std::move(made);
    return {};
  };
  std::vector<int64_t> axes = node.Ints("axes", {});
  if (node.op == "Concat") {
    std::vector<Slab> parts;
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      TESSERA_TRY(parts.emplace_back(), SlabIn(node, i));
    }
    const auto axis = AxisOf(node.Int("axis", 0), rank);
    auto joint = axis ? JointOf(std::move(parts), *axis) : std::nullopt;
    if (!joint) return InvalidInput("joins tensors of different sizes");
    slab = *std::move(joint);
  } else if (node.op == "Slice") {
    TESSERA_TRY(const std::vector<int64_t> starts, Ints(node, 1));
    TESSERA_TRY(const std::vector<int64_t> ends, Ints(node, 2));
    std::vector<int64_t> over(starts.size());
    std::iota(over.begin(), over.end(), 0);
    if (Has(node, 3)) {
      TESSERA_TRY(over, Ints(node, 3));
    }
    std::vector<int64_t> steps(starts.size(), 1);
    if (Has(node, 4)) {
      TESSERA_TRY(steps, Ints(node, 4));
    }
    for (size_t s = 0; s < starts.size(); ++s) {
      const auto d = s < over.size() ? AxisOf(over[s], rank) : std::nullopt;
      if (!d || s >= ends.size() || s >= steps.size() || steps[s] != 1) {
        return InvalidInput("expected places behind each other");
      }
      const OnnxPlaces places =
          OnnxPlacesOf(slab.shape[*d], starts[s], ends[s], /*step=*/1);
      if (places.count < 1) return InvalidInput("has no places");
      slab = CutOf(slab, *d, places.first, places.count);
    }
  } else if (node.op == "Transpose") {
    TESSERA_TRY(const std::vector<size_t> order, OrderOf(node, rank));
    slab = TurnedOf(slab, order);
  } else if (node.op == "Reshape") {
    TESSERA_TRY(Shape shape, Ints(node, 1));
    const auto product = [](const Shape& of) {
      return std::accumulate(of.begin(), of.end(), 1.0,
                             [](double a, int64_t b) { return a * Number(b); });
    };
    for (size_t d = 0; d < shape.size(); ++d) {
      if (shape[d] == 0 && d < rank) shape[d] = slab.shape[d];
    }
    const auto open = std::ranges::find(shape, -1);
    if (open != shape.end() && product(shape) < 0) {
      *open = static_cast<int64_t>(product(slab.shape) / -product(shape));
    }
    TESSERA_RETURN_IF_ERROR(relabelled(shape));
  } else if (node.op == "Squeeze" || node.op == "Unsqueeze") {
    if (Has(node, 1)) {
      TESSERA_TRY(axes, Ints(node, 1));
    }
    const bool more = node.op == "Unsqueeze";
    const size_t count = more ? rank + axes.size() : rank;
    std::set<size_t> at;
    for (int64_t axis : axes) {
      const auto d = AxisOf(axis, count);
      if (!d) return InvalidInput("has no dimension " + std::to_string(axis));
      at.insert(*d);
    }
    Shape shape;
    for (size_t d = 0, from = 0; d < count; ++d) {
      if (more) {
        shape.push_back(at.contains(d) || from >= rank ? 1
                                                       : slab.shape[from++]);
      } else if (!at.contains(d) && !(at.empty() && slab.shape[d] == 1)) {
        shape.push_back(slab.shape[d]);
      }
    }
    TESSERA_RETURN_IF_ERROR(relabelled(shape));
  } else if (node.op == "Cast" &&
             !IsOnnxFloat(static_cast<int>(node.Int("to", kOnnxFloat)))) {
    return InvalidInput("rounds a recurrent layer's weight");
  }
  Value value;
  value.kind = Value::Kind::kSlab;
  value.slab = std::move(slab);
  Set(node, std::move(value));
  return {};
}

TensorId Walk::LayerWeight(std::vector<PublishedPiece> pieces,
                           const std::string& suffix, const Shape& shape,
                           double stddev) {
  int64_t begin = 0;
  std::string key = suffix;
  for (PublishedPiece& piece : pieces) {
    piece.begin = begin;
    begin += piece.count;
    key += " " + piece.tensor + "+" + std::to_string(piece.offset);
  }
  const bool matrix = stddev > 0;
  const auto made = layer_weights_.find(key);
  if (matrix && made != layer_weights_.end()) return made->second;  // tied
  const std::string name = Unique(pieces[0].tensor + suffix);
  const TensorId id = builder_.Weight(name, shape, {.stddev = stddev}, matrix);
  layout_.pieces[name] = std::move(pieces);
  return layer_weights_[key] = id;
}

// ---- Steps ------------------------------------------------------------------

TensorId Walk::Stacked(const std::string& name, bool sampled,
                       const std::vector<TensorId>& steps) {
  const auto made = stacked_.find(steps);
  if (made != stacked_.end()) return made->second;
  std::string rule = "bh";
  for (size_t i = 1; i < steps.size(); ++i) rule += ",bh";
  return stacked_[steps] =
             builder_.Add1("stack", Unique(name + ".stack"), steps,
                           RuleOver(sampled, rule + "->bd!h"),
                           {{"steps", Number(std::ssize(steps))}});
}

Result<Activation> Walk::JoinedStates(const OnnxNode& node,
                                      const Value& value) {
  Activation joint = value.pieces[0];
  const bool are_states = std::ranges::all_of(value.pieces, [&](const auto& x) {
    return x.own.size() == 2 && Flatten(x.dims).size() == 2 &&
           HasSamples(x.own) == HasSamples(joint.own) &&
           !HasSamples(std::span(x.own).last(1));
  });
  if (!are_states) return JoinedTensors(node, value.pieces, value.axis);
  std::vector<TensorId> states;
  for (const Activation& piece : value.pieces) {
    TESSERA_TRY(const Activation x, Contiguous(node, piece));
    states.push_back(x.tensor);
  }
  TESSERA_TRY(const Atom place,
              Whole(AtomOf(node, "joint"), std::ssize(states), 's'));
  TESSERA_TRY(joint, Contiguous(node, std::move(joint)));
  joint.own.insert(joint.own.begin() + 1, place);
  joint.dims[value.axis] = {place};
  joint.tensor = Stacked(NameOf(node), joint.own[0].letter == 'b', states);
  return joint;
}

Result<bool> Walk::JoinStates(const OnnxNode& node) {
  Value joint;
  joint.kind = Value::Kind::kPieces;
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    const Value& value = In(node, i);
    const auto axis = AxisOf(node.Int("axis", 1), ShapeOf(value).size());
    const bool pieces = value.Is(Value::Kind::kPieces);
    if (!axis || (!pieces && !value.Is(Value::Kind::kActivation)) ||
        (pieces && value.axis != *axis) || (i > 0 && joint.axis != *axis)) {
      return false;
    }
    joint.axis = *axis;
    const std::vector<Activation> of =
        pieces ? value.pieces : std::vector{value.x};
    for (const Activation& piece : of) {
      if (!piece.dims[*axis].empty() || piece.f != nullptr ||
          (!joint.pieces.empty() &&
           (!SameAtoms(Flatten(piece.dims), Flatten(joint.pieces[0].dims)) &&
            ShapeOf(ActivationValue(piece)) !=
                ShapeOf(ActivationValue(joint.pieces[0]))))) {
        return false;
      }
      joint.pieces.push_back(piece);
    }
  }
  if (joint.pieces.size() < 2) return false;
  Set(node, std::move(joint));
  return true;
}

Result<bool> Walk::CutStates(const OnnxNode& node) {
  const Value& value = In(node, 0);
  if (!value.Is(Value::Kind::kPieces) ||
      !value.pieces[0].dims[value.axis].empty() ||
      (node.op == "Slice" && Has(node, 4))) {
    return false;
  }
  const auto count = std::ssize(value.pieces);
  const size_t rank = value.pieces[0].dims.size();
  const bool slice = node.op == "Slice";
  TESSERA_TRY(const std::vector<int64_t> first, Ints(node, 1));
  std::vector<int64_t> axes = {slice ? 0 : node.Int("axis", 0)};
  if (slice && Has(node, 3)) {
    TESSERA_TRY(axes, Ints(node, 3));
  }
  if (axes.size() != 1 || first.size() != 1 ||
      AxisOf(axes[0], rank) != value.axis) {
    return false;
  }
  OnnxPlaces places;
  if (slice) {
    TESSERA_TRY(const std::vector<int64_t> ends, Ints(node, 2));
    if (ends.size() != 1) return false;
    places = OnnxPlacesOf(count, first[0], ends[0], /*step=*/1);
  } else if (const auto one = AxisOf(first[0], value.pieces.size())) {
    places = {static_cast<int64_t>(*one), 1};
  }
  if (places.count < 1) return InvalidInput("has no places");
  Value some = value;
  const auto begin = value.pieces.begin() + places.first;
  some.pieces.assign(begin, begin + places.count);
  if (some.pieces.size() == 1) some = ActivationValue(some.pieces[0]);
  // A Gather of one place by a number leaves out its dimension.
  if (!slice && ShapeOf(In(node, 1)).empty()) {
    some.x.dims.erase(some.x.dims.begin() + static_cast<int64_t>(value.axis));
  }
  Set(node, std::move(some));
  return true;
}

Result<bool> Walk::JoinDirections(const OnnxNode& node, const Shape& to) {
  const Value value = In(node, 0);
  const size_t axis = value.axis;
  const Shape from = ShapeOf(value);
  // [.., directions, h] to [.., directions * h].
  Shape merged = from;
  merged.erase(merged.begin() + static_cast<int64_t>(axis));
  if (axis + 2 != from.size() || !value.pieces[0].dims[axis].empty()) {
    return false;
  }
  merged.back() *= from[axis];
  if (merged != to) return false;
  std::vector<std::string> names;
  for (const Activation& piece : value.pieces) {
    Activation x = piece;
    x.dims.erase(x.dims.begin() + static_cast<int64_t>(axis));
    names.push_back(node.outputs[0] + "#" + std::to_string(next_part_++));
    values_[names.back()] = ActivationValue(std::move(x));
  }
  OnnxAttribute last;
  last.name = "axis";
  last.i = -1;
  TESSERA_TRY(const std::string joint,
              Part(node, "Concat", std::move(names), {last}));
  Rename(node, joint);
  return true;
}

Result<Activation> Walk::WithoutOnes(const OnnxNode& node, Activation x) {
  std::vector<Atom> kept;
  for (Dim& dim : x.dims) {
    if (dim.empty()) continue;
    const Dim wide = Wide(dim);
    dim = wide.empty() ? Dim{dim[0]} : wide;
    kept.insert(kept.end(), dim.begin(), dim.end());
  }
  const auto is_kept = [&](const Atom& atom) {
    return std::ranges::count(kept, atom.id, &Atom::id) > 0;
  };
  if (std::ranges::all_of(x.own, is_kept)) return x;
  TESSERA_TRY(x, Materialise(std::move(x)));
  Letters letters;
  const std::string from = letters.Of(x.own);
  std::erase_if(x.own, [&](const Atom& atom) { return !is_kept(atom); });
  x.tensor = builder_.Add1("reduce_sum", Unique(NameOf(node) + ".squeeze"),
                           {x.tensor}, from + "->" + letters.Of(x.own));
  return x;
}

Result<std::vector<TensorId>> Walk::StepsOf(const OnnxNode& node,
                                            size_t samples, size_t steps,
                                            Activation& x) {
  const Value value = In(node, 0);
  if (ShapeOf(value).size() != 3) {
    return InvalidInput("expected a sequence [steps, samples, features]");
  }
  const auto turn = [&](const Activation& from) {
    Activation turned = from;
    turned.dims = {from.dims[samples], from.dims[steps], from.dims[2]};
    return turned;
  };
  if (value.Is(Value::Kind::kSteps)) {
    x = turn(value.x);
    const bool whole = std::ranges::all_of(
        x.dims, [](const Dim& dim) { return dim.size() == 1; });
    if (whole && SameAtoms(Flatten(x.dims), x.own)) {
      return value.steps;
    }
  }
  TESSERA_TRY(Activation whole, Computed(node, 0));
  TESSERA_TRY(whole, WithoutOnes(node, std::move(whole)));
  TESSERA_TRY(x, Contiguous(node, turn(whole)));
  // Such as an image's channels and rows, which are a step's features.
  for (const size_t d : {1, 2}) {
    if (x.dims[d].size() < 2) continue;
    TESSERA_TRY(x, Joined(node, std::move(x), d));
  }
  const auto count = Extent(x.dims[1]);
  if (x.dims[0].size() != 1 || x.dims[1].size() > 1 || x.dims[2].size() != 1) {
    return InvalidInput(
        "expected a sequence [steps, samples, features] whose dimensions are "
        "those of its tensor, found " +
        TextOf(ShapeOf(ActivationValue(whole))));
  }
  if (count > static_cast<int64_t>(kMostSteps)) {
    return InvalidInput("has " + std::to_string(count) + " steps: at most " +
                        std::to_string(kMostSteps));
  }
  if (x.dims[1].empty()) return std::vector<TensorId>{x.tensor};
  const auto made = unstacked_.find(x.tensor);
  if (made != unstacked_.end()) return made->second;
  std::string rule = "bd!h->bh";
  for (int64_t i = 1; i < count; ++i) rule += ",bh";
  return unstacked_[x.tensor] =
             builder_.Add("unstack", Unique(NameOf(node) + ".steps"),
                          {x.tensor}, RuleOver(x.own[0].letter == 'b', rule),
                          {{"steps", Number(count)}});
}

Result<TensorId> Walk::InitialState(const OnnxNode& node, size_t operand,
                                    const LayerCall& call, int64_t direction) {
  if (!Has(node, operand)) return TensorId();
  const Value& value = In(node, operand);
  const auto seen = std::pair(&node, operand);
  if (value.Is(Value::Kind::kLarge) && found_.zeros.contains(seen)) {
    return TensorId();
  }
  if (value.Is(Value::Kind::kConstant)) {
    const bool zeros = std::ranges::all_of(value.constant.values,
                                           [](double v) { return v == 0; });
    if (zeros) {
      found_.zeros.insert(seen);
      return TensorId();
    }
    return InvalidInput(
        "its initial state is a constant: expected zeros, or "
        "what another node computes");
  }
  // Zeros for each of as many samples as the exporter was given, which may be
  // too many to be computed with.
  if (value.Is(Value::Kind::kWeight) && value.whole == nullptr &&
      value.source->is_parameter != true && AreZeros(*value.source, path_)) {
    return TensorId();
  }
  const Shape shape = ShapeOf(value);
  Shape expected = {call.directions, call.samples, call.hidden};
  const size_t at = call.batch_first ? 1 : 0;  // of the directions
  if (call.batch_first) std::swap(expected[0], expected[1]);
  if (shape != expected) {
    return InvalidInput("its initial state is " + TextOf(shape) +
                        ": expected " + TextOf(expected));
  }
  Activation x;
  if (value.Is(Value::Kind::kPieces) && value.axis == at) {
    x = value.pieces[static_cast<size_t>(direction)];
  } else {
    TESSERA_TRY(x, Computed(node, operand));
    if (call.directions > 1) {
      TESSERA_TRY(x, SliceOf(node, std::move(x), at, direction, 1, 1,
                             ".state" + std::to_string(direction) + "_"));
    }
  }
  const bool sampled = std::ranges::count(x.own, 'b', &Atom::letter) > 0;
  if (sampled != call.sampled) {
    return InvalidInput("its initial state is not of each sample");
  }
  if (!call.batch_first) std::swap(x.dims[0], x.dims[1]);
  TESSERA_TRY(x, Contiguous(node, std::move(x)));
  if (x.own.size() == 2 && x.dims[1].empty()) return x.tensor;
  if (x.own.size() != 3 || x.dims[1].size() != 1 || x.dims[0].size() != 1) {
    return InvalidInput("its initial state has dimensions that are several");
  }
  return builder_.Add1("unstack", Unique(NameOf(node) + ".state"), {x.tensor},
                       RuleOver(sampled, "bd!h->bh"), {{"steps", 1}});
}

// ---- Layers -----------------------------------------------------------------

Result<void> Walk::CheckCell(const OnnxNode& node) const {
  const auto refused = [](const std::string& what) {
    return InvalidInput(what + " is not supported");
  };
  const CellDef& cell = CellOf(node);
  if (node.Find("clip") != nullptr) return refused("clip");
  if (node.Int("input_forget", 0) != 0) return refused("input_forget");
  if (Has(node, 7)) return refused("operand 7 (peepholes)");
  for (const char* name : {"activation_alpha", "activation_beta"}) {
    if (node.Find(name) != nullptr) return refused(name);
  }
  const OnnxAttribute* const given = node.Find("activations");
  for (size_t i = 0; given != nullptr && i < given->strings.size(); ++i) {
    std::string wanted(cell.activations[i % cell.activations.size()]);
    const auto same = [](const std::string& a, const std::string& b) {
      return std::ranges::equal(
          a, b, {}, [](char c) { return std::tolower(c); },
          [](char c) { return std::tolower(c); });
    };
    if (same(given->strings[i], wanted)) continue;
    if (cell.op == "RNN" && same(given->strings[i], "Relu")) continue;
    return refused("activation " + given->strings[i]);
  }
  if (!Has(node, 4)) return {};
  TESSERA_TRY(const std::vector<int64_t> lengths, Ints(node, 4));
  const Shape shape = ShapeOf(In(node, 0));
  const size_t steps = node.Int("layout", 0) != 0 ? 1 : 0;
  for (int64_t length : lengths) {
    if (shape.size() == 3 && length != shape[steps]) {
      return refused("operand 4 (sequences of different lengths)");
    }
  }
  return {};
}

// The weights of one direction: of Tessera's gates, or one for each.
Result<Walk::LayerWeights> Walk::WeightsOf(const OnnxNode& node,
                                           const LayerCall& call,
                                           int64_t direction) {
  const CellDef& cell = CellOf(node);
  const auto gates = std::ssize(cell.gates);
  const int64_t h = call.hidden;
  const std::string suffix =
      call.directions == 1 ? "" : "." + std::to_string(direction);
  LayerWeights weights;
  weights.sampled = call.sampled;
  for (size_t operand = 1; operand <= 3; ++operand) {
    const bool bias = operand == 3;
    if (bias && !Has(node, operand)) continue;
    TESSERA_TRY(const Slab all, SlabIn(node, operand));
    const int64_t columns = operand == 1 ? call.inputs : h;
    const Shape expected = bias ? Shape{call.directions, 2 * gates * h}
                                : Shape{call.directions, gates * h, columns};
    if (all.shape != expected) {
      return InvalidInput("operand " + std::to_string(operand) + " is " +
                          TextOf(all.shape) + ": expected " + TextOf(expected));
    }
    const Slab of = CutOf(all, 0, direction, 1);
    const auto rows = [&](int64_t gate) {
      return PiecesOf(CutOf(of, 1, gate * h, h));
    };
    std::vector<PublishedPiece> joint;  // of all gates
    for (int64_t k = 0; k < gates; ++k) {
      const int64_t gate = cell.gates[static_cast<size_t>(k)];
      std::vector<PublishedPiece> pieces = rows(gate);
      // A GRU's candidate keeps the two apart.
      const bool candidate = cell.op == "GRU" && k == 2 && !call.apart;
      std::vector<PublishedPiece> second;
      if (bias) second = rows(gates + gate);
      if (bias && candidate) {
        weights.candidate_bias =
            LayerWeight(second, suffix + ".candidate", {h}, 0);
      } else if (bias) {
        if (pieces.size() != 1 || second.size() != 1) {
          return InvalidInput("the biases of a gate are in several tensors");
        }
        second[0].begin = 0;
        pieces[0].plus = second;
      }
      const double stddev = bias ? 0 : 1 / std::sqrt(3 * Number(h));
      if (call.apart) {
        auto& each = bias           ? weights.biases
                     : operand == 1 ? weights.of_inputs
                                    : weights.of_states;
        const Shape shape = bias ? Shape{h} : Shape{h, columns};
        each.push_back(LayerWeight(std::move(pieces),
                                   suffix + "." + std::to_string(k), shape,
                                   stddev));
        continue;
      }
      joint.insert(joint.end(), pieces.begin(), pieces.end());
      if (k + 1 < gates) continue;
      const Shape shape = bias ? Shape{gates, h} : Shape{gates, h, columns};
      const TensorId id = LayerWeight(std::move(joint), suffix, shape, stddev);
      (bias           ? weights.biases
       : operand == 1 ? weights.of_inputs
                      : weights.of_states) = {id};
    }
  }
  if (cell.op == "GRU" && !call.apart && !weights.candidate_bias.valid()) {
    weights.candidate_bias =
        builder_.Constant(Unique(call.name + suffix + ".candidate"), {h},
                          std::vector<double>(static_cast<size_t>(h), 0));
  }
  return weights;
}

Walk::CellState Walk::Step(const OnnxNode& node, const std::string& prefix,
                           const LayerWeights& weights, TensorId x,
                           CellState state, bool keeps) {
  const CellDef& cell = CellOf(node);
  const auto add = [&](std::string_view op, const std::string& name,
                       std::vector<TensorId> operands, std::string_view rule) {
    return builder_.Add1(op, Unique(prefix + name), std::move(operands),
                         RuleOver(weights.sampled, std::string(rule)));
  };
  std::vector<TensorId> operands = {x, weights.of_inputs[0]};
  if (!weights.biases.empty()) operands.push_back(weights.biases[0]);
  const TensorId input = add("linear", ".ih", operands,
                             weights.biases.empty() ? kLinear : kLinearOfBias);
  TensorId recurrent;
  if (state.hidden.valid()) {
    recurrent =
        add("linear", ".hh", {state.hidden, weights.of_states[0]}, kLinear);
  }
  if (cell.op == "GRU") {
    operands = {input, weights.candidate_bias};
    std::string rule = "bg!j,j";
    if (recurrent.valid()) {
      operands.insert(operands.end(), {recurrent, state.hidden});
      rule += ",bg!j,bj";
    }
    return {add("gru_gates", "", operands, rule + "->bj"), TensorId()};
  }
  TensorId gates = input;
  if (recurrent.valid()) {
    gates = add("add", ".gates", {input, recurrent}, "bgj,bgj->bgj");
  }
  operands = {gates};
  std::string rule = "bg!j";
  if (state.cell.valid()) {
    operands.push_back(state.cell);
    rule += ",bj";
  }
  const auto results = builder_.Add(
      "lstm_gates", Unique(prefix), operands,
      RuleOver(weights.sampled, rule + (keeps ? "->bj,bj" : "->bj")));
  return {results[0], keeps ? results[1] : TensorId()};
}

// Of gates that are layers of their own: a GRU whose candidate reads the state
// after it is reset, and a plain cell.
Walk::CellState Walk::StepApart(const OnnxNode& node, int64_t direction,
                                const std::string& prefix,
                                const LayerWeights& weights, TensorId x,
                                CellState state) {
  const auto add = [&](std::string_view op, const std::string& name,
                       std::vector<TensorId> operands) {
    const std::string rule = operands.size() == 1 ? "bj->bj" : "bj,bj->bj";
    return builder_.Add1(op, Unique(prefix + name), std::move(operands),
                         RuleOver(weights.sampled, rule));
  };
  const TensorId h = state.hidden;
  // W x + R h + b of gate k, where h may be another state.
  const auto gate = [&](size_t k, TensorId of) {
    const std::string name = "." + std::to_string(k);
    std::vector<TensorId> operands = {x, weights.of_inputs[k]};
    std::string rule = "bi,ji";
    if (!weights.biases.empty()) {
      operands.push_back(weights.biases[k]);
      rule += "+j";
    }
    TensorId sum =
        builder_.Add1("linear", Unique(prefix + name + ".ih"), operands,
                      RuleOver(weights.sampled, rule + "->bj"));
    if (!of.valid()) return sum;
    const TensorId recurrent = builder_.Add1(
        "linear", Unique(prefix + name + ".hh"), {of, weights.of_states[k]},
        RuleOver(weights.sampled, "bi,ji->bj"));
    return add("add", name + ".sum", {sum, recurrent});
  };
  if (node.op == "RNN") {
    const OnnxAttribute* const given = node.Find("activations");
    bool relu = false;
    if (given != nullptr && !given->strings.empty()) {
      const size_t last = given->strings.size() - 1;
      const auto at = std::min(static_cast<size_t>(direction), last);
      relu = std::tolower(given->strings[at][0]) == 'r';
    }
    return {add(relu ? "relu" : "tanh", "", {gate(0, h)}), TensorId()};
  }
  const TensorId z = add("sigmoid", ".z", {gate(1, h)});
  TensorId of = h;
  if (h.valid()) {
    const TensorId r = add("sigmoid", ".r", {gate(0, h)});
    of = add("multiply", ".reset", {r, h});
  }
  const TensorId n = add("tanh", ".n", {gate(2, of)});
  // n + z (h - n).
  const TensorId d = h.valid() ? add("subtract", ".d", {h, n}) : n;
  const TensorId zd = add("multiply", ".zd", {z, d});
  return {add(h.valid() ? "add" : "subtract", "", {n, zd}), TensorId()};
}

Result<Walk::LayerCall> Walk::LayerCallOf(const OnnxNode& node, Activation& x,
                                          std::vector<TensorId>& inputs) {
  TESSERA_RETURN_IF_ERROR(CheckCell(node));
  if (node.inputs.size() < 3) return InvalidInput("expected three operands");
  LayerCall call;
  call.batch_first = node.Int("layout", 0) != 0;
  const std::string direction = node.Text("direction", "forward");
  call.directions = direction == "bidirectional" ? 2 : 1;
  call.reverse = direction == "reverse";
  if (call.directions == 1 && !call.reverse && direction != "forward") {
    return InvalidInput("unknown direction '" + direction + "'");
  }
  const size_t samples = call.batch_first ? 0 : 1;
  const size_t steps = call.batch_first ? 1 : 0;
  TESSERA_TRY(inputs, StepsOf(node, samples, steps, x));
  call.samples = Extent(x.dims[0]);
  call.inputs = Extent(x.dims[2]);
  call.sampled = x.dims[0][0].letter == 'b';
  const Shape of_states = ShapeOf(In(node, 2));
  if (of_states.size() != 3) {
    return InvalidInput("operand 2 is " + TextOf(of_states) +
                        ": expected [directions, gates, hidden]");
  }
  call.hidden = of_states[2];
  if (!x.dims[1].empty() && x.dims[1][0].letter == 'b') {
    return InvalidInput("its steps are samples");
  }
  // The runtime's GRU resets behind the product.
  const bool resets_behind = node.Int("linear_before_reset", 0) != 0;
  call.apart = node.op == "RNN" || (node.op == "GRU" && !resets_behind);
  call.name = node.name;
  for (const std::string& output : node.outputs) {
    if (call.name.empty()) call.name = output;
  }
  return call;
}

bool Walk::IsRead(const OnnxNode& node, size_t result) const {
  if (result >= node.outputs.size()) return false;
  const auto uses = uses_.find(node.outputs[result]);
  return uses != uses_.end() && uses->second > 0;
}

Result<std::vector<TensorId>> Walk::StatesOf(const OnnxNode& node,
                                             const LayerCall& call,
                                             int64_t direction,
                                             std::span<const TensorId> inputs,
                                             CellState& last) {
  TESSERA_TRY(const LayerWeights weights, WeightsOf(node, call, direction));
  TESSERA_TRY(last.hidden, InitialState(node, 5, call, direction));
  if (node.op == "LSTM") {
    TESSERA_TRY(last.cell, InitialState(node, 6, call, direction));
  }
  const bool reverse = call.reverse || direction == 1;
  const std::string layer = LayerName(call.name, direction);
  std::vector<TensorId> states(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const size_t at = reverse ? inputs.size() - 1 - i : i;
    const std::string prefix = layer + "." + std::to_string(at);
    if (i % kStepsPerBlock == 0) {
      builder_.BeginBlock(prefix);
      runs_of_steps_.insert(prefix);
    }
    const bool keeps = i + 1 < inputs.size() || IsRead(node, 2);
    last = call.apart
               ? StepApart(node, direction, prefix, weights, inputs[at], last)
               : Step(node, prefix, weights, inputs[at], last, keeps);
    states[at] = last.hidden;
  }
  builder_.BeginBlock("");
  return states;
}

Result<void> Walk::Recurrent(const OnnxNode& node) {
  Activation x;
  std::vector<TensorId> inputs;
  TESSERA_TRY(const LayerCall call, LayerCallOf(node, x, inputs));
  TESSERA_TRY(const Atom hidden,
              Whole(call.name + ".hidden", call.hidden, 'h'));
  Value all;  // of every step
  all.axis = call.batch_first ? 2 : 1;
  all.kind = call.directions > 1 ? Value::Kind::kPieces
             : x.dims[1].empty() ? Value::Kind::kActivation
                                 : Value::Kind::kSteps;
  Value last[2];
  for (int64_t d = 0; d < call.directions; ++d) {
    CellState state;
    TESSERA_TRY(std::vector<TensorId> states,
                StatesOf(node, call, d, inputs, state));
    Activation y;
    y.own = {x.dims[0][0], hidden};
    y.dims = {x.dims[0], {hidden}};
    for (size_t s = 0; s < 2; ++s) {
      Activation end = y;
      end.tensor = s == 0 ? state.hidden : state.cell;
      end.dims.insert(end.dims.begin() + (call.batch_first ? 1 : 0), Dim());
      if (end.tensor.valid()) last[s].pieces.push_back(std::move(end));
    }
    // [steps, directions, samples, hidden], or with samples in front.
    if (!x.dims[1].empty()) y.own.insert(y.own.begin() + 1, x.dims[1][0]);
    y.dims = call.batch_first
                 ? std::vector<Dim>{x.dims[0], x.dims[1], {}, {hidden}}
                 : std::vector<Dim>{x.dims[1], {}, x.dims[0], {hidden}};
    all.x = y;
    if (call.directions > 1 && IsRead(node, 0)) {
      y.tensor = x.dims[1].empty()
                     ? states[0]
                     : Stacked(LayerName(call.name, d), call.sampled, states);
      all.pieces.push_back(std::move(y));
    }
    all.steps = std::move(states);
  }
  if (all.Is(Value::Kind::kActivation)) all.x.tensor = all.steps[0];
  if (IsRead(node, 0)) Set(node, std::move(all), 0);
  for (size_t s = 0; s < 2; ++s) {
    if (last[s].pieces.empty()) continue;
    last[s].axis = call.batch_first ? 1 : 0;
    last[s].kind = Value::Kind::kPieces;
    if (call.directions == 1) {
      last[s] = ActivationValue(std::move(last[s].pieces[0]));
    }
    Set(node, std::move(last[s]), s + 1);
  }
  return {};
}

}  // namespace tessera::onnx
