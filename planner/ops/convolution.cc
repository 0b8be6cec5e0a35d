// Convolution in two dimensions, with padding, strides, dilation and groups:
//   y[b,G,N,y,x] = sum over K, k, l of w[G,N,K,k,l]
//                    x[b,G,K, y*stride - pad + k*dilation, (the same of x, l)]
//                  + bias[G,N],
// where what lies outside of the image is zero, and G, N and K (groups, and
// channels in a group) are runs of factors: "bch!w!,ock!l!+o->boyx",
// "bgchw,gnckl->bgnyx". Letters of the image are h and w, of the window k and
// l, of the result y and x; the former four cannot be split. The node gives the
// rule. How much padding there is behind the image follows from the result's
// size, an attribute. Where y or x is split, so is the image, with halos. A
// signal has no h, k and y (planner/ops/window.h).
//
// conv_transpose2d makes the image that has windows at the places it reads:
//   x[b,G,K, y*stride - pad + k*dilation, (the same of x, l)]
//     = the sum of w[G,N,K,k,l] y[b,G,N,y,x] over all N, k, l, y and x of such
//       a pixel,
// which is conv2d's gradient, and has conv2d as its own; the image's size is an
// attribute. A bias is added behind it (broadcast_add).
//
// As a product of matrices (Chetlur et al. 2014, section 3) it has b*y*x rows,
// N columns and a depth of K*k*l, for each group.

#include <algorithm>
#include <string>

#include "planner/ir/op.h"
#include "planner/ops/window.h"

namespace tessera {
namespace {

bool IsWhole(const IndexRule& rule, char letter) {
  const int f = rule.FactorOf(letter);
  return f < 0 || !rule.factors[static_cast<size_t>(f)].splittable;
}

// Whether the image is (b, G, K, h, w), the weight (G, N, K, k, l), the places
// (b, G, N, y, x) and the bias, if any, an additive (G, N).
bool IsConvolution(const IndexRule& rule, const Indices& image,
                   const Indices& weight, const Indices& places,
                   const Indices* bias) {
  const bool tall = rule.FactorOf('h') >= 0;
  if (!EndsIn(rule, image, tall ? 'h' : 0, 'w') ||
      !EndsIn(rule, weight, tall ? 'k' : 0, 'l') ||
      !EndsIn(rule, places, tall ? 'y' : 0, 'x') ||
      !std::ranges::all_of(std::string_view("hwkl"), [&](char letter) {
        return IsWhole(rule, letter);
      })) {
    return false;
  }
  const auto without_last = [&](const Indices& indices) {
    return Indices(indices.begin(), indices.end() - (tall ? 2 : 1));
  };
  const Indices x = without_last(image);
  const Indices y = without_last(places);
  const Indices w = without_last(weight);
  Indices groups;
  Indices in;
  Indices out;
  for (uint8_t f : w) {
    const bool read = Holds(x, f);
    const bool made = Holds(y, f);
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
         is(y, {sample, groups, out}) &&
         (bias == nullptr || is(*bias, {groups, out}));
}

bool IsForward(const IndexRule& rule) {
  const size_t operands = rule.operands.size();
  if ((operands != 2 && operands != 3) || rule.results.size() != 1 ||
      rule.terms[1] != rule.terms[0] ||
      (operands == 3 && rule.terms[2] == rule.terms[0])) {
    return false;
  }
  return IsConvolution(rule, rule.operands[0], rule.operands[1],
                       rule.results[0],
                       operands == 3 ? &rule.operands[2] : nullptr);
}

bool IsTransposed(const IndexRule& rule) {
  return rule.operands.size() == 2 && rule.results.size() == 1 &&
         rule.terms[1] == rule.terms[0] &&
         IsConvolution(rule, rule.results[0], rule.operands[1],
                       rule.operands[0], nullptr);
}

std::string ConvolutionProblem(const OpCall& call) {
  const bool tall = call.rule->FactorOf('k') >= 0;
  std::string problem =
      WindowProblem(call, Direction::kHeight, tall ? call.Extent('k') : 1);
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
                "'bch!w!,ock!l!+o->boyx', of signals 'bcw!,ocl!+o->box'",
                IsForward},
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
      {.name = "conv_transpose2d",
       .summary = "the image that a convolution reads, of what it makes "
                  "(fractionally strided, deconvolution)",
       .form = {"'b G N yx,G N K k!l!->b G K h!w!' of runs of factors, such as "
                "'bnyx,nck!l!->bch!w!', of signals 'bnx,ncl!->bcw!'",
                IsTransposed},
       .op_class = OpClass::kMatmul,
       .adjoints = {{"conv2d", "dy0,x1->dx0"}, {"conv2d_dw", "x0,dy0->dx1"}},
       .flops = ConvolutionFlops,
       .attributes = {{.name = "dilation_height", .least = 1, .whole = true},
                      {.name = "dilation_width", .least = 1, .whole = true},
                      {.name = "image_height", .least = 1, .whole = true},
                      {.name = "image_width", .least = 1, .whole = true},
                      {.name = "pad_left", .least = 0, .whole = true},
                      {.name = "pad_top", .least = 0, .whole = true},
                      {.name = "stride_height", .least = 1, .whole = true},
                      {.name = "stride_width", .least = 1, .whole = true}},
       .problem = ConvolutionProblem,
       .sizes = {{'h', "image_height"}, {'w', "image_width"}},
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
       .linear = {{0}, {1}},
       .accumulation = Accumulation::kAll},
      {.name = "conv2d_db",
       .summary = "gradient of conv2d's bias: sums of dy",
       .flops = FlopsPerPoint<1>,
       .linear = {{0}},
       .accumulation = Accumulation::kAll},
  };
}

}  // namespace tessera
