// Convolution in two dimensions, with padding, strides, dilation and groups:
//   y[b,G,N,y,x] = sum over K, k, l of w[G,N,K,k,l]
//                    x[b,G,K, y*stride - pad + k*dilation, (the same of x, l)]
//                  + bias[G,N],
// where what lies outside of the image is zero, and G, N and K (groups, and
// channels in a group) are runs of factors: "bch!w!,ock!l!+o->boyx",
// "bgchw,gnckl->bgnyx". Letters of the image are h and w, of the window k and
// l, of the result y and x; the former four cannot be split. The node gives the
// rule. How much padding there is behind the image follows from the result's
// size, an attribute. Where y or x is split, so is the image, with halos.
//
// As a product of matrices (Chetlur et al. 2014, section 3) it has b*y*x rows,
// N columns and a depth of K*k*l, for each group.

#include <string>

#include "planner/ir/op.h"
#include "planner/ops/window.h"

namespace tessera {
namespace {

// Splits off the last two indices. REQUIRES: there are two.
Indices WithoutLast2(const Indices& indices) {
  return {indices.begin(), indices.end() - 2};
}

bool EndsIn(const IndexRule& rule, const Indices& indices, char first,
            char second) {
  return indices.size() >= 3 &&
         rule.factors[indices[indices.size() - 2]].letter == first &&
         rule.factors[indices.back()].letter == second;
}

bool IsWhole(const IndexRule& rule, char letter) {
  return !rule.factors[static_cast<size_t>(rule.FactorOf(letter))].splittable;
}

// Whether x is (b, G, K, h, w), w is (G, N, K, k, l), y is (b, G, N, y, x) and
// the bias, if any, is an additive (G, N).
bool IsConvolution(const IndexRule& rule) {
  const size_t operands = rule.operands.size();
  if ((operands != 2 && operands != 3) || rule.results.size() != 1 ||
      rule.terms[1] != rule.terms[0] ||
      !EndsIn(rule, rule.operands[0], 'h', 'w') ||
      !EndsIn(rule, rule.operands[1], 'k', 'l') ||
      !EndsIn(rule, rule.results[0], 'y', 'x') || !IsWhole(rule, 'h') ||
      !IsWhole(rule, 'w') || !IsWhole(rule, 'k') || !IsWhole(rule, 'l')) {
    return false;
  }
  const Indices x = WithoutLast2(rule.operands[0]);
  const Indices w = WithoutLast2(rule.operands[1]);
  Indices groups;
  Indices in;
  Indices out;
  for (uint8_t f : w) {
    const bool read = Holds(x, f);
    const bool made = Holds(rule.results[0], f);
    if (!read && !made) return false;
    (read && made ? groups : read ? in : out).push_back(f);
  }
  const auto is = [](const Indices& indices,
                     std::initializer_list<Indices> runs) {
    Indices all;
    for (const Indices& run : runs)
      all.insert(all.end(), run.begin(), run.end());
    return indices == all;
  };
  const Indices sample = {x[0]};
  return is(x, {sample, groups, in}) && is(w, {groups, out, in}) &&
         is(WithoutLast2(rule.results[0]), {sample, groups, out}) &&
         (operands == 2 || (is(rule.operands[2], {groups, out}) &&
                            rule.terms[2] != rule.terms[0]));
}

std::string ConvolutionProblem(const OpCall& call) {
  std::string problem =
      WindowProblem(call, Direction::kHeight, call.Extent('k'));
  return problem.empty()
             ? WindowProblem(call, Direction::kWidth, call.Extent('l'))
             : problem;
}

// Of the products: padding counts as if it were there.
Flops ConvolutionFlops(const OpCall& call) {
  double products = 1;
  for (size_t f = 0; f < call.extents.size(); ++f) {
    const char letter = call.rule->factors[f].letter;
    if (letter != 'h' && letter != 'w') {
      products *= static_cast<double>(call.extents[f]);
    }
  }
  return {2 * products};
}

}  // namespace

std::vector<OpDef> ConvolutionOps() {
  return {
      {.name = "conv2d",
       .summary = "convolution in two dimensions, optional bias",
       .form = {"'b G K h!w!,G N K k!l!->b G N yx' of runs of factors, with "
                "a bias '+G N' or without, such as "
                "'bch!w!,ock!l!+o->boyx'",
                IsConvolution},
       .op_class = OpClass::kMatmul,
       .adjoints = {{"conv2d_dx", "dy0,x1->dx0"},
                    {"conv2d_dw", "dy0,x0->dx1"},
                    {"conv2d_db", "dy0->dx2"}},
       .flops = ConvolutionFlops,
       .attributes = {{.name = "dilation_height", .least = 1, .whole = true},
                      {.name = "dilation_width", .least = 1, .whole = true},
                      {.name = "out_height", .least = 1, .whole = true},
                      {.name = "out_width", .least = 1, .whole = true},
                      {.name = "pad_left", .least = 0, .whole = true},
                      {.name = "pad_top", .least = 0, .whole = true},
                      {.name = "stride_height", .least = 1, .whole = true},
                      {.name = "stride_width", .least = 1, .whole = true}},
       .problem = ConvolutionProblem,
       .sizes = {{'y', "out_height"}, {'x', "out_width"}},
       .windows = true,
       .linear = {{0}, {1}}},
      {.name = "conv2d_dx",
       .summary = "gradient of conv2d's image",
       .op_class = OpClass::kMatmul,
       .flops = ConvolutionFlops,
       .windows = true,
       .linear = {{0}, {1}}},
      {.name = "conv2d_dw",
       .summary = "gradient of conv2d's weight",
       .op_class = OpClass::kMatmul,
       .flops = ConvolutionFlops,
       .windows = true,
       .linear = {{0}, {1}}},
      {.name = "conv2d_db",
       .summary = "gradient of conv2d's bias: sums of dy",
       .flops = FlopsPerPoint<1>,
       .linear = {{0}}},
  };
}

}  // namespace tessera
