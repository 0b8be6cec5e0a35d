// Nodes that compute element by element, with broadcasting, and products of
// tensors.

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "planner/io/onnx_walk.h"

namespace tessera::onnx {

namespace {

bool AllOnes(const Dim& dim) {
  return std::ranges::all_of(dim,
                             [](const Atom& atom) { return atom.extent == 1; });
}

// Tessera's operator for one of two tensors; empty where there is none. Truths
// are 0 and 1.
std::string_view OfTwo(std::string_view op) {
  constexpr std::pair<std::string_view, std::string_view> kOps[] = {
      {"Add", "add"},      {"Sub", "subtract"}, {"Mul", "multiply"},
      {"Div", "divide"},   {"Max", "maximum"},  {"Min", "minimum"},
      {"And", "multiply"}, {"Or", "maximum"},   {"Xor", "not_equal"},
  };
  for (const auto& [theirs, ours] : kOps) {
    if (op == theirs) return ours;
  }
  return ComparisonOf(op);
}

// Whether one of the atoms is of x's tensor, not repeated by an Expand.
bool OwnsSome(const Activation& x, const Dim& atoms) {
  return std::ranges::any_of(atoms, [&](const Atom& atom) {
    return std::ranges::count(x.own, atom.id, &Atom::id) > 0;
  });
}

// A result has what an operand has: what all of them repeat, it repeats, too.
// `to` is the letters of `own`, `from` the operands' rules.
void LeaveRepeated(std::string_view from, std::vector<Atom>& own,
                   std::string& to) {
  std::vector<Atom> kept;
  std::string letters;
  for (size_t i = 0; i < own.size(); ++i) {
    if (from.find(to[i]) == std::string_view::npos) continue;
    kept.push_back(own[i]);
    letters += to[i];
  }
  own = std::move(kept);
  to = std::move(letters);
}

}  // namespace

// ---- Functions of one tensor ------------------------------------------------

Result<Activation> Walk::Materialise(Activation x) {
  if (x.f == nullptr) return x;
  if (ids_.contains(x.tensor)) {
    return InvalidInput(
        "computes with ids, which nodes may only compare with numbers, or read "
        "and add up elements by");
  }
  const std::string letters = Letters().Of(x.own);
  TESSERA_TRY(x.tensor, Apply(x.tensor, letters, x.f));
  x.f = nullptr;
  return x;
}

Result<Activation> Walk::ForAnother(const OnnxNode& node, size_t i) {
  TESSERA_TRY(Activation x, Computed(node, i));
  if (x.f != nullptr && x.f->depth >= kMostDepth) {
    return Materialise(std::move(x));
  }
  return x;
}

Result<TensorId> Walk::Apply(TensorId x, const std::string& letters,
                             const std::shared_ptr<const Expression>& f) {
  if (f == nullptr) return x;
  const auto key = std::pair(x, f);
  const auto made = materialised_.find(key);
  if (made != materialised_.end()) return made->second;
  const auto add = [&](std::string_view op, std::vector<TensorId> operands,
                       std::vector<Attribute> attributes = {}) {
    std::string rule = letters;
    for (size_t i = 1; i < operands.size(); ++i) rule += "," + letters;
    return builder_.Add1(op, Unique(f->node), std::move(operands),
                         rule + "->" + letters, std::move(attributes));
  };
  const auto scaled = [&](TensorId y, double factor) {
    return factor == 1 ? y : add("scale", {y}, {{"factor", factor}});
  };
  const auto moved = [&](TensorId y, double amount) {
    return amount == 0 ? y : add("offset", {y}, {{"amount", amount}});
  };
  const auto keep = [&](TensorId y) { return materialised_[key] = y; };
  const auto misfit = [&] {
    return InvalidInput("no operator computes the function of '" + f->node +
                        "'");
  };
  if (const auto op = f->form ? FunctionOf(*f->form) : ""; !op.empty()) {
    return keep(add(op, {x}));
  }
  if (const auto factor = FactorOf(f.get())) return keep(scaled(x, *factor));
  std::vector<TensorId> of;  // terms that are tensors
  for (const Term& term : f->terms) {
    if (term.number) continue;
    TESSERA_TRY(const TensorId y, Apply(x, letters, term.of_x));
    of.push_back(y);
  }
  const std::string& op = f->op;
  if (of.size() == 2) {
    if (const auto ours = OfTwo(op); !ours.empty()) return keep(add(ours, of));
    return misfit();
  }
  // The number beside a tensor, and whether it is in front.
  const bool reversed = f->terms[0].number.has_value();
  const double number = reversed ? *f->terms[0].number
                        : f->terms.size() > 1 && f->terms[1].number
                            ? *f->terms[1].number
                            : 0;
  if (op == "Add") return keep(moved(of[0], number));
  if (op == "Sub") {
    return keep(reversed ? moved(scaled(of[0], -1), number)
                         : moved(of[0], -number));
  }
  if (op == "Mul") return keep(scaled(of[0], number));
  if (op == "Div") {
    if (!reversed && number == 0) {
      return InvalidInput("'" + f->node + "' divides by 0");
    }
    return keep(reversed ? scaled(add("reciprocal", of), number)
                         : scaled(of[0], 1 / number));
  }
  if (op == "Max" || op == "Min") {
    const double bound = std::clamp(number, -kMost, kMost);
    return keep(add("clip", of,
                    {{"least", op == "Max" ? bound : -kMost},
                     {"most", op == "Max" ? kMost : bound}}));
  }
  if (op == "Pow" && !reversed) {
    return keep(add("power", of, {{"exponent", number}}));
  }
  if (op == "Pow" && number > 0) {
    return keep(add("exp", {scaled(of[0], std::log(number))}));
  }
  if (const auto compares = ComparisonOf(op); !compares.empty()) {
    // The number, as a tensor like the other.
    const double bound = std::clamp(number, -kMost, kMost);
    const TensorId same = add("clip", of, {{"least", bound}, {"most", bound}});
    return keep(reversed ? add(compares, {same, of[0]})
                         : add(compares, {of[0], same}));
  }
  const auto negated = [&] { return moved(scaled(of[0], -1), 1); };
  const bool holds = number != 0;
  if (op == "Not") return keep(negated());
  if (op == "And") return keep(holds ? of[0] : scaled(of[0], 0));
  if (op == "Or") return keep(holds ? moved(scaled(of[0], 0), 1) : of[0]);
  if (op == "Xor") return keep(holds ? negated() : of[0]);
  if (op == ":leaky_relu") {
    return keep(add("leaky_relu", of, {{"slope", number}}));
  }
  if (op == ":elu") return keep(add("elu", of, {{"alpha", number}}));
  if (op == "Neg") return keep(scaled(of[0], -1));
  constexpr std::pair<std::string_view, std::string_view> kSame[] = {
      {"Abs", "abs"},    {"Cos", "cos"},
      {"Erf", "erf"},    {"Exp", "exp"},
      {"Log", "log"},    {"Reciprocal", "reciprocal"},
      {"Relu", "relu"},  {"Sigmoid", "sigmoid"},
      {"Sin", "sin"},    {"Softplus", "softplus"},
      {"Sqrt", "sqrt"},  {"Tanh", "tanh"},
      {":gelu", "gelu"}, {":gelu_erf", "gelu_erf"},
  };
  for (const auto& [theirs, ours] : kSame) {
    if (op == theirs) return keep(add(ours, of));
  }
  return misfit();
}

Result<void> Walk::Gelu(const OnnxNode& node) {
  TESSERA_TRY(Activation x, ForAnother(node, 0));
  const bool tanh = node.Text("approximate", "none") == "tanh";
  x.f = MakeExpression(tanh ? ":gelu" : ":gelu_erf", {{{}, x.f}}, NameOf(node));
  Set(node, ActivationValue(std::move(x)));
  return {};
}

Result<void> Walk::Parametric(const OnnxNode& node) {
  TESSERA_TRY(Activation x, ForAnother(node, 0));
  const bool elu = node.op == "Elu";
  x.f = MakeExpression(elu ? ":elu" : ":leaky_relu",
                       {{{}, x.f}, {node.Float("alpha", elu ? 1 : 0.01), {}}},
                       NameOf(node));
  Set(node, ActivationValue(std::move(x)));
  return {};
}

Result<bool> Walk::ScaledScores(const OnnxNode& node) {
  for (size_t i = 0; i < 2; ++i) {
    if (!In(node, i).Is(Value::Kind::kScores) ||
        !In(node, 1 - i).Is(Value::Kind::kConstant)) {
      continue;
    }
    const bool scales = node.op == "Mul" || (node.op == "Div" && i == 0);
    const auto one = Constant(node, 1 - i);
    if (!scales || !one || one->values.size() != 1) continue;
    Value value = In(node, i);
    value.scores->scale *=
        node.op == "Mul" ? one->values[0] : 1 / one->values[0];
    Set(node, std::move(value));
    return true;
  }
  return false;
}

Result<bool> Walk::MaskedScores(const OnnxNode& node) {
  for (size_t i = 0; i < 2; ++i) {
    const Value& scores = In(node, i);
    const Value& other = In(node, 1 - i);
    const bool are_scores = scores.Is(Value::Kind::kScores);
    const bool weight = other.Is(Value::Kind::kWeight);
    if (!(weight || other.Is(Value::Kind::kConstant) ||
          other.Is(Value::Kind::kLarge)) ||
        !(are_scores ||
          (scores.Is(Value::Kind::kActivation) && IsSoftened(node)))) {
      continue;
    }
    // A bias that begins with zeros hides nothing, but is trained.
    if (weight && other.source != nullptr &&
        other.source->is_parameter == true) {
      continue;
    }
    const auto constant = Constant(node, 1 - i);
    if (constant && constant->values.size() <= 1) continue;
    // Else what is added need not be one.
    const bool is_mask = are_scores && !weight;
    const Shape shape = ShapeOf(scores);
    const size_t rank = shape.size();
    const bool covers = rank >= 2 && shape[rank - 2] == shape[rank - 1] &&
                        (other.Is(Value::Kind::kLarge) ||
                         (constant && constant->shape.size() >= 2 &&
                          std::equal(constant->shape.end() - 2,
                                     constant->shape.end(), shape.end() - 2) &&
                          Broadcasts(constant->shape, scores)));
    if (!is_mask && !covers) continue;
    const auto mask = MaskOf(node, 1 - i, MaskForm::kAdded);
    // What is no mask may be numbers that are added.
    if (!mask && other.Is(Value::Kind::kLarge) && !UniformIn(node, 1 - i)) {
      return mask.error();
    }
    if (!mask) continue;
    if (are_scores) {
      Value value = scores;
      value.scores->mask = Both(value.scores->mask, *mask);
      Set(node, std::move(value));
      return true;
    }
    TESSERA_TRY(Activation x, Computed(node, i));
    if (mask->causal) {
      TESSERA_TRY(x, Hidden(node, std::move(x), *mask));
    }
    Set(node, ActivationValue(std::move(x)));
    return true;
  }
  return false;
}

bool Walk::HasRowForEachPlace(const OnnxNode& node, size_t i) const {
  if (node.op != "Add" || node.inputs.size() != 2) return false;
  const Value& value = In(node, i);
  if (!value.Is(Value::Kind::kWeight) ||
      !In(node, 1 - i).Is(Value::Kind::kActivation)) {
    return false;
  }
  const Shape shape = ShapeOf(value);
  const size_t rank = shape.size();
  // What is in front has extents of 1, and the other operand samples, too.
  return seq_len_ > 1 && (rank == 2 || (rank == 3 && shape[0] == 1)) &&
         shape[rank - 2] == seq_len_ && ShapeOf(In(node, 1 - i)).size() == 3;
}

Result<Walk::NumberOrTensor> Walk::ElementOperand(const OnnxNode& node,
                                                  size_t i) {
  const Value& value = In(node, i);
  const auto uniform = UniformIn(node, i);
  // What the other operand's shape holds already.
  if (uniform && node.inputs.size() == 2 &&
      Broadcasts(ShapeOf(value), In(node, 1 - i))) {
    return NumberOrTensor{*uniform, {}};
  }
  if (HasRowForEachPlace(node, i)) {
    const Shape shape = ShapeOf(value);
    const size_t rank = shape.size();
    std::vector<size_t> order(rank);
    std::iota(order.begin(), order.end(), 0);
    TESSERA_TRY(Activation rows,
                Lookup(NameOf(node) + ".rows", value, std::move(order),
                       {shape[rank - 2], shape[rank - 1]}, "positions"));
    return NumberOrTensor{{}, std::move(rows)};
  }
  TESSERA_TRY(Activation x, ForAnother(node, i));
  return NumberOrTensor{{}, std::move(x)};
}

Result<bool> Walk::WithNumberOfEachSample(const OnnxNode& node, size_t i) {
  const Shape all = ShapeOf(In(node, i));
  Shape other = ShapeOf(In(node, 1 - i));
  if (!UniformIn(node, i) || sizes_.batch < 2 || all.empty() ||
      all[0] != sizes_.batch || other.size() > all.size()) {
    return false;
  }
  other.insert(other.begin(), all.size() - other.size(), 1);
  if (std::exchange(other[0], all[0]) != 1) return false;
  for (size_t d = 1; d < all.size(); ++d) {
    if (all[d] != 1 && all[d] != other[d]) return false;
  }
  OnnxNode& repeated = parts_.emplace_back(node);
  TESSERA_TRY(repeated.inputs[1 - i],
              Part(node, "Expand", {node.inputs[1 - i], IntsOf(node, other)}));
  TESSERA_RETURN_IF_ERROR(Elementwise(repeated));
  return true;
}

Result<void> Walk::Elementwise(const OnnxNode& node) {
  if (node.inputs.size() > 2) return InvalidInput("has more than 2 operands");
  if (node.op == "Equal") {
    TESSERA_TRY(const bool marks, EqualToConstant(node));
    if (marks) return {};
  }
  const bool two = node.inputs.size() == 2;
  if (two) {
    TESSERA_TRY(const bool scaled, ScaledScores(node));
    if (scaled) return {};
  }
  if (two && node.op == "Add") {
    TESSERA_TRY(const bool masked, MaskedScores(node));
    if (masked) return {};
  }
  for (size_t i = 0; two && node.op == "Mul" && i < 2; ++i) {
    // Zeros for later places, as of attention without a softmax.
    TESSERA_TRY(const bool masked,
                Masked(node, i, 1 - i, MaskForm::kSeen, /*number=*/0));
    if (masked) return {};
  }
  for (size_t i = 0; two && i < 2; ++i) {
    TESSERA_TRY(const bool repeated, WithNumberOfEachSample(node, i));
    if (repeated) return {};
  }
  std::vector<NumberOrTensor> operands(node.inputs.size());
  for (size_t i = 0; i < operands.size(); ++i) {
    TESSERA_TRY(operands[i], ElementOperand(node, i));
  }
  const std::optional<Activation>& x = operands.front().tensor;
  const std::optional<Activation>& y = operands.back().tensor;
  const auto together = [&] {
    return x->tensor == y->tensor && x->dims.size() == y->dims.size() &&
           std::ranges::equal(x->dims, y->dims, [](const Dim& a, const Dim& b) {
             return SameAtoms(a, b);
           });
  };
  if (x && y && !together()) return Binary(node, *x, *y);
  if (!x && !y) return InvalidInput("computes with numbers alone");
  Activation result = x ? *x : *y;
  std::vector<Term> terms;
  for (const NumberOrTensor& operand : operands) {
    terms.push_back(operand.tensor ? Term{{}, operand.tensor->f}
                                   : Term{operand.number, {}});
  }
  result.f = MakeExpression(node.op, std::move(terms), NameOf(node));
  Set(node, ActivationValue(std::move(result)));
  return {};
}

bool Walk::Broadcasts(const Shape& from, const Value& to) {
  const Shape shape = ShapeOf(to);
  if (from.size() > shape.size()) return false;
  for (size_t d = 0; d < from.size(); ++d) {
    const int64_t extent = shape[shape.size() - from.size() + d];
    if (from[d] != 1 && from[d] != extent) return false;
  }
  return true;
}

// ---- Two tensors ------------------------------------------------------------

Result<void> Walk::Align(const OnnxNode& node, size_t dims, Activation& x,
                         Activation& y, std::vector<Dim>& result) {
  const auto pad = [](Activation& a, size_t rank) {
    while (a.dims.size() < rank) a.dims.insert(a.dims.begin(), Dim());
  };
  const size_t kept_x = x.dims.size() - dims;
  const size_t kept_y = y.dims.size() - dims;
  const size_t rank = std::max(kept_x, kept_y);
  pad(x, rank + dims);
  pad(y, rank + dims);
  std::set<int> used;
  for (size_t d = 0; d < rank; ++d) {
    Dim& a = x.dims[d];
    Dim& b = y.dims[d];
    if (AllOnes(a) || AllOnes(b)) {
      result.push_back(!AllOnes(a) ? a : !AllOnes(b) ? b : a.empty() ? b : a);
    } else {
      if (!Fit(atoms_, a, b)) {
        return InvalidInput("cannot put together " +
                            TextOf(ShapeOf(ActivationValue(x))) + " and " +
                            TextOf(ShapeOf(ActivationValue(y))));
      }
      // Samples keep their name.
      result.push_back(HasSamples(b) && !HasSamples(a) ? b : a);
      if (sizes_.batch > 1 && HasSamples(a) != HasSamples(b) &&
          HasSamples(x.own) != HasSamples(y.own) && OwnsSome(x, a) &&
          OwnsSome(y, b)) {
        const bool of_file = std::ranges::any_of(
            model_.initializers, [&](const OnnxTensor& tensor) {
              return std::ranges::count(tensor.dims, sizes_.batch) > 0;
            });
        return InvalidInput(
            "a tensor that no input makes has a dimension of " +
            std::to_string(sizes_.batch) +
            " places beside samples, which microbatches cut: expected 1 place" +
            (of_file ? ", or that a tensor of the file is one of model.frozen, "
                       "where they are equal"
                     : ""));
      }
      for (size_t i = 0; ExtentsOf(a) == ExtentsOf(b) && i < b.size(); ++i) {
        if (b[i].letter == 'b' || b[i].letter == 's') result.back()[i] = b[i];
        if (a[i].letter == 'b' || a[i].letter == 's') result.back()[i] = a[i];
      }
    }
    // A tensor may stand beside itself turned.
    for (size_t i = 0; i < result.back().size(); ++i) {
      Atom& atom = result.back()[i];
      if (used.insert(atom.id).second) continue;
      TESSERA_RETURN_IF_ERROR(CheckNotSamples(atom));
      TESSERA_TRY(
          atom, Whole(AtomOf(node, std::to_string(d) + "_" + std::to_string(i)),
                      atom.extent, 'f'));
      used.insert(atom.id);
    }
  }
  return {};
}

std::string Walk::RuleOf(const Activation& x, std::span<const Dim> as,
                         Letters& letters) {
  std::map<int, std::string> of;  // by atom of x
  for (size_t d = 0; d < as.size(); ++d) {
    const Dim mine = Wide(x.dims[d]);
    const Dim theirs = Wide(as[d]);
    if (ExtentsOf(mine) == ExtentsOf(theirs)) {
      for (size_t i = 0; i < mine.size(); ++i) {
        of[mine[i].id] = letters.Of(std::span(theirs).subspan(i, 1));
      }
    }
    // An extent of 1 that the result lacks is a factor of its own.
    for (const Atom& atom : x.dims[d]) {
      const auto same = std::ranges::find(as[d], atom.id, &Atom::id);
      if (atom.extent == 1 && same != as[d].end()) {
        of[atom.id] = letters.Of(std::span(&*same, 1));
      }
    }
  }
  std::string rule;
  for (const Atom& atom : x.own) {
    const auto found = of.find(atom.id);
    rule += found != of.end() ? found->second : letters.Fresh() + "!";
  }
  return rule;
}

Result<void> Walk::Binary(const OnnxNode& node, Activation x, Activation y) {
  std::string_view op = OfTwo(node.op);
  if (op.empty()) {
    return InvalidInput(
        "of two tensors only sums, differences, products, quotients, the "
        "larger and the smaller are computed, and comparisons");
  }
  TESSERA_TRY(x, Materialise(std::move(x)));
  TESSERA_TRY(y, Materialise(std::move(y)));
  Activation z;
  TESSERA_RETURN_IF_ERROR(Align(node, 0, x, y, z.dims));
  // In the order of an operand that has them all.
  z.own = Flatten(z.dims);
  for (const Activation* operand : {&y, &x}) {
    if (std::ranges::is_permutation(operand->own, z.own, {}, &Atom::id,
                                    &Atom::id)) {
      z.own = operand->own;
    }
  }
  Letters letters;
  std::string to = letters.Of(z.own);
  const std::string of_x = RuleOf(x, z.dims, letters);
  const std::string of_y = RuleOf(y, z.dims, letters);
  LeaveRepeated(of_x + of_y, z.own, to);
  if (op == "add" && !(of_x == to && of_y == to)) op = "broadcast_add";
  TESSERA_RETURN_IF_ERROR(CheckRule(z.own, {&x, &y}));
  z.tensor = builder_.Add1(op, Unique(NameOf(node)), {x.tensor, y.tensor},
                           of_x + "," + of_y + "->" + to);
  const bool of_marks = node.op == "And" || node.op == "Or" ||
                        node.op == "Xor" ||
                        (node.op == "Mul" && marks_.contains(x.tensor) &&
                         marks_.contains(y.tensor));
  if (!ComparisonOf(node.op).empty() || of_marks) marks_.insert(z.tensor);
  Set(node, ActivationValue(std::move(z)));
  return {};
}

Result<void> Walk::Choose(const OnnxNode& node) {
  OnnxNode of = node;
  for (size_t i = 0; i < 3; ++i) {
    const auto number = UniformIn(node, i);
    if (!In(node, i).Is(Value::Kind::kConstant) && !number) continue;
    // A number, as a tensor like another operand.
    const auto like = std::ranges::find_if(node.inputs, [&](const auto& name) {
      return values_[name].Is(Value::Kind::kActivation) &&
             Broadcasts(In(node, i).constant.shape, values_[name]);
    });
    if (like == node.inputs.end() || !number) continue;
    const std::string bound = NumberOf(node, *number);
    TESSERA_TRY(of.inputs[i], Part(node, "Max", {*like, bound}));
    TESSERA_TRY(of.inputs[i], Part(node, "Min", {of.inputs[i], bound}));
  }
  std::array<Activation, 3> x;
  Activation both;
  Activation y;
  for (size_t i = 0; i < 3; ++i) {
    TESSERA_TRY(x[i], Computed(of, i));
    TESSERA_TRY(x[i], Materialise(std::move(x[i])));
  }
  TESSERA_RETURN_IF_ERROR(Align(node, 0, x[0], x[1], both.dims));
  TESSERA_RETURN_IF_ERROR(Align(node, 0, both, x[2], y.dims));
  y.own = Flatten(y.dims);
  Letters letters;
  std::string to = letters.Of(y.own);
  std::string rule;
  for (Activation& operand : x) {
    while (operand.dims.size() < y.dims.size()) {
      operand.dims.insert(operand.dims.begin(), Dim());
    }
    rule += (rule.empty() ? "" : ",") + RuleOf(operand, y.dims, letters);
  }
  LeaveRepeated(rule, y.own, to);
  TESSERA_RETURN_IF_ERROR(CheckRule(y.own, {&x[0], &x[1], &x[2]}));
  y.tensor =
      builder_.Add1("where", Unique(NameOf(node)),
                    {x[0].tensor, x[1].tensor, x[2].tensor}, rule + "->" + to);
  Set(node, ActivationValue(std::move(y)));
  return {};
}

Result<void> Walk::CheckNotSamples(const Atom& atom) const {
  if (atom.letter != 'b' || sizes_.batch < 2) return {};
  return InvalidInput(
      "puts samples beside other samples, which batches that are cut into "
      "microbatches do not have together");
}

Result<void> Walk::CheckRule(std::span<const Atom> result,
                             std::span<const Activation* const> operands) {
  size_t dims = result.size();
  for (const Activation* x : operands) {
    dims = std::max(dims, x->own.size());
    if (ids_.contains(x->tensor)) {
      return InvalidInput(
          "computes with ids, which nodes may only compare with numbers, or "
          "read and add up elements by");
    }
    if (HasSamples(x->own) && !HasSamples(result) && sizes_.batch > 1) {
      return InvalidInput(
          "its result is not of each sample, and batches are cut into "
          "microbatches");
    }
  }
  if (dims > kMaxDims) {
    atoms_.JoinPlaces();
    return InvalidInput(
        "has a tensor of more than " + std::to_string(kMaxDims) +
        " dimensions, as other nodes take its dimensions apart (" +
        TextOf(ExtentsOf(result)) + ")");
  }
  return {};
}

// ---- Products ---------------------------------------------------------------

Result<Activation> Walk::ProductOf(const OnnxNode& node, Activation x,
                                   Activation y) {
  TESSERA_TRY(x, Materialise(std::move(x)));
  TESSERA_TRY(y, Materialise(std::move(y)));
  const bool row = x.dims.size() == 1;
  const bool column = y.dims.size() == 1;
  if (row) x.dims.insert(x.dims.begin(), Dim());
  if (column) y.dims.push_back(Dim());
  if (x.dims.size() < 2 || y.dims.size() < 2) {
    return InvalidInput("multiplies numbers");
  }
  Dim k = Wide(x.dims.back());
  const Dim& k_of_y = y.dims[y.dims.size() - 2];
  if (!Fit(atoms_, k, k_of_y)) {
    return InvalidInput("cannot multiply " +
                        TextOf(ShapeOf(ActivationValue(x))) + " by " +
                        TextOf(ShapeOf(ActivationValue(y))));
  }
  Activation z;
  TESSERA_RETURN_IF_ERROR(Align(node, 2, x, y, z.dims));
  const size_t rank = z.dims.size();
  std::set<int> used;
  for (const Atom& atom : Flatten(z.dims)) used.insert(atom.id);
  // Rows and columns may be of one name, of a tensor by itself.
  const auto named = [&](const Dim& dim, const std::string& as) -> Result<Dim> {
    Dim made = dim;
    for (size_t i = 0; i < made.size(); ++i) {
      if (used.insert(made[i].id).second) continue;
      TESSERA_RETURN_IF_ERROR(CheckNotSamples(made[i]));
      TESSERA_TRY(made[i], Whole(AtomOf(node, as + std::to_string(i)),
                                 made[i].extent, 'f'));
    }
    return made;
  };
  TESSERA_TRY(const Dim m, named(x.dims[rank], "m"));
  TESSERA_TRY(k, named(k, "k"));
  TESSERA_TRY(const Dim n, named(y.dims[rank + 1], "n"));
  Letters letters;
  std::vector<Dim> of_x = z.dims;
  of_x.push_back(m);
  of_x.push_back(k);
  std::vector<Dim> of_y = z.dims;
  of_y.push_back(k);
  of_y.push_back(n);
  z.dims.push_back(m);
  z.dims.push_back(n);
  z.own = Flatten(z.dims);
  std::string to = letters.Of(z.own);
  const std::string left = RuleOf(x, of_x, letters);
  const std::string right = RuleOf(y, of_y, letters);
  TESSERA_RETURN_IF_ERROR(CheckOwn(x, rank + 1));
  TESSERA_RETURN_IF_ERROR(CheckOwn(y, rank));
  LeaveRepeated(left + right, z.own, to);
  TESSERA_RETURN_IF_ERROR(CheckRule(z.own, {&x, &y}));
  z.tensor = builder_.Add1("einsum", Unique(NameOf(node)), {x.tensor, y.tensor},
                           left + "," + right + "->" + to);
  if (column) z.dims.pop_back();
  if (row) z.dims.erase(z.dims.end() - (column ? 1 : 2));
  return z;
}

Result<void> Walk::Einsum(const OnnxNode& node) {
  std::string text = node.Text("equation", "");
  std::erase(text, ' ');
  const size_t arrow = text.find("->");
  const size_t comma = text.find(',');
  if (arrow == std::string::npos || text.find('.') != std::string::npos ||
      node.inputs.size() > 2 ||
      (node.inputs.size() == 2) != (comma != std::string::npos)) {
    return InvalidInput(
        "expected an equation of one or two operands with '->' and without "
        "'...'");
  }
  const std::string labels[] = {text.substr(0, std::min(comma, arrow)),
                                comma == std::string::npos
                                    ? ""
                                    : text.substr(comma + 1, arrow - comma - 1),
                                text.substr(arrow + 2)};
  if (node.inputs.size() == 2) {
    TESSERA_TRY(const bool attends, EinsumOfAttention(node, labels));
    if (attends) return {};
  }
  std::vector<Activation> x;
  std::map<char, Dim> dims;
  std::set<int> used;
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    TESSERA_TRY(Activation operand, Computed(node, i));
    TESSERA_TRY(operand, Materialise(std::move(operand)));
    if (operand.dims.size() != labels[i].size()) {
      return InvalidInput("its equation does not fit its operands");
    }
    for (size_t d = 0; d < labels[i].size(); ++d) {
      const char label = labels[i][d];
      if (labels[i].find(label) != d) {
        return InvalidInput("takes a diagonal");
      }
      const Dim& dim = operand.dims[d];
      const auto known = dims.find(label);
      if (known == dims.end()) {
        // A sum is over all of them.
        const bool summed = labels[2].find(label) == std::string::npos;
        Dim made = summed ? Wide(dim) : dim;
        for (size_t a = 0; a < made.size(); ++a) {
          if (used.insert(made[a].id).second) continue;
          TESSERA_RETURN_IF_ERROR(CheckNotSamples(made[a]));
          TESSERA_TRY(made[a], Whole(AtomOf(node, std::string(1, label) +
                                                      std::to_string(a)),
                                     made[a].extent, 'f'));
        }
        dims[label] = std::move(made);
        continue;
      }
      if (!Fit(atoms_, dim, known->second)) {
        return InvalidInput("its equation does not fit its operands");
      }
    }
    x.push_back(std::move(operand));
  }
  Activation z;
  for (size_t d = 0; d < labels[2].size(); ++d) {
    const auto known = dims.find(labels[2][d]);
    if (known == dims.end() || labels[2].find(labels[2][d]) != d) {
      return InvalidInput("its equation does not fit its operands");
    }
    z.dims.push_back(known->second);
  }
  const bool two = x.size() == 2;
  bool sums = false;
  for (const auto& [label, dim] : dims) {
    if (labels[2].find(label) != std::string::npos) continue;
    sums = true;
    const bool both = labels[0].find(label) != std::string::npos &&
                      labels[1].find(label) != std::string::npos;
    if (two && !both && Extent(dim) > 1) {
      return InvalidInput("sums over a dimension of one operand alone");
    }
  }
  z.own = Flatten(z.dims);
  Letters letters;
  std::string to = letters.Of(z.own);
  std::string rule;
  std::vector<TensorId> operands;
  for (size_t i = 0; i < x.size(); ++i) {
    std::vector<Dim> as;
    for (size_t d = 0; d < labels[i].size(); ++d) {
      const char label = labels[i][d];
      as.push_back(dims[label]);
      if (labels[2].find(label) == std::string::npos) {
        TESSERA_RETURN_IF_ERROR(CheckOwn(x[i], d));
      }
    }
    rule += (i > 0 ? "," : "") + RuleOf(x[i], as, letters);
    operands.push_back(x[i].tensor);
    TESSERA_RETURN_IF_ERROR(CheckRule(z.own, {&x[i]}));
  }
  LeaveRepeated(rule, z.own, to);
  z.tensor = builder_.Add1(two    ? "einsum"
                           : sums ? "reduce_sum"
                                  : "transpose",
                           Unique(NameOf(node)), std::move(operands),
                           rule + "->" + to);
  Set(node, ActivationValue(std::move(z)));
  return {};
}

Result<Activation> Walk::ScoresOf(const OnnxNode& node, const Scores& scores) {
  TESSERA_TRY(Activation x, ProductOf(node, scores.q, scores.k));
  if (scores.scale != 1) {
    x.f = MakeExpression("Mul", {{{}, {}}, {scores.scale, {}}}, NameOf(node));
  }
  if (scores.mask.causal) return Hidden(node, std::move(x), scores.mask);
  return x;
}

Result<Activation> Walk::Hidden(const OnnxNode& node, Activation scores,
                                const Mask& mask, double number) {
  // Of every type, and with an exponential of zero beside any score.
  constexpr double kOfLaterPlaces = -60000;
  if (mask.window > 0) {
    return InvalidInput(
        "hides scores outside of a window, which only attention as a whole "
        "does");
  }
  TESSERA_TRY(Activation x, Materialise(std::move(scores)));
  const size_t rank = x.dims.size();
  if (rank < 2 || x.dims[rank - 2].size() != 1 ||
      x.dims[rank - 1].size() != 1) {
    return InvalidInput("expected a mask over two dimensions of the scores");
  }
  TESSERA_RETURN_IF_ERROR(CheckOwn(x, rank - 2));
  TESSERA_RETURN_IF_ERROR(CheckOwn(x, rank - 1));
  const int looking = x.dims[rank - 2][0].id;
  const int seen = x.dims[rank - 1][0].id;
  Letters letters("qk");
  std::string rule;
  for (const Atom& atom : x.own) {
    rule += atom.id == looking ? "q"
            : atom.id == seen  ? "k"
                               : letters.Of(std::span(&atom, 1));
  }
  x.tensor = builder_.Add1("causal_mask", Unique(NameOf(node) + ".mask"),
                           {x.tensor}, rule + "->" + rule,
                           {{"value", std::max(number, kOfLaterPlaces)}});
  return x;
}

}  // namespace tessera::onnx
