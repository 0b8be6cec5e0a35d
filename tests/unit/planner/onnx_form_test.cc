#include "planner/io/onnx_form.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

namespace tessera::onnx {
namespace {

Form Of(std::string_view op, std::vector<Form> operands) {
  const auto form = FormOf(op, operands);
  EXPECT_TRUE(form.has_value()) << op;
  return form ? *form : Form();
}
Form X() {
  return FormOfX();
}
// As files have it.
Form N(double number) {
  return FormOfNumber(static_cast<double>(static_cast<float>(number)));
}
Form Clip(const Form& x, double least, double most) {
  return Of("Min", {Of("Max", {x, N(least)}), N(most)});
}

TEST(OnnxForm, ProductsWithNumbersAreOne) {
  EXPECT_EQ(FactorIn(X()), 1);
  EXPECT_EQ(FactorIn(Of("Div", {Of("Mul", {N(6), X()}), N(4)})), 1.5);
  EXPECT_EQ(FactorIn(Of("Sub", {X(), Of("Neg", {X()})})), 2);
  EXPECT_EQ(FactorIn(Of("Mul", {X(), N(0)})), 0);
  EXPECT_EQ(FactorIn(Of("Sub", {Of("Add", {X(), N(3)}), N(3)})), 1);
  EXPECT_EQ(FactorIn(Of("Max", {X(), N(-HUGE_VAL)})), 1);
  EXPECT_EQ(FactorIn(Of("Log", {Of("Exp", {Of("Mul", {X(), N(3)})})})), 3);
}

// However small what is added or multiplied, and however far the bound.
TEST(OnnxForm, NothingElseIsAProductWithANumber) {
  const Form f[] = {
      Of("Add", {X(), N(1e-30)}),
      Of("Mul", {X(), X()}),
      Of("Div", {Of("Mul", {X(), X()}), X()}),  // not at 0
      Of("Max", {Of("Mul", {X(), N(0.01)}), N(-1)}),
      Of("Max", {X(), N(-1e30)}),
      Of("Min", {X(), N(1e30)}),
      Of("Not", {X()}),
      Of("Equal", {X(), N(0)}),
      Of("LessOrEqual", {Of("Abs", {X()}), N(0)}),
      Of("Equal", {X(), Of("Exp", {X()})}),
      Of("Mul", {Of("Tanh", {Of("Div", {X(), N(3e4)})}), N(3e4)}),
      Of("Sub", {Of("Max", {Of("Add", {X(), N(100)}), N(5)}), N(100)})};
  for (const Form& form : f) {
    EXPECT_EQ(FactorIn(form), std::nullopt) << &form - f;
    EXPECT_EQ(FunctionOf(form), "") << &form - f;
  }
}

TEST(OnnxForm, FunctionsAreToldByTheirOperators) {
  const Form x = X();
  const Form one = N(1);
  EXPECT_EQ(FunctionOf(Of("Max", {x, N(0)})), "relu");
  EXPECT_EQ(FunctionOf(Of("Mul", {Of("Less", {N(0), x}), x})), "relu");
  EXPECT_EQ(FunctionOf(Of("Max", {Of("Relu", {x}), N(-1)})), "relu");
  EXPECT_EQ(FunctionOf(Of("Mul", {x, Of("Sigmoid", {x})})), "silu");
  const Form e = Of("Exp", {Of("Neg", {x})});
  EXPECT_EQ(FunctionOf(Of("Reciprocal", {Of("Add", {one, e})})), "sigmoid");
  EXPECT_EQ(FunctionOf(Of("Div", {x, Of("Add", {one, e})})), "silu");
  EXPECT_EQ(FunctionOf(Of("Log", {Of("Add", {one, Of("Exp", {x})})})),
            "softplus");
  const Form relu6 = Clip(Of("Add", {x, N(3)}), 0, 6);
  EXPECT_EQ(FunctionOf(Of("Div", {relu6, N(6)})), "hard_sigmoid");
  EXPECT_EQ(FunctionOf(Of("Mul", {x, Of("Mul", {relu6, N(1.0 / 6)})})),
            "hard_swish");
  const Form half = Of("Mul", {N(0.5), x});
  const Form erf = Of("Erf", {Of("Div", {x, N(std::sqrt(2))})});
  EXPECT_EQ(FunctionOf(Of("Mul", {half, Of("Add", {erf, one})})), "gelu_erf");
  const Form cube = Of("Mul", {N(0.044715), Of("Pow", {x, N(3)})});
  const Form tanh =
      Of("Tanh", {Of("Mul", {N(std::sqrt(2 / M_PI)), Of("Add", {x, cube})})});
  EXPECT_EQ(FunctionOf(Of("Mul", {half, Of("Add", {one, tanh})})), "gelu");
}

TEST(OnnxForm, FunctionsWithOtherNumbersAreOthers) {
  const Form x = X();
  EXPECT_EQ(FunctionOf(Of("Min", {Of("Sigmoid", {x}), N(1 - 1e-6)})), "");
  EXPECT_EQ(FunctionOf(Of("Sub", {Of("Tanh", {x}), N(1e-7)})), "");
  EXPECT_EQ(FunctionOf(Of("Sigmoid", {Of("Mul", {x, N(1.000001)})})), "");
  EXPECT_EQ(FunctionOf(Clip(x, 0, 1e30)), "");
  EXPECT_EQ(FunctionOf(Of("Max", {x, N(1e-30)})), "");
  const Form many = Of("Mul", {x, N(2000)});
  EXPECT_EQ(FunctionOf(Of("Div", {Of("Softplus", {many}), N(2000)})), "");
}

// Bounds bind in their order.
TEST(OnnxForm, BoundsThatMeetAreANumber) {
  EXPECT_EQ(NumberIn(Clip(X(), 3, 3)), 3);
  EXPECT_EQ(NumberIn(Clip(X(), 5, 2)), 2);
  EXPECT_EQ(NumberIn(Of("Max", {Of("Min", {X(), N(2)}), N(5)})), 5);
  const Form minus = Of("Neg", {Clip(X(), -1, 2)});
  EXPECT_EQ(NumberIn(Of("Max", {minus, N(1)})), 1);
  EXPECT_EQ(NumberIn(Of("Min", {minus, N(0)})), std::nullopt);
}

TEST(OnnxForm, NumbersThatAreNotFiniteHaveNone) {
  const std::vector<std::pair<std::string, double>> cases = {
      {"Add", HUGE_VAL}, {"Mul", NAN}, {"Div", 0}, {"Min", -HUGE_VAL}};
  for (const auto& [op, number] : cases) {
    EXPECT_FALSE(
        FormOf(op, std::vector<Form>{X(), FormOfNumber(number)}).has_value())
        << op;
  }
}

// Chains that double what they are of stay small, or end.
TEST(OnnxForm, LargeFunctionsHaveNone) {
  std::optional<Form> form = X();
  int depth = 0;
  for (; form && depth < 60; ++depth) {
    const Form more = Of("Add", {*form, N(1)});
    form = FormOf("Mul", std::vector<Form>{more, more});
  }
  EXPECT_LT(depth, 10);
}

}  // namespace
}  // namespace tessera::onnx
