#include "planner/io/onnx_value.h"

#include <algorithm>
#include <cmath>

namespace tessera::onnx {

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
  return f->form ? FactorIn(*f->form) : std::nullopt;
}

std::shared_ptr<const Expression> MakeExpression(std::string op,
                                                 std::vector<Term> terms,
                                                 std::string node) {
  auto made = std::make_shared<Expression>();
  std::vector<Form> forms;
  for (const Term& term : terms) {
    if (term.of_x) made->depth = std::max(made->depth, term.of_x->depth + 1);
    if (term.number) {
      forms.push_back(FormOfNumber(*term.number));
    } else if (term.of_x == nullptr) {
      forms.push_back(FormOfX());
    } else if (term.of_x->form) {
      forms.push_back(*term.of_x->form);
    }
  }
  if (forms.size() == terms.size()) made->form = FormOf(op, forms);
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
