// Nodes that compute element by element, with broadcasting, along dimensions,
// and products of tensors.

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "planner/io/onnx_walk.h"

namespace tessera::onnx {

namespace {

constexpr double kMost = std::numeric_limits<float>::max();

bool AllOnes(const Dim& dim) {
  return std::ranges::all_of(dim,
                             [](const Atom& atom) { return atom.extent == 1; });
}

// Whether one of the atoms is of x's tensor, not repeated by an Expand.
bool OwnsSome(const Activation& x, const Dim& atoms) {
  return std::ranges::any_of(atoms, [&](const Atom& atom) {
    return std::ranges::count(x.own, atom.id, &Atom::id) > 0;
  });
}

// Among the dimensions of x's tensor.
size_t PlaceOf(const Atom& atom, const Activation& x) {
  const auto at = std::ranges::find(x.own, atom.id, &Atom::id);
  return static_cast<size_t>(at - x.own.begin());
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
  for (const Function& function : Functions()) {
    if (f->bends_beyond || !SameFunction(f->samples, function.f)) continue;
    return keep(add(function.op, {x}));
  }
  if (const auto factor = FactorOf(f.get())) return keep(scaled(x, *factor));
  std::vector<TensorId> of;  // terms that are tensors
  for (const Term& term : f->terms) {
    if (term.number) continue;
    TESSERA_TRY(const TensorId y, Apply(x, letters, term.of_x));
    of.push_back(y);
  }
  const bool two = of.size() == 2;
  const std::string& op = f->op;
  // The number beside a tensor, and whether it is in front.
  const bool reversed = f->terms[0].number.has_value();
  const double number = reversed ? *f->terms[0].number
                        : f->terms.size() > 1 && f->terms[1].number
                            ? *f->terms[1].number
                            : 0;
  if (op == "Add") return keep(two ? add("add", of) : moved(of[0], number));
  if (op == "Sub") {
    if (two) return keep(add("subtract", of));
    return keep(reversed ? moved(scaled(of[0], -1), number)
                         : moved(of[0], -number));
  }
  if (op == "Mul") {
    return keep(two ? add("multiply", of) : scaled(of[0], number));
  }
  if (op == "Div") {
    if (two) return keep(add("divide", of));
    return keep(reversed ? scaled(add("reciprocal", of), number)
                         : scaled(of[0], 1 / number));
  }
  if (op == "Max" || op == "Min") {
    if (two) return keep(add(op == "Max" ? "maximum" : "minimum", of));
    const double bound = std::clamp(number, -kMost, kMost);
    return keep(add("clip", of,
                    {{"least", op == "Max" ? bound : -kMost},
                     {"most", op == "Max" ? kMost : bound}}));
  }
  if (op == "Pow" && !two && !reversed) {
    return keep(add("power", of, {{"exponent", number}}));
  }
  if (op == "Pow" && reversed && number > 0) {
    return keep(add("exp", {scaled(of[0], std::log(number))}));
  }
  if (const auto compares = ComparisonOf(op); !compares.empty()) {
    if (two) return keep(add(compares, of));
    // The number, as a tensor like the other.
    const TensorId same =
        add("clip", of, {{"least", number}, {"most", number}});
    return keep(reversed ? add(compares, {same, of[0]})
                         : add(compares, {of[0], same}));
  }
  if (op == "Not") return keep(moved(scaled(of[0], -1), 1));
  if (op == ":leaky_relu") {
    return keep(add("leaky_relu", of, {{"slope", number}}));
  }
  if (op == ":elu") return keep(add("elu", of, {{"alpha", number}}));
  if (op == "Neg") return keep(scaled(of[0], -1));
  constexpr std::pair<std::string_view, std::string_view> kSame[] = {
      {"Abs", "abs"},   {"Cos", "cos"},
      {"Erf", "erf"},   {"Exp", "exp"},
      {"Log", "log"},   {"Reciprocal", "reciprocal"},
      {"Relu", "relu"}, {"Sigmoid", "sigmoid"},
      {"Sin", "sin"},   {"Softplus", "softplus"},
      {"Sqrt", "sqrt"}, {"Tanh", "tanh"},
  };
  for (const auto& [theirs, ours] : kSame) {
    if (op == theirs) return keep(add(ours, of));
  }
  return InvalidInput("no operator computes the function of '" + f->node + "'");
}

Result<void> Walk::Gelu(const OnnxNode& node) {
  TESSERA_TRY(Activation x, Computed(node, 0));
  const bool tanh = node.Text("approximate", "none") == "tanh";
  // A function of its own, told apart by its values.
  const auto old = x.f;
  auto made = std::make_shared<Expression>();
  made->op = node.op;
  made->terms = {{{}, old}};
  made->node = NameOf(node);
  made->depth = old == nullptr ? 1 : old->depth + 1;
  for (size_t i = 0; i < std::size(kPoints); ++i) {
    made->samples.push_back(Functions()[tanh ? 1 : 2].f(
        old == nullptr ? kPoints[i] : old->samples[i]));
  }
  if (old != nullptr) {
    TESSERA_TRY(x, Materialise(std::move(x)));
    for (size_t i = 0; i < std::size(kPoints); ++i) {
      made->samples[i] = Functions()[tanh ? 1 : 2].f(kPoints[i]);
    }
    made->terms = {{}};
  }
  x.f = std::move(made);
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
      if (mask->causal) value.scores->mask = *mask;
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

Result<void> Walk::Elementwise(const OnnxNode& node) {
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
      result.push_back(a);
      if (sizes_.batch > 1 && HasSamples(a) != HasSamples(b) &&
          HasSamples(x.own) != HasSamples(y.own) && OwnsSome(x, a) &&
          OwnsSome(y, b)) {
        return InvalidInput(
            "a tensor that no input makes has a dimension of " +
            std::to_string(sizes_.batch) +
            " places beside samples, which microbatches cut: expected 1 place, "
            "or that a tensor of the file is one of model.frozen, where they "
            "are equal");
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
  constexpr std::pair<std::string_view, std::string_view> kOps[] = {
      {"Add", "broadcast_add"},
      {"Sub", "subtract"},
      {"Mul", "multiply"},
      {"Div", "divide"},
      {"Max", "maximum"},
      {"Min", "minimum"},
      // Of 0 and 1.
      {"And", "multiply"},
      {"Or", "maximum"},
      {"Xor", "not_equal"},
  };
  std::string_view op = ComparisonOf(node.op);
  for (const auto& [theirs, ours] : kOps) {
    if (node.op == theirs) op = ours;
  }
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
  if (op == "broadcast_add" && of_x == to && of_y == to) op = "add";
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
    return InvalidInput("has a tensor of more than " +
                        std::to_string(kMaxDims) + " dimensions");
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
  Dim k = x.dims.back();
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
        Dim made = dim;
        for (size_t a = 0; a < made.size(); ++a) {
          if (used.insert(made[a].id).second) continue;
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

// ---- Along dimensions -------------------------------------------------------

Result<Activation> Walk::Contiguous(const OnnxNode& node, Activation x) {
  TESSERA_TRY(x, Materialise(std::move(x)));
  const std::vector<Atom> wanted = Flatten(x.dims);
  if (wanted.size() != x.own.size()) {
    return InvalidInput(
        "reads dimensions that are not its tensor's, such as those that an "
        "Expand repeats");
  }
  return Reordered(node, std::move(x), wanted);
}

Activation Walk::Reordered(const OnnxNode& node, Activation x,
                           std::span<const Atom> wanted) {
  if (SameAtoms(wanted, x.own)) return x;
  Letters letters;
  const std::string to = letters.Of(wanted);
  const std::string from = letters.Of(x.own);
  const bool all = wanted.size() == x.own.size();
  x.tensor = builder_.Add1(all ? "transpose" : "reduce_sum",
                           Unique(NameOf(node) + ".transpose"), {x.tensor},
                           from + "->" + to);
  x.own.assign(wanted.begin(), wanted.end());
  return x;
}

bool Walk::EndsIn(const Activation& x, std::span<const Atom> features) {
  std::vector<Atom> own = Flatten(x.dims);
  std::erase_if(own, [&](const Atom& atom) {
    return std::ranges::count(x.own, atom.id, &Atom::id) == 0;
  });
  return x.own.size() >= features.size() &&
         SameAtoms(std::span(x.own).last(features.size()), features) &&
         std::ranges::is_permutation(x.own, own, {}, &Atom::id, &Atom::id);
}

namespace {

// Of a reshape that makes these dimensions.
std::vector<Attribute> ReshapeTo(std::span<const Atom> atoms) {
  const auto extent = [&](size_t i) {
    return i < atoms.size() ? Number(atoms[i].extent) : 1;
  };
  return {{"first", extent(0)}, {"second", extent(1)}, {"third", extent(2)}};
}

}  // namespace

Result<Activation> Walk::Joined(const OnnxNode& node, Activation x, size_t d) {
  if (x.dims[d].size() == 1) return x;
  TESSERA_TRY(x, Contiguous(node, std::move(x)));
  const std::string name = AtomOf(node, "joint" + std::to_string(d) + "_" +
                                            std::to_string(x.tensor.index()));
  TESSERA_TRY(x, Merged(node, std::move(x), d));
  const Atom joint = x.dims[d][0];
  const size_t at = PlaceOf(joint, x);
  return WithDim(node, std::move(x), d, at, name, joint.extent, joint.letter);
}

Result<Activation> Walk::Merged(const OnnxNode& node, Activation x, size_t d) {
  TESSERA_TRY(x, Contiguous(node, std::move(x)));
  const Dim parts = x.dims[d];
  const auto front =
      static_cast<int64_t>(Flatten(std::span(x.dims).first(d)).size());
  const Atom joint = {-1, Extent(parts), parts.empty() ? 'f' : parts[0].letter};
  for (const Atom& atom : parts) {
    if (atom.letter == 'b') return InvalidInput("joins samples and others");
  }
  Letters letters("def");
  std::string rule;
  for (const Atom& atom : x.own) {
    rule += letters.Of(std::span(&atom, 1));
    const bool gone = std::ranges::count(parts, atom.id, &Atom::id) > 0;
    if (gone) rule += "!";
  }
  const auto begin = x.own.begin() + front;
  const auto at = x.own.erase(begin, begin + std::ssize(parts));
  const auto made = x.own.insert(at, joint);
  const std::string to = letters.Of({x.own.begin(), made}) + "d!" +
                         letters.Of({made + 1, x.own.end()});
  TESSERA_RETURN_IF_ERROR(CheckRule(x.own, {&x}));
  x.tensor = builder_.Add1(
      "reshape", Unique(NameOf(node) + ".joint" + std::to_string(d)),
      {x.tensor}, rule + "->" + to, ReshapeTo({&joint, 1}));
  x.dims[d] = {joint};
  return x;
}

Result<Activation> Walk::WithDim(const OnnxNode& node, Activation y, size_t d,
                                 size_t at, const std::string& name,
                                 int64_t extent, char letter) {
  const Dim parts = atoms_.Make(name, extent, letter);
  if (parts.size() == 1) {
    TESSERA_TRY(const Atom atom, Whole(name, extent, letter));
    y.own[at] = atom;
    y.dims[d] = {atom};
    return y;
  }
  if (parts.size() > 3 || y.own.size() + parts.size() - 1 > kMaxDims) {
    return InvalidInput("a dimension of its result is taken apart into " +
                        std::to_string(parts.size()) + " behind it");
  }
  Letters letters("mdef");
  const std::string front = letters.Of(std::span(y.own).first(at));
  const std::string behind = letters.Of(std::span(y.own).subspan(at + 1));
  y.tensor = builder_.Add1("reshape",
                           Unique(NameOf(node) + ".apart" + std::to_string(d)),
                           {y.tensor},
                           front + "m!" + behind + "->" + front +
                               (parts.size() == 2 ? "d!e!" : "d!e!f!") + behind,
                           ReshapeTo(parts));
  const auto place = y.own.erase(y.own.begin() + static_cast<int64_t>(at));
  y.own.insert(place, parts.begin(), parts.end());
  y.dims[d] = parts;
  return y;
}

Activation Walk::WithoutOne(const OnnxNode& node, Activation x,
                            const Atom& one) {
  Letters letters("def");
  std::string from;
  std::string to;
  for (const Atom& atom : x.own) {
    const std::string letter = letters.Of(std::span(&atom, 1));
    from += letter + (atom.id == one.id ? "!" : "");
    if (atom.id != one.id) to += letter;
  }
  std::erase_if(x.own, [&](const Atom& atom) { return atom.id == one.id; });
  for (Dim& dim : x.dims) ReplaceIn(dim, one, {});
  x.tensor = builder_.Add1("reshape", Unique(NameOf(node) + ".without"),
                           {x.tensor}, from + "->" + to, ReshapeTo({}));
  return x;
}

Result<Activation> Walk::SoftmaxOf(const OnnxNode& node, Activation x,
                                   size_t axis, bool log) {
  TESSERA_TRY(x, Materialise(std::move(x)));
  TESSERA_RETURN_IF_ERROR(CheckOwn(x, axis));
  const bool several = x.dims[axis].size() != 1;
  if (several) {
    TESSERA_TRY(x, Merged(node, std::move(x), axis));
  }
  if (x.own.size() > kMaxDims - 1) {
    return InvalidInput("expected a softmax of at most 5 dimensions, found " +
                        std::to_string(x.own.size()));
  }
  const Atom over = x.dims[axis][0];
  if (over.letter == 'b') {
    return InvalidInput(
        "a softmax over samples is not supported: batches are cut into "
        "microbatches");
  }
  Letters letters("z");
  std::string rule;
  for (const Atom& atom : x.own) {
    rule += atom.id == over.id ? "z" : letters.Of(std::span(&atom, 1));
  }
  x.tensor =
      builder_.Add1(log ? "log_softmax" : "softmax", Unique(NameOf(node)),
                    {x.tensor}, rule + "->" + rule);
  if (!several) return x;
  const size_t at = PlaceOf(over, x);
  return WithDim(node, std::move(x), axis, at, AtomOf(node, "over"),
                 over.extent, over.letter);
}

Result<void> Walk::Reduce(const OnnxNode& node) {
  constexpr std::pair<std::string_view, std::string_view> kOps[] = {
      {"ReduceSum", "reduce_sum"},
      {"ReduceMean", "reduce_mean"},
      {"ReduceMax", "reduce_max"},
  };
  TESSERA_TRY(Activation x, Computed(node, 0));
  std::vector<int64_t> axes = node.Ints("axes", {});
  if (Has(node, 1)) {
    TESSERA_TRY(axes, Ints(node, 1));
  }
  const size_t rank = x.dims.size();
  std::set<size_t> reduced;
  for (int64_t axis : axes) {
    const auto d = AxisOf(axis, rank);
    if (!d) return InvalidInput("has no dimension " + std::to_string(axis));
    reduced.insert(*d);
  }
  if (axes.empty()) {
    if (node.Int("noop_with_empty_axes", 0) != 0) {
      Set(node, In(node, 0));
      return {};
    }
    for (size_t d = 0; d < rank; ++d) reduced.insert(d);
  }
  const bool keep = node.Int("keepdims", 1) != 0;
  if (node.op == "ReduceMean" && rank == 4 && x.f == nullptr &&
      reduced == std::set<size_t>{2, 3} && x.dims[0].size() == 1 &&
      x.dims[0][0].letter == 'b') {
    TESSERA_RETURN_IF_ERROR(MeanOfImage(node));
    if (!keep) values_[node.outputs[0]].x.dims.resize(2);
    return {};
  }
  TESSERA_TRY(x, Materialise(std::move(x)));
  std::set<int> gone;
  Activation y;
  for (size_t d = 0; d < rank; ++d) {
    if (!reduced.contains(d)) {
      y.dims.push_back(x.dims[d]);
      continue;
    }
    TESSERA_RETURN_IF_ERROR(CheckOwn(x, d));
    for (const Atom& atom : x.dims[d]) gone.insert(atom.id);
    if (keep) y.dims.push_back({});
  }
  std::string_view op;
  for (const auto& [theirs, ours] : kOps) {
    if (node.op == theirs) op = ours;
  }
  Letters letters;
  std::string from;
  std::string to;
  for (const Atom& atom : x.own) {
    const std::string letter = letters.Of(std::span(&atom, 1));
    from += letter;
    if (gone.contains(atom.id)) {
      if (op == "reduce_max") from += "!";
      continue;
    }
    to += letter;
    y.own.push_back(atom);
  }
  TESSERA_RETURN_IF_ERROR(CheckRule(y.own, {&x}));
  y.tensor =
      builder_.Add1(op, Unique(NameOf(node)), {x.tensor}, from + "->" + to);
  Set(node, ActivationValue(std::move(y)));
  return {};
}

Result<Activation> Walk::SliceOf(const OnnxNode& node, Activation x, size_t d,
                                 int64_t start, int64_t step, int64_t places,
                                 const std::string& what) {
  TESSERA_TRY(x, Materialise(std::move(x)));
  if (x.dims[d].empty() && places == 1) return x;  // of one place
  if (x.dims[d].size() != 1) {
    return InvalidInput("takes places of a dimension that is several");
  }
  if (places < 1) return InvalidInput("has no places");
  return Placed(node, std::move(x), d, places, "slice",
                {{"places", Number(places)},
                 {"start", Number(start)},
                 {"step", Number(step)}},
                what);
}

Result<Activation> Walk::Placed(const OnnxNode& node, Activation x, size_t d,
                                int64_t places, std::string_view op,
                                std::vector<Attribute> attributes,
                                const std::string& what) {
  TESSERA_RETURN_IF_ERROR(CheckOwn(x, d));
  if (x.dims[d].size() != 1) {
    return InvalidInput("takes places of a dimension that is several");
  }
  const Atom from = x.dims[d][0];
  Letters letters("md");
  std::string left;
  std::string right;
  size_t at = 0;
  for (size_t i = 0; i < x.own.size(); ++i) {
    const bool here = x.own[i].id == from.id;
    const std::string letter =
        here ? "" : letters.Of(std::span(x.own).subspan(i, 1));
    left += here ? "m!" : letter;
    right += here ? "d!" : letter;
    if (here) at = i;
  }
  if (from.letter == 'b') {
    return InvalidInput("takes some of the samples");
  }
  x.tensor = builder_.Add1(op, Unique(NameOf(node) + what), {x.tensor},
                           left + "->" + right, std::move(attributes));
  return WithDim(node, std::move(x), d, at,
                 AtomOf(node, what + std::to_string(d)), places, from.letter);
}

Result<void> Walk::Slice(const OnnxNode& node) {
  TESSERA_TRY(const bool states, CutStates(node));
  if (states) return {};
  TESSERA_TRY(const bool piece, SlicePiece(node));
  if (piece) return {};
  TESSERA_TRY(const bool weight, CutWeight(node));
  if (weight) return {};
  TESSERA_TRY(Activation x, Computed(node, 0));
  std::vector<OnnxConstant> given(node.inputs.size());
  std::vector<const OnnxConstant*> operands(node.inputs.size());
  for (size_t i = 1; i < node.inputs.size(); ++i) {
    if (!Has(node, i)) continue;
    TESSERA_TRY(given[i], Constant(node, i));
    operands[i] = &given[i];
  }
  const Shape shape = ShapeOf(In(node, 0));
  const auto slice = OnnxSliceOf(shape, operands);
  if (!slice) return InvalidInput("its operands do not fit");
  int cut = 0;  // dimensions, so far
  for (size_t d = 0; d < shape.size(); ++d) {
    if (slice->shape[d] == shape[d] && slice->step[d] > 0) continue;
    TESSERA_TRY(
        x, SliceOf(node, std::move(x), d, slice->first[d], slice->step[d],
                   slice->shape[d], ".slice" + std::to_string(cut++) + "_"));
  }
  Set(node, ActivationValue(std::move(x)));
  return {};
}

Result<Activation> Walk::Padded(const OnnxNode& node, Activation x, size_t d,
                                int64_t before, int64_t behind, double value) {
  const int64_t places = before + Extent(x.dims[d]) + behind;
  return Placed(node, std::move(x), d, places, "pad",
                {{"before", Number(before)},
                 {"places", Number(places)},
                 {"value", value}},
                ".pad");
}

Result<void> Walk::Pad(const OnnxNode& node) {
  TESSERA_TRY(Activation x, Computed(node, 0));
  TESSERA_TRY(const std::vector<int64_t> pads, Ints(node, 1));
  double value = 0;
  if (Has(node, 2)) {
    TESSERA_TRY(const OnnxConstant constant, Constant(node, 2));
    if (constant.values.size() != 1) return InvalidInput("pads with several");
    value = constant.values[0];
    if (!(std::abs(value) <= kMost)) {
      return InvalidInput("padding with " + std::to_string(value) +
                          " is not supported: expected a finite number");
    }
  }
  std::vector<int64_t> axes(x.dims.size());
  std::iota(axes.begin(), axes.end(), 0);
  if (Has(node, 3)) {
    TESSERA_TRY(axes, Ints(node, 3));
  }
  const std::string mode = node.Text("mode", "constant");
  constexpr std::string_view kModes[] = {"constant", "edge", "reflect", "wrap"};
  if (std::ranges::count(kModes, mode) == 0 || pads.size() != 2 * axes.size()) {
    return InvalidInput("expected a number of places in front and behind");
  }
  for (size_t i = 0; i < axes.size(); ++i) {
    const auto d = AxisOf(axes[i], x.dims.size());
    int64_t before = pads[i];
    int64_t behind = pads[i + axes.size()];
    if (!d) return InvalidInput("has no such dimension");
    if (before == 0 && behind == 0) continue;
    constexpr int64_t kMostPlaces = 65536;
    if (std::min(before, behind) < -kMostElements ||
        std::max(before, behind) > kMostPlaces) {
      return InvalidInput("expected up to 65536 places on each side");
    }
    TESSERA_TRY(x, Materialise(std::move(x)));
    TESSERA_TRY(x, Joined(node, std::move(x), *d));
    // Fewer than none are cut off, and what is left is padded.
    const int64_t cut = std::max<int64_t>(-before, 0);
    const int64_t extent =
        Extent(x.dims[*d]) - cut - std::max<int64_t>(-behind, 0);
    before = std::max<int64_t>(before, 0);
    behind = std::max<int64_t>(behind, 0);
    if (extent != Extent(x.dims[*d])) {
      TESSERA_TRY(x, SliceOf(node, std::move(x), *d, cut, 1, extent, ".crop"));
    }
    if (before == 0 && behind == 0) continue;
    if (mode == "constant") {
      TESSERA_TRY(x, Padded(node, std::move(x), *d, before, behind, value));
      continue;
    }
    if (mode == "edge") {
      const int64_t places = extent + before + behind;
      TESSERA_TRY(x, Resampled(node, std::move(x), *d, places, -Number(before),
                               1, /*linear=*/false));
      continue;
    }
    const bool reflect = mode == "reflect";
    if (std::max(before, behind) > extent - (reflect ? 1 : 0)) {
      return InvalidInput("pads " + std::to_string(extent) + " places by " +
                          std::to_string(std::max(before, behind)));
    }
    // What stands in front, x itself, and what stands behind.
    std::vector<std::string> parts;
    const auto add = [&](int64_t start, int64_t count) -> Result<void> {
      if (count == 0) return {};
      const int64_t step = reflect ? -1 : 1;
      TESSERA_TRY(Activation some,
                  SliceOf(node, x, *d, start, step, count,
                          ".pad" + std::to_string(start) + "_"));
      parts.push_back(Named(node, std::move(some)));
      return {};
    };
    TESSERA_RETURN_IF_ERROR(add(reflect ? before : extent - before, before));
    parts.push_back(Named(node, x));
    TESSERA_RETURN_IF_ERROR(add(reflect ? extent - 2 : 0, behind));
    OnnxAttribute axis;
    axis.name = "axis";
    axis.i = static_cast<int64_t>(*d);
    TESSERA_TRY(const std::string joint, Part(node, "Concat", parts, {axis}));
    x = values_[joint].x;
  }
  Set(node, ActivationValue(std::move(x)));
  return {};
}

Result<Activation> Walk::Resampled(const OnnxNode& node, Activation x, size_t d,
                                   int64_t places, double start, double step,
                                   bool linear) {
  TESSERA_TRY(x, Materialise(std::move(x)));
  TESSERA_TRY(x, Joined(node, std::move(x), d));
  return Placed(node, std::move(x), d, places, "resample",
                {{"linear", linear ? 1.0 : 0.0},
                 {"places", Number(places)},
                 {"start", start},
                 {"step", step}},
                ".resample");
}

// Dimension by dimension.
Result<void> Walk::Resize(const OnnxNode& node) {
  TESSERA_TRY(Activation x, Computed(node, 0));
  const std::string mode = node.Text("mode", "nearest");
  const std::string coordinates =
      node.Text("coordinate_transformation_mode", "half_pixel");
  const std::string nearest = node.Text("nearest_mode", "round_prefer_floor");
  if ((mode != "nearest" && mode != "linear") ||
      node.Int("antialias", 0) != 0 ||
      node.Text("keep_aspect_ratio_policy", "stretch") != "stretch" ||
      (Has(node, 2) && Has(node, 3) && ShapeOf(In(node, 2)) != Shape{0})) {
    return InvalidInput(
        "expected the mode 'nearest' or 'linear' without antialias, and sizes "
        "or scales");
  }
  const size_t rank = x.dims.size();
  std::vector<int64_t> axes = node.Ints("axes", {});
  if (axes.empty()) {
    axes.resize(rank);
    std::iota(axes.begin(), axes.end(), 0);
  }
  const bool sized = Has(node, 3);
  TESSERA_TRY(const OnnxConstant given, Constant(node, sized ? 3 : 2));
  if (given.values.size() != axes.size()) {
    return InvalidInput("its operands do not fit");
  }
  for (size_t i = 0; i < axes.size(); ++i) {
    const auto d = AxisOf(axes[i], rank);
    if (!d) return InvalidInput("has no such dimension");
    const double in = Number(Extent(x.dims[*d]));
    // Scales are fp32, and so are products of them.
    const double out = sized ? given.values[i]
                             : std::floor(static_cast<float>(in) *
                                          static_cast<float>(given.values[i]));
    const double scale = sized ? out / in : given.values[i];
    if (!(out >= 1 && out <= kMostElements && scale > 0)) {
      return InvalidInput("makes a dimension of " + std::to_string(out));
    }
    if (out == in && scale == 1) continue;
    double step = 1 / scale;
    double start = 0;  // in the operand, of place 0
    if (coordinates == "align_corners") {
      // ONNX counts the places before they are rounded.
      const double places = sized ? out : in * scale;
      step = places > 1 ? (in - 1) / (places - 1) : 1;
    } else if (coordinates == "half_pixel" ||
               coordinates == "half_pixel_symmetric" ||
               coordinates == "pytorch_half_pixel") {
      start = step / 2 - 0.5;
      if (coordinates == "half_pixel_symmetric") {
        start += in / 2 * (1 - out / (scale * in));
      }
      if (coordinates == "pytorch_half_pixel" && out == 1) start = 0;
    } else if (coordinates != "asymmetric") {
      return InvalidInput("coordinate_transformation_mode '" + coordinates +
                          "' is not supported");
    }
    // The nearest place below is that of a number just above a whole one, and
    // of one below it by no more than a scale's rounding to fp32.
    const double just = sized ? 1e-9 : std::clamp(in * 0x1p-23, 1e-9, 1e-3);
    const bool linear = mode == "linear";
    if (!linear) {
      start += nearest == "floor"               ? just
               : nearest == "ceil"              ? 1 - just
               : nearest == "round_prefer_ceil" ? 0.5 + just
                                                : 0.5 - just;
    }
    if (step == 0) step = 1;  // of one place, which all are
    TESSERA_TRY(x, Resampled(node, std::move(x), *d, static_cast<int64_t>(out),
                             start, step, linear));
  }
  Set(node, ActivationValue(std::move(x)));
  return {};
}

// ---- Nodes that stand for several -------------------------------------------

std::string Walk::NumberOf(const OnnxNode& node, double value) {
  std::string name = node.outputs[0] + "#" + std::to_string(next_part_++);
  values_[name] = ConstantValue({{}, {value}, true});
  return name;
}

Result<std::string> Walk::Part(const OnnxNode& node, std::string op,
                               std::vector<std::string> inputs,
                               std::vector<OnnxAttribute> attributes) {
  const std::string name = node.outputs[0] + "#" + std::to_string(next_part_++);
  OnnxNode& part = parts_.emplace_back();
  part.name = NameOf(node) + "." + op;
  part.op = std::move(op);
  part.inputs = std::move(inputs);
  part.outputs = {name};
  part.attributes = std::move(attributes);
  TESSERA_RETURN_IF_ERROR(Declare(part));
  ++parts_deep_;
  const auto mapped = Map(part);
  --parts_deep_;
  TESSERA_RETURN_IF_ERROR(mapped);
  TESSERA_RETURN_IF_ERROR(CheckSizes(part));
  return name;
}

void Walk::Rename(const OnnxNode& node, const std::string& part) {
  values_[node.outputs[0]] = values_[part];
}

Result<void> Walk::Variadic(const OnnxNode& node) {
  const std::string op = node.op == "Max"   ? "Max"
                         : node.op == "Min" ? "Min"
                                            : "Add";
  if (node.inputs.size() == 2 && node.op == op) return Elementwise(node);
  std::string total = node.inputs[0];
  for (size_t i = 1; i < node.inputs.size(); ++i) {
    TESSERA_TRY(total, Part(node, op, {total, node.inputs[i]}));
  }
  if (node.op == "Mean") {
    TESSERA_TRY(
        total,
        Part(node, "Mul",
             {total, NumberOf(node, 1 / Number(std::ssize(node.inputs)))}));
  }
  Rename(node, total);
  return {};
}

Result<void> Walk::Clip(const OnnxNode& node) {
  std::string x = node.inputs[0];
  if (Has(node, 1)) {
    TESSERA_TRY(x, Part(node, "Max", {x, node.inputs[1]}));
  }
  if (Has(node, 2)) {
    TESSERA_TRY(x, Part(node, "Min", {x, node.inputs[2]}));
  }
  Rename(node, x);
  return {};
}

Result<void> Walk::Function1(const OnnxNode& node) {
  const std::string x = node.inputs[0];
  const auto number = [&](double value) { return NumberOf(node, value); };
  // The last part, whose error ends the chain.
  Result<std::string> y = x;
  const auto then = [&](const std::string& op, std::vector<std::string> more) {
    if (!y) return;
    more.insert(more.begin(), *y);
    y = Part(node, op, std::move(more));
  };
  const auto of_x = [&](const std::string& op) { return Part(node, op, {x}); };
  if (node.op == "HardSigmoid" || node.op == "HardSwish") {
    const bool swish = node.op == "HardSwish";
    then("Mul", {number(swish ? 1.0 / 6 : node.Float("alpha", 0.2))});
    then("Add", {number(swish ? 0.5 : node.Float("beta", 0.5))});
    then("Max", {number(0)});
    then("Min", {number(1)});
    if (swish) then("Mul", {x});
  } else if (node.op == "Selu") {
    OnnxAttribute alpha;
    alpha.name = "alpha";
    alpha.f = node.Float("alpha", 1.67326319217681884);
    y = Part(node, "Elu", {x}, {alpha});
    then("Mul", {number(node.Float("gamma", 1.05070102214813232))});
  } else if (node.op == "Celu") {
    const double alpha = node.Float("alpha", 1);
    then("Div", {number(alpha)});
    if (y) y = Part(node, "Elu", {*y});
    then("Mul", {number(alpha)});
  } else if (node.op == "Softsign") {
    y = of_x("Abs");
    then("Add", {number(1)});
    if (y) y = Part(node, "Div", {x, *y});
  } else if (node.op == "Mish") {
    y = of_x("Softplus");
    then("Tanh", {});
    then("Mul", {x});
  } else if (node.op == "Tan") {
    y = of_x("Cos");
    TESSERA_TRY(const std::string sine, of_x("Sin"));
    if (y) y = Part(node, "Div", {sine, *y});
  } else if (node.op == "ThresholdedRelu") {
    y = Part(node, "Greater", {x, number(node.Float("alpha", 1))});
    then("Mul", {x});
  } else if (node.op == "Shrink") {
    const double bias = node.Float("bias", 0);
    const double lambda = node.Float("lambd", 0.5);
    y = Part(node, "Greater", {x, number(lambda)});
    TESSERA_TRY(std::string low, Part(node, "Less", {x, number(-lambda)}));
    TESSERA_TRY(const std::string up, Part(node, "Add", {x, number(bias)}));
    TESSERA_TRY(low, Part(node, "Mul", {low, up}));
    TESSERA_TRY(const std::string down, Part(node, "Sub", {x, number(bias)}));
    then("Mul", {down});
    then("Add", {low});
  } else {  // Sinh and Cosh
    y = of_x("Exp");
    then("Reciprocal", {});
    TESSERA_TRY(const std::string e, of_x("Exp"));
    if (y) y = Part(node, node.op == "Sinh" ? "Sub" : "Add", {e, *y});
    then("Mul", {number(0.5)});
  }
  if (!y) return y.error();
  Rename(node, *y);
  return {};
}

Result<void> Walk::PRelu(const OnnxNode& node) {
  if (node.inputs.size() != 2) return InvalidInput("expected two operands");
  TESSERA_TRY(std::string y,
              Part(node, "Min", {node.inputs[0], NumberOf(node, 0)}));
  const std::string slope = node.outputs[0] + "#slope";
  values_[slope] = AsWeight(In(node, 1));
  TESSERA_TRY(y, Part(node, "Mul", {y, slope}));
  TESSERA_TRY(const std::string x, Part(node, "Relu", {node.inputs[0]}));
  TESSERA_TRY(y, Part(node, "Add", {x, y}));
  Rename(node, y);
  return {};
}

std::string Walk::IntsOf(const OnnxNode& node, const Shape& values) {
  std::string name = node.outputs[0] + "#" + std::to_string(next_part_++);
  OnnxConstant constant;
  constant.shape = {std::ssize(values)};
  for (int64_t value : values) constant.values.push_back(Number(value));
  values_[name] = ConstantValue(std::move(constant));
  return name;
}

// alpha op(A) op(B) + beta C.
Result<void> Walk::GeneralGemm(const OnnxNode& node) {
  if (node.inputs.size() < 2) return InvalidInput("expected two operands");
  std::string a = node.inputs[0];
  std::string b = node.inputs[1];
  if (node.Int("transA", 0) != 0) {
    TESSERA_TRY(a, Part(node, "Transpose", {a}));
  }
  if (node.Int("transB", 0) != 0) {
    TESSERA_TRY(b, Part(node, "Transpose", {b}));
  }
  TESSERA_TRY(std::string y, Part(node, "MatMul", {a, b}));
  if (const double alpha = node.Float("alpha", 1); alpha != 1) {
    TESSERA_TRY(y, Part(node, "Mul", {y, NumberOf(node, alpha)}));
  }
  if (Has(node, 2)) {
    std::string c = node.inputs[2];
    if (const double beta = node.Float("beta", 1); beta != 1) {
      TESSERA_TRY(c, Part(node, "Mul", {c, NumberOf(node, beta)}));
    }
    TESSERA_TRY(y, Part(node, "Add", {y, c}));
  }
  Rename(node, y);
  return {};
}

Result<std::string> Walk::Standardised(const OnnxNode& node,
                                       const std::string& x, const Shape& axes,
                                       double epsilon, std::string& mean,
                                       std::string& deviation) {
  OnnxAttribute over;
  over.name = "axes";
  over.ints = axes;
  TESSERA_TRY(mean, Part(node, "ReduceMean", {x}, {over}));
  TESSERA_TRY(const std::string d, Part(node, "Sub", {x, mean}));
  TESSERA_TRY(std::string v, Part(node, "Mul", {d, d}));
  TESSERA_TRY(v, Part(node, "ReduceMean", {v}, {over}));
  TESSERA_TRY(v, Part(node, "Add", {v, NumberOf(node, epsilon)}));
  TESSERA_TRY(deviation, Part(node, "Sqrt", {v}));
  return Part(node, "Div", {d, deviation});
}

// Over the last dimensions, or those of each channel's image.
Result<void> Walk::GeneralNorm(const OnnxNode& node) {
  const auto rank = std::ssize(ShapeOf(In(node, 0)));
  Shape axes = node.Ints("axes", {0, 2, 3});
  double epsilon = node.Float("epsilon", 1e-5);
  if (node.op == "LayerNormalization") {
    const auto axis = AxisOf(node.Int("axis", -1), static_cast<size_t>(rank));
    if (!axis) return InvalidInput("has no such dimension");
    axes.clear();
    for (auto d = static_cast<int64_t>(*axis); d < rank; ++d) axes.push_back(d);
  } else if (node.op == "InstanceNormalization") {
    axes.clear();
    for (int64_t d = 2; d < rank; ++d) axes.push_back(d);
  } else {
    epsilon = 1e-18;  // the standard divides by the deviation plus 1e-9
  }
  std::string mean;
  std::string deviation;
  TESSERA_TRY(std::string y, Standardised(node, node.inputs[0], axes, epsilon,
                                          mean, deviation));
  for (size_t i = 1; i < 3; ++i) {
    if (!Has(node, i)) continue;
    std::string operand = node.inputs[i];
    if (node.op == "InstanceNormalization") {
      OnnxAttribute behind;
      behind.name = "axes";
      for (int64_t d = 1; d + 1 < rank; ++d) behind.ints.push_back(d);
      TESSERA_TRY(operand, Part(node, "Unsqueeze", {operand}, {behind}));
    }
    TESSERA_TRY(y, Part(node, i == 1 ? "Mul" : "Add", {y, operand}));
  }
  Rename(node, y);
  if (node.outputs.size() > 1) Set(node, values_[mean], 1);
  if (node.outputs.size() > 2 && !node.outputs[2].empty()) {
    TESSERA_TRY(const std::string inverse,
                Part(node, "Reciprocal", {deviation}));
    Set(node, values_[inverse], 2);
  }
  return {};
}

// Of channels in groups.
Result<void> Walk::GroupNorm(const OnnxNode& node) {
  const Shape shape = ShapeOf(In(node, 0));
  const int64_t groups = node.Int("num_groups", 0);
  if (shape.size() < 3 || groups < 1 || shape[1] % groups != 0 ||
      node.inputs.size() != 3) {
    return InvalidInput("expected images in groups of channels");
  }
  Shape grouped = {shape[0], groups, shape[1] / groups};
  grouped.insert(grouped.end(), shape.begin() + 2, shape.end());
  Shape axes;
  for (int64_t d = 2; d < std::ssize(grouped); ++d) axes.push_back(d);
  TESSERA_TRY(std::string y,
              Part(node, "Reshape", {node.inputs[0], IntsOf(node, grouped)}));
  std::string mean;
  std::string deviation;
  TESSERA_TRY(y, Standardised(node, y, axes, node.Float("epsilon", 1e-5), mean,
                              deviation));
  // Before version 21 there is one number for each group.
  const bool by_group =
      ShapeOf(In(node, 1)) == Shape{groups} && groups != shape[1];
  if (!by_group) {
    TESSERA_TRY(y, Part(node, "Reshape", {y, IntsOf(node, shape)}));
  }
  for (size_t i = 1; i < 3; ++i) {
    OnnxAttribute behind;
    behind.name = "axes";
    const int64_t rank = std::ssize(by_group ? grouped : shape);
    for (int64_t d = 1; d + 1 < rank; ++d) behind.ints.push_back(d);
    TESSERA_TRY(const std::string operand,
                Part(node, "Unsqueeze", {node.inputs[i]}, {behind}));
    TESSERA_TRY(y, Part(node, i == 1 ? "Mul" : "Add", {y, operand}));
  }
  if (by_group) {
    TESSERA_TRY(y, Part(node, "Reshape", {y, IntsOf(node, shape)}));
  }
  Rename(node, y);
  return {};
}

Result<void> Walk::LpNorm(const OnnxNode& node) {
  OnnxAttribute over;
  over.name = "axes";
  over.ints = {node.Int("axis", -1)};
  TESSERA_TRY(const std::string norm,
              Part(node, node.Int("p", 2) == 1 ? "ReduceL1" : "ReduceL2",
                   {node.inputs[0]}, {over}));
  TESSERA_TRY(const std::string y, Part(node, "Div", {node.inputs[0], norm}));
  Rename(node, y);
  return {};
}

Result<void> Walk::ReduceMore(const OnnxNode& node) {
  std::string x = node.inputs[0];
  std::string reduction = "ReduceSum";
  if (node.op == "ReduceL1") {
    TESSERA_TRY(x, Part(node, "Abs", {x}));
  } else if (node.op == "ReduceL2" || node.op == "ReduceSumSquare") {
    TESSERA_TRY(x, Part(node, "Mul", {x, x}));
  } else if (node.op == "ReduceLogSumExp") {
    TESSERA_TRY(x, Part(node, "Exp", {x}));
  } else if (node.op == "ReduceMin") {
    TESSERA_TRY(x, Part(node, "Neg", {x}));
    reduction = "ReduceMax";
  }
  std::vector<std::string> inputs = node.inputs;
  inputs[0] = x;
  TESSERA_TRY(std::string y,
              Part(node, reduction, std::move(inputs), node.attributes));
  if (node.op == "ReduceL2") {
    TESSERA_TRY(y, Part(node, "Sqrt", {y}));
  } else if (node.op == "ReduceLogSum" || node.op == "ReduceLogSumExp") {
    TESSERA_TRY(y, Part(node, "Log", {y}));
  } else if (node.op == "ReduceMin") {
    TESSERA_TRY(y, Part(node, "Neg", {y}));
  }
  Rename(node, y);
  return {};
}

}  // namespace tessera::onnx
