// Large constants of ONNX files have the elements that small ones have which
// are computed at once.

#include "planner/io/onnx_large.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

namespace tessera {
namespace {

OnnxConstant Counted(const Shape& shape, double first = 0) {
  OnnxConstant constant = {shape, {}, true};
  constant.values.resize(static_cast<size_t>(*OnnxElements(shape)));
  std::iota(constant.values.begin(), constant.values.end(), first);
  return constant;
}

OnnxConstant Ints(const std::vector<int64_t>& values) {
  return {{std::ssize(values)}, {values.begin(), values.end()}, false};
}

OnnxAttribute Attribute(const std::string& name, int64_t value) {
  OnnxAttribute attribute;
  attribute.name = name;
  attribute.i = value;
  return attribute;
}

struct Case {
  std::string op;
  std::vector<OnnxConstant> operands;
  std::vector<OnnxAttribute> attributes = {};
};

TEST(OnnxLarge, ElementsAreThoseOfSmallConstants) {
  const OnnxConstant ones = {{3, 4}, std::vector<double>(12, 1), true};
  const OnnxConstant one = {{}, {1}, false};
  const Case cases[] = {
      {"Add", {Counted({3, 1, 2}), Counted({4, 2}, 5)}},
      {"LessOrEqual", {Counted({1, 4}), Counted({4, 1})}},
      {"Mod", {Counted({2, 5}), {{}, {3}, false}}},
      {"Div", {Ints({7, 8, 9}), Ints({2, 3, 0})}},
      {"Neg", {Counted({2, 3})}},
      {"Where", {Counted({3, 1}), Counted({2, 1, 4}), Counted({4}, -9)}},
      {"Expand", {Counted({2, 1, 3}), Ints({4, 2, 5, 1})}},
      {"ConstantOfShape", {Ints({2, 3})}},
      {"Slice",
       {Counted({5, 6}), Ints({1, 5}), Ints({4, 0}), Ints({0, 1}),
        Ints({2, -2})}},
      {"Slice", {Counted({5, 6}), Ints({-1}), Ints({99}), Ints({1})}},
      {"Trilu", {Counted({2, 3, 4}, 1), {{}, {1}, false}}},
      {"Trilu", {Counted({4, 4}, 1)}, {Attribute("upper", 0)}},
      {"Cast", {{{3}, {1.5, 0, -2.5}, true}}, {Attribute("to", kOnnxBool)}},
      {"Cast", {{{3}, {1.5, 0, -2.5}, true}}, {Attribute("to", 7)}},
      {"Identity", {Counted({2, 2})}},
      {"Gather", {ones, Counted({2, 2})}, {Attribute("axis", 1)}},
      {"GatherND", {ones, {{2, 1}, {1, 0}, false}}},
      {"GatherElements", {ones, {{2, 4}, std::vector<double>(8, 2), false}}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.op);
    OnnxNode node;
    node.op = c.op;
    node.attributes = c.attributes;
    std::vector<const OnnxConstant*> small;
    std::vector<OnnxLarge> wrapped;
    for (const OnnxConstant& operand : c.operands) {
      small.push_back(&operand);
      wrapped.push_back(LargeOnnx(operand));
    }
    std::vector<const OnnxLarge*> large;
    for (const OnnxLarge& operand : wrapped) large.push_back(&operand);
    const auto expected = FoldOnnx(node, small);
    ASSERT_TRUE(expected.has_value() && *expected);
    const auto folded = FoldLargeOnnx(node, large);
    ASSERT_TRUE(folded.has_value());
    const auto found = ComputedOnnx(*folded);
    ASSERT_TRUE(found.has_value());
    EXPECT_EQ(found->shape, (*expected)->shape);
    EXPECT_EQ(found->values, (*expected)->values);
    EXPECT_EQ(found->is_float, (*expected)->is_float);
  }
}

TEST(OnnxLarge, DimensionsAreMovedAndOnesLeftOut) {
  const OnnxConstant x = Counted({2, 1, 3});
  const size_t order[] = {2, 0, 1};
  const OnnxLarge turned = TransposeLargeOnnx(LargeOnnx(x), order);
  EXPECT_EQ(ComputedOnnx(turned)->values, TransposeOnnx(x, order).values);
  const OnnxLarge flat = ReshapeLargeOnnx(turned, {1, 3, 2});
  EXPECT_EQ(ComputedOnnx(flat)->values, TransposeOnnx(x, order).values);
  // Elements of others would have to be counted.
  EXPECT_EQ(ReshapeLargeOnnx(turned, {6}).formula, nullptr);
  EXPECT_EQ(*UniformOnnx(ReshapeLargeOnnx(LargeOnnx({2, 3}, 4, true), {6})), 4);
}

// 2^40 elements, of which each is computed alone.
TEST(OnnxLarge, RowsOfWhatIsTooLargeToBeComputed) {
  constexpr int64_t kMany = 1 << 20;
  OnnxNode node;
  node.op = "LessOrEqual";
  const OnnxLarge columns = LargeOnnx(Counted({1, kMany}));
  const OnnxLarge rows = LargeOnnx(Counted({kMany, 1}));
  const OnnxLarge* const operands[] = {&columns, &rows};
  const auto mask = FoldLargeOnnx(node, operands);
  ASSERT_TRUE(mask.has_value());
  EXPECT_EQ(mask->shape, (Shape{kMany, kMany}));
  EXPECT_FALSE(ComputedOnnx(*mask).has_value());
  EXPECT_TRUE(DependsOn(*mask->formula, 0));
  std::vector<double> row;
  RowOf(*mask, std::vector<int64_t>{5}, row);
  EXPECT_EQ(std::accumulate(row.begin(), row.end(), 0.0), 6);
  EXPECT_TRUE(
      SameFormula(*mask->formula, *FoldLargeOnnx(node, operands)->formula));
  const OnnxLarge* const swapped[] = {&rows, &columns};
  EXPECT_FALSE(
      SameFormula(*mask->formula, *FoldLargeOnnx(node, swapped)->formula));
}

// A formula that doubles with every node would be computed for ever.
TEST(OnnxLarge, FormulasOfManyNodesAreNotKept) {
  OnnxNode node;
  node.op = "Add";
  OnnxLarge x = LargeOnnx(Counted({4}));
  for (int i = 0; i < 100; ++i) {
    const OnnxLarge* const operands[] = {&x, &x};
    x = *FoldLargeOnnx(node, operands);
  }
  EXPECT_EQ(x.shape, Shape{4});
  EXPECT_EQ(x.formula, nullptr);
}

}  // namespace
}  // namespace tessera
