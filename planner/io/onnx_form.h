#pragma once
// Normal forms of the functions that elementwise nodes make of one tensor x, by
// which an operator is recognised however an exporter spells it: sums of
// products of x and of what is not taken apart, such as exponentials, bounds
// and comparisons. Functions of one form are equal at every x where nodes give
// finite numbers; values at some points would not say so, since a bound may
// bind and a comparison jump anywhere. Functions of unlike forms may be equal,
// too. Thread-safe: functions without state.

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::onnx {

struct Factor;
struct Product {
  double number = 1;
  std::vector<std::shared_ptr<const Factor>> of;  // in any order
};
struct Form {                     // a sum
  std::vector<Product> products;  // in any order; none: 0
};
struct Factor {
  std::string op;  // ONNX's, of forms; "": x
  std::vector<Form> of;
  size_t size = 1;  // factors in it, and itself
};

Form FormOfX();
Form FormOfNumber(double number);

// What an elementwise operator makes of operands: one of ONNX's, or ":elu" and
// ":leaky_relu" with their numbers, ":gelu" and ":gelu_erf". Nothing where it
// is too large to be an operator's, or of numbers that are not finite.
std::optional<Form> FormOf(std::string_view op, std::span<const Form> operands);

// The number that a form is.
std::optional<double> NumberIn(const Form& form);

// c of c x.
std::optional<double> FactorIn(const Form& form);

// The operator of one operand that computes the form, numbers such as 1 / 6 up
// to their rounding to fp32; empty: there is none.
std::string_view FunctionOf(const Form& form);

}  // namespace tessera::onnx
