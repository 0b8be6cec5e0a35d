// Nodes that stand for several.

#include "planner/io/onnx_walk.h"

namespace tessera::onnx {

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

// m + log(sum(exp(x - m))), m the largest: exponentials are at most 1.
Result<void> Walk::ReduceLogSumExp(const OnnxNode& node) {
  std::vector<OnnxAttribute> kept = node.attributes;
  std::erase_if(kept, [](const OnnxAttribute& attribute) {
    return attribute.name == "keepdims";
  });
  const auto reduced = [&](const std::string& op, const std::string& x,
                           const std::vector<OnnxAttribute>& attributes) {
    std::vector<std::string> inputs = node.inputs;
    inputs[0] = x;
    return Part(node, op, std::move(inputs), attributes);
  };
  const std::string& x = node.inputs[0];
  TESSERA_TRY(const std::string beside, reduced("ReduceMax", x, kept));
  TESSERA_TRY(std::string y, Part(node, "Sub", {x, beside}));
  TESSERA_TRY(y, Part(node, "Exp", {y}));
  TESSERA_TRY(y, reduced("ReduceSum", y, node.attributes));
  TESSERA_TRY(y, Part(node, "Log", {y}));
  std::string most = beside;
  if (node.Int("keepdims", 1) == 0) {
    TESSERA_TRY(most, reduced("ReduceMax", x, node.attributes));
  }
  TESSERA_TRY(y, Part(node, "Add", {y, most}));
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
  } else if (node.op == "ReduceLogSum") {
    TESSERA_TRY(y, Part(node, "Log", {y}));
  } else if (node.op == "ReduceMin") {
    TESSERA_TRY(y, Part(node, "Neg", {y}));
  }
  Rename(node, y);
  return {};
}

}  // namespace tessera::onnx
