#include "planner/io/onnx_form.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <utility>

#include "planner/io/onnx_fold.h"

namespace tessera::onnx {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Functions of more factors are no operator's.
constexpr size_t kMostFactors = 48;
// Products of longer sums are not multiplied out.
constexpr size_t kMostProducts = 16;
// Of numbers that were rounded to fp32 a few times, such as 1 / 6.
constexpr double kRounding = 2.5e-7;
// What is left where numbers of fp64 should cancel.
constexpr double kCancelled = 1e-12;

using Made = std::optional<Form>;

// ---- Equality ---------------------------------------------------------------

bool Same(const Form& a, const Form& b, double tolerance);

bool Same(double a, double b, double tolerance) {
  const double size = std::max(std::abs(a), std::abs(b));
  return a == b || (std::isfinite(size) && std::abs(a - b) <= tolerance * size);
}

bool Same(const Factor& a, const Factor& b, double tolerance) {
  return &a == &b ||
         (a.op == b.op &&
          std::ranges::equal(a.of, b.of, [&](const Form& x, const Form& y) {
            return Same(x, y, tolerance);
          }));
}

// Whether each of `a` is one of `b`, and another one each time.
template <typename T, typename F>
bool AreSame(const std::vector<T>& a, const std::vector<T>& b, F same) {
  if (a.size() != b.size()) return false;
  std::vector<bool> used(b.size(), false);
  return std::ranges::all_of(a, [&](const T& x) {
    for (size_t i = 0; i < b.size(); ++i) {
      if (used[i] || !same(x, b[i])) continue;
      used[i] = true;
      return true;
    }
    return false;
  });
}

bool SameFactors(const Product& a, const Product& b, double tolerance) {
  return AreSame(a.of, b.of, [&](const auto& x, const auto& y) {
    return Same(*x, *y, tolerance);
  });
}

bool Same(const Form& a, const Form& b, double tolerance) {
  return AreSame(a.products, b.products,
                 [&](const Product& x, const Product& y) {
                   return Same(x.number, y.number, tolerance) &&
                          SameFactors(x, y, tolerance);
                 });
}

// ---- Sums and products ------------------------------------------------------

size_t SizeOf(const Form& form) {
  size_t size = 0;
  for (const Product& product : form.products) {
    ++size;
    for (const auto& factor : product.of) size += factor->size;
  }
  return size;
}

Made Checked(Form form) {
  const bool finite = std::ranges::all_of(
      form.products, [](const Product& p) { return std::isfinite(p.number); });
  if (!finite || SizeOf(form) > kMostFactors) return std::nullopt;
  return form;
}

void AddTo(Form& sum, Product product) {
  if (product.number == 0) return;
  const auto like = std::ranges::find_if(
      sum.products,
      [&](const Product& other) { return SameFactors(other, product, 0); });
  if (like == sum.products.end()) {
    sum.products.push_back(std::move(product));
    return;
  }
  const double size = std::abs(like->number) + std::abs(product.number);
  like->number += product.number;
  if (std::abs(like->number) <= kCancelled * size) sum.products.erase(like);
}

Form Sum(Form a, const Form& b) {
  for (const Product& product : b.products) AddTo(a, product);
  return a;
}

// An operator that is not taken apart.
Form Whole(std::string_view op, std::vector<Form> of) {
  auto factor = std::make_shared<Factor>();
  factor->op = op;
  for (const Form& form : of) factor->size += SizeOf(form);
  factor->of = std::move(of);
  return {{{1, {std::move(factor)}}}};
}

Form Times(const Form& a, const Form& b) {
  if (a.products.size() * b.products.size() > kMostProducts) {
    return Whole("Mul", {a, b});
  }
  Form made;
  for (const Product& x : a.products) {
    for (const Product& y : b.products) {
      Product both = {x.number * y.number, x.of};
      both.of.insert(both.of.end(), y.of.begin(), y.of.end());
      AddTo(made, std::move(both));
    }
  }
  return made;
}

Form Times(const Form& a, double number) {
  return Times(a, FormOfNumber(number));
}

// ---- Operators that are taken apart -----------------------------------------

// number * of + offset
struct Affine {
  double number = 1;
  Form of;
  double offset = 0;
};
// Of a function of one product; others are as they are.
Affine AffineOf(const Form& form) {
  Affine affine;
  affine.of = form;
  const auto constant = std::ranges::find_if(
      affine.of.products, [](const Product& p) { return p.of.empty(); });
  if (constant != affine.of.products.end()) {
    affine.offset = constant->number;
    affine.of.products.erase(constant);
  }
  if (affine.of.products.size() != 1) return {1, form, 0};
  affine.number = std::exchange(affine.of.products[0].number, 1);
  return affine;
}

// The larger of a function and a number, or the smaller: of c p + b within
// bounds what p is within others.
Form Bounded(const Form& form, double bound, bool larger) {
  if (bound == (larger ? -kInfinity : kInfinity)) return form;
  const Affine x = AffineOf(form);
  const double at = (bound - x.offset) / x.number;
  if (x.number < 0) larger = !larger;
  Form of = x.of;
  double least = -kInfinity;
  double most = kInfinity;
  // Bounds of what is within bounds are one pair.
  const std::vector<Product>& products = x.of.products;
  if (products.size() == 1 && products[0].of.size() == 1 &&
      products[0].of[0]->op == "Clip") {
    const Factor& clip = *products[0].of[0];
    least = NumberIn(clip.of[1]).value();
    most = NumberIn(clip.of[2]).value();
    of = Form(clip.of[0]);
  }
  if (larger ? at >= most : at <= least) return FormOfNumber(bound);
  (larger ? least : most) = larger ? std::max(least, at) : std::min(most, at);
  const Form clip =
      Whole("Clip", {std::move(of), FormOfNumber(least), FormOfNumber(most)});
  return Sum(Times(clip, x.number), FormOfNumber(x.offset));
}

Form Sigmoid(const Form& form) {
  return Whole("Sigmoid", {form});
}

// Of c p is that of p divided by c; of 1 + exp(p) it is the sigmoid of -p.
Form Reciprocal(const Form& form) {
  const std::vector<Product>& products = form.products;
  if (products.size() == 1) {
    Form of = form;
    const double number = std::exchange(of.products[0].number, 1);
    return Times(Whole("Reciprocal", {std::move(of)}), 1 / number);
  }
  if (products.size() == 2 && products[0].number == products[1].number) {
    for (size_t i = 0; i < 2; ++i) {
      const Product& e = products[i];
      if (!products[1 - i].of.empty() || e.of.size() != 1 ||
          e.of[0]->op != "Exp") {
        continue;
      }
      return Times(Sigmoid(Times(e.of[0]->of[0], -1)), 1 / e.number);
    }
  }
  return Whole("Reciprocal", {form});
}

// Of an exponential it is what that is of.
Form Log(const Form& form) {
  if (form.products.size() == 1) {
    const Product& product = form.products[0];
    if (product.number == 1 && product.of.size() == 1 &&
        product.of[0]->op == "Exp") {
      return product.of[0]->of[0];
    }
  }
  return Whole("Log", {form});
}

// x to a power: a product where that is a small whole one.
Form Power(const Form& form, double exponent) {
  constexpr double kMostFactorsOfPower = 4;
  if (exponent != std::floor(exponent) || exponent < 0 ||
      exponent > kMostFactorsOfPower) {
    return Whole("Pow", {form, FormOfNumber(exponent)});
  }
  Form made = FormOfNumber(1);
  for (int i = 0; i < static_cast<int>(exponent); ++i) made = Times(made, form);
  return made;
}

// 2 sqrt(2/pi) (x + 0.044715 x^3)
Form CubicOf(const Form& x) {
  return Times(Sum(x, Times(Power(x, 3), 0.044715)), 1.5957691216057308);
}

// x / 2 (1 + tanh(cubic / 2))
Form Gelu(const Form& x) {
  const Form tanh = Whole("Tanh", {Times(CubicOf(x), 0.5)});
  return Times(Times(x, 0.5), Sum(tanh, FormOfNumber(1)));
}

// x / 2 (1 + erf(x / sqrt 2)).
Form GeluErf(const Form& x) {
  const Form erf = Whole("Erf", {Times(x, 0.7071067811865476)});
  return Times(Times(x, 0.5), Sum(erf, FormOfNumber(1)));
}

// Of operands of which one is no number.
Made Applied(std::string_view op, std::span<const Form> of) {
  const Form& a = of[0];
  const Form& b = of.back();
  const bool two = of.size() == 2;
  const std::optional<double> number = NumberIn(a) ? NumberIn(a)
                                       : two       ? NumberIn(b)
                                                   : std::nullopt;
  if (two && (op == "Max" || op == "Min") && number) {
    return Bounded(NumberIn(a) ? b : a, *number, op == "Max");
  }
  if (number && !std::isfinite(*number)) return std::nullopt;
  if (op == "Add") return Sum(a, b);
  if (op == "Sub") return Sum(a, Times(b, -1));
  if (op == "Mul") return Times(a, b);
  if (op == "Neg") return Times(a, -1);
  if (op == "Div") {
    // Nothing of 0 is finite.
    if (b.products.empty()) return std::nullopt;
    if (const auto by = NumberIn(b)) return Times(a, 1 / *by);
    return Times(a, Reciprocal(b));
  }
  if (op == "Reciprocal") return Reciprocal(a);
  if (op == "Pow" && NumberIn(b)) return Power(a, *number);
  if (op == "Relu") return Bounded(a, 0, /*larger=*/true);
  if (op == "Sigmoid") return Sigmoid(a);
  if (op == "Log") return Log(a);
  if (op == ":gelu") return Gelu(a);
  if (op == ":gelu_erf") return GeluErf(a);
  if (op == "Less") return Whole("Greater", {b, a});
  if (op == "LessOrEqual") return Whole("GreaterOrEqual", {b, a});
  return Whole(op, {of.begin(), of.end()});
}

// ---- Operators --------------------------------------------------------------

struct Function {
  std::string_view op;
  Form form;
  double tolerance = 0;  // of its numbers
};

// Each in all ways that are told apart.
std::vector<Function> MadeFunctions() {
  const auto of = [](std::string_view op, std::vector<Form> operands) {
    return FormOf(op, operands).value();
  };
  const Form x = FormOfX();
  const Form zero = FormOfNumber(0);
  const Form one = FormOfNumber(1);
  const Form relu = of("Relu", {x});
  const Form hard_sigmoid =
      of("Min",
         {of("Max", {Sum(Times(x, 1.0 / 6), FormOfNumber(0.5)), zero}), one});
  const Form of_size = of("Exp", {Times(of("Abs", {x}), -1)});
  return {
      {"relu", relu},
      {"relu", Times(x, of("Greater", {x, zero}))},
      {"relu", Times(x, of("GreaterOrEqual", {x, zero}))},
      {"gelu", Gelu(x), kRounding},
      {"gelu", Times(x, Sigmoid(CubicOf(x))), kRounding},
      {"gelu_erf", GeluErf(x), kRounding},
      {"silu", Times(x, Sigmoid(x))},
      {"sigmoid", Sigmoid(x)},
      {"hard_sigmoid", hard_sigmoid, kRounding},
      {"hard_swish", Times(x, hard_sigmoid), kRounding},
      {"tanh", of("Tanh", {x})},
      {"softplus", of("Softplus", {x})},
      {"softplus", of("Log", {Sum(of("Exp", {x}), one)})},
      {"softplus", Sum(relu, of("Log", {Sum(of_size, one)}))},
  };
}

}  // namespace

Form FormOfX() {
  static const auto x = std::make_shared<const Factor>();
  return {{{1, {x}}}};
}

Form FormOfNumber(double number) {
  if (number == 0) return {};
  return {{{number, {}}}};
}

std::optional<Form> FormOf(std::string_view op,
                           std::span<const Form> operands) {
  const auto numbers = [](const Form& form) {
    return NumberIn(form).has_value();
  };
  if (!std::ranges::all_of(operands, numbers)) {
    Made made = Applied(op, operands);
    return made ? Checked(*std::move(made)) : std::nullopt;
  }
  const OnnxFunction f = OnnxFunctionOf(op, /*is_float=*/true);
  if (f == nullptr) return std::nullopt;
  const double y = operands.size() > 1 ? *NumberIn(operands[1]) : 0;
  return Checked(FormOfNumber(f(*NumberIn(operands[0]), y)));
}

std::optional<double> NumberIn(const Form& form) {
  if (form.products.empty()) return 0;
  const bool number = form.products.size() == 1 && form.products[0].of.empty();
  return number ? std::optional(form.products[0].number) : std::nullopt;
}

std::optional<double> FactorIn(const Form& form) {
  if (form.products.empty()) return 0;
  const Product& product = form.products[0];
  const bool of_x = form.products.size() == 1 && product.of.size() == 1 &&
                    product.of[0]->op.empty();
  return of_x ? std::optional(product.number) : std::nullopt;
}

std::string_view FunctionOf(const Form& form) {
  static const std::vector<Function> functions = MadeFunctions();
  for (const Function& function : functions) {
    if (Same(form, function.form, function.tolerance)) return function.op;
  }
  return "";
}

}  // namespace tessera::onnx
