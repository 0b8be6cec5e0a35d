#include "planner/io/onnx_value.h"

#include <algorithm>

namespace tessera::onnx {

namespace {

double Sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}

double HardSigmoid(double x) {
  return std::clamp(x / 6 + 0.5, 0.0, 1.0);
}

constexpr Function kFunctions[] = {
    {"relu", [](double x) { return std::max(x, 0.0); }},
    {"gelu",
     [](double x) {
       return x * Sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x));
     }},
    {"gelu_erf",
     [](double x) { return x * 0.5 * (1 + std::erf(x * 0.7071067811865476)); }},
    {"silu", [](double x) { return x * Sigmoid(x); }},
    {"sigmoid", Sigmoid},
    {"hard_sigmoid", HardSigmoid},
    {"hard_swish", [](double x) { return x * HardSigmoid(x); }},
    {"tanh", [](double x) { return std::tanh(x); }},
    {"softplus",
     [](double x) {
       return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
     }},
};

}  // namespace

std::span<const Function> Functions() {
  return kFunctions;
}

Mask Both(const Mask& a, const Mask& b) {
  if (!a.causal || !b.causal) return a.causal ? a : b;
  const bool shorter = b.window > 0 && (a.window == 0 || b.window < a.window);
  return shorter ? b : a;
}

int64_t Extent(const Dim& dim) {
  int64_t extent = 1;
  for (const Atom& atom : dim) extent *= atom.extent;
  return extent;
}

Value ConstantValue(OnnxConstant constant) {
  Value value;
  value.kind = Value::Kind::kConstant;
  value.constant = std::move(constant);
  return value;
}

Value LargeValue(std::optional<OnnxLarge> large) {
  Value value;
  value.kind = Value::Kind::kLarge;
  if (!large) return value;
  double elements = 1;
  for (int64_t extent : large->shape) {
    elements *= extent < 0 ? HUGE_VAL : Number(std::max<int64_t>(extent, 1));
  }
  if (!(elements <= kMostElements)) return value;
  if (auto computed = ComputedOnnx(*large)) {
    return ConstantValue(*std::move(computed));
  }
  value.constant.shape = large->shape;
  value.constant.is_float = large->is_float;
  value.large = std::move(large);
  return value;
}

Value ActivationValue(Activation x) {
  Value value;
  value.kind = Value::Kind::kActivation;
  value.x = std::move(x);
  return value;
}

std::optional<double> FactorOf(const Expression* f) {
  if (f == nullptr) return 1;
  if (f->bends_beyond) return std::nullopt;
  const double factor = f->samples[0] / kPoints[0];
  for (size_t i = 0; i < std::size(kPoints); ++i) {
    // By the size of c x: c may be as small as it likes.
    const double expected = factor * kPoints[i];
    if (!(std::abs(f->samples[i] - expected) <=
          kSameFunction * std::abs(expected))) {
      return std::nullopt;
    }
  }
  return factor == 0 ? 0 : factor;  // -0 is 0 in a graph file
}

std::shared_ptr<const Expression> MakeExpression(std::string op,
                                                 std::vector<Term> terms,
                                                 std::string node) {
  auto made = std::make_shared<Expression>();
  const bool bends = op == "Max" || op == "Min";
  const bool moves = op == "Add" || op == "Sub";
  const bool jumps = !ComparisonOf(op).empty();
  for (const Term& term : terms) {
    if (term.of_x) {
      made->depth = std::max(made->depth, term.of_x->depth + 1);
      made->bends_beyond |= term.of_x->bends_beyond;
    }
    if (!term.number) continue;
    const double number = std::abs(*term.number);
    // A norm's epsilon is all there is where squares are small.
    const bool small = number > 0 && number < kNear;
    made->bends_beyond |= (bends && number > kReach) ||
                          ((bends || moves) && small) || (jumps && number > 0);
  }
  for (size_t i = 0; i < std::size(kPoints); ++i) {
    const auto at = [&](size_t t) {
      if (t >= terms.size()) return 0.0;
      const Term& term = terms[t];
      if (term.number) return *term.number;
      return term.of_x ? term.of_x->samples[i] : kPoints[i];
    };
    made->samples.push_back(*ApplyOnnx(op, at(0), at(1), true));
  }
  made->op = std::move(op);
  made->terms = std::move(terms);
  made->node = std::move(node);
  return made;
}

void ReplaceIn(std::vector<Atom>& in, const Atom& atom, const Dim& parts) {
  const auto at = std::ranges::find(in, atom.id, &Atom::id);
  if (at == in.end()) return;
  const auto begin = in.erase(at);
  in.insert(begin, parts.begin(), parts.end());
}

Dim Wide(const Dim& dim) {
  Dim wide;
  for (const Atom& atom : dim) {
    if (atom.extent > 1) wide.push_back(atom);
  }
  return wide;
}

bool Fit(Atoms& atoms, const Dim& a, const Dim& b) {
  const Dim x = Wide(a);
  const Dim y = Wide(b);
  if (ExtentsOf(x) == ExtentsOf(y)) return true;
  if (Extent(x) != Extent(y)) return false;
  // The first that differ; those behind them will be met again.
  const auto [of_x, of_y] =
      std::ranges::mismatch(x, y, {}, &Atom::extent, &Atom::extent);
  const bool first = of_x->extent > of_y->extent;
  const Atom& whole = first ? *of_x : *of_y;
  const int64_t outer = first ? of_y->extent : of_x->extent;
  if (x.size() == 1 || y.size() == 1) {
    atoms.Split(whole, outer);
  } else {
    atoms.SplitIfAlone(whole, outer);
  }
  return false;
}

bool HasSamples(std::span<const Atom> atoms) {
  return std::ranges::count(atoms, 'b', &Atom::letter) > 0;
}

Shape ExtentsOf(std::span<const Atom> atoms) {
  Shape shape;
  for (const Atom& atom : atoms) shape.push_back(atom.extent);
  return shape;
}

std::vector<Atom> Flatten(std::span<const Dim> dims) {
  std::vector<Atom> atoms;
  for (const Dim& dim : dims) atoms.insert(atoms.end(), dim.begin(), dim.end());
  return atoms;
}

bool SameAtoms(std::span<const Atom> a, std::span<const Atom> b) {
  return std::ranges::equal(a, b, {}, &Atom::id, &Atom::id);
}

std::string TextOf(const Shape& shape) {
  std::string text = "[";
  for (int64_t extent : shape) {
    text += (text.size() > 1 ? "," : "") + std::to_string(extent);
  }
  return text + "]";
}

double Number(int64_t value) {
  return static_cast<double>(value);
}
}  // namespace tessera::onnx
